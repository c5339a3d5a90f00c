"""`y = norm(x) * weight + bias`, handed on in high precision, in MXFP8, or both.

    rms     y = x * rstd * weight,                   rstd = (mean_K(x^2) + eps)^-1/2
    layer   y = (x - mean) * rstd * weight + bias,   rstd = (mean_K((x - mean)^2) + eps)^-1/2

Saved for backward: x, its statistics (4 or 8 bytes a token) and the weight. The quantized output is saved by
whoever multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..fused.replay import Replayed
from .linear import INPUT_STREAM, refuse_second_order, rows, shaped


@dataclass(frozen=True)
class NormConfig:
    """What a norm computes and emits.

    Attributes:
        kind: `rms` or `layer`. eps: as the module's own.
        rowwise, colwise: encoded specs to emit, `""` for none.
        emit_high: emit y itself too.
        backend: as in `LinearConfig`.
    """

    kind: str
    eps: float
    rowwise: str = ""
    colwise: str = ""
    emit_high: bool = True
    backend: str = "auto"

    @property
    def stochastic(self) -> bool:
        return "stochastic" in self.rowwise + self.colwise


class NormFunction(torch.autograd.Function):
    """`apply(x, weight, bias, seed, config, dtype, quantized_dtype)`.

    Args:
        x: (..., K). weight, bias: (K,) or None.
        dtype: nominal dtype of y, and its dtype when emitted without quantization.
        quantized_dtype: dtype y is rounded to before it is quantized.

    Returns:
        `(y, qdata, scale, qdata_t, scale_t)`: y (..., K), or a carrier without storage unless `emit_high`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        config: NormConfig,
        dtype: torch.dtype,
        quantized_dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        quantizes = bool(config.rowwise or config.colwise)
        constants = (config, quantized_dtype if quantizes else dtype)
        outputs: Any = _forward((rows(x), weight, bias, seed), constants)
        y, *quantized, mean, rstd = outputs
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.config, ctx.bias_dtype = config, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*quantized)
        ctx.set_materialize_grads(False)
        output = shaped(y, x.shape) if config.emit_high else carrier(x, dtype)
        return output, *quantized

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        if grad_y is None:
            return (None,) * 7
        x, weight, mean, rstd = ctx.saved_tensors
        has_bias = ctx.bias_dtype is not None
        found: Any = _backward((rows(grad_y), rows(x), weight, mean, rstd), (has_bias, ctx.config))
        dx, dweight, dbias = found
        grad_weight = dweight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = dbias.to(ctx.bias_dtype) if has_bias and ctx.needs_input_grad[2] else None
        return shaped(dx, x.shape), grad_weight, grad_bias, None, None, None, None


@Replayed
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None, config: NormConfig, dtype: torch.dtype
) -> tuple[Any, ...]:
    """`(y, qdata, scale, qdata_t, scale_t, mean, rstd)` of (M, K)."""
    return backends.norm_quantize(
        x, weight, bias, config.eps, config.kind, dtype, config.rowwise, config.colwise, config.emit_high, seed,
        INPUT_STREAM, config.backend,
    )  # fmt: skip


@Replayed
def _backward(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, has_bias: bool, config: NormConfig
) -> tuple[Any, ...]:
    """Gradients of x (M, K), weight and bias (K,) fp32, empty where there is none."""
    return backends.norm_backward(grad_y, x, weight, mean, rstd, config.kind, has_bias, config.backend)


def carrier(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of a shape, by default that of `x`, on its device, without storage: one NaN, expanded."""
    return x.new_full((), float("nan"), dtype=dtype).expand(x.shape if shape is None else shape)
