"""Values that travel quantized, or not yet computed, between swapped modules.

A planned producer does not hand its consumer a BF16 tensor. A norm returns an `MXTensor`: qdata and scales,
and a *carrier* of the nominal shape and dtype without storage (an expanded NaN scalar) through which autograd
sums the consumers' gradients. An activation returns a `Pending`: its input and the activation still to be
applied, which the consuming GEMM's kernel applies while it quantizes.

Whoever reads such a value without having been planned for gets the high-precision tensor, recomputed from what
the producer saved; the edge says so once and is un-fused from then on. Never garbage, never dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from .mx_edge import Edge
from .mx_functions import enclosing_function, refuse_lost_gradient
from .mx_ready import Ready
from .mx_reshapes import RESHAPES

_METADATA = {
    "is_leaf", "is_sparse", "is_sparse_csr", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_quantized", "is_mkldnn",
    "is_complex", "is_signed", "itemsize", "nbytes", "element_size", "get_device", "ndimension", "nelement", "grad_fn",
}  # fmt: skip
"""What may be asked of a value without reading it, besides what `Traveling` defines."""

_IN_PLACE = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
} | {"__setitem__"}  # fmt: skip
"""Methods that write to their tensor."""


class Traveling:
    """What both values share: they pass for the tensor they stand for until somebody needs its elements.

    Attributes:
        settled: the tensor itself once a reader nobody planned for got it. It may have written to it, so whoever
            reads this value afterwards reads that tensor.
        settled_versions: how often that had been written to by then.
        made_in: the autograd Function in whose forward it was made without a gradient, or "".
    """

    edge: Edge
    settled: ClassVar[Tensor | None] = None
    settled_versions: ClassVar[tuple[int, ...]] = ()
    made_in: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        name = enclosing_function()
        if name:
            object.__setattr__(self, "made_in", name)

    @property
    def nominal(self) -> Tensor:
        """A tensor of the shape, dtype and device this value stands for; its elements may be NaN."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """The high-precision tensor, with its gradient, for a reader that was planned for."""
        raise NotImplementedError

    def high(self, reader: str) -> Tensor:
        """`materialize`, for a reader nobody planned for."""
        refuse_lost_gradient(self)
        self.edge.unfuse(reader)
        if self.settled is None:
            nominal = self.nominal  # the next reader may be in grad mode though this one is not
            with torch.inference_mode(nominal.is_inference()), torch.set_grad_enabled(self.requires_grad):
                settled = self.materialize()
            object.__setattr__(self, "settled", settled)
            object.__setattr__(self, "settled_versions", versions_of(settled))
        assert self.settled is not None
        return self.settled

    def sources(self) -> tuple[Any, ...]:
        """The tensors whose elements a layer that multiplies this value reads."""
        return ()

    def plain(self) -> Tensor | None:
        """The tensor itself for a product that it was planned for, where no other comes into question; else None."""
        return self.settled

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """This value after the torch function `name`, if it can travel on; else None."""
        return None

    def plus(self, other: Any) -> Tensor | None:
        """The sum with `other`, if this value knows how to add; else None."""
        return None

    def times(self, other: Any) -> Pending | None:
        """The product with `other`, if that can stay pending; else None."""
        return None

    @property
    def shape(self) -> torch.Size:
        return self.nominal.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.nominal.dtype

    @property
    def device(self) -> torch.device:
        return self.nominal.device

    @property
    def ndim(self) -> int:
        return self.nominal.ndim

    @property
    def requires_grad(self) -> bool:
        return self.nominal.requires_grad

    is_cuda = property(lambda self: self.nominal.is_cuda)
    is_nested = False
    layout = torch.strided

    def size(self, *args: Any) -> Any:
        return self.nominal.size(*args)

    def dim(self) -> int:
        return self.nominal.dim()

    def numel(self) -> int:
        return self.nominal.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.nominal.shape[0]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def stride(self, *args: Any) -> Any:
        return torch.empty(self.shape, device="meta").stride(*args)

    def __getattr__(self, name: str) -> Any:
        if name in _METADATA:
            return getattr(self.nominal, name)
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        reader = f"Tensor.{name}"
        return getattr(Traveling.high(self, reader) if name in _IN_PLACE else self.high(reader), name)

    def __iter__(self) -> Iterator[Any]:
        rows = range(len(self))  # raises for a scalar, as torch does
        return self._rows() if rows else iter(())

    def _rows(self) -> Iterator[Any]:
        yield FirstRow(self, self.edge)
        yield from self.high("__iter__").unbind(0)[1:]

    def __bool__(self) -> NoReturn:
        raise RuntimeError("the truth value of a tensor with more than one element is ambiguous")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        planned = _continue(func, args, kwargs)
        if planned is not None:
            return planned
        name = getattr(func, "__name__", str(func))
        if args and isinstance(args[0], Traveling) and (name in _IN_PLACE or kwargs.get("inplace")):
            Traveling.high(args[0], name)
        return func(*_resolve(args, name), **_resolve(kwargs, name))


@dataclass(frozen=True, eq=False)
class FirstRow(Traveling):
    """`value[0]`, as iterating over a value gives it first.

    Code that accepts a value or pairs of a name and a value iterates to tell them apart (transformers' output classes),
    and looks no further: that reads nothing.
    """

    whole: Traveling
    edge: Edge

    @property
    def nominal(self) -> Tensor:
        return self.whole.nominal[0]

    def materialize(self) -> Tensor:
        return Traveling.high(self.whole, "__iter__")[0]

    def high(self, reader: str) -> Tensor:
        return self.whole.high("__iter__")[0]


def versions_of(*tensors: Any) -> tuple[int, ...]:
    """How often each tensor was written to; nothing for one of inference mode, which does not count that."""
    if torch.compiler.is_compiling():
        return ()
    return tuple(t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference())


def check_unwritten(versions: tuple[int, ...], producer: str, *tensors: Any) -> None:
    """Raise RuntimeError where a value not yet computed lost what it is computed from since `versions`."""
    if versions and not torch.compiler.is_compiling() and versions_of(*tensors) != versions:
        raise RuntimeError(
            f"{producer or '(root)'}: what its output is computed from was overwritten in place before the output was "
            f"read; write out of place, or override {producer!r} with 'bf16'"
        )


def computed_from(again: Callable[[], Any], producer: str, *tensors: Any) -> Callable[[], Any]:
    """`again`, refusing once any of `tensors` was written to."""
    versions = versions_of(*tensors)

    def compute() -> Any:
        check_unwritten(versions, producer, *tensors)
        return again()

    return compute


def _resolve(values: Any, reader: str) -> Any:
    """`values` with every traveling value in it replaced by its high-precision tensor."""
    if isinstance(values, Traveling):
        return values.high(reader)
    if isinstance(values, tuple | list):
        return type(values)(_resolve(value, reader) for value in values)
    if isinstance(values, dict):
        return {key: _resolve(value, reader) for key, value in values.items()}
    return values


@dataclass(frozen=True, eq=False)
class MXTensor(Traveling):
    """A quantized activation.

    Attributes:
        carrier: the nominal shape and dtype; without storage, or the high-precision value itself where a planned
            consumer needs that too (`has_high`).
        qdata, scale: (M, K) and (M, K / 32) uint8, M the product of the leading dims: for a contraction over K.
        qdata_t, scale_t: (K, M) and (K, ceil(M / 32)) uint8: for a contraction over tokens. Empty if not emitted.
            A backend may lay scales out otherwise and pad tokens, as its GEMM reads them (`backends.table.LAYOUTS`).
        rowwise, colwise: encoded specs of the two, `""` for one that was not emitted.
        quantized_from: dtype the value was rounded to before it was quantized.
        recompute: gives the high-precision value again, differentiably.
    """

    carrier: Tensor
    qdata: Tensor
    scale: Tensor
    qdata_t: Tensor
    scale_t: Tensor
    rowwise: str
    colwise: str
    quantized_from: torch.dtype
    has_high: bool
    recompute: Callable[[], Tensor]
    edge: Edge

    @property
    def nominal(self) -> Tensor:
        return self.carrier

    def sources(self) -> tuple[Any, ...]:
        return (self.carrier,) if self.has_high else ()

    def materialize(self) -> Tensor:
        return self.carrier if self.has_high else self.recompute().view(self.carrier.shape)

    def high(self, reader: str) -> Tensor:
        return self.carrier if self.has_high else super().high(reader)

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        return RESHAPES[name](self, *args, **kwargs) if name in RESHAPES else None

    def reshaped(self, carrier: Tensor) -> MXTensor:
        return replace(self, carrier=carrier)


GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
"""An activation to the kind of its product with another tensor."""


@dataclass(frozen=True, eq=False)
class Pending(Traveling):
    """`act(x)`, or `act(gate) * x`, still to be computed.

    Attributes:
        x: the tensor the activation applies to; for a gated kind the one its result multiplies.
        gate: the tensor a gated kind's activation applies to.
        kind: `identity` (nothing yet), an activation, or a gated activation, as `fused` names them.
        compute: `(x, gate, kind) -> Tensor`, the activation on its own, differentiable.
        versions: of x and gate when the activation was called.
        ready: what the GEMM that made x did of this already, or None.
    """

    x: Tensor
    gate: Tensor | None
    kind: str
    compute: Callable[[Tensor, Tensor | None, str], Tensor]
    edge: Edge = field()
    versions: tuple[int, ...] = ()
    ready: Ready | None = None

    @property
    def nominal(self) -> Tensor:
        return self.x

    def sources(self) -> tuple[Any, ...]:
        return self.x, self.gate

    def plain(self) -> Tensor | None:
        return self.x if self.settled is None and self.kind == "identity" else self.settled

    def materialize(self) -> Tensor:
        if self.kind == "identity":
            return self.x
        self.check()
        return self.compute(self.x, self.gate, self.kind)

    def quantized(self, rowwise: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Qdata and scale of this value, rounded to `dtype`, where they are there already; else None for both."""
        if self.ready is None or not self.ready.serves(self.kind, rowwise, dtype, versions_of(self.x, self.gate)):
            return None, None
        return self.ready.qdata, self.ready.scale

    def check(self) -> None:
        """Raise where x or gate is no longer what the activation was called on."""
        check_unwritten(self.versions, self.edge.producer, self.x, self.gate)

    def high(self, reader: str) -> Tensor:
        return self.x if self.kind == "identity" else super().high(reader)

    def after(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in RESHAPES:
            return RESHAPES[name](self, *args, **kwargs)
        if name == "chunk":
            return _chunk(self, *args, **kwargs)
        kind = activation_kind(name, args, kwargs)
        of_module = self.kind == "identity" and self.edge.then is not None  # and a function rounds by itself
        return self.activated(kind) if kind and not of_module else None

    def reshaped(self, x: Tensor) -> Pending | None:
        self.check()
        gate = None if self.gate is None else self.gate.reshape(x.shape)
        return replace(self, x=x, gate=gate, versions=versions_of(x, gate) if self.versions else ())

    def activated(self, kind: str) -> Pending | None:
        """This value with an activation applied to it, if it can stay pending."""
        if self.kind == "identity":
            return None if kind == "square" else replace(self, kind=kind, versions=versions_of(self.x))
        if self.kind == "relu" and kind == "square":
            return replace(self, kind="relu2")
        return None

    def times(self, other: Any) -> Pending | None:
        return None if self.kind == "identity" else self.gating(other)

    def gating(self, other: Any) -> Pending | None:
        """The product of this activation and `other`, if it can stay pending."""
        up = other.plain() if isinstance(other, Traveling) else other
        if self.kind not in GATED or not isinstance(up, Tensor):
            return None
        if up.shape != self.x.shape or up.dtype != self.x.dtype:
            return None
        return replace(self, x=up, gate=self.x, kind=GATED[self.kind], versions=versions_of(up) + self.versions)


def _continue(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The value `func` gives if it can stay quantized or pending, else None."""
    name = getattr(func, "__name__", "")
    for value in (*args, *kwargs.values()):
        if isinstance(value, Traveling) and value.settled is None:
            refuse_lost_gradient(value)
    if name in ("mul", "__mul__", "__rmul__") and len(args) == 2 and not kwargs:
        return _product(*args)
    if name in ("add", "__add__", "__radd__") and len(args) == 2 and not kwargs:
        return _sum(*args)
    first, rest = (args[0], args[1:]) if args else (kwargs.get("input"), ())
    if not isinstance(first, Traveling) or first.settled is not None:
        return None
    return first.after(name, rest, {key: value for key, value in kwargs.items() if value is not first})


def activation_kind(name: str, args: Any, kwargs: dict[str, Any]) -> str:
    """What a torch function applies, as `fused` names it, and `square`; "" for anything else."""
    if name in ("relu", "silu", "square"):
        return "" if kwargs.get("inplace") or True in args else name
    if name in ("pow", "__pow__") and len(args) == 1 and isinstance(args[0], int | float) and args[0] == 2:
        return "square"
    if name == "gelu":
        approximate = kwargs.get("approximate", args[0] if args else "none")
        return "gelu_tanh" if approximate == "tanh" else "gelu"
    return ""


def _product(left: Any, right: Any) -> Any:
    if isinstance(left, Pending) and left is right and left.kind == "relu":
        return left.activated("square")
    for this, other in ((left, right), (right, left)):
        if isinstance(this, Traveling) and this.settled is None:
            product = this.times(other)
            if product is not None:
                return product
    return None


def _sum(left: Any, right: Any) -> Any:
    for this, other in ((left, right), (right, left)):
        if isinstance(this, Traveling) and this.settled is None:
            total = this.plus(other)
            if total is not None:
                return total
    return None


def _chunk(value: Pending, chunks: int, dim: int = 0) -> Any:
    if value.kind != "identity" or dim not in (-1, value.ndim - 1):
        return None
    return tuple(replace(value, x=part, ready=None) for part in value.x.chunk(chunks, dim))


def _method(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def method(self: Traveling, *args: Any, **kwargs: Any) -> Any:
        return Traveling.__torch_function__(function, (), (self, *args), kwargs)

    method.__name__ = name
    return method


_METHODS = (
    "view view_as reshape flatten unflatten squeeze unsqueeze transpose permute contiguous to chunk relu square pow"
)
_OPERATORS = (
    "mul rmul add radd sub rsub truediv rtruediv matmul rmatmul pow rpow neg getitem abs eq ne lt le gt ge "
    "iadd imul isub itruediv floordiv mod invert and or xor setitem"
)
for _name in _METHODS.split():
    setattr(Traveling, _name, _method(_name))
for _name in _OPERATORS.split():
    setattr(Traveling, f"__{_name}__", _method(f"__{_name}__"))
