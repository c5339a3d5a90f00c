"""Linear layers that do in their GEMM's epilogue what the next layers would do with their output."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..autograd import GatedPairFunction, LinearConfig, activation_of
from ..backends import PLAIN
from ..mx_awaited import Awaited
from ..mx_edge import Edge
from ..mx_functions import refuse_lost_gradient
from ..mx_ready import Ready
from ..mx_tensor import MXTensor, Pending, Traveling, check_unwritten, versions_of
from .common import apply, autocast_on, cast, compute_dtype
from .linear import check_linear, fits, multiply, tell
from .listening import LinearCall
from .producers import activation


@dataclass(frozen=True)
class Mode:
    """The grad mode, the autocast and the hooks on what is saved for backward of a call."""

    kind: str
    grad: bool
    autocast: bool
    dtype: torch.dtype | None
    hooks: Any = None

    @classmethod
    def now(cls, kind: str) -> Mode:
        on = autocast_on(kind)
        top = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
        hooks = None if torch.compiler.is_compiling() else top(False)
        return cls(kind, torch.is_grad_enabled(), on, torch.get_autocast_dtype(kind) if on else None, hooks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The block runs as that call would have; what it saves is none of a checkpoint's that did not see the call."""
        hooks = Mode.now(self.kind).hooks
        elsewhere = hooks is not None and hooks != self.hooks
        with torch.set_grad_enabled(self.grad), torch.autocast(self.kind, self.dtype, enabled=self.autocast):
            with saved_tensors_hooks(_as_it_is, _as_it_is) if elsewhere else nullcontext():
                yield


def _as_it_is(tensor: Any) -> Any:
    return tensor


@dataclass(eq=False)
class Call:
    """What a layer was called with, to be computed later.

    Attributes:
        given: the input itself; `input` is a copy of it, for a value that travels.
        read: the tensors it will read, and versions: of them when it was called.
        made: its output, once that was computed.
        summed: whether its GEMM added a residual.
    """

    input: Tensor | Traveling
    weight: Tensor
    bias: Tensor | None
    config: LinearConfig
    owner: Any
    edge: Edge
    mode: Mode
    given: Any
    read: tuple[Any, ...] = ()
    versions: tuple[int, ...] = ()
    made: Tensor | None = None
    summed: bool = False

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return
        sources: tuple[Any, ...] = (self.input,)
        if isinstance(self.input, Traveling):
            if self.input.settled is None:
                sources, self.input = self.input.sources(), copy.copy(self.input)  # others settle theirs, and may write
            else:
                sources = (self.input.settled,)
        self.read = (*sources, self.weight, self.bias)
        self.versions = versions_of(*self.read)

    def check(self) -> None:
        """Raise RuntimeError where what it is computed from was written to since."""
        check_unwritten(self.versions, self.edge.producer, *self.read)

    def awaits(self) -> bool:
        """Whether its GEMM may still add a residual: one, in the mode of the call."""
        if self.made is not None:
            return False
        if self.summed:
            self.edge.unfuse("a second sum")
            return False
        return self.mode == Mode.now(self.mode.kind)

    def told(self, output: Any) -> None:
        tell(LinearCall(self.owner, "", self.input, self.weight, output, self.config, output.dtype))


def mxfp8_awaited_linear(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: LinearConfig,
    edge: Edge,
    owner: Any = None,
) -> Awaited:
    """`mxfp8_linear` before a residual or beside the other half of a gated pair: nothing is computed until that comes.

    Args:
        input, weight, bias, config, owner: as for `mxfp8_linear`.
        edge: what its epilogue does.

    Returns:
        A value that stands for (..., out_features) in the compute dtype.
    """
    if isinstance(input, Traveling):
        refuse_lost_gradient(input)
    dtype = compute_dtype(input)
    check_linear(input, weight, bias, dtype, owner)
    carrier = weight.new_empty((), dtype=dtype).expand(*input.shape[:-1], weight.shape[0])  # nobody reads its element
    trained = any(t is not None and t.requires_grad for t in (input, weight, bias))
    call = Call(input, weight, bias, config, owner, edge, Mode.now(input.device.type), input)
    return Awaited(
        carrier, call, partial(_compute, call), activation, _both, trained and torch.is_grad_enabled(), edge
    )  # fmt: skip


def _compute(call: Call, residual: Tensor | None) -> Tensor:
    """Z, or the sum, in the grad mode and under the autocast that the layer was called in."""
    if residual is None and call.made is not None:
        return call.made
    call.check()
    if call.mode == Mode.now(call.mode.kind):
        return _compute_now(call, residual)
    if torch.compiler.is_compiling():  # which traces no context manager of ours
        mode = call.mode
        with torch.set_grad_enabled(mode.grad), torch.autocast(mode.kind, mode.dtype, enabled=mode.autocast):
            return _compute_now(call, residual)
    with call.mode.entered():
        return _compute_now(call, residual)


def _compute_now(call: Call, residual: Tensor | None) -> Tensor:
    shape = (*call.input.shape[:-1], call.weight.shape[0])
    if residual is not None and residual.shape != shape:
        residual = residual.reshape(shape)
    steps = "" if residual is None else PLAIN
    out = multiply(call.input, call.weight, call.bias, call.config, steps, residual)
    out = out[0] if steps else out
    call.told(out)
    if residual is None:
        call.made = out
    else:
        call.summed = True
    return out


def _both(up: Call, gate: Call, kind: str, edge: Edge) -> Pending | None:
    """`act(gate) * up` of two layers as one GEMM, where they are what the plan saw; else None."""
    if up is gate:
        return None
    config, steps = up.config, gate.edge.steps
    alike = up.given is gate.given and config == gate.config and up.edge.steps == steps and up.mode == gate.mode
    if (
        not alike
        or up.made is not None
        or gate.made is not None
        or activation_of(steps)[0] != kind
        or up.weight.shape != gate.weight.shape
    ):
        return None
    if (up.bias is None) != (gate.bias is None) or up.mode != Mode.now(up.mode.kind):
        return None
    given = _pair_inputs(up, gate)
    if given is None:
        return None
    up.check()
    dtype = compute_dtype(up.input)
    weights = [None if t is None else cast(t, dtype) for t in (up.weight, up.bias, gate.weight, gate.bias)]
    if not torch.is_grad_enabled():
        weights = [None if t is None else t.detach() for t in weights]
    gate_last = gate.edge.pair == "last"
    x, z_gate, qdata, scale = apply(GatedPairFunction, *given, *weights, config, steps, gate_last)
    up.made, gate.made = x, z_gate
    for call in (up, gate) if gate_last else (gate, up):
        call.told(call.made)
    versions = versions_of(x, z_gate)
    ready = Ready(kind, activation_of(steps)[1], dtype, qdata, scale, versions)
    return Pending(x, z_gate, kind, activation, edge, versions, ready)


def _pair_inputs(up: Call, gate: Call) -> tuple[Any, ...] | None:
    """The input twice and its quantization, as `GatedPairFunction` takes them; None for one that has to be settled."""
    input, dtype = up.input, compute_dtype(up.input)
    if isinstance(input, Traveling) and input.settled is not None:
        input = input.settled
    if isinstance(input, MXTensor) and all(fits(input, dtype, c.config, cast(c.weight, dtype)) for c in (up, gate)):
        return *_twice(input.carrier), input.qdata, input.scale, input.qdata_t, input.scale_t
    if isinstance(input, Traveling):
        return None
    twice = _twice(input) if input.dtype == dtype else (input.to(dtype), input.to(dtype))
    return *twice, None, None, None, None


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """X as two arguments of a Function, which the compiler wants to be two tensors."""
    return x, x.view_as(x) if torch.compiler.is_compiling() else x


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
    z, qdata, scale = multiply(input, weight, bias, config, edge.steps, owner=owner)
    tell(LinearCall(owner, "", input, weight, z, config, z.dtype))
    kind, rowwise = activation_of(edge.steps)
    ready = Ready(kind, rowwise, z.dtype, qdata, scale, versions_of(z))
    return Pending(z, None, "identity", activation, edge, ready=ready)
