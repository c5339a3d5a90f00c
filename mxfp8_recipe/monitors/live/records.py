"""What one report of a `NumericsMonitor` holds, as frozen records that survive a JSON round trip."""

from __future__ import annotations

from enum import Enum

from mxfp8_recipe.monitors.records import Record

GRADIENTS = ("grad_output", "grad_scores")
"""Tensors of a layer that backward gives."""


class TensorStatistics(Record):
    """One operand of an MXFP8 layer on one sampled step, over all ranks.

    Attributes:
        amax: largest magnitude in rows without NaN or Inf, of the whole tensor.
        scale_min, scale_max: exponents of the smallest and largest scale; None where every block is zero or not finite.
        sqnr_db: signal to quantization noise; None without a signal, infinite without noise.
        underflow_frac: share of the nonzero elements that quantize to zero.
        saturation_frac: share of the elements beyond what their scale can hold.
        nonfinite_blocks: blocks of 32 with NaN or Inf, out of `blocks`; whole tensor.
    """

    amax: float
    scale_min: int | None
    scale_max: int | None
    sqnr_db: float | None
    underflow_frac: float
    saturation_frac: float
    nonfinite_blocks: int
    blocks: int


class LayerStatistics(Record):
    """One layer.

    Attributes:
        layer: FQN; of a multi-head layer's projections with `.in_proj` or `.out_proj` behind it.
        tensors: `input`, `weight` and `grad_output` of a linear, `probs` (P) and `grad_scores` (dS) of attention.
        gemm_sqnr_db: output error of `fprop`, `dgrad` and `wgrad` against BF16 on the same operands; None where the
            output is zero.
    """

    layer: str
    tensors: dict[str, TensorStatistics]
    gemm_sqnr_db: dict[str, float | None]


class RunningMetrics(Record):
    """Metrics over the rows of every report so far, or over a window of them.

    `normalized_entropy` is None for predictions over several classes, whose base rate it does not know;
    `calibration` is then confidence over accuracy.
    """

    normalized_entropy: float | None
    calibration: float | None
    log_loss: float | None


class ShadowAgreement(Record):
    """One task: MXFP8 against the BF16 shadow, same weights, same rows, same random state, over all ranks.

    Attributes:
        task: its name, or its number.
        rows: compared on this step.
        logit_rms, logit_mean, logit_max: of the logit error, MXFP8 minus shadow.
        cross_entropy: weighted mean difference of CE, nats a row; `cross_entropy_error` its standard error (paired).
        calibration: sum(w p_mxfp8) / sum(w p_shadow).
        entropy, shadow_entropy: mean entropy of the predictions, nats.
        mxfp8, shadow: running metrics, lifetime. mxfp8_window, shadow_window: of the last reports.
    """

    task: str
    rows: int
    logit_rms: float
    logit_mean: float
    logit_max: float
    cross_entropy: float
    cross_entropy_error: float
    calibration: float | None
    entropy: float
    shadow_entropy: float
    mxfp8: RunningMetrics
    shadow: RunningMetrics
    mxfp8_window: RunningMetrics
    shadow_window: RunningMetrics


class AlarmKind(str, Enum):
    """What an alarm is about."""

    NONFINITE = "nonfinite"
    DEAD = "dead"
    SQNR = "sqnr"
    UNDERFLOW = "underflow"
    SATURATION = "saturation"
    OUTLIER = "outlier"
    CALIBRATION = "calibration"
    FLATTENING = "flattening"


class Alarm(Record):
    """A limit that was crossed, or a value that came back from beyond one (`cleared`).

    Attributes:
        kind: what about. layer, tensor: where; the task and `predictions` for what concerns the model's output.
        step: of the report. value: what was seen. limit: what it crossed. baseline: what it was, if that matters.
        message: all of it in a sentence, with the remedy.
        dump: file with the operands of a non-finite block, or None.
    """

    kind: AlarmKind
    layer: str
    tensor: str
    step: int
    value: float
    limit: float
    baseline: float | None = None
    cleared: bool = False
    message: str
    dump: str | None = None


class MonitorReport(Record):
    """Everything seen on one sampled step.

    Attributes:
        step: number of the step, from 0. layers: in the model's order. predictions: one entry a task.
        gradient_cosine: of each module's own parameters, MXFP8 against shadow, where backward was asked for.
        alarms: raised or cleared on this step. active: all that stand, as `kind layer tensor`.
        demoted: layers that run in BF16 since an alarm, with the reason.
        notes: what could not be seen on this step, and why.
        seconds: host time the monitor took for this step.
    """

    step: int
    layers: tuple[LayerStatistics, ...]
    predictions: tuple[ShadowAgreement, ...]
    gradient_cosine: dict[str, float]
    alarms: tuple[Alarm, ...]
    active: tuple[str, ...]
    demoted: dict[str, str]
    notes: tuple[str, ...]
    seconds: float
