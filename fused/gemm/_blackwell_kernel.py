"""MXFP8 GEMM with an epilogue for Blackwell: `tl.dot_scaled` on tiles that TMA moves, persistent over tiles.

Each program walks output tiles of BM x BN. Operands come K-major, BK = 128 of K at a time, through a pipeline in shared
memory; scales come in the 128x4 layout, 512 bytes a 128 x 128 tile of elements, and go from shared to tensor memory
as they are. The sum stays in tensor memory, in two buffers, so that one tile's epilogue overlaps the next tile's
products. Past the edges TMA reads zeros and writes nothing; a zero scale byte is 2**-127, which zeros leave zero.

The epilogue works on words of two neighboring features as in `_device`; a thread holds whole blocks of a row, so no
amax leaves it. Nor does a gated pair, whose groups are shorter than the columns a thread holds.
"""

# ruff: noqa: SIM300

from __future__ import annotations

import triton
import triton.language as tl

from .._activation_math import act
from .._device import as_float, fp8_pair, inv_scale, pack, pack_bytes, row_amax, scale_byte, store_scale, unpack
from ..jit import kernel


@triton.jit
def load_scale(desc, row, step, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """(ROWS * 128, STEPS * 4) scale bytes from tile (row, step) of a matrix of 128x4 tiles, two lines of 256 each."""
    tiles = desc.load([0, row, step, 0, 0])
    tiles = tl.reshape(tiles, (ROWS, STEPS, 32, 4, 4))
    return tl.reshape(tl.trans(tiles, 0, 3, 2, 1, 4), (ROWS * 128, STEPS * 4))


@triton.jit
def tile_of(t, nm, nn, GROUP: tl.constexpr):
    """Row and column of tile t: GROUP rows share a pass over the columns."""
    group = t // (GROUP * nn)
    rows = tl.minimum(nm - group * GROUP, GROUP)
    within = t % (GROUP * nn)
    return group * GROUP + within % rows, within // rows


@triton.jit
def halves(w, PAIR: tl.constexpr):
    """Words (R, C) in groups of PAIR words, of gate and of up in turn, to two of (R, C / 2)."""
    R: tl.constexpr = w.shape[0]
    C: tl.constexpr = w.shape[1]
    groups = tl.permute(tl.reshape(w, (R, C // (2 * PAIR), 2, PAIR)), (0, 1, 3, 2))
    gate, up = tl.split(groups)
    return tl.reshape(gate, (R, C // 2)), tl.reshape(up, (R, C // 2))


@triton.jit
def rotate_words(w, cos_ptr, sin_ptr, at_ptr, row0, col0, M, L, END2, DTYPE: tl.constexpr, ROPE: tl.constexpr,
                 HEAD: tl.constexpr, POSITIONS: tl.constexpr):  # fmt: skip
    """RoPE of words (BM, C2) before word END2 of their rows, from (L, HEAD / 2) tables, as `epilogue.rotate`.

    ROPE = "pairs": a word is a pair; "halves": words of a head's first half turn with those of its second, HEAD / 4
    further on, and a tile holds whole heads.
    """
    BM: tl.constexpr = w.shape[0]
    C2: tl.constexpr = w.shape[1]
    HALF: tl.constexpr = HEAD // 2
    r = row0 + tl.arange(0, BM)
    if POSITIONS:
        p = tl.load(at_ptr + r, mask=r < M, other=0).to(tl.int32)
    else:
        p = r % L
    words = col0 // 2 + tl.arange(0, C2)
    if ROPE == "pairs":
        at = p[:, None] * HALF + (words % HALF)[None, :]
        u, v = unpack(w, DTYPE)
        c = tl.load(cos_ptr + at)
        s = tl.load(sin_ptr + at)
        turned = pack(u * c - v * s, u * s + v * c, DTYPE)
    else:
        both = tl.permute(tl.reshape(w, (BM, C2 // HALF, 2, HALF // 2)), (0, 1, 3, 2))
        first, second = tl.split(both)
        at = p[:, None, None] * HALF + 2 * tl.arange(0, HALF // 2)[None, None, :]
        c_lo = tl.load(cos_ptr + at)
        c_hi = tl.load(cos_ptr + at + 1)
        s_lo = tl.load(sin_ptr + at)
        s_hi = tl.load(sin_ptr + at + 1)
        u_lo, u_hi = unpack(first, DTYPE)
        v_lo, v_hi = unpack(second, DTYPE)
        first = pack(u_lo * c_lo - v_lo * s_lo, u_hi * c_hi - v_hi * s_hi, DTYPE)
        second = pack(u_lo * s_lo + v_lo * c_lo, u_hi * s_hi + v_hi * c_hi, DTYPE)
        turned = tl.reshape(tl.permute(tl.join(first, second), (0, 1, 3, 2)), (BM, C2))
    return tl.where((words < END2)[None, :], turned, w)


@triton.jit
def store_two_scales(ptr, byte, row0, c0, R, CB, SWIZZLED: tl.constexpr):
    """Store (BM, 2) scale bytes at columns c0 and c0 + 1 of an (R, CB) scale matrix; `ptr` is uint8.

    The last of a row also store the zeros that pad it to four columns.
    """
    BM: tl.constexpr = byte.shape[0]
    r = (row0 + tl.arange(0, BM))[:, None]
    c = (c0 + tl.arange(0, 4))[None, :]
    both = tl.reshape(tl.join(byte, byte * 0), (BM, 2, 2))  # [byte, 0] of each of the two
    value = tl.reshape(tl.permute(both, (0, 2, 1)), (BM, 4))
    value = tl.where((r < R) & (c < CB), value, 0).to(tl.uint8)
    if SWIZZLED:
        tiles = (CB + 3) // 4
        at = ((r // 128).to(tl.int64) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        mask = (r < (R + 127) // 128 * 128) & (c < tiles * 4)
    else:
        at = r.to(tl.int64) * CB + c
        mask = (r < R) & (c < CB)
    tl.store(ptr + at, value, mask=mask & ((c < c0 + 2) | (c >= CB)))


@triton.jit
def quantize_words(w, row0, col0, M, N2, q_desc, s_ptr, DTYPE: tl.constexpr, BC: tl.constexpr, E5: tl.constexpr,
                   FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Store MXFP8 of words w (BM, C2), C2 64 or 32, in 1 x BC tiles; for 32 words BC = 32 and `s_ptr` is uint8."""
    BM: tl.constexpr = w.shape[0]
    C2: tl.constexpr = w.shape[1]
    tiled = tl.reshape(w, (BM, 2 * C2 // BC, BC // 2))
    inv = inv_scale(row_amax(tiled, DTYPE), E5, FLOOR)
    factor = as_float(inv)[:, :, None]
    lo, hi = unpack(tiled, DTYPE)
    q_desc.store([row0, col0 // 2], tl.reshape(fp8_pair(lo * factor, hi * factor, E5), (BM, C2)))
    if C2 == 32:
        store_two_scales(s_ptr, scale_byte(inv), row0, col0 // 32, M, N2 // 16, SWIZZLED)
    else:
        r = (row0 + tl.arange(0, BM))[:, None]
        c = (col0 // 32 + 4 * tl.arange(0, C2 // 64))[None, :]
        store_scale(s_ptr, pack_bytes(scale_byte(inv), C2 // 64, BC == 128), r, c, M, N2 // 16, SWIZZLED, ALIGNED)


@kernel(do_not_specialize=["M", "N32", "K", "programs", "L", "END2"])
def gemm_kernel(
    a_desc, sa_desc, b_desc, sb_desc, bias_ptr, residual_desc, y_desc, z_desc, gate_desc, q_desc, s_ptr,
    cos_ptr, sin_ptr, at_ptr, M, N32, K, programs, L, END2,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    PAIR: tl.constexpr, ROPE: tl.constexpr, HEAD: tl.constexpr, POSITIONS: tl.constexpr,
    RESIDUAL: tl.constexpr, EMIT_HIGH: tl.constexpr, EMIT_SUM: tl.constexpr,
    Q_BC: tl.constexpr, Q_E5: tl.constexpr, Q_FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`epilogue.gemm_epilogue`. DTYPE is a 16-bit type whose words the outputs are, or fp32 for a plain y.

    ACT = "": none; Q_BC = 0: no MXFP8. PAIR: words in a group of gate and of up, whose output has half the columns, or
    0 for one weight. ROPE = "": no rotation; END2: words of a row that turn.
    """
    HALF: tl.constexpr = 2 if PAIR > 0 else 1
    N = N32 * 32
    nm = tl.cdiv(M, BM)
    nn = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), nm * nn, programs, flatten=True):
        i, j = tile_of(t, nm, nn, GROUP)
        row0 = i * BM
        col0 = j * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([row0, k * BK])
            b = b_desc.load([col0, k * BK])
            sa = load_scale(sa_desc, i * (BM // 128), k * (BK // 128), BM // 128, BK // 128)
            sb = load_scale(sb_desc, j * (BN // 128), k * (BK // 128), BN // 128, BK // 128)
            acc = tl.dot_scaled(a, sa, A_FORMAT, b.T, sb, B_FORMAT, acc)
        if BIAS:
            n = col0 + tl.arange(0, BN)
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if DTYPE == tl.float32:
            y_desc.store([row0, col0], acc)
        else:
            lo, hi = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            w = pack(lo, hi, DTYPE)
            out0 = col0 // HALF
            if PAIR > 0:
                gate, w = halves(w, PAIR)
                if EMIT_SUM:
                    gate_desc.store([row0, out0 // 2], gate)
            if EMIT_SUM:
                z_desc.store([row0, out0 // 2], w)
            if PAIR > 0:
                lo, hi = unpack(gate, DTYPE)
                up_lo, up_hi = unpack(w, DTYPE)
                w = pack(act(lo, ACT) * up_lo, act(hi, ACT) * up_hi, DTYPE)
            elif ACT != "":
                lo, hi = unpack(w, DTYPE)
                w = pack(act(lo, ACT), act(hi, ACT), DTYPE)
            if ROPE != "":
                w = rotate_words(
                    w, cos_ptr, sin_ptr, at_ptr, row0, out0, M, L, END2, DTYPE, ROPE, HEAD, POSITIONS
                )  # fmt: skip
            if RESIDUAL:
                lo, hi = unpack(w, DTYPE)
                more_lo, more_hi = unpack(residual_desc.load([row0, out0 // 2]), DTYPE)
                w = pack(lo + more_lo, hi + more_hi, DTYPE)
            if EMIT_HIGH:
                y_desc.store([row0, out0 // 2], w)
            if Q_BC > 0:
                quantize_words(
                    w, row0, out0, M, N32 * 16 // HALF, q_desc, s_ptr, DTYPE, Q_BC, Q_E5, Q_FLOOR, SWIZZLED, ALIGNED
                )  # fmt: skip
