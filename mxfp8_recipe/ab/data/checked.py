"""A data set somebody else wrote, each batch held to the contract of `Batch` and `FeatureSpec`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.types import Batch, Dataset, FeatureSpec


class CheckedDataset:
    """The same rows as `dataset`, or a `DataError` that names the batch, the column and the count."""

    def __init__(self, dataset: Dataset, reference: str) -> None:
        members = ("name", "spec", "train_batches", "heldout_batches")
        missing = [m for m in members if not hasattr(dataset, m)]
        if missing:
            raise DataError(
                f"data {reference}: it returned {type(dataset).__name__} without {', '.join(missing)}, expected a "
                "Dataset as in mxfp8_recipe.ab.types"
            )
        if not isinstance(dataset.spec, FeatureSpec):
            raise DataError(f"data {reference}: spec is {type(dataset.spec).__name__}, expected a FeatureSpec")
        self.dataset, self.reference = dataset, reference
        self.name, self.spec = dataset.name, dataset.spec
        self.optimal_ne: dict[str, float] = getattr(dataset, "optimal_ne", {})
        self.notes: list[str] = getattr(dataset, "notes", [])

    def train_batches(self, batch_size: int) -> Iterator[Batch]:
        return self._checked("train", self.dataset.train_batches(batch_size))

    def heldout_batches(self, batch_size: int) -> Iterator[Batch]:
        return self._checked("held-out", self.dataset.heldout_batches(batch_size))

    def _checked(self, part: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            problems = batch_problems(batch, self.spec)
            if problems:
                raise DataError(f"data {self.reference}, {part} batch {number}: " + "; ".join(problems))
            yield batch


def batch_problems(batch: Batch, spec: FeatureSpec) -> list[str]:
    """Every way in which `batch` breaks the contract, in words; empty if it keeps it."""
    rows = len(batch)
    shapes = {
        "dense": (batch.dense, (rows, spec.num_dense)),
        "sparse": (batch.sparse, (rows, len(spec.cardinalities))),
        "labels": (batch.labels, (rows, len(spec.tasks))),
        "weights": (batch.weights, (rows, len(spec.tasks))),
    }
    problems = [
        f"{name}: shape {tuple(tensor.shape)}, expected {expected}"
        for name, (tensor, expected) in shapes.items()
        if tuple(tensor.shape) != expected
    ]
    if problems:
        return problems
    for t, task in enumerate(spec.tasks):
        outside = ~((batch.labels[:, t] >= 0) & (batch.labels[:, t] <= 1))
        problems += _count(f"labels of {task}", outside, batch.labels[:, t], "a value in [0, 1]")
        bad = ~(torch.isfinite(batch.weights[:, t]) & (batch.weights[:, t] >= 0))
        problems += _count(f"weights of {task}", bad, batch.weights[:, t], "a finite weight >= 0")
    for d in range(spec.num_dense):
        problems += _count(f"dense[:, {d}]", ~torch.isfinite(batch.dense[:, d]), batch.dense[:, d], "a finite value")
    for f, size in enumerate(spec.cardinalities):
        ids = batch.sparse[:, f]
        problems += _count(f"sparse[:, {f}]", (ids < 0) | (ids >= size), ids, f"an id in 0..{size - 1}")
    return problems + _history_problems(batch, spec)


def _count(what: str, bad: torch.Tensor, values: torch.Tensor, expected: str) -> list[str]:
    where = torch.nonzero(bad)[:, 0]
    if not len(where):
        return []
    first = int(where[0])
    return [f"{what}: got {values[first].item()} at row {first}, expected {expected} ({len(where)} such rows)"]


def _history_problems(batch: Batch, spec: FeatureSpec) -> list[str]:
    if spec.history_field is None:
        return []
    history, offsets = batch.history, batch.history_offsets
    if history is None or offsets is None:
        return ["history: none, but the spec has a history_field; give history and history_offsets"]
    if tuple(offsets.shape) != (len(batch) + 1,):
        return [f"history_offsets: shape {tuple(offsets.shape)}, expected ({len(batch) + 1},)"]
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(history) or bool((lengths < 0).any()):
        return [f"history_offsets: expected to rise from 0 to {len(history)}, the number of events"]
    problems = _count(
        "history lengths", lengths > spec.max_history, lengths, f"at most max_history={spec.max_history} events"
    )
    size = spec.cardinalities[spec.history_field]
    return problems + _count("history", (history < 0) | (history >= size), history, f"an id in 0..{size - 1}")
