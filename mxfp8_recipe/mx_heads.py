"""Values that travel quantized into and out of attention: heads, split on the way in and merged on the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .mx_edge import Edge
from .mx_tensor import MXTensor, Traveling


@dataclass(frozen=True, eq=False)
class Heads(Traveling):
    """Query, key or value in MXFP8, on its way from a projection to attention.

    It starts as (B, L, H * D) and may be split into (B, L, H, D) and turned to (B, H, L, D), no more.

    Attributes:
        carrier: of the shape it has now.
        parts: qdata (B, H, L, D), scale (B, H, L, D / 32), qdata_t (B, H, D, L), scale_t (B, H, D, ceil(L / 32)).
        heads: (B, H, L, D). rowwise, colwise: encoded specs of the parts. is_turned: to (B, H, L, D).
        recompute: gives the projection's output again, (B, L, H * D), differentiably.
    """

    carrier: Tensor
    parts: tuple[Tensor, ...]
    heads: tuple[int, ...]
    rowwise: str
    colwise: str
    recompute: Callable[[], Tensor]
    edge: Edge
    is_turned: bool = False

    @property
    def nominal(self) -> Tensor:
        return self.carrier

    def materialize(self) -> Tensor:
        batch, heads, length, dim = self.heads
        high = self.recompute()
        if self.carrier.dim() == 3:
            return high
        high = high.view(batch, length, heads, dim)
        return high.transpose(1, 2) if self.is_turned else high

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Heads | None:
        if kwargs:
            return None
        if _keeps_shape(self.carrier, name, args):
            return self
        batch, heads, length, dim = self.heads
        split = (batch, length, heads, dim)
        if self.carrier.dim() == 3 and name in ("view", "reshape", "unflatten"):
            carrier = getattr(self.carrier, name)(*args)
            return replace(self, carrier=carrier) if tuple(carrier.shape) == split else None
        if self.carrier.dim() == 4 and not self.is_turned and _swaps_heads(name, args):
            return replace(self, carrier=self.carrier.transpose(1, 2), is_turned=True)
        return self if name == "contiguous" else None


@dataclass(frozen=True, eq=False)
class AttentionOutput(Traveling):
    """Attention's output, quantized for the projection that multiplies it once its heads are merged.

    It starts as (B, H, L, E), may be turned to (B, L, H, E) and then merged into an `MXTensor` (B, L, H * E).
    """

    carrier: Tensor
    merged: MXTensor
    heads: tuple[int, ...]
    recompute: Callable[[], Tensor]
    edge: Edge
    was_turned: bool = False

    @property
    def nominal(self) -> Tensor:
        return self.carrier

    def materialize(self) -> Tensor:
        high = self.recompute()
        return high.transpose(1, 2) if self.was_turned else high

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs:
            return None
        batch, heads, length, dim = self.heads
        if name == "contiguous" or _keeps_shape(self.carrier, name, args):
            return self
        if not self.was_turned:
            turns = _swaps_heads(name, args)
            return replace(self, carrier=self.carrier.transpose(1, 2), was_turned=True) if turns else None
        if name not in ("view", "reshape", "flatten"):
            return None
        carrier = getattr(self.carrier, "reshape" if name == "view" else name)(*args)
        fits = carrier.shape[-1] == heads * dim and carrier.numel() == batch * length * heads * dim
        return self.merged.reshaped(carrier) if fits else None


def _keeps_shape(carrier: Tensor, name: str, args: Any) -> bool:
    """Whether a call asks for the shape that is there."""
    return name in ("view", "reshape") and carrier.reshape(*args).shape == carrier.shape


def _swaps_heads(name: str, args: Any) -> bool:
    """Whether a call swaps dims 1 and 2 of a 4-D tensor."""
    if name == "transpose":
        return {arg % 4 for arg in args} == {1, 2}
    order = tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else tuple(args)
    return name == "permute" and order == (0, 2, 1, 3)
