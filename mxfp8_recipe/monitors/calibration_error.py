"""How far predicted rates lie from observed ones: by equal-count bins of the prediction, or by the values of a field.

    ECE          sum over bins of W_b / W * |mean prediction - observed rate|
    Field-RCE    sum over values z of a field of W_z / W * |sum_z w (y - p)| / sum_z w (y + 0.01)

W: weights. Field-RCE is the field-level relative calibration error of Pan et al. 2020, "Field-aware Calibration", with
its epsilon of 0.01. Everything in fp64.
"""

from __future__ import annotations

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
    predictions: Tensor, labels: Tensor, weights: Tensor | None = None, *, bins: int = 20
) -> list[CalibrationBin]:
    """Predicted against observed rate in bins of equal row count; rows of weight 0 take no part.

    Args:
        predictions, labels, weights: (N,) as in `check_rows`.
        bins: at most this many; fewer when there are fewer rows.
    """
    check_rows(predictions, labels, weights)
    p, y, w = _kept(predictions, labels, weights)
    curve = []
    for rows in _equal_counts(p, bins):
        share = w[rows] / w[rows].sum()
        observed = (share * y[rows]).sum()
        spread = (share.square() * (y[rows] - observed).square()).sum().sqrt()
        curve.append(CalibrationBin(float((share * p[rows]).sum()), float(observed), float(spread), len(rows)))
    return curve


def expected_calibration_error(
    predictions: Tensor, labels: Tensor, weights: Tensor | None = None, *, bins: int = 100
) -> Tensor:
    """ECE over bins of equal row count, cut in the order of the predictions; NaN without a row of positive weight.

    Args:
        predictions, labels, weights: (N,) or (N, T) as in `check_rows`; rows of weight 0 take no part.
        bins: at most this many; fewer when there are fewer rows. Tied predictions may fall into two bins.

    Returns:
        () or (T,), fp64.
    """
    check_rows(predictions, labels, weights)
    w = torch.ones_like(labels) if weights is None else weights
    tasks = predictions.shape[1:].numel()
    columns = [t.detach().reshape(len(predictions), tasks).unbind(1) for t in (predictions, labels, w)]
    per_task = [_ece_one(*_kept(p, y, v), bins) for p, y, v in zip(*columns, strict=True)]
    return torch.stack(per_task).reshape(predictions.shape[1:])


def _ece_one(p: Tensor, y: Tensor, w: Tensor, bins: int) -> Tensor:
    if not len(p):
        return p.new_tensor(torch.nan)
    excess = (w * (p - y))[p.argsort(stable=True)]
    return torch.stack([part.sum().abs() for part in excess.tensor_split(_bin_count(bins, len(p)))]).sum() / w.sum()


def _kept(predictions: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of positive weight, fp64."""
    w = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.detach().double()
    kept = w > 0
    return predictions.detach().double()[kept], labels.detach().double()[kept], w[kept]


def _equal_counts(p: Tensor, bins: int) -> list[Tensor]:
    """Row indices of each non-empty bin, in the order of the predictions."""
    return [rows for rows in p.argsort(stable=True).tensor_split(_bin_count(bins, len(p))) if len(rows)]


def _bin_count(bins: int, rows: int) -> int:
    if bins < 1:
        raise ValueError(f"bins: got {bins}, expected at least 1")
    return min(bins, max(rows, 1))


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
