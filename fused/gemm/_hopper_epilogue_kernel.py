"""The Hopper GEMM whose warpgroups do what follows the sum before they store it: `epilogue.gemm_epilogue`.

    z = bf16(a @ b.T + bias);  y = bf16(act(z)) or bf16(act(gate) * z);  y = bf16(y + residual);  MXFP8 of y, row-wise

Columns are dealt to threads (`_hopper_dealt`), in blocks or, of a gated pair,

    pairs:  thread t has features 16 t .. 16 t + 15 of gate and of up, of b interleaved in groups of 32 rows

z goes to shared memory and out by TMA while the activation is computed; y and qdata follow through the same buffer.
Warpgroups run up to a ring of stages apart, so one's epilogue can overlap the others' products.

Products hide little of it. Cycles of an H200's multiprocessor for 64 x 128 of y with GELU, over K = 1024; loops touch
no memory but shared, and three warpgroups run them, each a copy of the code of its own or all the same code:

                                               own code      same code
    loop: products                             2047
    loop: products, promotion                  2082          2050
    loop: bias, GELU, MXFP8                    2208          1305
    loop: everything                           3700          3397
    loop: products, promotion, BF16            2186
    the GEMM that stores BF16                  2877, at 1.54 GHz
    this kernel, z not stored                  4793, at 1.77 GHz

`warp_specialize` gives every warpgroup its own code. Two copies of 16 KB run at full rate (1306), three do not: of 7.8
cycles between two instructions of a warp of this kernel, 1.6 are waits for instructions, against 0.1 of 8.5 in the GEMM
alone. With the same code, too, the epilogue adds to products and promotion, whether warpgroups start together or apart;
with their own, 3677 where only one at a time may be in it. Beside two warpgroups that multiply without promotion, at
2058, an epilogue takes 4611 cycles, alone 1397. So loops need 1.55 times the cycles of those that store BF16, and time
differs by less only because the clock is lower where tensor cores are busier.

Other designs, with the same bits. All of K = 1024 of 128 rows of b in shared memory, and warpgroups that fetch rows of
a for themselves and wait for no other: 3998 cycles, 8 % of them waits for operands, 1.24 to 1.30 times the GEMM's time;
4513 with stores from registers in place of TMA, and 4631 with one epilogue at a time besides. Pieces of 16 rows between
the start and the end of the next tile's products: 6 % longer than this kernel, relative to the GEMM; SwiGLU 11 %.

SASS instructions an element of y, beside 9 that promote a sum over K = 1024: bias and GELU 18, of which GELU 10; SiLU
and ReLU 13; SwiGLU 14.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .._activation_math import act
from .._device import inv_scale, pack, unpack
from ._hopper_dealt import block_amax, over_row, quantize_words, stage, store_bytes, words_of
from ._hopper_kernel import in_order, load_operands, load_scales, multiply, unit_at

SCALARS = [
    "sa_ptr", "sb_ptr", "bias_ptr", "residual_ptr", "s_ptr", "M", "N", "K", "a_stride", "b_stride", "residual_stride",
    "steps",
]  # fmt: skip
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@gluon.jit
def accumulate(
    a_smem, b_smem, a_scale, b_scale, full, empty, i, K, steps,
    OWN: gl.constexpr, MT: gl.constexpr, MW: gl.constexpr, NB: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, HOLD: gl.constexpr, DEAL: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Two sums (64, 128) over all of K, with columns in order: of MW times 64 rows from OWN on, or of NB times 128
    columns; with one of each both are the same.

    HOLD: do not release the last step, beside whose operands the bias lies.
    """
    COLS: gl.constexpr = 2 if BA == 1 else BA
    acc0 = in_order(gl.zeros([64, 128], gl.float32, L), [64, 128 // COLS, COLS], DEAL)
    acc1 = acc0
    p = gl.zeros([64, 128], gl.float32, L)
    for kt in range(steps):
        s = i % NS
        mbarrier.wait(full.index(s), (i // NS) & 1)
        a = a_smem.index(s * MT + OWN)
        b = b_smem.index(s * NB).reshape([128, 128])
        for j in gl.static_range(J):
            acc0, p = multiply(acc0, p, K < 0, a, b, a_scale, b_scale, s * J + j, OWN, j, J, BA, MT, DEAL, 0)
            if MW == 2:
                a1 = a_smem.index(s * MT + OWN + 1)
                acc1, p = multiply(acc1, p, K < 0, a1, b, a_scale, b_scale, s * J + j, OWN + 1, j, J, BA, MT, DEAL, 0)
            if NB == 2:
                b1 = b_smem.index(s * NB + 1).reshape([128, 128])
                acc1, p = multiply(
                    acc1, p, K < 0, a, b1, a_scale, b_scale, s * J + j, OWN, j, J, BA, MT, DEAL, 128 // COLS
                )  # fmt: skip
        if HOLD:
            mbarrier.arrive(empty.index(s), count=1, pred=kt + 1 < steps)
        else:
            mbarrier.arrive(empty.index(s), count=1)
        i += 1
    return acc0.reshape([64, 128]), acc1.reshape([64, 128]), i


@gluon.jit
def load_residual(w, residual_ptr, row, col, M, N, residual_stride):
    """Words of the residual in the place of words w (64, 4, 16), zero past the edges; its rows are 16-byte pieces."""
    flat = w.reshape([64, 64])
    r = row + gl.arange(0, 64, gl.SliceLayout(1, flat.type.layout))
    c = col // 2 + gl.arange(0, 64, gl.SliceLayout(0, flat.type.layout))
    stride = (residual_stride // 8) * 4  # says "a multiple of 4 words", which gives 16-byte loads
    at = residual_ptr + gl.expand_dims(r.to(gl.int64) * stride, 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(r < M, 1) & gl.expand_dims(c < N // 2, 0)
    return gl.convert_layout(gl.load(at, mask=mask, other=0).reshape([64, 4, 16]), w.type.layout, assert_trivial=True)


@gluon.jit
def finish(
    acc, bias, buffer, residual_ptr, z_desc, y_desc, q_desc, s_ptr, row, col, M, N, residual_stride,
    BIAS: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr, EMIT_SUM: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """Everything after the sums of 64 rows and 128 columns dealt in blocks."""
    w = words_of(acc, bias, 4, BIAS)
    if EMIT_SUM:
        stage(z_desc, buffer, w.reshape([64, 64]), row, col // 2)
    if ACT != "":
        lo, hi = unpack(w, tl.bfloat16)
        w = pack(act(lo, ACT), act(hi, ACT), tl.bfloat16)
    if RESIDUAL:
        lo, hi = unpack(w, tl.bfloat16)
        more_lo, more_hi = unpack(load_residual(w, residual_ptr, row, col, M, N, residual_stride), tl.bfloat16)
        w = pack(lo + more_lo, hi + more_hi, tl.bfloat16)
    if EMIT_HIGH:
        stage(y_desc, buffer, w.reshape([64, 64]), row, col // 2)
    if Q_BC > 0:
        m = block_amax(w)
        if Q_BC == 128:
            m = over_row(m)
        inv = inv_scale(m, Q_E5, Q_FLOOR)
        stage(q_desc, buffer, quantize_words(w, inv, Q_E5), row, col // 4)
        store_bytes(inv, s_ptr, row, col // 32, M, N // 32)


@gluon.jit
def gate_and_up(acc, bias, buffer, gate_desc, z_desc, row, col, BIAS: gl.constexpr, EMIT_SUM: gl.constexpr):
    """Words (64, 2, 16) of gate and of up from sums (64, 128) of interleaved rows; col counts features."""
    w = words_of(acc, bias, 4, BIAS).reshape([64, 2, 2, 16])
    gate, up = gl.split(gl.permute(w, (0, 1, 3, 2)))
    if EMIT_SUM:
        stage(gate_desc, buffer, gate.reshape([64, 32]), row, col // 2)
        stage(z_desc, buffer, up.reshape([64, 32]), row, col // 2)
    return gate, up


@gluon.jit
def gated(gate, up, ACT: gl.constexpr):
    lo, hi = unpack(gate, tl.bfloat16)
    up_lo, up_hi = unpack(up, tl.bfloat16)
    return pack(act(lo, ACT) * up_lo, act(hi, ACT) * up_hi, tl.bfloat16)


@gluon.jit
def finish_gated(
    acc0, acc1, bias0, bias1, buffer0, buffer1, gate_desc, z_desc, y_desc, q_desc, s_ptr, row, col, M, N,
    BIAS: gl.constexpr, ACT: gl.constexpr, EMIT_HIGH: gl.constexpr, EMIT_SUM: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Everything after the sums of 64 rows and NB times 128 columns dealt in pairs: NB times 64 features from col."""
    gate, up = gate_and_up(acc0, bias0, buffer0, gate_desc, z_desc, row, col, BIAS, EMIT_SUM)
    w0 = gated(gate, up, ACT)
    w1 = w0
    if NB == 2:
        gate, up = gate_and_up(acc1, bias1, buffer1, gate_desc, z_desc, row, col + 64, BIAS, EMIT_SUM)
        w1 = gated(gate, up, ACT)
    if EMIT_HIGH:
        stage(y_desc, buffer0, w0.reshape([64, 32]), row, col // 2)
        if NB == 2:
            stage(y_desc, buffer1, w1.reshape([64, 32]), row, col // 2 + 32)
    if Q_BC > 0:
        m0, m1 = block_amax(w0), block_amax(w1)
        if Q_BC == 128:
            m0 = over_row(gl.maximum(m0, m1))
            m1 = m0
        inv0, inv1 = inv_scale(m0, Q_E5, Q_FLOOR), inv_scale(m1, Q_E5, Q_FLOOR)
        stage(q_desc, buffer0, quantize_words(w0, inv0, Q_E5), row, col // 4)
        store_bytes(inv0, s_ptr, row, col // 32, M, N // 32)
        if NB == 2:
            stage(q_desc, buffer1, quantize_words(w1, inv1, Q_E5), row, col // 4 + 16)
            store_bytes(inv1, s_ptr, row, col // 32 + 2, M, N // 32)


@gluon.jit
def consume(
    a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, residual_ptr, z_desc, gate_desc, y_desc, q_desc, s_ptr,
    M, N, K, residual_stride, steps, units,
    W: gl.constexpr, NC: gl.constexpr, MW: gl.constexpr, NB: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, GROUP: gl.constexpr, DEAL: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr, EMIT_SUM: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: MW times 64 rows of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    BN: gl.constexpr = 128 * NB
    BM: gl.constexpr = NC * MW * 64
    i = 0
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, _, _, _ = unit_at(u, M, N, K, steps, BM, BN, GROUP)
        row += W * MW * 64
        acc0, acc1, i = accumulate(
            a_smem, b_smem, a_scale, b_scale, full, empty, i, K, steps,
            W * MW, BM // 64, MW, NB, BA, J, NS, BIAS, DEAL, L,
        )  # fmt: skip
        bias0 = 0.0
        bias1 = 0.0
        if BIAS:
            s = (i - 1) % NS
            bias0 = bias.index(s).slice(0, 128, 0).load(gl.SliceLayout(0, acc0.type.layout))
            bias1 = bias0
            if NB == 2:
                bias1 = bias.index(s).slice(128, 128, 0).load(gl.SliceLayout(0, acc0.type.layout))
            mbarrier.arrive(empty.index(s), count=1)
        if DEAL == "pairs":
            finish_gated(
                acc0, acc1, bias0, bias1, c_smem.index(2 * W), c_smem.index(2 * W + 1), gate_desc, z_desc, y_desc,
                q_desc, s_ptr, row, col // 2, M, N // 2, BIAS, ACT, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5,
                Q_FLOOR, NB,
            )  # fmt: skip
        else:
            finish(
                acc0, bias0, c_smem.index(W), residual_ptr, z_desc, y_desc, q_desc, s_ptr, row, col, M, N,
                residual_stride, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR,
            )  # fmt: skip
            if MW == 2:
                finish(
                    acc1, bias0, c_smem.index(W), residual_ptr, z_desc, y_desc, q_desc, s_ptr, row + 64, col, M, N,
                    residual_stride, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SCALARS)
def gemm_epilogue_kernel(
    a_desc, b_desc, z_desc, gate_desc, y_desc, q_desc, sa_ptr, sb_ptr, bias_ptr, residual_ptr, s_ptr,
    M, N, K, a_stride, b_stride, residual_stride, steps,
    NC: gl.constexpr, MW: gl.constexpr, NB: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr,
    GROUP: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr, DEAL: gl.constexpr,
    BIAS: gl.constexpr, ACT: gl.constexpr, RESIDUAL: gl.constexpr, EMIT_HIGH: gl.constexpr, EMIT_SUM: gl.constexpr,
    Q_BC: gl.constexpr, Q_E5: gl.constexpr, Q_FLOOR: gl.constexpr,
):  # fmt: skip
    """Operands, NC, MW, BA, J, NS as of `_hopper_kernel.gemm_kernel`; N counts rows of b.

    Args:
        z_desc, gate_desc, y_desc, q_desc: outputs as int32 words, in boxes of 64 rows.
        s_ptr: (M, features / 32) scale bytes.
        steps: of 128 in K, at least 1.
        NB: 128 columns a tile holds; 2 where a scale spans 128 features of gate and up.
        ACT: "" for none. Q_BC: 0 for no MXFP8.
    """
    BM: gl.constexpr = NC * MW * 64
    BN: gl.constexpr = 128 * NB
    MT: gl.constexpr = BM // 64
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    BUFFER: gl.constexpr = [NC * 2, 64, 32] if DEAL == "pairs" else [NC, 64, 64]
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [NS * MT, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [NS * NB] + b_desc.block_shape, b_desc.layout)  # noqa: RUF005
    c_smem = gl.allocate_shared_memory(gl.int32, BUFFER, WORDS)
    a_scale = gl.allocate_shared_memory(gl.float32, [NS * J * MT, 64], FLAT)
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
            (consume, (a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, residual_ptr, z_desc, gate_desc, y_desc, q_desc, s_ptr, M, N, K, residual_stride, steps, units, 0, NC, MW, NB, BA, J, NS, GROUP, DEAL, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (consume, (a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, residual_ptr, z_desc, gate_desc, y_desc, q_desc, s_ptr, M, N, K, residual_stride, steps, units, 1, NC, MW, NB, BA, J, NS, GROUP, DEAL, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_scales, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 1, 2], [REGS, LOADER_REGS, LOADER_REGS])
    else:
        gl.warp_specialize([
            (consume, (a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, residual_ptr, z_desc, gate_desc, y_desc, q_desc, s_ptr, M, N, K, residual_stride, steps, units, 0, NC, MW, NB, BA, J, NS, GROUP, DEAL, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (consume, (a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, residual_ptr, z_desc, gate_desc, y_desc, q_desc, s_ptr, M, N, K, residual_stride, steps, units, 1, NC, MW, NB, BA, J, NS, GROUP, DEAL, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (consume, (a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, residual_ptr, z_desc, gate_desc, y_desc, q_desc, s_ptr, M, N, K, residual_stride, steps, units, 2, NC, MW, NB, BA, J, NS, GROUP, DEAL, BIAS, ACT, RESIDUAL, EMIT_HIGH, EMIT_SUM, Q_BC, Q_E5, Q_FLOOR)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_scales, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 4, 1, 2], [REGS, REGS, LOADER_REGS, LOADER_REGS])
    # fmt: on
