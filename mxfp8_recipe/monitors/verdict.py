"""PASS, FAIL or INCONCLUSIVE: may this recipe train the model, as far as these rows and seeds can tell?

Two kinds of evidence, and only the first is free of trajectory noise:

* **Gates** compare two models with the same weights on the same rows (`records.SameWeights`). One broken gate fails.
* **Gaps** compare trained twins: per seed, relative NE of the MXFP8-trained weights minus that of the BF16-trained
  ones. Runs that differ only in rounding drift apart, so a gap means nothing until it is held against the gaps of
  *placebos*, changes known to be harmless (FP32 instead of BF16; initial weights scaled by 1 + 1e-4 noise).

The interval of the mean gap over n seeds is the wider of two t intervals, so it covers whenever either model of the
noise is right:

    own       mean +- t(1 - alpha, n - 1) * s / sqrt(n)         s: standard deviation of the n gaps
    placebo   mean +- t(1 - alpha, d) * r / sqrt(n)             r: root mean square of the k n placebo gaps (about
                                                                zero: they are harmless by definition)

Placebos of a seed share the BF16 twin, so their gaps correlate (0.5 for equal variances); hence the degrees of
freedom d = k n / (1 + (k - 1) / 4).
PASS is two one-sided tests at level alpha: the whole interval inside +-budget. FAIL: the whole interval outside, on
either side; a run that got better by more than the budget is not the same model. The seed spread already contains the
sampling noise of held-out rows, because each seed's pair disagrees on rows of its own.
Every task must pass, so no correction is due for PASS (an intersection-union test).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mxfp8_recipe.monitors import student_t
from mxfp8_recipe.monitors.records import SameWeights, TaskAgreement

ALPHA = 0.05
POWER = 0.8
MAX_SEEDS = 10_000


class Outcome(str, Enum):
    """What a check concludes."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """Limits of the same-weights gates.

    Attributes:
        logit_rms: independent logit errors of RMS 0.03 cost under 0.02 % of NE.
        logit_mean: absolute; 0.03 would move calibration by about 3 %.
        segment_mean: the same, for every segment known well enough (`shadow.SEGMENT_RESOLUTION`).
        calibration: relative change of sum(w p); a mean logit error of `logit_mean` moves it by at most that much.
        grad_error_ratio: error of the whole gradient over BF16's own error of the same gradient. Cancellation, which
            makes a gradient near its optimum sensitive to any rounding, hits both alike and drops out of the ratio.
            What remains is the ratio of the formats' unit roundoffs: E4M3 keeps 3 bits after the leading one
            where BF16 keeps 7, hence 2^4. A GEMM in MXFP8 rounds its operands only, so it should stay below.
        layer_grad_error_ratio: the same for each quantized layer, twice as wide, since one layer's gradient is
            a smaller sample. Scales that saturate, or a mis-scaled or transposed operand, land above it.
    """

    logit_rms: float = 0.03
    logit_mean: float = 0.002
    segment_mean: float = 0.002
    calibration: float = 0.002
    grad_error_ratio: float = 16.0
    layer_grad_error_ratio: float = 32.0


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One same-weights check: `value` against `limit`; the worst seed's value."""

    name: str
    value: float
    limit: float
    holds: bool
    detail: str = ""

    def __str__(self) -> str:
        sign = "<=" if self.holds else ">"
        size = f"|{self.value:.3g}|" if self.value < 0 else f"{self.value:.3g}"
        return f"{self.name} {size} {sign} {self.limit:g}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True, kw_only=True)
class TaskGaps:
    """Per-seed relative NE gaps to the BF16 twin of the same seed, e.g. 0.001 for 0.1 % worse.

    `placebos` maps a placebo's name to its gaps; sequences run over the same seeds.
    """

    task: str
    mxfp8: tuple[float, ...]
    placebos: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean gap with its two-sided 1 - 2 alpha interval; infinite where one seed gives no spread."""

    mean: float
    low: float
    high: float

    def inside(self, budget: float) -> bool:
        return -budget <= self.low and self.high <= budget

    def outside(self, budget: float) -> bool:
        return self.low > budget or self.high < -budget


@dataclass(frozen=True, kw_only=True)
class Power:
    """What these rows and seeds can decide.

    Attributes:
        ne_resolvable: the smallest relative NE budget that a truly harmless recipe would meet in 80 % of such runs;
            None when one seed gives no spread.
        seeds_needed: seeds of this many rows that would bring it down to the budget; None above 10,000 or unknown.
        rows_needed: rows (train and held out together, same split, same seeds) that would, if the spread falls with
            the square root of rows; None where unknown.
    """

    ne_resolvable: float | None
    seeds_needed: int | None
    rows_needed: int | None


@dataclass(frozen=True, kw_only=True)
class TaskVerdict:
    """Outcome of the twin runs for one task."""

    task: str
    outcome: Outcome
    interval: Interval
    power: Power
    reason: str


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


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What `decide` looks at.

    Attributes:
        gaps: one per task.
        same_weights: one per seed.
        rows: impressions used, train and held out together.
        identical: every prediction of the two arms, trained and held out, is bitwise equal in every seed.
        quantizes: the recipe put at least one layer into MXFP8.
        identity: the recipe is meant to change nothing.
        interrupted: why the run is incomplete, or empty.
        diverged: one sentence for each seed whose MXFP8 twin ended in NaN where the BF16 twin did not.
    """

    gaps: tuple[TaskGaps, ...]
    same_weights: tuple[SameWeights, ...]
    rows: int
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
    tasks = tuple(_task_verdict(gaps, budget=budget, rows=evidence.rows) for gaps in evidence.gaps)
    broken = [gate for gate in gates if not gate.holds]
    failed = [task for task in tasks if task.outcome is Outcome.FAIL]
    open_tasks = [task for task in tasks if task.outcome is Outcome.INCONCLUSIVE]
    decided, undecided = _what_is_known(gates, tasks)
    if evidence.interrupted:
        undecided.append(evidence.interrupted)
    if broken or failed or evidence.diverged:
        outcome = Outcome.FAIL
        reasons = [f"MXFP8 training diverged where BF16 did not: {sentence}" for sentence in evidence.diverged]
        reasons += [f"gate broken: {gate}" for gate in broken] + [task.reason for task in failed]
    elif evidence.interrupted:
        outcome, reasons = Outcome.INCONCLUSIVE, [evidence.interrupted]
    elif evidence.identical and evidence.identity:
        outcome = Outcome.PASS
        reasons = ["both arms are bitwise identical in every prediction and gradient: there is no gap to estimate"]
        decided, undecided = (*decided, *reasons), ()
    elif not evidence.quantizes:
        outcome, reasons = Outcome.INCONCLUSIVE, ["no layer of this model runs in MXFP8 under this recipe"]
    elif not evidence.same_weights or not tasks:
        outcome, reasons = Outcome.INCONCLUSIVE, ["nothing was measured"]
    elif evidence.identical:
        outcome = Outcome.INCONCLUSIVE
        reasons = ["layers claim MXFP8, yet every prediction is bitwise that of BF16: quantization did not happen"]
    elif open_tasks:
        outcome, reasons = Outcome.INCONCLUSIVE, [task.reason for task in open_tasks]
    else:
        outcome, reasons = Outcome.PASS, [task.reason for task in tasks]
    return Decision(
        outcome=outcome,
        reasons=tuple(reasons),
        decided=tuple(decided),
        undecided=tuple(undecided),
        gates=gates,
        tasks=tasks,
        power=_worst_power([task.power for task in tasks]),
        budget=budget,
    )


def same_weights_gates(measured: Sequence[SameWeights], limits: GateLimits) -> tuple[Gate, ...]:
    """Every gate at its worst seed; a NaN breaks its gate. Empty when nothing was measured."""
    gates: list[Gate] = []
    for index, task in enumerate(measured[0].tasks if measured else ()):
        seeds = [(m.seed, m.tasks[index]) for m in measured]
        gates += [
            _largest(f"{task.task}: logit RMS error", [(t.logit_rms, f"seed {s}") for s, t in seeds], limits.logit_rms),
            _largest(
                f"{task.task}: mean logit error", [(t.logit_mean, f"seed {s}") for s, t in seeds], limits.logit_mean
            ),
            _largest(
                f"{task.task}: calibration change", [(t.calibration, f"seed {s}") for s, t in seeds], limits.calibration
            ),
        ]
        segments = [(v, f"seed {s}, {where}") for s, t in seeds for v, where in _segment_means(t)]
        if segments:
            gates.append(_largest(f"{task.task}: mean logit error of a segment", segments, limits.segment_mean))
    if measured:
        whole = [(m.gradient.error_ratio(), f"seed {m.seed}") for m in measured]
        gates.append(_largest("gradient error over BF16's own", whole, limits.grad_error_ratio))
    layers = [
        (ratio, f"seed {m.seed}, {layer.layer}")
        for m in measured
        for layer in m.layers
        if layer.quantized and (ratio := m.layer_error_ratio(layer)) is not None
    ]
    if layers:
        gates.append(_largest("gradient error of a layer over BF16's own", layers, limits.layer_grad_error_ratio))
    return tuple(gates)


def _segment_means(task: TaskAgreement) -> list[tuple[float, str]]:
    return [
        (s.mean, f"{s.rows} rows of {'small segments' if s.segment is None else f'segment {s.segment}'}")
        for s in task.segments
    ]


def _largest(name: str, values: list[tuple[float, str]], limit: float) -> Gate:
    value, where = max(values, key=lambda pair: math.inf if math.isnan(pair[0]) else abs(pair[0]))
    return Gate(name=name, value=value, limit=limit, holds=abs(value) <= limit, detail=where)


@dataclass(frozen=True)
class _Spread:
    """Two estimates of the spread of a seed's gap, each with its degrees of freedom as a function of seeds."""

    own: float
    placebo: float
    placebos: int

    @classmethod
    def of(cls, gaps: TaskGaps) -> _Spread:
        n = len(gaps.mxfp8)
        mean = math.fsum(gaps.mxfp8) / n
        own = math.sqrt(math.fsum((g - mean) ** 2 for g in gaps.mxfp8) / (n - 1)) if n > 1 else 0.0
        harmless = [g for values in gaps.placebos.values() for g in values]
        placebo = math.sqrt(math.fsum(g * g for g in harmless) / len(harmless)) if harmless else 0.0
        return cls(own, placebo, len(gaps.placebos))

    def half_width(self, seeds: int, *probabilities: float) -> float:
        """The wider of the two estimates of (sum of t quantiles) * spread / sqrt(seeds); infinite for one seed."""
        if seeds < 2:
            return math.inf
        widths = [self.own * sum(student_t.quantile(p, seeds - 1) for p in probabilities)]
        if self.placebos:
            df = self.placebos * seeds / (1 + (self.placebos - 1) / 4)
            widths.append(self.placebo * sum(student_t.quantile(p, df) for p in probabilities))
        return max(widths) / math.sqrt(seeds)


def seed_interval(gaps: TaskGaps) -> Interval:
    """Mean gap and its interval, placebo spread accounted for."""
    n = len(gaps.mxfp8)
    mean = math.fsum(gaps.mxfp8) / n
    half = _Spread.of(gaps).half_width(n, 1 - ALPHA)
    return Interval(mean=mean, low=mean - half, high=mean + half)


def power(gaps: TaskGaps, *, budget: float, rows: int) -> Power:
    """The budget these rows and seeds resolve, and what would resolve the one asked for."""
    spread, n = _Spread.of(gaps), len(gaps.mxfp8)
    quantiles = (1 - ALPHA, 1 - (1 - POWER) / 2)
    resolvable = spread.half_width(n, *quantiles)
    if math.isnan(resolvable) or (n < 2 and not any(map(len, gaps.placebos.values()))):
        return Power(ne_resolvable=None, seeds_needed=None, rows_needed=None)
    known = math.isfinite(resolvable)
    return Power(
        ne_resolvable=resolvable if known else None,
        seeds_needed=_first_seed_count(lambda seeds: spread.half_width(seeds, *quantiles) <= budget),
        rows_needed=max(1, math.ceil(rows * (resolvable / budget) ** 2)) if known else None,
    )


def _first_seed_count(enough) -> int | None:
    """Smallest seed count that is enough, for a condition that stays true once it is."""
    if not enough(MAX_SEEDS):
        return None
    low, high = 1, MAX_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _worst_power(powers: Sequence[Power]) -> Power:
    def worst(values: list) -> float | int | None:
        return None if not values or None in values else max(values)

    return Power(
        ne_resolvable=worst([p.ne_resolvable for p in powers]),
        seeds_needed=worst([p.seeds_needed for p in powers]),  # type: ignore[arg-type]
        rows_needed=worst([p.rows_needed for p in powers]),  # type: ignore[arg-type]
    )


def _task_verdict(gaps: TaskGaps, *, budget: float, rows: int) -> TaskVerdict:
    seeds = len(gaps.mxfp8)
    if seeds == 0:
        nothing = Power(ne_resolvable=None, seeds_needed=None, rows_needed=None)
        interval = Interval(mean=math.nan, low=-math.inf, high=math.inf)
        reason = f"{gaps.task}: no seed has finished both arms"
        return TaskVerdict(
            task=gaps.task, outcome=Outcome.INCONCLUSIVE, interval=interval, power=nothing, reason=reason
        )
    interval, needed = seed_interval(gaps), power(gaps, budget=budget, rows=rows)
    outcome = Outcome.INCONCLUSIVE
    if seeds > 1 and interval.inside(budget):
        outcome = Outcome.PASS
    elif seeds > 1 and interval.outside(budget):
        outcome = Outcome.FAIL
    reason = _gap_sentence(gaps.task, outcome, interval, needed, budget=budget, seeds=seeds)
    return TaskVerdict(task=gaps.task, outcome=outcome, interval=interval, power=needed, reason=reason)


def _gap_sentence(task: str, outcome: Outcome, interval: Interval, needed: Power, *, budget: float, seeds: int) -> str:
    if seeds == 1:
        return f"{task}: one seed ({interval.mean:+.3%} relative NE) cannot tell a gap from drift; use more seeds"
    measured = (
        f"{task}: relative NE {interval.mean:+.3%}, 90 % interval [{interval.low:+.3%}, {interval.high:+.3%}] "
        f"over {seeds} seeds"
    )
    if outcome is Outcome.PASS:
        return f"{measured}, inside the budget of ±{budget:.3%}"
    if outcome is Outcome.FAIL:
        return f"{measured}, outside the budget of ±{budget:.3%}"
    if needed.ne_resolvable is None:
        return f"{measured}: the gap is undefined"
    return f"{measured}; these rows and seeds resolve ±{needed.ne_resolvable:.3%}, not the budget of ±{budget:.3%}"


def _what_is_known(gates: Sequence[Gate], tasks: Sequence[TaskVerdict]) -> tuple[list[str], list[str]]:
    """Sentences on what the run decided and what it left open."""
    decided, undecided = [], []
    if gates:
        held = sum(gate.holds for gate in gates)
        decided.append(f"same weights, same rows: {held} of {len(gates)} gates hold")
    else:
        undecided.append("same weights, same rows: not measured")
    for task in tasks:
        (undecided if task.outcome is Outcome.INCONCLUSIVE else decided).append(task.reason)
    return decided, undecided
