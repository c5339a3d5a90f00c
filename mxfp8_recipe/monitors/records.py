"""What the monitors measure, as frozen records that survive a JSON round trip (NaN and infinity included)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of every record: frozen, unknown fields refused, NaN and infinity kept in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SegmentShift(Record):
    """Mean logit error (candidate minus reference) of one segment.

    `segment` is None for the pool of segments too small to be known on their own; `error` is the standard
    error of `mean` over rows.
    """

    segment: int | None
    rows: int
    mean: float
    error: float


class TaskAgreement(Record):
    """One task's predictions of two models with the same weights on the same rows; candidate minus reference.

    Attributes:
        rows: rows compared; every row counts once, whatever its weight, since every row is served.
        logit_rms, logit_mean, logit_max: of the logit error; `logit_mean_error` is the standard error of the mean.
        calibration: sum(w p_candidate) / sum(w p_reference) - 1.
        cross_entropy: weighted mean difference of CE, relative to the reference's CE; `cross_entropy_error` likewise.
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
    segments: tuple[SegmentShift, ...] = ()


class LayerAgreement(Record):
    """One module of both models.

    Attributes:
        layer: fully qualified name.
        quantized: the candidate's module is of another class than the reference's.
        sqnr_db: output signal to error power, upstream error included; None where the output is no float tensor.
        grad_cosine: between the gradients of the module's own parameters; None without any.
        grad_norm_ratio: candidate over reference.
    """

    layer: str
    quantized: bool
    sqnr_db: float | None
    grad_cosine: float | None
    grad_norm_ratio: float | None


class SameWeights(Record):
    """Everything compared between a model and its quantized twin with the same weights."""

    seed: int
    tasks: tuple[TaskAgreement, ...]
    layers: tuple[LayerAgreement, ...]
    grad_cosine: float

    @property
    def identical(self) -> bool:
        """No logit and no gradient differed in any bit that matters: errors and cosine are exact."""
        layers = all(layer.grad_norm_ratio in (None, 1.0) for layer in self.layers)
        return layers and all(task.logit_max == 0 for task in self.tasks)
