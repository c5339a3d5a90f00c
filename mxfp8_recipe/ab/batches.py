"""Batches on their way to the arms: checked once, kept in memory if they fit, corrected for negative sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from mxfp8_recipe.ab.data import DataError
from mxfp8_recipe.ab.data.checked import batch_problems
from mxfp8_recipe.ab.types import Batch, Dataset

CACHE_BYTES = 2 << 30


class CheckedBatches:
    """One part of a data set as batches that can be gone through again and again.

    The first time through, every batch is checked. Batches stay in memory until they exceed `limit` bytes;
    a larger part is read from its source each time.

    Args:
        dataset: where the rows come from.
        part: `train` or `heldout`.
        batch_size: rows a batch.
    """

    def __init__(self, dataset: Dataset, part: str, batch_size: int, *, limit: int = CACHE_BYTES) -> None:
        self.dataset, self.part, self.batch_size, self.limit = dataset, part, batch_size, limit
        self._rows: int | None = None
        self._kept: list[Batch] | None = None

    @property
    def rows(self) -> int:
        """How many there are; goes through them all, and checks them, if nobody has yet."""
        if self._rows is None:
            for _ in self:
                pass
        assert self._rows is not None
        return self._rows

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is not None:
            yield from self._kept
            return
        source = self.dataset.train_batches if self.part == "train" else self.dataset.heldout_batches
        kept: list[Batch] | None = []
        size = seen = 0
        for batch in source(self.batch_size):
            if self._rows is None:
                self._check(batch, seen)
            seen += len(batch)
            size += _bytes(batch)
            if size > self.limit:
                kept = None
            if kept is not None:
                kept.append(batch)
            yield batch
        if not seen:
            raise DataError(f"data {self.dataset.name}: it has no {self.part} rows; ask for more rows")
        self._rows, self._kept = seen, kept

    def _check(self, batch: Batch, first: int) -> None:
        problems = batch_problems(batch, self.dataset.spec)
        if problems:
            where = f"{self.part} rows from {first} on (batches of {self.batch_size})"
            raise DataError(f"data {self.dataset.name}, {where}: {'; '.join(problems)}")


def _bytes(batch: Batch) -> int:
    tensors = (getattr(batch, f.name) for f in fields(batch))
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@dataclass(frozen=True)
class SamplingCorrection:
    """Undoes negative sampling when predictions are judged; training sees the sampled rows as they are.

    Negatives of the first task were kept with probability `rate`. A model of the sampled rows predicts p; on
    the scale of all rows that is q = p / (p + (1 - p) / rate), a logit shifted by log(rate), and each kept
    negative stands for 1 / rate of them (He et al. 2014, section 6.3). Later tasks, such as conversion of a click, are
    conditioned on a positive and stay as they are.
    """

    rate: float = 1.0

    def logits(self, logits: Tensor) -> Tensor:
        """(B, T) in fp64."""
        shifted = logits.detach().double()
        if self.rate != 1.0:
            shifted = shifted.clone()
            shifted[:, 0] += math.log(self.rate)
        return shifted

    def weights(self, batch: Batch) -> Tensor:
        """(B, T): a kept negative counts 1 / rate."""
        if self.rate == 1.0:
            return batch.weights
        weights = batch.weights.clone()
        weights[:, 0] *= batch.labels[:, 0] + (1 - batch.labels[:, 0]) / self.rate
        return weights
