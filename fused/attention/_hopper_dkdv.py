"""dK and dV of jagged flash attention on Hopper, in Gluon: `jagged_backward.dkdv_kernel` without masks, tables and
shared keys.

    S^T = K Q^T    P^T = exp2(c S^T - lse)    dV = P^T dO    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)    dK = dS^T Q

One warpgroup keeps BM keys and walks over the sample's queries. Of a step, S is multiplied right behind dS^T Q of the
step before. As soon as that is done with its block the next one's copies begin, and then dP, which runs under the
exponentials as P^T dO does under dS: sooner than behind S, and with 8 registers less than S and dP beside both sums in
flight. What S takes, K and Q, has a barrier apart from V and dO. lse and delta come by a load a thread, two steps
ahead: what threads read and TMA writes would take a fence a step, and copies that share a barrier are synchronized. Of
a last block that has up to half a block of new queries, all in its second half, only that is computed. dV leaves under
the last product, and both sums of a whole tile by TMA.

A program begins and ends alone: from its schedule's entry to its first block, and under its last stores, only the other
program of the multiprocessor multiplies. So the entry is read before the barriers are made ready and is kept, and tiles
of long and of short samples are `mixed`, with entries of the list that are no tiles among the short ones. Programs are
launched under the last ones of dQ, whose end they wait for: only the schedule is read before.
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
from triton.language.extra.cuda import gdc_wait

from ..gemm._gluon import barrier, tma_load
from ._hopper_tiles import entry_of, mixed, some_rows, store_rows
from ._tiles import block_start, stats_row

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def expect(q_full, do_full, stage, there, ROWS: gl.constexpr, D: gl.constexpr):
    """So many rows for S, and as many for dP: before a barrier of the threads that their copies come after."""
    mbarrier.expect(q_full.index(stage), ROWS * D * 2, pred=there)
    mbarrier.expect(do_full.index(stage), ROWS * D * 2, pred=there)


@gluon.jit
def load_queries(
    q_desc, do_desc, q_smem, do_smem, q_full, do_full, i, there, head, q0, Lq,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy the i-th block of queries and of their dO, if there."""
    stage = i % STAGES
    row = q0 + block_start(i, Lq, BN)
    tma_load(q_desc, [row, head * D], q_full.index(stage), q_smem.index(stage), pred=there)
    tma_load(do_desc, [row, head * D], do_full.index(stage), do_smem.index(stage), pred=there)


@gluon.jit
def line_pointers(stats_ptr, H: gl.constexpr, TS, BN: gl.constexpr):
    """Where a thread finds its one of a block's BN numbers of lse and, after them, BN of delta, of head and row 0."""
    j = gl.arange(0, 2 * BN, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return stats_ptr + (j // BN * H).to(gl.int64) * TS + j % BN


@gluon.jit
def lines_of(pointers, i, Lq, head, stat, again, TS, BN: gl.constexpr):
    """A thread's number of the i-th block of queries, of the last one where there are fewer.

    stat, again: where the sample's lse and delta begin, and those of its last BN queries.
    """
    start = gl.maximum(block_start(i, Lq, BN), 0)
    at = gl.where(start < i * BN, again, stat + start)
    return gl.load(pointers + (head.to(gl.int64) * TS + at))


@gluon.jit
def store_queries(
    q_ptr, do_ptr, pointers, q_smem, do_smem, lines, head, q0, Lq, stat, QS8, GS8, TS,
    BN: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """All queries of a sample that is shorter than a block, zero below, into a stage, and their lse and delta."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    j = gl.arange(0, 2 * BN, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    there = j % BN < Lq
    x = gl.load(pointers + (head.to(gl.int64) * TS + stat), mask=there, other=0.0)
    lines.store(gl.where(there | (j >= BN), x, float("inf")))
    q_smem.store(some_rows(q_ptr, q0, Lq, QS8, head * D, BN, D, LINES))
    do_smem.store(some_rows(do_ptr, q0, Lq, GS8, head * D, BN, D, LINES))
    fence_async_shared()
    barrier()


@gluon.jit
def store_sums(
    dk_desc, dv_desc, dk_ptr, dv_ptr, dk, dv, scale, dk_smem, dv_smem, row, count, head,
    H: gl.constexpr, BM: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The first `count` rows of both sums, dK still under way, through shared memory that nothing else uses."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    dv_sum = warpgroup_mma_wait(1, deps=(dv,))
    barrier()
    store_rows(dv_desc, dv_ptr, dv_sum, dv_smem, row, count, H, head, BM, D, LINES)
    dk_sum = warpgroup_mma_wait(0, deps=(dk,))
    store_rows(dk_desc, dk_ptr, dk_sum * scale, dk_smem, row, count, H, head, BM, D, LINES)


@gluon.jit(do_not_specialize=["skipped", "pairs", "QS8", "GS8", "TS", "LAST_AT"])
def dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, q_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, schedule_ptr,
    skipped, pairs, QS8, GS8, TS, LAST_AT, scale, scale_log2,
    STAGES: gl.constexpr, H: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """A unit a program, the first 2 `pairs` of tiles `mixed`; other arguments as `jagged_backward.dkdv_kernel`'s."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    HALF: gl.constexpr = BN // 2
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    NARROW_COLUMN: gl.constexpr = gl.SliceLayout(0, NARROW)
    rank = mixed(gl.program_id(0), pairs, H * SUB)
    first, q0, Lq, k0, Lk, sample = entry_of(schedule_ptr, skipped, rank, H, SUB, BM)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], do_desc.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BN], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(do_full.index(slot), count=1)
    fence_async_shared()
    barrier()
    gdc_wait()
    if first < Lk:
        head = rank % H
        long = Lq >= BN
        some = Lq > 0
        whole = gl.where(long, (Lq + BN // 2 - 1) // BN, gl.minimum(Lq, 1))
        stat = stats_row(q0, sample)
        again = LAST_AT + sample * BN
        expect(q_full, do_full, 0, long, BM + BN, D)
        expect(q_full, do_full, 0, some & (Lq < BN), BM, D)
        barrier()
        tma_load(k_desc, [k0 + first, head * D], q_full.index(0), k_smem, pred=some)
        tma_load(v_desc, [k0 + first, head * D], do_full.index(0), v_smem, pred=some)
        load_queries(q_desc, do_desc, q_smem, do_smem, q_full, do_full, 0, long, head, q0, Lq, BN, D, STAGES)
        pointers = line_pointers(stats_ptr, H, TS, BN)
        lines.index(0).store(lines_of(pointers, 0, Lq, head, stat, again, TS, BN))
        ahead = lines_of(pointers, 1, Lq, head, stat, again, TS, BN)
        if not long:
            store_queries(
                q_ptr, do_ptr, pointers, q_smem.index(0), do_smem.index(0), lines.index(0), head, q0, Lq, stat, QS8,
                GS8, TS, BN, D,
            )  # fmt: skip
        dk = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
        dv = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
        zero = gl.zeros([BM, BN], gl.float32, SCORES)
        for i in range(whole):
            stage = i % STAGES
            mbarrier.wait(q_full.index(stage), (i // STAGES) & 1)
            q = q_smem.index(stage)
            do = do_smem.index(stage)
            s = warpgroup_mma(k_smem, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dk_sum, dv_sum = warpgroup_mma_wait(1, deps=(dk, dv))
            there = (i + 1) * BN < Lq
            expect(q_full, do_full, (i + 1) % STAGES, there, BN, D)
            lines.index((i + 1) % STAGES).store(ahead)
            barrier()
            load_queries(q_desc, do_desc, q_smem, do_smem, q_full, do_full, i + 1, there, head, q0, Lq, BN, D, STAGES)
            ahead = lines_of(pointers, i + 2, Lq, head, stat, again, TS, BN)
            mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
            dp = warpgroup_mma(v_smem, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            lse2 = lines.index(stage).slice(0, BN).load(COLUMN)  # after the wait it is 3 % slower
            x = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(x * scale_log2 - lse2[None, :])
            dv = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), WEIGHTS), do, dv_sum, is_async=True)
            delta = lines.index(stage).slice(BN, BN).load(COLUMN)
            grad = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * (grad - delta[None, :])
            dk = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), q, dk_sum, is_async=True)
        if long & ((Lq + BN - 1) // BN > whole):
            dk_sum, dv_sum = warpgroup_mma_wait(0, deps=(dk, dv))
            stage = whole % STAGES
            mbarrier.wait(q_full.index(stage), (whole // STAGES) & 1)
            mbarrier.wait(do_full.index(stage), (whole // STAGES) & 1)
            q = q_smem.index(stage).slice(HALF, HALF)
            do = do_smem.index(stage).slice(HALF, HALF)
            none = gl.zeros([BM, HALF], gl.float32, NARROW)
            s = warpgroup_mma(k_smem, q.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_smem, do.permute((1, 0)), none, use_acc=False, is_async=True)
            lse2 = lines.index(stage).slice(HALF, HALF).load(NARROW_COLUMN)
            delta = lines.index(stage).slice(BN + HALF, HALF).load(NARROW_COLUMN)
            x = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(x * scale_log2 - lse2[None, :])
            dv = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), WEIGHTS), do, dv_sum, is_async=True)
            grad = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * (grad - delta[None, :])
            dk = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), q, dk_sum, is_async=True)
            store_sums(
                dk_desc, dv_desc, dk_ptr, dv_ptr, dk, dv, scale, k_smem, v_smem, k0 + first, Lk - first, head, H, BM, D
            )  # fmt: skip
        else:
            store_sums(
                dk_desc, dv_desc, dk_ptr, dv_ptr, dk, dv, scale, k_smem, v_smem, k0 + first, Lk - first, head, H, BM, D
            )  # fmt: skip
        tma.store_wait(0)
