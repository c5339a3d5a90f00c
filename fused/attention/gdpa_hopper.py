"""Launches of generalized attention's Hopper kernels: O and dQ, dK and dV.

They take what makes up most of the work: every query of a sample sees all of its keys, no tables, heads 128 wide. On an
H200, gelu, as shares of cuBLAS at 8192-cubed (rows of 0e37994), against the kernels of `gdpa` and `gdpa_backward` (rows
of 5de9fe4, an earlier run, where a backward's kernels were timed apart):

                                             forward           backward
    1152 samples of up to 1024               63 %, 55 %        43 %, 39.5 %
    128 samples of 2048 queries, 256 keys    63 %, 51 %        45 %, 41 %

Power limits such kernels: O and dQ, written to hold left operands in registers, ran at 690 W and 1.7 of 2.0 GHz, and
were no faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._gdpa_hopper_keys import gdpa_hopper_keys_kernel
from ._gdpa_hopper_queries import gdpa_hopper_queries_kernel
from .jagged_hopper import is_hopper
from .jagged_launch import Operand, processors

if TYPE_CHECKING:
    from .gdpa import Problem

WIDTH = 128
ROWS = 64
"""Of a tile, a warpgroup's."""
MOST_KEYS = 256
"""Of a sample, that shared memory keeps beside two tiles of queries."""
_RUN = 8
_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch of one kernel.

    Attributes:
        tiles, stages: tiles and blocks that shared memory holds. block: rows of a block.
        registers, loader_registers: a thread; the first warpgroup has what the others leave, the same as the second.
    """

    tiles: int
    stages: int
    block: int
    registers: int
    loader_registers: int

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time arguments."""
        return {
            "NR": self.tiles, "NS": self.stages, "BN": self.block, "D": WIDTH, "REGS": self.registers,
            "LOADER_REGS": self.loader_registers, "num_warps": 4, "enable_fp_fusion": True,
        }  # fmt: skip


FORWARD = Config(tiles=2, stages=4, block=64, registers=232, loader_registers=40)
DQ = Config(tiles=1, stages=4, block=64, registers=240, loader_registers=24)
DKDV = Config(tiles=1, stages=4, block=64, registers=240, loader_registers=24)


def takes(problem: Problem) -> bool:
    """Whether `forward` and `dq` do. Samples shorter than a block load slowly: some may be among them, not most."""
    return _plain(problem) and len(problem.k.x) >= FORWARD.block * problem.samples


def takes_keys(problem: Problem) -> bool:
    """Whether `dkdv` does: where no heads of queries share one of keys, whose sums would be fp32, and most samples have
    keys for both warpgroups.
    """
    q, k = problem.q.x, problem.k.x
    long = len(q) >= DKDV.block * problem.samples and len(k) > ROWS * problem.samples
    return _plain(problem) and long and q.shape[1] == k.shape[1]


def _plain(problem: Problem) -> bool:
    widths = problem.q.x.shape[2], problem.v.x.shape[2]
    plain = not (problem.masked or problem.has_bias or problem.flags["BROADCAST"])
    return plain and widths == (WIDTH, WIDTH) and problem.tma and is_hopper(problem.q.x.device.index)


def forward(problem: Problem, out: Tensor, max_k: int, post_scale: float) -> None:
    """Fill `out` (Tq, H, 128)."""
    run = run_of(problem.entries[0], out.shape[1], out.device.index) if max_k <= MOST_KEYS else 1
    _queries(problem, problem.q, out, FORWARD, run, post_scale * problem.weight_scale, slope=False)


def dq(problem: Problem, grad_out: Operand, out: Tensor, max_k: int, post_scale: float) -> None:
    """Fill `out` (Tq, H, 128), the gradient of q."""
    run = run_of(problem.entries[0], out.shape[1], out.device.index) if max_k <= MOST_KEYS else 1
    _queries(problem, grad_out, out, DQ, run, post_scale * problem.scale, slope=True)


def run_of(entries: int, heads: int, device: int | None) -> int:
    """Tiles of a sample that a program takes in a row, a power of two: as many as leave eight runs for each program."""
    run = min(_RUN, max(1, entries * heads // (8 * processors(device)[0])))
    return 1 << (run.bit_length() - 1)


def _queries(
    problem: Problem, grad_out: Operand, out: Tensor, config: Config, run: int, out_scale: float, *, slope: bool
) -> None:  # fmt: skip
    q, k, v, heads = problem.q, problem.k, problem.v, out.shape[1]
    programs = min(processors(out.device.index)[0], problem.entries[0] * heads)
    gdpa_hopper_queries_kernel[(programs,)](
        boxes(q.x, ROWS), boxes(grad_out.x, ROWS), boxes(k.x, config.block), boxes(v.x, config.block), boxes(out, ROWS),
        k.x, v.x, out, problem.schedule, 1, heads, heads // k.x.shape[1], k.stride8, v.stride8, problem.scale,
        out_scale, KIND=problem.flags["KIND"], FOLD=problem.fold, SLOPE=slope, RUN=run, **config.constants,
    )  # fmt: skip


def dkdv(problem: Problem, grad_out: Operand, dk: Tensor, dv: Tensor, post_scale: float) -> None:
    """Fill dk and dv (Tk, H, 128)."""
    q, k, v, heads = problem.q, problem.k, problem.v, dk.shape[1]
    programs = min(processors(dk.device.index)[0], problem.entries[1] * heads)
    tiles, blocks = (boxes(x, ROWS) for x in (k.x, v.x)), (boxes(x, DKDV.block) for x in (q.x, grad_out.x))
    gdpa_hopper_keys_kernel[(programs,)](
        *tiles, *blocks, boxes(dk, ROWS), boxes(dv, ROWS), q.x, grad_out.x, dk, dv, problem.schedule,
        1 + problem.entries[0], heads, 1, q.stride8, grad_out.stride8, problem.scale, post_scale * problem.scale,
        post_scale * problem.weight_scale, KIND=problem.flags["KIND"], FOLD=problem.fold, **DKDV.constants,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _layout(rows: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, WIDTH], _ELEMENTS[dtype])


def boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of x (T, heads, 128), whose heads are dense, in boxes of `rows` of one head."""
    shape = [x.shape[0], x.shape[1] * WIDTH]
    return TensorDescriptor(x, shape, [x.stride(0), 1], [rows, WIDTH], _layout(rows, x.dtype))
