"""Linear layers: alone, after a norm or an activation, and before attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autograd import (
    ActivationLinearFunction,
    EpilogueLinearFunction,
    HeadsSpec,
    LinearConfig,
    MXFP8LinearFunction,
    ProjectionFunction,
    gradient_spec,
)
from ..mx_edge import Edge
from ..mx_functions import refuse_lost_gradient
from ..mx_heads import Heads
from ..mx_tensor import MXTensor, Pending, Traveling, computed_from
from .common import DTYPES, apply, autocast_on, cast, compute_dtype, draw_seed, layer_name
from .listening import LinearCall, listener


def mxfp8_linear(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: LinearConfig,
    owner: Any = None,
    part: str = "",
) -> Tensor:
    """`input @ weight.T + bias`, each GEMM, forward and backward, in the precision `config` gives it.

    Args:
        input: (..., in_features), any number of leading dims, any token count, 0 included; or a value on a fused
            edge: already quantized, or an activation still to be applied.
        weight: (out_features, in_features), the user's own parameter; quantized anew in every call.
        bias: (out_features,) or None.
        config: `LinearConfig.of(LinearPrecision(...))`.
        owner, part: the module that computes it and which of its linears this is, for a monitor; None for nobody.

    Returns:
        (..., out_features) in the compute dtype: autocast's where autocast is on, else the input's.

    Raises:
        ValueError: shapes that do not fit. TypeError: dtypes that `F.linear` would refuse too.
    """
    output = multiply(input, weight, bias, config, owner=owner, part=part)
    if listener() is not None:
        tell(LinearCall(owner, part, input, weight, output, config, output.dtype))
    return output


def tell(call: LinearCall) -> None:
    """Let a monitor hear of a call of somebody."""
    heard = listener()
    if heard is not None and call.owner is not None:
        heard.linear(call)


def multiply(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    config: LinearConfig,
    steps: str = "",
    residual: Tensor | None = None,
    *,
    owner: Any = None,
    part: str = "",
) -> Any:
    """The linear itself; with steps in its epilogue what `EpilogueLinearFunction` returns."""
    dtype = compute_dtype(input)
    check_linear(input, weight, bias, dtype, owner, part)
    weight = cast(weight, dtype)
    if not torch.is_grad_enabled():
        weight = weight.detach()  # a Function sees requires_grad alone, and would quantize the input for wgrad
    bias = None if bias is None else cast(bias, dtype)
    seed = draw_seed(input.device) if config.stochastic else None
    if isinstance(input, Traveling) and input.settled is not None:
        input = input.settled
    if isinstance(input, Traveling):
        refuse_lost_gradient(input)
    if isinstance(input, MXTensor):
        if fits(input, dtype, config, weight):
            parts = (input.qdata, input.scale, input.qdata_t, input.scale_t)
            return _apply_linear(input.carrier, *parts, weight, bias, seed, config, steps, residual)
        input = input.high("a linear layer of another precision")
    if isinstance(input, Pending):
        if input.edge.fused and input.kind != "identity":
            input.check()
            gradient = gradient_spec(input.x, input.gate)
            return apply(
                ActivationLinearFunction, input.x, input.gate, weight, bias, seed, input.kind, config, gradient,
                *input.quantized(config.fprop[0], dtype), residual, steps,
            )  # fmt: skip
        input = input.materialize()
    if isinstance(input, Traveling):
        input = input.high("a linear layer")
    nothing = (None, None, None, None)
    return _apply_linear(cast(input, dtype), *nothing, weight, bias, seed, config, steps, residual)


def _apply_linear(*args: Any) -> Any:
    *linear, steps, residual = args
    if steps:
        return apply(EpilogueLinearFunction, *linear, residual, steps)
    return apply(MXFP8LinearFunction, *linear)


def fits(input: MXTensor, dtype: torch.dtype, config: LinearConfig, weight: Tensor) -> bool:
    """Whether a quantized input is what this layer would have quantized itself."""
    rowwise, colwise = config.input_specs
    if input.quantized_from != dtype or input.rowwise != rowwise:
        return False
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return True
    return colwise in ("", input.colwise) if config.wgrad[1] else input.has_high


def check_linear(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    owner: Any = None,
    part: str = "",
) -> None:
    """Raise what `F.linear` would raise for these, and TypeError for a compute dtype that no kernel has."""
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{layer_name(owner, part, 'mxfp8_linear')}: got input {tuple(input.shape)} and weight "
            f"{tuple(weight.shape)}, expected (..., in_features) and (out_features, in_features)"
        )
    if weight.dtype != input.dtype and not autocast_on(input.device.type):
        raise TypeError(
            f"{layer_name(owner, part, 'mxfp8_linear')}: got input {input.dtype} and weight {weight.dtype}, "
            "expected one dtype; cast the input or run under torch.autocast"
        )
    if dtype not in DTYPES:
        raise TypeError(
            f"{layer_name(owner, part, 'mxfp8_linear')}: got compute dtype {dtype}, expected float32, bfloat16 or "
            "float16; convert the model to one of them, or revert(model) before it is converted"
        )


def mxfp8_projection(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: LinearConfig,
    parts: tuple[HeadsSpec, ...],
    edge: Edge,
    owner: Any = None,
    part: str = "",
) -> tuple[Heads, ...] | None:
    """`mxfp8_linear` whose output goes into attention: each part of it in MXFP8, split into heads.

    Args:
        input, weight, bias, config: as for `mxfp8_linear`, the input (B, L, in_features).
        parts: the parts of out_features, in order, such as query, key and value.
        owner, part: as for `mxfp8_linear`.

    Returns:
        One `Heads` (B, L, H * D) for each part, or None where the output has to exist in high precision.
    """
    dtype = compute_dtype(input)
    if not edge.fused or input.dim() != 3 or config.stochastic:
        return None
    check_linear(input, weight, bias, dtype, owner, part)
    given_weight = weight
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    given: tuple[Tensor | None, ...] = (None, None, None, None)
    if not torch.is_grad_enabled():
        weight = weight.detach()
    if isinstance(input, Traveling) and input.settled is not None:
        input = input.settled
    if isinstance(input, MXTensor) and fits(input, dtype, config, weight):
        carrier, given = input.carrier, (input.qdata, input.scale, input.qdata_t, input.scale_t)
    elif isinstance(input, Traveling):
        return None
    else:
        carrier = input.to(dtype)
    outputs = apply(ProjectionFunction, carrier, *given, weight, bias, None, config, parts)
    heads, start, heard = [], 0, listener()
    for i, spec in enumerate(parts):
        rows = slice(start, start := start + spec.features)
        again = partial(mxfp8_linear, input, weight[rows], None if bias is None else bias[rows], config=config)
        again = computed_from(again, edge.producer, input)
        one, shape = outputs[5 * i : 5 * i + 5], (*input.shape[:2], spec.features)
        size = (shape[0], spec.features // spec.head_dim, shape[1], spec.head_dim)
        heads.append(Heads(one[0], tuple(one[1:]), size, spec.rowwise, spec.colwise, again, edge))
        if heard is not None and owner is not None:
            heard.linear(LinearCall(owner, part, input, given_weight[rows], one[0], config, dtype, repeated=i > 0))
    return tuple(heads)
