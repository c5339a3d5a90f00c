"""Writes what docs/numerics.md shows of the runs of `evidence.py`: a summary as JSON, tables and plots.

    python benchmarks/evidence_page.py runs/evidence     # results -> summary, page and plots
    python benchmarks/evidence_page.py                   # the committed summary -> page and plots

The summary is `benchmarks/results/numerics.json`. The page keeps its prose; what lies between `<!-- begin NAME -->` and
`<!-- end NAME -->` is replaced. `verdict_study.py` writes the study's results the same way.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mxfp8_recipe.ab.arms import CANDIDATE, REFERENCE
from mxfp8_recipe.ab.results import ArmResult, Results
from mxfp8_recipe.ab.runner import evidence_of
from mxfp8_recipe.config import BF16, KIND_PRECISION
from mxfp8_recipe.monitors.records import SameWeights
from mxfp8_recipe.monitors.verdict import decide
from mxfp8_recipe.recipe_files import load_recipe

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "benchmarks" / "results" / "numerics.json"
STUDY = ROOT / "benchmarks" / "results" / "verdict_study.json"
PAGE = ROOT / "docs" / "numerics.md"
NOTHING_YET = "Not run yet: there are no results of `benchmarks/evidence.py` in the repository."


class _Recipe:
    """What `evidence_of` asks a measurer for."""

    def __init__(self, recipe: str, converted: int) -> None:
        self.recipe = load_recipe(recipe)
        self.plan = type("Plan", (), {"converted": range(converted)})


def summarize(path: Path) -> dict[str, Any]:
    """One cell's file as the numbers the page shows."""
    header, *lines = (json.loads(line) for line in path.read_text().splitlines())
    recipes = sorted({line["recipe"] for line in lines if line["kind"] == "same_weights"})
    arms = [line for line in lines if line["kind"] == "arm"]
    found = {r: s for r in recipes if (s := _summarize_recipe(r, lines, arms)) is not None}
    results = [ArmResult.model_validate(a["record"]) for a in arms]
    return {
        "cell": header["cell"],
        "environment": header["environment"],
        "commit": header["commit"],
        "recipes": found,
        "placebos": next(iter(found.values()))["placebos"] if found else {},
        "train_rows": results[0].train_rows if results else 0,
        "heldout_rows": results[0].heldout_rows if results else 0,
        "seconds_an_arm": {
            kind: round(sum(r.seconds for r in of) / len(of), 1)
            for kind in dict.fromkeys(r.arm for r in results)
            if (of := [r for r in results if r.arm == kind])
        },
    }


def _summarize_recipe(recipe: str, lines: list[dict], arms: list[dict]) -> dict[str, Any] | None:
    results = Results(Path())
    for line in arms:
        if line["recipe"] in ("", recipe):
            record = ArmResult.model_validate(line["record"])
            results.arms[record.seed, record.arm] = record
    shadows = [line for line in lines if line["kind"] == "same_weights" and line["recipe"] == recipe]
    results.same_weights = {s["seed"]: SameWeights.model_validate(s["record"]) for s in shadows}
    seeds = results.complete_seeds()
    if not seeds:
        return None
    tasks = [t.task for t in results.arms[seeds[0], REFERENCE].tasks]
    decision = decide(evidence_of(results, tasks, _Recipe(recipe, shadows[0]["plan"]["converted"])))  # type: ignore[arg-type]
    verdicts = {t.task: t for t in decision.tasks}

    def mean(arm: str, task: str, metric: str) -> float:
        return sum(getattr(results.arms[s, arm].task(task).served, metric) for s in seeds) / len(seeds)

    return {
        "verdict": decision.outcome.value,
        "seeds": seeds,
        "plan": shadows[0]["plan"],
        "identity": all(load_recipe(recipe).precision(kind) == BF16 for kind in KIND_PRECISION),
        "tasks": {
            task: {
                "outcome": verdicts[task].outcome.value,
                "ne_bf16": mean(REFERENCE, task, "ne"),
                "gap": _finite(verdicts[task].interval.mean),
                "interval": [_finite(verdicts[task].interval.low), _finite(verdicts[task].interval.high)],
                "gaps": list(results.gaps(task)[0]),
                "resolves": verdicts[task].power.ne_resolvable,
                "calibration_bf16": mean(REFERENCE, task, "calibration"),
                "calibration": mean(CANDIDATE, task, "calibration") / mean(REFERENCE, task, "calibration") - 1,
                "logit_mean": max((m.tasks[i].logit_mean for m in results.same_weights.values()), key=abs),
                "logit_rms": max(m.tasks[i].logit_rms for m in results.same_weights.values()),
                "bf16_logit_mean": max((m.tasks[i].bf16_logit_mean for m in results.same_weights.values()), key=abs),
            }
            for i, task in enumerate(tasks)
        },
        "placebos": {task: {k: list(v) for k, v in results.gaps(task)[1].items()} for task in tasks},
        "broken_gates": [str(g) for g in decision.gates if g.broken],
        "segments": [[s.task, s.segment, s.outcome.value, _finite(s.interval.mean)] for s in decision.segments],
        "sources": {
            s["task"]: {"shift": s["shift"], "layers": [[x["layer"], x["alone"]] for x in s["layers"][:3]]}
            for line in shadows
            for s in line["shift_sources"]
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def percent(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{100 * value:+.{digits}f} %"


def table(columns: Sequence[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others numbers."""
    head = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])


def cell_section(cell: dict[str, Any]) -> str:
    """The table of one cell, with where and at what cost it was measured."""
    rows = []
    for recipe, found in cell["recipes"].items():
        for task, t in found["tasks"].items():
            low, high = t["interval"]
            rows.append([
                f"`{recipe}`, {task}", f"**{found['verdict']}**", t["outcome"], percent(t["gap"]),
                f"{percent(low)} to {percent(high)}", percent(t["resolves"]).replace("+", "±"),
                percent(t["calibration"], 2), f"{t['logit_mean']:+.4f}", f"{t['logit_rms']:.3f}",
            ])  # fmt: skip
    columns = ["recipe, task", "verdict", "twins alone", "NE gap", "interval", "resolves", "calibration",
               "worst mean logit error", "RMS"]  # fmt: skip
    first = next(iter(cell["recipes"].values()))
    notes = [_placebo_note(task, arms, first["tasks"][task]) for task, arms in cell["placebos"].items()]
    notes.append(_segments_note(cell["recipes"]))
    converted = {r: f["plan"] for r, f in cell["recipes"].items()}
    most = max(converted.values(), key=lambda p: p["converted"])
    notes.append(f"At most {most['converted']} of {most['candidates']} layers in MXFP8, {most['attention']} of them "
                 f"attention; backend `{most['backend']}`.")  # fmt: skip
    environment, seconds = cell["environment"], cell["seconds_an_arm"]
    an_arm = ", ".join(f"{arm} {s:.0f} s an arm" for arm, s in seconds.items())
    notes.append(
        f"{len(first['seeds'])} seeds, {cell['train_rows']:,} rows to train on and {cell['heldout_rows']:,} held out; "
        f"{environment['device']}, torch {environment['torch']}, commit {cell['commit']}; {an_arm}."
    )
    return "\n\n".join([f"### {cell['cell']}", table(columns, rows), "\n".join(f"- {note}" for note in notes)])


def _placebo_note(task: str, arms: dict[str, list[float]], measured: dict[str, Any]) -> str:
    gaps = [g for values in arms.values() for g in values]
    return (
        f"{task}: BF16 NE {measured['ne_bf16']:.5f}, calibration {measured['calibration_bf16']:.4f}; placebos moved "
        f"NE by {percent(min(gaps))} to {percent(max(gaps))}; BF16's own worst mean logit error "
        f"{measured['bf16_logit_mean']:+.4f}."
    )


def _segments_note(recipes: dict[str, Any]) -> str:
    """How the segments that are judged alone come out on the twins, and which fail."""
    judged = [(recipe, *segment) for recipe, found in recipes.items() for segment in found["segments"]]
    failed = [
        f"`{recipe}`, {task}, {name} ({percent(gap)})" for recipe, task, name, how, gap in judged if how == "fail"
    ]
    passed = sum(how == "pass" for *_, how, _ in judged)
    said = f"Segments alone, twins: {passed} of {len(judged)} pass, {len(judged) - passed - len(failed)} inconclusive"
    return f"{said}; {'none fails' if not failed else 'these fail: ' + '; '.join(failed)}."


def sources_table(cells: list[dict[str, Any]]) -> str:
    """The layers that shift the mean logit most, where that gate breaks."""
    rows = [
        [f"{cell['cell']}, `{recipe}`, {task}", f"{s['shift']:+.4f}", _layers(s["layers"])]
        for cell in cells
        for recipe, found in cell["recipes"].items()
        for task, s in found["sources"].items()
    ]
    return (
        table(["cell, recipe, task", "mean logit error, seed 0", "of one layer alone in MXFP8"], rows) if rows else ""
    )


def _layers(shifts: list[list[Any]]) -> str:
    return ", ".join(f"`{layer}` {alone:+.4f}" for layer, alone in shifts)


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """Gaps of the first task with their intervals; placebo gaps as gray points; the budget as a band."""
    figure = Figure(figsize=(9, 1.0 + 2.2 * -(-len(cells) // 3)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(-(-len(cells) // 3), 3, squeeze=False).ravel()
    for axis, cell in zip(axes, cells, strict=False):
        task = next(iter(cell["placebos"]))
        axis.axvspan(-0.1, 0.1, color="#e8f1e8", zorder=0)
        axis.axvline(0, color="#999999", linewidth=0.8)
        for y, found in enumerate(cell["recipes"].values()):
            t = found["tasks"][task]
            axis.plot([100 * g for g in t["gaps"]], [y] * len(t["gaps"]), ".", color="#c55a11", markersize=4)
            if None not in t["interval"]:
                axis.plot([100 * v for v in t["interval"]], [y, y], color="#c55a11", linewidth=1.4)
        harmless = [100 * g for gaps in cell["placebos"][task].values() for g in gaps]
        axis.plot(harmless, [-1] * len(harmless), ".", color="#777777", markersize=4)
        axis.set_yticks(range(-1, len(cell["recipes"])), ["placebos", *cell["recipes"]], fontsize=7)
        axis.invert_yaxis()
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(f"{cell['cell']}, {task}", fontsize=8)
        axis.set_xlabel("relative NE gap, %", fontsize=7)
    for axis in axes[len(cells) :]:
        axis.remove()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def study_table(study: dict[str, Any]) -> str:
    """Outcomes of the replicates with exact binomial intervals."""
    rows = [
        [c["name"], c["harm"], str(c["replicates"]), *(f"{c[k]['count']}" for k in ("pass", "fail", "inconclusive")),
         f"{c['wrong']['rate']:.1%} [{c['wrong']['low']:.1%}, {c['wrong']['high']:.1%}]"]
        for c in study["cases"]
    ]  # fmt: skip
    columns = ["case", "harm", "replicates", "pass", "fail", "inconclusive", "wrong verdicts, 95 % interval"]
    return table(columns, rows) + f"\n\n{study['conditions']}"


def replace_between(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        sys.exit(f"{PAGE}: has no {begin} ... {end}")
    return text[: text.index(begin) + len(begin)] + "\n" + content + "\n" + text[text.index(end) :]


def render(page: str, cells: list[dict[str, Any]], study: dict[str, Any] | None) -> str:
    """The page with its generated parts replaced."""
    sections = "\n\n".join(cell_section(cell) for cell in cells if cell["recipes"])
    if sections:
        sections = f"![NE gaps with their intervals, placebo gaps in gray](numerics_gaps.svg)\n\n{sections}"
    page = replace_between(page, "evidence", sections or NOTHING_YET)
    page = replace_between(page, "sources", sources_table(cells) or NOTHING_YET)
    return replace_between(page, "study", study_table(study) if study else "Not run yet.")


def main() -> None:
    if len(sys.argv) > 1:
        cells = [summarize(path) for path in sorted(Path(sys.argv[1]).glob("*.jsonl"))]
        SUMMARY.write_text(json.dumps([cell for cell in cells if cell["recipes"]], indent=1) + "\n")
    cells = json.loads(SUMMARY.read_text()) if SUMMARY.is_file() else []
    study = json.loads(STUDY.read_text()) if STUDY.is_file() else None
    PAGE.write_text(render(PAGE.read_text(), cells, study))
    if cells:
        plot(cells, PAGE.parent / "numerics_gaps.svg")


if __name__ == "__main__":
    main()
