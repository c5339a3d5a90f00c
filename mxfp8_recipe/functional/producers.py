"""Norms and activations: on their own, or handing on what the next layer multiplies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autograd import ActivationFunction, NormConfig, NormFunction
from ..mx_awaited import Awaited
from ..mx_edge import Edge
from ..mx_functions import refuse_lost_gradient
from ..mx_tensor import MXTensor, Pending, Traveling, versions_of
from .common import apply, compute_dtype, draw_seed


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
    if edge is None or not edge.fused or not config.rowwise:
        return _norm_high(input, weight, bias, config, dtype)
    target = compute_dtype(input, dtype)
    if not torch.is_grad_enabled():
        config = replace(config, colwise="")
    seed = draw_seed(input.device) if config.stochastic else None
    if config.emit_high and target != dtype:
        return _norm_high(input, weight, bias, config, dtype)
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    parts = apply(NormFunction, input, weight, bias, seed, config, dtype, target)
    version = None if torch.compiler.is_compiling() or input.is_inference() else input._version
    again = partial(_norm_again, input, version, weight, bias, config, dtype)
    return MXTensor(*parts, config.rowwise, config.colwise, target, config.emit_high, again, edge)


def _norm_again(
    input: Tensor, version: int | None, weight: Tensor | None, bias: Tensor | None, config: NormConfig, dtype: Any
) -> Tensor:
    """The norm's output once more, for a reader nobody planned for; never from an input that has changed since."""
    if version is not None and input._version != version:
        raise RuntimeError(
            "a norm's quantized output was read by somebody not planned for, after the norm's input was overwritten in "
            "place; apply the recipe with example_inputs that take this path, or write out of place"
        )
    return _norm_high(input, weight, bias, config, dtype)


def _norm_high(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, config: NormConfig, dtype: torch.dtype
) -> Tensor:
    plain = replace(config, rowwise="", colwise="", emit_high=True)
    return apply(NormFunction, input, weight, bias, None, plain, dtype, dtype)[0]


def mxfp8_activation(
    input: Tensor | Traveling, kind: str, *, gate: Tensor | None = None, edge: Edge | None = None
) -> Tensor | Traveling:
    """`act(input)` or `act(gate) * input`; on a planned edge left pending for the GEMM that consumes it.

    Args:
        input: (..., K); gate: the same shape for a gated kind.
        kind: as `fused.reference_ops` names them.
        edge: the planned edge, or None to compute at once.
    """
    if isinstance(input, Traveling) and input.settled is None:
        refuse_lost_gradient(input)
    if isinstance(input, Pending) and gate is None:
        pending = input.activated(kind)
        if pending is not None:
            return replace(pending, edge=edge) if edge is not None else pending.materialize()
    if isinstance(input, Awaited) and gate is None and edge is not None and input.settled is None:
        awaited = input.activated(kind, edge)
        if awaited is not None:
            return awaited
    if isinstance(input, Traveling):
        input = input.high("an activation")
    if edge is None:
        return activation(input, gate, kind)
    return Pending(input, gate, kind, activation, edge, versions_of(input, gate))


def pending(output: Tensor, edge: Edge | None) -> Tensor | Pending:
    """A linear's output as the value an activation function in the caller's code goes on with; itself off an edge."""
    return output if edge is None else Pending(output, None, "identity", activation, edge)


def activation(x: Tensor, gate: Tensor | None, kind: str) -> Tensor:
    """The activation on its own: (..., K) in the dtype of `x`."""
    return apply(ActivationFunction, x, gate, kind, "auto")
