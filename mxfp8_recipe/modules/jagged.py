"""Attention layers for jagged batches: self, pooled (PMA), cross, and HSTU's.

Each takes its sequences in any form of `jagged_input` and returns the form it was given. Their projections are
`nn.Linear`s and their norms `nn.LayerNorm`s, which a recipe converts as any model's; the attention itself is `core`, a
`JaggedAttention`. A residual around them is the model's to add.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .jagged_core import SOFTMAX, JaggedAttention, check_sizes
from .jagged_input import packed


def _heads(x: Tensor, dim: int) -> Tensor:
    """(T, H * D) to (T, H, D)."""
    return x.unflatten(-1, (-1, dim))


def _head_dim(owner: nn.Module, width: int, heads: int, head_dim: int | None, **sizes: int | None) -> int:
    """Of a head: `head_dim`, or else the width shared out. `sizes` are the layer's others, looked at too."""
    own = type(owner).__name__
    check_sizes(own, width=width, heads=heads, head_dim=head_dim, **sizes)
    groups = sizes.get("kv_heads")
    if groups is not None and heads % groups:
        raise ValueError(f"{own}: kv_heads: got {groups} for {heads} heads, expected a divisor of them")
    if head_dim is None and width % heads:
        raise ValueError(f"{own}: heads: got {heads} for width {width}, expected a divisor of it, or pass head_dim")
    return width // heads if head_dim is None else head_dim


class JaggedMultiheadAttention(nn.Module):
    """Self-attention within each sample, with one projection for queries, keys and values.

    Args:
        width: features of a token, in and out. heads: of the queries.
        kv_heads: of keys and values; fewer, shared by groups of heads, where given. head_dim: default width / heads.
        bias: of the projections. max_length: no sample is longer; may be given with each batch instead.
        core: further arguments of `JaggedAttention`: activation, causal, window, positions, time_buckets, ...
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        max_length: int | None = None,
        **core: Any,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(self, width, heads, head_dim, kv_heads=kv_heads, max_length=max_length)
        kv_heads = kv_heads or heads
        self.width, self.max_length, self.head_dim = width, max_length, head_dim
        self.sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=bias)
        self.core = JaggedAttention(heads, head_dim, **core)
        self.out = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        max_length: int | None = None,
        *,
        times: Tensor | None = None,
        schedule: Tensor | None = None,
    ) -> Tensor:
        """(T, width) with offsets, nested (B, j, width), or (B, L, width), to the same.

        Args:
            max_length: no sample is longer; default the layer's own, or else that of the batch, which offsets on a GPU
                do not tell without waiting: there it is required.
            times: (T,) int64 of the tokens, for a bias by time; without `time_buckets` unused.
            schedule: from `functional.jagged_schedule`.
        """
        longest = self.max_length if max_length is None else max_length
        batch = packed(x, offsets, longest, self.width, type(self).__name__)
        q, k, v = (_heads(part, self.head_dim) for part in self.qkv(batch.values).split(self.sizes, dim=-1))
        layout = (batch.offsets, batch.offsets, batch.max_length, batch.max_length)
        out = self.core(q, k, v, *layout, q_times=times, k_times=times, schedule=schedule)
        return batch.like(self.out(out.flatten(1)))


class CrossAttention(nn.Module):
    """Queries of each sample ask that sample's context.

    Args:
        width: features of a query, in and out. heads: of the queries. context_width: of the context; default width.
        kv_heads, head_dim, bias, core: as for `JaggedMultiheadAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        context_width: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        **core: Any,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(self, width, heads, head_dim, kv_heads=kv_heads, context_width=context_width)
        self.width, self.context_width, self.head_dim = width, context_width or width, head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=bias)
        self.key_value = nn.Linear(self.context_width, 2 * (kv_heads or heads) * head_dim, bias=bias)
        self.core = JaggedAttention(heads, head_dim, **core)
        self.out = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(
        self,
        query: Tensor,
        context: Tensor,
        query_offsets: Tensor | None = None,
        context_offsets: Tensor | None = None,
        max_query: int | None = None,
        max_context: int | None = None,
        *,
        query_times: Tensor | None = None,
        context_times: Tensor | None = None,
        schedule: Tensor | None = None,
    ) -> Tensor:
        """Queries and context each in any form of `jagged_input`; the output has the form of the queries."""
        name = type(self).__name__
        asking = packed(query, query_offsets, max_query, self.width, f"{name}: query")
        asked = packed(context, context_offsets, max_context, self.context_width, f"{name}: context")
        q = _heads(self.query(asking.values), self.head_dim)
        k, v = (_heads(part, self.head_dim) for part in self.key_value(asked.values).chunk(2, dim=-1))
        layout = (asking.offsets, asked.offsets, asking.max_length, asked.max_length)
        out = self.core(q, k, v, *layout, q_times=query_times, k_times=context_times, schedule=schedule)
        return asking.like(self.out(out.flatten(1)))


class PooledAttention(nn.Module):
    """Learned seeds, the same for every sample, ask its tokens: PMA of the Set Transformer.

    Args:
        width: of a seed, in and out. heads: of the seeds. seeds: how many.
        context_width, kv_heads, head_dim, bias, core: as for `CrossAttention`. The softmax may be replaced, as in
            generalized attention: `activation="gelu"`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        seeds: int,
        *,
        context_width: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        **core: Any,
    ) -> None:
        super().__init__()
        sizes = {"seeds": seeds, "kv_heads": kv_heads, "context_width": context_width}
        head_dim = _head_dim(self, width, heads, head_dim, **sizes)
        if core.get("time_buckets"):
            raise ValueError(f"{type(self).__name__}: time_buckets: got some, expected none: seeds have no times")
        self.context_width, self.head_dim = context_width or width, head_dim
        self.seeds = nn.Parameter(torch.randn(seeds, width) * width**-0.5)
        self.query = nn.Linear(width, heads * head_dim, bias=bias)
        self.key_value = nn.Linear(self.context_width, 2 * (kv_heads or heads) * head_dim, bias=bias)
        self.core = JaggedAttention(heads, head_dim, **core)
        self.out = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(
        self, context: Tensor, offsets: Tensor | None = None, max_length: int | None = None, *, schedule: Any = None
    ) -> Tensor:
        """Context in any form of `jagged_input` to (B, seeds, width)."""
        asked = packed(context, offsets, max_length, self.context_width, type(self).__name__)
        q = _heads(self.query(self.seeds), self.head_dim)
        k, v = (_heads(part, self.head_dim) for part in self.key_value(asked.values).chunk(2, dim=-1))
        layout = (None, asked.offsets, self.seeds.shape[0], asked.max_length)
        out = self.core(q, k, v, *layout, schedule=schedule, broadcast_q=True)
        return self.out(out.flatten(1)).unflatten(0, (asked.samples, self.seeds.shape[0]))


class HSTUAttention(nn.Module):
    """The attention of a hierarchical sequential transduction unit (Zhai et al., 2024, arXiv:2402.17152).

        U, V, Q, K = split(silu(W norm(x)))
        A = silu(scale * Q K^T + bias) V / max_length
        out = W_out (norm(A) * U)

    Args:
        width: features of a token, in and out. heads: of all four parts.
        max_length: no sample is longer; scores are averaged over it.
        head_dim: of Q and K. value_dim: of U and V; both default to width / heads.
        causal: a token sees itself and what came before. position_bias: a table row for each distance within
            max_length. core: further arguments of `JaggedAttention`: activation, scale, window, time_buckets, ...
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        max_length: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = True,
        position_bias: bool = True,
        **core: Any,
    ) -> None:
        super().__init__()
        own = type(self).__name__
        if max_length is None:
            raise ValueError(f"{own}: max_length: got None, expected an int: scores are averaged over it")
        check_sizes(own, value_dim=value_dim)
        head_dim = _head_dim(self, width, heads, head_dim, max_length=max_length)
        value_dim = _head_dim(self, width, heads, value_dim)
        self.width, self.max_length, self.head_dim, self.value_dim = width, max_length, head_dim, value_dim
        self.sizes = (heads * value_dim, heads * value_dim, heads * head_dim, heads * head_dim)
        core = {"activation": "silu", "positions": 2 * max_length - 1 if position_bias else 0, **core}
        if core["activation"] != SOFTMAX:
            core.setdefault("post_scale", 1 / max_length)
        self.norm = nn.LayerNorm(width)
        self.uvqk = nn.Linear(width, sum(self.sizes), bias=False)
        self.act = nn.SiLU()
        self.core = JaggedAttention(heads, head_dim, value_dim=value_dim, causal=causal, **core)
        self.core_norm = nn.LayerNorm(heads * value_dim)
        self.out = nn.Linear(heads * value_dim, width)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        times: Tensor | None = None,
        schedule: Tensor | None = None,
    ) -> Tensor:
        """As `JaggedMultiheadAttention.forward`, with the maximum length of the constructor, which scales scores."""
        batch = packed(x, offsets, self.max_length, self.width, type(self).__name__)
        u, v, q, k = self.act(self.uvqk(self.norm(batch.values))).split(self.sizes, dim=-1)
        q, k, v = _heads(q, self.head_dim), _heads(k, self.head_dim), _heads(v, self.value_dim)
        layout = (batch.offsets, batch.offsets, batch.max_length, batch.max_length)
        out = self.core(q, k, v, *layout, q_times=times, k_times=times, schedule=schedule)
        return batch.like(self.out(self.core_norm(out.flatten(1)) * u))
