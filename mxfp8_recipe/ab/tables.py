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
        harmless = [abs(g) for g in report["placebo"][task]["ne_relative"] if g is not None]
        rows.append(
            [
                task,
                gap["outcome"],
                percent(gap["ne_relative"], sign=True),
                _interval(gap["ne_relative"], gap["ne_interval"]),
                percent(max(harmless)) if harmless else "-",
                percent(gap["calibration_relative"], sign=True),
                _span(gap["calibration_interval"]),
                percent(gap["ne_relative_trained"], sign=True),
            ]
        )
    confidence = next((gap["confidence"] for gap in report["delta"].values() if gap["confidence"]), "")
    columns = (
        ("task", "text"),
        ("twins alone", "text"),
        ("relative NE", "number"),
        (f"{confidence} interval".strip(), "number"),
        ("largest placebo gap", "number"),
        ("relative calibration", "number"),
        ("its interval", "number"),
        ("NE if served in MXFP8", "number"),
    )
    return Cells(columns, rows)


def _interval(gap: float | None, interval: list[float | None], confidence: str = "") -> str:
    if gap is None:
        return "undefined"
    if interval[0] is None:
        return "one seed: none"
    return f"{_span(interval)} ({confidence})" if confidence else _span(interval)


def _span(interval: list[float | None]) -> str:
    low, high = interval
    return "-" if low is None or high is None else f"{percent(low, sign=True)} to {percent(high, sign=True)}"


def segments(found: list[dict[str, Any]]) -> Cells:
    """Each segment that is judged alone, worst first."""
    rows = [
        [
            f"{s['task']}, {s['segment']}",
            s["outcome"],
            percent(s["gap"], sign=True),
            _span(s["interval"]),
            "-" if s["resolves"] is None else f"±{percent(s['resolves'])}",
            f"{s['rows']:,}",
            f"{s['positives']:,.0f}",
        ]
        for s in sorted(found, key=lambda s: -abs(s["gap"] or 0))
    ]
    columns = (
        ("segment", "text"),
        ("outcome", "text"),
        ("relative NE", "number"),
        ("interval", "number"),
        ("resolves", "number"),
        ("rows", "number"),
        ("positives", "number"),
    )
    return Cells(columns, rows)


def shift_sources(report: dict[str, Any], most: int = 5) -> Cells:
    """The layers that shift the mean logit most, of each task."""
    rows = [
        [source["task"], f"{source['shift']:+.4f}", layer["layer"], f"{layer['alone']:+.4f}"]
        for source in report["shift_sources"]
        for layer in source["layers"][:most]
    ]
    columns = (("task", "text"), ("whole recipe", "number"), ("layer", "text"), ("alone", "number"))
    return Cells(columns, rows)


def worst_layers(report: dict[str, Any], most: int = 5) -> Cells:
    """The quantized layers with the least output SQNR, upstream error included."""
    measured = [x for x in report["same_weights"]["layers"] if x["quantized"] and x["sqnr_db"] is not None]
    rows = [
        [x["layer"] or "(root)", f"{x['sqnr_db']:.1f}", short(x["grad_error_ratio"])]
        for x in sorted(measured, key=lambda x: x["sqnr_db"])[:most]
    ]
    columns = (("worst by output SQNR", "text"), ("SQNR, dB", "number"), ("gradient error / BF16's", "number"))
    return Cells(columns, rows)


def comparison(report: dict[str, Any]) -> Cells:
    """The gap of two prediction files; one row a seed where they are of the same weights."""
    rows, change = [], report["calibration_gap"]
    by_seed = report["same_weights"] and len(report["seeds"]) > 1
    for index, gap in enumerate(report["gap"]):
        harmless = [abs(g) for placebo in report["placebo_gaps"] for g in placebo if g is not None]
        rows.append(
            [
                f"{gap['task']}, seed {report['seeds'][index]}" if by_seed else gap["task"],
                gap["outcome"],
                percent(gap["gap"], sign=True),
                _interval(gap["gap"], gap["interval"], gap["confidence"]),
                "-" if gap["resolves"] is None else f"±{percent(gap['resolves'])}",
                percent(max(harmless)) if harmless else "-",
                percent(change["per_seed"][index] if by_seed else change["mean"], sign=True),
            ]
        )
    columns = (
        ("task", "text"),
        ("outcome", "text"),
        ("relative NE", "number"),
        ("interval", "number"),
        ("resolves", "number"),
        ("largest placebo gap", "number"),
        ("calibration", "number"),
    )
    return Cells(columns, rows)


def both(report: dict[str, Any]) -> Cells:
    """Metrics of both files, means over seeds."""
    rows = [[name, *_metrics(values), number(values["ece"])] for name, values in report["metrics"].items()]
    columns = (
        ("file", "text"),
        ("NE", "number"),
        ("calibration", "number"),
        ("calibration-free NE", "number"),
        ("log loss", "number"),
        ("AUC", "number"),
        ("ECE", "number"),
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


def _state(gate: dict[str, Any]) -> str:
    return "holds" if gate["holds"] else "BROKEN" if gate["decided"] else "open"


def gates(report: dict[str, Any]) -> Cells:
    """Every gate at its worst."""
    rows = [[g["name"], _state(g), short(g["value"]), f"{g['limit']:g}", g["detail"]] for g in report["gates"]]
    columns = (("gate", "text"), ("state", "text"), ("worst", "number"), ("limit", "number"), ("where", "text"))
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
    seeds, rows = power["seeds_needed"], power["rows_needed"]
    if power["ne_resolvable"] is None and any("so NE is undefined" in line for line in report["undecided"]):
        return "Power: unknown; NE is undefined on rows of one class."
    if power["ne_resolvable"] is None:
        more = f"; by the placebos alone, about {seeds} seeds of these rows would decide ±{budget}" if seeds else ""
        return f"Power: unknown; one seed has no spread to judge a gap by{more}."
    resolves = f"Power: these rows and seeds resolve a relative NE gap of ±{percent(power['ne_resolvable'])}"
    if power["ne_resolvable"] <= report["budget"]:
        return f"{resolves}, enough for the budget of ±{budget}."
    by_seeds = f"about {seeds} seeds of these rows, or " if seeds else ""
    why = "" if seeds else "; more seeds of these rows would not do"
    return f"{resolves}; ±{budget} would take {by_seeds}{rows:,} rows with these seeds{why}."
