"""The Hopper dgrad whose warpgroups multiply by the derivative of the activation before: `dact.gemm_dact`.

    grad_y = bf16(a @ b.T);  dz = bf16(grad_y * act'(z)), or of a gated pair both gradients;  MXFP8 of dz, row-wise and
    transposed, its sums over the tokens, and MXFP8 of y, transposed

A tile is 128 tokens x 128 features, so that it holds every scale whole. Two warpgroups take tiles in turn: one
multiplies while the other is busy with what follows, which takes about as long. z comes by TMA a tile ahead. y takes
its place in shared memory and then dz does; both are read from there by columns, as the memory-bound kernels do it
(`_staged`), and become transposed qdata in place. Row-wise qdata is made from registers, where a thread has a block
of 32 (`_hopper_dealt`).

SASS instructions an element: 37 for GELU and every output, 30 of these without y, 28 for SiLU, 43 for SwiGLU.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .._activation_math import act_and_slope
from .._device import inv_scale, pack, unpack
from .._staged import column_words, emit_tile
from ._gluon import barrier, tma_load
from ._hopper_dealt import (
    accumulate,
    block_amax,
    over_row,
    quantize_words,
    stage,
    store_bytes,
    words_of,
)
from ._hopper_kernel import load_operands, load_scales, unit_at

SCALARS = [
    "sa_ptr", "sb_ptr", "M", "N", "K", "MT", "a_stride", "b_stride", "steps",
]  # fmt: skip
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@gluon.jit
def load_z(z_desc, gate_desc, z, gate, ready, row, col, GATED: gl.constexpr):
    """Start the copy of a tile of z, and of the gate."""
    mbarrier.expect(ready, 128 * 128 * (4 if GATED else 2))
    tma_load(z_desc, [row, col // 2], ready, z)
    if GATED:
        tma_load(gate_desc, [row, col // 2], ready, gate)


@gluon.jit
def differentiate(g, smem, ACT: gl.constexpr, KEEP: gl.constexpr):
    """Words (64, 64) of dz from those of grad_y and of z in shared memory, where y takes the place of z if `KEEP`."""
    flat = g.reshape([64, 64])
    lo, hi = unpack(smem.load(flat.type.layout), tl.bfloat16)
    g_lo, g_hi = unpack(flat, tl.bfloat16)
    y_lo, d_lo = act_and_slope(lo, ACT)
    y_hi, d_hi = act_and_slope(hi, ACT)
    if KEEP:
        smem.store(pack(y_lo, y_hi, tl.bfloat16))
    return pack(g_lo * d_lo, g_hi * d_hi, tl.bfloat16)


@gluon.jit
def emit_rows(w, q_smem, q_desc, s_ptr, row, col, M, N, BC: gl.constexpr, E5: gl.constexpr, FLOOR: gl.constexpr):
    """Row-wise MXFP8 of words (64, 64)."""
    w = w.reshape([64, 4, 16])
    m = block_amax(w)
    if BC == 128:
        m = over_row(m)
    inv = inv_scale(m, E5, FLOOR)
    stage(q_desc, q_smem, quantize_words(w, inv, E5), row, col // 4)
    store_bytes(inv, s_ptr, row, col // 32, M, N // 32)


@gluon.jit
def sum_columns(w0, w1, w2, w3, line_ptr, col0, N):
    """`_staged.sum_columns` in the order in which 8 warps add there: 32 tokens a warp, then over the four."""
    l0, h0 = unpack(w0, tl.bfloat16)
    l1, h1 = unpack(w1, tl.bfloat16)
    l2, h2 = unpack(w2, tl.bfloat16)
    l3, h3 = unpack(w3, tl.bfloat16)
    lo = gl.sum(gl.reshape((l0 + l1) + (l2 + l3), (4, 8, 64)), axis=1)
    hi = gl.sum(gl.reshape((h0 + h1) + (h2 + h3), (4, 8, 64)), axis=1)
    lo = gl.sum(gl.sum(gl.reshape(lo, (2, 2, 64)), axis=0), axis=0)
    hi = gl.sum(gl.sum(gl.reshape(hi, (2, 2, 64)), axis=0), axis=0)
    c = col0 + 2 * gl.arange(0, 64, lo.type.layout)
    gl.store(line_ptr + c, lo, mask=c < N)
    gl.store(line_ptr + c + 1, hi, mask=c < N)


@gluon.jit
def emit_columns(
    tile, line_ptr, qt_ptr, st_ptr, row0, col, M, N, MT,
    BIAS: gl.constexpr, C_BR: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    T_ALIGN: gl.constexpr,
):  # fmt: skip
    """Sums over the tokens and transposed MXFP8 of words (128, 64) in shared memory, which are overwritten."""
    if BIAS:
        w0, w1, w2, w3 = column_words(tile)
        sum_columns(w0, w1, w2, w3, line_ptr, col, N)
    if C_BR > 0:
        emit_tile(
            tile, 0, row0, col, M, N // 8, MT, qt_ptr, st_ptr, qt_ptr, st_ptr,
            0, 0, False, False, False, C_BR, 1, C_E5, C_FLOOR, C_ALIGNED, False, T_ALIGN,
        )  # fmt: skip


@gluon.jit
def finish(
    g0, g1, z, q_smem, q_desc, partial_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr, row, col, M, N, MT,
    ACT: gl.constexpr, BIAS: gl.constexpr,
    R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr,
    C_BR: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr, T_ALIGN: gl.constexpr,
):  # fmt: skip
    """Everything after grad_y of a tile, words of twice 64 tokens. Overwrites z, words (128, 64) in shared memory."""
    d0 = differentiate(g0, z.slice(0, 64), ACT, A_BR > 0)
    if R_BC > 0:
        emit_rows(d0, q_smem, q_desc, s_ptr, row, col, M, N, R_BC, R_E5, R_FLOOR)
    d1 = differentiate(g1, z.slice(64, 64), ACT, A_BR > 0)
    if R_BC > 0:
        emit_rows(d1, q_smem, q_desc, s_ptr, row + 64, col, M, N, R_BC, R_E5, R_FLOOR)
    row0 = row.to(gl.int64)
    if A_BR > 0:
        emit_columns(
            z, partial_ptr, at_ptr, ast_ptr, row0, col, M, N, MT, False, A_BR, A_E5, A_FLOOR, C_ALIGNED, T_ALIGN
        )  # fmt: skip
    if C_BR > 0 or BIAS:
        barrier()
        z.slice(0, 64).store(d0)
        z.slice(64, 64).store(d1)
        emit_columns(
            z, partial_ptr + (row0 // 128) * N, qt_ptr, st_ptr, row0, col, M, N, MT,
            BIAS, C_BR, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN,
        )  # fmt: skip


@gluon.jit
def differentiate_gated(g, gate, up, ACT: gl.constexpr):
    """Words (64, 64) of the gradients of the gate and of up from those of grad_y; y takes the place of the gate in
    shared memory.
    """
    flat = g.reshape([64, 64])
    lo, hi = unpack(gate.load(flat.type.layout), tl.bfloat16)
    up_lo, up_hi = unpack(up.load(flat.type.layout), tl.bfloat16)
    g_lo, g_hi = unpack(flat, tl.bfloat16)
    y_lo, d_lo = act_and_slope(lo, ACT)
    y_hi, d_hi = act_and_slope(hi, ACT)
    gate.store(pack(y_lo * up_lo, y_hi * up_hi, tl.bfloat16))
    of_up = pack(g_lo * y_lo, g_hi * y_hi, tl.bfloat16)
    return pack(g_lo * up_lo * d_lo, g_hi * up_hi * d_hi, tl.bfloat16), of_up


@gluon.jit
def finish_gated(
    g0, g1, z, gate, q_smem, q_desc, gq_desc, partial_ptr, s_ptr, qt_ptr, st_ptr, gs_ptr, gqt_ptr, gst_ptr,
    at_ptr, ast_ptr, row, col, M, N, MT,
    ACT: gl.constexpr, BIAS: gl.constexpr,
    R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr,
    C_BR: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr, T_ALIGN: gl.constexpr,
):  # fmt: skip
    """`finish` of a gated pair: z is up. The gradient of up takes the place of z, y and then that of the gate that of
    the gate.
    """
    d0, u0 = differentiate_gated(g0, gate.slice(0, 64), z.slice(0, 64), ACT)
    z.slice(0, 64).store(u0)
    if R_BC > 0:
        emit_rows(u0, q_smem, q_desc, s_ptr, row, col, M, N, R_BC, R_E5, R_FLOOR)
        emit_rows(d0, q_smem, gq_desc, gs_ptr, row, col, M, N, R_BC, R_E5, R_FLOOR)
    d1, u1 = differentiate_gated(g1, gate.slice(64, 64), z.slice(64, 64), ACT)
    z.slice(64, 64).store(u1)
    if R_BC > 0:
        emit_rows(u1, q_smem, q_desc, s_ptr, row + 64, col, M, N, R_BC, R_E5, R_FLOOR)
        emit_rows(d1, q_smem, gq_desc, gs_ptr, row + 64, col, M, N, R_BC, R_E5, R_FLOOR)
    row0 = row.to(gl.int64)
    line_ptr = partial_ptr + (row0 // 128) * (2 * N)
    if A_BR > 0:
        emit_columns(
            gate, line_ptr, at_ptr, ast_ptr, row0, col, M, N, MT, False, A_BR, A_E5, A_FLOOR, C_ALIGNED, T_ALIGN
        )  # fmt: skip
    barrier()
    gate.slice(0, 64).store(d0)
    gate.slice(64, 64).store(d1)
    emit_columns(
        gate, line_ptr, gqt_ptr, gst_ptr, row0, col, M, N, MT, BIAS, C_BR, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN
    )  # fmt: skip
    emit_columns(
        z, line_ptr + N, qt_ptr, st_ptr, row0, col, M, N, MT, BIAS, C_BR, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN
    )  # fmt: skip


@gluon.jit
def consume(
    a_smem, b_smem, z_smem, q_smem, a_scale, b_scale, full, empty, ready, order, z_desc, gate_desc, q_desc, gq_desc,
    partial_ptr, s_ptr, qt_ptr, st_ptr, gs_ptr, gqt_ptr, gst_ptr, at_ptr, ast_ptr, M, N, K, MT, steps, units,
    W: gl.constexpr, NC: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr,
    C_BR: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr, T_ALIGN: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: every NC-th tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    z = z_smem.index(W)
    gate = z_smem.index(NC + W if GATED else W)
    zbar = ready.index(W)
    i = W * steps
    turn = 0
    u = gl.program_id(0) + W * gl.num_programs(0)
    if u < units:
        row, col, _, _, _ = unit_at(u, M, N, K, steps, 128, 128, GROUP)
        load_z(z_desc, gate_desc, z, gate, zbar, row, col, GATED)
    while u < units:
        row, col, _, _, _ = unit_at(u, M, N, K, steps, 128, 128, GROUP)
        mbarrier.wait(order.index(W), turn & 1 if W > 0 else (turn & 1) ^ 1)  # the first of all waits for nobody
        acc0, acc1, i = accumulate(
            a_smem, b_smem, a_scale, b_scale, full, empty, order.index((W + 1) % NC), i, K, steps,
            0, 2, 2, 1, BA, J, NS, False, True, "blocks", L,
        )  # fmt: skip
        i += steps * (NC - 1)
        u += NC * gl.num_programs(0)
        g0 = words_of(acc0, 0.0, 4, False)
        g1 = words_of(acc1, 0.0, 4, False)
        mbarrier.wait(zbar, turn & 1)
        turn += 1
        if GATED:
            finish_gated(
                g0, g1, z, gate, q_smem.index(W), q_desc, gq_desc, partial_ptr, s_ptr, qt_ptr, st_ptr, gs_ptr, gqt_ptr,
                gst_ptr, at_ptr, ast_ptr, row, col, M, N, MT,
                ACT, BIAS, R_BC, R_E5, R_FLOOR, C_BR, C_E5, C_FLOOR, C_ALIGNED, A_BR, A_E5, A_FLOOR, T_ALIGN,
            )  # fmt: skip
        else:
            finish(
                g0, g1, z, q_smem.index(W), q_desc, partial_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr, row, col, M, N,
                MT, ACT, BIAS, R_BC, R_E5, R_FLOOR, C_BR, C_E5, C_FLOOR, C_ALIGNED, A_BR, A_E5, A_FLOOR, T_ALIGN,
            )  # fmt: skip
        if u < units:
            row, col, _, _, _ = unit_at(u, M, N, K, steps, 128, 128, GROUP)
            fence_async_shared()
            barrier()
            load_z(z_desc, gate_desc, z, gate, zbar, row, col, GATED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SCALARS)
def gemm_dact_kernel(
    a_desc, b_desc, z_desc, gate_desc, q_desc, gq_desc, sa_ptr, sb_ptr, partial_ptr, s_ptr, qt_ptr, st_ptr,
    gs_ptr, gqt_ptr, gst_ptr, at_ptr, ast_ptr, M, N, K, MT, a_stride, b_stride, steps,
    NC: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr, GROUP: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr,
    C_BR: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr, T_ALIGN: gl.constexpr,
):  # fmt: skip
    """Operands, BA, J, NS as of `_hopper_kernel.gemm_kernel`; flags as of `launch.Emission`, all tiles one wide.

    Args:
        z_desc, gate_desc: (M, N) as int32 words. q_desc, s_ptr: row-wise qdata as int32 words, and scale bytes.
        partial_ptr: (ceil(M / 128), N) fp32, sums over 128 tokens; if GATED (.., 2 N), those of the gate first.
        qt_ptr, st_ptr, at_ptr, ast_ptr: transposed qdata and scales of dz and of y.
        gq_desc, gs_ptr, gqt_ptr, gst_ptr: the same of the gradient of the gate.
        MT: bytes a row of transposed qdata takes.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [NS * 2, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [NS] + b_desc.block_shape, b_desc.layout)  # noqa: RUF005
    z_smem = gl.allocate_shared_memory(gl.int32, [NC * 2 if GATED else NC, 128, 64], WORDS)
    q_smem = gl.allocate_shared_memory(gl.int32, [NC, 64, 32], WORDS)
    a_scale = gl.allocate_shared_memory(gl.float32, [NS * J * 2, 64], FLAT)
    b_scale = gl.allocate_shared_memory(gl.float32, [NS * J, 64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [NC, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [NC, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(NS):
        mbarrier.init(full.index(k), count=2)
        mbarrier.init(empty.index(k), count=1)
    for k in gl.static_range(NC):
        mbarrier.init(ready.index(k), count=1)
        mbarrier.init(order.index(k), count=1)
    fence_async_shared()
    units = ((M + 127) // 128) * ((N + 127) // 128)
    # fmt: off
    gl.warp_specialize([
        (consume, (a_smem, b_smem, z_smem, q_smem, a_scale, b_scale, full, empty, ready, order, z_desc, gate_desc, q_desc, gq_desc, partial_ptr, s_ptr, qt_ptr, st_ptr, gs_ptr, gqt_ptr, gst_ptr, at_ptr, ast_ptr, M, N, K, MT, steps, units, 0, NC, BA, J, NS, GROUP, GATED, ACT, BIAS, R_BC, R_E5, R_FLOOR, C_BR, C_E5, C_FLOOR, C_ALIGNED, A_BR, A_E5, A_FLOOR, T_ALIGN)),  # noqa: E501
        (consume, (a_smem, b_smem, z_smem, q_smem, a_scale, b_scale, full, empty, ready, order, z_desc, gate_desc, q_desc, gq_desc, partial_ptr, s_ptr, qt_ptr, st_ptr, gs_ptr, gqt_ptr, gst_ptr, at_ptr, ast_ptr, M, N, K, MT, steps, units, 1, NC, BA, J, NS, GROUP, GATED, ACT, BIAS, R_BC, R_E5, R_FLOOR, C_BR, C_E5, C_FLOOR, C_ALIGNED, A_BR, A_E5, A_FLOOR, T_ALIGN)),  # noqa: E501
        (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, 128, 128, NS, GROUP)),
        (load_scales, (sa_ptr, sb_ptr, partial_ptr, a_scale, b_scale, a_scale, full, empty, M, N, K, a_stride, b_stride, steps, units, 128, 128, BA, J, NS, GROUP, False)),  # noqa: E501
    ], [4, 1, 2], [REGS, LOADER_REGS, LOADER_REGS])
    # fmt: on
