"""A linear layer whose GEMM does, before it stores its sum, what the next layers would do with it.

    z      = input @ weight.T + bias
    output = z, and MXFP8 of act(z), row-wise, for the linear layer that multiplies it
    output = z + residual

z is rounded first, as a layer that stores it would. The other GEMMs, and what is saved for backward, are those of the
layer alone. The gradient of act(z) reaches z through the linear layer that multiplies it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from .linear import LinearConfig, Quantized, linear_backward, linear_forward, shaped, wanted_gradient


class EpilogueLinearFunction(torch.autograd.Function):
    """`apply(input, qdata, scale, qdata_t, scale_t, weight, bias, seed, config, residual, steps)`.

    Args:
        input .. config: as for `MXFP8LinearFunction`.
        residual: (..., N) in the compute dtype, added to the rounded z, or None.
        steps: text of an `Epilogue` that gives z or, with a residual, y.

    Returns:
        `(output, qdata, scale)`: (..., N) in the compute dtype, then (M, N) of the activation's result, or empty.
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
        residual: Tensor | None,
        steps: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        def multiply(
            x: Tensor, x_q: Quantized, weight: Tensor, w_q: Quantized, bias: Tensor | None, config: LinearConfig
        ) -> tuple[Tensor, Tensor, Tensor]:
            shape = (*input.shape[:-1], weight.shape[0])
            return emit(ctx, x_q, w_q, bias, residual, weight.dtype, shape, config, steps)

        given = (qdata, scale, qdata_t, scale_t)
        out = linear_forward(ctx, input, given, weight, bias, seed, config, multiply)
        if residual is None:
            needs = ctx.needs_input_grad
            ctx.gradient_spec = wanted_gradient(config, needs[0], needs[5], needs[6])
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *of_quantized: Tensor) -> tuple[Tensor | None, ...]:
        grad_residual = grad_output if ctx.needs_input_grad[9] else None
        return *linear_backward(ctx, grad_output), grad_residual, None


def emit(
    ctx: Any, x_q: Quantized, w_q: Quantized, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype,
    shape: tuple[int, ...], config: LinearConfig, steps: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fprop with its steps: what the Function returns, its MXFP8 marked as having no gradient."""
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    y, z, _, qdata, scale, *_ = backends.gemm_epilogue(
        x_q[0], x_q[1], config.fprop[0], w_q[0], w_q[1], config.fprop[1], bias, [], added, [], steps, dtype,
        config.backend,
    )  # fmt: skip
    ctx.mark_non_differentiable(qdata, scale)
    return shaped(z if residual is None else y, shape), qdata, scale


def is_emitted(spec: str) -> bool:
    """Whether an epilogue quantizes as an encoded spec says (`""`: not at all): to nearest, without a rotation."""
    return not spec or spec.endswith(":nearest:0")


def activation_steps(kind: str, rowwise: str) -> str:
    """Text of the `Epilogue` that gives z, and MXFP8 of act(z) row-wise."""
    return f"{kind} sum row={rowwise}"


def activation_of(steps: str) -> tuple[str, str]:
    """Kind and encoded spec that `activation_steps` was given."""
    kind, _, rowwise = steps.split(" ")
    return kind, rowwise.removeprefix("row=")


def dact_steps(kind: str, rowwise: str, colwise: str, act_colwise: str, high: bool, bias: bool) -> str:
    """Text of a `Dact`, from encoded specs, `""` for none."""
    specs = (("row", rowwise), ("col", colwise), ("act", act_colwise))
    words = [kind, *(f"{name}={spec}" for name, spec in specs if spec)]
    return " ".join(words + ["high"] * high + ["bias"] * bias)
