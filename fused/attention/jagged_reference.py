"""Attention on jagged batches in plain torch, forward and backward, on any device: what the kernels compute.

    jagged       S = scale * Q K^T + bias         O = softmax(S) V              JFA
    generalized  S = pre_scale * Q K^T + bias     O = act(S) V * post_scale     GDPA: A = act(S), nothing where hidden
                 dV = post_scale * A^T dO,        dS = act'(S) * (post_scale * dO V^T)
                 dQ = pre_scale * dS K,           dK = pre_scale * dS^T Q
    block        jagged attention of each `block` tokens, counted from the start of a sample, to themselves

All samples are padded to the declared maximum and go through the GEMMs and the softmax of dense attention (`gemms`,
`softmax`), so that a batch whose samples all have that length gets the bits of dense attention.

**Quantized.** `spec`, `operands` and `seed` put GEMMs in MXFP8, as in `reference`: Q, K, V and dO arrive quantized
along the contraction, by `jagged_quantize`, in blocks and tiles that begin at a sample's start and cross none. P has
the fixed scale; A, which no bound holds, and dS are quantized here with their amax. Blocks of scores in which
causality or the window hides a pair run in the compute dtype; padding hides nothing and lies in no block's amax.
`operands` is empty for high precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .activations import act, act_grad
from .bias import JaggedBias, bias_of, bucketed, table_gradient
from .gemms import Quantized, along_sequence, by_head, sum_groups, with_empty
from .jagged_layout import Jagged, Pairs
from .jagged_quantize import padded_operand
from .softmax import log_sum_exp, softmax_backward, softmax_forward
from .spec import AttentionSpec

HIGH = AttentionSpec()
NOTHING: Mapping[str, Quantized] = {}


def jagged_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    spec: AttentionSpec = HIGH,
    operands: Mapping[str, Quantized] = NOTHING,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`softmax(scale * Q K^T + bias) V` within each sample.

    Args:
        q: (Tq, H, D). k: (Tk, G, D). v: (Tk, G, E), H a multiple of G; head h reads head h // (H / G) of k and v.
            One float dtype, the compute dtype.
        q_offsets, k_offsets: (B + 1,) int32 or int64: sample b holds rows offsets[b] to offsets[b + 1].
        max_q, max_k: no sample is longer.
        bias: tables added to the scores, or None. schedule: for kernels; not read.
        causal, window: pairs that take part, as `jagged_layout` says.
        spec, operands, seed: GEMMs in MXFP8; "query" and "key" along the head dim, "value_t" along the keys.

    Returns:
        out: (Tq, H, E) in the dtype of q; 0 for a query that sees no key.
        lse: (Tq, H) fp32 (fp64 for fp64), `log(sum(exp(S)))`; +inf for a query that sees no key.
    """
    pairs = Pairs(Jagged.of(q_offsets, max_q, len(q)), Jagged.of(k_offsets, max_k, len(k)), causal, window)
    batch = _Batch.of(pairs, q, k, v, bias, spec, operands)
    out, lse = _softmax(batch, scale, seed)
    return pairs.q.pack_heads(out), pairs.q.pack_heads(lse.unsqueeze(-1)).squeeze(-1)


def jagged_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    wanted: str = "qkvb",
    spec: AttentionSpec = HIGH,
    operands: Mapping[str, Quantized] = NOTHING,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `jagged_forward`.

    Args:
        grad_out: (Tq, H, E) in the compute dtype. lse: as the forward gave it. out: for kernels; not read.
        wanted: the gradients to compute, among "q", "k", "v" and "b" (both tables).
        spec, operands, seed: further "grad" and "value" along the head dim, "grad_t" and "query_t" along the queries,
            "key_t" along the keys. The rest is as the forward had it.

    Returns:
        `(dq, dk, dv, dposition, dtime)`: of the shape and dtype of q, k and v; the tables' (P, H) and (N, H) in
        fp32; empty (0,) for what is not wanted or absent.
    """
    pairs = Pairs(Jagged.of(q_offsets, max_q, len(q)), Jagged.of(k_offsets, max_k, len(k)), causal, window)
    batch = _Batch.of(pairs, q, k, v, bias, spec, operands, grad_out)
    padded = pairs.q.pad_heads(lse.unsqueeze(-1)).squeeze(-1).masked_fill(~pairs.q.valid[:, None], math.inf)
    dq, dk, dv, dscores = _softmax_backward(batch, padded, scale, wanted, seed)
    return _packed(dq, pairs.q), _packed(dk, pairs.k), _packed(dv, pairs.k), *batch.tables(dscores, wanted)


def generalized_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None = None,
    *,
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool = False,
    window: int | None = None,
    broadcast_q: bool = False,
    spec: AttentionSpec = HIGH,
    operands: Mapping[str, Quantized] = NOTHING,
    seed: Tensor | None = None,
) -> Tensor:
    """`act(pre_scale * Q K^T + bias) V * post_scale` within each sample; a pair that takes no part adds nothing.

    Args:
        activation: one of `activations.ACTIVATIONS`.
        broadcast_q: q is (S, H, D), the queries of every sample; q_offsets and max_q are not read.
        The rest is as for `jagged_forward`.

    Returns:
        (Tq, H, E), with `broadcast_q` (B * S, H, E), in the dtype of q.
    """
    pairs = _pairs(q, k, q_offsets, k_offsets, max_q, max_k, causal, window, broadcast_q)
    batch = _Batch.of(pairs, q, k, v, bias, spec, operands, broadcast_q=broadcast_q)
    weights = act(batch.scores(pre_scale), activation).masked_fill(pairs.hidden, 0.0)
    out = batch.along_sequence("pv", weights, batch.v, batch.operands["value_t"], seed) * post_scale
    return pairs.q.pack_heads(out.to(q.dtype))


def generalized_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None = None,
    *,
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool = False,
    window: int | None = None,
    broadcast_q: bool = False,
    wanted: str = "qkvb",
    spec: AttentionSpec = HIGH,
    operands: Mapping[str, Quantized] = NOTHING,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `generalized_forward`; arguments as there and as for `jagged_backward`.

    With `broadcast_q`, dq (S, H, D) is summed over the samples in fp32.
    """
    pairs = _pairs(q, k, q_offsets, k_offsets, max_q, max_k, causal, window, broadcast_q)
    batch = _Batch.of(pairs, q, k, v, bias, spec, operands, grad_out, broadcast_q)
    assert batch.grad is not None
    scores, hidden, operand = batch.scores(pre_scale), pairs.hidden, batch.operands
    nothing = q.new_empty(0)
    dq, dk, dv, dscores = nothing, nothing, nothing, nothing
    if "v" in wanted:
        weights = act(scores, activation).masked_fill(hidden, 0.0).transpose(-1, -2)
        product = batch.along_sequence("dv", weights, batch.grad, operand["grad_t"], seed)
        dv = sum_groups(product * post_scale, batch.groups).to(v.dtype)
    if wanted not in ("", "v"):
        dweights = by_head("dp", spec, batch.grad, batch.v, operand["grad"], operand["value"], batch.groups)
        dscores = (act_grad(scores, activation) * (dweights * post_scale)).masked_fill(hidden, 0.0)
    if "q" in wanted:
        dq = batch.along_sequence("dq", dscores, batch.k, operand["key_t"], seed) * pre_scale
        dq = (dq.sum(0, keepdim=True) if broadcast_q else dq).to(q.dtype)
    if "k" in wanted:
        product = batch.along_sequence("dk", dscores.transpose(-1, -2), batch.q, operand["query_t"], seed)
        dk = sum_groups(product * pre_scale, batch.groups).to(k.dtype)
    dq = dq[0].transpose(0, 1).contiguous() if broadcast_q and "q" in wanted else _packed(dq, pairs.q)
    return dq, _packed(dk, pairs.k), _packed(dv, pairs.k), *batch.tables(dscores, wanted)


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    scale: float,
    block: int = 64,
    causal: bool = False,
    spec: AttentionSpec = HIGH,
    operands: Mapping[str, Quantized] = NOTHING,
    seed: Tensor | None = None,
) -> Tensor:
    """Attention of each block of `block` tokens to itself: q (T, H, D), k (T, G, D), v (T, G, E) to (T, H, E)."""
    layout = Jagged.of(offsets, max_length, len(q)).blocks(block)
    batch = _Batch.of(Pairs(layout, layout, causal), q, k, v, None, spec, operands)
    return layout.pack_heads(_softmax(batch, scale, seed)[0])


def block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    scale: float,
    block: int = 64,
    causal: bool = False,
    wanted: str = "qkv",
    spec: AttentionSpec = HIGH,
    operands: Mapping[str, Quantized] = NOTHING,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `block_forward`, in q, k and v; the softmax is computed again, from nothing saved."""
    layout = Jagged.of(offsets, max_length, len(q)).blocks(block)
    batch = _Batch.of(Pairs(layout, layout, causal), q, k, v, None, spec, operands, grad_out)
    lse = log_sum_exp(batch.scores(scale).masked_fill(batch.pairs.hidden, -math.inf))
    dq, dk, dv, _ = _softmax_backward(batch, lse, scale, wanted, seed)
    return _packed(dq, layout), _packed(dk, layout), _packed(dv, layout)


def _pairs(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
    broadcast_q: bool,
) -> Pairs:
    keys = Jagged.of(k_offsets, max_k, len(k))
    if broadcast_q:
        return Pairs(Jagged.repeated(len(k_offsets) - 1, len(q), q.device), keys, causal, window)
    assert q_offsets is not None
    return Pairs(Jagged.of(q_offsets, max_q, len(q)), keys, causal, window)


def _packed(padded: Tensor, layout: Jagged) -> Tensor:
    return layout.pack_heads(padded) if padded.dim() > 1 else padded


@dataclass(frozen=True)
class _Batch:
    """The padded operands of one call: q (B, H, Lq, D), k (B, G, Lk, D), v (B, G, Lk, E), grad (B, H, Lq, E)."""

    pairs: Pairs
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor | None
    operands: dict[str, Quantized]
    bias: JaggedBias | None
    spec: AttentionSpec

    @staticmethod
    def of(
        pairs: Pairs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: JaggedBias | None,
        spec: AttentionSpec,
        operands: Mapping[str, Quantized],
        grad: Tensor | None = None,
        broadcast_q: bool = False,
    ) -> _Batch:
        layouts = dict.fromkeys(("key", "key_t", "value", "value_t"), pairs.k)
        padded = {
            name: padded_operand(name, quantized, layouts.get(name, pairs.q), broadcast_q)
            for name, quantized in operands.items()
        }
        queries = q.transpose(0, 1).expand(len(pairs.q.lengths), -1, -1, -1) if broadcast_q else pairs.q.pad_heads(q)
        grad = None if grad is None else pairs.q.pad_heads(grad)
        keys, values = pairs.k.pad_heads(k), pairs.k.pad_heads(v)
        return _Batch(pairs, queries, keys, values, grad, with_empty(padded, q), bias, spec)

    @property
    def groups(self) -> int:
        return self.q.shape[1] // max(self.k.shape[1], 1)

    def scores(self, scale: float) -> Tensor:
        """(B, H, Lq, Lk) fp32 or fp64: `scale * Q K^T + bias`, of every pair."""
        operands = self.operands["query"], self.operands["key"]
        scores = by_head("qk", self.spec, self.q, self.k, *operands, self.groups) * scale
        for table, buckets in bucketed(self.bias, self.pairs):
            scores = scores + bias_of(table, buckets, scores.dtype)
        return scores

    def tables(self, dscores: Tensor, wanted: str) -> tuple[Tensor, Tensor]:
        """Gradients of the bias tables, or empty tensors."""
        position, time = (self.q.new_empty(0, dtype=torch.float32) for _ in range(2))
        if "b" not in wanted or self.bias is None:
            return position, time
        found = [table_gradient(dscores, buckets, len(t)) for t, buckets in bucketed(self.bias, self.pairs)]
        return (
            position if self.bias.position is None else found[0],
            time if self.bias.time is None else found[-1],
        )

    def along_sequence(
        self, gemm: str, weights: Tensor, high: Tensor, quantized: Quantized, seed: Tensor | None
    ) -> Tensor:
        """`gemms.along_sequence` with weights that no bound holds."""
        groups = self.groups if gemm in ("pv", "dq") else 1
        visible, dtype = self.pairs.visible, self.q.dtype
        return along_sequence(gemm, self.spec, weights, high, quantized, visible, groups, seed, dtype, bounded=False)


def _softmax(batch: _Batch, scale: float, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Padded out (B, H, Lq, E) and lse (B, H, Lq)."""
    scores = batch.scores(scale).masked_fill(batch.pairs.hidden, -math.inf)
    value_q, visible = batch.operands["value_t"], batch.pairs.visible
    out, lse, _ = softmax_forward(scores, batch.v, value_q, visible, seed, batch.spec, groups=batch.groups)
    return out, lse


def _softmax_backward(
    batch: _Batch, lse: Tensor, scale: float, wanted: str, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded dQ, dK, dV and dS."""
    assert batch.grad is not None
    scores = batch.scores(scale).masked_fill(batch.pairs.hidden, -math.inf)
    return softmax_backward(
        scores, lse, batch.grad, None, batch.q, batch.k, batch.v, batch.operands, batch.pairs.visible, seed, batch.spec,
        scale=scale, groups=batch.groups, wanted=wanted,
    )  # fmt: skip
