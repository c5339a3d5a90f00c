"""A linear layer whose output goes into attention: its epilogue emits MXFP8 heads instead of the output.

    output = input @ weight.T + bias        (B, L, N), N the sum of H * D over its parts
    part   = output[..., a:b]               (B, L, H * D), split into heads (B, H, L, D)

Each part is quantized along the head dim and along the sequence, each sample and head on its own. The GEMMs, and
what is saved for backward, are `MXFP8LinearFunction`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.attention import gemm_heads
from .linear import LinearConfig, linear_backward, linear_forward
from .norm import carrier


@dataclass(frozen=True)
class HeadsSpec:
    """One part of a projection's output.

    Attributes:
        features: its width, heads * head_dim. head_dim: of one head.
        rowwise, colwise: encoded specs along the head dim and along the sequence, `""` for none.
    """

    features: int
    head_dim: int
    rowwise: str
    colwise: str


class ProjectionFunction(torch.autograd.Function):
    """`apply(input, qdata, scale, qdata_t, scale_t, weight, bias, seed, config, parts)`.

    Args:
        input .. config: as for `MXFP8LinearFunction`, the input (B, L, K).
        parts: a `HeadsSpec` for each part, in order.

    Returns:
        For each part a carrier (B, L, H * D), then qdata, scale, qdata_t, scale_t of (B, H, L, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        qdata: Tensor | None,
        scale: Tensor | None,
        qdata_t: Tensor | None,
        scale_t: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        config: LinearConfig,
        parts: tuple[HeadsSpec, ...],
    ) -> tuple[Tensor, ...]:
        def multiply(
            x: Tensor, x_q: Any, weight: Tensor, w_q: Any, bias: Tensor | None, config: LinearConfig
        ) -> list[Tensor]:
            operands = (x_q[0], x_q[1], config.fprop[0], w_q[0], w_q[1], config.fprop[1])
            facts = ([p.features for p in parts], [p.head_dim for p in parts])
            specs = ([p.rowwise for p in parts], [p.colwise for p in parts])
            return gemm_heads(*operands, bias, weight.dtype, input.shape[0], *facts, *specs, config.backend)

        given = (qdata, scale, qdata_t, scale_t)
        quantized = linear_forward(ctx, input, given, weight, bias, seed, config, multiply)
        ctx.mark_non_differentiable(*quantized)
        results: list[Tensor] = []
        for i, part in enumerate(parts):
            results.append(carrier(input, weight.dtype, (*input.shape[:2], part.features)))
            results += quantized[4 * i : 4 * i + 4]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        carriers = grads[::5]
        grad_output = carriers[0] if len(carriers) == 1 else torch.cat(carriers, dim=-1)
        return *linear_backward(ctx, grad_output), None
