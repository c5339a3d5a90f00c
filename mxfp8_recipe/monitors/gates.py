"""Gates: two precisions, the same weights, the same rows, hence no training noise; one broken gate fails.

What is left is row noise: rounding moves each row's logit its own way, and the mean of a few rows is not that of all.
So a mean is judged in one of two ways, with e the half-width of its one-sided 99 % t interval over rows:

* It is known, its standard error at most a quarter of the limit: it breaks its gate beyond the limit.
* It is not: it breaks beyond limit + e, holds within limit - e, and is open in between.

By chance a mean of zero breaks its gate in at most 1 % of all cases, and one of twice the limit holds in at most 1 %,
for each seed and task. Rows are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mxfp8_recipe.monitors import student_t
from mxfp8_recipe.monitors.records import SameWeights, SegmentShift, TaskAgreement
from mxfp8_recipe.monitors.shadow import SEGMENT_RESOLUTION

MIN_SEGMENT_ROWS = 500
ROW_NOISE_LEVEL = 0.99
ROW_NOISE_QUANTILE = 2.326
"""Of the normal distribution, at `ROW_NOISE_LEVEL`."""


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """Limits of the same-weights gates.

    Attributes:
        logit_rms: independent logit errors of RMS 0.03 cost under 0.02 % of NE.
        logit_mean: absolute, as the module docstring says; 0.03 would move calibration by about 3 %.
        segment_mean: the same, for every segment that may be judged (`_segment_means`).
        calibration: relative change of sum(w p); a mean logit error of `logit_mean` moves it by at most that much.
        cross_entropy: relative change of cross entropy, which is that of NE, beyond what row noise explains: harm that
            follows the label moves neither mean nor RMS of the logits much.
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
    cross_entropy: float = 0.001
    grad_error_ratio: float = 16.0
    layer_grad_error_ratio: float = 32.0


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One same-weights check: `value` against `limit`; the worst seed's value.

    `decided` is False where the rows are too few to tell, and then `holds` is too.
    """

    name: str
    value: float
    limit: float
    holds: bool
    detail: str = ""
    decided: bool = True

    @property
    def broken(self) -> bool:
        return self.decided and not self.holds

    def __str__(self) -> str:
        sign = "<=" if self.holds else ">" if self.decided else "against"
        size = f"|{self.value:.3g}|" if self.value < 0 else f"{self.value:.3g}"
        return f"{self.name} {size} {sign} {self.limit:g}{f' ({self.detail})' if self.detail else ''}"


def same_weights_gates(measured: Sequence[SameWeights], limits: GateLimits) -> tuple[Gate, ...]:
    """Every gate at its worst seed; a NaN breaks its gate. Empty when nothing was measured."""
    gates = task_gates([(m.seed, m.tasks) for m in measured], limits)
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


def task_gates(measured: Sequence[tuple[int | str, Sequence[TaskAgreement]]], limits: GateLimits) -> list[Gate]:
    """The gates on predictions alone, at their worst seed.

    Args:
        measured: a seed and its tasks, the same tasks in every seed.
    """
    gates: list[Gate] = []
    for index, task in enumerate(measured[0][1] if measured else ()):
        seeds = [(seed, tasks[index]) for seed, tasks in measured]
        gates += [
            _largest(f"{task.task}: logit RMS error", [(t.logit_rms, f"seed {s}") for s, t in seeds], limits.logit_rms),
            _mean_gate(
                f"{task.task}: mean logit error",
                [(t.logit_mean, t.logit_mean_error, t.rows, s) for s, t in seeds],
                limits.logit_mean,
            ),
            _mean_gate(
                f"{task.task}: calibration change",
                [(t.calibration, t.calibration_error, t.rows, s) for s, t in seeds],
                limits.calibration,
            ),
            _largest(
                f"{task.task}: cross entropy change", [_entropy_change(t, s) for s, t in seeds], limits.cross_entropy
            ),
        ]
        segments = [(v, f"seed {s}, {where}") for s, t in seeds for v, where in _segment_means(t)]
        if segments:
            gates.append(_largest(f"{task.task}: mean logit error of a segment", segments, limits.segment_mean))
    return gates


def _mean_gate(name: str, seeds: list[tuple[float, float, int, int | str]], limit: float) -> Gate:
    """The gate of a mean over rows, as the module docstring says.

    Args:
        seeds: mean, its standard error, rows, seed.
    """
    judged = [_judged_mean(name, *seed, limit) for seed in seeds]
    severity = [(gate.broken, not gate.decided, math.isnan(gate.value), abs(gate.value)) for gate in judged]
    return judged[max(range(len(judged)), key=severity.__getitem__)]


def _judged_mean(name: str, value: float, error: float, rows: int, seed: int | str, limit: float) -> Gate:
    half = 0.0
    if error:
        half = student_t.quantile(ROW_NOISE_LEVEL, rows - 1) * error if rows > 1 else math.inf
    enough = ROW_NOISE_QUANTILE * limit / 4
    known = half <= enough
    breaks = not abs(value) <= (limit if known else limit + half)
    holds = not breaks and (known or abs(value) + half <= limit)
    where = f"seed {seed}"
    if breaks or holds:
        return Gate(name=name, value=value, limit=limit, holds=holds, detail=where)
    more = f"; some {math.ceil(rows * (half / enough) ** 2):,} rows would tell" if math.isfinite(half) else ""
    detail = f"{where}: known to ±{half:.2g} on {rows} rows, which does not tell{more}"
    return Gate(name=name, value=value, limit=limit, holds=False, detail=detail, decided=False)


def beyond_noise(value: float, error: float) -> float:
    """The part of a value that its standard error does not explain, one-sided at 1 %, with its sign."""
    beyond = abs(value) - ROW_NOISE_QUANTILE * error
    return beyond if math.isnan(beyond) else math.copysign(max(beyond, 0.0), value) + 0.0


def _entropy_change(task: TaskAgreement, seed: int | str) -> tuple[float, str]:
    value = beyond_noise(task.cross_entropy, task.cross_entropy_error)
    return value, f"seed {seed}, {task.cross_entropy:+.3%} ± {task.cross_entropy_error:.3%}"


def _segment_means(task: TaskAgreement) -> list[tuple[float, str]]:
    """Mean logit error of each segment that may be judged.

    A few rows may agree with each other by chance, so a segment needs `MIN_SEGMENT_ROWS`, and there are many segments,
    so only what row noise does not explain counts. The pool of small segments is judged where its mean is known well
    and it is not simply every row over again.
    """
    alone = [s for s in task.segments if s.segment is not None and s.rows >= MIN_SEGMENT_ROWS]
    pool = [
        s
        for s in task.segments
        if s.segment is None and alone and MIN_SEGMENT_ROWS <= s.rows < task.rows and s.error <= SEGMENT_RESOLUTION
    ]
    return [_segment_mean(s) for s in (*alone, *pool)]


def _segment_mean(shift: SegmentShift) -> tuple[float, str]:
    name = "small segments" if shift.segment is None else f"segment {shift.segment}"
    return beyond_noise(
        shift.mean, shift.error
    ), f"{shift.mean:+.4f} ± {shift.error:.4f} on {shift.rows} rows of {name}"


def _largest(name: str, values: list[tuple[float, str]], limit: float) -> Gate:
    value, where = max(values, key=lambda pair: math.inf if math.isnan(pair[0]) else abs(pair[0]))
    return Gate(name=name, value=value, limit=limit, holds=abs(value) <= limit, detail=where)
