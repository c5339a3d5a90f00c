"""Linear layers that do in their GEMM's epilogue what the next layers would do with their output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autograd import LinearConfig, activation_of
from ..backends import PLAIN
from ..mx_addend import Addend
from ..mx_ready import Ready
from ..mx_tensor import Edge, Pending, Traveling, check_unwritten, versions_of
from .common import autocast_on, compute_dtype
from .linear import check_linear, multiply, tell
from .listening import LinearCall
from .producers import activation


def mxfp8_addend(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: LinearConfig,
    edge: Edge,
    owner: Any = None,
) -> Addend:
    """`mxfp8_linear` before a residual is added to it: nothing is computed until that happens, or somebody reads it.

    Args:
        input, weight, bias, config, owner: as for `mxfp8_linear`.
        edge: names the producer.

    Returns:
        A value that stands for (..., out_features) in the compute dtype.
    """
    run = partial(_added, input, weight, bias, config, owner, Mode.now(input.device.type))
    dtype = compute_dtype(input)
    check_linear(input, weight, bias, dtype)
    shape = (*input.shape[:-1], weight.shape[0])
    carrier = weight.detach().new_empty((), dtype=dtype).expand(shape)
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (input, weight, bias)
    )  # fmt: skip
    written = input if isinstance(input, Tensor) else None
    return Addend(carrier, _unless_written(run, edge.producer, written), needs_grad, edge)


def _unless_written(run: Any, producer: str, input: Tensor | None) -> Any:
    """`run`, refusing once the input was written to since."""
    versions = versions_of(input)

    def compute(residual: Tensor | None) -> Tensor:
        check_unwritten(versions, producer, input)
        return run(residual)

    return compute


def _added(
    input: Tensor | Traveling, weight: Tensor, bias: Tensor | None, config: LinearConfig, owner: Any, mode: Mode,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Z, or the sum, in the grad mode and under the autocast that the layer was called in."""
    if not torch.compiler.is_compiling() and mode != Mode.now(mode.kind):
        with torch.set_grad_enabled(mode.grad), torch.autocast(mode.kind, mode.dtype, enabled=mode.autocast):
            return _added(input, weight, bias, config, owner, mode, residual)
    shape = (*input.shape[:-1], weight.shape[0])
    if residual is not None and residual.shape != shape:
        residual = residual.reshape(shape)
    steps = "" if residual is None else PLAIN
    out = multiply(input, weight, bias, config, steps, residual)
    out = out[0] if steps else out
    tell(LinearCall(owner, "", input, weight, out, config, out.dtype))
    return out


@dataclass(frozen=True)
class Mode:
    """The grad mode and the autocast of a call."""

    kind: str
    grad: bool
    autocast: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> Mode:
        on = autocast_on(kind)
        return cls(kind, torch.is_grad_enabled(), on, torch.get_autocast_dtype(kind) if on else None)


def mxfp8_activated_linear(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: LinearConfig,
    edge: Edge,
    owner: Any = None,
) -> Pending:
    """`mxfp8_linear` before an activation: its output z, and beside it MXFP8 of `act(z)` for the next linear.

    Args:
        input, weight, bias, config, owner: as for `mxfp8_linear`.
        edge: what its epilogue does.

    Returns:
        (..., out_features) in the compute dtype: z itself for whoever reads it, and for the activation that the edge
        names a value that is quantized already.
    """
    z, qdata, scale = multiply(input, weight, bias, config, edge.steps)
    tell(LinearCall(owner, "", input, weight, z, config, z.dtype))
    kind, rowwise = activation_of(edge.steps)
    ready = Ready(kind, rowwise, z.dtype, qdata, scale, versions_of(z))
    return Pending(z, None, "identity", activation, edge, ready=ready)
