"""Parts the CTR models share: embedding tables, MLPs, padding to whole 32s, and jagged attention."""

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
class Jagged:
    """Where each event of a packed (T, ...) tensor sits in a padded (B, max_length, ...) one.

    Attributes:
        slots: (T,) int64 position in the flattened (B * max_length) padding.
        ages: (T,) int64, 0 for a row's newest event.
        mask: (B, max_length) bool, True where attention may look. Slot 0 of an empty row counts too: it
            holds a zero key and a zero value, so attending to an empty history gives zero, never NaN.
    """

    slots: Tensor
    ages: Tensor
    mask: Tensor

    @staticmethod
    def of(batch: Batch, max_length: int) -> Jagged:
        events, offsets = batch.history, batch.history_offsets
        if events is None or offsets is None:
            raise ValueError(
                "history: the batch has none, but the model's FeatureSpec has a history_field; "
                "give the batch history and history_offsets, or build the model from a spec without histories"
            )
        index = torch.arange(events.shape[0], device=events.device)
        row = torch.bucketize(index, offsets[1:], right=True)
        slot = torch.arange(max_length, device=events.device)
        lengths = offsets.diff()
        return Jagged(
            slots=row * max_length + index - offsets[row],
            ages=offsets[row + 1] - 1 - index,
            mask=(slot < lengths[:, None]) | (slot == 0),
        )

    def pad(self, values: Tensor) -> Tensor:
        """(T, D) -> (B, max_length, D), zero where there is no event."""
        rows, length = self.mask.shape
        padded = values.new_zeros((rows * length, values.shape[1])).index_copy(0, self.slots, values)
        return padded.view(rows, length, values.shape[1])

    def pack(self, padded: Tensor) -> Tensor:
        """(B, max_length, D) -> (T, D)."""
        return padded.reshape(-1, padded.shape[2]).index_select(0, self.slots)


def attend(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, heads: int) -> Tensor:
    """Softmax attention inside each row: query (B, Q, D), key and value (B, max_length, D) -> (B, Q, D)."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(2, (heads, -1)).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        split(query), split(key), split(value), attn_mask=jagged.mask[:, None, None, :]
    )
    return out.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Attention of each event to its row's events, packed in and out: (T, D) -> (T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, jagged: Jagged) -> Tensor:
        query, key, value = jagged.pad(self.qkv(x)).chunk(3, dim=2)
        return self.out(jagged.pack(attend(query, key, value, jagged, self.heads)))


class HistoryAttention(nn.Module):
    """Attention of given queries to each row's events: (B, Q, D), (T, D) -> (B, Q, D).

    A query of shape (Q, D) is projected once and asked of every row: pooled attention (PMA).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, events: Tensor, jagged: Jagged) -> Tensor:
        key, value = jagged.pad(self.key_value(events)).chunk(2, dim=2)
        query = self.query(query).expand(key.shape[0], -1, -1)
        return self.out(attend(query, key, value, jagged, self.heads))


class HistoryMean(nn.Module):
    """The mean of each row's event embeddings, from the candidate's table: (B, 1, D); zero for an empty row."""

    def forward(self, table: Tensor, batch: Batch) -> Tensor:
        events, offsets = batch.history, batch.history_offsets
        if events is None or offsets is None:
            raise ValueError("history: the batch has none, but the model's FeatureSpec has a history_field")
        return F.embedding_bag(events, table, offsets, mode="mean", include_last_offset=True)[:, None, :]
