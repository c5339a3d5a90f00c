"""A linear layer whose GEMM does, before it stores its sum, what the next layers would do with it.

    z      = input @ weight.T + bias
    output = z, and MXFP8 of act(z), row-wise, for the linear layer that multiplies it
    output = z + residual
    z_up, z_gate, and MXFP8 of act(z_gate) * z_up, for two layers of one input

z is rounded first, as a layer that stores it would. The other GEMMs, and what is saved for backward, are those of the
layer alone. The gradient of act(z) reaches z through the linear layer that multiplies it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from .linear import (
    LinearConfig,
    Quantized,
    bias_grad,
    gradients,
    kept,
    linear_backward,
    linear_forward,
    quantize,
    quantize_weight,
    receive,
    refuse_second_order,
    rows,
    shaped,
    wanted_gradient,
)


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


class GatedPairFunction(torch.autograd.Function):
    """`apply(last, first, qdata, scale, qdata_t, scale_t, up, up_bias, gate, gate_bias, config, steps, gate_last)`.

    Args:
        last, first: the input (..., K), or the carrier of one already quantized, twice: for the layer that was called
            last and for the one called first, so that autograd sums their gradients in the order of two layers.
        qdata .. scale_t: as for `MXFP8LinearFunction`.
        up, gate: (N, K) weights. up_bias, gate_bias: (N,) or None for both.
        config: of both layers, without stochastic rounding.
        steps: text of an `Epilogue` with a gated activation, that gives z and MXFP8 row-wise.
        gate_last: gate was called last.

    Returns:
        `(z_up, z_gate, qdata, scale)`: (..., N) in the compute dtype twice, and (M, N) of the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        last: Tensor,
        first: Tensor,
        qdata: Tensor | None,
        scale: Tensor | None,
        qdata_t: Tensor | None,
        scale_t: Tensor | None,
        up: Tensor,
        up_bias: Tensor | None,
        gate: Tensor,
        gate_bias: Tensor | None,
        config: LinearConfig,
        steps: str,
        gate_last: bool,
    ) -> tuple[Tensor, ...]:
        needs_input, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[6:10]
        x, x_q = rows(last), (qdata, scale, qdata_t, scale_t)
        if qdata is None:
            rowwise, colwise = config.input_specs
            x_q = quantize(x, rowwise, colwise if needs[0] or needs[2] else "", None, 0, config.backend)
        up_q, gate_q = (quantize_weight(weight, needs_input, None, config) for weight in (up, gate))
        saved = kept(x, x_q, config.wgrad[1]) if needs[0] or needs[2] else (None, None)
        for weight, w_q in ((up, up_q), (gate, gate_q)):
            saved += kept(weight, w_q, config.dgrad[1]) if needs_input else (None, None)
        ctx.save_for_backward(*saved)
        ctx.config, ctx.gate_last, ctx.input_shape, ctx.input_dtype = config, gate_last, last.shape, last.dtype
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (up_bias, gate_bias)]
        specs = {wanted_gradient(config, needs_input, *needs[i : i + 2]) for i in (0, 2)}
        ctx.gradient_spec = specs.pop() if len(specs) == 1 else None
        other = [t for t in (gate_q[0], gate_q[1], gate_bias) if t is not None]
        _, z, z_gate, q, s, *_ = backends.gemm_epilogue(
            x_q[0], x_q[1], config.fprop[0], up_q[0], up_q[1], config.fprop[1], up_bias, other, None, [], steps,
            up.dtype, config.backend,
        )  # fmt: skip
        ctx.mark_non_differentiable(q, s)
        shape = (*last.shape[:-1], up.shape[0])
        return shaped(z, shape), shaped(z_gate, shape), q, s

    @staticmethod
    def backward(ctx: Any, grad_up: Tensor, grad_gate: Tensor, *of_quantized: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        x, x_scale, *weights = ctx.saved_tensors
        config: LinearConfig = ctx.config
        needs_input, inputs, results = ctx.needs_input_grad[0], [], []
        for i, grad_output in enumerate((grad_up, grad_gate)):
            needs_weight, needs_bias = ctx.needs_input_grad[6 + 2 * i : 8 + 2 * i]
            grad, grad_q, total = receive(ctx, grad_output, needs_input, needs_weight, needs_bias, None, config)
            w, w_scale = weights[2 * i : 2 * i + 2]
            grad_input, grad_weight = gradients(
                grad, grad_q, x, x_scale, w, w_scale, needs_input, needs_weight, config
            )  # fmt: skip
            if grad_input is not None:
                grad_input = shaped(grad_input, ctx.input_shape).to(ctx.input_dtype)
            inputs.append(grad_input)
            results += [grad_weight, bias_grad(grad, total, ctx.bias_dtypes[i]) if needs_bias else None]
        if ctx.gate_last:
            inputs.reverse()
        return *inputs, None, None, None, None, *results, None, None, None


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
