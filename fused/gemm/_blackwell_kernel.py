"""MXFP8 GEMM with an epilogue for Blackwell: `tl.dot_scaled` on tiles that TMA moves, persistent over tiles.

Each program walks output tiles of BM x BN. Operands come K-major, BK = 128 of K at a time, through a pipeline in shared
memory; scales come in the 128x4 layout, 512 bytes a 128 x 128 tile of elements, and go from shared to tensor memory
as they are. The sum stays in tensor memory, in two buffers, so that one tile's epilogue overlaps the next tile's
products. Past the edges TMA reads zeros and writes nothing; a zero scale byte is 2**-127, which zeros leave zero.

The epilogue works on words of two neighboring features as in `_device`; a thread holds whole blocks of a row, so no
amax leaves it.
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
def quantize_words(w, row0, col0, M, N2, q_desc, s_ptr, DTYPE: tl.constexpr, BC: tl.constexpr, E5: tl.constexpr,
                   FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Store MXFP8 of words w (BM, BN / 2), in 1 x BC tiles."""
    BM: tl.constexpr = w.shape[0]
    C2: tl.constexpr = w.shape[1]
    tiled = tl.reshape(w, (BM, 2 * C2 // BC, BC // 2))
    inv = inv_scale(row_amax(tiled, DTYPE), E5, FLOOR)
    factor = as_float(inv)[:, :, None]
    lo, hi = unpack(tiled, DTYPE)
    q_desc.store([row0, col0 // 2], tl.reshape(fp8_pair(lo * factor, hi * factor, E5), (BM, C2)))
    r = (row0 + tl.arange(0, BM))[:, None]
    c = (col0 // 32 + 4 * tl.arange(0, C2 // 64))[None, :]
    store_scale(s_ptr, pack_bytes(scale_byte(inv), C2 // 64, BC == 128), r, c, M, N2 // 16, SWIZZLED, ALIGNED)


@kernel(do_not_specialize=["M", "N32", "K", "programs"])
def gemm_kernel(
    a_desc, sa_desc, b_desc, sb_desc, bias_ptr, residual_desc, y_desc, z_desc, q_desc, s_ptr, M, N32, K, programs,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    RESIDUAL: tl.constexpr, EMIT_HIGH: tl.constexpr, EMIT_SUM: tl.constexpr,
    Q_BC: tl.constexpr, Q_E5: tl.constexpr, Q_FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`epilogue.gemm_epilogue`. DTYPE is a 16-bit type whose words the outputs are, or fp32 for a plain y.

    ACT = "": none; Q_BC = 0: no MXFP8.
    """
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
            if EMIT_SUM:
                z_desc.store([row0, col0 // 2], w)
            if ACT != "":
                lo, hi = unpack(w, DTYPE)
                w = pack(act(lo, ACT), act(hi, ACT), DTYPE)
            if RESIDUAL:
                lo, hi = unpack(w, DTYPE)
                more_lo, more_hi = unpack(residual_desc.load([row0, col0 // 2]), DTYPE)
                w = pack(lo + more_lo, hi + more_hi, DTYPE)
            if EMIT_HIGH:
                y_desc.store([row0, col0 // 2], w)
            if Q_BC > 0:
                quantize_words(
                    w, row0, col0, M, N32 * 16, q_desc, s_ptr, DTYPE, Q_BC, Q_E5, Q_FLOOR, SWIZZLED, ALIGNED
                )  # fmt: skip
