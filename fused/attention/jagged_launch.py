"""Host side of the jagged attention kernels: launches, operands as kernels read them, what two passes share.

Operands are read where they lie if their heads are dense and their rows on 16 bytes, as slices of a packed projection
are; else they are copied once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import DTYPES, next_power_of_2
from . import schedule as schedules
from .bias import JaggedBias

MAX_WIDTH = 256
SCALARS = ["ENTRIES", "H", "GROUP", "QS8", "KS8", "VS8", "window", "P", "N"]
"""Arguments that every kernel takes and no code depends on."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch of one kernel.

    Attributes:
        rows: of the tile a program keeps; block: rows a step of its loop takes. stages: steps in flight.
        per_processor: programs a multiprocessor holds, which then take all units in turns; 0: one unit a program, and
            the next in the list to whatever multiprocessor is free.
        options: further ones of the compiler.
        gluon: whether `jagged_hopper`'s kernels run it, not the portable ones. heads: how many, at most, a program of
            theirs takes in turn, forward and for dQ, where `stages` is theirs.
    """

    rows: int
    block: int
    warps: int
    stages: int
    per_processor: int = 0
    options: tuple[tuple[str, int], ...] = ()
    gluon: bool = False
    heads: int = 1

    def programs(self, entries: int, heads: int, device: int | None) -> int:
        """Programs for so many entries of a schedule."""
        units = entries * heads * self.tiles
        return min(units, self.per_processor * processors(device)[0]) if self.per_processor else units

    @property
    def tiles(self) -> int:
        """Tiles of an entry of a schedule."""
        return schedules.TILE // self.rows

    @property
    def launch(self) -> dict[str, Any]:
        """Compile-time arguments and options that follow from this."""
        return {
            "BM": self.rows, "BN": self.block, "SUB": self.tiles, "STAGES": self.stages,
            "PERSISTENT": self.per_processor > 0, "num_warps": self.warps, **dict(self.options),
        }  # fmt: skip


@lru_cache(maxsize=64)
def processors(device: int | None) -> tuple[int, bool]:
    """Multiprocessors of a GPU, and whether it has TMA; the CPU, where kernels are interpreted, passes for a Hopper."""
    if device is None:
        return 4, True
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.major >= 9


@dataclass(frozen=True)
class Operand:
    """A (T, heads, width) tensor as kernels read it: dense heads, rows a multiple of 8 elements apart."""

    x: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Operand:
        """X itself if it lies so, else a copy."""
        dense = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
        aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        lies_so = dense and aligned and x.stride(0) >= x.shape[1] * x.shape[2]
        return cls(x if lies_so else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x))

    @property
    def stride8(self) -> int:
        """Elements from a row to the next, over 8."""
        return self.x.stride(0) // 8

    def boxes(self, rows: int, tma: bool) -> Any:
        """A descriptor in boxes of `rows` of one head, or the tensor itself."""
        x = self.x
        if not tma:
            return x
        return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a forward and a backward have in common.

    Attributes:
        q, k, v: operands. samples: how many. schedule: of this batch. entries: of its lists of queries and of keys.
        bias: what kernels read of it, pointers; flags: compile-time; sizes: rows of the tables.
    """

    q: Operand
    k: Operand
    v: Operand
    samples: int
    schedule: Tensor
    entries: tuple[int, int]
    bias: tuple[Tensor, ...]
    flags: dict[str, Any]
    sizes: tuple[int, int]
    scale: float
    causal: bool
    window: int | None

    @property
    def tma(self) -> bool:
        """Blocks come by TMA: not in fp32, whose blocks are few and small, and not from nothing."""
        x = self.q.x
        return x.dtype != torch.float32 and self.k.x.numel() > 0 and processors(x.device.index)[1]

    @property
    def has_bias(self) -> bool:
        """Some table is added to the scores."""
        return self.flags["POSITION"] or self.flags["TIME"]

    @property
    def groups(self) -> int:
        """Heads of q that share one of k and v."""
        return self.q.x.shape[1] // self.k.x.shape[1]

    @property
    def width(self) -> int:
        """Of the widest head."""
        return max(self.q.x.shape[2], self.v.x.shape[2])

    @property
    def mean_keys(self) -> float:
        """Of a sample."""
        return self.k.x.shape[0] / max(self.samples, 1)

    @property
    def masked(self) -> bool:
        """Some pairs of a sample may be hidden."""
        return self.causal or self.window is not None

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel."""
        dtype = self.q.x.dtype
        return {
            "CAUSAL": self.causal, "WINDOW": self.window is not None, **self.flags,
            "FOLD": self.scale > 0 and not self.has_bias,
            "D": self.q.x.shape[2], "E": self.v.x.shape[2], "TMA": self.tma, "DTYPE": DTYPES[dtype],
            "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32", "enable_fp_fusion": True,
        }  # fmt: skip


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Problem:
    """Operands laid out for kernels, with a schedule.

    Raises:
        TypeError: for a dtype that no kernel takes. ValueError: for heads wider than 256.
    """
    if q.dtype not in DTYPES:
        raise TypeError(f"jagged_attention: got {q.dtype}, expected bf16, fp16 or fp32; the reference takes any")
    if max(q.shape[2], v.shape[2]) > MAX_WIDTH:
        raise ValueError(
            f"jagged_attention: got heads of {q.shape[2]} and {v.shape[2]}, expected at most {MAX_WIDTH}; the "
            "reference takes any"
        )
    window = None if window is None else min(window, schedules.WIDEST)
    if schedule is None:
        schedule = schedules.build(
            q_offsets, k_offsets, q.shape[0], k.shape[0], max_q, max_k, causal=causal, window=window
        )
    position, time, *times = (None,) * 5 if bias is None else bias.tensors
    unread = schedule
    pointers = tuple(unread if x is None else x.contiguous() for x in (position, time, *times))
    sizes = tuple(1 if x is None else x.shape[0] for x in (position, time))
    flags = {"POSITION": position is not None, "TIME": time is not None, "STEPS": (sizes[1] - 1).bit_length()}
    samples = q_offsets.numel() - 1
    return Problem(
        q=Operand.of(q), k=Operand.of(k), v=Operand.of(v), samples=samples, schedule=schedule,
        entries=schedules.lengths_of_lists(q.shape[0], k.shape[0], samples),
        bias=pointers, flags=flags, sizes=sizes, scale=scale, causal=causal, window=window,
    )  # fmt: skip


def widened(x: Tensor) -> Tensor:
    """X with heads of a power of two, at least 16, zeros at their ends."""
    width = max(16, next_power_of_2(x.shape[2]))
    return x if width == x.shape[2] else F.pad(x, (0, width - x.shape[2]))
