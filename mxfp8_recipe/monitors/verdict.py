"""PASS, FAIL or INCONCLUSIVE: may this recipe train the model, as far as these rows and seeds can tell?

Two kinds of evidence, and only the first is free of trajectory noise:

* **Gates** (`gates`) compare two models with the same weights on the same rows. One broken gate fails.
* **Gaps** (`equivalence`) compare trained twins: per seed, relative NE of the MXFP8-trained weights minus that of the
  BF16-trained ones, held against the gaps of placebos, the row noise that seeds share, and the budget.

PASS: all gates hold, and each task's interval lies inside +-budget: two one-sided tests at the look's level. FAIL: a
broken gate, or a gap that lies outside the budget, on either side; a run that got better by more than the budget is not
the same model. Everything else is INCONCLUSIVE, with the seeds and rows that would decide.

Errors (`multiplicity`): all tasks must pass, which needs no correction. Tests that fail share one level by Holm's
procedure over all tasks and, at half the total weight, all segments of all tasks. Segments can fail a verdict and are
not needed to pass it: few have the rows. Judging again after more seeds spends what is left of the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mxfp8_recipe.monitors import student_t
from mxfp8_recipe.monitors.bootstrap import BLOCKS
from mxfp8_recipe.monitors.equivalence import (
    NO_POWER,
    POWER,
    Interval,
    Power,
    TaskGaps,
    outside_p_value,
    power,
    seed_interval,
)
from mxfp8_recipe.monitors.gates import Gate, GateLimits, same_weights_gates, task_gates
from mxfp8_recipe.monitors.multiplicity import ALPHA, holm, level
from mxfp8_recipe.monitors.records import SameWeights, TaskAgreement

__all__ = [
    "Decision",
    "Evidence",
    "Gate",
    "GateLimits",
    "Interval",
    "Outcome",
    "Power",
    "TaskGaps",
    "TaskVerdict",
    "decide",
    "decide_same_weights",
    "power",
    "same_weights_gates",
    "seed_interval",
]


class Outcome(str, Enum):
    """What a check concludes."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class TaskVerdict:
    """Outcome of the twin runs for one task, or for one segment of it."""

    task: str
    outcome: Outcome
    interval: Interval
    power: Power
    reason: str
    segment: str = ""
    rows: int | None = None
    positives: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The verdict with everything a reader needs to check it."""

    outcome: Outcome
    reasons: tuple[str, ...]
    decided: tuple[str, ...]
    undecided: tuple[str, ...]
    gates: tuple[Gate, ...]
    tasks: tuple[TaskVerdict, ...]
    power: Power
    budget: float
    segments: tuple[TaskVerdict, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What `decide` looks at.

    Attributes:
        gaps: one per task.
        same_weights: one per seed.
        rows: impressions used, train and held out together.
        segments: gaps of each segment with rows and positives enough to be judged alone, for each task.
        small_segments: how many segments have not, and are judged only as part of their task.
        looks: numbers of seeds at which this run was judged before.
        twins_only: no same-weights comparison is to be had, as between two prediction logs.
        identical: every prediction of the two arms, trained and held out, is bitwise equal in every seed.
        quantizes: the recipe put at least one layer into MXFP8.
        identity: the recipe is meant to change nothing.
        interrupted: why the run is incomplete, or empty.
        diverged: one sentence for each seed whose MXFP8 twin ended in NaN where the BF16 twin did not.
    """

    gaps: tuple[TaskGaps, ...]
    same_weights: tuple[SameWeights, ...]
    rows: int
    segments: tuple[TaskGaps, ...] = ()
    small_segments: int = 0
    looks: tuple[int, ...] = ()
    twins_only: bool = False
    identical: bool = False
    quantizes: bool = True
    identity: bool = False
    interrupted: str = ""
    diverged: tuple[str, ...] = ()


def decide(evidence: Evidence, *, budget: float = 0.001, limits: GateLimits | None = None) -> Decision:
    """Apply the rule of the module docstring."""
    if not 0 < budget < 1:
        raise ValueError(f"budget must be a relative NE gap inside (0, 1), got {budget}")
    gates = same_weights_gates(evidence.same_weights, limits or GateLimits())
    tasks, segments = _judged(evidence, budget)
    return _decision(evidence, gates, tasks, segments, budget)


def decide_same_weights(
    agreements: Sequence[tuple[str, TaskAgreement]],
    changes: Sequence[tuple[TaskGaps, float]],
    *,
    rows: int,
    budget: float = 0.001,
    limits: GateLimits | None = None,
) -> Decision:
    """The verdict on one set of weights served in two precisions, from predictions alone.

    There is no training noise, so a seed's standard error over rows is the whole of it: PASS when every gate holds and
    every seed's interval lies inside the budget, FAIL when a gate breaks or a gap lies outside by Holm's procedure.

    Args:
        agreements: a seed's name and its logit errors.
        changes: a seed's gap and its standard error over rows, in the same order.
    """
    if not 0 < budget < 1:
        raise ValueError(f"budget must be a relative NE gap inside (0, 1), got {budget}")
    allowed = limits or GateLimits(cross_entropy=budget)
    gates = tuple(task_gates([(name, (a,)) for name, a in agreements], allowed))
    p_values = [_tail(abs(gap.mxfp8[0]) - budget, error) for gap, error in changes]
    failed = holm(p_values, [1.0] * len(changes), ALPHA)
    tasks = tuple(
        _served_verdict(name, gap, error, f, rows=rows, budget=budget)
        for (name, _), (gap, error), f in zip(agreements, changes, failed, strict=True)
    )
    evidence = Evidence(gaps=(), same_weights=(), rows=rows, twins_only=True)
    return _decision(evidence, gates, tasks, (), budget)


def _decision(
    evidence: Evidence,
    gates: tuple[Gate, ...],
    tasks: tuple[TaskVerdict, ...],
    segments: tuple[TaskVerdict, ...],
    budget: float,
) -> Decision:
    decided, undecided = _what_is_known(gates, tasks, segments, evidence)
    outcome, reasons = _conclusion(evidence, gates, tasks, segments)
    if outcome is Outcome.PASS and evidence.identical:
        decided, undecided = [*decided, *reasons], []
    return Decision(
        outcome=outcome,
        reasons=tuple(reasons),
        decided=tuple(decided),
        undecided=tuple(undecided),
        gates=gates,
        tasks=tasks,
        power=_worst_power([task.power for task in tasks]),
        budget=budget,
        segments=segments,
    )


def _tail(beyond: float, error: float) -> float:
    if error == 0:
        return 0.0 if beyond > 0 else 1.0
    return 1 - student_t.cdf(beyond / error, BLOCKS - 1)


def _served_verdict(seed: str, gaps: TaskGaps, error: float, failed: bool, *, rows: int, budget: float) -> TaskVerdict:
    """One seed's change of NE on the same weights, by its row noise."""
    gap, half = gaps.mxfp8[0], student_t.quantile(1 - ALPHA, BLOCKS - 1) * error
    interval = Interval(mean=gap, low=gap - half, high=gap + half, alpha=ALPHA)
    outcome = Outcome.FAIL if failed else Outcome.PASS if interval.inside(budget) else Outcome.INCONCLUSIVE
    reason = (
        f"{gaps.task}, seed {seed}: {gaps.undefined}; compare more rows, or rows of another time"
        if gaps.undefined
        else (
            f"{gaps.task}, seed {seed}: relative NE {gap:+.3%}, {interval.confidence} interval over rows "
            f"[{interval.low:+.3%}, {interval.high:+.3%}], budget ±{budget:.3%}"
        )
    )
    resolvable = error * (
        student_t.quantile(1 - ALPHA, BLOCKS - 1) + student_t.quantile(1 - (1 - POWER) / 2, BLOCKS - 1)
    )
    needed = (
        NO_POWER
        if math.isnan(resolvable)
        else Power(
            ne_resolvable=resolvable,
            seeds_needed=1 if resolvable <= budget else None,
            rows_needed=max(1, math.ceil(rows * (resolvable / budget) ** 2)),
        )
    )
    return TaskVerdict(
        task=gaps.task,
        outcome=outcome,
        interval=interval,
        power=needed,
        reason=reason,
        rows=gaps.rows,
        positives=gaps.positives,
    )


def _conclusion(
    evidence: Evidence, gates: Sequence[Gate], tasks: Sequence[TaskVerdict], segments: Sequence[TaskVerdict]
) -> tuple[Outcome, list[str]]:
    """Outcome and its reasons."""
    broken = [gate for gate in gates if gate.broken]
    failed = [t for t in (*tasks, *segments) if t.outcome is Outcome.FAIL]
    if broken or failed or evidence.diverged:
        reasons = [f"MXFP8 training diverged where BF16 did not: {sentence}" for sentence in evidence.diverged]
        return Outcome.FAIL, reasons + [f"gate broken: {gate}" for gate in broken] + [t.reason for t in failed]
    if evidence.interrupted:
        return Outcome.INCONCLUSIVE, [evidence.interrupted]
    if evidence.identical and evidence.identity:
        return Outcome.PASS, ["both arms are bitwise identical in every prediction: there is no gap to estimate"]
    if not evidence.quantizes:
        return Outcome.INCONCLUSIVE, ["no layer of this model runs in MXFP8 under this recipe"]
    if not tasks or not (evidence.same_weights or evidence.twins_only):
        return Outcome.INCONCLUSIVE, ["nothing was measured"]
    if evidence.identical:
        reason = "layers claim MXFP8, yet every prediction is bitwise that of BF16: quantization did not happen"
        return Outcome.INCONCLUSIVE, [reason]
    unsure = [f"gate open: {gate}" for gate in gates if not gate.decided]
    unsure += [task.reason for task in tasks if task.outcome is Outcome.INCONCLUSIVE]
    if unsure:
        return Outcome.INCONCLUSIVE, unsure
    return Outcome.PASS, [task.reason for task in tasks]


def _judged(evidence: Evidence, budget: float) -> tuple[tuple[TaskVerdict, ...], tuple[TaskVerdict, ...]]:
    """Verdicts of tasks and of segments; which of them fail is one family of tests."""
    gaps = [*evidence.gaps, *evidence.segments]
    weights = [1 / len(evidence.gaps)] * len(evidence.gaps) + [1 / max(len(evidence.segments), 1)] * len(
        evidence.segments
    )
    p_values = [outside_p_value(g, budget) for g in gaps]
    seeds = max((len(g.mxfp8) for g in evidence.gaps), default=0)
    alpha = level(seeds, evidence.looks) if seeds else 0.0
    failed = holm(p_values, weights, alpha)
    judged = [_task_verdict(g, f, evidence, budget=budget) for g, f in zip(gaps, failed, strict=True)]
    return tuple(judged[: len(evidence.gaps)]), tuple(judged[len(evidence.gaps) :])


def _task_verdict(gaps: TaskGaps, failed: bool, evidence: Evidence, *, budget: float) -> TaskVerdict:
    interval, needed, outcome = Interval(mean=math.nan, low=-math.inf, high=math.inf), NO_POWER, Outcome.INCONCLUSIVE
    if not gaps.mxfp8:
        reason = f"{gaps.name}: no seed has finished both arms"
    elif gaps.undefined:
        reason = f"{gaps.name}: {gaps.undefined}; hold out more rows, or rows of another time"
    else:
        interval = seed_interval(gaps, evidence.looks)
        needed = power(gaps, budget=budget, rows=evidence.rows, looks=evidence.looks)
        if failed:
            outcome = Outcome.FAIL
        elif len(gaps.mxfp8) > 1 and interval.inside(budget):
            outcome = Outcome.PASS
        reason = _gap_sentence(gaps, outcome, interval, needed, budget=budget)
    return TaskVerdict(
        task=gaps.task,
        outcome=outcome,
        interval=interval,
        power=needed,
        reason=reason,
        segment=gaps.segment,
        rows=gaps.rows,
        positives=gaps.positives,
    )


def _gap_sentence(gaps: TaskGaps, outcome: Outcome, interval: Interval, needed: Power, *, budget: float) -> str:
    seeds = len(gaps.mxfp8)
    if seeds == 1:
        return f"{gaps.name}: one seed ({interval.mean:+.3%} relative NE) cannot tell a gap from drift; use more seeds"
    measured = (
        f"{gaps.name}: relative NE {interval.mean:+.3%}, {interval.confidence} interval "
        f"[{interval.low:+.3%}, {interval.high:+.3%}] over {seeds} seeds"
    )
    if outcome is Outcome.PASS:
        return f"{measured}, inside the budget of ±{budget:.3%}"
    if outcome is Outcome.FAIL:
        return f"{measured}, outside the budget of ±{budget:.3%}"
    if needed.ne_resolvable is None:
        return f"{measured}: its spread is unknown, since too few resamples of the rows hold both classes"
    if needed.ne_resolvable <= budget:
        return f"{measured}: across the budget of ±{budget:.3%}, which these rows and seeds resolve"
    return f"{measured}; these rows and seeds resolve ±{needed.ne_resolvable:.3%}, not the budget of ±{budget:.3%}"


def _worst_power(powers: Sequence[Power]) -> Power:
    def worst(values: list) -> float | int | None:
        return None if not values or None in values else max(values)

    return Power(
        ne_resolvable=worst([p.ne_resolvable for p in powers]),
        seeds_needed=worst([p.seeds_needed for p in powers]),  # type: ignore[arg-type]
        rows_needed=worst([p.rows_needed for p in powers]),  # type: ignore[arg-type]
    )


def _what_is_known(
    gates: Sequence[Gate], tasks: Sequence[TaskVerdict], segments: Sequence[TaskVerdict], evidence: Evidence
) -> tuple[list[str], list[str]]:
    """Sentences on what the run decided and what it left open."""
    decided, undecided = [], []
    if gates:
        held = sum(gate.holds for gate in gates)
        decided.append(f"same weights, same rows: {held} of {len(gates)} gates hold")
        undecided += [f"same weights, same rows: {gate}" for gate in gates if not gate.decided]
    else:
        undecided.append("same weights, same rows: not measured")
    for task in tasks:
        (undecided if task.outcome is Outcome.INCONCLUSIVE else decided).append(task.reason)
    decided += [s.reason for s in segments if s.outcome is Outcome.FAIL]
    inside = sum(s.outcome is Outcome.PASS for s in segments)
    if inside:
        decided.append(f"{inside} of {len(segments)} segments, each on its own, lie inside the budget")
    unknown = sum(s.outcome is Outcome.INCONCLUSIVE for s in segments)
    if unknown:
        undecided.append(f"{unknown} of {len(segments)} segments: not enough rows and seeds to tell, one by one")
    if evidence.small_segments:
        undecided.append(
            f"{evidence.small_segments} segments too small to be judged alone; their rows count in the task"
        )
    if evidence.interrupted:
        undecided.append(evidence.interrupted)
    return decided, undecided
