"""`gluon_in_python` with the rules by which threads, copies, products and stores share memory on a GPU.

There one thread stands for all, so that a barrier of threads or a fence too few changes nothing. Here every access of a
buffer is held against what else is under way, and against what came before it in the same program:

- Threads neither read nor write what a copy is coming into; they write nothing that a product or a store still reads.
- A product or a store reads what threads have written only behind a fence and, after that, a barrier of the threads.
- A copy comes into nothing that is read or being written, and only behind a barrier since other threads may have read
  it, or may have waited for the products and stores that did.
- A barrier of copies is used behind a barrier of threads since it was made ready; a phase ends only when all threads
  have waited for the one before.
- A kernel that waits for the launch before it reads nothing but words of the schedule, and writes nothing, before that.

Threads that read what other threads have written need a barrier too; the compiler puts one there.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from numerics_tests import gluon_in_python as plainly
from numerics_tests.gluon_in_python import Descriptor, Pointer, Product, argument, plain

Place = tuple[int, int, int]
"""Storage, first element and the one after the last."""


class Hazard(AssertionError):
    """Something that need not come out wrong, and may on a GPU."""


def place_of(values: Tensor) -> Place:
    first = values.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(values.shape, values.stride()))
    return values.untyped_storage().data_ptr(), first, last + 1


def meet(a: Place, b: Place) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


class Memory:
    """What one program has done to shared memory, and what is under way there."""

    def __init__(self) -> None:
        self.turn = 0  # barriers of threads so far
        self.copies: list[tuple[Place, Barrier]] = []
        self.products: list[tuple[Place, Product]] = []
        self.stores: list[Place] = []
        self.past: list[tuple[Place, str, int]] = []
        self.barriers: list[Barrier] = []
        self.ahead = False  # of the end of the launch before

    def add(self, place: Place, what: str) -> None:
        self.past = [x for x in self.past if x[:2] != (place, what)]
        self.past.append((place, what, self.turn))

    def refuse(self, place: Place, access: str, *, copies: bool = True, readers: bool = True) -> None:
        """If something is under way there."""
        if copies and any(meet(place, x) for x, _ in self.copies):
            raise Hazard(f"{access}: a copy is on its way there")
        if readers and any(meet(place, x) for x in (*(x for x, _ in self.products), *self.stores)):
            raise Hazard(f"{access}: a product or a store still reads it")

    def separate(self, place: Place, access: str, *others: str) -> None:
        """A barrier of threads lies between `others` there and now."""
        for x, what, turn in self.past:
            if what in others and turn == self.turn and meet(place, x):
                raise Hazard(f"{access}: no barrier since {what}")

    def unfenced(self, place: Place, access: str) -> None:
        if any(what == "written" and meet(place, x) for x, what, _ in self.past):
            raise Hazard(f"{access}: written by threads, and no fence since")

    def threads_read(self, values: Tensor) -> None:
        self.refuse(place_of(values), "threads read", readers=False)
        self.add(place_of(values), "read")

    def threads_write(self, values: Tensor) -> None:
        self.refuse(place_of(values), "threads write")
        self.separate(place_of(values), "threads write", "multiplied", "stored")
        self.add(place_of(values), "written")

    def others_read(self, values: Tensor, access: str) -> Place:
        """A product or a store."""
        place = place_of(values)
        self.refuse(place, access, readers=False)
        self.unfenced(place, access)
        self.separate(place, access, "fenced")
        return place

    def copy_comes(self, values: Tensor, barrier: Barrier) -> None:
        place = place_of(values)
        self.refuse(place, "copy")
        self.unfenced(place, "copy")
        self.separate(place, "copy", "read", "fenced", "multiplied", "stored")
        if barrier.bytes <= 0:
            raise Hazard("copy: nobody said that it comes")
        self.past = [x for x in self.past if not meet(place, x[0])]
        self.copies.append((place, barrier))

    def outside(self, dtype: torch.dtype | None = None) -> None:
        """A read from global memory, or a write."""
        if self.ahead and dtype != torch.int32:
            raise Hazard("ahead of the end of the launch before")

    def fence(self, *_: Any) -> None:
        self.past = [(x, "fenced", self.turn) if what == "written" else (x, what, at) for x, what, at in self.past]

    def barrier(self, *_: Any) -> None:
        self.turn += 1


class Barrier(plainly.Barrier):
    """Knows when it was made ready and waited for."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory, self.ready, self.waited, self.unseen = memory, -1, -1, 0
        memory.barriers.append(self)

    def come(self, arrivals: int, nbytes: int) -> None:
        if self.ready in (-1, self.memory.turn):
            raise Hazard("barrier: used without a barrier of threads since it was made ready")
        before = self.phase
        super().come(arrivals, nbytes)
        if self.phase != before:
            self.unseen += 1
            if self.unseen > 1 or self.waited == self.memory.turn:
                raise Hazard("barrier: a phase ends before all threads have waited for the one before")

    def wait(self, parity: Any) -> None:
        super().wait(parity)
        self.unseen, self.waited = 0, self.memory.turn
        self.memory.copies = [x for x in self.memory.copies if x[1] is not self]


class Shared(plainly.Shared):
    """A buffer that tells the program's memory."""

    def __init__(self, values: Any, memory: Memory) -> None:
        super().__init__(values)
        self.memory = memory

    def index(self, i: Any) -> Any:
        assert 0 <= int(i) < len(self.values), f"buffer {int(i)} of {len(self.values)}"
        found = self.values[int(i)]
        return found if isinstance(found, plainly.Barrier) else Shared(found, self.memory)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order), self.memory)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, start, length), self.memory)

    def store(self, x: Tensor) -> None:
        self.memory.threads_write(self.values)
        super().store(x)

    def load(self, layout: Any) -> Tensor:
        self.memory.threads_read(self.values)
        return super().load(layout)


class Gluon(plainly.Gluon):
    """Of one program."""

    def __init__(self, program: int) -> None:
        super().__init__(program)
        self.memory = Memory()

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype is not torch.int64:
            return Shared(torch.full(shape, float("nan"), dtype=dtype), self.memory)
        barriers = [Barrier(self.memory) for _ in range(shape[0])]
        return barriers[0] if len(shape) == 1 else Shared(barriers, self.memory)

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
        self.memory.outside(pointer.tensor.dtype)
        return super().load(pointer, mask, other)

    def store(self, pointer: Pointer, x: Tensor, mask: Tensor) -> None:
        self.memory.outside()
        super().store(pointer, x, mask)

    def wait_for_launch(self) -> None:
        self.memory.ahead = False

    def make_ready(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count
        barrier.ready = self.memory.turn

    def tma_load(self, desc: Descriptor, at: list[Any], barrier: Barrier, smem: Shared, pred: Any = True) -> None:
        if pred:
            self.memory.outside()
            self.memory.copy_comes(smem.values, barrier)
            plainly.tma_load(desc, at, barrier, smem)

    def tma_store(self, desc: Descriptor, at: list[Any], smem: plainly.Shared) -> None:
        self.memory.outside()
        self.memory.stores.append(self.memory.others_read(smem.values, "store"))
        super().tma_store(desc, at, smem)

    def store_wait(self, outstanding: int) -> None:
        while len(self.memory.stores) > outstanding:
            self.memory.add(self.memory.stores.pop(0), "stored")
        super().store_wait(outstanding)

    def warpgroup_mma(
        self, a: Any, b: plainly.Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        read = [self.memory.others_read(x.values, "product") for x in (a, b) if isinstance(x, Shared)]
        product = super().warpgroup_mma(a, b, acc, use_acc, is_async)
        self.memory.products += [(place, product) for place in read]
        return product

    def warpgroup_mma_wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        found = super().warpgroup_mma_wait(outstanding, deps)
        under_way = [x for x in self.memory.products if any(x[1] is product for product in self.in_flight)]
        for place, product in self.memory.products:
            if not any(product is x[1] for x in under_way):
                self.memory.add(place, "multiplied")
        self.memory.products = under_way
        return found


def launch(kernel: Any, programs: int, args: tuple[Any, ...]) -> None:
    """Run `kernel`, program after program; tensors among `args`, all of it in order, are pointers."""
    constant = [p.is_constexpr for p in kernel.params]
    for program in range(programs):
        gluon = Gluon(program)
        gluon.memory.ahead = "gdc_wait" in kernel.fn.__globals__
        own = {
            "warpgroup_mma": gluon.warpgroup_mma, "warpgroup_mma_wait": gluon.warpgroup_mma_wait,
            "tma_load": gluon.tma_load, "tma_store": gluon.tma_store,
            "tma": types.SimpleNamespace(store_wait=gluon.store_wait),
            "mbarrier": types.SimpleNamespace(**vars(plainly.mbarrier) | {"init": gluon.make_ready}),
            "barrier": gluon.memory.barrier, "fence_async_shared": gluon.memory.fence,
            "gdc_wait": gluon.wait_for_launch,
        }  # fmt: skip
        body = plain(kernel, {"gl": gluon, "tl": gluon, **plainly.REPLACED, **own}, {})
        body(*(x if fixed else argument(x) for x, fixed in zip(args, constant, strict=True)))
        assert not gluon.in_flight, "ended while in flight"
        assert not gluon.stores, "ended while buffers are stored"
        assert not gluon.memory.copies, "ended while copies come"
        assert not gluon.memory.ahead, "ended ahead of the launch before"
        assert all(b.bytes == 0 and b.missing == b.count for b in gluon.memory.barriers), "ended within a phase"
