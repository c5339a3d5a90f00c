"""The functional API: MXFP8 counterparts of `torch.nn.functional`, with autocast and checks, without modules."""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import LinearConfig, MXFP8LinearFunction


def mxfp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: LinearConfig) -> Tensor:
    """`input @ weight.T + bias`, each GEMM, forward and backward, in the precision `config` gives it.

    Args:
        input: (..., in_features), any number of leading dims, any token count, 0 included.
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
    input, weight = input.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    seed = draw_seed(input.device) if config.stochastic and torch.is_grad_enabled() else None
    return MXFP8LinearFunction.apply(input, weight, bias, seed, config)  # pyright: ignore[reportReturnType]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a matrix multiplication of `x` would run in here: autocast's if it is on, else `x.dtype`."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def draw_seed(device: torch.device) -> Tensor:
    """A seed for stochastic rounding from torch's generator of `device`: int64 scalar.

    Activation checkpointing restores that generator before it recomputes, CUDA graphs register it, and
    a checkpoint that stores its state resumes to the bit, as for dropout.
    """
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def _check_linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
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
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"mxfp8_linear: got compute dtype {dtype}, expected float32, bfloat16 or float16")
