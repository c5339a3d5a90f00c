"""`softmax(scale * Q K^T + mask) V` with each of its six GEMMs in MXFP8 or in high precision.

    qk   S  (Lq, Lk) = query (Lq, D)       . key (Lk, D)        contraction D, head dim
    pv   O  (Lq, E)  = probs (Lq, Lk)      . value (Lk, E)      contraction Lk, keys
    dv   dV (Lk, E)  = probs (Lq, Lk)      . grad_out (Lq, E)   contraction Lq, queries
    dp   dP (Lq, Lk) = grad_out (Lq, E)    . value (Lk, E)      contraction E, head dim
    dq   dQ (Lq, D)  = grad_scores (Lq, Lk). key (Lk, D)        contraction Lk, keys
    dk   dK (Lk, D)  = grad_scores (Lq, Lk). query (Lq, D)      contraction Lq, queries

query, key, value and grad_out are quantized here, once per contraction, each sample and head on its own; P
and dS inside the two ops, which run the GEMMs of a pass together, as a kernel does.

Saved for backward, in bytes a head: lse `4*Lq`, and of query and key both quantizations and of
value one, an element and 1/32 of a scale each: `2*(Lq + Lk)*D + Lk*E` and 1/32 of it. Where one square-tile
quantization serves both contractions it is saved once. query and key are saved as they are, too, where a mask
leaves blocks of dq and dk to the compute dtype, and any of the three where its GEMM is not MXFP8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.attention import attention_backward, attention_forward, quantize_heads, quantize_merged
from ..config import AttentionPrecision, LinearPrecision
from ..fused.attention.gemms import GRAD_STREAM, KEY_STREAM, QUERY_STREAM, VALUE_STREAM
from ..fused.attention.reference import transposed
from ..fused.attention.spec import GEMMS, AttentionSpec
from ..fused.spec import QuantSpec
from .linear import LinearConfig, refuse_second_order

Quantized = tuple[Tensor, Tensor]
"""`(qdata, scale)`, contraction last; empty where the GEMM runs in high precision or is not wanted."""


@dataclass(frozen=True)
class AttentionConfig:
    """An `AttentionPrecision` in the form the ops take.

    Attributes:
        spec: the encoded `AttentionSpec`.
        qk, pv, dv, dp, dq, dk: encoded specs of each GEMM's operands, `""` for a GEMM in high precision.
        share: of query, key, value and grad_output, whether one square quantization serves both contractions.
        is_high: no GEMM is MXFP8.
        mixes_rows: a tile spans several queries or keys. mixes_weights: one of what stands in softmax's place does.
        mix_masked: they may, under a mask too.
        stochastic: some operand is rounded stochastically, so a seed is needed.
        projections: of a multi-head layer, or None for linears in high precision.
        layer: the layer's name, for messages.
        fuse: a layer that owns its projections hands values to and from them quantized.
        backend: a backend's name, or `"auto"` for the one the input's device gets.
    """

    spec: str
    qk: tuple[str, str]
    pv: tuple[str, str]
    dv: tuple[str, str]
    dp: tuple[str, str]
    dq: tuple[str, str]
    dk: tuple[str, str]
    share: tuple[bool, bool, bool, bool]
    is_high: bool
    mixes_rows: bool
    mix_masked: bool
    stochastic: bool
    mixes_weights: bool = False
    projections: LinearConfig | None = None
    layer: str = ""
    fuse: bool = True
    backend: str = "auto"

    @classmethod
    def of(
        cls, precision: AttentionPrecision, layer: str = "", backend: str = "auto", fuse: bool = True
    ) -> AttentionConfig:
        spec = precision.spec
        gemms = {name: _encode(getattr(spec, name)) for name in GEMMS}
        linear = precision.projections
        return cls(
            spec=spec.encode(),
            **gemms,
            share=tuple(_is_shared(*pair) for pair in _rowwise_and_colwise(spec)),  # pyright: ignore[reportArgumentType]
            is_high=spec.is_high,
            mixes_rows=spec.mixes_rows,
            mix_masked=spec.mix_masked,
            stochastic=spec.stochastic,
            mixes_weights=spec.mixes_weights,
            projections=LinearConfig.of(linear, backend) if isinstance(linear, LinearPrecision) else None,
            layer=layer,
            fuse=fuse,
            backend=backend,
        )

    @property
    def takes_heads(self) -> bool:
        """Whether unmasked attention reads its query, key and value in MXFP8 alone, so that they may come so."""
        gemms = (self.qk, self.pv, self.dv, self.dp, self.dq, self.dk)
        return all(first for first, _ in gemms) and not self.stochastic

    @property
    def input_specs(self) -> tuple[tuple[str, str], ...]:
        """Specs along the head dim and along the sequence of query, key and value, as a projection emits them."""
        pairs = ((self.qk[0], self.dk[1]), (self.qk[1], self.dq[1]), (self.dp[1], self.pv[1]))
        return tuple((row, "" if share else col) for (row, col), share in zip(pairs, self.share))


def _encode(pair: tuple[QuantSpec, QuantSpec] | None) -> tuple[str, str]:
    return (pair[0].encode(), pair[1].encode()) if pair else ("", "")


def _rowwise_and_colwise(spec: AttentionSpec) -> list[tuple[QuantSpec | None, QuantSpec | None]]:
    """Specs along the head dim and along the sequence of query, key, value and grad_output."""
    places = (("qk", 0, "dk", 1), ("qk", 1, "dq", 1), ("dp", 1, "pv", 1), ("dp", 0, "dv", 1))
    pairs = {name: getattr(spec, name) or (None, None) for name in GEMMS}
    return [(pairs[row][i], pairs[col][j]) for row, i, col, j in places]


def _is_shared(rowwise: QuantSpec | None, colwise: QuantSpec | None) -> bool:
    return rowwise is not None and rowwise == colwise and rowwise.is_square


class MXFP8AttentionFunction(torch.autograd.Function):
    """`apply(query, key, value, mask, seed, config, scale, causal, dropout_p, emit_probs, emit, *given)`.

    Args:
        query: (B, H, Lq, D), key: (B, G, Lk, D), value: (B, G, Lk, E), H a multiple of G, in the compute dtype;
            or carriers of ones already quantized.
        given: those quantizations, four tensors each of query, key and value, as `input_specs` says; or nothing.
        emit: specs of the output quantized for the layer that multiplies it, along its features and along the
            tokens; or None.
        mask: broadcastable to (B, H, Lq, Lk), bool (True takes part) or float (added), or None.
        seed: int64 scalar for dropout and stochastic rounding, or None without either.

    Returns:
        (B, H, Lq, E) in the compute dtype; with `emit_probs` also the probabilities (B, H, Lq, Lk) after dropout.
        With `emit` the first is a carrier, and qdata, scale, qdata_t, scale_t of the (B * Lq, H * E) matrix follow.
        Gradients have the dtype and shape of what they belong to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        config: AttentionConfig,
        scale: float,
        causal: bool,
        dropout_p: float,
        emit_probs: bool,
        emit: tuple[str, str] | None,
        *given: Tensor,
    ) -> Any:
        needs_q, needs_k, _, needs_m = ctx.needs_input_grad[:4]
        scores = needs_q or needs_k or needs_m
        share_q, share_k, share_v, _ = config.share
        if given:
            q, q_t, k, k_t, v, v_t = ((given[i], given[i + 1]) for i in range(0, 12, 2))
        else:
            q, q_t = _both(query, config.qk[0], config.dk[1] if needs_k else "", share_q, seed, QUERY_STREAM, config)
            k, k_t = _both(key, config.qk[1], config.dq[1] if needs_q else "", share_k, seed, KEY_STREAM, config)
            v, v_t = _both(value, config.dp[1] if scores else "", config.pv[1], share_v, seed, VALUE_STREAM, config)
        along_keys = _along_sequence(v, v_t, share_v)
        options = (config.spec, scale, causal, dropout_p)
        out, lse, probs = attention_forward(
            query, key, value, [*q, *k, *along_keys], mask, seed, *options, emit_probs, config.backend
        )
        split = (causal or mask is not None) and not config.mix_masked
        high_q = not config.qk[0] or (needs_k and (split or not config.dk[0]))
        high_k = not config.qk[0] or (needs_q and (split or not config.dq[0]))
        high_v = scores and not config.dp[0]
        ctx.save_for_backward(
            query if high_q else _stand_in(query),
            key if high_k else _stand_in(key),
            value if high_v else _stand_in(value),
            lse, mask, seed, *q, *k, *v, *k_t, *q_t,
        )  # fmt: skip
        ctx.config, ctx.options, ctx.emit_probs, ctx.given = config, options, emit_probs, len(given)
        if emit is not None:
            parts = quantize_merged(out, *emit, config.backend)
            ctx.mark_non_differentiable(*parts)
            return _stand_in(out), *parts
        return (out, probs) if emit_probs else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        query, key, value, lse, mask, seed, *saved = ctx.saved_tensors
        config: AttentionConfig = ctx.config
        needs_q, needs_k, needs_v, needs_m = ctx.needs_input_grad[:4]
        grad, grad_probs = grads[0], grads[1] if ctx.emit_probs else None
        scores = needs_q or needs_k or needs_m
        q, k, v, k_t, q_t = (tuple(saved[i : i + 2]) for i in range(0, 10, 2))
        share_q, share_k, _, share_g = config.share
        rowwise, colwise = config.dp[0] if scores else "", config.dv[1] if needs_v else ""
        g, g_t = _both(grad, rowwise, colwise, share_g, seed, GRAD_STREAM, config)
        k_t = _along_sequence(k, k_t, share_k and needs_q)
        q_t = _along_sequence(q, q_t, share_q and needs_k)
        g_t = _along_sequence(g, g_t, share_g and needs_v)
        wanted = "".join(n for n, needed in zip("qkvm", (needs_q, needs_k, needs_v, needs_m)) if needed)
        dq, dk, dv, dm = attention_backward(
            grad, grad_probs, query, key, value, lse, [*q, *k, *v, *g, *g_t, *k_t, *q_t], mask, seed,
            *ctx.options, wanted, config.backend,
        )  # fmt: skip
        found = (dq if needs_q else None, dk if needs_k else None, dv if needs_v else None, dm if needs_m else None)
        return *found, *(None,) * (7 + ctx.given)


def _both(
    x: Tensor, rowwise: str, colwise: str, share: bool, seed: Tensor | None, stream: int, config: AttentionConfig
) -> tuple[Quantized, Quantized]:
    """Quantizations of (B, H, L, D) along D and along L; where one serves both, the first alone."""
    if not rowwise and not colwise:
        nothing = x.new_empty(0, dtype=torch.uint8)
        return (nothing, nothing), (nothing, nothing)
    colwise = "" if share and rowwise else colwise
    qdata, scale, qdata_t, scale_t = quantize_heads(x, rowwise, colwise, seed, stream, config.backend)
    return (qdata, scale), (qdata_t, scale_t)


def _along_sequence(rowwise: Quantized, colwise: Quantized, share: bool) -> Quantized:
    return transposed(*rowwise) if share and rowwise[0].dim() > 1 else colwise


def _stand_in(x: Tensor) -> Tensor:
    """The shape, dtype and device of x without its storage; reading it gives NaN."""
    return torch.full((), float("nan"), dtype=x.dtype, device=x.device).expand(x.shape)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    config: AttentionConfig,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    emit_probs: bool = False,
    emit: tuple[str, str] | None = None,
    given: tuple[Tensor, ...] = (),
) -> Any:
    """`MXFP8AttentionFunction` on the shapes torch takes: (..., H, L, D) of one dtype, leading dims broadcast.

    Returns:
        (..., H, Lq, E), and with `emit_probs` a second tensor (..., H, Lq, Lk). With `emit`, which takes 4-D
        tensors alone, a carrier and four parts.
    """
    tensors = (query, key, value)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    heads = query.shape[-3:-2] if enable_gqa else torch.broadcast_shapes(*(x.shape[-3:-2] for x in tensors))
    q, k, v = (_four_dims(x, lead, x.shape[-3:-2] if enable_gqa else heads) for x in tensors)
    if mask is not None:
        mask = _four_dims(mask, lead if len(lead) > 1 and mask.dim() > 3 else mask.shape[:-3], mask.shape[-3:-2])
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    outputs: Any = MXFP8AttentionFunction.apply(
        q, k, v, mask, seed, config, scale, causal, dropout_p, emit_probs, emit, *given
    )
    if emit is not None:
        return outputs
    if emit_probs:
        return tuple(x.view(*lead, *heads, *x.shape[-2:]) for x in outputs)
    return outputs.view(*lead, *heads, *outputs.shape[-2:])


def _four_dims(x: Tensor, lead: tuple[int, ...], heads: tuple[int, ...]) -> Tensor:
    """(..., H, L, D) expanded to (*lead, *heads, L, D), as (B, H, L, D)."""
    x = x.expand(*lead, *heads, *x.shape[-2:])
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x.view((1,) * (4 - x.dim()) + tuple(x.shape))
