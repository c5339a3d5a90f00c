"""Device code in Gluon that jagged attention's kernels for Hopper share: units, rows to and from shared memory, masks.

What says where a tile lies is `_tiles`'s. A tile that a program keeps, and every block it walks over, is 64 rows of
one head, moved by TMA; rows past a sample's end in a kept tile stay by themselves. A sample shorter than a block is
read row by row and is one block, zero below its end. A program leaves its results by way of a buffer of blocks, which
therefore are as long as tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..gemm._gluon import barrier, tma_store
from ._tiles import read_entry


@gluon.jit
def entry_of(schedule_ptr, skipped, rank, EACH: gl.constexpr, SUB: gl.constexpr, BM: gl.constexpr):
    """`_tiles.read_entry` of a program's tile of BM rows: one of SUB of an entry, each of which EACH programs take."""
    first, q0, Lq, k0, Lk, sample = read_entry(schedule_ptr, skipped + rank // (EACH * SUB))
    return first + rank % (EACH * SUB) // EACH * BM, q0, Lq, k0, Lk, sample


@gluon.jit
def mixed(rank, pairs, EACH: gl.constexpr):
    """Ranks in which the first 2 `pairs` of tiles, EACH programs a tile, take turns: one of their first half, one of
    the other. So programs with few blocks, which move more than they multiply, run beside those with many.
    """
    tile = rank // EACH
    other = (tile >> 1) + (tile & 1) * pairs
    return gl.where(tile < 2 * pairs, other * EACH + rank % EACH, rank)


@gluon.jit
def step_after(i, blocks, head):
    """Block and head of the step after a head's i-th: after its last, the next head's first."""
    at_end = i + 1 == blocks
    return gl.where(at_end, 0, i + 1), gl.where(at_end, head + 1, head)


@gluon.jit
def some_rows(ptr, row, count, stride8, column, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """The first `count` of (ROWS, D) from `column` on, zero below; rows `8 * stride8` elements apart."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    stride = stride8.to(gl.int64) * 8
    at = ptr + row.to(gl.int64) * stride + column
    return gl.load(at + r.to(gl.int64) * stride + c, mask=r < count, other=0.0)


@gluon.jit
def store_some_rows(
    ptr, x, smem, row, count, heads, head, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The first `count` of (ROWS, D) to dense (T, heads, D), by way of shared memory that nothing else uses."""
    smem.store(x.to(ptr.dtype.element_ty))
    barrier()
    y = smem.load(LAYOUT)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    at = ptr + (row.to(gl.int64) * heads + head) * D
    gl.store(at + r.to(gl.int64) * (heads * D) + c, y, mask=r < count)


@gluon.jit
def store_rows(
    desc, ptr, x, smem, row, count, heads, head, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The first `count` of (ROWS, D) to dense (T, heads, D), by way of shared memory that nothing else uses: all of
    them by TMA, which may still be under way.

    Only what differs stands in the branch: what follows it would no longer be known to be the same in all threads.
    """
    smem.store(x.to(ptr.dtype.element_ty))
    fence_async_shared()
    barrier()
    if count >= ROWS:
        tma_store(desc, [row, head * D], smem)
    else:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        c = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
        at = ptr + (row.to(gl.int64) * heads + head) * D
        gl.store(at + r.to(gl.int64) * (heads * D) + c, smem.load(LAYOUT), mask=r < count)


@gluon.jit
def columns(BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of scores as a sum: distances from a thread's first, which are constants, and that first, one number. So
    what is compared with bounds less the first takes neither additions nor registers.
    """
    column = gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))[None, :]
    return column & (BN - 7), column & 6


@gluon.jit
def without_hidden(
    x, t0, s0, first_key, Lk, window, below, above,
    WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of BM queries from position t0 on and BN keys from s0 on: -inf for keys before `first_key`, from Lk on,
    and if WINDOW those farther than `window`. below, above: there may be such before, and after, the others.

    The first and the last block of a window are hidden on one side each, which takes one comparison a score. Without
    a window columns are not split: dQ of one head a program would lose 3 % to moves from and to uniform registers.
    """
    at = gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))[None, :]
    own = 0
    if WINDOW:
        at, own = columns(BN, LAYOUT)
    t = t0 - s0 + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))[:, None]
    if below:
        lowest = first_key - s0
        if WINDOW:
            lowest = gl.maximum(lowest, t - window)
        x = gl.where(at >= lowest - own, x, -float("inf"))
    if above:
        highest = Lk - 1 - s0
        if WINDOW:
            highest = gl.minimum(highest, t + window)
        x = gl.where(at <= highest - own, x, -float("inf"))
    return x


@gluon.jit
def without_others(x, s0, first_key, Lk, masked, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """`without_hidden` of no window in one branch; with two, the forward at L 1024 is 0.7 % slower."""
    if masked:
        at, own = columns(BN, LAYOUT)
        x = gl.where((at >= first_key - s0 - own) & (at <= Lk - 1 - s0 - own), x, -float("inf"))
    return x
