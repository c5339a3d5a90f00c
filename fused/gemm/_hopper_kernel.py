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

from ._gluon import barrier, tma_load, tma_store

SCALARS = [
    "sa_ptr", "sb_ptr", "bias_ptr", "base_ptr", "M", "N", "K", "a_stride", "b_stride", "base_stride", "steps", "splits",
]  # fmt: skip
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@gluon.jit
def unit_at(u, M, N, K, steps, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """First row, first column, split and range of K steps of work unit u.

    GROUP row tiles share their pass over the columns, so both operands stay in L2.
    """
    nm = (M + BM - 1) // BM
    nn = (N + BN - 1) // BN
    split = u // (nm * nn)
    t = u % (nm * nn)
    group = t // (GROUP * nn)
    rows = min(nm - group * GROUP, GROUP)
    pm = group * GROUP + (t % (GROUP * nn)) % rows
    pn = (t % (GROUP * nn)) // rows
    first = split * steps
    return pm * BM, pn * BN, split, first, min((K + 127) // 128, first + steps)


@gluon.jit
def load_columns(desc, col, k, full, smem):
    """128 rows of b, in order or as `hopper_epilogue.dealt` or `gate_first` move them."""
    if smem.rank == 2:
        tma_load(desc, [col, k], full, smem)
    elif smem.rank == 4:
        tma_load(desc, [0, col // 32, 0, k], full, smem)
    else:
        tma_load(desc, [0, col // 64, 0, 0, k], full, smem)


@gluon.jit
def load_operands(
    a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units,
    BM: gl.constexpr, BN: gl.constexpr, NS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    i = 0
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, _, first, last = unit_at(u, M, N, K, steps, BM, BN, GROUP)
        for kt in range(first, last):
            s = i % NS
            mbarrier.wait(empty.index(s), ((i // NS) & 1) ^ 1)
            mbarrier.expect(full.index(s), BM * 128 + BN * 128)
            for w in gl.static_range(BM // 64):
                tma_load(a_desc, [row + w * 64, kt * 128], full.index(s), a_smem.index(s * (BM // 64) + w))
            for h in gl.static_range(BN // 128):
                load_columns(b_desc, col + h * 128, kt * 128, full.index(s), b_smem.index(s * (BN // 128) + h))
            i += 1


@gluon.jit
def load_word(ptr, offset, mask, block, blocks, J: gl.constexpr):
    """The J bytes of a step of 128, lowest first. Past the end: byte 0, which scales zeros."""
    if J == 1:
        word = gl.load(ptr + block + offset, mask=mask & (block < blocks), other=0)
    else:
        word = gl.load(ptr + block // 4 + offset, mask=mask & (block < blocks), other=0)
    return word


@gluon.jit
def load_words(ptr, r, row, rows, stride, ACROSS: gl.constexpr, kt, blocks, J: gl.constexpr, G: gl.constexpr):
    """Words of G steps from kt on, in flight together, of scale rows `row + r`, each for ACROSS operand rows."""
    if J == 4:
        stride = stride // 4
    base = ptr + row.to(gl.int64) * (stride * ACROSS)
    offset = r * (stride * ACROSS)
    mask = (row + r) * ACROSS < rows
    w0 = load_word(base, offset, mask, kt * 4, blocks, J)
    w1 = load_word(base, offset, mask, kt * 4 + 4, blocks, J)
    words = (w0, w1)
    if G == 4:
        w2 = load_word(base, offset, mask, kt * 4 + 8, blocks, J)
        w3 = load_word(base, offset, mask, kt * 4 + 12, blocks, J)
        words = (w0, w1, w2, w3)
    return words


@gluon.jit
def load_row_words(ptr, r, row, rows, stride, MT: gl.constexpr, kt, blocks, J: gl.constexpr, G: gl.constexpr):
    """`load_words` of each 64 rows of a tile."""
    w0 = load_words(ptr, r, row, rows, stride, 1, kt, blocks, J, G)
    w1 = load_words(ptr, r, row + 64, rows, stride, 1, kt, blocks, J, G)
    words = (w0, w1)
    if MT > 2:
        w2 = load_words(ptr, r, row + 128, rows, stride, 1, kt, blocks, J, G)
        words = (w0, w1, w2)
    if MT > 3:
        w3 = load_words(ptr, r, row + 192, rows, stride, 1, kt, blocks, J, G)
        words = (w0, w1, w2, w3)
    return words


@gluon.jit
def load_column_words(
    ptr, c, col, N, stride, BN: gl.constexpr, BA: gl.constexpr, kt, blocks, J: gl.constexpr, G: gl.constexpr
):
    if BA == 1:
        even = load_words(ptr, 2 * c, col, N, stride, 1, kt, blocks, J, G)
        odd = load_words(ptr, 2 * c + 1, col, N, stride, 1, kt, blocks, J, G)
    else:
        even = load_words(ptr, c % (BN // BA), col // BA, N, stride, BA, kt, blocks, J, G)
        odd = even
    return even, odd


@gluon.jit
def extremes(word):
    """Bit 7 of each byte: whether it is 0 or 255, which is to say that its bits are equal."""
    differ = (word ^ (word >> 1)) & 0x7F7F7F7F
    return ~(differ + 0x7F7F7F7F) & -0x7F7F7F80


@gluon.jit
def to_bit(word, bit: gl.constexpr, to: gl.constexpr):
    if bit < to:
        moved = word << (to - bit)
    else:
        moved = word >> (bit - to)
    return moved


@gluon.jit
def e8m0_bits(word, extreme, j: gl.constexpr):
    """Bits of fp32 `2**(byte - 127)` of byte j: byte 0 is a subnormal, byte 255 NaN."""
    return (to_bit(word, 8 * j, 23) & 0x7F800000) | (to_bit(extreme, 8 * j + 7, 22) & 0x00400000)


@gluon.jit
def store_scales(smem, word, first, step: gl.constexpr, J: gl.constexpr):
    word = word.to(gl.int32)
    extreme = extremes(word)
    for j in gl.static_range(J):
        smem.index(first + j * step).store(e8m0_bits(word, extreme, j).to(gl.float32, bitcast=True))


@gluon.jit
def store_column_scales(smem, even, odd, s, BA: gl.constexpr, J: gl.constexpr):
    """With a scale for every column, two neighbors go as bf16 into one word: half the shared memory to read."""
    if BA == 1:
        even = even.to(gl.int32)
        odd = odd.to(gl.int32)
        even_extreme = extremes(even)
        odd_extreme = extremes(odd)
        for j in gl.static_range(J):
            word = (e8m0_bits(even, even_extreme, j) >> 16) | e8m0_bits(odd, odd_extreme, j)
            smem.index(s * J + j).store(word.to(gl.float32, bitcast=True))
    else:
        store_scales(smem, even, s * J, 1, J)


@gluon.jit
def load_scales(
    sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units,
    BM: gl.constexpr, BN: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Scale bytes to fp32 in shared memory, G steps at a time: as many as the registers of a variant leave room for.

    With one chunk a step, the next are in flight meanwhile; with four chunks a step is long enough to do without.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    G: gl.constexpr = 2 if J == 1 and BA == 1 else 4
    AHEAD: gl.constexpr = J == 1 and BA > 1
    blocks = (K + 31) // 32
    MT: gl.constexpr = BM // 64
    r = gl.arange(0, 64, L)
    i = 0
    u = gl.program_id(0)
    row, col, _, kt, last = unit_at(u, M, N, K, steps, BM, BN, GROUP)
    if AHEAD:
        wa = load_row_words(sa_ptr, r, row, M, a_stride, MT, kt, blocks, J, G)
        even, odd = load_column_words(sb_ptr, r, col, N, b_stride, BN, BA, kt, blocks, J, G)
    while u < units:
        if not AHEAD:
            wa = load_row_words(sa_ptr, r, row, M, a_stride, MT, kt, blocks, J, G)
            even, odd = load_column_words(sb_ptr, r, col, N, b_stride, BN, BA, kt, blocks, J, G)
        now, now_last, now_col = kt, last, col
        kt += G
        if kt >= last:
            u += gl.num_programs(0)
            row, col, _, kt, last = unit_at(min(u, units - 1), M, N, K, steps, BM, BN, GROUP)
        if AHEAD:
            next_a = load_row_words(sa_ptr, r, row, M, a_stride, MT, kt, blocks, J, G)
            next_even, next_odd = load_column_words(sb_ptr, r, col, N, b_stride, BN, BA, kt, blocks, J, G)
        for t in gl.static_range(G):
            if now + t < now_last:
                s = i % NS
                mbarrier.wait(empty.index(s), ((i // NS) & 1) ^ 1)
                for w in gl.static_range(MT):
                    store_scales(a_scale, wa[w][t], s * J * MT + w, MT, J)
                store_column_scales(b_scale, even[t], odd[t], s, BA, J)
                if BIAS:  # noqa: SIM102 (one is known at compile time)
                    if now + t + 1 == now_last:
                        n = now_col + gl.arange(0, BN, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
                        bias.index(s).store(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32))
                barrier()
                mbarrier.arrive(full.index(s), count=1)
                i += 1
        if AHEAD:
            wa = next_a
            even = next_even
            odd = next_odd


@gluon.jit
def in_order(p, shape: gl.constexpr, DEAL: gl.constexpr):
    """Products (64, 128) in the shape of their scales, with columns that `hopper_epilogue.dealt` moved back in order.

    A thread keeps what it has: of 128 columns wgmma gives it 2 of every 8.
    """
    if DEAL == "blocks":
        p = gl.permute(p.reshape([64, 16, 4, 2]), (0, 2, 1, 3))
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
def multiply(
    acc,
    p,
    never,
    a,
    b,
    a_scale,
    b_scale,
    at,
    w: gl.constexpr,
    j: gl.constexpr,
    J: gl.constexpr,
    BA: gl.constexpr,
    MT: gl.constexpr,
    DEAL: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Acc plus the scaled product of chunk j of a step; p holds that product.

    `never` is false, but only at run time: that ties p to one set of registers, which the next product cannot
    overwrite before this promotion is done. The last wait waits for nothing; it keeps LLVM from postponing the
    promotion past the next product, where it would need a second set.
    """
    KJ: gl.constexpr = 128 // J
    SA: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, acc.type.layout))
    SB: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, acc.type.layout))
    sa = a_scale.index(at * MT + w).load(SA)
    sb = b_scale.index(at).slice(FIRST, acc.shape[1], 0).load(SB)
    bt = b.slice(j * KJ, KJ, 1).permute((1, 0))
    p = warpgroup_mma(a.slice(j * KJ, KJ, 1), bt, p, use_acc=never, is_async=True)
    p, sa, sb = warpgroup_mma_wait(0, deps=(p, sa, sb))
    acc, p = warpgroup_mma_wait(0, deps=(promote(acc, p, sa, sb, BA, DEAL), p))
    return acc, p


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
    i = 0
    p = gl.zeros([64, BN], gl.float32, L)
    for u in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, split, first, last = unit_at(u, M, N, K, steps, BM, BN, GROUP)
        row += W * MW * 64
        acc0 = start(base_ptr, row, col, M, N, base_stride, BN, SUMMED, L).reshape([64, BN // COLS, COLS])
        acc1 = acc0
        if MW == 2 and SUMMED:
            acc1 = start(base_ptr, row + 64, col, M, N, base_stride, BN, SUMMED, L).reshape([64, BN // COLS, COLS])
        for kt in range(first, last):
            s = i % NS
            mbarrier.wait(full.index(s), (i // NS) & 1)
            b = b_smem.index(s)
            for j in gl.static_range(J):
                a = a_smem.index(s * MT + W * MW)
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
            i += 1
        row += split * ((M + BM - 1) // BM) * BM
        added = 0.0
        if BIAS:  # lies beside the last step's operands
            s = (i - 1) % NS
            added = bias.index(s).load(gl.SliceLayout(0, L))
            mbarrier.arrive(empty.index(s), count=1)
        write(c_desc, c_smem.index(W * CB), acc0, added, row, col, CB, BIAS, L)
        if MW == 2:
            write(c_desc, c_smem.index(W * CB + CB - 1), acc1, added, row + 64, col, CB, BIAS, L)
    tma.store_wait(0)


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
            (load_scales, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 1, 2], [REGS, LOADER_REGS, LOADER_REGS])
    else:
        gl.warp_specialize([
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 0, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 1, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (consume, (c_desc, a_smem, b_smem, c_smem, a_scale, b_scale, bias, full, empty, base_ptr, M, N, K, base_stride, steps, units, 2, MW, BM, BN, BA, J, NS, CB, GROUP, BIAS, SUMMED)),  # noqa: E501
            (load_operands, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, K, steps, units, BM, BN, NS, GROUP)),
            (load_scales, (sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units, BM, BN, BA, J, NS, GROUP, BIAS)),  # noqa: E501
        ], [4, 4, 1, 2], [REGS, REGS, LOADER_REGS, LOADER_REGS])
    # fmt: on
