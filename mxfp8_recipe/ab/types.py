"""What a dataset hands to a model: the one contract between `ab.data`, `ab.models` and `ab.runner`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Static description of a dataset's features, from which a model is built.

    Attributes:
        num_dense: number of float features a row carries.
        cardinalities: size of the id space of each categorical field; ids are `0 .. cardinality - 1`,
            0 is reserved for missing and unseen values.
        history_field: index of the categorical field (the candidate item) whose id space the history
            shares, or None for a dataset without histories.
        max_history: longest history in events; longer ones are cut to their most recent events.
        tasks: names of the label columns, in order, e.g. `("ctr", "cvr")`.
    """

    num_dense: int
    cardinalities: tuple[int, ...]
    history_field: int | None = None
    max_history: int = 0
    tasks: tuple[str, ...] = ("ctr",)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows in time order.

    Attributes:
        dense: (B, num_dense) float32.
        sparse: (B, num_fields) int64 ids.
        history: (sum of lengths,) int64 ids, oldest first within a row; None without histories.
        history_offsets: (B + 1,) int64; row i owns `history[offsets[i]:offsets[i + 1]]`.
        labels: (B, num_tasks) float32 in [0, 1].
        weights: (B, num_tasks) float32 >= 0; 0 takes a row out of a task (a conversion label without a click).
        segments: (B,) int64 segment id of each row, for segmented gates; None if the data has none.
    """

    dense: Tensor
    sparse: Tensor
    labels: Tensor
    weights: Tensor
    history: Tensor | None = None
    history_offsets: Tensor | None = None
    segments: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()})


class Dataset(Protocol):
    """A stream of impressions in time order with a held-out tail.

    `name` goes to the report. `optimal_ne[task]`, where the ground truth is known, is the normalized
    entropy of the Bayes-optimal prediction on the held-out rows. `notes` are sentences the report prints
    (license, rows skipped and why).
    """

    name: str
    spec: FeatureSpec
    optimal_ne: dict[str, float]
    notes: list[str]

    def train_batches(self, batch_size: int) -> Iterator[Batch]: ...

    def heldout_batches(self, batch_size: int) -> Iterator[Batch]: ...


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What the command line asked of a dataset; loaders take exactly this.

    `source` is the part after the colon of `--data`, such as the path of `criteo:PATH`.
    `rows` caps the impressions used (None: all there are, or the dataset's default).
    """

    source: str = ""
    rows: int | None = None
    seed: int = 0
    strict: bool = False
    weight_column: str | None = None
    negative_sampling_rate: float = 1.0
    offline: bool = False
    extra: dict[str, str] = field(default_factory=dict)


DatasetLoader = Callable[[DataRequest], Dataset]
ModelBuilder = Callable[[FeatureSpec], nn.Module]
"""Builds a module whose `forward(batch)` gives logits (B, num_tasks)."""
