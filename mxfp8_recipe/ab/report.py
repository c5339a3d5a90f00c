"""The report of a run as one JSON-ready dictionary; the HTML page and the terminal show what is in it.

verdict, reasons, decided, undecided, budget
arms.<arm>.<task>          means over seeds, per_seed, and the same metrics in other settings
delta.<task>               MXFP8 minus BF16
placebo.<task>             gaps of changes known to be harmless
same_weights               gates' numbers, worst seed; layers
power, plan, environment, command, data
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mxfp8_recipe.ab.arms import ARMS, CANDIDATE, REFERENCE
from mxfp8_recipe.ab.environment import command_line, describe
from mxfp8_recipe.ab.results import ArmResult, Metrics, TaskResult
from mxfp8_recipe.ab.runner import ABRun
from mxfp8_recipe.monitors.equivalence import TaskGaps, seed_interval
from mxfp8_recipe.monitors.records import LayerAgreement, SameWeights
from mxfp8_recipe.monitors.verdict import Gate, Outcome, TaskVerdict

METRICS = ("ne", "calibration", "ne_calibration_free", "log_loss", "auc")

_HEADLINES = {
    Outcome.PASS: "Pass: {recipe} moved neither NE nor calibration beyond what this check allows.",
    Outcome.FAIL: "Fail: {recipe} is outside what this check allows.",
    Outcome.INCONCLUSIVE: "Inconclusive: these rows and seeds cannot tell whether {recipe} is harmless.",
}


def build_report(run: ABRun) -> dict[str, Any]:
    """Everything the run has to say; NaN and infinity are None, so that the JSON is valid."""
    decision, config = run.decision, run.config
    tasks = run.dataset.spec.tasks
    return finite(
        {
            "verdict": decision.outcome.value,
            "headline": _HEADLINES[decision.outcome].format(recipe=run.plan.recipe.name),
            "reasons": decision.reasons,
            "decided": decision.decided,
            "undecided": decision.undecided,
            "budget": decision.budget,
            "gates": [_gate(gate) for gate in decision.gates],
            "arms": _arms(run),
            "delta": {task: _delta(run, task) for task in tasks},
            "placebo": {task: _placebo(run, task) for task in tasks},
            "same_weights": _same_weights(run),
            "segments": [verdict_row(verdict) for verdict in decision.segments],
            "shift_sources": [source.model_dump() for source in run.results.shift_sources],
            "looks": run.results.looks,
            "power": vars(decision.power),
            "plan": run.plan.to_dict()["layers"],
            "plan_summary": run.plan.summary(),
            "data": _data(run),
            "config": config.model_dump(mode="json"),
            "environment": describe(config.device, config.threads),
            "command": command_line(),
            "seconds": run.seconds,
        }
    )


def write_json(report: dict[str, Any], path: Path) -> None:
    """Strictly valid JSON, whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(report, indent=1, allow_nan=False))
    scratch.replace(path)


def _gate(gate: Gate) -> dict[str, Any]:
    return vars(gate).copy()


def _arms(run: ABRun) -> dict[str, Any]:
    """Every arm with at least one finished seed."""
    found = {arm.name: run.results.of(arm.name) for arm in ARMS}
    return {
        name: {task: _arm_task(results, task) for task in run.dataset.spec.tasks}
        for name, results in found.items()
        if results
    }


def _arm_task(results: list[ArmResult], task: str) -> dict[str, Any]:
    """The verdict's numbers on top; `trained`: in the arm's own precision; `progressive`: before training on a row."""
    of_task = [result.task(task) for result in results]
    return {
        **_means([t.served for t in of_task]),
        "ne_windowed": _mean(t.ne_windowed for t in of_task),
        "trained": _means([t.trained for t in of_task]),
        "progressive": _means([t.progressive for t in of_task]),
        "per_seed": [
            {"seed": r.seed, **t.served.model_dump(), "ne_windowed": t.ne_windowed}
            for r, t in zip(results, of_task, strict=True)
        ],
        "trace": [[rows, ne] for rows, ne in _mean_trace([t.trace for t in of_task])],
        "calibration_curve": [point.model_dump() for point in of_task[0].curve],
    }


def _means(metrics: Sequence[Metrics]) -> dict[str, float]:
    return {name: _mean(getattr(m, name) for m in metrics) for name in METRICS}


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def _mean_trace(traces: list[tuple[tuple[int, float], ...]]) -> list[tuple[int, float]]:
    """All seeds see the same rows at the same points."""
    return [(points[0][0], _mean(ne for _, ne in points)) for points in zip(*traces, strict=True)]


def _delta(run: ABRun, task: str) -> dict[str, Any]:
    """MXFP8 minus BF16 by seed and on average; NE relative to BF16's."""
    verdict = next(t for t in run.decision.tasks if t.task == task)
    seeds = run.results.complete_seeds()
    twins = [(run.results.arms[s, CANDIDATE].task(task), run.results.arms[s, REFERENCE].task(task)) for s in seeds]
    return {
        "outcome": verdict.outcome.value,
        "confidence": verdict.interval.confidence if seeds else "",
        **_calibration_change(twins, run.results.looks),
        "ne_relative": verdict.interval.mean,
        "ne_interval": [verdict.interval.low, verdict.interval.high],
        "ne_relative_per_seed": list(run.results.gaps(task)[0]),
        "ne_relative_trained": _mean(m.trained.ne / b.trained.ne - 1 for m, b in twins),
        "ne_relative_progressive": _mean(m.progressive.ne / b.progressive.ne - 1 for m, b in twins),
        **{
            name: _mean(getattr(m.served, name) - getattr(b.served, name) for m, b in twins)
            for name in METRICS
            if name != "ne"
        },
        "seeds": seeds,
    }


def _calibration_change(twins: list[tuple[TaskResult, TaskResult]], looks: Sequence[int]) -> dict[str, Any]:
    """The relative change of calibration over seeds and its interval; told, not judged."""
    gaps = tuple(m.served.calibration / b.served.calibration - 1 for m, b in twins)
    if not gaps:
        return {"calibration_relative": math.nan, "calibration_interval": [math.nan, math.nan]}
    interval = seed_interval(TaskGaps(task="", mxfp8=gaps), looks)
    return {"calibration_relative": interval.mean, "calibration_interval": [interval.low, interval.high]}


def verdict_row(verdict: TaskVerdict) -> dict[str, Any]:
    """A task's or segment's verdict as reports hold it."""
    return {
        "task": verdict.task,
        "segment": verdict.segment,
        "outcome": verdict.outcome.value,
        "rows": verdict.rows,
        "positives": verdict.positives,
        "gap": verdict.interval.mean,
        "interval": [verdict.interval.low, verdict.interval.high],
        "confidence": verdict.interval.confidence,
        "resolves": verdict.power.ne_resolvable,
    }


def _placebo(run: ABRun, task: str) -> dict[str, Any]:
    _, placebos = run.results.gaps(task)
    return {"ne_relative": [gap for gaps in placebos.values() for gap in gaps], "by_arm": placebos}


def _same_weights(run: ABRun) -> dict[str, Any]:
    """Worst seed of each number; layers of the first seed."""
    measured = [run.results.same_weights[s] for s in sorted(run.results.same_weights)]
    if not measured:
        return {"logit_rms": None, "logit_mean": None, "grad_cosine": None, "layers": []}
    tasks = [task for m in measured for task in m.tasks]
    return {
        "logit_rms": max(t.logit_rms for t in tasks),
        "logit_mean": max((t.logit_mean for t in tasks), key=abs),
        "grad_cosine": min(m.gradient.cosine for m in measured),
        "grad_error_ratio": max(m.gradient.error_ratio() for m in measured),
        "tasks": {task: [_agreement(m, task) for m in measured] for task in run.dataset.spec.tasks},
        "layers": [_layer(measured[0], layer) for layer in measured[0].layers],
        "seeds": [m.seed for m in measured],
    }


def _agreement(measured: SameWeights, task: str) -> dict[str, Any]:
    return {"seed": measured.seed, **next(t for t in measured.tasks if t.task == task).model_dump()}


def _layer(measured: SameWeights, layer: LayerAgreement) -> dict[str, Any]:
    gradient = layer.gradient
    return {
        "layer": layer.layer,
        "quantized": layer.quantized,
        "sqnr_db": layer.sqnr_db,
        "grad_cosine": gradient and gradient.cosine,
        "grad_error": gradient and gradient.error,
        "grad_error_ratio": measured.layer_error_ratio(layer),
    }


def _data(run: ABRun) -> dict[str, Any]:
    finished = next(iter(run.results.arms.values()), None)
    return {
        "name": run.dataset.name,
        "tasks": list(run.dataset.spec.tasks),
        "train_rows": finished and finished.train_rows,
        "heldout_rows": finished and finished.heldout_rows,
        "window_rows": finished and finished.window_rows,
        "optimal_ne": run.dataset.optimal_ne,
        "notes": list(run.dataset.notes),
    }


def finite(value: Any) -> Any:
    """A copy in JSON's types; what JSON cannot say becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
