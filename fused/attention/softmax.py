"""Softmax over scores and what follows it, forward and backward, as dense and jagged attention share it.

    P  = exp(S - rowmax)                   unnormalized, in [0, 1]; l = rowsum(P); P' = keep * P
    O  = P' V / (l * (1 - dropout_p))      pv  contraction keys

    P  = exp(S - lse);  P' = keep * P      normalized, recomputed from lse = rowmax + log(l)
    dV = P'^T dO / (1 - dropout_p)         dv  contraction queries
    dP = keep * dO V^T / (1 - dropout_p)   dp  contraction head dim
    dS = P * (dP - rowsum(P * dP))
    dQ = scale * dS K                      dq  contraction keys
    dK = scale * dS^T Q                    dk  contraction queries

S arrives with -inf where a pair is hidden; a query that sees no key gets O = 0 and lse = +inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..philox import random_bits
from .gemms import DROPOUT_STREAM, Quantized, along_sequence, by_head, sum_groups
from .spec import AttentionSpec


def softmax_forward(
    scores: Tensor,
    value: Tensor,
    value_q: Quantized,
    visible: Tensor | None,
    seed: Tensor | None,
    spec: AttentionSpec,
    *,
    groups: int,
    dropout_p: float = 0.0,
    emit_probs: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """O (B, H, Lq, E) in the dtype of `value` (B, G, Lk, E), lse (B, H, Lq), and probs or an empty tensor.

    Args:
        scores: (B, H, Lq, Lk) fp32 or fp64. value_q: `value` along the keys.
        visible: for `along_sequence`. groups: heads that read one head of `value`.
        dropout_p, seed, emit_probs: as for `reference.attention_forward`.
    """
    dtype = value.dtype
    probs, total, peak = _exponentials(scores)
    keep, gain = _keep(probs, seed, dropout_p)
    kept = probs if keep is None else probs * keep
    factor = torch.where(total == 0, 0.0, gain / total)
    out = along_sequence("pv", spec, kept, value, value_q, visible, groups, seed, dtype) * factor
    return out.to(dtype), _lse(total, peak), (kept * factor).to(dtype) if emit_probs else value.new_empty(0)


def log_sum_exp(scores: Tensor) -> Tensor:
    """The lse (B, H, Lq) of `softmax_forward`, alone."""
    _, total, peak = _exponentials(scores)
    return _lse(total, peak)


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`exp(S - peak)`, their row sums, and `peak`: the row maxima, 0 where a query sees nothing."""
    peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    probs = torch.exp(scores - peak)
    return probs, probs.sum(-1, keepdim=True), peak


def _lse(total: Tensor, peak: Tensor) -> Tensor:
    return torch.where(total == 0, math.inf, peak + torch.log(total)).squeeze(-1)


def softmax_backward(
    scores: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_probs: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    quantized: dict[str, Quantized],
    visible: Tensor | None,
    seed: Tensor | None,
    spec: AttentionSpec,
    *,
    scale: float,
    groups: int,
    dropout_p: float = 0.0,
    wanted: str = "qkv",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(dQ, dK, dV, dS)`: what is not wanted is empty (0,); dS, in the dtype of the scores, whenever it was needed.

    Args: as for `reference.attention_backward`; `quantized` holds every operand a GEMM in MXFP8 reads.
    """
    nothing, dtype = query.new_empty(0), query.dtype
    grad_q, grad_k, grad_v = nothing, nothing, nothing
    probs = torch.exp(scores - lse.unsqueeze(-1))
    keep, gain = _keep(probs, seed, dropout_p)
    if "v" in wanted:
        kept = (probs if keep is None else probs * keep).transpose(-1, -2)
        dv = along_sequence("dv", spec, kept, grad_out, quantized["grad_t"], visible, 1, seed, dtype) * gain
        grad_v = sum_groups(dv, groups).to(dtype)
    if wanted in ("", "v"):
        return grad_q, grad_k, grad_v, nothing
    dprobs = by_head("dp", spec, grad_out, value, quantized["grad"], quantized["value"], groups)
    dscores = _through_softmax(probs, dprobs, grad_probs, gain if keep is None else keep * gain)
    if "q" in wanted:
        dq = along_sequence("dq", spec, dscores, key, quantized["key_t"], visible, groups, seed, dtype)
        grad_q = (dq * scale).to(dtype)
    if "k" in wanted:
        transpose = dscores.transpose(-1, -2)
        dk = along_sequence("dk", spec, transpose, query, quantized["query_t"], visible, 1, seed, dtype)
        grad_k = sum_groups(dk * scale, groups).to(dtype)
    return grad_q, grad_k, grad_v, dscores


def _through_softmax(probs: Tensor, dprobs: Tensor, grad_probs: Tensor | None, gain: Tensor | float) -> Tensor:
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
