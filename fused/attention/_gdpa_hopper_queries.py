"""Generalized attention on Hopper, tiles of queries: O, or in backward dQ.

    O  = act(scale Q K^T) V * out_scale                    dQ = (act'(scale Q K^T) * (dO V^T)) K * out_scale

The weights of a block of keys are computed while the tensor cores add up the one before it, of either warpgroup. A tile
of 128 queries reads Q, and dO, once, K and V once from the L2 cache, and once in RUN tiles where they fit the ring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._staged import staged_kernel
from ._gdpa_hopper import (
    SCALARS,
    as_operand,
    await_turn,
    barriers,
    hide,
    load_units,
    pass_by,
    pass_turn,
    store_rows,
    turns_of,
    unit_of,
)
from ._pointwise import weight, weight_and_slope


@gluon.jit
def products(q, do, k, v, SLOPE: gl.constexpr, L: gl.constexpr):
    """Q K^T, and dO V^T if SLOPE, on their way."""
    N: gl.constexpr = k.shape[0]
    s = gl.zeros([64, N], gl.float32, L)
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    dp = s
    if SLOPE:
        dp = gl.zeros([64, N], gl.float32, L)
        dp = warpgroup_mma(do, v.permute((1, 0)), dp, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def factors(s, dp, scale, KIND: gl.constexpr, FOLD: gl.constexpr, SLOPE: gl.constexpr):
    """What multiplies V, or dS, which multiplies K."""
    if not FOLD:
        s = s * scale
        scale = 1.0
    if SLOPE:
        _, slope = weight_and_slope(s, scale, KIND)
        p = dp * slope
    else:
        p = weight(s, scale, KIND)
    return p


@gluon.jit
def step(
    q, do, k, v, w, before, acc, order, turns, both, next_full, parity, more, scale,
    W: gl.constexpr, KIND: gl.constexpr, FOLD: gl.constexpr, SLOPE: gl.constexpr,
):  # fmt: skip
    """Factors of a block of keys, beside the product of the block before it: of w and its rows `before`. If there are
    `more` blocks the next one is awaited too.
    """
    N: gl.constexpr = k.shape[0]
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    await_turn(order, turns, both, W)
    s, dp = products(q, do, k, v, SLOPE, L)
    acc = warpgroup_mma(w, before, acc, is_async=True)
    turns = pass_turn(order, turns, both, W)
    if SLOPE:
        s, dp = warpgroup_mma_wait(1, deps=(s, dp))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
        dp = s
    p = factors(s, dp, scale, KIND, FOLD, SLOPE)
    # The wait for acc stands behind a branch, or the assembler would move it ahead of the factors.
    if more:
        mbarrier.wait(next_full, parity)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    return p, acc, turns


@gluon.jit
def multiply_units(
    q_smem, do_smem, k_smem, v_smem, tile_full, tile_empty, full, empty, order, out_desc, buffer, out_ptr, schedule_ptr,
    skipped, count, H, scale, out_scale,
    W: gl.constexpr, KIND: gl.constexpr, FOLD: gl.constexpr, SLOPE: gl.constexpr, NR: gl.constexpr, NS: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: 64 rows of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    values = k_smem if SLOPE else v_smem
    i = 0
    tile = 0
    turns = 0
    there, head, first, q0, Lq, k0, Lk = unit_of(schedule_ptr, skipped, 0, count, H, RUN)
    for turn in range(turns_of(count, H, RUN)):
        next_there, next_head, next_first, next_q0, next_Lq, next_k0, next_Lk = unit_of(
            schedule_ptr, skipped, turn + 1, count, H, RUN
        )
        if there:
            both = first + 64 < Lq
            first += W * 64
            t = tile % NR * 2 + W
            blocks = (Lk + BN - 1) // BN
            keep = first < 0
            if RUN > 1:
                keep = next_there & (next_k0 == k0) & (next_Lk == Lk) & (next_head == head) & (blocks <= NS)
            began = i
            acc = gl.zeros([64, D], gl.float32, LO)
            mbarrier.wait(tile_full.index(t), (tile // NR) & 1)
            if first >= Lq or blocks == 0:
                mbarrier.arrive(tile_empty.index(t), count=1)
                i = pass_by(full, empty, i, gl.where(keep, 0, blocks), NS)
            else:
                hidden = gl.where(Lk >= BN, blocks * BN - Lk, 0)
                q = q_smem.index(t)
                do = do_smem.index(t)
                mbarrier.wait(full.index(i % NS), (i // NS) & 1)
                s, dp = products(q, do, k_smem.index(i % NS), v_smem.index(i % NS), SLOPE, L)
                if SLOPE:
                    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
                else:
                    s = warpgroup_mma_wait(0, deps=(s,))
                    dp = s
                p = factors(s, dp, scale, KIND, FOLD, SLOPE)
                if blocks > 1:
                    mbarrier.wait(full.index((i + 1) % NS), ((i + 1) // NS) & 1)
                for block in range(1, blocks):
                    w = as_operand(p, k_smem.dtype, LO)
                    i += 1
                    p, acc, turns = step(
                        q, do, k_smem.index(i % NS), v_smem.index(i % NS), w, values.index((i + NS - 1) % NS), acc,
                        order, turns, both, full.index((i + 1) % NS), ((i + 1) // NS) & 1, block + 1 < blocks, scale,
                        W, KIND, FOLD, SLOPE,
                    )  # fmt: skip
                    mbarrier.arrive(empty.index((i + NS - 1) % NS), count=1, pred=not keep)
                mbarrier.arrive(tile_empty.index(t), count=1)
                w = as_operand(hide(p, hidden, L), k_smem.dtype, LO)
                acc = warpgroup_mma(w, values.index(i % NS), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(i % NS), count=1, pred=not keep)
                i += 1
            if RUN > 1:
                i = gl.where(keep, began, i)
            if first < Lq:
                store_rows(out_desc, buffer.index(W), out_ptr, acc * out_scale, q0 + first, Lq - first, H, head, D)
            tile += 1
        there, head, first, q0, Lq, k0, Lk = next_there, next_head, next_first, next_q0, next_Lq, next_k0, next_Lk
    tma.store_wait(0)


@staged_kernel(do_not_specialize=SCALARS)
def gdpa_hopper_queries_kernel(
    q_desc, do_desc, k_desc, v_desc, out_desc, k_ptr, v_ptr, out_ptr, schedule_ptr, skipped, H, GROUP, XS8, YS8, scale,
    out_scale,
    KIND: gl.constexpr, FOLD: gl.constexpr, SLOPE: gl.constexpr, NR: gl.constexpr, NS: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, RUN: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """O of all tiles of queries, or dQ if SLOPE.

    Args:
        q_desc, do_desc, k_desc, v_desc, out_desc: (T, heads * D), of queries in boxes of 64 rows, of keys of BN.
        k_ptr, v_ptr, out_ptr: the same tensors. XS8, YS8: elements from a row of k, v to the next, over 8.
        GROUP: heads of q that share one of k. FOLD: scale > 0 goes into the activation, and comes back in out_scale.
        NR: tiles that fit in shared memory; NS: blocks. RUN: tiles in a row for one program.
        REGS, LOADER_REGS: registers a thread of the second warpgroup and of the loader; the first has what they leave.
    """
    T: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(T, [NR * 2, 64, D], q_desc.layout)
    do_smem = q_smem
    if SLOPE:
        do_smem = gl.allocate_shared_memory(T, [NR * 2, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(T, [NS, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(T, [NS, BN, D], k_desc.layout)
    buffer = gl.allocate_shared_memory(T, [2, 64, D], q_desc.layout)
    tile_full = barriers(NR * 2, 1)
    tile_empty = barriers(NR * 2, 1)
    full = barriers(NS, 1)
    empty = barriers(NS, 2)
    order = barriers(2, 1)
    fence_async_shared()
    count = gl.load(schedule_ptr)
    # fmt: off
    gl.warp_specialize([
        (multiply_units, (q_smem, do_smem, k_smem, v_smem, tile_full, tile_empty, full, empty, order, out_desc, buffer, out_ptr, schedule_ptr, skipped, count, H, scale, out_scale, 0, KIND, FOLD, SLOPE, NR, NS, BN, D, RUN)),  # noqa: E501
        (multiply_units, (q_smem, do_smem, k_smem, v_smem, tile_full, tile_empty, full, empty, order, out_desc, buffer, out_ptr, schedule_ptr, skipped, count, H, scale, out_scale, 1, KIND, FOLD, SLOPE, NR, NS, BN, D, RUN)),  # noqa: E501
        (load_units, (q_desc, do_desc, k_desc, v_desc, k_ptr, v_ptr, q_smem, do_smem, k_smem, v_smem, tile_full, tile_empty, full, empty, schedule_ptr, skipped, count, H, GROUP, XS8, YS8, False, SLOPE, NR, NS, BN, D, RUN)),  # noqa: E501
    ], [4, 1], [REGS, LOADER_REGS])
    # fmt: on
