"""Gluon kernels of several partitions without a GPU: `gluon_in_python` with a thread for each partition.

Barriers count arrivals and bytes as the hardware's do, so whoever waits for what never comes is told so after
`PATIENCE_S`, and whoever does not wait reads NaN or what is in flight.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from numerics_tests import gluon_in_python
from numerics_tests.gluon_in_python import Descriptor, Pointer, Product, plain, tma_load

PATIENCE_S = 60.0


class Barrier(gluon_in_python.Barrier):
    """Of one slot, for threads."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def come(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            super().come(arrivals, nbytes)
            self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            over = self.changed.wait_for(lambda: self.phase != int(parity), timeout=PATIENCE_S)
            assert over, "deadlock: nobody arrives"
            self.land()

    def land(self) -> None:
        """What was copied is there."""
        for target, values in self.copies:
            target.copy_(values)
        self.copies.clear()


class Shared(gluon_in_python.Shared):
    """A buffer, or an array of barriers."""

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def index(self, i: Any) -> Any:
        found = self.values[int(i)]
        return found if isinstance(found, Barrier) else Shared(found)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))


class Boxes:
    """A (rows, columns) buffer as boxes that lie one after another, down the columns first."""

    def __init__(self, smem: Shared, dtype: Any, shape: list[int], layout: Any) -> None:
        self.values, (_, self.rows, self.cols) = smem.values, shape

    def index(self, i: Any) -> Shared:
        down = self.values.shape[0] // self.rows
        row, col = int(i) % down * self.rows, int(i) // down * self.cols
        return Shared(self.values[row : row + self.rows, col : col + self.cols])


def tma_store(desc: Descriptor, at: list[Any], smem: Shared) -> None:
    (row, col), (rows, cols) = (int(i) for i in at), smem.shape
    assert row + rows <= len(desc.values), "stored beyond the tensor"
    desc.values[row : row + rows, col : col + cols] = smem.values


class Gluon(gluon_in_python.Gluon):
    """Stands for `gl` in one program; products are in flight a thread."""

    def __init__(self, program: int, programs: int) -> None:
        super().__init__(program)
        self.programs, self.mine = programs, threading.local()

    @property
    def in_flight(self) -> list[Product]:
        if not hasattr(self.mine, "products"):
            self.mine.products = []
        return self.mine.products

    @in_flight.setter
    def in_flight(self, products: list[Product]) -> None:
        """Every thread begins without any."""

    def num_programs(self, axis: int) -> int:
        return self.programs

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """Of scalars one of the two, which may be Python's: a tensor would be counted up in place."""
        if isinstance(condition, Tensor) and condition.dim():
            return super().where(condition, a, b)
        return a if condition else b

    def expand_dims(self, x: Tensor, dim: int) -> Tensor:
        return x.unsqueeze(dim)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        if dtype is torch.int64:
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def warp_specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *rest: Any) -> None:
        errors: list[BaseException] = []

        def run(body: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                body(*args)
                assert not self.in_flight, "ended while in flight"
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def nothing(*args: Any) -> None:
    """A wait for stores: they happen at once here."""


def arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
    if pred:
        barrier.come(count, 0)


REPLACED = gluon_in_python.REPLACED | {
    "mbarrier": types.SimpleNamespace(**vars(gluon_in_python.mbarrier), arrive=arrive), "reinterpret": Boxes,
    "tma": types.SimpleNamespace(store_wait=nothing), "tma_load": tma_load, "tma_store": tma_store,
}  # fmt: skip


def launch(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any], **names: Any) -> None:
    """Run `kernel`, program after program: tensors among `args` are pointers, and `names` stand for its functions."""
    given = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
    for program in range(programs):
        gluon = Gluon(program, programs)
        products = {"warpgroup_mma": gluon.warpgroup_mma, "warpgroup_mma_wait": gluon.warpgroup_mma_wait}
        body = plain(kernel, {"gl": gluon, **REPLACED, **products, **names}, {})
        body(*given, **{k: v for k, v in constants.items() if k in kernel.arg_names})
