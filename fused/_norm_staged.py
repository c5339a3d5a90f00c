"""RMSNorm of bf16 to MXFP8 with tiles in shared memory; see `_staged`.

As in `norm_quantize.norm_tile_kernel`, some programs take the row statistics ahead of those that hold tiles. Reading x
once, the programs of a strip exchanging their sums, is slower: all of them wait (H200: 65536 x 1024 61 % of a copy).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import pack, unpack
from ._row_stats import announce, await_rows, chunk_sums, tree_sum
from ._staged import TILE, await_copies, copy_tile, emit_tile, row_layout, staged_kernel

SCALARS = ["M", "K8", "LD8", "MT", "LEAD", "eps"]


@gluon.constexpr_function
def sum_layout(rows, words, warps):
    """(rows, words): a chunk of 64 words is 16 lanes of 4, as in the kernel of whole rows."""
    lanes = min(32, words // 4)
    down = min(rows, warps)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [down, warps // down], [1, 0])


@gluon.jit
def row_rstd(x_ptr, row0, M, K8, LD2, eps, R: gl.constexpr, LOG2: gl.constexpr):
    """(R,) of whole rows, to the bit as in `norm_quantize.row_stats`."""
    L: gl.constexpr = sum_layout(R, 64 << LOG2, gl.num_warps())
    r = gl.arange(0, R, gl.SliceLayout(1, L))
    c = gl.arange(0, 64 << LOG2, gl.SliceLayout(0, L))
    mask = (row0 + r < M)[:, None] & (c < K8 * 4)[None, :]
    lo, hi = unpack(gl.load(x_ptr + row0 * LD2 + (r[:, None] * LD2 + c[None, :]), mask=mask, other=0), tl.bfloat16)
    square = chunk_sums(gl.fma(hi, hi, lo * lo))
    T: gl.constexpr = gl.BlockedLayout([1, 1 << LOG2], [32, 1], [gl.num_warps(), 1], [1, 0])
    return gl.rsqrt(tree_sum(gl.convert_layout(square, T), LOG2) * (1.0 / (K8 * 8).to(gl.float32)) + eps)


@gluon.jit
def load_weight(ptr, col0, K):
    """(1, 64) weights of the even and of the odd features in the rows' layout."""
    W: gl.constexpr = gl.num_warps()
    c = col0 + gl.arange(0, 128, gl.SliceLayout(0, gl.BlockedLayout([1, 16], [4, 8], [W, 1], [1, 0])))
    w = gl.load(ptr + c, mask=c < K, other=0.0).to(gl.float32)
    lo, hi = gl.split(gl.reshape(w, (64, 2)))
    ROW: gl.constexpr = gl.SliceLayout(0, row_layout(W))
    return gl.convert_layout(lo, ROW)[None, :], gl.convert_layout(hi, ROW)[None, :]


@staged_kernel(do_not_specialize=SCALARS)
def norm_staged_kernel(
    x_ptr, w_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, rstd_ptr, counter_ptr, M, K8, LD8, MT, LEAD, eps, WEIGHT: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    SWIZZLED: gl.constexpr, T_ALIGN: gl.constexpr, LOG2: gl.constexpr, R: gl.constexpr, SUMMING: gl.constexpr,
):  # fmt: skip
    """The roles of `norm_tile_kernel`."""
    LD2 = LD8 * 4
    chunks = (K8 + 15) // 16
    u = gl.program_id(0) // (SUMMING + chunks)
    role = gl.program_id(0) % (SUMMING + chunks)
    buffer = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
    if role < SUMMING:
        if u * 128 < M:
            for start in range(0, 128 // SUMMING, R):
                row0 = u.to(gl.int64) * 128 + role * (128 // SUMMING) + start
                rstd = row_rstd(x_ptr, row0, M, K8, LD2, eps, R, LOG2)
                r = row0 + gl.arange(0, R, rstd.type.layout)
                gl.store(rstd_ptr + r, rstd, mask=r < M)
            announce(counter_ptr, u)
    elif u >= LEAD:
        strip = u - LEAD
        row0 = strip.to(gl.int64) * 128
        col0 = (role - SUMMING) * 128
        copy_tile(x_ptr, buffer, row0, col0 // 2, M, K8 * 4, LD2)
        await_rows(counter_ptr, strip, SUMMING)
        ROWS: gl.constexpr = row_layout(gl.num_warps())
        r = row0 + gl.arange(0, 128, gl.SliceLayout(1, ROWS))
        rstd = gl.load(rstd_ptr + r, mask=r < M, other=0.0)[:, None]
        await_copies(0)
        lo, hi = unpack(buffer.load(ROWS), tl.bfloat16)
        lo, hi = lo * rstd, hi * rstd
        if WEIGHT:
            w_lo, w_hi = load_weight(w_ptr, col0, K8 * 8)
            lo, hi = lo * w_lo, hi * w_hi
        y = pack(lo, hi, tl.bfloat16)
        buffer.store(y)
        emit_tile(
            buffer, y, row0, col0, M, K8, MT, q_ptr, s_ptr, qt_ptr, st_ptr,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, SWIZZLED, T_ALIGN,
        )  # fmt: skip
