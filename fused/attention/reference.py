"""Attention in plain torch, forward and backward, on any device: what the kernels compute.

    S  = scale * Q K^T + bias              qk  contraction head dim
    P  = exp(S - rowmax)                   unnormalized, in [0, 1]; l = rowsum(P); P' = keep * P
    O  = P' V / (l * (1 - dropout_p))      pv  contraction keys

    P  = exp(S - lse);  P' = keep * P      normalized, recomputed from lse = rowmax + log(l)
    dV = P'^T dO / (1 - dropout_p)         dv  contraction queries
    dP = keep * dO V^T / (1 - dropout_p)   dp  contraction head dim
    dS = P * (dP - rowsum(P * dP))
    dQ = scale * dS K                      dq  contraction keys
    dK = scale * dS^T Q                    dk  contraction queries

Each GEMM multiplies either two MXFP8 operands or two operands of the compute dtype; products are summed in
fp32, S, P, dP and dS stay fp32, and O, dQ, dK and dV are rounded once. P and P' are quantized with the fixed
scale `2**PROBS_EXPONENT`, which holds [0, 1] without an amax and couples no element to another; dS with its
amax. Dropout's factor stays outside P', or it would leave [0, 1].

**Masks.** Blocks along the sequence share a scale between tokens, so a key that a mask hides from a query
could still move the rounding of that query's output. Therefore the GEMMs that contract over keys or queries
run block by block of the scores: a block of 32 queries by 32 keys (as many along the contraction as share a
scale), counted from the start of the sample, runs in MXFP8 when every pair in it is visible, and in the
compute dtype when some pair is hidden. What a mask hides thus changes no bit of an output or a gradient it
does not belong to. Under a causal mask that leaves the diagonal blocks in the compute dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..philox import random_bits
from ..reference import _round_elements, dequantize, gemm, quantize_spec
from ..reference_ops import quantize_both
from ..spec import BLOCK, QuantSpec, Rounding
from .spec import AttentionSpec, Pair

PROBS_EXPONENT = -8
"""P times `2**8` lies in [0, 256], below the largest magnitude of either element format."""

HIDDEN = -1e4
"""A float mask at or below this hides its pair: exp underflows to zero beside any visible score."""

QUERY_STREAM, KEY_STREAM, VALUE_STREAM, GRAD_STREAM, PROBS_STREAM, SCORES_STREAM, DROPOUT_STREAM = range(7)
"""Streams of random bits: the tensors of one call draw independently under one seed."""

Quantized = tuple[Tensor, Tensor]
"""`(qdata, scale)` as uint8 storage, contraction last; two empty tensors for an operand in high precision."""


def quantize_heads(
    x: Tensor, rowwise: QuantSpec | None, colwise: QuantSpec | None, seed: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize (B, H, L, D) along D, along L or both; tiles cross neither a sample nor a head.

    Returns:
        `(qdata, scale, qdata_t, scale_t)`, uint8: (B, H, L, D), (B, H, L, ceil(D / 32)), (B, H, D, L) and
        (B, H, D, ceil(L / 32)); empty (0,) for an orientation without a spec.
    """
    outputs = [x.new_empty(0, dtype=torch.uint8) for _ in range(4)]
    if rowwise is not None:
        qdata, scale = quantize_spec(x, rowwise, axis=-1, seed=seed, stream=stream)
        outputs[:2] = [_bytes(qdata), _bytes(scale)]
    if colwise is not None:
        qdata, scale = quantize_spec(x, colwise, axis=-2, seed=seed, stream=stream)
        outputs[2:] = [_bytes(qdata.transpose(-1, -2)), _bytes(scale.transpose(-1, -2))]
    return outputs[0], outputs[1], outputs[2], outputs[3]


def quantize_merged(
    out: Tensor, rowwise: QuantSpec | None, colwise: QuantSpec | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize attention's output (B, H, L, E) as the (B * L, H * E) matrix the next layer multiplies."""
    return quantize_both(out.transpose(1, 2).flatten(2).flatten(0, 1), rowwise, colwise)


def gemm_heads(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    batch: int,
    parts: list[tuple[int, int, tuple[QuantSpec | None, QuantSpec | None]]],
) -> list[Tensor]:
    """`gemm` whose epilogue splits the output into heads and quantizes them.

    Args:
        a, a_scale, b, b_scale, bias, out_dtype: as for `gemm`; a has batch * L rows.
        parts: `(features, head_dim, (rowwise, colwise))` of each part of the output, in order.

    Returns:
        Four tensors a part, as `quantize_heads` gives them of its (B, H, L, D).
    """
    output = gemm(a, a_scale, b, b_scale, bias, out_dtype=out_dtype).unflatten(0, (batch, a.shape[0] // batch))
    results: list[Tensor] = []
    for (_, head_dim, specs), part in zip(parts, output.split([width for width, _, _ in parts], dim=-1)):
        results += quantize_heads(part.unflatten(-1, (-1, head_dim)).transpose(1, 2), *specs)
    return results


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def transposed(qdata: Tensor, scale: Tensor) -> Quantized:
    """A square-tile quantization along D re-read along L, or back: the same values, contraction last."""
    flipped = scale[..., ::BLOCK, :].transpose(-1, -2).repeat_interleave(BLOCK, dim=-2)
    return qdata.transpose(-1, -2).contiguous(), flipped[..., : qdata.shape[-1], :].contiguous()


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_q: Quantized,
    key_q: Quantized,
    value_q: Quantized,
    mask: Tensor | None,
    seed: Tensor | None,
    spec: AttentionSpec,
    *,
    scale: float,
    causal: bool,
    dropout_p: float = 0.0,
    emit_probs: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax(scale * Q K^T + mask) V` with dropout, as the module says.

    Args:
        query: (B, H, Lq, D); key: (B, G, Lk, D); value: (B, G, Lk, E), H a multiple of G; fp32, bf16 or fp16,
            the compute dtype.
        query_q, key_q: quantized along D for `qk`. value_q: quantized along Lk for `pv`, (B, G, E, Lk).
        mask: broadcastable to (B, H, Lq, Lk); bool (True takes part) or float (added), or None.
        seed: int64 scalar for dropout and stochastic rounding, or None.
        causal: query i sees keys 0..i.

    Returns:
        out: (B, H, Lq, E) in the compute dtype; a query that sees no key gets 0.
        lse: (B, H, Lq) fp32, +inf for a query that sees no key.
        probs: (B, H, Lq, Lk) in the compute dtype, dropout applied, or empty (0,).
    """
    dtype, groups = query.dtype, query.shape[1] // max(key.shape[1], 1)
    scores = _scores(query, key, query_q, key_q, mask, spec, scale, causal, groups)
    peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    probs = torch.exp(scores - peak)
    total = probs.sum(-1, keepdim=True)
    keep, gain = _keep(probs, seed, dropout_p)
    kept = probs if keep is None else probs * keep
    factor = torch.where(total == 0, 0.0, gain / total)
    visible = _visible(mask, causal, scores)
    out = _along_sequence("pv", spec, kept, value, value_q, visible, groups, seed, dtype) * factor
    lse = torch.where(total == 0, math.inf, peak + torch.log(total)).squeeze(-1)
    return out.to(dtype), lse, (kept * factor).to(dtype) if emit_probs else query.new_empty(0)


def attention_backward(
    grad_out: Tensor,
    grad_probs: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    operands: dict[str, Quantized],
    mask: Tensor | None,
    seed: Tensor | None,
    spec: AttentionSpec,
    *,
    scale: float,
    causal: bool,
    dropout_p: float = 0.0,
    wanted: str = "qkv",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention_forward` in query, key, value and a float mask.

    Args:
        grad_out: (B, H, Lq, E) in the compute dtype. grad_probs: gradient of `probs`, or None.
        query, key, value, lse, mask, seed, spec, scale, causal, dropout_p: as the forward had them.
        operands: quantized with the contraction last: "query", "key" along D for S; "value", "grad" along E for
            `dp`; "grad_t" (B, H, E, Lq) for `dv`; "key_t" (B, G, D, Lk) for `dq`; "query_t" (B, H, D, Lq) for
            `dk`. One whose GEMM runs in high precision, or is not wanted, is left out.
        wanted: the gradients to compute, among "q", "k", "v" and "m" (the mask's).

    Returns:
        `(grad_query, grad_key, grad_value, grad_mask)`, each of its tensor's shape and dtype, or empty (0,).
    """
    nothing, dtype, groups = query.new_empty(0), query.dtype, query.shape[1] // max(key.shape[1], 1)
    grads = {name: query.new_empty(0) for name in "qkvm"}
    quantized = dict.fromkeys(("query", "key", "value", "grad", "grad_t", "key_t", "query_t"), (nothing, nothing))
    quantized |= operands
    scores = _scores(query, key, quantized["query"], quantized["key"], mask, spec, scale, causal, groups)
    probs = torch.exp(scores - lse.unsqueeze(-1))
    keep, gain = _keep(probs, seed, dropout_p)
    visible = _visible(mask, causal, scores)
    if "v" in wanted:
        kept = (probs if keep is None else probs * keep).transpose(-1, -2)
        dv = _along_sequence("dv", spec, kept, grad_out, quantized["grad_t"], visible, 1, seed, dtype) * gain
        grads["v"] = _sum_groups(dv, groups).to(dtype)
    if wanted == "v":
        return grads["q"], grads["k"], grads["v"], grads["m"]
    dprobs = _by_head("dp", spec, grad_out, value, quantized["grad"], quantized["value"], groups)
    dscores = _softmax_backward(probs, dprobs, grad_probs, gain if keep is None else keep * gain)
    if "q" in wanted:
        dq = _along_sequence("dq", spec, dscores, key, quantized["key_t"], visible, groups, seed, dtype)
        grads["q"] = (dq * scale).to(dtype)
    if "k" in wanted:
        transpose = dscores.transpose(-1, -2)
        dk = _along_sequence("dk", spec, transpose, query, quantized["query_t"], visible, 1, seed, dtype)
        grads["k"] = _sum_groups(dk * scale, groups).to(dtype)
    if "m" in wanted:
        assert mask is not None
        grads["m"] = dscores.sum_to_size(mask.shape).to(mask.dtype)
    return grads["q"], grads["k"], grads["v"], grads["m"]


def _softmax_backward(probs: Tensor, dprobs: Tensor, grad_probs: Tensor | None, gain: Tensor | float) -> Tensor:
    """`dS = P * (g - rowsum(P * g))` with `g = gain * (dP + grad_probs)`; fp32.

    `gain` is dropout's mask and factor; `grad_probs` a gradient of the emitted probabilities, `gain * P`. The row
    sum is taken of the very dP it is subtracted from: `rowsum(dO * O)` equals it in exact arithmetic alone, and where
    the difference is small, the quantization of dP would be all that is left of it.
    """
    grad = dprobs if grad_probs is None else dprobs + grad_probs.float()
    grad = grad * gain
    return probs * (grad - (probs * grad).sum(-1, keepdim=True))


def dropout_keep(shape: tuple[int, ...], seed: Tensor, dropout_p: float) -> Tensor:
    """Bool mask of `shape`, True with probability `1 - dropout_p`, drawn for each logical element."""
    bits = random_bits(math.prod(shape), seed, DROPOUT_STREAM)
    return (bits >= round(dropout_p * 2**32)).view(shape)


def _keep(probs: Tensor, seed: Tensor | None, dropout_p: float) -> tuple[Tensor | None, float]:
    if dropout_p == 0.0:
        return None, 1.0
    assert seed is not None
    return dropout_keep(tuple(probs.shape), seed, dropout_p), 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


def _scores(
    query: Tensor,
    key: Tensor,
    query_q: Quantized,
    key_q: Quantized,
    mask: Tensor | None,
    spec: AttentionSpec,
    scale: float,
    causal: bool,
    groups: int,
) -> Tensor:
    """(B, H, Lq, Lk) fp32: `scale * Q K^T + mask`, -inf where a bool mask or causality hides a pair."""
    scores = _by_head("qk", spec, query, key, query_q, key_q, groups) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.float()
    return scores.masked_fill(~_lower(scores), -math.inf) if causal else scores


def _lower(scores: Tensor) -> Tensor:
    """(Lq, Lk) bool: key j <= query i."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def _visible(mask: Tensor | None, causal: bool, scores: Tensor) -> Tensor | None:
    """Which pairs see each other, broadcastable to the scores; None: all."""
    visible = None
    if mask is not None:
        visible = mask if mask.dtype is torch.bool else mask > HIDDEN
    if causal:
        visible = _lower(scores) if visible is None else visible & _lower(scores)
    return None if visible is None else visible.expand(*visible.shape[:-2], *scores.shape[-2:])


def full_blocks(visible: Tensor, query_block: int, key_block: int) -> Tensor:
    """Whether every pair of the block that a pair lies in is visible; (..., Lq, Lk) bool to the same.

    Blocks are counted from the first query and key; the last of each is what is left.
    """
    rows, cols = visible.shape[-2:]
    padded = F.pad(visible, (0, -cols % key_block, 0, -rows % query_block), value=True)
    blocks = padded.unflatten(-1, (-1, key_block)).unflatten(-3, (-1, query_block)).all(-1).all(-2)
    spread = blocks.repeat_interleave(query_block, dim=-2).repeat_interleave(key_block, dim=-1)
    return spread[..., :rows, :cols]


def _by_head(
    gemm: str, spec: AttentionSpec, a: Tensor, b: Tensor, a_q: Quantized, b_q: Quantized, groups: int
) -> Tensor:
    """fp32 `a @ b^T`, contraction the head dim."""
    if getattr(spec, gemm) is not None:
        a, b = _values(a_q, getattr(spec, gemm)[0]), _values(b_q, getattr(spec, gemm)[1])
    return matmul_heads(a, _repeat(b, groups).transpose(-1, -2))


def _along_sequence(
    gemm: str,
    spec: AttentionSpec,
    weights: Tensor,
    high: Tensor,
    quantized: Quantized,
    visible: Tensor | None,
    groups: int,
    seed: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """fp32 `weights @ high`, contraction keys (pv, dq) or queries (dv, dk), MXFP8 where its block is all visible.

    Args:
        weights: (B, H, R, C) fp32: P or dS, transposed for the GEMMs over queries. high: (B, G, C, D).
    """
    pair: Pair = getattr(spec, gemm)
    high = _repeat(high, groups)
    if pair is None:
        return matmul_heads(weights.to(dtype), high)
    values = _repeat(_values(quantized, pair[1]), groups).transpose(-1, -2)
    full = None
    if visible is not None and not spec.mix_masked:
        over_keys = gemm in ("pv", "dq")
        block = spec.block(gemm)
        full = full_blocks(visible, BLOCK if over_keys else block, block if over_keys else BLOCK)
        full = None if bool(full.all()) else full if over_keys else full.transpose(-1, -2)
    quantize = _quantized_probs if gemm in ("pv", "dv") else _quantized_scores
    if full is None:
        return matmul_heads(quantize(weights, pair[0], seed, gemm), values)
    product = matmul_heads(quantize(weights.masked_fill(~full, 0.0), pair[0], seed, gemm), values)
    return product + matmul_heads(weights.masked_fill(full, 0.0).to(dtype), high)


def _quantized_probs(probs: Tensor, spec: QuantSpec, seed: Tensor | None, gemm: str) -> Tensor:
    """fp32 values of P in [0, 1] with the fixed scale: one quantization, whichever the contraction."""
    bits = None
    if spec.rounding is Rounding.STOCHASTIC:
        assert seed is not None
        untransposed = probs if gemm == "pv" else probs.transpose(-1, -2)
        bits = random_bits(probs.numel(), seed, PROBS_STREAM).view(untransposed.shape)
        bits = bits if gemm == "pv" else bits.transpose(-1, -2)
    elements = _round_elements(probs * 2.0**-PROBS_EXPONENT, spec, bits).to(spec.elem.dtype)
    return elements.float() * 2.0**PROBS_EXPONENT


def _quantized_scores(dscores: Tensor, spec: QuantSpec, seed: Tensor | None, gemm: str) -> Tensor:
    """fp32 values of dS (or its transpose) quantized along the last dim."""
    if gemm == "dk":
        qdata, scale = quantize_spec(dscores.transpose(-1, -2), spec, axis=-2, seed=seed, stream=SCORES_STREAM)
        return dequantize(qdata, scale, axis=-2).transpose(-1, -2)
    return dequantize(*quantize_spec(dscores, spec, seed=seed, stream=SCORES_STREAM))


def _values(quantized: Quantized, spec: QuantSpec) -> Tensor:
    qdata, scale = quantized
    return dequantize(qdata.view(spec.elem.dtype), scale)


def _repeat(x: Tensor, groups: int) -> Tensor:
    """(B, G, ...) to (B, H, ...): head h reads group h // (H / G)."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Inverse of `_repeat` for gradients: fp32 sums over the heads of a group."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def matmul_heads(a: Tensor, b: Tensor) -> Tensor:
    """(B, H, R, C) @ (B, H, C, N) with products and sums in fp32, exempt from autocast."""
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32, device=a.device)
    torch.bmm(a.float().flatten(0, 1), b.float().flatten(0, 1), out=out.flatten(0, 1))
    return out
