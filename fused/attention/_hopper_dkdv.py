"""dK and dV of jagged flash attention on Hopper, in Gluon: `jagged_backward.dkdv_kernel` without masks, tables and
shared keys.

    S^T = K Q^T    P^T = exp2(c S^T - lse)    dV = P^T dO    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)    dK = dS^T Q

One warpgroup keeps BM keys and walks over the sample's queries. Of a step, S is multiplied right behind dS^T Q of the
step before. As soon as that is done with its block the next one's copies begin, and then dP, which runs under the
exponentials as P^T dO does under dS: sooner than behind S, and with 8 registers less than S and dP beside both sums in
flight. What S takes, K, Q and lse, has a barrier apart from V, dO and delta. Of a last block that has up to half a
block of new queries, all in its second half, only that is computed. dV goes to shared memory under the last product,
and both sums of a whole tile leave by TMA.
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

from .._staged import reinterpret
from ..gemm._gluon import barrier, tma_load, tma_store
from ._hopper_tiles import some_rows
from ._tiles import anchored, block_start, read_entry, stats_row

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_queries(
    q_desc, do_desc, stats_desc, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full, i, there, head, q0, Lq, stat,
    again, H, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy the i-th block of queries, with their dO, lse and delta, if there.

    stat, again: where the sample's lse and delta begin, and those of its last BN queries. Expected before: copies that
    follow an `expect` or one another on a barrier are synchronized.
    """
    stage = i % STAGES
    start = block_start(i, Lq, BN)
    at = gl.where(start < i * BN, again, stat + start)
    tma_load(q_desc, [q0 + start, head * D], q_full.index(stage), q_smem.index(stage), pred=there)
    tma_load(do_desc, [q0 + start, head * D], do_full.index(stage), do_smem.index(stage), pred=there)
    tma_load(stats_desc, [head, at], q_full.index(stage), lse_smem.index(stage), pred=there)
    tma_load(stats_desc, [H + head, at], do_full.index(stage), delta_smem.index(stage), pred=there)


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


@gluon.jit
def store_sums(
    dk_desc, dv_desc, dk_ptr, dv_ptr, dk, dv, scale, dk_smem, dv_smem, row, count, H, head,
    BM: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The first `count` rows of both sums, dK still under way, through shared memory that nothing else uses, and on by
    TMA if all rows are there.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, BM, gl.SliceLayout(1, LINES))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, LINES))[None, :]
    at = (row.to(gl.int64) * H + head) * D + r.to(gl.int64) * (H * D) + c
    whole = count >= BM
    dv_sum = warpgroup_mma_wait(1, deps=(dv,))
    barrier()
    dv_smem.store(dv_sum.to(dv_ptr.dtype.element_ty))
    fence_async_shared()
    barrier()
    if whole:
        tma_store(dv_desc, [row, head * D], dv_smem)
    else:
        gl.store(dv_ptr + at, dv_smem.load(LINES), mask=r < count)
    dk_sum = warpgroup_mma_wait(0, deps=(dk,))
    dk_smem.store((dk_sum * scale).to(dk_ptr.dtype.element_ty))
    fence_async_shared()
    barrier()
    if whole:
        tma_store(dk_desc, [row, head * D], dk_smem)
    else:
        gl.store(dk_ptr + at, dk_smem.load(LINES), mask=r < count)


@gluon.jit(do_not_specialize=["skipped", "H", "QS8", "GS8", "TS", "LAST_AT"])
def dkdv_hopper_kernel(
    q_desc, do_desc, stats_desc, k_desc, v_desc, dk_desc, dv_desc, q_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr,
    schedule_ptr, skipped, H, QS8, GS8, TS, LAST_AT, scale, scale_log2,
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
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, sample = read_entry(schedule_ptr, skipped + rank // (H * SUB))
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(do_full.index(slot), count=1)
    fence_async_shared()
    barrier()
    first += rank % (H * SUB) // H * BM
    if first < Lk:
        head = rank % H
        k_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], v_desc.layout)
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], q_desc.layout)
        do_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], do_desc.layout)
        lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], stats_desc.layout)
        delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], stats_desc.layout)
        blocks = (Lq + BN - 1) // BN
        long = Lq >= BN
        whole = gl.where(long, (Lq + BN // 2 - 1) // BN, blocks)
        stat = stats_row(q0, sample)
        again = LAST_AT + sample * BN
        short = (Lq > 0) & (Lq < BN)
        mbarrier.expect(q_full.index(0), (BM + BN) * D * 2 + BN * 4, pred=long)
        mbarrier.expect(q_full.index(0), BM * D * 2, pred=short)
        mbarrier.expect(do_full.index(0), (BM + BN) * D * 2 + BN * 4, pred=long)
        mbarrier.expect(do_full.index(0), BM * D * 2, pred=short)
        barrier()
        tma_load(k_desc, [k0 + first, head * D], q_full.index(0), k_smem, pred=Lq > 0)
        tma_load(v_desc, [k0 + first, head * D], do_full.index(0), v_smem, pred=Lq > 0)
        load_queries(
            q_desc, do_desc, stats_desc, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full, 0, long, head, q0, Lq,
            stat, again, H, BN, D, STAGES,
        )  # fmt: skip
        if not long:
            store_queries(
                q_ptr, do_ptr, stats_ptr, q_smem.index(0), do_smem.index(0), lse_smem.index(0), delta_smem.index(0),
                head, q0, Lq, sample, H, QS8, GS8, TS, BN, D,
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
            mbarrier.expect(q_full.index((i + 1) % STAGES), BN * D * 2 + BN * 4, pred=there)
            mbarrier.expect(do_full.index((i + 1) % STAGES), BN * D * 2 + BN * 4, pred=there)
            barrier()
            load_queries(
                q_desc, do_desc, stats_desc, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full, i + 1, there, head,
                q0, Lq, stat, again, H, BN, D, STAGES,
            )  # fmt: skip
            mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
            dp = warpgroup_mma(v_smem, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            lse2 = reinterpret(lse_smem.index(stage), gl.float32, [BN], FLAT).load(COLUMN)
            x = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(x * scale_log2 - lse2[None, :])
            dv = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), WEIGHTS), do, dv_sum, is_async=True)
            delta = reinterpret(delta_smem.index(stage), gl.float32, [BN], FLAT).load(COLUMN)
            grad = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * (grad - delta[None, :])
            dk = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), q, dk_sum, is_async=True)
        first, _, again_Lq, k0, Lk, _ = read_entry(schedule_ptr, skipped + anchored(rank) // (H * SUB))  # not kept
        whole = (again_Lq + BN // 2 - 1) // BN
        first += rank % (H * SUB) // H * BM
        if (again_Lq >= BN) & ((again_Lq + BN - 1) // BN > whole):
            dk_sum, dv_sum = warpgroup_mma_wait(0, deps=(dk, dv))
            stage = whole % STAGES
            mbarrier.wait(q_full.index(stage), (whole // STAGES) & 1)
            mbarrier.wait(do_full.index(stage), (whole // STAGES) & 1)
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
            store_sums(
                dk_desc, dv_desc, dk_ptr, dv_ptr, dk, dv, scale, k_smem, v_smem, k0 + first, Lk - first, H, head, BM, D
            )  # fmt: skip
        else:
            store_sums(
                dk_desc, dv_desc, dk_ptr, dv_ptr, dk, dv, scale, k_smem, v_smem, k0 + first, Lk - first, H, head, BM, D
            )  # fmt: skip
        tma.store_wait(0)
