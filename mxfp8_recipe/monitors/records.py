"""What the monitors measure, as frozen records that survive a JSON round trip (NaN and infinity included)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

BF16_ROUNDOFF = 2.0**-9
"""Relative error of one rounding to BF16, in round numbers: half an ulp of a significand of 8 bits at most."""


class Record(BaseModel):
    """Base of every record: frozen, unknown fields refused, NaN and infinity kept in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SegmentShift(Record):
    """Mean logit error (candidate minus reference) of one segment.

    `segment` is its number or name, None for the pool of segments too small to be known on their own; `error` is
    the standard error of `mean` over rows.
    """

    segment: int | str | None
    rows: int
    mean: float
    error: float


class TaskAgreement(Record):
    """One task's predictions of two models with the same weights on the same rows; candidate minus reference.

    The reference runs in BF16, and once more in FP32: what BF16 itself does to the same rows is the scale to read
    the candidate's errors by.

    Attributes:
        rows: rows compared; every row counts once, whatever its weight, since every row is served.
        logit_rms, logit_mean, logit_max: of the logit error; `logit_mean_error` is the standard error of the mean.
        calibration: sum(w p_candidate) / sum(w p_reference) - 1; `calibration_error` its standard error over rows.
        cross_entropy: weighted mean difference of CE, relative to the reference's CE; `cross_entropy_error` likewise.
        bf16_logit_rms, bf16_logit_mean: of the reference's own error, BF16 minus FP32.
        segments: mean logit error by segment.
    """

    task: str
    rows: int
    logit_rms: float
    logit_mean: float
    logit_mean_error: float
    logit_max: float
    calibration: float
    cross_entropy: float
    cross_entropy_error: float
    bf16_logit_rms: float
    bf16_logit_mean: float
    calibration_error: float = 0.0
    segments: tuple[SegmentShift, ...] = ()


class GradientAgreement(Record):
    """Gradients of the same loss by candidate and reference.

    Attributes:
        cosine: between the two.
        error: norm of their difference over the norm of the reference's.
        bf16_error: the same between the reference in BF16 and in FP32.
    """

    cosine: float
    error: float
    bf16_error: float

    def error_ratio(self, at_least: float = BF16_ROUNDOFF) -> float:
        """Error in units of BF16's own, which is taken to be at least `at_least`."""
        return self.error / max(self.bf16_error, at_least, BF16_ROUNDOFF)


class LayerAgreement(Record):
    """One module of both models.

    Attributes:
        layer: fully qualified name.
        quantized: the candidate's module is of another class than the reference's.
        sqnr_db: output signal to error power, upstream error included; None where the output is no float tensor.
        gradient: of the module's own parameters; None without any.
    """

    layer: str
    quantized: bool
    sqnr_db: float | None
    gradient: GradientAgreement | None


class SameWeights(Record):
    """Everything compared between a model and its quantized twin with the same weights."""

    seed: int
    tasks: tuple[TaskAgreement, ...]
    layers: tuple[LayerAgreement, ...]
    gradient: GradientAgreement

    def layer_error_ratio(self, layer: LayerAgreement) -> float | None:
        """A layer's gradient error in units of BF16's own, of that layer or of the whole gradient, the larger.

        BF16's error of one layer is a single draw and can be small by luck; the whole gradient's rarely is.
        """
        return layer.gradient and layer.gradient.error_ratio(self.gradient.bf16_error)

    @property
    def identical(self) -> bool:
        """No logit and no gradient of the two differs."""
        return self.gradient.error == 0 and all(task.logit_max == 0 for task in self.tasks)
