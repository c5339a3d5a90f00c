"""How far predicted rates lie from observed ones: by equal-count bins of the prediction, or by the values of a field.

    ECE          sum over bins of W_b / W * |mean prediction - observed rate|
    Field-RCE    sum over values z of a field of W_z / W * |sum_z w (y - p)| / sum_z w (y + 0.01)

W: weights. Field-RCE is the field-level relative calibration error of Pan et al. 2020, "Field-aware Calibration", with
its epsilon of 0.01. Everything in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxfp8_recipe.monitors.entropy import EntropySums, check_rows

FIELD_EPSILON = 0.01


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
    predictions: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    bins: int = 20,
    order: Tensor | None = None,
) -> list[CalibrationBin]:
    """Predicted against observed rate in bins of equal row count; rows of weight 0 take no part.

    Args:
        predictions, labels, weights: (N,) as in `check_rows`.
        bins: at most this many; fewer when there are fewer rows.
        order: `predictions.argsort(dim=0, stable=True)`, where it is known already; it is most of the work.
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels) if weights is None else weights
    p, y, w = (t.detach().double() for t in (predictions, labels, w))
    order = p.argsort(stable=True) if order is None else order
    curve = []
    for rows in _equal_counts(w, order, bins):
        if not len(rows):
            continue
        weight, label, predicted = (t.index_select(0, rows) for t in (w, y, p))
        share = weight / weight.sum()
        observed = (share * label).sum()
        spread = (share.square() * (label - observed).square()).sum().sqrt()
        curve.append(CalibrationBin(float((share * predicted).sum()), float(observed), float(spread), len(rows)))
    return curve


def expected_calibration_error(
    predictions: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    bins: int = 100,
    order: Tensor | None = None,
) -> Tensor:
    """ECE over bins of equal row count, cut in the order of the predictions; NaN without a row of positive weight.

    Args:
        predictions, labels, weights: (N,) or (N, T) as in `check_rows`; rows of weight 0 take no part.
        bins: at most this many; fewer when there are fewer rows. Tied predictions may fall into two bins.
        order: `predictions.argsort(dim=0, stable=True)`, where it is known already; it is most of the work.

    Returns:
        () or (T,), fp64.
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels) if weights is None else weights
    tasks = predictions.shape[1:].numel()
    order = predictions.detach().argsort(dim=0, stable=True) if order is None else order
    columns = [t.detach().double().reshape(len(predictions), tasks).unbind(1) for t in (predictions, labels, w)]
    orders = order.reshape(len(predictions), tasks).unbind(1)
    per_task = [_ece_one(p, y, v, o, bins) for p, y, v, o in zip(*columns, orders, strict=True)]
    return torch.stack(per_task).reshape(predictions.shape[1:])


def _ece_one(p: Tensor, y: Tensor, w: Tensor, order: Tensor, bins: int) -> Tensor:
    bias = w * (p - y)
    parts = [bias.index_select(0, rows).sum().abs() for rows in _equal_counts(w, order, bins)]
    return torch.stack(parts).sum() / w[w > 0].sum()


def _equal_counts(w: Tensor, order: Tensor, bins: int) -> Sequence[Tensor]:
    """The rows of positive weight by bin, in the order given; one empty bin where there are none."""
    if bins < 1:
        raise ValueError(f"bins: got {bins}, expected at least 1")
    rows = order[w.index_select(0, order) > 0]
    return rows.tensor_split(min(bins, max(len(rows), 1)))


def field_rce(predictions: Tensor, labels: Tensor, field: Tensor, weights: Tensor | None = None) -> Tensor:
    """Field-RCE over the values of one categorical field.

    Args:
        predictions, labels, weights: (N,) or (N, T) as in `check_rows`.
        field: (N,) integer values of the field.

    Returns:
        () or (T,), fp64; NaN without weight.
    """
    _, sums = sums_by_value(predictions, labels, field, weights)
    return field_rce_of(sums).reshape(predictions.shape[1:])


def field_rce_of(sums: Tensor) -> Tensor:
    """Field-RCE (T,) from the sums (S, 4, T) of `sums_by_value`."""
    positives, negatives, predicted = sums[:, 1], sums[:, 2], sums[:, 3]
    weight = positives + negatives
    relative = (positives - predicted).abs() / (positives + FIELD_EPSILON * weight)
    return (weight * relative.nan_to_num(0.0)).sum(0) / weight.sum(0)


def check_field(field: Tensor, predictions: Tensor) -> Tensor:
    """`field`, of one integer a row, or ValueError."""
    if field.shape != predictions.shape[:1] or field.is_floating_point():
        raise ValueError(
            f"field: got {tuple(field.shape)} {field.dtype}, expected one integer per row, ({len(predictions)},)"
        )
    return field


def sums_by_value(
    predictions: Tensor, labels: Tensor, field: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`EntropySums` of the rows of each value of a field.

    Returns:
        The values (S,) int64 in ascending order, and `EntropySums.stack` of each: (S, 4, T), fp64; T is 1 for (N,).
    """
    check_field(field, predictions)
    tasks = predictions.shape[1:].numel()
    terms = EntropySums.terms(predictions, labels, weights).reshape(4, len(predictions), tasks)
    values, index = field.unique(sorted=True, return_inverse=True)
    sums = terms.new_zeros(len(values), 4, terms.shape[2])
    return values.long(), sums.index_add_(0, index, terms.transpose(0, 1))
