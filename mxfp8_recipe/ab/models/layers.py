"""Parts the CTR models share: embedding tables, MLPs, padding to whole 32s, and histories."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe.ab.types import Batch


def embedding(num_ids: int, dim: int) -> nn.Embedding:
    """A table with entries of size 1/sqrt(dim), so that a looked-up row has norm near 1."""
    table = nn.Embedding(num_ids, dim)
    nn.init.normal_(table.weight, std=dim**-0.5)
    return table


class FieldEmbeddings(nn.Module):
    """One table per categorical field: ids (B, F) -> (B, F, dim)."""

    def __init__(self, cardinalities: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.tables = nn.ModuleList(embedding(n, dim) for n in cardinalities)

    def forward(self, sparse: Tensor) -> Tensor:
        if not len(self.tables):
            return sparse.new_zeros((sparse.shape[0], 0, self.dim), dtype=torch.float32)
        return torch.stack([table(sparse[:, f]) for f, table in enumerate(self.tables)], dim=1)


def mlp(*widths: int, activate_last: bool = True) -> nn.Sequential:
    """Linear and SiLU in turn; `activate_last=False` ends with a Linear."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.SiLU()]
    return nn.Sequential(*(layers if activate_last else layers[:-1]))


def round_up_32(n: int) -> int:
    """The next multiple of 32."""
    return -(-n // 32) * 32


def pad_features(x: Tensor, width: int) -> Tensor:
    """Append zero features up to `width`: GEMM kernels want a contraction of whole 32s."""
    return F.pad(x, (0, width - x.shape[-1]))


@dataclass(frozen=True)
class History:
    """The events of a batch, as attention takes them.

    Attributes:
        offsets: (B + 1,) where each row's events begin. max_length: no row has more.
        ages: (T,) int64, 0 for a row's newest event.
    """

    offsets: Tensor
    max_length: int
    ages: Tensor

    @staticmethod
    def of(batch: Batch, max_length: int) -> History:
        events, offsets = batch.history, batch.history_offsets
        if events is None or offsets is None:
            raise ValueError(
                "history: the batch has none, but the model's FeatureSpec has a history_field; "
                "give the batch history and history_offsets, or build the model from a spec without histories"
            )
        index = torch.arange(events.shape[0], device=events.device)
        row = torch.bucketize(index, offsets[1:], right=True)
        return History(offsets, max_length, offsets[row + 1] - 1 - index)


class HistoryMean(nn.Module):
    """The mean of each row's event embeddings, from the candidate's table: (B, 1, D); zero for an empty row."""

    def forward(self, table: Tensor, batch: Batch) -> Tensor:
        events, offsets = batch.history, batch.history_offsets
        if events is None or offsets is None:
            raise ValueError("history: the batch has none, but the model's FeatureSpec has a history_field")
        return F.embedding_bag(events, table, offsets, mode="mean", include_last_offset=True)[:, None, :]
