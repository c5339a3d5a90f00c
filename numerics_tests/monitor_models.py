"""Small models and a training loop for the monitor's tests, with places to plant what goes wrong in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe.ab.data.synthetic import load
from mxfp8_recipe.ab.models.gem_small import GemSmall, GemSmallConfig
from mxfp8_recipe.ab.types import Batch, DataRequest
from numerics_tests.helpers import same_bits


class Plant(nn.Module):
    """What a test does to a value; nothing until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.change: Callable[[Tensor, int], Tensor] = lambda x, step: x

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, self.step)


def set_step(model: nn.Module, step: int) -> None:
    """Tell every plant which step it is."""
    for module in model.modules():
        if isinstance(module, Plant):
            module.step = step


class Ranker(nn.Module):
    """An MLP with a binary head; `plants` stand before its layers."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.plants = nn.ModuleList(Plant() for _ in range(3))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 32)
        self.head = nn.Linear(32, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plants[0](x)
        x = self.plants[1](F.silu(self.first(x)))
        x = self.plants[2](F.silu(self.second(self.dropout(x))))
        return self.head(F.silu(self.last(x)))[:, 0]


class Transformer(nn.Module):
    """Two pre-norm encoder layers with dropout and a BatchNorm, over (B, L, 64)."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.batch_norm(self.encoder(x).mean(1)))[:, 0]


def rows(step: int, count: int = 64, width: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs (count, width) and labels (count,) of a step, whose rate of positives is known to be 0.3 or so."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, width, generator=generator)
    p = (x[:, :4].sum(1) * 0.5 - 1).sigmoid()
    return x, (torch.rand(count, generator=generator) < p).float()


def sequences(step: int) -> tuple[Tensor, Tensor]:
    """Inputs (8, 10, 64) and labels (8,)."""
    x, y = rows(step, 8 * 10)
    return x.view(8, 10, 64), y[:8]


@dataclass
class GemData:
    """Batches for `gem-small` from the simulator."""

    batches: list[Batch]
    model: Callable[[], nn.Module]

    @classmethod
    def load(cls, count: int, size: int = 12) -> GemData:
        data = load(DataRequest(rows=max(count * size * 2, 400)))
        batches = [batch for batch, _ in zip(data.train_batches(size), range(count))]
        return cls(batches, lambda: GemSmall(data.spec, GemSmallConfig(history_layers=1, interaction_layers=1)))


def loss_of(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), labels, weights)


def same_state(a: Any, b: Any) -> list[str]:
    """Names of what differs between two nested states, compared bit by bit."""
    if isinstance(a, dict):
        inner = [f"{k}.{name}" if name else str(k) for k in a for name in same_state(a[k], b[k])]
        return inner if a.keys() == b.keys() else ["keys", *inner]
    if isinstance(a, list | tuple):
        return [f"{i}.{name}" for i, (x, y) in enumerate(zip(a, b, strict=True)) for name in same_state(x, y)]
    if isinstance(a, Tensor):
        return [] if same_bits(a, b) else [""]
    return [] if a == b else [""]
