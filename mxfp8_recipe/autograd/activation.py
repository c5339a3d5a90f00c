"""An activation on its own, and an activation together with the linear layer that multiplies its result.

    y = act(x)            or, gated,    y = act(gate) * x
    output = y @ weight.T + bias

Together, y exists in MXFP8 alone. Saved for backward: x (and gate) in the compute dtype and the quantized
weight. y quantized along the tokens, which wgrad multiplies, is emitted again by backward, not saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends
from .epilogue import dact_steps, emit, is_emitted
from .gradient import GradientSpec, MXGradient, Parcel
from .linear import (
    GRAD_STREAM,
    INPUT_STREAM,
    LinearConfig,
    Quantized,
    bias_grad,
    dgrad,
    fprop,
    kept,
    quantize_weight,
    receive,
    refuse_second_order,
    shaped,
    wanted_gradient,
    wgrad,
)

Operands = tuple[Tensor, Quantized, Tensor, Tensor | None]
"""What `dgrad` takes: the gradient, it quantized, and the weight and its scales."""


class ActivationFunction(torch.autograd.Function):
    """`apply(x, gate, kind, backend)`: (..., K) in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, kind: str, backend: str) -> Tensor:
        ctx.kind, ctx.backend = kind, backend
        out = backends.activation_quantize(_rows(x), _rows(gate), kind, x.dtype, "", "", True, None, 0, backend)
        y = shaped(out[0], x.shape)
        ctx.save_for_backward(y if kind == "relu" else x, gate)  # as torch: what relu was given may be overwritten
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        x, gate = ctx.saved_tensors
        grad = grad_y.reshape(-1, grad_y.shape[-1])
        dx, dgate, *_ = backends.activation_backward(
            grad, _rows(x), _rows(gate), ctx.kind, x.dtype, "", "", "", True, False, None, GRAD_STREAM, 0, ctx.backend
        )
        return dx.view(x.shape), None if gate is None else dgate.view(x.shape), None, None


class ActivationLinearFunction(torch.autograd.Function):
    """`apply(x, gate, weight, bias, seed, kind, config, gradient, qdata, scale, residual, steps)`.

    Args:
        x, gate: (..., K) of one dtype, gate None for a kind without one.
        weight: (N, K), bias: (N,) or None, in the compute dtype.
        gradient: what the linears that made x and gate need of their gradients, or None to give those gradients in
            high precision.
        qdata, scale: y in MXFP8 per `config.fprop[0]` where the GEMM that made x emitted it, or None for both.
        residual, steps: as for `EpilogueLinearFunction`; None and `""` for a GEMM without an epilogue.

    Returns:
        (..., N) in the compute dtype; with steps what `EpilogueLinearFunction` returns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        kind: str,
        config: LinearConfig,
        gradient: GradientSpec | None,
        qdata: Tensor | None,
        scale: Tensor | None,
        residual: Tensor | None,
        steps: str,
    ) -> Any:
        needs_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        y, y_q = x, (qdata, scale, None, None)
        if qdata is None:
            y, y_q = _activate(x, gate, kind, weight.dtype, config.fprop[0], "", not config.fprop[0], seed, config)
        w_q = quantize_weight(weight, needs_input, seed, config)
        saved_w = kept(weight, w_q, config.dgrad[1]) if needs_input else (None, None)
        ctx.save_for_backward(x, gate, *saved_w, seed)
        ctx.kind, ctx.config, ctx.compute_dtype = kind, config, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gradient = gradient
        shape = (*x.shape[:-1], weight.shape[0])
        if residual is None:
            ctx.gradient_spec = wanted_gradient(config, needs_input, *ctx.needs_input_grad[2:4])
        if steps:
            return emit(ctx, y_q, w_q, bias, residual, weight.dtype, shape, config, steps)
        return shaped(fprop(y, y_q, weight, w_q, bias, config), shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *of_quantized: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        x, gate, w, w_scale, seed = ctx.saved_tensors
        config: LinearConfig = ctx.config
        needs_x, needs_gate, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        grad, grad_q, total = receive(ctx, grad_output, needs_x or needs_gate, needs_weight, needs_bias, seed, config)
        grad_bias = bias_grad(grad, total, ctx.bias_dtype) if needs_bias else None
        grad_x = grad_gate = grad_weight = None
        y_t: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_x or needs_gate:
            again = config.wgrad[1] if needs_weight else ""
            grad_x, grad_gate, y_t = _differentiate(ctx, (grad, grad_q, w, w_scale), x, gate, again, seed)
            grad_x, grad_gate = grad_x if needs_x else None, grad_gate if needs_gate else None
        if needs_weight:
            grad_weight = _activation_wgrad(ctx, x, gate, seed, grad, grad_q, y_t)
        grad_residual = grad_output if ctx.needs_input_grad[10] else None
        return grad_x, grad_gate, grad_weight, grad_bias, *[None] * 6, grad_residual, None


def _differentiate(
    ctx: Any,
    operands: Operands,
    x: Tensor,
    gate: Tensor | None,
    again: str,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """Gradients of x and gate, in MXFP8 where the linears before want it so, and y along the tokens as `again` says.

    `operands`: of the dgrad before it, in whose epilogue all that happens where the layer has one.
    """
    spec: GradientSpec | None = ctx.gradient
    rowwise, colwise, bias = ("", "", False) if spec is None else (spec.rowwise, spec.colwise, spec.bias)
    run = (_in_dgrad if _has_dact(ctx, operands, x, again) else _after_dgrad)(ctx, operands, x, gate, seed)
    out = run(rowwise, colwise, again, spec is None, bias)
    y_t = out[12], out[13]
    if spec is None:
        return shaped(out[0], x.shape), None if gate is None else shaped(out[1], x.shape), y_t

    def travels(i: int) -> MXGradient:
        """Gradient i of the two, of x and of gate."""
        qdata, scale, qdata_t, scale_t = out[4 + 4 * i : 8 + 4 * i]
        total = out[2 + i] if bias else None
        parcel = Parcel((qdata, scale, qdata_t, scale_t), total, spec, lambda: run("", "", "", True, False)[i])
        return MXGradient(x.shape, x.dtype, x.device, parcel)

    return travels(0), None if gate is None else travels(1), y_t


Differentiate = Callable[[str, str, str, bool, bool], tuple[Tensor, ...]]
"""From specs of dz row-wise and along the tokens and of y along the tokens, whether to give dz itself and its sums over
the tokens, to the 14 outputs of `activation_backward`."""


def _has_dact(ctx: Any, operands: Operands, x: Tensor, again: str) -> bool:
    """Whether the derivative is taken in dgrad's epilogue: a GEMM in MXFP8, y rounded to nearest."""
    grad, _, _, w_scale = operands
    fits = torch.promote_types(grad.dtype, x.dtype) == x.dtype  # else grad_y would be rounded to x.dtype in between
    return ctx.config.dgrad_steps and w_scale is not None and is_emitted(again) and fits


def _in_dgrad(ctx: Any, operands: Operands, x: Tensor, gate: Tensor | None, seed: Tensor | None) -> Differentiate:
    grad, grad_q, w, w_scale = operands
    config: LinearConfig = ctx.config

    def run(rowwise: str, colwise: str, again: str, high: bool, bias: bool) -> tuple[Tensor, ...]:
        steps = dact_steps(ctx.kind, rowwise, colwise, again, high, bias)
        return backends.gemm_dact(
            grad_q[0], grad_q[1], config.dgrad[0], w, w_scale, config.dgrad[1], _rows(x), _rows(gate), steps,
            grad.dtype, ctx.compute_dtype, config.backend,
        )  # fmt: skip

    return run


def _after_dgrad(ctx: Any, operands: Operands, x: Tensor, gate: Tensor | None, seed: Tensor | None) -> Differentiate:
    grad_y = dgrad(*operands, ctx.config).to(x.dtype)

    def run(rowwise: str, colwise: str, again: str, high: bool, bias: bool) -> tuple[Tensor, ...]:
        return backends.activation_backward(
            grad_y, _rows(x), _rows(gate), ctx.kind, ctx.compute_dtype, rowwise, colwise, again, high, bias, seed,
            GRAD_STREAM, INPUT_STREAM, ctx.config.backend,
        )  # fmt: skip

    return run


def _activation_wgrad(
    ctx: Any,
    x: Tensor,
    gate: Tensor | None,
    seed: Tensor | None,
    grad: Tensor,
    grad_q: Quantized,
    y_t: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Wgrad from y emitted again: along the tokens in MXFP8, or in high precision where wgrad is left so."""
    config: LinearConfig = ctx.config
    spec = config.wgrad[1]
    if not spec:
        y, _ = _activate(x, gate, ctx.kind, ctx.compute_dtype, "", "", True, seed, config)
        return wgrad(grad, grad_q, y, None, config)
    if y_t[0] is None:
        y_t = _activate(x, gate, ctx.kind, ctx.compute_dtype, "", spec, False, seed, config)[1][2:]
    assert y_t[0] is not None
    return wgrad(grad, grad_q, y_t[0], y_t[1], config)


def _activate(
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    emit_high: bool,
    seed: Tensor | None,
    config: LinearConfig,
) -> tuple[Tensor, Quantized]:
    y, *quantized = backends.activation_quantize(
        _rows(x), _rows(gate), kind, dtype, rowwise, colwise, emit_high, seed, INPUT_STREAM, config.backend
    )
    qdata, scale, qdata_t, scale_t = quantized
    return y, (qdata, scale, qdata_t, scale_t)


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1])
