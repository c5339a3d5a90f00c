"""dQ of jagged flash attention on Hopper, in Gluon: `jagged_backward.dq_kernel` without masks, tables and shared
keys.

    S = Q K^T    dP = dO V^T    delta = rowsum(dO * O)    dS = exp2(c S - lse) * (dP - delta)    dQ = scale * dS K

A program, one warpgroup, takes a tile of BM queries for HEADS heads in turn. Q and dO are left operands that it keeps
in registers: a 64 x 64 product of two blocks in shared memory takes all of that memory's bandwidth, one of a block and
of registers half. What they leave free is a ring of three stages, through which come, for each head, first dO with O,
of which delta is summed, and then its blocks of K and V, always two steps ahead and across heads. S and dP of a block
are multiplied back to back, the exponentials are taken under dP, and dS K runs into the next step. Of a last block that
has up to half a block of new keys, all in its second half, only that is computed. lse and delta are left for dK and dV
as `jagged_backward.Stats` says. dQ leaves through the stage of the last block, of a whole tile by TMA where heads come
in turn: then the store is waited for before the next head's copies come there. dK and dV may be launched at once, and
wait themselves.

The assembler moves arithmetic that a product was to hide behind the wait for that product, but not across a branch; so
a wait for a barrier that completed long ago stands before some.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ..gemm._gluon import barrier, tma_load
from ._hopper_tiles import entry_of, some_rows, store_rows, store_some_rows, without_hidden
from ._tiles import LOG2E, anchored, block_start, stats_row

RING = gl.constexpr(3)
"""Stages, of two blocks each."""


@gluon.jit
def two_later(j, blocks, head):
    """Which step of which head is two after a head's j-th; -1 brings dO and O, 0 to `blocks` - 1 blocks of keys."""
    over = j + 2 >= blocks
    return gl.where(over, j + 1 - blocks, j + 2), gl.where(over, head + 1, head)


@gluon.jit
def expect_two_later(ring, n, j, blocks, head, end_head, there, BN: gl.constexpr, D: gl.constexpr):
    """That step's stage will be filled, if `there`; n: of step j, counted over the program's heads."""
    _, _, a_full, b_full = ring
    _, its_head = two_later(j, blocks, head)
    stage = (n + 2) % RING
    mbarrier.expect(a_full.index(stage), BN * D * 2, pred=there & (its_head < end_head))
    mbarrier.expect(b_full.index(stage), BN * D * 2, pred=there & (its_head < end_head))


@gluon.jit
def load_two_later(
    descs, ring, n, j, blocks, head, end_head, query, k0, Lk, BN: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Begin to copy it. descs: of dO, O, K and V. query: row of the tile's first."""
    do_desc, o_desc, k_desc, v_desc = descs
    a_smem, b_smem, a_full, b_full = ring
    its, its_head = two_later(j, blocks, head)
    stage = (n + 2) % RING
    if its_head < end_head:
        if its < 0:
            tma_load(do_desc, [query, its_head * D], a_full.index(stage), a_smem.index(stage))
            tma_load(o_desc, [query, its_head * D], b_full.index(stage), b_smem.index(stage))
        else:
            row = k0 + block_start(its, Lk, BN)
            tma_load(k_desc, [row, its_head * D], a_full.index(stage), a_smem.index(stage))
            tma_load(v_desc, [row, its_head * D], b_full.index(stage), b_smem.index(stage))


@gluon.jit
def begin_scores(q, do, k, v, ring, n, zero, there):
    """Begin S and dP with a block that is, or with its second half, in the stage of the n-th step."""
    _, _, a_full, b_full = ring
    stage = n % RING
    mbarrier.wait(a_full.index(stage), (n // RING) & 1, pred=there)
    mbarrier.wait(b_full.index(stage), (n // RING) & 1, pred=there)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def store_stats(
    stats_ptr, lse2, delta, first, q0, Lq, sample, head, H, TS, LAST_AT,
    LAST: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows of lse2 and delta, those of a sample's last LAST queries twice."""
    row = gl.arange(0, BM, LAYOUT)
    stat = stats_ptr + head.to(gl.int64) * TS
    other = H * TS.to(gl.int64)
    at = stat + stats_row(q0, sample) + first + row
    gl.store(at, lse2, mask=row < Lq - first)
    gl.store(at + other, delta, mask=row < Lq - first)
    if first + BM > Lq - LAST:
        last_row = first + row - (Lq - LAST)
        at = stat + LAST_AT + sample * LAST + last_row
        is_last = (last_row >= 0) & (last_row < LAST)
        taken = first + row < (Lq - 1) // LAST * LAST
        gl.store(at, gl.where(taken, float("inf"), lse2), mask=is_last)
        gl.store(at + other, delta, mask=is_last)


@gluon.jit(do_not_specialize=["KS8", "VS8", "TS", "LAST_AT"])
def dq_hopper_kernel(
    q_desc, do_desc, o_desc, k_desc, v_desc, dq_desc, k_ptr, v_ptr, lse_ptr, stats_ptr, dq_ptr, schedule_ptr,
    KS8, VS8, TS, LAST_AT, scale, scale_log2,
    QUERIES: gl.constexpr, LAST: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, SUB: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """HEADS units a program; arguments as `jagged_backward.dq_kernel`'s. Without QUERIES, lse and delta alone."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    KEPT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    HALF: gl.constexpr = BN // 2
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    NARROW_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    NARROW_KEPT: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, sample = entry_of(schedule_ptr, 1, rank, H // HEADS, SUB, BM)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
    a_smem = gl.allocate_shared_memory(q_desc.dtype, [RING, BN, D], k_desc.layout)
    b_smem = gl.allocate_shared_memory(q_desc.dtype, [RING, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    a_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(RING):
        mbarrier.init(a_full.index(slot), count=1)
        mbarrier.init(b_full.index(slot), count=1)
    fence_async_shared()
    barrier()
    gdc_launch_dependents()
    if first < Lq:
        begin_head = rank % (H // HEADS) * HEADS
        end_head = begin_head + HEADS
        query = q0 + first
        blocks = gl.maximum((Lk + BN - 1) // BN, 1)
        long = (Lk >= BN) & QUERIES
        descs = do_desc, o_desc, k_desc, v_desc
        ring = a_smem, b_smem, a_full, b_full
        mbarrier.expect(a_full.index(0), BM * D * 2)
        mbarrier.expect(b_full.index(0), BM * D * 2)
        mbarrier.expect(q_full, BM * D * 2, pred=QUERIES)
        tma_load(do_desc, [query, begin_head * D], a_full.index(0), a_smem.index(0))
        tma_load(o_desc, [query, begin_head * D], b_full.index(0), b_smem.index(0))
        tma_load(q_desc, [query, begin_head * D], q_full, q_smem, pred=QUERIES)
        mbarrier.expect(a_full.index(1), BN * D * 2, pred=long)
        mbarrier.expect(b_full.index(1), BN * D * 2, pred=long)
        tma_load(k_desc, [k0, begin_head * D], a_full.index(1), a_smem.index(1), pred=long)
        tma_load(v_desc, [k0, begin_head * D], b_full.index(1), b_smem.index(1), pred=long)
        own = gl.arange(0, BM, ROW)
        at = lse_ptr + query.to(gl.int64) * H + begin_head + own * H
        lse = gl.load(at, mask=own < Lq - first, other=float("inf"))
        zero = gl.zeros([BM, BN], gl.float32, SCORES)
        none = gl.zeros([BM, HALF], gl.float32, NARROW)
        n = 0
        for turn in range(HEADS):
            head = begin_head + turn
            more = head + 1 < end_head
            tile = anchored(first)
            lse2 = lse * LOG2E
            line = gl.arange(0, BM, ROW)
            at = lse_ptr + (q0 + tile).to(gl.int64) * H + head + 1 + line * H
            lse = gl.load(at, mask=(line < Lq - tile) & more, other=float("inf"))  # of the next head
            stage = n % RING
            mbarrier.wait(a_full.index(stage), (n // RING) & 1)
            do = a_smem.index(stage).load(KEPT)
            mbarrier.wait(b_full.index(stage), (n // RING) & 1)
            delta = gl.sum(b_smem.index(stage).load(KEPT).to(gl.float32) * do.to(gl.float32), 1)
            delta = gl.convert_layout(delta, ROW)
            mbarrier.wait(q_full, turn & 1, pred=QUERIES)
            q = q_smem.load(KEPT)
            mbarrier.expect(q_full, BM * D * 2, pred=more & QUERIES)
            tma.store_wait(0)
            if long:
                expect_two_later(ring, n, -1, blocks, head, end_head, True, BN, D)
                barrier()
                load_two_later(descs, ring, n, -1, blocks, head, end_head, query, k0, Lk, BN, D)
            else:  # no blocks come: what is next is the next head's dO and O
                expect_two_later(ring, n - 1, -2, 0, head, end_head, True, BN, D)
                barrier()
                load_two_later(descs, ring, n - 1, -2, 0, head, end_head, query, k0, Lk, BN, D)
            tma_load(q_desc, [query, (head + 1) * D], q_full, q_smem, pred=more & QUERIES)
            store_stats(stats_ptr, lse2, delta, tile, q0, Lq, sample, head, H, TS, LAST_AT, LAST, BM, ROW)
            n += 1
            if QUERIES:
                stage = gl.where(long, n % RING, (n + 1) % RING)
                k = a_smem.index(stage)
                v = b_smem.index(stage)
                if not long:
                    k.store(some_rows(k_ptr, anchored(k0), Lk, anchored(KS8), head * D, BN, D, LINES))
                    v.store(some_rows(v_ptr, anchored(k0), Lk, anchored(VS8), head * D, BN, D, LINES))
                    fence_async_shared()
                    barrier()
                s, dp = begin_scores(q, do, k, v, ring, n, zero, long)
                expect_two_later(ring, n, 0, blocks, head, end_head, long, BN, D)
                x = warpgroup_mma_wait(1, deps=(s,))
                barrier()
                if long:
                    load_two_later(descs, ring, n, 0, blocks, head, end_head, query, k0, Lk, BN, D)
                x = without_hidden(x, 0, 0, 0, Lk, 0, False, Lk < BN, False, BM, BN, SCORES)
                p = gl.exp2(x * scale_log2 - lse2[:, None])
                mbarrier.wait(a_full.index(stage), (n // RING) & 1, pred=long)  # p under dP
                grad = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * (grad - delta[:, None])
                dq = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
                dq = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), k, dq, is_async=True)
                for i in range(1, gl.maximum((anchored(Lk) + BN // 2 - 1) // BN, 1)):
                    n += 1
                    stage = n % RING
                    k = a_smem.index(stage)
                    s, dp = begin_scores(q, do, k, b_smem.index(stage), ring, n, zero, True)
                    expect_two_later(ring, n, i, blocks, head, end_head, True, BN, D)
                    x, so_far = warpgroup_mma_wait(1, deps=(s, dq))
                    barrier()
                    load_two_later(descs, ring, n, i, blocks, head, end_head, query, k0, Lk, BN, D)
                    start = block_start(i, Lk, BN)
                    x = without_hidden(x, 0, start, i * BN, Lk, 0, start < i * BN, False, False, BM, BN, SCORES)
                    p = gl.exp2(x * scale_log2 - lse2[:, None])
                    mbarrier.wait(a_full.index(stage), (n // RING) & 1)  # p under dP
                    grad = warpgroup_mma_wait(0, deps=(dp,))
                    ds = p * (grad - delta[:, None])
                    dq = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), k, so_far, is_async=True)
                whole = gl.maximum((anchored(Lk) + BN // 2 - 1) // BN, 1)  # not kept
                if blocks > whole:
                    last_sum = warpgroup_mma_wait(0, deps=(dq,))
                    n += 1
                    some_k = a_smem.index(n % RING).slice(HALF, HALF)
                    some_v = b_smem.index(n % RING).slice(HALF, HALF)
                    some_q = gl.convert_layout(q, NARROW_KEPT)
                    some_do = gl.convert_layout(do, NARROW_KEPT)
                    last_s, last_dp = begin_scores(some_q, some_do, some_k, some_v, ring, n, none, True)
                    expect_two_later(ring, n, whole, blocks, head, end_head, True, BN, D)
                    last_x = warpgroup_mma_wait(1, deps=(last_s,))
                    barrier()
                    load_two_later(descs, ring, n, whole, blocks, head, end_head, query, k0, Lk, BN, D)
                    last_x = without_hidden(
                        last_x, 0, Lk - HALF, whole * BN, Lk, 0, True, False, False, BM, HALF, NARROW
                    )  # fmt: skip
                    last_p = gl.exp2(last_x * scale_log2 - gl.convert_layout(lse2, NARROW_ROW)[:, None])
                    last_grad = warpgroup_mma_wait(0, deps=(last_dp,))
                    last_ds = last_p * (last_grad - gl.convert_layout(delta, NARROW_ROW)[:, None])
                    last_ds = gl.convert_layout(last_ds.to(q_desc.dtype), WEIGHTS)
                    dq = warpgroup_mma(last_ds, some_k, last_sum, is_async=True)
                total = warpgroup_mma_wait(0, deps=(dq,))
                tile, tile_q0, tile_Lq, _, _, _ = entry_of(schedule_ptr, 1, anchored(rank), H // HEADS, SUB, BM)
                barrier()
                buffer = b_smem.index(gl.where(long, n, n + 1) % RING)
                row = tile_q0 + tile
                count = tile_Lq - tile
                if HEADS > 1:
                    store_rows(dq_desc, dq_ptr, total * scale, buffer, row, count, H, head, BM, D, LINES)
                else:  # after the branch by TMA, stages would not be kept in uniform registers: 3 % slower
                    store_some_rows(dq_ptr, total * scale, buffer, row, count, H, head, BM, D, LINES)
                fence_async_shared()
                n += gl.where(long, 1, 0)
        tma.store_wait(0)
