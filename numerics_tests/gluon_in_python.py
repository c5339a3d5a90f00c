"""Gluon kernels of one partition without a GPU: their Python runs on tensors, layouts left out.

What is in flight cannot be read: a TMA copy leaves NaN where it goes until its barrier is waited for, and an
asynchronous product is computed, or a buffer stored, from what they hold by then, when a wait covers it. So a wait too
few, a buffer filled again too early, or a barrier that nobody arrives at gives wrong values or raises.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr


class Barrier:
    """Of one slot. A phase is over when all have arrived and all bytes have; copies land when it is waited for."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.copies: list[tuple[Tensor, Tensor]] = []

    def come(self, arrivals: int, nbytes: int) -> None:
        self.missing, self.bytes = self.missing - arrivals, self.bytes + nbytes
        assert self.missing >= 0, "more arrived than are expected"
        if self.missing == self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count

    def wait(self, parity: Any) -> None:
        assert self.phase != int(parity), "deadlock: nobody arrives"
        for target, values in self.copies:
            target.copy_(values)
        self.copies.clear()


class Shared:
    """A buffer, or an array of barriers."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def index(self, i: Any) -> Any:
        found = self.values[int(i)]
        return found if isinstance(found, Barrier) else Shared(found)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, start, length))

    def store(self, x: Tensor) -> None:
        self.values.copy_(x)

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()


class Pointer:
    """A tensor's address, plus elements."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.tensor, self.at + elements)


class Descriptor:
    """Of a matrix, which boxes may reach beyond."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype, self.layout = values, values.dtype, None


def tma_load(desc: Descriptor, at: list[Any], barrier: Barrier, smem: Shared, pred: Any = True) -> None:
    """Begin to copy a box, zero beyond the matrix."""
    if pred:
        (row, col), (rows, cols) = (int(i) for i in at), smem.values.shape
        assert min(row, col) >= 0
        found = torch.zeros_like(smem.values)
        inside = desc.values[row : row + rows, col : col + cols]
        found[: inside.shape[0], : inside.shape[1]] = inside
        smem.values.fill_(float("nan"))
        barrier.copies.append((smem.values, found))
        barrier.come(0, -found.numel() * found.element_size())


class Product:
    """An asynchronous product and its sum."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self.operands, self.value = (a, b, acc), None

    def finish(self) -> None:
        a, b, acc = self.operands
        acc = acc.value if isinstance(acc, Product) else acc
        product = (a.values if isinstance(a, Shared) else a).float() @ b.values.float()
        self.value = product if acc is None else product + acc


class Gluon:
    """Stands for `gl` and `tl` in one program. Scalars are Python's, or tensors without dimensions."""

    int64, float32, bfloat16, float16 = torch.int64, torch.float32, torch.bfloat16, torch.float16
    static_range, exp2, log, sum = range, torch.exp2, torch.log, torch.sum

    def __init__(self, program: int) -> None:
        self.program = torch.tensor(program)
        self.in_flight: list[Product] = []
        self.stores: list[tuple[Tensor, Shared]] = []

    def __getattr__(self, layout: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def program_id(self, axis: int) -> Tensor:
        return self.program

    def num_warps(self) -> int:
        return 4

    def arange(self, first: int, last: int, layout: Any = None) -> Tensor:
        return torch.arange(first, last)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def convert_layout(self, x: Tensor, layout: Any) -> Tensor:
        return x

    def cast(self, x: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(x).to(dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Tensor:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))

    def minimum(self, a: Any, b: Any) -> Tensor:
        return torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    def maximum(self, a: Any, b: Any) -> Tensor:
        return torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    def max(self, x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
        at = torch.as_tensor(pointer.at)
        size = pointer.tensor.untyped_storage().nbytes() // pointer.tensor.itemsize
        flat = pointer.tensor.as_strided((size,), (1,), 0)
        at = at + pointer.tensor.storage_offset()
        mask, at = torch.broadcast_tensors(torch.as_tensor(True if mask is None else mask), at)
        if not mask.any():
            return torch.full(mask.shape, other, dtype=flat.dtype)
        return torch.where(mask, flat[torch.where(mask, at, 0)], torch.tensor(other).to(flat.dtype))

    def store(self, pointer: Pointer, x: Tensor, mask: Tensor) -> None:
        mask, at = torch.broadcast_tensors(mask, torch.as_tensor(pointer.at))
        assert bool(((at >= 0) & (at < pointer.tensor.numel()))[mask].all()), "stored beyond the tensor"
        pointer.tensor.view(-1)[at[mask]] = x[mask]

    def tma_store(self, desc: Descriptor, at: list[Any], smem: Shared) -> None:
        (row, col), (rows, cols) = (int(i) for i in at), smem.values.shape
        target = desc.values[row : row + rows, col : col + cols]
        assert target.shape == smem.values.shape, "stored beyond the tensor"
        self.stores.append((target, smem))

    def store_wait(self, outstanding: int) -> None:
        while len(self.stores) > outstanding:
            target, smem = self.stores.pop(0)
            target.copy_(smem.values)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype is torch.int64:
            return Barrier() if len(shape) == 1 else Shared([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def warpgroup_mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.in_flight.append(Product(a, b, acc if use_acc else None))
        return self.in_flight[-1]

    def warpgroup_mma_wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        while len(self.in_flight) > outstanding:
            self.in_flight.pop(0).finish()
        values = [x.value if isinstance(x, Product) else x for x in deps]
        assert all(x is not None for x in values), "read while in flight"
        return values[0] if len(deps) == 1 else values


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


mbarrier = types.SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=_init,
    wait=lambda barrier, parity, pred=True: barrier.wait(parity) if pred else None,
    expect=lambda barrier, nbytes, pred=True: barrier.come(1, int(nbytes)) if pred else None,
)


def nothing(*args: Any) -> None:
    """A fence, or a barrier of threads: they are one here."""


REPLACED = {
    "mbarrier": mbarrier, "tma_load": tma_load, "barrier": nothing, "fence_async_shared": nothing,
    "reinterpret": lambda smem, dtype, shape, layout: Shared(smem.values.view(shape)), "anchored": lambda x: x,
    "warpgroup_mma_init": lambda x: x, "gdc_launch_dependents": nothing,
}  # fmt: skip


def plain(function: Any, names: dict[str, Any], seen: dict[Any, Any]) -> Callable[..., Any]:
    """A device function as Python, and so what it calls; `names` stand for what is not a device function."""
    fn = function.fn
    if fn not in seen:
        scope: dict[str, Any] = dict(fn.__globals__)
        seen[fn] = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)
        for name, value in fn.__globals__.items():
            if isinstance(value, constexpr):
                scope[name] = value.value
            elif hasattr(value, "fn") and hasattr(value, "arg_names") and name not in names:
                scope[name] = plain(value, names, seen)
        scope.update(names)
    return seen[fn]


def argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    return torch.tensor(x) if isinstance(x, int) else x
