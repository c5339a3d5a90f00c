"""Attention in plain torch, forward and backward, on any device: what the kernels compute.

    S  = scale * Q K^T + bias              qk  contraction head dim
    P  = exp(S - rowmax)                   unnormalized, in [0, 1]; l = rowsum(P); P' = keep * P
    O  = P' V / (l * (1 - dropout_p))      pv  contraction keys

and backward as `softmax` says. Each GEMM multiplies either two MXFP8 operands or two operands of the compute
dtype (`gemms`); S, P, dP and dS stay fp32, and O, dQ, dK and dV are rounded once. P and P' are quantized with the
fixed scale `2**PROBS_EXPONENT`, dS with its amax. Dropout's factor stays outside P', or it would leave [0, 1].

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
from torch import Tensor

from ..reference import gemm, quantize_spec
from ..reference_ops import quantize_both
from ..spec import BLOCK, QuantSpec
from .gemms import Quantized, by_head, with_empty
from .softmax import softmax_backward, softmax_forward
from .spec import AttentionSpec

HIDDEN = -1e4
"""A float mask at or below this hides its pair: exp underflows to zero beside any visible score."""


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
    groups = query.shape[1] // max(key.shape[1], 1)
    scores = _scores(query, key, query_q, key_q, mask, spec, scale, causal, groups)
    visible = _visible(mask, causal, scores)
    return softmax_forward(
        scores, value, value_q, visible, seed, spec, groups=groups, dropout_p=dropout_p, emit_probs=emit_probs
    )


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
    groups = query.shape[1] // max(key.shape[1], 1)
    quantized = with_empty(operands, query)
    scores = _scores(query, key, quantized["query"], quantized["key"], mask, spec, scale, causal, groups)
    visible = _visible(mask, causal, scores)
    dq, dk, dv, dscores = softmax_backward(
        scores, lse, grad_out, grad_probs, query, key, value, quantized, visible, seed, spec,
        scale=scale, groups=groups, dropout_p=dropout_p, wanted=wanted,
    )  # fmt: skip
    if "m" not in wanted:
        return dq, dk, dv, query.new_empty(0)
    assert mask is not None
    return dq, dk, dv, dscores.sum_to_size(mask.shape).to(mask.dtype)


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
    scores = by_head("qk", spec, query, key, query_q, key_q, groups) * scale
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
