"""dQ of jagged flash attention on Hopper, in Gluon: `jagged_backward.dq_kernel` without masks, tables and shared
keys.

    S = Q K^T    dP = dO V^T    delta = rowsum(dO * O)    dS = exp2(c S - lse) * (dP - delta)    dQ = scale * dS K

One warpgroup keeps BM queries: Q, dO, O and the first blocks of K and V are all on their way before it waits for
anything; S and dP of a block are multiplied back to back, the next block's copies begin as soon as the block before is
done with, and dS K runs into the next step. lse and delta are left for dK and dV as `jagged_backward.Stats` says.
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
from ._hopper_tiles import load_keys, some_rows, store_some_rows, without_others
from ._tiles import LOG2E, anchored, block_start, read_entry, stats_row


@gluon.jit
def store_stats(
    stats_ptr, lse2, delta, first, q0, Lq, sample, head, H, TS, LAST_AT,
    LAST: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows of lse2 and delta, those of a sample's last LAST queries twice."""
    row = gl.arange(0, BM, LAYOUT)
    stat = stats_ptr + head.to(gl.int64) * TS
    other = gl.cast(H, gl.int64) * TS
    at = stat + stats_row(q0, sample) + first + row
    gl.store(at, lse2, mask=row < Lq - first)
    gl.store(at + other, delta, mask=row < Lq - first)
    last_row = first + row - (Lq - LAST)
    at = stat + LAST_AT + sample * LAST + last_row
    is_last = (last_row >= 0) & (last_row < LAST)
    taken = first + row < (Lq - 1) // LAST * LAST
    gl.store(at, gl.where(taken, float("inf"), lse2), mask=is_last)
    gl.store(at + other, delta, mask=is_last)


@gluon.jit(do_not_specialize=["H", "KS8", "VS8", "TS", "LAST_AT"])
def dq_hopper_kernel(
    q_desc, do_desc, o_desc, k_desc, v_desc, k_ptr, v_ptr, lse_ptr, stats_ptr, dq_ptr, schedule_ptr,
    H, KS8, VS8, TS, LAST_AT, scale, scale_log2,
    QUERIES: gl.constexpr, LAST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A unit a program; arguments as `jagged_backward.dq_kernel`'s. Without QUERIES, lse and delta alone."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, sample = read_entry(schedule_ptr, 1 + rank // (H * SUB))
    first += rank % (H * SUB) // H * BM
    if first < Lq:
        head = rank % H
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
        do_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], do_desc.layout)
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], o_desc.layout)
        k_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], v_desc.layout)
        own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(own, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(own, (3 if QUERIES else 2) * BM * D * 2)
        tma_load(do_desc, [q0 + first, head * D], own, do_smem)
        tma_load(o_desc, [q0 + first, head * D], own, o_smem)
        blocks = (Lk + BN - 1) // BN
        long = Lk >= BN
        if QUERIES:
            tma_load(q_desc, [q0 + first, head * D], own, q_smem)
            for i in gl.static_range(STAGES - 1):
                there = long & (i < blocks)
                load_keys(k_desc, v_desc, k_smem, v_smem, full, i, there, k0, Lk, head, BN, D, STAGES)
            if not long:
                k_smem.index(0).store(some_rows(k_ptr, k0, Lk, KS8, head * D, BN, D, LINES))
                v_smem.index(0).store(some_rows(v_ptr, k0, Lk, VS8, head * D, BN, D, LINES))
                fence_async_shared()
                barrier()
        row = gl.arange(0, BM, LINE)
        at = lse_ptr + (q0 + first).to(gl.int64) * H + head + row * H
        lse2 = gl.load(at, mask=row < Lq - first, other=float("inf")) * LOG2E
        mbarrier.wait(own, 0)
        delta = gl.sum(o_smem.load(LINES).to(gl.float32) * do_smem.load(LINES).to(gl.float32), 1)
        store_stats(stats_ptr, lse2, delta, first, q0, Lq, sample, head, H, TS, LAST_AT, LAST, BM, LINE)
        if QUERIES:
            lse2 = gl.convert_layout(lse2, ROW)
            delta = gl.convert_layout(delta, ROW)
            dq = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
            zero = gl.zeros([BM, BN], gl.float32, SCORES)
            for i in range(blocks):
                stage = i % STAGES
                mbarrier.wait(full.index(stage), (i // STAGES) & 1, pred=long)
                k = k_smem.index(stage)
                s = warpgroup_mma(q_smem, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = warpgroup_mma(do_smem, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                x, so_far = warpgroup_mma_wait(1, deps=(s, dq))
                barrier()
                ahead = i + STAGES - 1
                there = long & (ahead < blocks)
                load_keys(k_desc, v_desc, k_smem, v_smem, full, ahead, there, k0, Lk, head, BN, D, STAGES)
                start = gl.where(long, block_start(i, Lk, BN), 0)
                x = without_others(x, start, i * BN, Lk, (start < i * BN) | (Lk < BN), BN, SCORES)
                p = gl.exp2(x * scale_log2 - lse2[:, None])
                grad = warpgroup_mma_wait(0, deps=(dp,))
                ds = p * (grad - delta[:, None])
                dq = warpgroup_mma(gl.convert_layout(ds.to(q_desc.dtype), WEIGHTS), k, so_far, is_async=True)
            total = warpgroup_mma_wait(0, deps=(dq,))
            first, q0, Lq, _, _, _ = read_entry(schedule_ptr, 1 + anchored(rank) // (H * SUB))  # not kept in registers
            first += rank % (H * SUB) // H * BM
            barrier()
            store_some_rows(dq_ptr, total * scale, q_smem, q0 + first, Lq - first, H, head, BM, D, LINES)
