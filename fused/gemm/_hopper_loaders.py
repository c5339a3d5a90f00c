"""What a Hopper GEMM multiplies and its scales, on their way to shared memory; and which tile is whose.

Two loaders of scales turn bytes into fp32. `load_scales` takes any tiles. `load_fine_scales` is for a scale every 32 of
K and 32 rows of b: there the promotion and the products leave no issue slot free, and what a loader's two warps issue
is taken from them. It spends 2 instructions a scale, addresses nothing anew before the tile changes, and masks nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._gluon import barrier, tma_load


@gluon.jit
def quotient(a, b):
    """Quotient of nonnegative integers, in half the instructions of a signed division."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def unit_at(u, M, N, K, steps, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """First row, first column, split and range of K steps of work unit u.

    GROUP row tiles share their pass over the columns, so both operands stay in L2.
    """
    nm = (M + BM - 1) // BM
    nn = (N + BN - 1) // BN
    split = quotient(u, nm * nn)
    t = u - split * (nm * nn)
    group = quotient(t, GROUP * nn)
    t -= group * (GROUP * nn)
    rows = min(nm - group * GROUP, GROUP)
    pn = quotient(t, rows)
    pm = group * GROUP + t - pn * rows
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
def store_bias(smem, bias_ptr, col, N, BN: gl.constexpr):
    n = col + gl.arange(0, BN, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    smem.store(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32))


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
                        store_bias(bias.index(s), bias_ptr, now_col, N, BN)
                barrier()
                mbarrier.arrive(full.index(s), count=1)
                i += 1
        if AHEAD:
            wa = next_a
            even = next_even
            odd = next_odd


@gluon.jit
def largest_of_pairs(a, b):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def nan_of_infinity(pair):
    """Two bf16 times 0 plus themselves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
        "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scale_pairs(word):
    """Two bf16 `2**(byte - 127)` of bytes at bits 7 and 23: byte 0 is a subnormal, byte 255 NaN."""
    return nan_of_infinity(largest_of_pairs(word & 0x7F807F80, gl.full_like(word, 0x00400040)))


@gluon.jit
def four_scales(word):
    """(R, 4) fp32 of words (R,) of four bytes."""
    even = scale_pairs(word << 7)
    odd = scale_pairs(word >> 1)
    first = gl.join(even << 16, even & -0x10000)
    second = gl.join(odd << 16, odd & -0x10000)
    return gl.join(first, second).reshape([word.shape[0], 4]).to(gl.float32, bitcast=True)


@gluon.jit
def row_pointers(ptr, rows, count, stride):
    """To the words of scale rows. Past the last it is read again, for results that nobody stores."""
    return ptr + min(rows, count - 1).to(gl.int64) * (stride // 4)


@gluon.jit
def tile_pointers(sa_ptr, sb_ptr, r, c, row, col, M, N, a_stride, b_stride, MT: gl.constexpr, BA: gl.constexpr):
    """To the scales of b, then of each 64 rows of a."""
    b = row_pointers(sb_ptr, col + c * BA, N, b_stride)
    a0 = row_pointers(sa_ptr, row + r, M, a_stride)
    a1 = row_pointers(sa_ptr, row + 64 + r, M, a_stride)
    pointers = (b, a0, a1)
    if MT == 3:
        a2 = row_pointers(sa_ptr, row + 128 + r, M, a_stride)
        pointers = (b, a0, a1, a2)
    return pointers


@gluon.jit
def four_words(at, kt, last):
    """Of steps kt to kt + 3, where they come before the last."""
    return (
        gl.load(at + kt),
        gl.load(at + kt + 1, mask=kt + 1 < last, other=0),
        gl.load(at + kt + 2, mask=kt + 2 < last, other=0),
        gl.load(at + kt + 3, mask=kt + 3 < last, other=0),
    )


@gluon.jit
def load_fine_scales(
    sa_ptr, sb_ptr, bias_ptr, a_scale, b_scale, bias, full, empty, M, N, K, a_stride, b_stride, steps, units,
    BM: gl.constexpr, BN: gl.constexpr, BA: gl.constexpr, NS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """As `load_scales`, into (64, 4) chunks of rows of a and into 4 chunks of BN // BA rows of b."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    MT: gl.constexpr = BM // 64
    NB: gl.constexpr = BN // BA
    r = gl.arange(0, 64, L)
    lane = gl.arange(0, 4 * NB, L)
    shift = lane // NB * 8
    s = 0
    phase = 1
    u = gl.program_id(0)
    row, col, _, kt, last = unit_at(u, M, N, K, steps, BM, BN, GROUP)
    at = tile_pointers(sa_ptr, sb_ptr, r, lane % NB, row, col, M, N, a_stride, b_stride, MT, BA)
    while u < units:
        wb = four_words(at[0], kt, last)
        w0 = four_words(at[1], kt, last)
        w1 = four_words(at[2], kt, last)
        w2 = w1
        if MT == 3:
            w2 = four_words(at[3], kt, last)
        now, now_last, now_col = kt, last, col
        kt += 4
        if kt >= last:
            u += gl.num_programs(0)
            row, col, _, kt, last = unit_at(min(u, units - 1), M, N, K, steps, BM, BN, GROUP)
            at = tile_pointers(sa_ptr, sb_ptr, r, lane % NB, row, col, M, N, a_stride, b_stride, MT, BA)
        for t in gl.static_range(4):
            if now + t < now_last:
                chunk = scale_pairs((wb[t] >> shift) << 23) & -0x10000
                mbarrier.wait(empty.index(s), phase)
                a_scale.index(s * MT).store(four_scales(w0[t]))
                a_scale.index(s * MT + 1).store(four_scales(w1[t]))
                if MT == 3:
                    a_scale.index(s * MT + 2).store(four_scales(w2[t]))
                b_scale.index(s).store(chunk.to(gl.float32, bitcast=True))
                if BIAS:  # noqa: SIM102 (one is known at compile time)
                    if now + t + 1 == now_last:
                        store_bias(bias.index(s), bias_ptr, now_col, N, BN)
                barrier()
                mbarrier.arrive(full.index(s), count=1)
                s += 1
                if s == NS:
                    s = 0
                    phase ^= 1
