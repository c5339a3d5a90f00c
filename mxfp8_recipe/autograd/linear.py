"""`output = input @ weight.T + bias` with each of its three GEMMs in MXFP8 or in high precision.

    fprop   output      (M, N) = input (M, K)         . weight (N, K)      contraction K, in_features
    dgrad   grad_input  (M, K) = grad_output (M, N)   . weight (N, K)      contraction N, out_features
    wgrad   grad_weight (N, K) = grad_output (M, N)   . input (M, K)       contraction M, tokens

Both operands of a GEMM are laid out with the contraction last, so every GEMM is `gemm(a, b) = a @ b.T`:
what contracts over rows is quantized along rows and written transposed.

Saved for backward, in bytes: for wgrad `M*K + M*K/32` (quantized input) or the input itself; for dgrad
`N*K + N*K/32` (quantized weight) or the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..config import GemmPrecision, LinearPrecision
from ..fused.replay import Replayed
from .gradient import GradientSpec, MXGradient

INPUT_STREAM, WEIGHT_STREAM, GRAD_STREAM = 0, 1, 2
"""Streams of random bits: the tensors of one call draw independently under one seed."""

Quantized = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""`(qdata, scale, qdata_t, scale_t)`; None or empty where not emitted."""

NOT_QUANTIZED: Quantized = (None, None, None, None)


@dataclass(frozen=True)
class LinearConfig:
    """A `LinearPrecision` in the form the ops take: encoded specs, `""` for a GEMM in high precision.

    Attributes:
        fprop: specs of (input, weight). dgrad: (grad_output, weight). wgrad: (grad_output, input).
        stochastic: some operand is rounded stochastically, so a seed is needed.
        backend: a backend's name, or `"auto"` for the one the input's device gets.
        fprop_steps, dgrad_steps: that GEMM runs in the kernel that has epilogues, whether or not steps follow in it:
            one implementation a layer, so that its bits do not depend on what is fused.
    """

    fprop: tuple[str, str]
    dgrad: tuple[str, str]
    wgrad: tuple[str, str]
    stochastic: bool
    backend: str = "auto"
    fprop_steps: bool = False
    dgrad_steps: bool = False

    @classmethod
    def of(cls, precision: LinearPrecision, backend: str = "auto") -> LinearConfig:
        fprop, dgrad, wgrad = map(_encode, (precision.fprop, precision.dgrad, precision.wgrad))
        stochastic = any("stochastic" in text for text in (*fprop, *dgrad, *wgrad))
        return cls(
            fprop=fprop,
            dgrad=dgrad,
            wgrad=wgrad,
            stochastic=stochastic,
            backend=backend,
        )

    @property
    def input_specs(self) -> tuple[str, str]:
        """Row-wise and column-wise spec of the input, as a producer would emit them for this layer."""
        return self.fprop[0], self.wgrad[1]


def _encode(gemm: GemmPrecision | str) -> tuple[str, str]:
    if not isinstance(gemm, GemmPrecision):
        return "", ""
    first, second = gemm.operands
    return first.encode(), second.encode()


class MXFP8LinearFunction(torch.autograd.Function):
    """`apply(input, qdata, scale, qdata_t, scale_t, weight, bias, seed, config)`.

    Args:
        input: (..., K), or the carrier of one already quantized.
        qdata, scale, qdata_t, scale_t: that quantization per `config.input_specs`, or None for all.
        weight: (N, K); bias: (N,) or None, in the compute dtype, which an unquantized input shares.
        seed: int64 scalar tensor, or None without stochastic rounding.

    Returns:
        (..., N) in the compute dtype; gradients have the dtype and shape of what they belong to.
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
    ) -> Tensor:
        return linear_forward(ctx, input, (qdata, scale, qdata_t, scale_t), weight, bias, seed, config)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return linear_backward(ctx, grad_output)


def linear_forward(
    ctx: Any,
    input: Tensor,
    given: Quantized,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    config: LinearConfig,
    multiply: Callable[..., Any] | None = None,
) -> Any:
    """The forward of every Function with this argument order: saves what `linear_backward` needs.

    `multiply` takes the arguments of `fprop` and stands for it where its GEMM has another epilogue.
    """
    needs_input, _, _, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    tensors, wanted = (rows(input), *given, weight, bias, seed), (needs_input, needs_weight, config)
    if multiply is None:
        out, *saved = _forward(tensors, wanted)
        assert out is not None
        ctx.gradient_spec = wanted_gradient(config, needs_input, needs_weight, needs_bias)
        if input.dim() != 2:
            out = shaped(out, (*input.shape[:-1], weight.shape[0]))
    else:
        x_q, w_q, saved = _quantized(*tensors[:6], seed, *wanted)
        out = multiply(tensors[0], x_q, weight, w_q, bias, config)
    ctx.save_for_backward(*saved, seed)
    ctx.config, ctx.input_shape, ctx.input_dtype = config, input.shape, input.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    return out


def _quantized(
    x: Tensor, qdata: Tensor | None, scale: Tensor | None, qdata_t: Tensor | None, scale_t: Tensor | None,
    weight: Tensor, seed: Tensor | None, needs_input: bool, needs_weight: bool, config: LinearConfig,
) -> tuple[Quantized, Quantized, tuple[Tensor | None, ...]]:  # fmt: skip
    """Input and weight for fprop, and what backward needs of both."""
    x_q: Quantized = (qdata, scale, qdata_t, scale_t)
    if qdata is None:
        rowwise, colwise = config.input_specs
        x_q = quantize(x, rowwise, colwise if needs_weight else "", seed, INPUT_STREAM, config.backend)
    w_q = quantize_weight(weight, needs_input, seed, config)
    saved_x = kept(x, x_q, config.wgrad[1]) if needs_weight else (None, None)
    saved_w = kept(weight, w_q, config.dgrad[1]) if needs_input else (None, None)
    return x_q, w_q, (*saved_x, *saved_w)


@Replayed
def _forward(
    x: Tensor, qdata: Tensor | None, scale: Tensor | None, qdata_t: Tensor | None, scale_t: Tensor | None,
    weight: Tensor, bias: Tensor | None, seed: Tensor | None,
    needs_input: bool, needs_weight: bool, config: LinearConfig,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The output, and what backward needs."""
    given = (qdata, scale, qdata_t, scale_t)
    x_q, w_q, saved = _quantized(x, *given, weight, seed, needs_input, needs_weight, config)
    return fprop(x, x_q, weight, w_q, bias, config), *saved


def linear_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients in the argument order of `MXFP8LinearFunction`."""
    refuse_second_order()
    saved = ctx.saved_tensors
    config: LinearConfig = ctx.config
    needs_input, _, _, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    if isinstance(grad_output, MXGradient):
        grad, grad_q, total = receive(ctx, grad_output, needs_input, needs_weight, needs_bias, saved[4], config)
        x, x_scale, w, w_scale, _ = saved
        grad_input, grad_weight = gradients(grad, grad_q, x, x_scale, w, w_scale, needs_input, needs_weight, config)
    else:
        grad = rows(grad_output)
        grad_input, grad_weight, total = _backward((grad, *saved), (needs_input, needs_weight, needs_bias, config))
    if grad_input is not None:
        grad_input = shaped(grad_input, ctx.input_shape)
        if grad_input.dtype != ctx.input_dtype:
            grad_input = grad_input.to(ctx.input_dtype)
    grad_bias = bias_grad(grad, total, ctx.bias_dtype) if needs_bias else None
    return grad_input, None, None, None, None, grad_weight, grad_bias, None, None


def gradients(
    grad: Tensor, grad_q: Quantized, x: Tensor, x_scale: Tensor | None, w: Tensor, w_scale: Tensor | None,
    needs_input: bool, needs_weight: bool, config: LinearConfig,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Of the input, (M, K), and of the weight."""
    grad_input = dgrad(grad, grad_q, w, w_scale, config) if needs_input else None
    return grad_input, wgrad(grad, grad_q, x, x_scale, config) if needs_weight else None


@Replayed
def _backward(
    grad: Tensor, x: Tensor, x_scale: Tensor | None, w: Tensor, w_scale: Tensor | None, seed: Tensor | None,
    needs_input: bool, needs_weight: bool, needs_bias: bool, config: LinearConfig,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of input and weight, and the sums over the tokens where one read of `grad` gives them too."""
    grad_q, total = quantize_grad(grad, needs_input, needs_weight, needs_bias, seed, config)
    return *gradients(grad, grad_q, x, x_scale, w, w_scale, needs_input, needs_weight, config), total


def refuse_second_order() -> None:
    """Raise in a backward that records itself: without derivatives of its own, its terms would go missing silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "MXFP8 layers have no second derivatives (create_graph=True); override the layers they are taken through "
            "with 'bf16'"
        )


def quantize(x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str) -> Quantized:
    """`(qdata, scale, qdata_t, scale_t)` of a (rows, cols) operand; without a spec nothing runs."""
    if not rowwise and not colwise:
        return NOT_QUANTIZED
    return backends.quantize(x, rowwise, colwise, seed, stream, backend)


def quantize_weight(weight: Tensor, needs_input: bool, seed: Tensor | None, config: LinearConfig) -> Quantized:
    """The weight for fprop and, when dgrad will run, for dgrad: both orientations from one read."""
    colwise = config.dgrad[1] if needs_input else ""
    return quantize(weight, config.fprop[1], colwise, seed, WEIGHT_STREAM, config.backend)


def quantize_grad(
    grad: Tensor, needs_input: bool, needs_weight: bool, needs_bias: bool, seed: Tensor | None, config: LinearConfig
) -> tuple[Quantized, Tensor | None]:
    """grad_output for the GEMMs of backward that will run, and its sums over the tokens, in its dtype, where one read
    gives both.
    """
    rowwise = config.dgrad[0] if needs_input else ""
    colwise = config.wgrad[0] if needs_weight else ""
    if needs_bias and (rowwise or colwise):
        *grad_q, total = backends.quantize_and_sum(
            grad,
            rowwise,
            colwise,
            seed,
            GRAD_STREAM,
            config.backend,
            grad.dtype,  # which is the bias's
        )
        return tuple(grad_q), total
    return quantize(grad, rowwise, colwise, seed, GRAD_STREAM, config.backend), None


def wanted_gradient(
    config: LinearConfig, needs_input: bool, needs_weight: bool, needs_bias: bool
) -> GradientSpec | None:
    """What backward quantizes grad_output to, if that is all it needs of it and each call would round it alike."""
    rowwise = config.dgrad[0] if needs_input else ""
    colwise = config.wgrad[0] if needs_weight else ""
    complete = (bool(rowwise), bool(colwise)) == (needs_input, needs_weight) and (needs_input or needs_weight)
    return GradientSpec(rowwise, colwise, needs_bias) if complete and "stochastic" not in rowwise + colwise else None


def receive(
    ctx: Any,
    grad_output: Tensor,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
    seed: Tensor | None,
    config: LinearConfig,
) -> tuple[Tensor, Quantized, Tensor | None]:
    """`(grad, grad_q, sums over the tokens or None)`: quantized here, or as the Function before handed it on.

    A `grad` that came quantized tells its dtype and is read by no GEMM.
    """
    if isinstance(grad_output, MXGradient):
        parcel, wanted = grad_output.parcel, getattr(ctx, "gradient_spec", None)
        if wanted is not None and parcel.spec.serves(wanted):
            return grad_output, parcel.quantized, parcel.column_sum
        grad_output = grad_output.high()
    grad = rows(grad_output)
    return grad, *quantize_grad(grad, needs_input, needs_weight, needs_bias, seed, config)


def kept(high: Tensor, quantized: Quantized, spec: str) -> tuple[Tensor | None, Tensor | None]:
    """What backward needs of an operand: it quantized along its rows, for the GEMM that contracts them, or itself."""
    return quantized[2:] if spec else (high, None)


def fprop(
    x: Tensor, x_q: Quantized, weight: Tensor, w_q: Quantized, bias: Tensor | None, config: LinearConfig
) -> Tensor:
    """(M, N) output."""
    if not config.fprop[0]:
        return backends.matmul(x, weight, bias, weight.dtype, config.backend)
    operands = x_q[0], x_q[1], config.fprop[0], w_q[0], w_q[1], config.fprop[1]
    return _gemm(operands, bias, weight.dtype, config.fprop_steps, config.backend)


def dgrad(grad: Tensor, grad_q: Quantized, w: Tensor, w_scale: Tensor | None, config: LinearConfig) -> Tensor:
    """(M, K) gradient of the input, from what `kept` saved of the weight."""
    if w_scale is None:
        return backends.matmul(grad, w.t(), None, grad.dtype, config.backend)
    operands = grad_q[0], grad_q[1], config.dgrad[0], w, w_scale, config.dgrad[1]
    return _gemm(operands, None, grad.dtype, config.dgrad_steps, config.backend)


def _gemm(
    operands: tuple[Any, ...], bias: Tensor | None, out_dtype: torch.dtype, steps: bool, backend: str
) -> Tensor:  # fmt: skip
    """The product, by the kernel that has epilogues or by the one that has none."""
    if steps:
        return backends.gemm_epilogue(*operands, bias, [], None, [], backends.PLAIN, out_dtype, backend)[0]
    return backends.gemm(*operands, bias, out_dtype, backend)


def wgrad(grad: Tensor, grad_q: Quantized, x: Tensor, x_scale: Tensor | None, config: LinearConfig) -> Tensor:
    """(N, K) gradient of the weight, from the input quantized along the tokens, (K, M), or the input itself."""
    if x_scale is None:
        return backends.matmul(grad.t(), x.t(), None, grad.dtype, config.backend)
    g_t, g_t_scale = grad_q[2:]
    g_spec, x_spec = config.wgrad
    return backends.gemm(g_t, g_t_scale, g_spec, x, x_scale, x_spec, None, grad.dtype, config.backend)


def shaped(x: Tensor, shape: Any) -> Tensor:
    """(M, K) x as `shape`, for a Function to return: autograd would not let a view of its be overwritten in place."""
    return x if len(shape) == 2 else torch.ops.aten._unsafe_view.default(x, shape)


def rows(x: Tensor) -> Tensor:
    """A tensor (..., K) as (M, K), M the product of its leading dims."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def bias_grad(grad: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(N,) gradient of the bias, summed over tokens in fp32 and rounded, from `total` where summed on the way."""
    if total is None:
        total = grad.sum(0, dtype=torch.float32)
    return total if total.dtype == dtype else total.to(dtype)
