"""Device code of generalized attention's Hopper kernels: who loads, who is awaited, and how results leave.

A program is persistent: one warp loads by TMA, two warpgroups multiply. A unit of work is a tile of 128 rows of one
head, 64 a warpgroup, which stay, and all rows of its sample on the other side, which pass by in blocks of BN. Both
warpgroups read each block from shared memory, so it crosses the L2 cache once for 128 rows, and they take turns: one's
activation runs while the other multiplies. The loader is up to a ring of NS blocks ahead, and so begins a
unit while the one before it is still at work; the latencies of launch, schedule and first loads are paid once a
program, not once a tile. Results leave by TMA, and the next tile does not wait for them.

RUN tiles of the schedule that follow one another go to one program. Where all blocks of their sample fit into the ring
they are loaded once and stay: the path of many queries over few keys.

The last block slides back to the sample's end (`_tiles`), and its first `hidden` columns count for nothing. A sample
shorter than a block is copied by the loader, with zeros below its end.

Barriers: of each slot of the ring, and of each warpgroup's half of a tile, `full` once it is loaded and `empty` once
who reads it is done. Only wgmma reads them, and is waited for: of loads to registers a barrier does not know when they
are done, and TMA would overwrite what they read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .._staged import reinterpret
from ..gemm._gluon import barrier, tma_load, tma_store

SCALARS = ["schedule_ptr", "skipped", "H", "GROUP", "XS8", "YS8"]
"""Never specialized."""


@gluon.jit
def turns_of(count, H, RUN: gl.constexpr):
    """How many units a program looks at, of `count` tiles and H heads."""
    groups = (count + RUN - 1) // RUN * H
    return (groups + gl.num_programs(0) - 1) // gl.num_programs(0) * RUN


@gluon.jit
def unit_of(schedule_ptr, skipped, turn, count, H, RUN: gl.constexpr):
    """Whether there is a unit in this turn; its head, and of its entry first, q0, Lq, k0, Lk.

    Groups of RUN entries and a head are dealt zigzag; the list begins after `skipped` rows of the schedule.
    """
    p = gl.program_id(0)
    n = gl.num_programs(0)
    deal = turn // RUN
    group = deal * n + gl.where(deal % 2 == 0, p, n - 1 - p)
    entry = group // H * RUN + turn % RUN
    at = schedule_ptr + (skipped + gl.minimum(entry, count - 1)) * 8
    return entry < count, group % H, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def copy_rows(ptr, row, count, stride8, head, smem, ROWS: gl.constexpr, D: gl.constexpr):
    """The first `count` of ROWS rows to shared memory, zeros below: boxes of 16 rows and 64 columns, which lie there
    one after another.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, 16, gl.SliceLayout(1, L))
    c = gl.arange(0, 64, gl.SliceLayout(0, L))
    base = ptr + row.to(gl.int64) * (stride8 * 8) + head * D
    boxes = reinterpret(smem, smem.dtype, [ROWS * D // 1024, 16, 64], gl.NVMMASharedLayout(128, 16, 2))
    for i in range(ROWS * D // 1024):
        own = r + i % (ROWS // 16) * 16
        at = base + gl.expand_dims(own * (stride8 * 8), 1) + gl.expand_dims(i // (ROWS // 16) * 64 + c, 0)
        boxes.index(i).store(gl.load(at, mask=gl.expand_dims(own < count, 1), other=0.0))


@gluon.jit
def load_units(
    a_desc, b_desc, x_desc, y_desc, x_ptr, y_ptr, a_smem, b_smem, x_smem, y_smem, tile_full, tile_empty, full, empty,
    schedule_ptr, skipped, count, H, GROUP, XS8, YS8,
    KEYS: gl.constexpr, TWO: gl.constexpr, NR: gl.constexpr, NS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    RUN: gl.constexpr,
):  # fmt: skip
    """The loader. Tiles of a, and of b if TWO, stay; blocks of x and y pass by. KEYS: the tiles are of keys, the blocks
    of queries.

    XS8, YS8: elements from a row of x, y to the next, over 8. GROUP: heads of queries that share one of keys.
    """
    i = 0
    tile = 0
    before_base = -1
    before_length = -1
    before_head = -1
    for turn in range(turns_of(count, H, RUN)):
        there, head, first, q0, Lq, k0, Lk = unit_of(schedule_ptr, skipped, turn, count, H, RUN)
        row, base, length, a_head, x_head = q0 + first, k0, Lk, head, head // GROUP
        if KEYS:
            row, base, length, a_head, x_head = k0 + first, q0, Lq, head // GROUP, head
        if there:
            for w in gl.static_range(2):
                t = tile % NR * 2 + w
                mbarrier.wait(tile_empty.index(t), ((tile // NR) & 1) ^ 1)
                mbarrier.expect(tile_full.index(t), 64 * D * (4 if TWO else 2))
                tma_load(a_desc, [row + w * 64, a_head * D], tile_full.index(t), a_smem.index(t))
                if TWO:
                    tma_load(b_desc, [row + w * 64, a_head * D], tile_full.index(t), b_smem.index(t))
            tile += 1
            blocks = (length + BN - 1) // BN
            if RUN > 1:
                same = (base == before_base) & (length == before_length) & (head == before_head)
                blocks = gl.where(same & (blocks <= NS), 0, blocks)
            if length >= BN:
                for block in range(blocks):
                    s = i % NS
                    start = base + min(block * BN, length - BN)
                    mbarrier.wait(empty.index(s), ((i // NS) & 1) ^ 1)
                    mbarrier.expect(full.index(s), BN * D * 4)
                    tma_load(x_desc, [start, x_head * D], full.index(s), x_smem.index(s))
                    tma_load(y_desc, [start, x_head * D], full.index(s), y_smem.index(s))
                    i += 1
            elif blocks > 0:
                s = i % NS
                mbarrier.wait(empty.index(s), ((i // NS) & 1) ^ 1)
                copy_rows(x_ptr, base, length, XS8, x_head, x_smem.index(s), BN, D)
                copy_rows(y_ptr, base, length, YS8, x_head, y_smem.index(s), BN, D)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(s), count=1)
                i += 1
        if RUN > 1:
            before_base, before_length, before_head = base, gl.where(there, length, -1), head


@gluon.jit
def pass_by(full, empty, i, blocks, NS: gl.constexpr):
    """A warpgroup whose 64 rows are not there lets the blocks go."""
    for _ in range(blocks):
        mbarrier.wait(full.index(i % NS), (i // NS) & 1)
        mbarrier.arrive(empty.index(i % NS), count=1)
        i += 1
    return i


@gluon.jit
def hide(p, hidden, L: gl.constexpr):
    """Zero the first `hidden` columns. Where there are none too: a branch would keep both outcomes in registers."""
    c = gl.arange(0, p.shape[1], gl.SliceLayout(0, L))
    return gl.where(gl.expand_dims(c >= hidden, 0), p, 0.0)


@gluon.jit
def as_operand(p, DTYPE: gl.constexpr, L: gl.constexpr):
    """Rounded, in the registers from which wgmma multiplies it."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(operand_index=0, parent=L, k_width=2))


@gluon.jit
def store_rows(desc, buffer, ptr, x, row, count, H, head, D: gl.constexpr):
    """The first `count` of 64 rows to dense (T, H, D): through shared memory, and on by TMA if all 64 are there."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tma.store_wait(0)
    barrier()
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    barrier()
    if count >= 64:
        tma_store(desc, [row, head * D], buffer)
    else:
        r = gl.arange(0, 64, gl.SliceLayout(1, L))
        c = gl.arange(0, D, gl.SliceLayout(0, L))
        at = ptr + (row.to(gl.int64) * H + head) * D + gl.expand_dims(r * (H * D), 1) + gl.expand_dims(c, 0)
        gl.store(at, buffer.load(L), mask=gl.expand_dims(r < count, 1))


@gluon.jit
def await_turn(order, turns, both, W: gl.constexpr):
    """Before warpgroup W issues the products of a step: the other has issued its own, where both have rows."""
    if both:
        mbarrier.wait(order.index(W), (turns & 1) ^ (1 - W))


@gluon.jit
def pass_turn(order, turns, both, W: gl.constexpr):
    """After it. Returns how many turns there were."""
    mbarrier.arrive(order.index(1 - W), count=1, pred=both)
    return gl.where(both, turns + 1, turns)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Of `count` slots, complete after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(count):
        mbarrier.init(made.index(k), count=arrivals)
    return made
