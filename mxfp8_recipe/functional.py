"""The functional API: MXFP8 counterparts of `torch.nn.functional`, with autocast and checks, without modules.

Each op also takes and gives the values of `mx_tensor` that travel between fused layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .autograd import (
    ActivationFunction,
    ActivationLinearFunction,
    LinearConfig,
    MXFP8LinearFunction,
    NormConfig,
    NormFunction,
)
from .mx_tensor import Edge, MXTensor, Pending, Traveling

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mxfp8_linear(
    input: Tensor | Traveling, weight: Tensor, bias: Tensor | None = None, *, config: LinearConfig
) -> Tensor:
    """`input @ weight.T + bias`, each GEMM, forward and backward, in the precision `config` gives it.

    Args:
        input: (..., in_features), any number of leading dims, any token count, 0 included; or a value on a fused
            edge: already quantized, or an activation still to be applied.
        weight: (out_features, in_features), the user's own parameter; quantized anew in every call.
        bias: (out_features,) or None.
        config: `LinearConfig.of(LinearPrecision(...))`.

    Returns:
        (..., out_features) in the compute dtype: autocast's where autocast is on, else the input's.

    Raises:
        ValueError: shapes that do not fit. TypeError: dtypes that `F.linear` would refuse too.
    """
    dtype = compute_dtype(input)
    _check_linear(input, weight, bias, dtype)
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    seed = draw_seed(input.device) if config.stochastic else None
    if isinstance(input, MXTensor):
        if _fits(input, dtype, config, weight):
            parts = (input.qdata, input.scale, input.qdata_t, input.scale_t)
            return MXFP8LinearFunction.apply(input.carrier, *parts, weight, bias, seed, config)  # pyright: ignore
        input = input.high("a linear layer of another precision")
    if isinstance(input, Pending):
        if input.edge.fused and input.kind != "identity":
            args = (input.x, input.gate, weight, bias, seed, input.kind, config)
            return ActivationLinearFunction.apply(*args)  # pyright: ignore[reportReturnType]
        input = input.materialize()
    assert isinstance(input, Tensor)
    nothing = (None, None, None, None)
    return MXFP8LinearFunction.apply(input.to(dtype), *nothing, weight, bias, seed, config)  # pyright: ignore


def _fits(input: MXTensor, dtype: torch.dtype, config: LinearConfig, weight: Tensor) -> bool:
    """Whether a quantized input is what this layer would have quantized itself."""
    rowwise, colwise = config.input_specs
    if input.quantized_from != dtype or input.rowwise != rowwise:
        return False
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return True
    return input.colwise == colwise if config.wgrad[1] else input.has_high


def mxfp8_norm(
    input: Tensor | Traveling,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    config: NormConfig,
    dtype: torch.dtype,
    edge: Edge | None = None,
) -> Tensor | MXTensor:
    """RMS or layer norm over the last dim; on a fused edge its MXFP8 instead of a tensor.

    Args:
        input: (..., K). weight, bias: (K,) or None.
        config: what to compute and, where `edge` is fused, what to emit.
        dtype: dtype of the result, as the norm this stands for would give.
        edge: the fused edge, or None for a plain norm.

    Returns:
        (..., K) of `dtype`, or an `MXTensor` that stands for it.
    """
    if isinstance(input, Traveling):
        input = input.high("a norm")
    plain = replace(config, rowwise="", colwise="", emit_high=True)
    if edge is None or not edge.fused or not config.rowwise:
        return NormFunction.apply(input, weight, bias, None, plain, dtype, dtype)[0]  # pyright: ignore
    target = compute_dtype(input, dtype)
    if not torch.is_grad_enabled():
        config = replace(config, colwise="")
    seed = draw_seed(input.device) if config.stochastic else None
    if config.emit_high and target != dtype:
        return NormFunction.apply(input, weight, bias, None, plain, dtype, dtype)[0]  # pyright: ignore
    carrier, *parts = NormFunction.apply(input, weight, bias, seed, config, dtype, target)  # pyright: ignore
    again = partial(_norm_high, input, weight, bias, plain, dtype)
    return MXTensor(carrier, *parts, config.rowwise, config.colwise, target, config.emit_high, again, edge)


def _norm_high(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, config: NormConfig, dtype: torch.dtype
) -> Tensor:
    return NormFunction.apply(input, weight, bias, None, config, dtype, dtype)[0]  # pyright: ignore


def mxfp8_activation(
    input: Tensor | Traveling, kind: str, *, gate: Tensor | None = None, edge: Edge | None = None
) -> Tensor | Pending:
    """`act(input)` or `act(gate) * input`; on a planned edge left pending for the GEMM that consumes it.

    Args:
        input: (..., K); gate: the same shape for a gated kind.
        kind: as `fused.reference_ops` names them.
        edge: the planned edge, or None to compute at once.
    """
    if isinstance(input, Pending) and gate is None:
        pending = input.activated(kind)
        if pending is not None:
            return replace(pending, edge=edge) if edge is not None else pending.materialize()
    if isinstance(input, Traveling):
        input = input.high("an activation")
    if edge is None:
        return activation(input, gate, kind)
    return Pending(input, gate, kind, activation, edge)


def activation(x: Tensor, gate: Tensor | None, kind: str) -> Tensor:
    """The activation on its own: (..., K) in the dtype of `x`."""
    return ActivationFunction.apply(x, gate, kind, "auto")  # pyright: ignore[reportReturnType]


def compute_dtype(x: Tensor | Traveling, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype a matrix multiplication of `x` would run in here: autocast's if it is on, else that of `x`."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype or x.dtype


def draw_seed(device: torch.device) -> Tensor:
    """A seed for stochastic rounding from torch's generator of `device`: int64 scalar.

    Activation checkpointing restores that generator before it recomputes, CUDA graphs register it, and
    a checkpoint that stores its state resumes to the bit, as for dropout.
    """
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def _check_linear(input: Tensor | Traveling, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"mxfp8_linear: got input {tuple(input.shape)} and weight {tuple(weight.shape)}, expected "
            "(..., in_features) and (out_features, in_features)"
        )
    if dtype == input.dtype and weight.dtype != dtype:
        raise TypeError(
            f"mxfp8_linear: got input {input.dtype} and weight {weight.dtype}, expected one dtype; "
            "cast the input or run under torch.autocast"
        )
    if dtype not in _DTYPES:
        raise TypeError(f"mxfp8_linear: got compute dtype {dtype}, expected float32, bfloat16 or float16")
