"""Jagged flash attention's forward on Hopper, in Gluon: `jagged.forward_kernel` with the order of copies and products
spelled out.

    S_i = Q K_i^T        P_i = exp2(c S_i - max)        O = O * correction + P_i V_i

One warpgroup keeps BM queries. Everything that a program reads first is under way before it waits for anything: Q and
the first STAGES - 1 blocks of K and V by TMA. S of block i is issued together with P V of block i - 1, which runs
while the exponentials of block i are taken. Triton's own pipeline has neither: it waits for a copy outside of a loop
at once and begins the next block's copies at the end of a step. On short histories, of a few blocks each, that is a
third of the time.
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
from ._hopper_tiles import some_rows, store_some_rows, without_hidden
from ._tiles import all_visible, anchored, block_start, keys_seen, read_entry

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def load_keys(
    k_desc, v_desc, k_smem, v_smem, full, i, there, begin, k0, Lk, head,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy the i-th of the blocks from `begin` on, if there."""
    stage = i % STAGES
    row = k0 + block_start(begin + i, Lk, BN)
    mbarrier.expect(full.index(stage), 2 * BN * D * 2, pred=there)
    tma_load(k_desc, [row, head * D], full.index(stage), k_smem.index(stage), pred=there)
    tma_load(v_desc, [row, head * D], full.index(stage), v_smem.index(stage), pred=there)


@gluon.jit
def masked_block(
    first, last, start, first_key, Lk, shift, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr
):  # fmt: skip
    """Whether queries first..last-1 are hidden some of the keys from `start` on."""
    masked = (start < first_key) | (Lk < BN)
    if CAUSAL or WINDOW:
        masked = masked | (not all_visible(first, last, start, start + BN, shift, window, CAUSAL, WINDOW))
    return masked


@gluon.jit
def exponentials(x, peak, scale_log2, GUARD: gl.constexpr):
    """`exp2(scale_log2 * x - highest)`, and the highest, at least peak. GUARD: a row may have seen nothing yet."""
    highest = gl.maximum(peak, gl.max(x, 1) * scale_log2)
    base = highest
    if GUARD:
        base = gl.where(highest == -float("inf"), 0.0, highest)
    return gl.exp2(x * scale_log2 - base[:, None]), highest, base


@gluon.jit(do_not_specialize=["H", "GROUP", "KS8", "VS8", "window"])
def forward_hopper_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, out_ptr, lse_ptr, schedule_ptr, H, GROUP, KS8, VS8, scale_log2, window,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A unit a program; arguments as `jagged.forward_kernel`'s."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, 1 + rank // (H * SUB))
    first += rank % (H * SUB) // H * BM
    if first < Lq:
        head = rank % H
        shared = head // GROUP
        q_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
        k_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], k_desc.layout)
        v_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BN, D], v_desc.layout)
        own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(own, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        barrier()
        shift = Lk - Lq
        last = gl.minimum(first + BM, Lq)
        lo, hi = keys_seen(first, last, shift, Lk, window, CAUSAL, WINDOW)
        begin = lo // BN
        blocks = gl.maximum((gl.maximum(hi, 0) + BN - 1) // BN - begin, 0)
        long = Lk >= BN
        mbarrier.expect(own, BM * D * 2)
        tma_load(q_desc, [q0 + first, head * D], own, q_smem)
        for i in gl.static_range(STAGES - 1):
            there = long & (i < blocks)
            load_keys(k_desc, v_desc, k_smem, v_smem, full, i, there, begin, k0, Lk, shared, BN, D, STAGES)
        if (not long) | (blocks == 0):
            count = gl.where(blocks == 0, 0, Lk)
            k_smem.index(0).store(some_rows(k_ptr, k0, count, KS8, shared * D, BN, D, LINES))
            v_smem.index(0).store(some_rows(v_ptr, k0, count, VS8, shared * D, BN, D, LINES))
            fence_async_shared()
            barrier()
        zero = gl.zeros([BM, BN], gl.float32, SCORES)
        mbarrier.wait(own, 0)
        mbarrier.wait(full.index(0), 0, pred=long & (blocks > 0))
        s = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        there = long & (blocks >= STAGES)
        load_keys(k_desc, v_desc, k_smem, v_smem, full, STAGES - 1, there, begin, k0, Lk, shared, BN, D, STAGES)
        x = warpgroup_mma_wait(0, deps=(s,))
        start = gl.where(long, block_start(begin, Lk, BN), 0)
        masked = masked_block(first, last, start, begin * BN, Lk, shift, window, CAUSAL, WINDOW, BN)
        x = without_hidden(
            x, first + shift, start, begin * BN, Lk, window, masked | (blocks == 0), CAUSAL, WINDOW, BM, BN, SCORES
        )  # fmt: skip
        nothing = gl.full([BM], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
        p, peak, _ = exponentials(x, nothing, scale_log2, True)
        total = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(q_desc.dtype), WEIGHTS)
        out = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
        for i in range(1, blocks):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            out = warpgroup_mma(weights, v_smem.index((i - 1) % STAGES), out, is_async=True)
            x = warpgroup_mma_wait(1, deps=(s,))
            block = begin + i
            start = block_start(block, Lk, BN)
            masked = masked_block(first, last, start, block * BN, Lk, shift, window, CAUSAL, WINDOW, BN)
            x = without_hidden(
                x, first + shift, start, block * BN, Lk, window, masked, CAUSAL, WINDOW, BM, BN, SCORES
            )  # fmt: skip
            p, highest, base = exponentials(x, peak, scale_log2, CAUSAL or WINDOW)
            correction = gl.exp2(peak - base)
            total = total * correction + gl.sum(p, 1)
            peak = highest
            so_far = warpgroup_mma_wait(0, deps=(out,))
            barrier()
            ahead = i + STAGES - 1
            load_keys(k_desc, v_desc, k_smem, v_smem, full, ahead, ahead < blocks, begin, k0, Lk, shared, BN, D, STAGES)
            correction = gl.convert_layout(correction, gl.SliceLayout(1, SUMS))
            out = warpgroup_mma_init(so_far * correction[:, None])
            weights = gl.convert_layout(p.to(q_desc.dtype), WEIGHTS)
        out = warpgroup_mma(weights, v_smem.index(gl.maximum(blocks - 1, 0) % STAGES), out, is_async=True)
        some = (total > 0.0) | (total != total)
        lse = gl.where(some, peak * LN2 + gl.log(total), float("inf"))
        share = gl.convert_layout(gl.where(some, 1.0 / total, 0.0), gl.SliceLayout(1, SUMS))
        so_far = warpgroup_mma_wait(0, deps=(out,))
        first, q0, Lq, _, _, _ = read_entry(schedule_ptr, 1 + anchored(rank) // (H * SUB))  # not kept in registers
        first += rank % (H * SUB) // H * BM
        row = gl.arange(0, BM, gl.SliceLayout(1, SCORES))
        gl.store(lse_ptr + (q0 + first).to(gl.int64) * H + head + row * H, lse, mask=row < Lq - first)
        barrier()
        store_some_rows(out_ptr, so_far * share[:, None], q_smem, q0 + first, Lq - first, H, head, BM, D, LINES)
