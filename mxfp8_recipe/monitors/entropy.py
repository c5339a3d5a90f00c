"""Normalized entropy, calibration and log loss as functions of four fp64 sums.

Over one window of rows with label y, prediction p and weight w (He et al. 2014, "Practical Lessons from
Predicting Clicks on Ads at Facebook"; the definitions torchrec uses):

    CE                       sum(w * -(y log p + (1 - y) log(1 - p)))     p clamped to [1e-12, 1 - 1e-12]
    pos, neg                 sum(w y), sum(w (1 - y))                     m = pos / (pos + neg)
    normalized entropy       CE / (-pos log m - neg log(1 - m))
    calibration              sum(w p) / pos
    calibration-free NE      CE / (-pos log q - neg log(1 - q))           q = sum(w p) / (pos + neg)
    log loss                 CE / (pos + neg)                             nats (torchrec: bits)

Sums of disjoint rows add up, across batches and across ranks. A window without both classes has no normalized
entropy: NaN, never a number. Predictions are probabilities of shape (N,) or (N, num_tasks); results have shape () or
(num_tasks,), fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-12


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


def correct_negative_sampling(
    predictions: Tensor, labels: Tensor, weights: Tensor | None, rate: float | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Predictions and weights on the scale of all rows, where negatives were kept with probability `rate`.

    A model of the sampled rows predicts p; of all rows that is q = p / (p + (1 - p) / rate), and each kept negative
    stands for 1 / rate of them (He et al. 2014, section 6.3).

    Args:
        predictions, labels, weights: as in `check_rows`, shape (N,) or (N, T).
        rate: in (0, 1]; one for all tasks or T of them.

    Returns:
        Corrected predictions and weights, fp64, same shape.
    """
    r = torch.as_tensor(rate, dtype=torch.float64, device=predictions.device)
    if not bool(((r > 0) & (r <= 1)).all()):
        raise ValueError(f"negative sampling rate: got {rate}, expected inside (0, 1], the share of negatives kept")
    p, y = predictions.detach().double(), labels.detach().double()
    w = torch.ones_like(p) if weights is None else weights.detach().double()
    return p / (p + (1 - p) / r), w * (y + (1 - y) / r)


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
        return cls.unstack(cls.terms(predictions, labels, weights).sum(1))

    @staticmethod
    def terms(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """What each checked row adds to the four sums, in the order of `stack`: (4, N) or (4, N, T)."""
        check_rows(predictions, labels, weights)
        p, y = predictions.detach().double(), labels.detach().double()
        w = torch.ones_like(p) if weights is None else weights.detach().double()
        clamped = p.clamp(EPSILON, 1 - EPSILON)
        cross_entropy = -(y * clamped.log() + (1 - y) * torch.log1p(-clamped))
        return torch.stack([w * cross_entropy, w * y, w * (1 - y), w * p])

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
