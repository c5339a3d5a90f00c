"""What MXFP8 does to attention's P and dS, which exist inside its kernels alone: computed again for part of a batch.

    S = scale * Q(query) Q(key)^T + mask        P = exp(S - max_keys S), as `pv` quantizes it
    dP = Q(grad_out) Q(value)^T                 dS = P' * (dP - rowsum(P' * dP)),  P' = softmax(S), as `dq` quantizes it

Q(.) is what the layer's GEMMs read of an operand. Dropout's mask is left out, and blocks that a mask makes the layer
multiply in BF16 are counted as if quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxfp8_recipe.functional.listening import AttentionCall
from mxfp8_recipe.fused.attention.gemms import PROBS_EXPONENT
from mxfp8_recipe.fused.attention.spec import AttentionSpec
from mxfp8_recipe.fused.reference import dequantize, quantize_spec
from mxfp8_recipe.fused.spec import QuantSpec, Rounding
from mxfp8_recipe.monitors.live.tensor_statistics import Fields, fixed_scale_fields, peaks_of, tensor_fields

MOST_SCORES = 2**20
"""Scores that are computed again for one call."""


@dataclass(frozen=True)
class AttentionSample:
    """Some samples of one call, the first queries of each where whole ones are too long.

    Attributes:
        scores: (b, H, q, Lk) fp32. value: (b, H, Lk, E) fp32, as `dp` reads it.
        step: every which sample of the batch. samples, queries: how many. pad: as in the call.
    """

    spec: AttentionSpec
    scores: Tensor
    value: Tensor
    step: int
    samples: int
    queries: int
    pad: Callable[[Tensor], Tensor] | None


def sample_attention(call: AttentionCall) -> AttentionSample | None:
    """The scores of part of a call's batch; None where it has none."""
    spec = AttentionSpec.decode(call.config.spec)
    dims = [tuple(x.shape) for x in (call.query, call.key, call.value)]
    lead = torch.broadcast_shapes(*(shape[:-3] for shape in dims))
    heads, queries, keys = _heads(dims), dims[0][-2], dims[1][-2]
    batch = math.prod(lead)
    if not batch or not heads or not queries or not keys:
        return None
    samples = min(max(MOST_SCORES // (heads * queries * keys), 1), batch)
    queries = min(queries, max(MOST_SCORES // (samples * heads * keys), 1))
    step = batch // samples

    def cut(x: Tensor) -> Tensor:
        return _four_dims(x, lead)[::step][:samples]

    quantized = _given(call, spec) or _own(call, spec)
    q, k, v = (cut(x) for x in quantized)
    q, k, v = q[:, :, :queries], _repeated(k, heads), _repeated(v, heads)
    scores = torch.matmul(_repeated(q, heads), k.transpose(-1, -2)) * (call.options.get("scale") or q.shape[-1] ** -0.5)
    if call.mask is not None:
        mask = cut(call.mask)
        mask = mask[..., :queries, :] if mask.shape[-2] > 1 else mask
        hidden = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hidden else scores + mask.float()
    if call.options.get("causal"):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return AttentionSample(spec, scores, v, step, samples, queries, call.pad)


def probs_fields(sample: AttentionSample) -> Fields | None:
    """Fields of P; None where `pv` is not MXFP8."""
    if sample.spec.pv is None:
        return None
    peak = sample.scores.amax(-1, keepdim=True)
    probs = torch.exp(sample.scores - torch.where(peak == -math.inf, 0.0, peak))
    return fixed_scale_fields(probs.flatten(0, 2), PROBS_EXPONENT, sample.spec.pv[0])


def grad_scores_fields(sample: AttentionSample, grad: Tensor) -> Fields | None:
    """Fields of dS, from the gradient of the output; None where `dq` is not MXFP8."""
    spec = sample.spec
    if spec.dq is None:
        return None
    grad = grad if sample.pad is None else sample.pad(grad)
    grad = _four_dims(grad, grad.shape[:-3])[:: sample.step][: sample.samples, :, : sample.queries].float()
    grad = _seen(grad, spec.dp[0]) if spec.dp else grad
    blind = (sample.scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key has no gradient
    probs = torch.softmax(sample.scores, -1).masked_fill(blind, 0.0)
    dprobs = torch.matmul(grad, sample.value.transpose(-1, -2))
    dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdim=True))
    return _fields(dscores, _nearest(spec.dq[0]))


def _fields(x: Tensor, spec: QuantSpec) -> Fields:
    qdata, scale = quantize_spec(x, spec)
    flat = x.flatten(0, 2)
    return tensor_fields(
        peaks_of(flat), flat, qdata.view(torch.uint8).flatten(0, 2), scale.view(torch.uint8).flatten(0, 2), spec
    )


def _four_dims(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., H, L, D), its leading dims broadcast to `lead`, as (B, H, L, D)."""
    x = x.reshape(*(1,) * (3 - x.dim()), *x.shape)
    x = x.expand(*lead, *x.shape[-3:])
    return x.flatten(0, -4) if lead else x.unsqueeze(0)


def _heads(dims: list[tuple[int, ...]]) -> int:
    return max(shape[-3] if len(shape) > 2 else 1 for shape in dims)


def _given(call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor] | None:
    """Query and key as `qk`, value as `dp` read them, from quantizations that came with the call."""
    if not call.given or spec.qk is None or spec.dp is None:
        return None
    pairs = ((0, spec.qk[0]), (4, spec.qk[1]), (8, spec.dp[1]))
    q, k, v = (dequantize(call.given[i].view(s.elem.dtype), call.given[i + 1]) for i, s in pairs)
    return q, k, v


def _own(call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The same, quantized here."""
    q = _seen(call.query, spec.qk[0] if spec.qk else None)
    k = _seen(call.key, spec.qk[1] if spec.qk else None)
    return q, k, _seen(call.value, spec.dp[1] if spec.dp else None)


def _seen(x: Tensor, spec: QuantSpec | None) -> Tensor:
    return x.float() if spec is None else dequantize(*quantize_spec(x.detach(), _nearest(spec)))


def _nearest(spec: QuantSpec) -> QuantSpec:
    """`spec` without random rounding: a monitor draws no random numbers."""
    return replace(spec, rounding=Rounding.NEAREST)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """(b, G, L, D) with one group for each head."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], dim=1)
