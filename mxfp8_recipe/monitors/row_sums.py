"""A run's predictions reduced to what a verdict needs: sums by block of time, for all rows and for each segment.

Segments with too few rows or too few of a class are counted, not judged: their NE is mostly noise. Which ones they are
depends on labels and weights alone, so all runs over the same rows keep the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mxfp8_recipe.monitors.bootstrap import (
    BLOCKS,
    NEGATIVES,
    POSITIVES,
    block_edges,
    relative_ne_gap,
    row_noise,
)
from mxfp8_recipe.monitors.entropy import EntropySums
from mxfp8_recipe.monitors.equivalence import TaskGaps

SEGMENT_BLOCKS = 20
CHUNK = 1 << 18
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
    def of(
        cls,
        predictions: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray | None,
        segments: np.ndarray | None = None,
        *,
        blocks: int = BLOCKS,
    ) -> RowSums:
        """From valid rows in time order, some blocks at a time.

        Args:
            predictions, labels, weights: (N,) as in `entropy.check_rows`; None for weights of 1.
            segments: (N,) integers, or None; rows of weight 0 count in no segment.
            blocks: at most this many; runs that are compared need the same number.
        """
        edges = block_edges(len(predictions), blocks)
        count = len(edges) - 1 if len(predictions) else 0
        found_sums = np.zeros((max(count, 1), 4))
        names, few = _large(segments, weights)
        sums, counts, rows = np.zeros((len(names), SEGMENT_BLOCKS, 4)), np.zeros(len(names), dtype=np.int64), 0
        step = max(1, CHUNK * count // max(len(predictions), 1))
        for first in range(0, count, step):
            last = min(first + step, count)
            start, stop = edges[first], edges[last]
            part = [t if t is None else torch.from_numpy(t[start:stop]) for t in (predictions, labels, weights)]
            terms = EntropySums.terms(*part).numpy()  # type: ignore[arg-type]
            kept = np.ones(stop - start, dtype=bool) if weights is None else weights[start:stop] > 0
            found_sums[first:last], rows = (
                np.add.reduceat(terms, edges[first:last] - start, axis=1).T,
                rows + int(kept.sum()),
            )
            if segments is not None and len(names):
                code = np.searchsorted(names, segments[start:stop])
                code[names[np.minimum(code, len(names) - 1)] != segments[start:stop]] = len(names)
                coarse = np.repeat(np.arange(first, last) * SEGMENT_BLOCKS // count, np.diff(edges[first : last + 1]))
                key, size = code * SEGMENT_BLOCKS + coarse, len(names) * SEGMENT_BLOCKS
                found = [np.bincount(key, weights=t, minlength=size)[:size] for t in terms]
                sums += np.stack(found, axis=1).reshape(sums.shape)
                counts += np.bincount(code[kept], minlength=len(names))[: len(names)]
        judged, small = _judged(names, sums, counts)
        return cls(rows, found_sums, judged, small + few)


def _large(segments: np.ndarray | None, weights: np.ndarray | None) -> tuple[np.ndarray, int]:
    """Segments with rows enough to be judged, and how many others have any; so that a million of them cost nothing."""
    if segments is None:
        return np.zeros(0, dtype=np.int64), 0
    names, rows = np.unique(segments, return_counts=True)
    present = names if weights is None else np.unique(segments[weights > 0])
    large = names[rows >= MIN_SEGMENT_ROWS]
    return large, len(present) - int(np.isin(large, present).sum())


def _judged(names: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> tuple[dict[int, SegmentSums], int]:
    """Segments that may be judged alone, largest first, and how many others there are."""
    whole = sums.sum(1)
    enough = (counts >= MIN_SEGMENT_ROWS) & (
        whole[:, [POSITIVES, NEGATIVES]].min(1, initial=np.inf) >= MIN_SEGMENT_CLASS
    )
    chosen = [i for i in np.argsort(-counts, kind="stable") if enough[i]][:MAX_SEGMENTS]
    judged = {int(names[i]): SegmentSums(int(counts[i]), sums[i]) for i in chosen}
    return judged, int((counts > 0).sum()) - len(judged)


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
