"""The Hopper GEMM that does what follows the sum: `epilogue.gemm_epilogue`.

    z = bf16(a @ b.T + bias);  y = bf16(act(z)) or bf16(act(gate) * z);  y = bf16(y + residual);  MXFP8 of y, row-wise

Warpgroups that share operands run in step: their products are done at the same time, then all promote. What one does
at the end of its tile all do, and the tensor cores wait. So there a warpgroup only parks z in shared memory, from where
TMA stores it. It finishes z in pieces of 16 rows during its next tile, each piece between the start of a product and
the wait for it. A piece takes few registers, which are what is short beside sum and product.

A thread has 8 neighboring elements of a row twice, so that 8 threads have a row of 128: its amax takes three exchanges,
and qdata leaves in whole sectors. Rows of b of a pair are interleaved in groups of 32; TMA puts the groups of gate
among 128 columns before those of up (`hopper_epilogue.gate_first`), so that each is a panel of 64 columns of its own.

SASS instructions an element of y, beside 10 for the sum over K = 1024 and 3 at the end of a tile: GELU 18, of which
GELU itself 10; SiLU and ReLU 13; SwiGLU 14.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._activation_math import act
from .._device import fp8_quad, inv_scale, pack, scale_byte, unpack
from .._staged import halves_max, mul_bf16x2, reinterpret
from ._gluon import barrier, tma_store
from ._hopper_dealt import larger_magnitude
from ._hopper_kernel import load_operands, load_scales, promote, unit_at

SCALARS = [
    "sa_ptr", "sb_ptr", "bias_ptr", "s_ptr", "M", "N", "K", "a_stride", "b_stride", "residual_stride", "steps",
]  # fmt: skip
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@gluon.jit
def block_amax(w, BLOCKS: gl.constexpr):
    """Bits of the largest magnitudes (16, BLOCKS) of words (16, 32) of bf16."""
    m = gl.reduce(w.reshape([16, BLOCKS, 32 // BLOCKS]), 2, larger_magnitude)
    return halves_max(m & 0x7FFF7FFF)


@gluon.jit
def quantize_words(w, inv, E5: gl.constexpr):
    """Words (16, 32) by bits of inverse scales (16, n) to qdata, 8 elements an int64 (16, 8)."""
    BLOCKS: gl.constexpr = inv.shape[1]
    even, odd = gl.split(w.reshape([16, BLOCKS, 16 // BLOCKS, 2]))
    f = (inv & -0x10000) | ((inv >> 16) & 0xFFFF)
    f = gl.expand_dims(gl.convert_layout(f, gl.SliceLayout(2, even.type.layout), assert_trivial=True), 2)
    a, b = unpack(mul_bf16x2(even, f), tl.bfloat16)
    c, d = unpack(mul_bf16x2(odd, f), tl.bfloat16)
    lo, hi = gl.split(fp8_quad(a, b, c, d, E5).reshape([16, 8, 2]))
    return (lo.to(gl.int64) & 0xFFFFFFFF) | (hi.to(gl.int64) << 32)


@gluon.jit
def place(like, row, col, M, width, stride):
    """Offsets of elements (16, n) from (row, col) on in a matrix with rows `stride` apart, and which are inside."""
    r = row + gl.arange(0, 16, gl.SliceLayout(1, like.type.layout))
    c = col + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
    inside = gl.expand_dims(r < M, 1) & gl.expand_dims(c < width, 0)
    return gl.expand_dims(r.to(gl.int64) * stride, 1) + gl.expand_dims(c, 0), inside


@gluon.jit
def store_qdata(w, inv, q_ptr, row, col, M, N, E5: gl.constexpr):
    q = quantize_words(w, inv, E5)
    at, inside = place(q, row, col // 8, M, N // 8, N // 8)
    gl.store(q_ptr + at, q, mask=inside)


@gluon.jit
def store_scales(inv, s_ptr, row, col, M, N):
    """Scale bytes of rows, (16, n)."""
    byte = scale_byte(inv).to(gl.uint8)
    at, inside = place(byte, row, col // 32, M, N // 32, N // 32)
    gl.store(s_ptr + at, byte, mask=inside)


@gluon.jit
def store_row_scales(inv, s_ptr, row, col, M, N):
    """The four bytes that rows of 128 have in common, (16,): one for each of the first threads of a row."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    byte = gl.convert_layout(scale_byte(inv).to(gl.uint8), gl.SliceLayout(1, L), assert_trivial=True)
    byte = gl.expand_dims(byte, 1).broadcast_to((16, 8))
    at, inside = place(byte, row, col // 32, M, gl.minimum(N // 32, col // 32 + 4), N // 32)
    gl.store(s_ptr + at, byte, mask=inside)


@gluon.jit
def emit(
    w0, w1, q_ptr, s_ptr, row, col, M, N,
    HALVES: gl.constexpr, Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """MXFP8 of words (16, 32) of y, once or twice."""
    if Q_BC == 128:
        m = gl.max(block_amax(larger_magnitude(w0, w1), 1), axis=1)
        inv = inv_scale(m, Q_E5, Q_FLOOR)
        store_qdata(w0, gl.expand_dims(inv, 1), q_ptr, row, col, M, N, Q_E5)
        store_qdata(w1, gl.expand_dims(inv, 1), q_ptr, row, col + 64, M, N, Q_E5)
        store_row_scales(inv, s_ptr, row, col, M, N)
    else:
        inv = inv_scale(block_amax(w0, 2), Q_E5, Q_FLOOR)
        store_qdata(w0, inv, q_ptr, row, col, M, N, Q_E5)
        store_scales(inv, s_ptr, row, col, M, N)
        if HALVES == 2:
            inv = inv_scale(block_amax(w1, 2), Q_E5, Q_FLOOR)
            store_qdata(w1, inv, q_ptr, row, col + 64, M, N, Q_E5)
            store_scales(inv, s_ptr, row, col + 64, M, N)


@gluon.jit
def load_y(
    parked, at, other, residual_ptr, y_ptr, row, col, M, N, residual_stride,
    GATED: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr,
):  # fmt: skip
    """Words (16, 32) of y from those of z, or of gate and up, in two places of shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    w = parked.index(at).load(L)
    if GATED:
        lo, hi = unpack(w, tl.bfloat16)
        up_lo, up_hi = unpack(parked.index(other).load(L), tl.bfloat16)
        w = pack(act(lo, ACT) * up_lo, act(hi, ACT) * up_hi, tl.bfloat16)
    elif ACT != "":
        lo, hi = unpack(w, tl.bfloat16)
        w = pack(act(lo, ACT), act(hi, ACT), tl.bfloat16)
    if RESIDUAL:
        # "A multiple of 4 words" makes 16-byte loads, and below 16-byte stores.
        there, inside = place(w, row, col // 2, M, N // 2, (residual_stride // 8) * 4)
        lo, hi = unpack(w, tl.bfloat16)
        more_lo, more_hi = unpack(gl.load(residual_ptr + there, mask=inside, other=0), tl.bfloat16)
        w = pack(lo + more_lo, hi + more_hi, tl.bfloat16)
    if EMIT_HIGH:
        there, inside = place(w, row, col // 2, M, N // 2, (N // 8) * 4)
        gl.store(y_ptr + there, w, mask=inside)
    return w


@gluon.jit
def finish_piece(
    parked, first, n, residual_ptr, y_ptr, q_ptr, s_ptr, row, col, M, N, residual_stride,
    NB: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """Piece n, 16 rows, of z of a tile whose first row and feature are given.

    z lies from `first` on in units (16, 32) of words, four to a panel of 64 rows and 64 columns: of every 64 rows the
    two halves of the columns, or of every 128 columns gate and up.
    """
    at = first + n // 4 * 8 + n % 4
    row += 16 * n
    if GATED:
        w0 = load_y(
            parked, at, at + 4, residual_ptr, y_ptr, row, col, M, N, residual_stride,
            True, ACT, RESIDUAL, EMIT_HIGH,
        )  # fmt: skip
        w1 = w0
        if NB == 2:
            w1 = load_y(
                parked, at + 8, at + 12, residual_ptr, y_ptr, row, col + 64, M, N, residual_stride,
                True, ACT, RESIDUAL, EMIT_HIGH,
            )  # fmt: skip
    else:
        w0 = load_y(
            parked, at, at, residual_ptr, y_ptr, row, col, M, N, residual_stride,
            False, ACT, RESIDUAL, EMIT_HIGH,
        )  # fmt: skip
        w1 = load_y(
            parked, at + 4, at, residual_ptr, y_ptr, row, col + 64, M, N, residual_stride,
            False, ACT, RESIDUAL, EMIT_HIGH,
        )  # fmt: skip
    if Q_BC > 0:
        emit(w0, w1, q_ptr, s_ptr, row, col, M, N, NB if GATED else 2, Q_BC, Q_E5, Q_FLOOR)


@gluon.jit
def gate_first(x, GATED: gl.constexpr):
    """Values of 128 rows of b in the order in which TMA puts the rows of a pair into shared memory."""
    if GATED:
        x = gl.permute(x.reshape([2, 2, x.shape[0] // 4]), (1, 0, 2)).reshape([x.shape[0]])
    return x


@gluon.jit
def park(buffer, acc, bias, first: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, L: gl.constexpr):
    """z, bf16 (64, 128), to shared memory."""
    z = gl.convert_layout(acc.reshape([64, 128]), L)
    if BIAS:
        added = gate_first(bias.slice(first, 128, 0).load(gl.SliceLayout(0, L)), GATED)
        z += gl.expand_dims(gl.convert_layout(added, gl.SliceLayout(0, L), assert_trivial=True), 0)
    buffer.store(z.to(gl.bfloat16))


@gluon.jit
def store_z(buffer, z_desc, gate_desc, row, col, GATED: gl.constexpr):
    if GATED:
        panels = reinterpret(buffer, gl.bfloat16, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
        tma_store(gate_desc, [row, col], panels.index(0))
        tma_store(z_desc, [row, col], panels.index(1))
    else:
        tma_store(z_desc, [row, col], buffer)


@gluon.jit
def consume(
    a_smem, b_smem, z_smem, a_scale, b_scale, bias, full, empty, z_desc, gate_desc, residual_ptr, y_ptr, q_ptr, s_ptr,
    M, N, residual_stride, steps, units,
    W: gl.constexpr, NC: gl.constexpr, MW: gl.constexpr, NB: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, GROUP: gl.constexpr, PERIOD: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr, EMIT_SUM: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: MW times 64 rows of every tile.

    What a step needs is waited for under the last product of the step before. `K < 0` of `_hopper_kernel.multiply` is
    `steps < 0` here.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    BM: gl.constexpr = NC * MW * 64
    BN: gl.constexpr = NB * 128
    COLS: gl.constexpr = 2 if BA == 1 else BA
    KJ: gl.constexpr = 128 // J
    PARTS: gl.constexpr = MW * NB  # products of a chunk: of two times 64 rows, or of two times 128 columns
    PIECES: gl.constexpr = 4 * MW
    FIRST: gl.constexpr = W * PARTS
    SHIFT: gl.constexpr = W * PERIOD // NC  # warpgroups finish their pieces by turns
    parked = reinterpret(z_smem, gl.int32, [NC * PARTS * 8, 16, 32], gl.NVMMASharedLayout(128, 32, 2))
    features = N // 2 if GATED else N
    piece = PIECES
    z_row = 0
    z_col = 0
    s = 0
    last = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, _, _, _ = unit_at(u, M, N, 0, steps, BM, BN, GROUP)
        p = gl.zeros([64, 128], gl.float32, L)  # anew for each tile: the end of one has a use for the registers
        acc0 = gl.zeros([64, 128], gl.float32, L).reshape([64, 128 // COLS, COLS])
        acc1 = acc0
        SA: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, acc0.type.layout))
        SB: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, acc0.type.layout))
        for kt in range(steps):
            after = tl.where(s == NS - 1, 0, s + 1)
            phase = tl.where(s == NS - 1, phase ^ 1, phase)
            for j in gl.static_range(J):
                for part in gl.static_range(PARTS):
                    a = a_smem.index((s * NC + W) * MW + part % MW).slice(j * KJ, KJ, 1)
                    b = b_smem.index(s * NB + part // MW).reshape([128, 128]).slice(j * KJ, KJ, 1)
                    p = warpgroup_mma(a, b.permute((1, 0)), p, use_acc=steps < 0, is_async=True)
                    sa = a_scale.index(((s * J + j) * NC + W) * MW + part % MW).load(SA)
                    sb = b_scale.index(s * J + j).slice(part // MW * (128 // COLS), 128 // COLS, 0).load(SB)
                    sb = gl.convert_layout(gate_first(sb, GATED), SB, assert_trivial=True)
                    product = (kt * J + j) * PARTS + part
                    if (piece < PIECES) & ((product + SHIFT) % PERIOD == 0):
                        finish_piece(
                            parked, FIRST * 8, piece, residual_ptr, y_ptr, q_ptr, s_ptr, z_row, z_col, M, features,
                            residual_stride, NB, GATED, ACT, RESIDUAL, EMIT_HIGH, Q_BC, Q_E5, Q_FLOOR,
                        )  # fmt: skip
                        piece += 1
                    if j * PARTS + part == J * PARTS - 1:
                        more = (kt + 1 < steps) | (u + gl.num_programs(0) < units)
                        mbarrier.wait(full.index(after), phase, pred=more)
                    p, sa, sb = warpgroup_mma_wait(0, deps=(p, sa, sb))
                    if part == 0:
                        acc0, p = warpgroup_mma_wait(0, deps=(promote(acc0, p, sa, sb, BA, ""), p))
                    else:
                        acc1, p = warpgroup_mma_wait(0, deps=(promote(acc1, p, sa, sb, BA, ""), p))
            if BIAS:  # lies beside the last step's operands
                mbarrier.arrive(empty.index(s), count=1, pred=kt + 1 < steps)
            else:
                mbarrier.arrive(empty.index(s), count=1)
            last = s
            s = after
        while piece < PIECES:
            finish_piece(
                parked, FIRST * 8, piece, residual_ptr, y_ptr, q_ptr, s_ptr, z_row, z_col, M, features,
                residual_stride, NB, GATED, ACT, RESIDUAL, EMIT_HIGH, Q_BC, Q_E5, Q_FLOOR,
            )  # fmt: skip
            piece += 1
        tma.store_wait(0)
        barrier()
        park(z_smem.index(FIRST), acc0, bias.index(last), 0, GATED, BIAS, L)
        if PARTS == 2:
            park(z_smem.index(FIRST + 1), acc1, bias.index(last), 128 * (NB - 1), GATED, BIAS, L)
        if BIAS:
            mbarrier.arrive(empty.index(last), count=1)
        fence_async_shared()
        barrier()
        piece = 0
        z_row = row + W * MW * 64
        z_col = col // 2 if GATED else col
        if EMIT_SUM:
            store_z(z_smem.index(FIRST), z_desc, gate_desc, z_row, z_col, GATED)
            if PARTS == 2:
                store_z(
                    z_smem.index(FIRST + 1), z_desc, gate_desc, z_row + 64 * (MW - 1), z_col + 64 * (NB - 1), GATED
                )  # fmt: skip
    while piece < PIECES:
        finish_piece(
            parked, FIRST * 8, piece, residual_ptr, y_ptr, q_ptr, s_ptr, z_row, z_col, M, features, residual_stride,
            NB, GATED, ACT, RESIDUAL, EMIT_HIGH, Q_BC, Q_E5, Q_FLOOR,
        )  # fmt: skip
        piece += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SCALARS)
def gemm_epilogue_kernel(
    a_desc, b_desc, z_desc, gate_desc, sa_ptr, sb_ptr, bias_ptr, residual_ptr, y_ptr, q_ptr, s_ptr,
    M, N, K, a_stride, b_stride, residual_stride, steps,
    NC: gl.constexpr, MW: gl.constexpr, NB: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr,
    GROUP: gl.constexpr, PERIOD: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr, EMIT_SUM: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """Operands, NC, MW, BA, J, NS as of `_hopper_kernel.gemm_kernel`; N counts rows of b.

    Args:
        z_desc, gate_desc: bf16 outputs, in boxes of 64 rows and 128 features, or of a pair 64 features.
        residual_ptr, y_ptr: bf16 as int32 words. q_ptr: qdata, 8 bytes an int64. s_ptr: (M, features / 32) bytes.
        steps: of 128 in K, at least 1.
        NB: 128 columns a tile holds; 2, with MW = 1, where a scale spans 128 features of gate and up.
        PERIOD: a piece follows every PERIOD-th product of a warpgroup.
        ACT: "" for none. Q_BC: 0 for no MXFP8.
    """
    BM: gl.constexpr = NC * MW * 64
    BN: gl.constexpr = 128 * NB
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [NS * NC * MW, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [NS * NB] + b_desc.block_shape, b_desc.layout)  # noqa: RUF005
    z_smem = gl.allocate_shared_memory(gl.bfloat16, [NC * MW * NB, 64, 128], gl.NVMMASharedLayout(128, 16, 2))
    a_scale = gl.allocate_shared_memory(gl.float32, [NS * J * NC * MW, 64], FLAT)
    b_scale = gl.allocate_shared_memory(gl.float32, [NS * J, 64], FLAT)
    bias = gl.allocate_shared_memory(gl.float32, [NS if BIAS else 1, BN], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(NS):
        mbarrier.init(full.index(k), count=2)
        mbarrier.init(empty.index(k), count=NC)
    fence_async_shared()
    units = ((M + BM - 1) // BM) * ((N + BN - 1) // BN)
    # fmt: off
    if NC == 2:
        gl.warp_specialize([
            (consume, (a_smem, b_smem, z_smem, a_scale, b_scale, bias, full, empty, z_desc, gate_desc, residual_ptr, y_ptr, q_ptr, s_ptr, M, N, residual_stride, steps, units, 0, NC, MW, NB, BA, J, NS, GROUP, PERIOD, GATED, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (consume, (a_smem, b_smem, z_smem, a_scale, b_scale, bias, full, empty, z_desc, gate_desc, residual_ptr, y_ptr, q_ptr, s_ptr, M, N, residual_stride, steps, units, 1, NC, MW, NB, BA, J, NS, GROUP, PERIOD, GATED, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_scales, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 1, 2], [REGS, LOADER_REGS, LOADER_REGS])
    else:
        gl.warp_specialize([
            (consume, (a_smem, b_smem, z_smem, a_scale, b_scale, bias, full, empty, z_desc, gate_desc, residual_ptr, y_ptr, q_ptr, s_ptr, M, N, residual_stride, steps, units, 0, NC, MW, NB, BA, J, NS, GROUP, PERIOD, GATED, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (consume, (a_smem, b_smem, z_smem, a_scale, b_scale, bias, full, empty, z_desc, gate_desc, residual_ptr, y_ptr, q_ptr, s_ptr, M, N, residual_stride, steps, units, 1, NC, MW, NB, BA, J, NS, GROUP, PERIOD, GATED, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (consume, (a_smem, b_smem, z_smem, a_scale, b_scale, bias, full, empty, z_desc, gate_desc, residual_ptr, y_ptr, q_ptr, s_ptr, M, N, residual_stride, steps, units, 2, NC, MW, NB, BA, J, NS, GROUP, PERIOD, GATED, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_scales, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 4, 1, 2], [REGS, REGS, LOADER_REGS, LOADER_REGS])
    # fmt: on
