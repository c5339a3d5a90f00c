"""The report's tables as text cells, for the HTML page and the terminal alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Column = tuple[str, str]
"""Heading, and `text` or `number` for its alignment."""


@dataclass(frozen=True)
class Cells:
    """One table."""

    columns: tuple[Column, ...]
    rows: list[list[str]]


def number(value: float | None, digits: int = 5) -> str:
    """Fixed digits; a dash where there is no value."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, *, sign: bool = False) -> str:
    """A fraction as a percentage with three digits."""
    if value is None:
        return "-"
    return f"{value:+.3%}" if sign else f"{value:.3%}"


def short(value: float | None) -> str:
    """Three significant digits."""
    return "-" if value is None else f"{value:.3g}"


def delta(report: dict[str, Any]) -> Cells:
    """The gap of each task, and what the placebos moved."""
    rows = []
    for task, gap in report["delta"].items():
        low, high = gap["ne_interval"]
        interval = "one seed: none" if low is None else f"{percent(low, sign=True)} to {percent(high, sign=True)}"
        harmless = [abs(g) for g in report["placebo"][task]["ne_relative"] if g is not None]
        rows.append(
            [
                task,
                gap["outcome"],
                percent(gap["ne_relative"], sign=True),
                interval,
                percent(max(harmless)) if harmless else "-",
                "-" if gap["calibration"] is None else f"{gap['calibration']:+.4f}",
                percent(gap["ne_relative_trained"], sign=True),
            ]
        )
    columns = (
        ("task", "text"),
        ("twins alone", "text"),
        ("relative NE", "number"),
        ("90 % interval", "number"),
        ("largest placebo gap", "number"),
        ("calibration", "number"),
        ("NE if served in MXFP8", "number"),
    )
    return Cells(columns, rows)


def arms(report: dict[str, Any], task: str) -> Cells:
    """Metrics of a task, one row an arm; MXFP8's weights also in the precision they were trained in."""
    rows = []
    for arm, tasks in report["arms"].items():
        values = tasks[task]
        name = f"{arm}, served in BF16" if arm == "mxfp8" else arm
        rows.append([name, *_metrics(values), number(values["ne_windowed"]), number(values["progressive"]["ne"])])
        if arm == "mxfp8":
            rows.append(["mxfp8, as trained", *_metrics(values["trained"]), "", ""])
    columns = (
        ("arm", "text"),
        ("NE", "number"),
        ("calibration", "number"),
        ("calibration-free NE", "number"),
        ("log loss", "number"),
        ("AUC", "number"),
        ("windowed NE", "number"),
        ("progressive NE", "number"),
    )
    return Cells(columns, rows)


def _metrics(values: dict[str, Any]) -> list[str]:
    return [
        number(values["ne"]),
        number(values["calibration"], 4),
        number(values["ne_calibration_free"]),
        number(values["log_loss"], 6),
        number(values["auc"]),
    ]


def gates(report: dict[str, Any]) -> Cells:
    """Every gate at its worst."""
    rows = [
        [g["name"], "holds" if g["holds"] else "BROKEN", short(g["value"]), f"{g['limit']:g}", g["detail"]]
        for g in report["gates"]
    ]
    columns = (("gate", "text"), ("", "text"), ("worst", "number"), ("limit", "number"), ("where", "text"))
    return Cells(columns, rows)


def agreement(report: dict[str, Any]) -> Cells:
    """Logit errors per task and seed, MXFP8's and BF16's own."""
    rows = []
    for task, seeds in report["same_weights"].get("tasks", {}).items():
        for m in seeds:
            bf16 = f"{short(m['bf16_logit_rms'])}, {short(m['bf16_logit_mean'])}"
            dce = f"{percent(m['cross_entropy'], sign=True)} ± {percent(m['cross_entropy_error'])}"
            rows.append(
                [
                    f"{task}, seed {m['seed']}",
                    short(m["logit_rms"]),
                    f"{short(m['logit_mean'])} ± {short(m['logit_mean_error'])}",
                    bf16,
                    percent(m["calibration"], sign=True),
                    dce,
                ]
            )
    columns = (
        ("task", "text"),
        ("logit RMS error", "number"),
        ("mean logit error", "number"),
        ("BF16's own (RMS, mean)", "number"),
        ("calibration", "number"),
        ("cross entropy", "number"),
    )
    return Cells(columns, rows)


def layers(report: dict[str, Any]) -> Cells:
    """Every module compared."""
    rows = [
        [
            x["layer"] or "(root)",
            "MXFP8" if x["quantized"] else "",
            "-" if x["sqnr_db"] is None else f"{x['sqnr_db']:.1f}",
            "-" if x["grad_cosine"] is None else f"{x['grad_cosine']:.5f}",
            short(x["grad_error_ratio"]),
        ]
        for x in report["same_weights"]["layers"]
    ]
    columns = (
        ("layer", "text"),
        ("", "text"),
        ("SQNR, dB", "number"),
        ("gradient cosine", "number"),
        ("gradient error / BF16's", "number"),
    )
    return Cells(columns, rows)


def plan(report: dict[str, Any]) -> Cells:
    """The plan, without what a fixed report has no use for."""
    rows = [
        [
            x["fqn"] or "(root)",
            x["old_type"],
            x["new_type"] or "",
            "; ".join(f"{gemm}: {precision}" for gemm, precision in x["gemms"].items()),
            x["reason"] or "",
        ]
        for x in report["plan"]
    ]
    columns = (("layer", "text"), ("type", "text"), ("becomes", "text"), ("precision", "text"), ("why not", "text"))
    return Cells(columns, rows)


def power_sentence(report: dict[str, Any]) -> str:
    """What these rows and seeds resolve, and what would decide."""
    power, budget = report["power"], percent(report["budget"])
    if power["ne_resolvable"] is None:
        seeds = power["seeds_needed"]
        more = f"; by the placebos alone, about {seeds} seeds of these rows would decide ±{budget}" if seeds else ""
        return f"Power: one seed has no spread to judge a gap by{more}."
    resolves = f"Power: these rows and seeds resolve a relative NE gap of ±{percent(power['ne_resolvable'])}"
    if power["ne_resolvable"] <= report["budget"]:
        return f"{resolves}, enough for the budget of ±{budget}."
    seeds = f"{power['seeds_needed']} seeds" if power["seeds_needed"] else "more than 10,000 seeds"
    rows = f"{power['rows_needed']:,} rows"
    return f"{resolves}; ±{budget} would take about {seeds} of these rows, or {rows} with these seeds."
