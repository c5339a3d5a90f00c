"""The report's plots as SVG text, drawn with matplotlib's object interface: no display, no global state."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ModuleNotFoundError(
        'the report needs matplotlib: pip install "mxfp8-recipe[ab]"', name="matplotlib"
    ) from error

COLORS = {"bf16": "#1f4e79", "mxfp8": "#c55a11", "fp32": "#7f7f7f", "bf16_init_noise": "#a9a9a9"}
_STYLES = {"fp32": "--", "bf16_init_noise": ":"}


def windowed_ne(report: dict[str, Any], task: str) -> str:
    """Windowed NE against rows seen, one line an arm."""
    axes = _axes("rows seen", "windowed NE")
    for arm, tasks in report["arms"].items():
        points = [(rows, ne) for rows, ne in tasks[task]["trace"] if ne is not None]
        if points:
            axes.plot(*zip(*points), color=COLORS.get(arm), linestyle=_STYLES.get(arm, "-"), label=arm, linewidth=1.6)
    optimal = report["data"]["optimal_ne"].get(task)
    if optimal is not None:
        axes.axhline(optimal, color="#2e7d32", linewidth=1, linestyle="-.", label="Bayes-optimal")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rows, _: f"{rows / 1000:g}k"))
    return _svg(axes, f"Windowed NE of {task} per arm")


def calibration_curve(report: dict[str, Any], task: str) -> str:
    """Observed against predicted rate on held-out rows, in equal-count bins with two standard errors; log axes."""
    curves = {arm: report["arms"].get(arm, {}).get(task, {}).get("calibration_curve", []) for arm in ("bf16", "mxfp8")}
    return two_curves(curves, f"Calibration curve of {task}")


def two_curves(curves: dict[str, list[dict[str, Any]]], title: str) -> str:
    """Calibration curves by name, the reference first, as records of `CalibrationBin`."""
    axes = _axes("predicted rate", "observed rate")
    seen: list[float] = []
    for (name, points), color, marker in zip(curves.items(), (COLORS["bf16"], COLORS["mxfp8"]), "os", strict=True):
        points = [p for p in points if p["observed"] > 0 and p["predicted"] > 0]
        if not points:
            continue
        predicted, observed = [p["predicted"] for p in points], [p["observed"] for p in points]
        low = [min(2 * p["observed_error"], 0.9 * p["observed"]) for p in points]
        high = [2 * p["observed_error"] for p in points]
        axes.errorbar(
            predicted,
            observed,
            yerr=[low, high],
            fmt=f"{marker}-",
            color=color,
            label=name,
            markersize=3.5,
            linewidth=1,
            capsize=2,
        )
        seen += predicted + observed
    if seen:
        ends = [min(seen), max(seen)]
        axes.plot(ends, ends, color="#999999", linewidth=1, zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator(round_rates(*ends)))
            axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
            axis.set_minor_locator(NullLocator())
    return _svg(axes, title)


def round_rates(low: float, high: float) -> list[float]:
    """Where a logarithmic axis from low to high is marked, so that its labels stay apart: at 1, 2 and 5 of each decade,
    or at 1 and 3, or at 1, whatever comes first to three marks at least a sixth of the axis apart; else at up to four
    rates at equal distances.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for of_decade in ((1, 2, 5), (1, 3), (1,)):
        found = [rate for e in decades for m in of_decade if low <= (rate := m * 10.0**e) <= high]
        if len(found) >= 3 and min(math.log(b / a) for a, b in pairwise(found)) >= math.log(high / low) / 6:
            return found
    steps, found = [low * (high / low) ** (i / 3) for i in range(4)], []
    for digits in (2, 3, 4):
        if len(found) < 4:
            found = sorted({float(f"{rate:.{digits}g}") for rate in steps})
    return found


def layer_sqnr(report: dict[str, Any]) -> str:
    """Output SQNR of every quantized layer, in model order."""
    layers = [x for x in report["same_weights"]["layers"] if x["quantized"] and x["sqnr_db"] is not None]
    axes = _axes("output SQNR, dB", "", height=max(1.6, 0.24 * len(layers) + 0.7))
    positions = range(len(layers))
    axes.barh(positions, [x["sqnr_db"] for x in layers], color=COLORS["mxfp8"], height=0.7)
    axes.set_yticks(list(positions), [x["layer"] or "(root)" for x in layers], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return _svg(axes, "Output SQNR per quantized layer", legend=False)


def _axes(x: str, y: str, height: float = 3.2) -> Axes:
    figure = Figure(figsize=(5.2, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _svg(axes: Axes, title: str, *, legend: bool = True) -> str:
    """An <svg> element that scales to its container, named for readers who cannot see it."""
    if legend and axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    figure, buffer = axes.figure, io.StringIO()
    metadata = {"Date": None, "Creator": None, "Title": title}
    figure.savefig(buffer, format="svg", metadata=metadata)  # pyright: ignore[reportAttributeAccessIssue]
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" class="plot" ', 1)
