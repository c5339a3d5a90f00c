"""The oracle of the attention tests: six GEMMs in fp64 on explicitly quantized operands, block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.config import AttentionPrecision
from mxfp8_recipe.fused.attention.spec import GEMMS
from mxfp8_recipe.fused.spec import QuantSpec
from numerics_tests.helpers import seen

HIGH: dict[str, Any] = dict.fromkeys(GEMMS, "bf16")
SQUARE = {
    "qk": {"query": {"tile": "32x32"}, "key": {"tile": "32x32"}},
    "pv": {"value": {"tile": "32x32"}},
    "dv": {"grad_output": {"tile": "32x32"}},
    "dp": {"grad_output": {"tile": "32x32"}, "value": {"tile": "32x32"}},
    "dq": {"grad_scores": {"tile": "32x32"}, "key": {"tile": "32x32"}},
    "dk": {"grad_scores": {"tile": "32x32"}, "query": {"tile": "32x32"}},
}


def precision(**changes: Any) -> AttentionPrecision:
    return AttentionPrecision.model_validate(changes)


def only(*gemms: str) -> AttentionPrecision:
    """MXFP8 for these GEMMs alone."""
    return precision(**{name: "bf16" for name in GEMMS if name not in gemms})


def config(**changes: Any) -> AttentionConfig:
    return AttentionConfig.of(precision(**changes))


def heads(*shape: int, dtype: torch.dtype = torch.float32, kv: int | None = None) -> list[Tensor]:
    """query, key, value of (..., H, L, D), `kv` heads for key and value, and a gradient of the output."""
    fewer = (*shape[:-3], kv or shape[-3], *shape[-2:])
    q, k, v, g = (torch.randn(s) for s in (shape, fewer, fewer, shape))
    return [x.to(dtype).requires_grad_() for x in (q, k, v)] + [g.to(dtype)]


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    signal, noise = expected.detach().double(), (actual.detach().double() - expected.detach().double()).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise else float("inf")


def visible_blocks(visible: Tensor, rows: int, cols: int) -> Tensor:
    """(..., Lq, Lk): whether the rows x cols block around a pair hides nothing, by looking at each block."""
    full = torch.empty_like(visible)
    for i in range(0, visible.shape[-2], rows):
        for j in range(0, visible.shape[-1], cols):
            block = visible[..., i : i + rows, j : j + cols]
            full[..., i : i + rows, j : j + cols] = block.all(-1).all(-1)[..., None, None]
    return full


def fixed_scale(probs: Tensor) -> Tensor:
    """E4M3 of P at the scale 2**-8."""
    return (probs.float() * 256).to(torch.float8_e4m3fn).double() / 256


def oracle(q: Tensor, k: Tensor, v: Tensor, g: Tensor, chosen: AttentionPrecision, visible: Tensor) -> list[Tensor]:
    """Output and gradients of query, key and value, fp64; visible (Lq, Lk) bool, every query sees a key."""

    def pair(gemm: str) -> tuple[QuantSpec, QuantSpec] | tuple[None, None]:
        found = getattr(chosen, gemm)
        return (None, None) if found == "bf16" else found.operands

    def by_head(gemm: str, a: Tensor, b: Tensor) -> Tensor:
        first, second = pair(gemm)
        return seen(a, first, -1) @ seen(b, second, -1).transpose(-1, -2)

    def along_sequence(gemm: str, weights: Tensor, values: Tensor, hides: Tensor) -> Tensor:
        first, second = pair(gemm)
        if first is None or second is None:
            return weights @ values.double()
        full = visible_blocks(~hides, 32, max(first.tile[1], second.tile[1]))
        inside = torch.where(full, weights, 0.0)
        inside = fixed_scale(inside) if gemm in ("pv", "dv") else seen(inside.float(), first, -1)
        return inside @ seen(values, second, -2) + torch.where(full, 0.0, weights) @ values.double()

    scale, hidden = q.shape[-1] ** -0.5, ~visible
    scores = (by_head("qk", q, k) * scale).masked_fill(hidden, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    unnormalized = torch.exp(scores - peak)
    total = unnormalized.sum(-1, keepdim=True)
    out = along_sequence("pv", unnormalized, v, hidden) / total
    probs = unnormalized / total
    dv = along_sequence("dv", probs.transpose(-1, -2), g, hidden.transpose(-1, -2))
    dprobs = by_head("dp", g, v)
    dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdim=True))
    dq = along_sequence("dq", dscores, k, hidden) * scale
    dk = along_sequence("dk", dscores.transpose(-1, -2), q, hidden.transpose(-1, -2)) * scale
    return [out, dq, dk, dv]
