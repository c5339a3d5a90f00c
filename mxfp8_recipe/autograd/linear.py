"""`output = input @ weight.T + bias` with each of its three GEMMs in MXFP8 or in high precision.

    fprop   output      (M, N) = input (M, K)         . weight (N, K)      contraction K, in_features
    dgrad   grad_input  (M, K) = grad_output (M, N)   . weight (N, K)      contraction N, out_features
    wgrad   grad_weight (N, K) = grad_output (M, N)   . input (M, K)       contraction M, tokens

Both operands of a GEMM are laid out with the contraction last, so every GEMM is `gemm(a, b) = a @ b.T`:
what contracts over rows is quantized along rows and written transposed.

Saved for backward, in bytes: for wgrad `M*K + M*K/32` (quantized input) or the input itself; for dgrad
`N*K + N*K/32` (quantized weight) or the weight itself. Where one square-tile quantization serves two GEMMs,
the row-wise one is saved and transposed in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..config import GemmPrecision, LinearPrecision
from ..fused.spec import BLOCK, QuantSpec

_INPUT_STREAM, _WEIGHT_STREAM, _GRAD_STREAM = 0, 1, 2
"""Streams of random bits: the tensors of one call draw independently under one seed."""


@dataclass(frozen=True)
class LinearConfig:
    """A `LinearPrecision` in the form the ops take: encoded specs, `""` for a GEMM in high precision.

    Attributes:
        fprop: specs of (input, weight). dgrad: (grad_output, weight). wgrad: (grad_output, input).
        share_input: one square quantization of the input serves fprop and wgrad; share_weight, share_grad
            likewise for the weight (fprop, dgrad) and grad_output (dgrad, wgrad).
        stochastic: some operand is rounded stochastically, so a seed is needed.
        backend: a backend's name, or `"auto"` for the one the input's device gets.
    """

    fprop: tuple[str, str]
    dgrad: tuple[str, str]
    wgrad: tuple[str, str]
    share_input: bool
    share_weight: bool
    share_grad: bool
    stochastic: bool
    backend: str = "auto"

    @classmethod
    def of(cls, precision: LinearPrecision, backend: str = "auto") -> LinearConfig:
        fprop, dgrad, wgrad = map(_encode, (precision.fprop, precision.dgrad, precision.wgrad))
        stochastic = any("stochastic" in text for text in (*fprop, *dgrad, *wgrad))
        return cls(
            fprop=fprop,
            dgrad=dgrad,
            wgrad=wgrad,
            share_input=_shared(fprop[0], wgrad[1]),
            share_weight=_shared(fprop[1], dgrad[1]),
            share_grad=_shared(dgrad[0], wgrad[0]),
            stochastic=stochastic,
            backend=backend,
        )


def _encode(gemm: GemmPrecision | str) -> tuple[str, str]:
    if not isinstance(gemm, GemmPrecision):
        return "", ""
    first, second = gemm.operands
    return first.encode(), second.encode()


def _shared(first: str, second: str) -> bool:
    return bool(first) and first == second and QuantSpec.decode(first).is_square


def elem_of(spec: str) -> str:
    """Element format of an encoded spec."""
    return spec[:4]


class MXFP8LinearFunction(torch.autograd.Function):
    """`apply(input, weight, bias, seed, config)`.

    Args:
        input: (..., K); weight: (N, K); bias: (N,) or None; all in the compute dtype.
        seed: int64 scalar tensor, or None without stochastic rounding.

    Returns:
        (..., N) in the compute dtype; gradients have the dtype and shape of what they belong to.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None, config: LinearConfig
    ) -> Tensor:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        x = input.reshape(-1, input.shape[-1])
        x_t_spec = config.wgrad[1] if needs_weight and not config.share_input else ""
        w_t_spec = config.dgrad[1] if needs_input and not config.share_weight else ""
        x_q = quantize(x, config.fprop[0], x_t_spec, seed, _INPUT_STREAM, config.backend)
        w_q = quantize(weight, config.fprop[1], w_t_spec, seed, _WEIGHT_STREAM, config.backend)
        saved_x = _kept(x, x_q, config.wgrad[1], config.share_input) if needs_weight else (None, None)
        saved_w = _kept(weight, w_q, config.dgrad[1], config.share_weight) if needs_input else (None, None)
        ctx.save_for_backward(*saved_x, *saved_w, seed)
        ctx.config, ctx.input_shape = config, input.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = _fprop(x, x_q, weight, w_q, bias, config)
        return output.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, w, w_scale, seed = ctx.saved_tensors
        config: LinearConfig = ctx.config
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        g_spec = config.dgrad[0] if needs_input or (needs_weight and config.share_grad) else ""
        g_t_spec = config.wgrad[0] if needs_weight and not config.share_grad else ""
        grad_q = quantize(grad, g_spec, g_t_spec, seed, _GRAD_STREAM, config.backend)
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            grad_input = _dgrad(grad, grad_q, w, w_scale, config).view(ctx.input_shape)
        if needs_weight:
            grad_weight = _wgrad(grad, grad_q, x, x_scale, config)
        if needs_bias:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


def quantize(
    x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor | None, ...]:
    """`(qdata, scale, qdata_t, scale_t)` of a (rows, cols) operand; without a spec nothing runs."""
    if not rowwise and not colwise:
        return None, None, None, None
    return backends.quantize(x, rowwise, colwise, seed, stream, backend)


def _kept(high: Tensor, quantized: Any, spec: str, shared: bool) -> tuple[Tensor, Tensor | None]:
    """What backward needs of an operand: qdata and scale of the GEMM that contracts its rows, or the original."""
    if not spec:
        return high, None
    return quantized[:2] if shared else quantized[2:]


def _fprop(x: Tensor, x_q: Any, w: Tensor, w_q: Any, bias: Tensor | None, config: LinearConfig) -> Tensor:
    if not config.fprop[0]:
        return backends.matmul(x, w, bias, x.dtype, config.backend)
    x_elem, w_elem = map(elem_of, config.fprop)
    return backends.gemm(x_q[0], x_q[1], x_elem, w_q[0], w_q[1], w_elem, bias, x.dtype, config.backend)


def _dgrad(grad: Tensor, grad_q: Any, w: Tensor, w_scale: Tensor | None, config: LinearConfig) -> Tensor:
    if w_scale is None:
        return backends.matmul(grad, w.t(), None, grad.dtype, config.backend)
    if config.share_weight:
        w, w_scale = transposed(w, w_scale, config.dgrad[1])
    g_elem, w_elem = map(elem_of, config.dgrad)
    return backends.gemm(grad_q[0], grad_q[1], g_elem, w, w_scale, w_elem, None, grad.dtype, config.backend)


def _wgrad(grad: Tensor, grad_q: Any, x: Tensor, x_scale: Tensor | None, config: LinearConfig) -> Tensor:
    if x_scale is None:
        return backends.matmul(grad.t(), x.t(), None, grad.dtype, config.backend)
    if config.share_input:
        x, x_scale = transposed(x, x_scale, config.wgrad[1])
    g_t, g_t_scale = grad_q[2:]
    if config.share_grad:
        g_t, g_t_scale = transposed(grad_q[0], grad_q[1], config.wgrad[0])
    g_elem, x_elem = map(elem_of, config.wgrad)
    return backends.gemm(g_t, g_t_scale, g_elem, x, x_scale, x_elem, None, grad.dtype, config.backend)


def transposed(qdata: Tensor, scale: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """A square-tile quantization along the last dim, re-read along the first: the same values, contraction last.

    Each tile's byte stands at every (row, block) it covers, so the transposed scales are every BLOCK-th row's.
    """
    return qdata.t().contiguous(), scale[::BLOCK].t().repeat_interleave(BLOCK, dim=0)[: qdata.shape[1]].contiguous()
