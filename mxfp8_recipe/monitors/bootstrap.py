"""Paired block bootstrap: how much a gap between two sets of predictions owes to the rows at hand.

Rows in time order are cut into consecutive blocks of equal count, each reduced to the four sums that NE is a function
of. A resample draws blocks with replacement and takes the same ones for every run, so that what rows have in common
cancels, and neighbors in time stay together (Carlstein 1986; Kunsch 1989). Serial correlation is carried up to the
length of a block, rows / `BLOCKS`.

Over n seeds the noise of rows has two parts: the part that each seed's pair draws for itself, which the spread over
seeds shows anyway, and the part that all seeds share because all are judged on the same rows, which no number of
seeds shows.
With V_1 the variance of one seed's gap over resamples and V_n that of the mean of n,

    shared = (n V_n - V_1) / (n - 1)        the mean covariance of two seeds' gaps
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCKS = 100
RESAMPLES = 1000
MAX_UNDEFINED = 0.1
"""Share of resamples without both classes above which rows are too few to speak of noise."""

CROSS_ENTROPY, POSITIVES, NEGATIVES, PREDICTED = range(4)


@dataclass(frozen=True, kw_only=True)
class RowNoise:
    """Variances of a gap over resampled rows, in the gap's unit squared; NaN where a class is too rare.

    `single`: of one seed's gap, mean over seeds. `shared`: the covariance between seeds, at least 0; with one seed it
    cannot be told from `single`, which then stands for both.
    """

    single: float
    shared: float


def block_edges(rows: int, blocks: int = BLOCKS) -> np.ndarray:
    """Where blocks of equal count start and end: (B + 1,) row numbers; at most one block a row."""
    return np.linspace(0, rows, min(blocks, max(rows, 1)) + 1).astype(np.int64)


def block_sums(terms: np.ndarray, blocks: int = BLOCKS) -> np.ndarray:
    """Sums over time blocks.

    Args:
        terms: (N, 4) fp64, what each row adds to the sums of `entropy.EntropySums`, rows in time order.
        blocks: at most this many.

    Returns:
        (B, 4), fp64.
    """
    if not len(terms):
        return np.zeros((1, 4))
    return np.add.reduceat(terms, block_edges(len(terms), blocks)[:-1], axis=0)


def normalized_entropy_of(sums: np.ndarray) -> np.ndarray:
    """NE (...) of sums (..., 4); NaN without both classes."""
    positives, negatives = sums[..., POSITIVES], sums[..., NEGATIVES]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = positives / (positives + negatives)
        entropy = -positives * np.log(rate) - negatives * np.log1p(-rate)
        return np.where((positives > 0) & (negatives > 0), sums[..., CROSS_ENTROPY] / entropy, np.nan)


def relative_ne_gap(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """NE of the candidate relative to the reference's, minus 1, from sums (..., 4)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return normalized_entropy_of(candidate) / normalized_entropy_of(reference) - 1


def relative_calibration_gap(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Calibration of the candidate relative to the reference's, minus 1: their labels are the same and cancel."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return candidate[..., PREDICTED] / reference[..., PREDICTED] - 1


def resampled_gaps(
    reference: np.ndarray, candidate: np.ndarray, *, gap=relative_ne_gap, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """The gap on each resample.

    Args:
        reference, candidate: (n, B, 4) block sums of n seeds over the same rows.
        gap: of sums (..., 4), `relative_ne_gap` or `relative_calibration_gap`.
        seed: of the resampling; equal seeds and block counts draw the same blocks.

    Returns:
        (resamples, n), fp64, NaN for a resample without both classes.
    """
    if reference.shape != candidate.shape or reference.ndim != 3 or reference.shape[-1] != 4:
        raise ValueError(f"block sums: got {reference.shape} and {candidate.shape}, expected (seeds, blocks, 4) twice")
    blocks = reference.shape[1]
    draws = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples).astype(float)
    return gap(np.moveaxis(draws @ reference, 0, 1), np.moveaxis(draws @ candidate, 0, 1))


def row_noise(reference: np.ndarray, candidate: np.ndarray, **options) -> RowNoise:
    """`RowNoise` of the gaps of n seeds; arguments of `resampled_gaps`."""
    gaps = resampled_gaps(reference, candidate, **options)
    defined = gaps[np.isfinite(gaps).all(axis=1)]
    if len(defined) < (1 - MAX_UNDEFINED) * len(gaps) or reference.shape[1] < 2:
        return RowNoise(single=float("nan"), shared=float("nan"))
    single = float(defined.var(axis=0, ddof=1).mean())
    seeds = gaps.shape[1]
    if seeds == 1:
        return RowNoise(single=single, shared=single)
    of_mean = float(defined.mean(axis=1).var(ddof=1))
    return RowNoise(single=single, shared=max(0.0, (seeds * of_mean - single) / (seeds - 1)))
