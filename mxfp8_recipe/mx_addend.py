"""A linear's output that is still to be computed, because a residual is added to it first.

`x + down(h)`: down hands on what it would compute, and the sum runs its GEMM with the residual in the epilogue. z is
rounded before x is added, as two kernels would. Whoever reads the value otherwise gets z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .mx_tensor import RESHAPES, Edge, Traveling


@dataclass(frozen=True, eq=False)
class Addend(Traveling):
    """`input @ weight.T + bias`, still to be computed.

    Attributes:
        carrier: of its shape and dtype, without storage.
        compute: z, or with a residual (..., N) the sum; differentiable.
        needs_grad: whether z has a gradient.
    """

    carrier: Tensor
    compute: Callable[[Tensor | None], Tensor]
    needs_grad: bool
    edge: Edge

    @property
    def nominal(self) -> Tensor:
        return self.carrier

    @property
    def requires_grad(self) -> bool:
        return self.needs_grad

    def materialize(self) -> Tensor:
        return self.compute(None).reshape(self.carrier.shape)

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        return RESHAPES[name](self, *args, **kwargs) if name in RESHAPES else None

    def reshaped(self, carrier: Tensor) -> Addend:
        return replace(self, carrier=carrier)

    def plus(self, other: Any) -> Tensor | None:
        """The sum with `other`; in two steps where it is not what the epilogue adds."""
        if isinstance(other, Addend) and other.settled is None:
            other = other.materialize()
        elif isinstance(other, Traveling):
            other = other.high("add") if other.settled is None else other.settled
        if not isinstance(other, Tensor):
            return None
        if other.shape != self.shape or other.dtype != self.dtype:
            return self.materialize() + other
        return self.compute(other).reshape(self.shape)
