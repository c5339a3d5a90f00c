"""A run's predictions reduced to what a verdict needs: sums by block of time, for all rows and for each segment.

Segments with too few rows or too few of a class are counted, not judged: their NE is mostly noise. Which ones they are
depends on labels and weights alone, so all runs over the same rows keep the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mxfp8_recipe.monitors.bootstrap import (
    NEGATIVES,
    POSITIVES,
    block_edges,
    block_sums,
    relative_ne_gap,
    row_noise,
)
from mxfp8_recipe.monitors.equivalence import TaskGaps

SEGMENT_BLOCKS = 20
MIN_SEGMENT_ROWS = 1000
MIN_SEGMENT_CLASS = 100.0
"""Weight of positives, and of negatives, that a segment needs to be judged alone: NE of 100 positives has a standard
error of some 10 %."""
MAX_SEGMENTS = 20
"""The largest by rows; more would only thin out the level each is tested at."""


@dataclass(frozen=True)
class SegmentSums:
    """One segment: rows of positive weight, and its sums (b, 4) by block of time."""

    rows: int
    blocks: np.ndarray


@dataclass(frozen=True)
class RowSums:
    """One task of one run.

    Attributes:
        rows: of positive weight.
        blocks: (B, 4) sums by block of time.
        segments: by segment, largest first; `small` are those left out.
    """

    rows: int
    blocks: np.ndarray
    segments: Mapping[int, SegmentSums] = field(default_factory=dict)
    small: int = 0

    @classmethod
    def of(cls, terms: np.ndarray, weights: np.ndarray, segments: np.ndarray | None = None) -> RowSums:
        """From rows in time order.

        Args:
            terms: (N, 4) fp64, as `entropy.EntropySums.terms` gives them, transposed.
            weights: (N,); rows of weight 0 count in no segment.
            segments: (N,) integers, or None.
        """
        rows = int((weights > 0).sum())
        if segments is None:
            return cls(rows, block_sums(terms))
        values, index = np.unique(segments, return_inverse=True)
        counts = np.bincount(index[weights > 0], minlength=len(values))
        sums = _by_block(terms, index, len(values))
        whole = sums.sum(1)
        enough = (counts >= MIN_SEGMENT_ROWS) & (whole[:, [POSITIVES, NEGATIVES]].min(1) >= MIN_SEGMENT_CLASS)
        chosen = [i for i in np.argsort(-counts, kind="stable") if enough[i]][:MAX_SEGMENTS]
        judged = {int(values[i]): SegmentSums(int(counts[i]), sums[i]) for i in chosen}
        return cls(rows, block_sums(terms), judged, int((counts > 0).sum()) - len(judged))


def _by_block(terms: np.ndarray, segment: np.ndarray, segments: int) -> np.ndarray:
    """(S, b, 4): sums of each segment in each block of time."""
    edges = block_edges(len(terms), SEGMENT_BLOCKS)
    block = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    key, size = segment * (len(edges) - 1) + block, segments * (len(edges) - 1)
    sums = np.stack([np.bincount(key, weights=column, minlength=size) for column in terms.T], axis=1)
    return sums.reshape(segments, len(edges) - 1, 4)


def gaps_of(
    task: str,
    reference: Sequence[np.ndarray],
    candidate: Sequence[np.ndarray],
    placebos: Mapping[str, Sequence[float]],
    *,
    segment: str = "",
    rows: int | None = None,
) -> TaskGaps:
    """Gaps of n seeds from their block sums (B, 4), with the row noise they share.

    Args:
        reference, candidate: one of each for a seed, over the same rows.
        placebos: a placebo's name to its relative gaps.
        segment, rows: for the record.
    """
    base, other = np.stack(reference), np.stack(candidate)
    total = base.sum((0, 1)) / len(base)
    return TaskGaps(
        task=task,
        mxfp8=tuple(relative_ne_gap(base.sum(1), other.sum(1)).tolist()),
        placebos={name: tuple(gaps) for name, gaps in placebos.items()},
        shared_row_variance=row_noise(base, other).shared if base.shape[1] > 1 else 0.0,
        row_blocks=base.shape[1],
        segment=segment,
        rows=rows,
        positives=float(total[POSITIVES]),
        negatives=float(total[NEGATIVES]),
    )
