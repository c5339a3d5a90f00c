r"""The six GEMMs of attention on heads (B, H, L, ...): two MXFP8 operands each, or two of the compute dtype.

    qk, dp        contract over the head dim: `by_head`
    pv, dq        contract over keys          \ `along_sequence`, whose first operand is P, A or dS,
    dv, dk        contract over queries       / quantized here

Products are summed in fp32 (in fp64 for fp64 operands). Weights known to lie in [0, 1] (softmax's P) are quantized
with the fixed scale `2**PROBS_EXPONENT`, which needs no amax and couples no element to another; any other with its
amax.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..philox import random_bits
from ..reference import _round_elements, dequantize, quantize_spec
from ..spec import BLOCK, QuantSpec, Rounding
from .spec import AttentionSpec, Pair

PROBS_EXPONENT = -8
"""P times `2**8` lies in [0, 256], below the largest magnitude of either element format."""

QUERY_STREAM, KEY_STREAM, VALUE_STREAM, GRAD_STREAM, PROBS_STREAM, SCORES_STREAM, DROPOUT_STREAM = range(7)
"""Streams of random bits: the tensors of one call draw independently under one seed."""

Quantized = tuple[Tensor, Tensor]
"""`(qdata, scale)` as uint8 storage, contraction last; two empty tensors for an operand in high precision."""


OPERANDS = ("query", "key", "value", "grad", "query_t", "key_t", "value_t", "grad_t")
"""Quantized operands of a call: along the head dim, and (`_t`) along the sequence."""


def with_empty(operands: dict[str, Quantized], like: Tensor) -> dict[str, Quantized]:
    """All of `OPERANDS`, those not given empty."""
    nothing = like.new_empty(0, dtype=torch.uint8)
    return dict.fromkeys(OPERANDS, (nothing, nothing)) | operands


def by_head(
    gemm: str, spec: AttentionSpec, a: Tensor, b: Tensor, a_q: Quantized, b_q: Quantized, groups: int
) -> Tensor:
    """`a @ b^T`, contraction the head dim: a (B, H, R, D), b (B, G, C, D) to (B, H, R, C)."""
    if getattr(spec, gemm) is not None:
        a, b = values_of(a_q, getattr(spec, gemm)[0]), values_of(b_q, getattr(spec, gemm)[1])
    return matmul_heads(a, repeat_groups(b, groups).transpose(-1, -2))


def along_sequence(
    gemm: str,
    spec: AttentionSpec,
    weights: Tensor,
    high: Tensor,
    quantized: Quantized,
    visible: Tensor | None,
    groups: int,
    seed: Tensor | None,
    dtype: torch.dtype,
    bounded: bool = True,
) -> Tensor:
    """`weights @ high`, contraction keys (pv, dq) or queries (dv, dk), MXFP8 where its block is all visible.

    Args:
        weights: (B, H, R, C) fp32: P, A or dS, transposed for the GEMMs over queries.
        high: (B, G, C, D) in the compute dtype. quantized: the same, contraction last, (B, G, D, C).
        visible: which pairs see each other, broadcastable to (B, H, Lq, Lk), untransposed; None: all.
        groups: heads that read one of `high`. dtype: the compute dtype.
        bounded: the weights of pv and dv lie in [0, 1].
    """
    pair: Pair = getattr(spec, gemm)
    high = repeat_groups(high, groups)
    if pair is None:
        return matmul_heads(weights.to(dtype), high)
    values = repeat_groups(values_of(quantized, pair[1]), groups).transpose(-1, -2)
    full = None
    if visible is not None and not spec.mix_masked:
        over_keys = gemm in ("pv", "dq")
        block = spec.block(gemm)
        full = full_blocks(visible, BLOCK if over_keys else block, block if over_keys else BLOCK)
        full = None if bool(full.all()) else full if over_keys else full.transpose(-1, -2)
    quantize = _quantized_probs if bounded and gemm in ("pv", "dv") else _quantized_by_amax
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


def _quantized_by_amax(weights: Tensor, spec: QuantSpec, seed: Tensor | None, gemm: str) -> Tensor:
    """fp32 values of A or dS (or its transpose) quantized along the last dim."""
    stream = PROBS_STREAM if gemm in ("pv", "dv") else SCORES_STREAM
    if gemm in ("dv", "dk"):
        qdata, scale = quantize_spec(weights.transpose(-1, -2), spec, axis=-2, seed=seed, stream=stream)
        return dequantize(qdata, scale, axis=-2).transpose(-1, -2)
    return dequantize(*quantize_spec(weights, spec, seed=seed, stream=stream))


def full_blocks(visible: Tensor, query_block: int, key_block: int) -> Tensor:
    """Whether every pair of the block that a pair lies in is visible; (..., Lq, Lk) bool to the same.

    Blocks are counted from the first query and key; the last of each is what is left.
    """
    rows, cols = visible.shape[-2:]
    padded = F.pad(visible, (0, -cols % key_block, 0, -rows % query_block), value=True)
    blocks = padded.unflatten(-1, (-1, key_block)).unflatten(-3, (-1, query_block)).all(-1).all(-2)
    spread = blocks.repeat_interleave(query_block, dim=-2).repeat_interleave(key_block, dim=-1)
    return spread[..., :rows, :cols]


def values_of(quantized: Quantized, spec: QuantSpec) -> Tensor:
    """fp32 values of a quantization."""
    qdata, scale = quantized
    return dequantize(qdata.view(spec.elem.dtype), scale)


def repeat_groups(x: Tensor, groups: int) -> Tensor:
    """(B, G, ...) to (B, H, ...): head h reads group h // (H / G)."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def sum_groups(x: Tensor, groups: int) -> Tensor:
    """Inverse of `repeat_groups` for gradients: fp32 sums over the heads of a group."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def matmul_heads(a: Tensor, b: Tensor) -> Tensor:
    """(B, H, R, C) @ (B, H, C, N) with products and sums in fp32 or wider, exempt from autocast."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=dtype, device=a.device)
    torch.bmm(a.to(dtype).flatten(0, 1), b.to(dtype).flatten(0, 1), out=out.flatten(0, 1))
    return out
