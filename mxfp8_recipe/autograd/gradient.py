"""Gradients that travel quantized, from one Function's backward to the one before it.

The backward of a fused activation or norm emits the gradient of its input in MXFP8, as the linear that made that input
multiplies it, and does not write it in high precision. What it hands autograd is an `MXGradient`: shape, dtype and
device of the gradient, its qdata and scales, and no storage. Whoever else reads one, such as a hook, a second
consumer's gradient that is added to it, or anomaly detection, gets the high-precision gradient, computed from what the
backward was given. Never garbage, never dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}


@dataclass(frozen=True)
class GradientSpec:
    """How a linear's backward quantizes the gradient of its output.

    Attributes:
        rowwise, colwise: encoded specs, for dgrad and for wgrad; `""` for a GEMM that will not run.
        bias: it also needs the sums over the tokens.
    """

    rowwise: str
    colwise: str
    bias: bool

    def serves(self, other: GradientSpec) -> bool:
        """Whether what is emitted for this one is what `other` needs."""
        return (self.rowwise, self.colwise) == (other.rowwise, other.colwise) and self.bias >= other.bias


@dataclass(frozen=True, eq=False)
class Parcel:
    """What an `MXGradient` stands for.

    Attributes:
        quantized: `(qdata, scale, qdata_t, scale_t)` of the (M, N) gradient.
        column_sum: (N,) fp32 sums over the tokens, or None.
        spec: what it was emitted for.
        recompute: the (M, N) high-precision gradient.
    """

    quantized: tuple[Tensor, Tensor, Tensor, Tensor]
    column_sum: Tensor | None
    spec: GradientSpec
    recompute: Callable[[], Tensor]


class MXGradient(Tensor):
    """A gradient whose elements exist in MXFP8 alone until somebody asks for more."""

    parcel: Parcel

    @staticmethod
    def __new__(cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device, parcel: Parcel) -> MXGradient:
        gradient = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        gradient.parcel = parcel
        return gradient

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, MXGradient):
            viewed = func(first.to_meta(), *args[1:], **(kwargs or {}))
            if viewed.shape[-1:] == first.shape[-1:]:
                return MXGradient(viewed.shape, first.dtype, first.device, first.parcel)
        args, kwargs = tree_map_only(MXGradient, MXGradient.high, (args, kwargs or {}))
        return func(*args, **kwargs)

    def to_meta(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A tensor of its shape on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def high(self) -> Tensor:
        """The high-precision gradient."""
        return self.parcel.recompute().view(self.shape)

    def __repr__(self, *unused: Any, **also_unused: Any) -> str:
        return f"MXGradient({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def gradient_spec(*inputs: Tensor | None) -> GradientSpec | None:
    """What the linears that made `inputs` need of their gradients; None unless all are such and need the same.

    Also None where somebody asked to see the gradient of an input itself, and while compiling, which traces tensors.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    specs = []
    for x in inputs:
        if x is None:
            continue
        wanted = getattr(getattr(x, "grad_fn", None), "gradient_spec", None)
        if wanted is None or x.retains_grad or x._backward_hooks:
            return None
        specs.append(wanted)
    merged = replace(specs[0], bias=any(spec.bias for spec in specs)) if specs else None
    return merged if merged is not None and all(merged.serves(spec) for spec in specs) else None
