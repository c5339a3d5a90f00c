"""Gluon kernels of several partitions without a GPU: a partition is a thread, shared memory is tensors full of NaN, TMA
copies at once, and a barrier counts arrivals and bytes as the hardware's does. Tested are values, and that whoever
waits is awaited: a wait of `PATIENCE_S` is a deadlock. Layouts are left out.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 60.0


class Barrier:
    """Of one slot; a phase is over when all have arrived and all bytes have."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def come(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += nbytes
            assert self.missing >= 0, "more arrived than are expected"
            if self.missing == 0 and self.bytes == 0:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            over = self.changed.wait_for(lambda: self.phase != int(parity), timeout=PATIENCE_S)
        if not over:
            raise TimeoutError("deadlock: nobody arrives")


class Barriers:
    """What an allocation of barriers gives."""

    def __init__(self, slots: int) -> None:
        self.slots = [Barrier() for _ in range(slots)]

    def index(self, i: Any) -> Barrier:
        return self.slots[int(i)]


class Shared:
    """A buffer."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, tuple(values.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.values[int(i)])

    def slice(self, first: int, length: int, dim: int) -> Shared:
        return Shared(self.values.narrow(dim, first, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def store(self, x: Tensor) -> None:
        self.values.copy_(x)

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()


class Boxes:
    """A (rows, columns) buffer as boxes that lie one after another, down the columns first."""

    def __init__(self, smem: Shared, dtype: Any, shape: list[int], layout: Any) -> None:
        self.values, (_, self.rows, self.cols) = smem.values, shape

    def index(self, i: Any) -> Shared:
        down = self.values.shape[0] // self.rows
        row, col = int(i) % down * self.rows, int(i) // down * self.cols
        return Shared(self.values[row : row + self.rows, col : col + self.cols])


class Pointer:
    """A tensor's address, plus elements."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.tensor, self.at + elements)


class Descriptor:
    """Rows of a (T, heads, width) tensor in boxes."""

    def __init__(self, x: Tensor) -> None:
        self.values, self.dtype, self.layout = x.flatten(1), x.dtype, None


def tma_load(desc: Descriptor, at: list[Any], barrier: Barrier, smem: Shared) -> None:
    (row, col), (rows, cols) = (int(i) for i in at), smem.shape
    found = desc.values[row : row + rows, col : col + cols]
    smem.values.zero_()
    smem.values[: found.shape[0], : found.shape[1]] = found
    barrier.come(0, -smem.values.numel() * smem.dtype.itemsize)


def tma_store(desc: Descriptor, at: list[Any], smem: Shared) -> None:
    (row, col), (rows, cols) = (int(i) for i in at), smem.shape
    assert row + rows <= len(desc.values), "stored beyond the tensor"
    desc.values[row : row + rows, col : col + cols] = smem.values


def warpgroup_mma(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    product = (a.values if isinstance(a, Shared) else a).float() @ b.values.float()
    return acc + product if use_acc else product


def warpgroup_mma_wait(outstanding: int, deps: tuple[Tensor, ...]) -> Any:
    return deps if len(deps) > 1 else deps[0]


class Gluon:
    """Stands for `gl`. Scalars are Python's, or tensors without dimensions."""

    int64, float32 = torch.int64, torch.float32
    static_range = range

    def __init__(self, programs: int) -> None:
        self.program, self.programs = 0, programs

    def __getattr__(self, layout: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def program_id(self, axis: int) -> int:
        return self.program

    def num_programs(self, axis: int) -> int:
        return self.programs

    def arange(self, first: int, last: int, layout: Any) -> Tensor:
        return torch.arange(first, last)

    def expand_dims(self, x: Tensor, dim: int) -> Tensor:
        return x.unsqueeze(dim)

    def convert_layout(self, x: Tensor, layout: Any) -> Tensor:
        return x

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, Tensor) and condition.dim():
            return torch.where(condition, a, b)
        return a if condition else b

    def minimum(self, a: Any, b: Any) -> Any:
        return min(a, b)

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
        flat, at = pointer.tensor.view(-1), torch.as_tensor(pointer.at)
        if mask is None:
            return flat[at].long()
        mask, at = torch.broadcast_tensors(mask, at)
        found = torch.full(at.shape, other, dtype=flat.dtype)
        found[mask] = flat[at[mask]]
        return found

    def store(self, pointer: Pointer, x: Tensor, mask: Tensor) -> None:
        mask, at = torch.broadcast_tensors(mask, pointer.at)
        pointer.tensor.view(-1)[at[mask]] = x[mask]

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        return Barriers(shape[0]) if dtype is torch.int64 else Shared(torch.full(shape, float("nan"), dtype=dtype))

    def warp_specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *rest: Any) -> None:
        errors: list[BaseException] = []

        def run(body: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                body(*args)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


mbarrier = types.SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, parity: barrier.wait(parity),
    expect=lambda barrier, nbytes: barrier.come(1, int(nbytes)),
    arrive=lambda barrier, count, pred=True: barrier.come(count, 0) if pred else None,
)


def nothing(*args: Any) -> None:
    """A fence, a barrier of a partition's threads, a wait for stores: everything happens in order here."""


REPLACED = {
    "mbarrier": mbarrier, "tma": types.SimpleNamespace(store_wait=nothing), "tma_load": tma_load,
    "tma_store": tma_store, "barrier": nothing, "fence_async_shared": nothing, "reinterpret": Boxes,
    "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait, "anchored": lambda x: x,
}  # fmt: skip


def plain(function: Any, names: dict[str, Any], seen: dict[Any, Any]) -> Callable[..., Any]:
    """A device function of Gluon as Python, and so what it calls; `names` stand for what is not Gluon."""
    fn = function.fn
    if fn not in seen:
        scope: dict[str, Any] = dict(fn.__globals__)
        seen[fn] = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)
        ours = {k: plain(v, names, seen) for k, v in fn.__globals__.items() if is_device(v) and k not in names}
        scope.update(ours | names)
    return seen[fn]


def is_device(value: Any) -> bool:
    return hasattr(value, "fn") and hasattr(value, "arg_names")


def launch(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any], **names: Any) -> None:
    """Run `kernel`, program after program: tensors among `args` are pointers, and `names` stand for its functions."""
    gluon = Gluon(programs)
    body = plain(kernel, {"gl": gluon, **REPLACED, **names}, {})
    given = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
    for program in range(programs):
        gluon.program = program
        body(*given, **{k: v for k, v in constants.items() if k in kernel.arg_names})
