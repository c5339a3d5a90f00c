"""Area under the ROC curve, exact, weighted, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from mxfp8_recipe.monitors.entropy import check_rows

CHUNK = 1 << 18
"""Rows whose weights are held by class at a time."""


def auc(predictions: Tensor, labels: Tensor, weights: Tensor | None = None, *, order: Tensor | None = None) -> Tensor:
    """Exact weighted area under the ROC curve; tied predictions count half. NaN without both classes.

    A label y in (0, 1) is a row of positive weight w y and negative weight w (1 - y).

    Args:
        predictions, labels, weights: (N,) or (N, T) as in `check_rows`.
        order: `predictions.argsort(dim=0, stable=True)`, where it is known already; it is most of the work.
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels) if weights is None else weights
    tasks = predictions.shape[1:].numel()
    order = predictions.detach().argsort(dim=0, stable=True) if order is None else order
    columns = [t.detach().double().reshape(len(predictions), tasks).unbind(1) for t in (predictions, labels, w)]
    orders = order.reshape(len(predictions), tasks).unbind(1)
    per_task = torch.stack([_auc_one(p, y, v, o) for p, y, v, o in zip(*columns, orders, strict=True)])
    return per_task.reshape(predictions.shape[1:])


def _auc_one(p: Tensor, y: Tensor, w: Tensor, order: Tensor) -> Tensor:
    """P(score of a random positive > score of a random negative) + half P(equal), from sums per distinct score."""
    group = _ranks(p.index_select(0, order))
    positives = p.new_zeros(int(group[-1]) + 1 if len(p) else 0)
    negatives = torch.zeros_like(positives)
    for rows, score in zip(order.split(CHUNK), group.split(CHUNK), strict=True):
        weight, label = w.index_select(0, rows), y.index_select(0, rows)
        positives.index_add_(0, score, weight * label)
        negatives.index_add_(0, score, weight * (1 - label))
    del group
    pairs = positives.sum() * negatives.sum()
    below = negatives.cumsum(0).sub_(negatives)
    return below.add_(negatives.div_(2)).mul_(positives).sum() / torch.where(pairs > 0, pairs, torch.nan)


def _ranks(ascending: Tensor) -> Tensor:
    """(N,) which of the distinct values each is, from 0."""
    new = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=new[1:])
    return new.cumsum(0).sub_(1)
