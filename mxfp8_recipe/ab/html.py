"""`report.html`: one self-contained page, readable offline and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

try:
    import jinja2
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ModuleNotFoundError('the report needs jinja2: pip install "mxfp8-recipe[ab]"', name="jinja2") from error

from mxfp8_recipe.ab import plots, tables


def render(report: dict[str, Any]) -> str:
    """The page for a report of `report.build_report`."""
    tasks = report["data"]["tasks"]
    drawn: dict[str, Any] = {
        task: {"ne": plots.windowed_ne(report, task), "calibration": plots.calibration_curve(report, task)}
        for task in tasks
    }
    quantized = any(layer["quantized"] for layer in report["same_weights"]["layers"])
    planned = tables.plan(report)
    sources = tables.shift_sources(report)
    return page(
        "report.html.j2",
        report=report,
        segments=tables.segments(report["segments"]),
        sources=sources,
        source_rows=report["shift_sources"][0]["rows"] if report["shift_sources"] else 0,
        worst=tables.worst_layers(report),
        power_sentence=tables.power_sentence(report),
        delta=tables.delta(report),
        arms={task: tables.arms(report, task) for task in tasks},
        gates=tables.gates(report),
        agreement=tables.agreement(report),
        layers=tables.layers(report),
        plan={**vars(planned), "quantized": sum(bool(x["new_type"]) for x in report["plan"])},
        plots={**drawn, "sqnr": plots.layer_sqnr(report) if quantized else ""},
    )


def render_comparison(report: dict[str, Any]) -> str:
    """The page for a report of `compare.compare`."""
    return page(
        "compare.html.j2",
        report=report,
        power_sentence=tables.power_sentence(report),
        gap=tables.comparison(report),
        both=tables.both(report),
        segments=tables.segments(report["segments"]),
        gates=tables.gates(report),
        curve=plots.two_curves(report["curves"], "Calibration curves of A and B"),
    )


def page(template: str, **values: Any) -> str:
    """A template of this package, filled in."""

    def load(name: str) -> str:
        return (resources.files("mxfp8_recipe.ab") / name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = tables.percent
    environment.filters["number"] = tables.number
    return environment.get_template(template).render(**values)


def write_html(report: dict[str, Any], path: Path, render: Callable[[dict[str, Any]], str] = render) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(render(report), encoding="utf-8")
    scratch.replace(path)
