"""Values of Gluon device functions in Triton's interpreter, which has no Gluon: layouts are left out, shared memory is
an array and TMA writes at once. What a function computes is tested, not how it is spread over threads.

Import this before anything that imports triton.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import TensorHandle

from mxfp8_recipe.fused._device import store_scale

tl.core.block_type.layout = None  # pyright: ignore[reportAttributeAccessIssue]
TYPES = {torch.int32: tl.int32, torch.float32: tl.float32}


def block(x: Tensor) -> Any:
    """A torch tensor as the interpreter's."""
    kind = TYPES[x.dtype]
    return tl.core.tensor(TensorHandle(x.numpy(), kind), tl.block_type(kind, list(x.shape)))


def array(x: Any) -> Tensor:
    """The interpreter's tensor as torch's."""
    return torch.from_numpy(np.ascontiguousarray(x.handle.data))


class Shared:
    """A buffer in shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)

    def load(self, layout: Any) -> Any:
        return block(self.values.clone())

    def store(self, x: Any) -> None:
        self.values.copy_(array(x))

    def slice(self, first: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, int(first), int(length)))

    def index(self, i: int) -> Shared:
        return Shared(self.values[int(i)])


class Boxes:
    """A matrix of words that TMA stores boxes to."""

    def __init__(self, rows: int, words: int) -> None:
        self.values = torch.full((rows, words), -1, dtype=torch.int32)

    def store(self, at: list[Any], smem: Shared) -> None:
        row, col = (int(array(x)) if hasattr(x, "handle") else int(x) for x in at)
        part = self.values[row : row + smem.values.shape[0], col : col + smem.values.shape[1]]
        part.copy_(smem.values[: part.shape[0], : part.shape[1]])


def reinterpret(smem: Shared, kind: Any, shape: list[int], layout: Any) -> Shared:
    """A view of another shape: the same words where there are as many, else words nobody has written yet."""
    shape = [int(n) for n in shape]
    if smem.values.numel() == np.prod(shape):
        return Shared(smem.values.view(shape))
    return Shared(torch.full(shape, -1, dtype=torch.int32))


class Larger:
    """The larger of either half of words, or with `signed` of magnitudes, with a sign that must not matter."""

    def __init__(self, signed: bool) -> None:
        self.signed = signed

    def over(self, words: Tensor) -> Tensor:
        """Along the first dimension."""
        words = words.long() & 0xFFFFFFFF
        low, high = words & 0xFFFF, words >> 16
        if self.signed:
            low, high = (low & 0x7FFF) | 0x8000, (high & 0x7FFF) | 0x8000
        return (low.amax(0) | (high.amax(0) << 16)).to(torch.int32)

    def __call__(self, a: Any, b: Any) -> Any:
        return block(self.over(torch.stack((array(a), array(b)))))


def reduce(x: Any, axis: int, combine: Larger) -> Any:
    """`gl.reduce` with one of the above."""
    return block(combine.over(array(x).movedim(axis, 0)))


def mul_bf16x2(a: Any, b: Any) -> Any:
    """Products of both halves, rounded; NaN is the one that the instruction gives."""
    x, y = torch.broadcast_tensors(array(a), array(b))
    x, y = (t.contiguous().view(torch.bfloat16).float() for t in (x, y))
    product = (x * y).bfloat16()
    bits = product.view(torch.int16).masked_fill(product.isnan(), 0x7FFF)
    return block(bits.view(torch.int32))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A barrier, a fence or a wait: everything happens in order here."""


class Gluon:
    """Stands for `gl`: what Triton calls the same, found anew each time, since the interpreter replaces it to run."""

    SliceLayout = NVMMASharedLayout = BlockedLayout = SwizzledSharedLayout = staticmethod(_nothing)
    static_range = range
    reduce = staticmethod(reduce)

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    def arange(self, first: int, last: int, layout: Any) -> Any:
        return tl.arange(first, last)

    def permute(self, x: Any, order: tuple[int, ...]) -> Any:
        return tl.permute(x, *order)

    def convert_layout(self, x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    def zeros(self, shape: list[int], kind: Any, layout: Any = None) -> Any:
        return tl.zeros(shape, kind)

    def num_warps(self) -> int:
        return 4


def store_scale_of(ptr: Any, words: Any, r: Any, c: Any, *rest: Any) -> None:
    """`_device.store_scale` with a column for every word: the interpreter's masks cannot mix blocks and scalars."""
    store_scale(ptr, words, r, r * 0 + c, *rest)


REPLACED = {
    "store_scale": store_scale_of,
    "gl": Gluon(),
    "barrier": _nothing,
    "fence_async_shared": _nothing,
    "tma": types.SimpleNamespace(store_wait=_nothing),
    "load_z": _nothing,
    "tma_store": lambda desc, at, smem: desc.store(at, smem),
    "reinterpret": reinterpret,
    "mul_bf16x2": mul_bf16x2,
    "max_u16x2": Larger(signed=False),
    "larger_magnitude": Larger(signed=True),
}


def values_of(function: GluonJITFunction) -> Callable[..., Any]:
    """A Gluon device function on the interpreter's tensors, to be called inside `run`."""
    fn = function.fn
    names = dict(fn.__globals__)
    for name, value in names.items():
        if isinstance(value, GluonJITFunction):
            names[name] = lambda *args, _value=value: values_of(_value)(*args)
    return types.FunctionType(fn.__code__, names | REPLACED, fn.__name__, fn.__defaults__)


_body: list[Callable[..., Any]] = []


@triton.jit
def _kernel(a, b, c, d, e, f, g, h, i, row, col, M, N):
    _body[0](a, b, c, d, e, f, g, h, i, row, col, M, N)


def run(
    body: Callable[..., Any], *pointers: Tensor, row: int = 0, col: int = 0, size: tuple[int, int] = (0, 0)
) -> None:  # fmt: skip
    """Call `body` with up to 9 tensors as pointers, a tile's place and a matrix's size, as device code has them."""
    _body[:] = [body]
    unused = torch.zeros(1)
    _kernel[(1,)](*pointers, *[unused] * (9 - len(pointers)), row, col, *size)  # pyright: ignore[reportCallIssue]
