"""Rows as numpy columns, cut into batches: what every built-in data set is made of.

A data set yields `Rows` chunks of whatever size suits its source; `rebatch` turns them into `Batch`es of
the size asked for, so the rows never depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.types import Batch, DataRequest, FeatureSpec

Part = Literal["train", "heldout"]
DEFAULT_HELDOUT = 0.2


@dataclass(frozen=True, kw_only=True)
class Rows:
    """N rows in time order; shapes and meaning as in `Batch`, in numpy."""

    dense: np.ndarray
    sparse: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    history: np.ndarray | None = None
    history_offsets: np.ndarray | None = None
    segments: np.ndarray | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def slice(self, start: int, stop: int) -> Rows:
        """Rows `start .. stop - 1`, without copying."""
        history, offsets = self.history, self.history_offsets
        if history is not None and offsets is not None:
            history = history[offsets[start] : offsets[stop]]
            offsets = offsets[start : stop + 1] - offsets[start]
        return Rows(
            dense=self.dense[start:stop],
            sparse=self.sparse[start:stop],
            labels=self.labels[start:stop],
            weights=self.weights[start:stop],
            history=history,
            history_offsets=offsets,
            segments=None if self.segments is None else self.segments[start:stop],
        )

    def take(self, index: np.ndarray) -> Rows:
        """The rows at `index` (int positions), in that order."""
        history, offsets = self.history, self.history_offsets
        if history is not None and offsets is not None:
            positions, offsets = ranges(offsets[index], offsets[index + 1])
            history = history[positions]
        return Rows(
            dense=self.dense[index],
            sparse=self.sparse[index],
            labels=self.labels[index],
            weights=self.weights[index],
            history=history,
            history_offsets=offsets,
            segments=None if self.segments is None else self.segments[index],
        )

    def to_batch(self) -> Batch:
        """The same rows as tensors, copied."""

        def long(array: np.ndarray | None) -> torch.Tensor | None:
            return None if array is None else torch.from_numpy(np.array(array, dtype=np.int64))

        sparse = long(self.sparse)
        assert sparse is not None
        return Batch(
            dense=torch.from_numpy(np.array(self.dense, dtype=np.float32)),
            sparse=sparse,
            labels=torch.from_numpy(np.array(self.labels, dtype=np.float32)),
            weights=torch.from_numpy(np.array(self.weights, dtype=np.float32)),
            history=long(self.history),
            history_offsets=long(self.history_offsets),
            segments=long(self.segments),
        )


def ranges(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated `arange(start, stop)` of each pair, and the (N + 1,) offsets of the pieces."""
    lengths = stops - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
    return positions.astype(np.int64), offsets


def concat(parts: list[Rows]) -> Rows:
    """One `Rows` of several, which must have the same columns."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> np.ndarray | None:
        columns = [getattr(p, name) for p in parts]
        return None if columns[0] is None else np.concatenate(columns)

    offsets = None
    if parts[0].history_offsets is not None:
        lengths = [np.diff(p.history_offsets) for p in parts if p.history_offsets is not None]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return Rows(
        dense=np.concatenate([p.dense for p in parts]),
        sparse=np.concatenate([p.sparse for p in parts]),
        labels=np.concatenate([p.labels for p in parts]),
        weights=np.concatenate([p.weights for p in parts]),
        history=joined("history"),
        history_offsets=offsets,
        segments=joined("segments"),
    )


def rebatch(chunks: Iterable[Rows], batch_size: int) -> Iterator[Batch]:
    """Batches of `batch_size` rows, in order, across chunk borders; the last one may be shorter."""
    if batch_size < 1:
        raise DataError(f"batch_size: got {batch_size}, expected at least 1")
    waiting: list[Rows] = []
    count = 0
    for chunk in chunks:
        waiting.append(chunk)
        count += len(chunk)
        if count < batch_size:
            continue
        rows, start = concat(waiting), 0
        while count - start >= batch_size:
            yield rows.slice(start, start + batch_size).to_batch()
            start += batch_size
        waiting, count = [rows.slice(start, count)], count - start
    if count:
        yield concat(waiting).to_batch()


@dataclass(kw_only=True)
class ArrayDataset:
    """A data set small enough to hold: `train` and `heldout` rows in time order."""

    name: str
    spec: FeatureSpec
    train: Rows
    heldout: Rows
    optimal_ne: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def train_batches(self, batch_size: int) -> Iterator[Batch]:
        return rebatch([self.train], batch_size)

    def heldout_batches(self, batch_size: int) -> Iterator[Batch]:
        return rebatch([self.heldout], batch_size)


def heldout_fraction(request: DataRequest) -> float:
    """The share of the last rows held out: 0.2, or `extra["heldout"]`."""
    text = request.extra.get("heldout", str(DEFAULT_HELDOUT))
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0.0 < fraction < 1.0:
        raise DataError(f"data option heldout: got {text!r}, expected a fraction between 0 and 1, such as 0.2")
    return fraction


def check_request(
    request: DataRequest, name: str, *, options: tuple[str, ...] = (), weights: str = "", source: bool = True
) -> None:
    """Reject what a data set cannot honor, every bad field at once.

    `options` are the keys of `extra` it knows besides `heldout`. `weights` is empty where the data set can
    take a `weight_column`; otherwise it says why it cannot. `source` says whether it takes a `:PATH`.
    """
    known = {"heldout", *options}
    problems = [
        f"data option {key!r}: {name} does not know it, expected one of {', '.join(sorted(known))}"
        for key in request.extra
        if key not in known
    ]
    if request.rows is not None and request.rows < 2:
        problems.append(f"rows: got {request.rows}, expected at least 2 (one to train on, one to hold out)")
    if not 0.0 < request.negative_sampling_rate <= 1.0:
        problems.append(f"negative_sampling_rate: got {request.negative_sampling_rate}, expected a rate in (0, 1]")
    if request.source and not source:
        problems.append(f"source: got {request.source!r} after the colon, expected none: say --data {name}")
    if weights and request.weight_column is not None:
        problems.append(f"weight_column: got {request.weight_column!r}, but {weights}; leave it out")
    if problems:
        raise DataError(f"{name}: " + "; ".join(problems))


def codes(values: list[str]) -> tuple[np.ndarray, int]:
    """(N,) ids of strings, 0 for an empty one, and their cardinality."""
    at = {v: i for i, v in enumerate(sorted(set(values) - {""}), start=1)}
    return np.asarray([at.get(v, 0) for v in values]), len(at) + 1


def time_cut(time: np.ndarray, heldout: float, name: str) -> int:
    """The first held-out position of sorted `time`: near the wanted share, where the timestamp changes."""
    changes = 1 + np.flatnonzero(np.diff(time))
    if not changes.size:
        raise DataError(f"{name}: all {len(time)} rows have one timestamp, expected two or more; use more rows")
    return int(changes[np.argmin(np.abs(changes - len(time) * (1 - heldout)))])
