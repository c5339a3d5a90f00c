"""The Hopper GEMM kernel: FP8 wgmma whose partial sums are scaled by two powers of two and promoted in fp32.

    acc[m, n] += 2**(ea[m, c] + eb[n, c] - 254) * sum over k in chunk c of a[m, k] b[n, k]

A chunk is 128 of K where all four E8M0 bytes of a row's 128 are equal for both operands, else 32, the block of the
format and the K of one FP8 wgmma. wgmma adds with few bits, so no chain of it is longer than a chunk.

Persistent and warp-specialized. One warp loads operand tiles by TMA, two warps turn scale bytes into fp32 in shared
memory, two or three warpgroups of 64 or 128 rows multiply and promote, and store by TMA while the next tile's loads
are in flight.
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

from ._gluon import barrier, tma_store
from ._hopper_loaders import load_fine_scales, load_operands, load_scales, unit_at

SCALARS = [
    "sa_ptr", "sb_ptr", "bias_ptr", "base_ptr", "M", "N", "K", "a_stride", "b_stride", "base_stride", "steps", "splits",
]  # fmt: skip
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@gluon.jit
def in_order(p, shape: gl.constexpr, DEAL: gl.constexpr):
    """Products (64, 128) in the shape of their scales, with columns that `hopper_epilogue.dealt` moved back in order.

    A thread keeps what it has: of 128 columns wgmma gives it 2 of every 8.
    """
    if DEAL == "blocks":
        p = gl.permute(p.reshape([64, 16, 4, 2]), (0, 2, 1, 3))
    elif DEAL == "pairs":
        p = gl.permute(p.reshape([64, 16, 2, 2, 2]), (0, 2, 4, 3, 1))
    return p.reshape(shape)


@gluon.jit
def promote(acc, p, sa, sb, BA: gl.constexpr, DEAL: gl.constexpr):
    """Acc + p * sa * sb with one rounding: products with powers of two are exact."""
    p = in_order(p, acc.shape, DEAL)
    if BA == 1:
        word = sb.to(gl.int32, bitcast=True)
        lo = (word << 16).to(gl.float32, bitcast=True)
        hi = (word & -0x10000).to(gl.float32, bitcast=True)
        pair = gl.convert_layout(gl.join(lo, hi), gl.SliceLayout(0, acc.type.layout), assert_trivial=True)
        acc = acc + p * gl.expand_dims(pair, 0) * gl.expand_dims(gl.expand_dims(sa, 1), 2)
    else:
        s = gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)
        acc = acc + p * gl.expand_dims(s, 2)
    return acc


@gluon.jit
def multiply_by(
    acc, p, never, a, b, sa, sb, j: gl.constexpr, J: gl.constexpr, BA: gl.constexpr, DEAL: gl.constexpr
):  # fmt: skip
    """Acc plus the product of chunk j of a step times its factors; p holds that product.

    `never` is false, but only at run time: that ties p to one set of registers, which the next product cannot
    overwrite before this promotion is done. The last wait waits for nothing; it keeps LLVM from postponing the
    promotion past the next product, where it would need a second set.
    """
    KJ: gl.constexpr = 128 // J
    bt = b.slice(j * KJ, KJ, 1).permute((1, 0))
    p = warpgroup_mma(a.slice(j * KJ, KJ, 1), bt, p, use_acc=never, is_async=True)
    p, sa, sb = warpgroup_mma_wait(0, deps=(p, sa, sb))
    acc, p = warpgroup_mma_wait(0, deps=(promote(acc, p, sa, sb, BA, DEAL), p))
    return acc, p


@gluon.jit
def multiply(
    acc, p, never, a, b, a_scale, b_scale, at,
    w: gl.constexpr, j: gl.constexpr, J: gl.constexpr, BA: gl.constexpr, MT: gl.constexpr,
    DEAL: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """`multiply_by` with factors as `load_scales` leaves them, read before the product starts."""
    SA: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, acc.type.layout))
    SB: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, acc.type.layout))
    sa = a_scale.index(at * MT + w).load(SA)
    sb = b_scale.index(at).slice(FIRST, acc.shape[1], 0).load(SB)
    return multiply_by(acc, p, never, a, b, sa, sb, j, J, BA, DEAL)


@gluon.jit
def multiply_fine(acc, p, never, a, b, a_scale, b_scale, j: gl.constexpr):
    """`multiply_by` with factors of chunk j as `load_fine_scales` leaves them."""
    NB: gl.constexpr = acc.shape[1]
    L: gl.constexpr = acc.type.layout
    SA: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    SB: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    sa = a_scale.slice(j, 1, 1).load(gl.SliceLayout(2, L)).reshape([64])
    sa = gl.convert_layout(sa, SA, assert_trivial=True)
    sb = b_scale.slice(j * NB, NB, 0).load(SB)
    return multiply_by(acc, p, never, a, b, sa, sb, j, 4, 128 // NB, "")


@gluon.jit
def start(base_ptr, row, col, M, N, base_stride, BN: gl.constexpr, SUMMED: gl.constexpr, L: gl.constexpr):
    """What a tile's sum starts from: zero, or what base holds."""
    acc = gl.zeros([64, BN], gl.float32, L)
    if SUMMED:
        n = col + gl.arange(0, BN, gl.SliceLayout(0, L))
        m = row + gl.arange(0, 64, gl.SliceLayout(1, L))
        at = base_ptr + gl.expand_dims(m.to(gl.int64) * base_stride, 1) + gl.expand_dims(n, 0)
        acc = gl.load(at, mask=gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0), other=0.0).to(gl.float32)
    return acc


@gluon.jit
def write(c_desc, c_smem, acc, bias, row, col, CB: gl.constexpr, BIAS: gl.constexpr, L: gl.constexpr):
    out = gl.convert_layout(acc.reshape([64, c_smem.shape[1]]), L)
    if BIAS:
        out += gl.expand_dims(bias, 0)
    tma.store_wait(CB - 1)
    barrier()
    c_smem.store(out.to(c_desc.dtype))
    fence_async_shared()
    barrier()
    tma_store(c_desc, [row, col], c_smem)


@gluon.jit
def consume(
    c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units,
    W: gl.constexpr, MW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, CB: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: MW times 64 rows of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    MT: gl.constexpr = BM // 64
    COLS: gl.constexpr = 2 if BA == 1 else BA
    s = NS - 1
    phase = 1
    p = gl.zeros([64, BN], gl.float32, L)
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, split, first, last = unit_at(u, M, N, K, steps, BM, BN, GROUP)
        row += W * MW * 64
        acc0 = start(base_ptr, row, col, M, N, base_stride, BN, SUMMED, L).reshape([64, BN // COLS, COLS])
        acc1 = acc0
        if MW == 2 and SUMMED:
            acc1 = start(base_ptr, row + 64, col, M, N, base_stride, BN, SUMMED, L).reshape([64, BN // COLS, COLS])
        for kt in range(first, last):
            s += 1
            if s == NS:
                s = 0
                phase ^= 1
            mbarrier.wait(full.index(s), phase)
            b = b_smem.index(s)
            for j in gl.static_range(J):
                a = a_smem.index(s * MT + W * MW)
                if J == 4 and BA == 32:
                    acc0, p = multiply_fine(acc0, p, K < 0, a, b, a_scale.index(s * MT + W * MW), b_scale.index(s), j)
                else:
                    acc0, p = multiply(acc0, p, K < 0, a, b, a_scale, b_scale, s * J + j, W * MW, j, J, BA, MT, "", 0)
                if MW == 2:
                    a = a_smem.index(s * MT + W * MW + 1)
                    acc1, p = multiply(
                        acc1, p, K < 0, a, b, a_scale, b_scale, s * J + j, W * MW + 1, j, J, BA, MT, "", 0
                    )
            if BIAS:
                mbarrier.arrive(empty.index(s), count=1, pred=kt + 1 < last)
            else:
                mbarrier.arrive(empty.index(s), count=1)
        row += split * ((M + BM - 1) // BM) * BM
        added = 0.0
        if BIAS:  # lies beside the last step's operands
            added = bias.index(s).load(gl.SliceLayout(0, L))
            mbarrier.arrive(empty.index(s), count=1)
        write(c_desc, c_smem.index(W * CB), acc0, added, row, col, CB, BIAS, L)
        if MW == 2:
            write(c_desc, c_smem.index(W * CB + CB - 1), acc1, added, row + 64, col, CB, BIAS, L)
    tma.store_wait(0)


@gluon.jit
def load_factors(
    sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units,
    BM: gl.constexpr, BN: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    if J == 4 and BA == 32:
        load_fine_scales(
            sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units,
            BM, BN, BA, NS, GROUP, BIAS,
        )  # fmt: skip
    else:
        load_scales(
            sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units,
            BM, BN, BA, J, NS, GROUP, BIAS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=SCALARS)
def gemm_kernel(
    a_desc, b_desc, c_desc, sa_ptr, sb_ptr, bias_ptr, base_ptr, M, N, K, a_stride, b_stride, base_stride, steps, splits,
    NC: gl.constexpr, MW: gl.constexpr, BN: gl.constexpr, BA: gl.constexpr, J: gl.constexpr, NS: gl.constexpr,
    CB: gl.constexpr, GROUP: gl.constexpr, REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
    BIAS: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """C (splits times M rounded up to the tile, N) = a (M, K) @ b (N, K).T of operands with E8M0 scales.

    Args:
        steps, splits: steps of 128 of K in a split, and splits. With more than one, `c_desc` is an fp32 workspace.
        base_ptr: what is added to the product if SUMMED, of any float dtype.
        NC, MW: consumer warpgroups, and m64 subtiles of each. BN: columns of a tile. NS: stages.
        BA: rows of b that share a byte (1, 32 or 128). J: chunks in 128 of K (1 or 4).
        CB: output buffers of a consumer.
        sa_ptr, sb_ptr: bytes, or with J = 4 int32 words of four; strides count bytes.
    """
    BM: gl.constexpr = NC * MW * 64
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [NS * NC * MW, 64, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [NS, BN, 128], b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [NC * CB, 64, BN], c_desc.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if J == 4 and BA == 32:
        ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        a_scale = gl.allocate_shared_memory(gl.float32, [NS * NC * MW, 64, J], ROWS)
        b_scale = gl.allocate_shared_memory(gl.float32, [NS, J * (BN // BA)], FLAT)
    else:
        a_scale = gl.allocate_shared_memory(gl.float32, [NS * J * NC * MW, 64], FLAT)
        b_scale = gl.allocate_shared_memory(gl.float32, [NS * J, 64], FLAT)
    bias = gl.allocate_shared_memory(gl.float32, [NS if BIAS else 1, BN], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(NS):
        mbarrier.init(full.index(k), count=2)
        mbarrier.init(empty.index(k), count=NC)
    fence_async_shared()
    units = ((M + BM - 1) // BM) * ((N + BN - 1) // BN) * splits
    # fmt: off
    if NC == 2:
        gl.warp_specialize([
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 0, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 1, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_factors, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 1, 2], [REGS, LOADER_REGS, LOADER_REGS])
    else:
        gl.warp_specialize([
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 0, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 1, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 2, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_factors, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 4, 1, 2], [REGS, REGS, LOADER_REGS, LOADER_REGS])
    # fmt: on
