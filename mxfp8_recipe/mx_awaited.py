"""A linear's output that is not computed yet, because its GEMM waits for what the epilogue takes from elsewhere.

    x + down(h)                the residual: the sum runs down's GEMM and adds x to the rounded z
    act(gate(h)) * up(h)       the other weight: the product runs both GEMMs as one and gives what down multiplies

Whoever reads such a value otherwise gets z, or act(z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .mx_edge import Edge
from .mx_reshapes import RESHAPES
from .mx_tensor import GATED, Pending, Traveling, activation_kind


@dataclass(frozen=True, eq=False)
class Awaited(Traveling):
    """`input @ weight.T + bias`, and perhaps an activation of it, still to be computed.

    Attributes:
        carrier: of its shape and dtype, without storage.
        call: what the layer was called with, for `both`.
        compute: z, or with a residual (..., N) the sum; differentiable.
        activate: `(x, gate, kind) -> Tensor`, an activation on its own.
        both: `(call of up, call of gate, kind, edge) -> Pending`, or None where the two cannot run as one.
        needs_grad: whether z has a gradient.
        kind: the activation; `identity` for none.
        then: the edge of the module that applied it, or None.
    """

    carrier: Tensor
    call: Any
    compute: Callable[[Tensor | None], Tensor]
    activate: Callable[[Tensor, Tensor | None, str], Tensor]
    both: Callable[[Any, Any, str, Edge], Pending | None]
    needs_grad: bool
    edge: Edge
    kind: str = "identity"
    then: Edge | None = None

    @property
    def nominal(self) -> Tensor:
        return self.carrier

    @property
    def requires_grad(self) -> bool:
        return self.needs_grad

    def materialize(self) -> Tensor:
        z = self.compute(None).reshape(self.carrier.shape)
        return z if self.kind == "identity" else self.activate(z, None, self.kind)

    def plain(self) -> Tensor | None:
        if self.settled is not None or self.kind != "identity" or self.edge.residual:
            return self.settled
        return self.materialize()

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in RESHAPES:
            return RESHAPES[name](self, *args, **kwargs)
        kind = activation_kind(name, args, kwargs)
        of_module = self.edge.then is not None  # and a function of the same name rounds by itself
        return None if not kind or of_module else self.activated(kind)

    def reshaped(self, carrier: Tensor) -> Awaited | None:
        return replace(self, carrier=carrier) if self.edge.residual else None

    def activated(self, kind: str, then: Edge | None = None) -> Awaited | None:
        """This value with an activation applied to it, by a module with edge `then`, if a product may follow."""
        if self.kind != "identity" or kind not in GATED or self.edge.residual:
            return None
        return replace(self, kind=kind, then=then)

    def plus(self, other: Any) -> Tensor | None:
        """The sum with `other`; in two steps where it is not what the epilogue adds."""
        if not self.edge.residual:
            return None
        if isinstance(other, Awaited) and other.settled is None:
            other = other.materialize()
        elif isinstance(other, Traveling):
            other = other.high("add") if other.settled is None else other.settled
        if not isinstance(other, Tensor):
            return None
        alike = type(other) in (Tensor, Parameter) and other.shape == self.shape and other.dtype == self.dtype
        if not alike or not self.call.awaits():
            return self.materialize() + other
        return self.compute(other).reshape(self.shape)

    def times(self, other: Any) -> Pending | None:
        """The product of this activation and `other`: both GEMMs as one, or each on its own."""
        if self.kind == "identity":
            return None
        edge = self.then or self.edge
        if isinstance(other, Awaited) and other.settled is None and other.kind == "identity":
            found = self.both(other.call, self.call, GATED[self.kind], edge)
            if found is not None:
                return found
            other.call.edge.part()
            other = other.materialize()
        self.call.edge.part()
        gate = Pending(self.compute(None), None, "identity", self.activate, edge).activated(self.kind)
        return None if gate is None else gate.gating(other)
