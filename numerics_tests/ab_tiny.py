"""A data set and models small enough to run the whole A/B check in a second, and broken variants of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.ab.types import Batch, DataRequest, FeatureSpec


class TinyData:
    name = "tiny"

    def __init__(self, rows: int, change: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        self.spec = FeatureSpec(num_dense=32, cardinalities=(50, 7), tasks=("ctr", "cvr"))
        generator = torch.Generator().manual_seed(0)
        dense = torch.randn(rows, 32, generator=generator)
        sparse = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in self.spec.cardinalities], 1)
        rate = (dense[:, :2] - 1).sigmoid()
        labels = (torch.rand(rows, 2, generator=generator) < rate).float()
        weights = torch.stack([torch.ones(rows), labels[:, 0]], 1)
        self.batch = change(Batch(dense=dense, sparse=sparse, labels=labels, weights=weights, segments=sparse[:, 1]))
        self.optimal_ne = {"ctr": 0.9}
        self.notes = ["tiny rows, drawn at random"]

    def train_batches(self, batch_size: int) -> Iterator[Batch]:
        return self._batches(0, int(len(self.batch) * 0.8), batch_size)

    def heldout_batches(self, batch_size: int) -> Iterator[Batch]:
        return self._batches(int(len(self.batch) * 0.8), len(self.batch), batch_size)

    def _batches(self, start: int, stop: int, size: int) -> Iterator[Batch]:
        for low in range(start, stop, size):
            columns = {f.name: getattr(self.batch, f.name) for f in dataclasses.fields(Batch)}
            part = slice(low, min(low + size, stop))
            yield Batch(**{k: v[part] if isinstance(v, Tensor) else v for k, v in columns.items()})


def data(request: DataRequest) -> TinyData:
    return TinyData(request.rows or 1500)


def bad_labels(request: DataRequest) -> TinyData:
    return TinyData(1500, lambda b: dataclasses.replace(b, labels=b.labels.index_fill(0, torch.tensor([70]), 2.0)))


def one_class(request: DataRequest) -> TinyData:
    return TinyData(1500, lambda b: dataclasses.replace(b, labels=torch.zeros_like(b.labels)))


def nan_features(request: DataRequest) -> TinyData:
    return TinyData(1500, lambda b: dataclasses.replace(b, dense=b.dense.index_fill(0, torch.tensor([9]), torch.nan)))


class TinyModel(nn.Module):
    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 16) for n in spec.cardinalities)
        self.top = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU())
        self.head = nn.Linear(32, len(spec.tasks))

    def forward(self, batch: Batch) -> Tensor:
        embedded = [table(batch.sparse[:, field]) for field, table in enumerate(self.tables)]
        return self.head(self.top(torch.cat([batch.dense, *embedded], 1)))


class Exploding(TinyModel):
    """Its logits overflow from the third forward in training on."""

    calls = 0

    def forward(self, batch: Batch) -> Tensor:
        self.calls += self.training
        return super().forward(batch) * (float("inf") if self.calls > 2 else 1.0)


def model(spec: FeatureSpec) -> nn.Module:
    return TinyModel(spec)


def exploding(spec: FeatureSpec) -> nn.Module:
    return Exploding(spec)


class Raising(TinyModel):
    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            return self.head(self.top(batch.dense))  # 32 columns, where the layer takes 64
        return super().forward(batch)


def raising_in_forward(spec: FeatureSpec) -> nn.Module:
    return Raising(spec)


def raising(request: object) -> nn.Module:
    raise KeyError("no such table")


def refused(spec: FeatureSpec) -> nn.Module:
    apply_recipe(model(spec), "no-such-recipe")  # an error of the plugin's, about what it was given here
    raise AssertionError


def leaving(request: object) -> nn.Module:
    sys.exit(1)


class RaisingData(TinyData):
    def heldout_batches(self, batch_size: int) -> Iterator[Batch]:
        raise OverflowError("a partition is missing")


def raising_later(request: DataRequest) -> TinyData:
    return RaisingData(request.rows or 1500)
