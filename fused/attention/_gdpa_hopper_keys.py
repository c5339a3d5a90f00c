"""Generalized attention on Hopper, tiles of keys in backward: dK and dV.

    W^T = act(scale K Q^T)          dS^T = act'(scale K Q^T) * (V dO^T)
    dV = W^T dO * dv_scale          dK = dS^T Q * dk_scale

Both sums, the scores and dP of a block of queries take 192 registers of a warpgroup's threads, so the next block's
products are issued when this block's are done. The two warpgroups take turns: while one multiplies, from W^T dO to the
next block's V dO^T, the other computes weights. Left to themselves they do both at the same time: 3 to 6 % slower on an
H200.
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
from ._pointwise import weight_and_slope
from ._tiles import anchored


@gluon.jit
def multiply_block(
    k, v, q, do, s, dp, dk, dv, hidden, order, turns, begin, end, scale,
    W: gl.constexpr, KIND: gl.constexpr, FOLD: gl.constexpr, LAST: gl.constexpr, L: gl.constexpr, LO: gl.constexpr,
):  # fmt: skip
    """Add a block of queries, whose first `hidden` rows count for nothing if it is the LAST.

    s, dp: registers. begin: a turn is under way, that of the block before; end: wait for one, for the next block.
    """
    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    turns = pass_turn(order, turns, begin, W)
    s = warpgroup_mma_wait(1, deps=(s,))
    if FOLD:
        w, slope = weight_and_slope(s, scale, KIND)
    else:
        w, slope = weight_and_slope(s * scale, 1.0, KIND)
    if LAST:
        w = hide(w, hidden, L)
    w = as_operand(w, q.dtype, LO)
    dp, slope, w = warpgroup_mma_wait(0, deps=(dp, slope, w))
    ds = dp * slope
    if LAST:
        ds = hide(ds, hidden, L)
    ds = as_operand(ds, q.dtype, LO)
    if not LAST:
        await_turn(order, turns, end, W)
    dv = warpgroup_mma(w, do, dv, is_async=True)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    return s, dp, dk, dv, turns


@gluon.jit
def multiply_units(
    k_smem, v_smem, q_smem, do_smem, tile_full, tile_empty, full, empty, order, dk_desc, dv_desc, buffer, dk_ptr,
    dv_ptr, schedule_ptr, skipped, count, H, scale, dk_scale, dv_scale,
    W: gl.constexpr, KIND: gl.constexpr, FOLD: gl.constexpr, NR: gl.constexpr, NS: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: 64 rows of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    i = 0
    tile = 0
    turns = 0
    for turn in range(turns_of(count, H, 1)):
        there, head, first, _q0, Lq, k0, Lk = unit_of(schedule_ptr, skipped, turn, count, H, 1)
        if there:
            both = first + 64 < Lk
            first += W * 64
            t = tile % NR * 2 + W
            blocks = (Lq + BN - 1) // BN
            dk = gl.zeros([64, D], gl.float32, LO)
            dv = gl.zeros([64, D], gl.float32, LO)
            mbarrier.wait(tile_full.index(t), (tile // NR) & 1)
            if first >= Lk or blocks == 0:
                mbarrier.arrive(tile_empty.index(t), count=1)
                i = pass_by(full, empty, i, blocks, NS)
            else:
                hidden = gl.where(Lq >= BN, blocks * BN - Lq, 0)
                k = k_smem.index(t)
                v = v_smem.index(t)
                s = gl.zeros([64, BN], gl.float32, L)
                dp = gl.zeros([64, BN], gl.float32, L)
                for block in range(1, blocks):
                    mbarrier.wait(full.index(i % NS), (i // NS) & 1)
                    s, dp, dk, dv, turns = multiply_block(
                        k, v, q_smem.index(i % NS), do_smem.index(i % NS), s, dp, dk, dv, 0, order, turns,
                        both & (block > 1), both, scale, W, KIND, FOLD, False, L, LO,
                    )  # fmt: skip
                    mbarrier.arrive(empty.index(i % NS), count=1)
                    i += 1
                mbarrier.wait(full.index(i % NS), (i // NS) & 1)
                s, dp, dk, dv, turns = multiply_block(
                    k, v, q_smem.index(i % NS), do_smem.index(i % NS), s, dp, dk, dv, hidden, order, turns,
                    both & (blocks > 1), both, scale, W, KIND, FOLD, True, L, LO,
                )  # fmt: skip
                mbarrier.arrive(empty.index(i % NS), count=1)
                mbarrier.arrive(tile_empty.index(t), count=1)
                i += 1
            # again, to keep no registers
            _, head, first, _q0, _Lq, k0, Lk = unit_of(schedule_ptr, skipped, anchored(turn), count, H, 1)
            first += W * 64
            if first < Lk:
                store_rows(dv_desc, buffer.index(W), dv_ptr, dv * dv_scale, k0 + first, Lk - first, H, head, D)
                store_rows(dk_desc, buffer.index(W), dk_ptr, dk * dk_scale, k0 + first, Lk - first, H, head, D)
            tile += 1
    tma.store_wait(0)


@staged_kernel(do_not_specialize=SCALARS)
def gdpa_hopper_keys_kernel(
    k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc, q_ptr, do_ptr, dk_ptr, dv_ptr, schedule_ptr, skipped, H, GROUP,
    XS8, YS8, scale, dk_scale, dv_scale,
    KIND: gl.constexpr, FOLD: gl.constexpr, NR: gl.constexpr, NS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """Of all tiles of keys dK and dV; the list begins after `skipped` rows. See `gdpa_hopper_queries_kernel`."""
    T: gl.constexpr = k_desc.dtype
    k_smem = gl.allocate_shared_memory(T, [NR * 2, 64, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(T, [NR * 2, 64, D], k_desc.layout)
    q_smem = gl.allocate_shared_memory(T, [NS, BN, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(T, [NS, BN, D], q_desc.layout)
    buffer = gl.allocate_shared_memory(T, [2, 64, D], k_desc.layout)
    tile_full = barriers(NR * 2, 1)
    tile_empty = barriers(NR * 2, 1)
    full = barriers(NS, 1)
    empty = barriers(NS, 2)
    order = barriers(2, 1)
    fence_async_shared()
    count = gl.load(schedule_ptr + 1)
    # fmt: off
    gl.warp_specialize([
        (multiply_units, (k_smem, v_smem, q_smem, do_smem, tile_full, tile_empty, full, empty, order, dk_desc, dv_desc, buffer, dk_ptr, dv_ptr, schedule_ptr, skipped, count, H, scale, dk_scale, dv_scale, 0, KIND, FOLD, NR, NS, BN, D)),  # noqa: E501
        (multiply_units, (k_smem, v_smem, q_smem, do_smem, tile_full, tile_empty, full, empty, order, dk_desc, dv_desc, buffer, dk_ptr, dv_ptr, schedule_ptr, skipped, count, H, scale, dk_scale, dv_scale, 1, KIND, FOLD, NR, NS, BN, D)),  # noqa: E501
        (load_units, (k_desc, v_desc, q_desc, do_desc, q_ptr, do_ptr, k_smem, v_smem, q_smem, do_smem, tile_full, tile_empty, full, empty, schedule_ptr, skipped, count, H, GROUP, XS8, YS8, True, True, NR, NS, BN, D, 1)),  # noqa: E501
    ], [4, 1], [REGS, LOADER_REGS])
    # fmt: on
