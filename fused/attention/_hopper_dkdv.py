"""dK and dV of jagged flash attention on Hopper, in Gluon: `jagged_backward.dkdv_kernel` without masks, tables and
shared keys.

    S^T = K Q^T    P^T = exp2(c S^T - lse)    dV = P^T dO    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)    dK = dS^T Q

One warpgroup keeps BM keys and walks over the sample's queries. S and dP of a block are multiplied back to back, P^T dO
runs while dS is made and dS^T Q into the next step, and the next block's copies, of Q, dO, lse and delta, begin as soon
as the block before is done with. Of a last block that has up to half a block of new queries, all in its second half,
only that is computed.
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

from .._staged import reinterpret
from ..gemm._gluon import barrier, tma_load
from ._hopper_tiles import some_rows, store_some_rows
from ._tiles import anchored, block_start, read_entry, stats_row

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_queries(
    q_desc, do_desc, stats_desc, q_smem, do_smem, lse_smem, delta_smem, full, i, there, head, q0, Lq, stat, again,
    H, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy the i-th block of queries, with their dO, lse and delta, if there.

    stat, again: where the sample's lse and delta begin, and those of its last BN queries.
    """
    stage = i % STAGES
    start = block_start(i, Lq, BN)
    at = gl.where(start < i * BN, again, stat + start)
    mbarrier.expect(full.index(stage), 2 * BN * D * 2 + 2 * BN * 4, pred=there)
    tma_load(q_desc, [q0 + start, head * D], full.index(stage), q_smem.index(stage), pred=there)
    tma_load(stats_desc, [head, at], full.index(stage), lse_smem.index(stage), pred=there)
    tma_load(stats_desc, [H + head, at], full.index(stage), delta_smem.index(stage), pred=there)
    tma_load(do_desc, [q0 + start, head * D], full.index(stage), do_smem.index(stage), pred=there)


@gluon.jit
def store_queries(
    q_ptr, do_ptr, stats_ptr, q_smem, do_smem, lse_smem, delta_smem, head, q0, Lq, sample, H, QS8, GS8, TS,
    BN: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """All queries of a sample that is shorter than a block, zero below, into a stage."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, BN, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    stat = stats_ptr + head.to(gl.int64) * TS + stats_row(q0, sample) + i
    lse2 = gl.load(stat, mask=i < Lq, other=float("inf"))
    delta = gl.load(stat + gl.cast(H, gl.int64) * TS, mask=i < Lq, other=0.0)
    q_smem.store(some_rows(q_ptr, q0, Lq, QS8, head * D, BN, D, LINES))
    do_smem.store(some_rows(do_ptr, q0, Lq, GS8, head * D, BN, D, LINES))
    reinterpret(lse_smem, gl.float32, [BN], FLAT).store(lse2)
    reinterpret(delta_smem, gl.float32, [BN], FLAT).store(delta)
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["skipped", "H", "QS8", "GS8", "TS", "LAST_AT"])
def dkdv_hopper_kernel(
    q_desc, do_desc, stats_desc, k_desc, v_desc, q_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, schedule_ptr,
    skipped, H, QS8, GS8, TS, LAST_AT, scale, scale_log2,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """A unit a program; arguments as `jagged_backward.dkdv_kernel`'s."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    HALF: gl.constexpr = BN // 2
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    NARROW_COLUMN: gl.constexpr = gl.SliceLayout(0, NARROW)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, sample = read_entry(schedule_ptr, skipped + rank // (H * SUB))
    first += rank % (H * SUB) // H * BM
    if first < Lk:
        head = rank % H
        k_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], v_desc.layout)
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], q_desc.layout)
        do_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], do_desc.layout)
        lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], stats_desc.layout)
        delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], stats_desc.layout)
        own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(own, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        barrier()
        blocks = (Lq + BN - 1) // BN
        long = Lq >= BN
        whole = gl.where(long, (Lq + BN // 2 - 1) // BN, blocks)
        stat = stats_row(q0, sample)
        again = LAST_AT + sample * BN
        mbarrier.expect(own, 2 * BM * D * 2)
        tma_load(k_desc, [k0 + first, head * D], own, k_smem)
        tma_load(v_desc, [k0 + first, head * D], own, v_smem)
        for i in gl.static_range(STAGES - 1):
            load_queries(
                q_desc, do_desc, stats_desc, q_smem, do_smem, lse_smem, delta_smem, full, i, long & (i < blocks), head,
                q0, Lq, stat, again, H, BN, D, STAGES,
            )  # fmt: skip
        if not long:
            store_queries(
                q_ptr, do_ptr, stats_ptr, q_smem.index(0), do_smem.index(0), lse_smem.index(0), delta_smem.index(0),
                head, q0, Lq, sample, H, QS8, GS8, TS, BN, D,
            )  # fmt: skip
        dk = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
        dv = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
        zero = gl.zeros([BM, BN], gl.float32, SCORES)
        mbarrier.wait(own, 0)
        for i in range(whole):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1, pred=long)
            q = q_smem.index(stage)
            do = do_smem.index(stage)
            s = warpgroup_mma(k_smem, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_smem, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            lse2 = reinterpret(lse_smem.index(stage), gl.float32, [BN], FLAT).load(COLUMN)
            x, dk_sum, dv_sum = warpgroup_mma_wait(1, deps=(s, dk, dv))
            barrier()
            load_queries(
                q_desc, do_desc, stats_desc, q_smem, do_smem, lse_smem, delta_smem, full, i + STAGES - 1,
                long & ((i + STAGES - 1) * BN < Lq), head, q0, Lq, stat, again, H, BN, D, STAGES,
            )  # fmt: skip
            p = gl.exp2(x * scale_log2 - lse2[None, :])
            dv = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), WEIGHTS), do, dv_sum, is_async=True)
            delta = reinterpret(delta_smem.index(stage), gl.float32, [BN], FLAT).load(COLUMN)
            grad = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * (grad - delta[None, :])
            dk = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), q, dk_sum, is_async=True)
        dk_sum, dv_sum = warpgroup_mma_wait(0, deps=(dk, dv))
        first, _, again_Lq, k0, Lk, _ = read_entry(schedule_ptr, skipped + anchored(rank) // (H * SUB))  # not kept
        whole = (again_Lq + BN // 2 - 1) // BN
        if (again_Lq >= BN) & ((again_Lq + BN - 1) // BN > whole):
            stage = whole % STAGES
            mbarrier.wait(full.index(stage), (whole // STAGES) & 1)
            q = q_smem.index(stage).slice(HALF, HALF)
            do = do_smem.index(stage).slice(HALF, HALF)
            none = gl.zeros([BM, HALF], gl.float32, NARROW)
            s = warpgroup_mma(k_smem, q.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_smem, do.permute((1, 0)), none, use_acc=False, is_async=True)
            lse2 = reinterpret(lse_smem.index(stage), gl.float32, [BN], FLAT).slice(HALF, HALF).load(NARROW_COLUMN)
            delta = reinterpret(delta_smem.index(stage), gl.float32, [BN], FLAT).slice(HALF, HALF).load(NARROW_COLUMN)
            x = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(x * scale_log2 - lse2[None, :])
            dv = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), WEIGHTS), do, dv_sum, is_async=True)
            grad = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * (grad - delta[None, :])
            dk = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), q, dk_sum, is_async=True)
            dk_sum, dv_sum = warpgroup_mma_wait(0, deps=(dk, dv))
        first += rank % (H * SUB) // H * BM
        barrier()
        store_some_rows(dv_ptr, dv_sum, v_smem, k0 + first, Lk - first, H, head, BM, D, LINES)
        store_some_rows(dk_ptr, dk_sum * scale, k_smem, k0 + first, Lk - first, H, head, BM, D, LINES)
