"""An activation on its own, and an activation together with the linear layer that multiplies its result.

    y = act(x)            or, gated,    y = act(gate) * x
    output = y @ weight.T + bias

Together, y exists in MXFP8 alone. Saved for backward: x (and gate) in the compute dtype and the quantized
weight. y quantized along the tokens, which wgrad multiplies, is emitted again by backward, not saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from .linear import (
    GRAD_STREAM,
    INPUT_STREAM,
    LinearConfig,
    Quantized,
    bias_grad,
    dgrad,
    fprop,
    kept,
    quantize_grad,
    quantize_weight,
    refuse_second_order,
    shaped,
    wgrad,
)


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
            grad, _rows(x), _rows(gate), ctx.kind, x.dtype, "", "", "", True, None, GRAD_STREAM, 0, ctx.backend
        )
        return dx.view(x.shape), None if gate is None else dgate.view(x.shape), None, None


class ActivationLinearFunction(torch.autograd.Function):
    """`apply(x, gate, weight, bias, seed, kind, config)`.

    Args:
        x, gate: (..., K) of one dtype, gate None for a kind without one.
        weight: (N, K), bias: (N,) or None, in the compute dtype.

    Returns:
        (..., N) in the compute dtype.
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
    ) -> Tensor:
        needs_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        y, y_q = _activate(x, gate, kind, weight.dtype, config.fprop[0], "", not config.fprop[0], seed, config)
        w_q = quantize_weight(weight, needs_input, seed, config)
        saved_w = kept(weight, w_q, config.dgrad[1]) if needs_input else (None, None)
        ctx.save_for_backward(x, gate, *saved_w, seed)
        ctx.kind, ctx.config, ctx.compute_dtype = kind, config, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return shaped(fprop(y, y_q, weight, w_q, bias, config), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        x, gate, w, w_scale, seed = ctx.saved_tensors
        config: LinearConfig = ctx.config
        needs_x, needs_gate, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        grad_q = quantize_grad(grad, needs_x or needs_gate, needs_weight, seed, config)
        grad_bias = bias_grad(grad, ctx.bias_dtype) if needs_bias else None
        grad_x = grad_gate = grad_weight = None
        y_t: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_x or needs_gate:
            grad_y = dgrad(grad, grad_q, w, w_scale, config).to(x.dtype)
            again = config.wgrad[1] if needs_weight else ""
            dx, dgate, *_, act_t, act_t_scale = backends.activation_backward(
                grad_y, _rows(x), _rows(gate), ctx.kind, ctx.compute_dtype, "", "", again, True, seed, GRAD_STREAM,
                INPUT_STREAM, config.backend,
            )  # fmt: skip
            grad_x = dx.view(x.shape) if needs_x else None
            grad_gate = dgate.view(x.shape) if needs_gate else None
            y_t = act_t, act_t_scale
        if needs_weight:
            grad_weight = _activation_wgrad(ctx, x, gate, seed, grad, grad_q, y_t)
        return grad_x, grad_gate, grad_weight, grad_bias, None, None, None


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
