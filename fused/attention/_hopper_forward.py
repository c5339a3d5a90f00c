"""Jagged flash attention's forward on Hopper, in Gluon: `jagged.forward_kernel` with the order of copies and products
spelled out.

    S_i = Q K_i^T        P_i = exp2(c S_i - max)        O = O * correction + P_i V_i

A program, one warpgroup, takes a tile of BM queries for HEADS heads in turn. A tile of a few hundred keys has a few
blocks, and its first copies and last stores take about as long as some of them; so after the copies of a head's last
block come those of the next head's first, with its Q, under what is left of the head. S of block i is issued together
with P V of block i - 1; K of block i + 1 comes as soon as S of block i is done, V of block i + 1 as soon as P V of
block i - 1 is, before the exponentials of block i are taken, which run under the products of other programs. So one
block of K and two of V are enough: with Q 64 KiB, and three programs share a multiprocessor. O leaves by way of the
block of V that the last product has read, by TMA if all rows of the tile are there; the store is waited for when the
next head's first S is done, before its second block of V comes there.

What bounds them is shared memory: with Q and K in it, S reads all the 128 bytes a cycle there are, and copies of K and
V wait. So a program that takes heads in turn keeps half of Q's columns in registers, 16 a thread, if KEEP.

Copies that are begun together have barriers of their own: the compiler would put a barrier of threads between two
that share one, and puts one between the word that a copy is coming and the copy. So that word is given while S runs.
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

from ..gemm._gluon import barrier, tma_load
from ._hopper_tiles import entry_of, some_rows, step_after, store_rows, without_hidden, without_others
from ._tiles import FAR, anchored, block_start, keys_seen

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def seen_whole(tile_t, last_t, window, WINDOW: gl.constexpr, BN: gl.constexpr):
    """From which to which start queries at positions tile_t..last_t - 1 all see all of a block of BN keys."""
    lowest = -1
    highest = FAR
    if WINDOW:
        lowest = last_t - 1 - window
        highest = tile_t + 1 + window - BN
    return lowest, highest


@gluon.jit
def exponentials(x, peak, scale_log2, GUARD: gl.constexpr):
    """`exp2(scale_log2 * x - base)`, the highest of a row so far, and base: that, or 0 where nothing was seen yet, if
    GUARD says that this may be.
    """
    highest = gl.maximum(peak, gl.max(x, 1) * scale_log2)
    base = highest
    if GUARD:
        base = gl.where(highest == -float("inf"), 0.0, highest)
    return gl.exp2(x * scale_log2 - base[:, None]), highest, base


@gluon.jit
def begin_scores(kept, q_smem, k_smem, zero, KEEP: gl.constexpr, D: gl.constexpr):
    """Begin S of a block. kept: of Q, in registers, the first half of the columns, if KEEP."""
    HALF: gl.constexpr = D // 2
    if KEEP:
        s = warpgroup_mma(kept, k_smem.slice(0, HALF, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True)
        q = q_smem.slice(HALF, HALF, dim=1)
        s = warpgroup_mma(q, k_smem.slice(HALF, HALF, dim=1).permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s


@gluon.jit
def without_unseen(
    x, block, long, tile_t, Lk, window, whole_from, whole_to,
    WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a block, -inf for what a query does not see and for what the block before has taken already."""
    start = gl.where(long, block_start(block, Lk, BN), 0)
    below = (start < block * BN) | (start < whole_from) | (not long)
    above = (start > whole_to) | (not long)
    first_key = block * BN
    if WINDOW:
        x = without_hidden(x, tile_t, start, first_key, Lk, window, below, above, True, BM, BN, LAYOUT)
    else:
        x = without_others(x, start, first_key, Lk, below | above, BN, LAYOUT)
    return x


@gluon.jit
def copy_short(
    k_ptr, v_ptr, k_smem, v_smem, k_full, v_full, k0, count, KS8, VS8, column, BN: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """All keys of a sample that is shorter than a block, and their V, zero below: by threads, and said as of a copy."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    barrier()
    k_smem.store(some_rows(k_ptr, anchored(k0), count, anchored(KS8), column, BN, D, LINES))
    v_smem.store(some_rows(v_ptr, anchored(k0), count, anchored(VS8), column, BN, D, LINES))
    fence_async_shared()
    barrier()
    mbarrier.expect(k_full, 0)
    mbarrier.expect(v_full, 0)


@gluon.jit(do_not_specialize=["KS8", "VS8", "window"])
def forward_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, k_ptr, v_ptr, out_ptr, lse_ptr, schedule_ptr, KS8, VS8, scale_log2, window,
    WINDOW: gl.constexpr, KEEP: gl.constexpr, HEADS: gl.constexpr, H: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    SUB: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """HEADS units a program; arguments as `jagged.forward_kernel`'s. KEEP: half of Q, in registers."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KEPT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    rank = gl.program_id(0)
    first, q0, Lq, k0, Lk, _ = entry_of(schedule_ptr, 1, rank, H // HEADS, SUB, BM)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [2, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full.index(0), count=1)
    mbarrier.init(v_full.index(1), count=1)
    fence_async_shared()
    barrier()
    if first < Lq:
        begin_head = rank % (H // HEADS) * HEADS
        end_head = begin_head + HEADS
        shift = Lk - Lq
        tile_t = first + shift
        last = gl.minimum(first + BM, Lq)
        lo, hi = keys_seen(first, last, shift, Lk, window, False, WINDOW)
        whole_from, whole_to = seen_whole(tile_t, last + shift, window, WINDOW, BN)
        begin = lo // BN
        some = (gl.maximum(hi, 0) + BN - 1) // BN > begin
        blocks = gl.maximum((gl.maximum(hi, 0) + BN - 1) // BN - begin, 1)
        long = (Lk >= BN) & some
        row = k0 + block_start(begin, Lk, BN)
        mbarrier.expect(q_full, BM * D * 2)
        mbarrier.expect(k_full, BN * D * 2, pred=long)
        mbarrier.expect(v_full.index(0), BN * D * 2, pred=long)
        tma_load(q_desc, [q0 + first, begin_head * D], q_full, q_smem)
        tma_load(k_desc, [row, begin_head * D], k_full, k_smem, pred=long)
        tma_load(v_desc, [row, begin_head * D], v_full.index(0), v_smem.index(0), pred=long)
        zero = gl.zeros([BM, BN], gl.float32, SCORES)
        nothing = gl.full([BM], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
        for turn in range(HEADS):
            head = begin_head + turn
            n = turn * blocks
            if not long:
                copy_short(
                    k_ptr, v_ptr, k_smem, v_smem.index(n & 1), k_full, v_full.index(n & 1), k0, gl.where(some, Lk, 0),
                    KS8, VS8, head * D, BN, D,
                )  # fmt: skip
            mbarrier.wait(q_full, turn & 1)
            kept = q_smem
            if KEEP:
                kept = q_smem.slice(0, D // 2, dim=1).load(KEPT)
            mbarrier.wait(k_full, n & 1)
            s = begin_scores(kept, q_smem, k_smem, zero, KEEP, D)
            x = warpgroup_mma_wait(0, deps=(s,))
            tma.store_wait(0)
            barrier()
            block, ahead_head = step_after(0, blocks, head)
            there = long & (ahead_head < end_head)
            more = (blocks == 1) & (ahead_head < end_head)
            row = k0 + block_start(begin + block, Lk, BN)
            mbarrier.expect(k_full, BN * D * 2, pred=there)
            mbarrier.expect(v_full.index((n + 1) & 1), BN * D * 2, pred=there)
            mbarrier.expect(q_full, BM * D * 2, pred=more)
            tma_load(k_desc, [row, ahead_head * D], k_full, k_smem, pred=there)
            tma_load(v_desc, [row, ahead_head * D], v_full.index((n + 1) & 1), v_smem.index((n + 1) & 1), pred=there)
            tma_load(q_desc, [q0 + first, ahead_head * D], q_full, q_smem, pred=more)
            x = without_unseen(
                x, begin, long, tile_t, anchored(Lk), window, whole_from, whole_to, WINDOW, BM, BN, SCORES
            )  # fmt: skip
            p, peak, base = exponentials(x, nothing, scale_log2, True)
            total = gl.sum(p, 1)
            weights = gl.convert_layout(p.to(q_desc.dtype), WEIGHTS)
            out = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, SUMS))
            for i in range(1, blocks):
                n += 1
                before = (n - 1) & 1
                mbarrier.wait(k_full, n & 1)
                s = begin_scores(kept, q_smem, k_smem, zero, KEEP, D)
                mbarrier.wait(v_full.index(before), ((n - 1) >> 1) & 1)
                out = warpgroup_mma(weights, v_smem.index(before), out, is_async=True)
                block, ahead_head = step_after(i, blocks, head)
                there = ahead_head < end_head
                more = there & (ahead_head > head)
                row = k0 + block_start(begin + block, Lk, BN)
                mbarrier.expect(k_full, BN * D * 2, pred=there)
                mbarrier.expect(v_full.index(before), BN * D * 2, pred=there)
                mbarrier.expect(q_full, BM * D * 2, pred=more)
                x = warpgroup_mma_wait(1, deps=(s,))
                barrier()
                tma_load(k_desc, [row, ahead_head * D], k_full, k_smem, pred=there)
                tma_load(q_desc, [q0 + first, ahead_head * D], q_full, q_smem, pred=more)
                x = without_unseen(
                    x, begin + i, True, tile_t, Lk, window, whole_from, whole_to, WINDOW, BM, BN, SCORES
                )  # fmt: skip
                p, highest, base = exponentials(x, peak, scale_log2, WINDOW)
                correction = gl.exp2(peak - base)
                total = total * correction + gl.sum(p, 1)
                peak = highest
                so_far = warpgroup_mma_wait(0, deps=(out,))
                barrier()
                tma_load(v_desc, [row, ahead_head * D], v_full.index(before), v_smem.index(before), pred=there)
                correction = gl.convert_layout(correction, gl.SliceLayout(1, SUMS))
                out = warpgroup_mma_init(so_far * correction[:, None])
                weights = gl.convert_layout(p.to(q_desc.dtype), WEIGHTS)
            mbarrier.wait(v_full.index(n & 1), (n >> 1) & 1)
            out = warpgroup_mma(weights, v_smem.index(n & 1), out, is_async=True)
            seen_some = (total > 0.0) | (total != total)
            lse = gl.where(seen_some, peak * LN2 + gl.log(total), float("inf"))
            share = gl.convert_layout(gl.where(seen_some, 1.0 / total, 0.0), gl.SliceLayout(1, SUMS))
            so_far = warpgroup_mma_wait(0, deps=(out,))
            tile, tile_q0, tile_Lq, _, _, _ = entry_of(schedule_ptr, 1, anchored(rank), H // HEADS, SUB, BM)
            own = gl.arange(0, BM, gl.SliceLayout(1, SCORES))
            gl.store(lse_ptr + (tile_q0 + tile).to(gl.int64) * H + head + own * H, lse, mask=own < tile_Lq - tile)
            barrier()
            store_rows(
                out_desc, out_ptr, so_far * share[:, None], v_smem.index(n & 1), tile_q0 + tile, tile_Lq - tile, H,
                head, BM, D, LINES,
            )  # fmt: skip
            fence_async_shared()
        tma.store_wait(0)
