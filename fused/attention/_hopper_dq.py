"""dQ of jagged flash attention on Hopper, in Gluon: `jagged_backward.dq_kernel` without masks, tables and shared
keys.

    S = Q K^T    dP = dO V^T    delta = rowsum(dO * O)    dS = exp2(c S - lse) * (dP - delta)    dQ = scale * dS K

A program takes a tile of BM queries for HEADS heads in turn, one warpgroup. Q, dO, O and the first block of K and V are
all on their way before it waits for anything, delta is summed under the first S and dP, and those of the next head
come as soon as their buffers are done with, under what is left of a head. S and dP of a block are multiplied back to
back, the next block's copies begin as soon as the block before is done with, and dS K runs into the next step. Of a
last block that has up to half a block of new keys, all in its second half, only that is computed. lse and delta are
left for dK and dV as `jagged_backward.Stats` says.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..gemm._gluon import barrier, tma_load
from ._hopper_tiles import entry_of, some_rows, step_after, store_some_rows, without_hidden
from ._tiles import LOG2E, anchored, block_start, stats_row


@gluon.jit
def load_keys(keys, n, there, row, column, BN: gl.constexpr, D: gl.constexpr):
    """Begin to copy the program's n-th block of K and V, if there. keys: descriptors, buffers, barriers."""
    k_desc, v_desc, k_smem, v_smem, full = keys
    stage = n & 1
    mbarrier.expect(full.index(stage), 2 * BN * D * 2, pred=there)
    tma_load(k_desc, [row, column], full.index(stage), k_smem.index(stage), pred=there)
    tma_load(v_desc, [row, column], full.index(stage), v_smem.index(stage), pred=there)


@gluon.jit
def begin_scores(q_smem, do_smem, keys, zero, n, long):
    """Begin S and dP of the program's n-th block."""
    _, _, k_smem, v_smem, full = keys
    stage = n & 1
    mbarrier.wait(full.index(stage), (n >> 1) & 1, pred=long)
    s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(do_smem, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
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
    last_row = first + row - (Lq - LAST)
    at = stat + LAST_AT + sample * LAST + last_row
    is_last = (last_row >= 0) & (last_row < LAST)
    taken = first + row < (Lq - 1) // LAST * LAST
    gl.store(at, gl.where(taken, float("inf"), lse2), mask=is_last)
    gl.store(at + other, delta, mask=is_last)


@gluon.jit(do_not_specialize=["KS8", "VS8", "TS", "LAST_AT"])
def dq_hopper_kernel(
    q_desc, do_desc, o_desc, k_desc, v_desc, k_ptr, v_ptr, lse_ptr, stats_ptr, dq_ptr, schedule_ptr,
    KS8, VS8, TS, LAST_AT, scale, scale_log2,
    QUERIES: gl.constexpr, LAST: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, SUB: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """HEADS units a program; arguments as `jagged_backward.dq_kernel`'s. Without QUERIES, lse and delta alone."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    HALF: gl.constexpr = BN // 2
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    NARROW_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])  # a row a thread
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, sample = entry_of(schedule_ptr, 1, rank, H // HEADS, SUB, BM)
    if first < Lq:
        begin_head = rank % (H // HEADS) * HEADS
        end_head = begin_head + HEADS
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
        do_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], do_desc.layout)
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], o_desc.layout)
        k_smem = gl.allocate_shared_memory(q_desc.dtype, [2, BN, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(q_desc.dtype, [2, BN, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        do_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        o_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        mbarrier.init(do_full, count=1)
        mbarrier.init(o_full, count=1)
        mbarrier.init(full.index(0), count=1)
        mbarrier.init(full.index(1), count=1)
        fence_async_shared()
        barrier()
        blocks = gl.maximum((Lk + BN - 1) // BN, 1)
        long = (Lk >= BN) & QUERIES
        keys = k_desc, v_desc, k_smem, v_smem, full
        mbarrier.expect(do_full, BM * D * 2)
        mbarrier.expect(o_full, BM * D * 2)
        mbarrier.expect(q_full, BM * D * 2, pred=QUERIES)
        tma_load(q_desc, [q0 + first, begin_head * D], q_full, q_smem, pred=QUERIES)
        tma_load(do_desc, [q0 + first, begin_head * D], do_full, do_smem)
        tma_load(o_desc, [q0 + first, begin_head * D], o_full, o_smem)
        load_keys(keys, 0, long, k0 + block_start(0, Lk, BN), begin_head * D, BN, D)
        zero = gl.zeros([BM, BN], gl.float32, SCORES)
        none = gl.zeros([BM, HALF], gl.float32, NARROW)
        n = 0
        for turn in range(HEADS):
            head = begin_head + turn
            tile = anchored(first)
            line = gl.arange(0, BM, EACH)
            at = lse_ptr + (q0 + tile).to(gl.int64) * H + head + line * H
            lse2 = gl.load(at, mask=line < Lq - tile, other=float("inf")) * LOG2E
            mbarrier.wait(q_full, turn & 1, pred=QUERIES)
            mbarrier.wait(do_full, turn & 1)
            if QUERIES:
                if not long:
                    barrier()
                    k_smem.index(n & 1).store(some_rows(k_ptr, anchored(k0), Lk, anchored(KS8), head * D, BN, D, LINES))
                    v_smem.index(n & 1).store(some_rows(v_ptr, anchored(k0), Lk, anchored(VS8), head * D, BN, D, LINES))
                    fence_async_shared()
                    barrier()
                s, dp = begin_scores(q_smem, do_smem, keys, zero, n, long)
            mbarrier.wait(o_full, turn & 1)
            delta = gl.sum(o_smem.load(LINES).to(gl.float32) * do_smem.load(LINES).to(gl.float32), 1)
            delta = gl.convert_layout(delta, EACH)
            store_stats(stats_ptr, lse2, delta, tile, q0, Lq, sample, head, H, TS, LAST_AT, LAST, BM, EACH)
            more = head + 1 < end_head
            barrier()
            mbarrier.expect(o_full, BM * D * 2, pred=more)
            tma_load(o_desc, [q0 + tile, (head + 1) * D], o_full, o_smem, pred=more)
            if QUERIES:
                lse2 = gl.convert_layout(lse2, ROW)
                delta = gl.convert_layout(delta, ROW)
                k = k_smem.index(n & 1)
                x = warpgroup_mma_wait(1, deps=(s,))
                barrier()
                block, ahead_head = step_after(0, blocks, head)
                there = ahead_head < end_head
                load_keys(keys, n + 1, long & there, k0 + block_start(block, Lk, BN), ahead_head * D, BN, D)
                mbarrier.expect(q_full, BM * D * 2, pred=(blocks == 1) & more)
                tma_load(q_desc, [q0 + first, ahead_head * D], q_full, q_smem, pred=(blocks == 1) & more)
                x = without_hidden(x, 0, 0, 0, Lk, 0, False, Lk < BN, False, BM, BN, SCORES)
                p = gl.exp2(x * scale_log2 - lse2[:, None])
                grad = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * (grad - delta[:, None])
                dq = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
                dq = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), k, dq, is_async=True)
                for i in range(1, gl.maximum((anchored(Lk) + BN // 2 - 1) // BN, 1)):
                    n += 1
                    k = k_smem.index(n & 1)
                    s, dp = begin_scores(q_smem, do_smem, keys, zero, n, True)
                    x, so_far = warpgroup_mma_wait(1, deps=(s, dq))
                    barrier()
                    block, ahead_head = step_after(i, blocks, head)
                    there = ahead_head < end_head
                    load_keys(keys, n + 1, there, k0 + block_start(block, Lk, BN), ahead_head * D, BN, D)
                    mbarrier.expect(q_full, BM * D * 2, pred=there & (ahead_head > head))
                    tma_load(
                        q_desc, [q0 + first, ahead_head * D], q_full, q_smem, pred=there & (ahead_head > head)
                    )  # fmt: skip
                    start = block_start(i, Lk, BN)
                    x = without_hidden(x, 0, start, i * BN, Lk, 0, start < i * BN, False, False, BM, BN, SCORES)
                    p = gl.exp2(x * scale_log2 - lse2[:, None])
                    grad = warpgroup_mma_wait(0, deps=(dp,))
                    ds = p * (grad - delta[:, None])
                    dq = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), k, so_far, is_async=True)
                whole = gl.maximum((anchored(Lk) + BN // 2 - 1) // BN, 1)  # not kept
                if blocks > whole:
                    some_k = k_smem.index((n + 1) & 1).slice(HALF, HALF)
                    some_v = v_smem.index((n + 1) & 1).slice(HALF, HALF)
                    last_sum = warpgroup_mma_wait(0, deps=(dq,))
                    n += 1
                    mbarrier.wait(full.index(n & 1), (n >> 1) & 1)
                    last_s = warpgroup_mma(q_smem, some_k.permute((1, 0)), none, use_acc=False, is_async=True)
                    last_dp = warpgroup_mma(do_smem, some_v.permute((1, 0)), none, use_acc=False, is_async=True)
                    last_x = warpgroup_mma_wait(1, deps=(last_s,))
                    barrier()
                    load_keys(keys, n + 1, more, k0, (head + 1) * D, BN, D)
                    mbarrier.expect(q_full, BM * D * 2, pred=more)
                    tma_load(q_desc, [q0 + first, (head + 1) * D], q_full, q_smem, pred=more)
                    last_x = without_hidden(
                        last_x, 0, Lk - HALF, whole * BN, Lk, 0, True, False, False, BM, HALF, NARROW
                    )  # fmt: skip
                    last_p = gl.exp2(last_x * scale_log2 - gl.convert_layout(lse2, NARROW_ROW)[:, None])
                    last_grad = warpgroup_mma_wait(0, deps=(last_dp,))
                    last_ds = last_p * (last_grad - gl.convert_layout(delta, NARROW_ROW)[:, None])
                    last_ds = gl.convert_layout(last_ds.to(q_desc.dtype), WEIGHTS)
                    dq = warpgroup_mma(last_ds, some_k, last_sum, is_async=True)
            barrier()
            mbarrier.expect(do_full, BM * D * 2, pred=more)
            tma_load(do_desc, [q0 + first, (head + 1) * D], do_full, do_smem, pred=more)
            if QUERIES:
                total = warpgroup_mma_wait(0, deps=(dq,))
                tile, tile_q0, tile_Lq, _, _, _ = entry_of(schedule_ptr, 1, anchored(rank), H // HEADS, SUB, BM)
                barrier()
                store_some_rows(
                    dq_ptr, total * scale, v_smem.index(n & 1), tile_q0 + tile, tile_Lq - tile, H, head, BM, D, LINES
                )
                fence_async_shared()
                n += 1
