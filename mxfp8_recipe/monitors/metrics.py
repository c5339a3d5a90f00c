"""Normalized entropy, calibration, log loss and AUC: functions in fp64 and `torchmetrics.Metric` classes over them.

Over one window of rows with label y, prediction p and weight w (He et al. 2014, "Practical Lessons from
Predicting Clicks on Ads at Facebook"; the definitions torchrec uses):

    CE                       sum(w * -(y log p + (1 - y) log(1 - p)))     p clamped to [1e-12, 1 - 1e-12]
    pos, neg                 sum(w y), sum(w (1 - y))                     m = pos / (pos + neg)
    normalized entropy       CE / (-pos log m - neg log(1 - m))
    calibration              sum(w p) / pos
    calibration-free NE      CE / (-pos log q - neg log(1 - q))           q = sum(w p) / (pos + neg)
    log loss                 CE / (pos + neg)                             nats

All but AUC are functions of four sums, which `EntropySums` holds; sums of disjoint rows add up, across batches
and across ranks. A window without both classes has no normalized entropy: NaN, never a number.
Predictions are probabilities of shape (N,) or (N, num_tasks); results have shape () or (num_tasks,), fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from torchmetrics import Metric
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ModuleNotFoundError(
        'mxfp8_recipe.monitors.metrics needs torchmetrics: pip install "mxfp8-recipe[ab]"', name="torchmetrics"
    ) from error

EPSILON = 1e-12
DEFAULT_WINDOW_ROWS = 10_000_000


def check_rows(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
    """Raise one `ValueError` that counts every kind of invalid row.

    Args:
        predictions: (N,) or (N, T) probabilities.
        labels: same shape, in [0, 1].
        weights: same shape, >= 0, or None for 1.
    """
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.shape != predictions.shape:
            raise ValueError(
                f"{name} have shape {tuple(tensor.shape)}, predictions {tuple(predictions.shape)}: they must be equal"
            )
    total = predictions.numel()
    problems = []

    def count(bad: Tensor, what: str) -> None:
        number = int(bad.sum())
        if number:
            problems.append(f"{number} of {total} {what}")

    count(predictions.isnan(), "predictions are NaN")
    count((predictions < 0) | (predictions > 1), "predictions lie outside [0, 1]")
    count(~((labels >= 0) & (labels <= 1)), "labels lie outside [0, 1]")
    if weights is not None:
        count(~((weights >= 0) & weights.isfinite()), "weights are negative or not finite")
    if problems:
        raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class EntropySums:
    """The four fp64 sums over a window of rows that NE, calibration and log loss are functions of.

    Attributes:
        cross_entropy: sum of w * CE, nats; shape () or (num_tasks,), as are the others.
        positives: sum of w * y.
        negatives: sum of w * (1 - y).
        predicted: sum of w * p.
    """

    cross_entropy: Tensor
    positives: Tensor
    negatives: Tensor
    predicted: Tensor

    @classmethod
    def of(cls, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> EntropySums:
        """Sums over the first dimension of checked rows (`check_rows`)."""
        check_rows(predictions, labels, weights)
        p, y = predictions.detach().double(), labels.detach().double()
        w = torch.ones_like(p) if weights is None else weights.detach().double()
        clamped = p.clamp(EPSILON, 1 - EPSILON)
        cross_entropy = -(y * clamped.log() + (1 - y) * torch.log1p(-clamped))
        return cls((w * cross_entropy).sum(0), (w * y).sum(0), (w * (1 - y)).sum(0), (w * p).sum(0))

    @classmethod
    def unstack(cls, sums: Tensor) -> EntropySums:
        """The inverse of `stack`: (4,) or (4, T)."""
        return cls(*sums.unbind(0))

    def stack(self) -> Tensor:
        """One tensor of shape (4,) or (4, T)."""
        return torch.stack([self.cross_entropy, self.positives, self.negatives, self.predicted])

    def __add__(self, other: EntropySums) -> EntropySums:
        return EntropySums.unstack(self.stack() + other.stack())

    @property
    def weight(self) -> Tensor:
        return self.positives + self.negatives

    def entropy_at(self, rate: Tensor) -> Tensor:
        """Cross entropy of predicting `rate` for every row; NaN where only one class was seen."""
        entropy = -self.positives * rate.log() - self.negatives * torch.log1p(-rate)
        both = (self.positives > 0) & (self.negatives > 0)
        return torch.where(both, entropy, torch.full_like(entropy, torch.nan))

    @property
    def normalized_entropy(self) -> Tensor:
        return self.cross_entropy / self.entropy_at(self.positives / self.weight)

    @property
    def calibration_free_ne(self) -> Tensor:
        return self.cross_entropy / self.entropy_at((self.predicted / self.weight).clamp(EPSILON, 1 - EPSILON))

    @property
    def calibration(self) -> Tensor:
        return torch.where(self.positives > 0, self.predicted / self.positives, torch.nan)

    @property
    def log_loss(self) -> Tensor:
        return self.cross_entropy / self.weight


def normalized_entropy(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross entropy relative to predicting the rows' own base rate; below 1 is better than the base rate."""
    return EntropySums.of(predictions, labels, weights).normalized_entropy


def calibration(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Predicted over observed positives; 1 is calibrated."""
    return EntropySums.of(predictions, labels, weights).calibration


def calibration_free_ne(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross entropy relative to predicting the *mean prediction*: a global bias cancels to first order."""
    return EntropySums.of(predictions, labels, weights).calibration_free_ne


def log_loss(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted mean cross entropy, nats a row."""
    return EntropySums.of(predictions, labels, weights).log_loss


def auc(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Exact weighted area under the ROC curve; tied predictions count half. NaN without both classes.

    A label y in (0, 1) is a row of positive weight w y and negative weight w (1 - y).
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels) if weights is None else weights
    columns = [t.detach().double().reshape(len(predictions), -1).unbind(1) for t in (predictions, labels, w)]
    per_task = torch.stack([_auc_one(p, y, v) for p, y, v in zip(*columns, strict=True)])
    return per_task.reshape(predictions.shape[1:])


def _auc_one(p: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """P(score of a random positive > score of a random negative) + half P(equal), from sums per distinct score."""
    _, group = p.unique(sorted=True, return_inverse=True)
    size = int(group.max()) + 1 if len(p) else 0
    positives = p.new_zeros(size).index_add_(0, group, w * y)
    negatives = p.new_zeros(size).index_add_(0, group, w * (1 - y))
    below = negatives.cumsum(0) - negatives
    pairs = positives.sum() * negatives.sum()
    return (positives * (below + negatives / 2)).sum() / torch.where(pairs > 0, pairs, torch.nan)


@dataclass(frozen=True)
class CalibrationBin:
    """One equal-count bin of rows sorted by prediction.

    `observed_error` is the standard error of the observed rate, `rows` the rows of positive weight.
    """

    predicted: float
    observed: float
    observed_error: float
    rows: int


def calibration_curve(
    predictions: Tensor, labels: Tensor, weights: Tensor | None = None, *, bins: int = 20
) -> list[CalibrationBin]:
    """Predicted against observed rate in bins of equal row count; rows of weight 0 take no part.

    Args:
        predictions, labels, weights: (N,) as in `check_rows`.
        bins: at most this many; fewer when there are fewer rows.
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.detach().double()
    kept = w > 0
    p, y, w = predictions.detach().double()[kept], labels.detach().double()[kept], w[kept]
    order = p.argsort(stable=True)
    curve = []
    for rows in order.tensor_split(min(bins, max(len(order), 1))):
        if len(rows) == 0:
            continue
        share = w[rows] / w[rows].sum()
        observed = (share * y[rows]).sum()
        spread = (share.square() * (y[rows] - observed).square()).sum().sqrt()
        curve.append(CalibrationBin(float((share * p[rows]).sum()), float(observed), float(spread), len(rows)))
    return curve


class _EntropyMetric(Metric):
    """A metric over `EntropySums`, over every row seen (`window_rows=None`) or over the most recent ones.

    Args:
        num_tasks: T of predictions (N, T); 1 takes (N,) too.
        window_rows: rows over all ranks that the window holds, in whole batches; None for lifetime.
        **kwargs: of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = True

    def __init__(self, num_tasks: int = 1, *, window_rows: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_tasks < 1 or (window_rows is not None and window_rows < 1):
            raise ValueError(f"num_tasks={num_tasks} and window_rows={window_rows} must be at least 1")
        self.num_tasks = num_tasks
        self.window_rows = window_rows
        self.sums: Any
        self.rows: Any
        if window_rows is None:
            self.add_state("sums", torch.zeros(1, 4, num_tasks, dtype=torch.float64), dist_reduce_fx="sum")
        else:
            self.add_state("sums", [], dist_reduce_fx="cat")
            self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; (N, num_tasks), or (N,) when num_tasks is 1."""
        columns = [t if t is None else self._columns(t) for t in (predictions, labels, weights)]
        batch = EntropySums.of(columns[0], columns[1], columns[2]).stack().unsqueeze(0)  # type: ignore[arg-type]
        if self.window_rows is None:
            self.sums = self.sums + batch
            return
        self.sums.append(batch)
        self.rows.append(torch.tensor([len(predictions)], device=batch.device))
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        while len(self.rows) > 1 and int(torch.cat(self.rows[1:]).sum()) >= -(-self.window_rows // world):
            self.sums.pop(0)
            self.rows.pop(0)

    def _columns(self, tensor: Tensor) -> Tensor:
        shaped = tensor.unsqueeze(1) if tensor.ndim == 1 else tensor
        if shaped.ndim != 2 or shaped.shape[1] != self.num_tasks:
            raise ValueError(f"got shape {tuple(tensor.shape)}, expected (N, {self.num_tasks})")
        return shaped

    def compute(self) -> Tensor:
        """The metric of each task: (num_tasks,), or () when num_tasks is 1."""
        sums = torch.cat(self.sums) if isinstance(self.sums, list) and self.sums else self.sums
        if isinstance(sums, list):
            sums = torch.zeros(1, 4, self.num_tasks, dtype=torch.float64, device=self.device)
        value = self._value(EntropySums.unstack(sums.sum(0)))
        return value.squeeze(0) if self.num_tasks == 1 else value

    def _value(self, sums: EntropySums) -> Tensor:
        raise NotImplementedError


class NormalizedEntropy(_EntropyMetric):
    """Streaming `normalized_entropy`; pass `window_rows=DEFAULT_WINDOW_ROWS` for the windowed one."""

    higher_is_better = False

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.normalized_entropy


class CalibrationFreeNE(_EntropyMetric):
    """Streaming `calibration_free_ne`."""

    higher_is_better = False

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.calibration_free_ne


class Calibration(_EntropyMetric):
    """Streaming `calibration`."""

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.calibration


class LogLoss(_EntropyMetric):
    """Streaming `log_loss`."""

    higher_is_better = False

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.log_loss


class AUC(Metric):
    """Exact streaming `auc`. It keeps every row: 24 bytes a row and task."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, num_tasks: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_tasks = num_tasks
        self.seen: Any
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; (N, num_tasks), or (N,) when num_tasks is 1."""
        check_rows(predictions, labels, weights)
        w = torch.ones_like(labels) if weights is None else weights
        rows = [t.detach().double().reshape(len(predictions), self.num_tasks) for t in (predictions, labels, w)]
        self.seen.append(torch.stack(rows, dim=1))

    def compute(self) -> Tensor:
        """(num_tasks,), or () when num_tasks is 1; NaN before the first row."""
        seen: Sequence[Tensor] | Tensor = self.seen
        if isinstance(seen, Tensor):
            rows = seen
        elif seen:
            rows = torch.cat(list(seen))
        else:
            rows = torch.zeros(0, 3, self.num_tasks, dtype=torch.float64, device=self.device)
        value = auc(rows[:, 0], rows[:, 1], rows[:, 2])
        return value.squeeze(0) if self.num_tasks == 1 else value
