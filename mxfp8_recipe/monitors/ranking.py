"""Area under the ROC curve, exact, weighted, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp8_recipe.monitors.entropy import check_rows


def auc(predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Exact weighted area under the ROC curve; tied predictions count half. NaN without both classes.

    A label y in (0, 1) is a row of positive weight w y and negative weight w (1 - y).
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels) if weights is None else weights
    tasks = predictions.shape[1:].numel()
    columns = [t.detach().double().reshape(len(predictions), tasks).unbind(1) for t in (predictions, labels, w)]
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
