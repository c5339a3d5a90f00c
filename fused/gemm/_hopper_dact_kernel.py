"""The Hopper dgrad that multiplies by the derivative of the activation before: `dact.gemm_dact`.

    grad_y = bf16(a @ b.T);  dz = bf16(grad_y * act'(z));  MXFP8 of dz, row-wise and transposed, its sums over the
    tokens, and MXFP8 of y, transposed

A tile is 128 tokens x 128 features, so that it holds every scale whole. Two warpgroups multiply 64 tokens each, take
the derivative in registers and leave dz in shared memory, and y in the place of z, which TMA brings there a tile ahead.
Eight more warps meanwhile turn the tile before into MXFP8, by the functions and in the order of the kernel that does it
from memory (`_activation_staged`).

All of that is straight-line code run once a tile, and four or five warps a scheduler hide little of its latency: with
GELU a tile issues 7970 instructions on every scheduler at 0.54 a cycle (H200). Two warpgroups that took tiles in turn
and did everything themselves, in 5400 instructions each that the instruction cache does not hold, took 1.7 times as
long.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .._activation_math import act_and_slope
from .._activation_staged import emit_gradient
from .._device import pack, unpack
from .._staged import emit_tile
from ._gluon import barrier, tma_load
from ._hopper_kernel import load_operands, load_scales, multiply, unit_at

SCALARS = [
    "sa_ptr", "sb_ptr", "M", "N", "K", "MT", "a_stride", "b_stride", "steps",
]  # fmt: skip
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@gluon.jit
def accumulate(
    a_smem, b_smem, a_scale, b_scale, full, empty, i, K, steps,
    W: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """The sum (64, 128) over all of K of warpgroup W, and the step after the last."""
    COLS: gl.constexpr = 2 if BA == 1 else BA
    acc = gl.zeros([64, 128], gl.float32, L).reshape([64, 128 // COLS, COLS])
    p = gl.zeros([64, 128], gl.float32, L)
    for _ in range(steps):
        s = i % NS
        mbarrier.wait(full.index(s), (i // NS) & 1)
        a = a_smem.index(s * 2 + W)
        b = b_smem.index(s)
        for j in gl.static_range(J):
            acc, p = multiply(acc, p, K < 0, a, b, a_scale, b_scale, s * J + j, W, j, J, BA, 2, "", 0)
        mbarrier.arrive(empty.index(s), count=1)
        i += 1
    return acc.reshape([64, 128]), i


@gluon.jit
def differentiate(w, zs, gs, KIND: gl.constexpr, KEEP: gl.constexpr):
    """Words (64, 32) of dz from those of grad_y and of z to gs, and if KEEP y to the place of z."""
    g_lo, g_hi = unpack(w, tl.bfloat16)
    lo, hi = unpack(zs.load(w.type.layout), tl.bfloat16)
    y_lo, d_lo = act_and_slope(lo, KIND)
    y_hi, d_hi = act_and_slope(hi, KIND)
    if KEEP:
        zs.store(pack(y_lo, y_hi, tl.bfloat16))
    gs.store(pack(g_lo * d_lo, g_hi * d_hi, tl.bfloat16))


@gluon.jit
def differentiate_rows(acc, zs, gs, KIND: gl.constexpr, KEEP: gl.constexpr):
    """`differentiate` of sums (64, 128), in halves, which need fewer registers at a time."""
    lo, hi = gl.split(acc.reshape([64, 64, 2]))
    w0, w1 = gl.split(gl.permute(pack(lo, hi, tl.bfloat16).reshape([64, 2, 32]), (0, 2, 1)))
    differentiate(w0, zs.slice(0, 32, 1), gs.slice(0, 32, 1), KIND, KEEP)
    differentiate(w1, zs.slice(32, 32, 1), gs.slice(32, 32, 1), KIND, KEEP)


@gluon.jit
def consume(
    a_smem, b_smem, z_smem, g_smem, a_scale, b_scale, full, empty, ready, g_full, g_empty, K, steps, units,
    W: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr, NG: gl.constexpr,
    KIND: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: 64 tokens of every tile, to the next of NG places in shared memory."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    zs = z_smem.slice(W * 64, 64)
    i = 0
    t = 0
    u = gl.program_id(0)
    while u < units:
        acc, i = accumulate(a_smem, b_smem, a_scale, b_scale, full, empty, i, K, steps, W, BA, J, NS, L)
        mbarrier.wait(g_empty.index(t % NG), ((t // NG) & 1) ^ 1)
        mbarrier.wait(ready, t & 1)
        differentiate_rows(acc, zs, g_smem.index(t % NG).slice(W * 64, 64), KIND, KEEP)
        barrier()
        mbarrier.arrive(g_full.index(t % NG), count=1)
        u += gl.num_programs(0)
        t += 1


@gluon.jit
def load_z(desc, smem, ready, row, col, wanted):
    """Start the copy of a tile of z into shared memory that is done with."""
    fence_async_shared()
    barrier()
    if wanted:
        mbarrier.expect(ready, 128 * 128 * 2)
        tma_load(desc, [row, col // 2], ready, smem)


@gluon.jit
def emit(
    ys, gs, z_desc, ready, line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr,
    row, col, next_row, next_col, more, M, N, MT, BIAS: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_BC: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr,
):  # fmt: skip
    """What goes to memory of a tile whose y and dz are words (128, 64) in shared memory, which are overwritten. As soon
    as y is out, the next z may come, if there are more.
    """
    row0 = row.to(gl.int64)
    N8 = N // 8
    if A_BR > 0:
        emit_tile(
            ys, 0, row0, col, M, N8, MT, qt_ptr, st_ptr, at_ptr, ast_ptr,
            0, 0, False, False, R_ALIGNED, A_BR, A_BC, A_E5, A_FLOOR, C_ALIGNED, False,
        )  # fmt: skip
    load_z(z_desc, ys, ready, next_row, next_col, more)
    emit_gradient(
        gs, line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, row0, col, col, M, N8, N8, MT, BIAS,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, False,
    )  # fmt: skip


@gluon.jit
def emit_tiles(
    z_smem, g_smem, ready, g_full, g_empty, z_desc, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr,
    M, N, K, MT, steps, units, NG: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_BC: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr,
):  # fmt: skip
    """`emit` of every tile."""
    t = 0
    u = gl.program_id(0)
    row, col, _, _, _ = unit_at(u, M, N, K, steps, 128, 128, GROUP)
    load_z(z_desc, z_smem, ready, row, col, True)
    while u < units:
        u += gl.num_programs(0)
        next_row, next_col, _, _, _ = unit_at(min(u, units - 1), M, N, K, steps, 128, 128, GROUP)
        line_ptr = partial_ptr + (row // 128).to(gl.int64) * N
        mbarrier.wait(g_full.index(t % NG), (t // NG) & 1)
        emit(
            z_smem, g_smem.index(t % NG), z_desc, ready, line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr,
            row, col, next_row, next_col, u < units, M, N, MT,
            BIAS, R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, A_BR, A_BC, A_E5, A_FLOOR,
        )  # fmt: skip
        barrier()
        mbarrier.arrive(g_empty.index(t % NG), count=1)
        row = next_row
        col = next_col
        t += 1


@gluon.jit(do_not_specialize=SCALARS)
def gemm_dact_kernel(
    a_desc, b_desc, z_desc, sa_ptr, sb_ptr, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr,
    M, N, K, MT, a_stride, b_stride, steps,
    BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr, NG: gl.constexpr, GROUP: gl.constexpr,
    REGS: gl.constexpr, EMIT_REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
    KIND: gl.constexpr, BIAS: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_BC: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr,
):  # fmt: skip
    """Operands, BA, J, NS as of `_hopper_kernel.gemm_kernel`; flags as of `launch.Emission`.

    Args:
        z_desc: (M, N) as int32 words. partial_ptr: (ceil(M / 128), N) fp32, sums over 128 tokens.
        q_ptr, s_ptr, qt_ptr, st_ptr: MXFP8 of dz, qdata as int32 words.
        at_ptr, ast_ptr: transposed MXFP8 of y.
        MT: bytes a row of transposed qdata takes, a multiple of 16.
        NG: tiles of dz in flight.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [NS * 2, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [NS, 128, 128], b_desc.layout)
    z_smem = gl.allocate_shared_memory(gl.int32, [128, 64], WORDS)
    g_smem = gl.allocate_shared_memory(gl.int32, [NG, 128, 64], WORDS)
    a_scale = gl.allocate_shared_memory(gl.float32, [NS * J * 2, 64], FLAT)
    b_scale = gl.allocate_shared_memory(gl.float32, [NS * J, 64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [NG, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [NG, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(NS):
        mbarrier.init(full.index(k), count=2)
        mbarrier.init(empty.index(k), count=2)
    mbarrier.init(ready, count=1)
    for k in gl.static_range(NG):
        mbarrier.init(g_full.index(k), count=2)
        mbarrier.init(g_empty.index(k), count=1)
    fence_async_shared()
    units = ((M + 127) // 128) * ((N + 127) // 128)
    # fmt: off
    gl.warp_specialize([
        (consume, (a_smem, b_smem, z_smem, g_smem, a_scale, b_scale, full, empty, ready, g_full, g_empty, K, steps, units, 0, BA, J, NS, NG, KIND, A_BR > 0)),  # noqa: E501
        (consume, (a_smem, b_smem, z_smem, g_smem, a_scale, b_scale, full, empty, ready, g_full, g_empty, K, steps, units, 1, BA, J, NS, NG, KIND, A_BR > 0)),  # noqa: E501
        (emit_tiles, (z_smem, g_smem, ready, g_full, g_empty, z_desc, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr, M, N, K, MT, steps, units, NG, GROUP, BIAS, R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, A_BR, A_BC, A_E5, A_FLOOR)),  # noqa: E501
        (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, 128, 128, NS, GROUP)),
        (load_scales, (sa_ptr, sb_ptr, partial_ptr, a_scale, b_scale, a_scale, full, empty, M, N, K, a_stride, b_stride, steps, units, 128, 128, BA, J, NS, GROUP, False)),  # noqa: E501
    ], [4, 8, 1, 2], [REGS, EMIT_REGS, LOADER_REGS, LOADER_REGS])
    # fmt: on
