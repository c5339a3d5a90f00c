"""Gluon device functions of the staged kernels: tiles of 128 tokens x 128 features of bf16 pass through shared
memory, and each is read there twice, in two layouts.

The rows' layout gives a thread 16 features of a token: the maximum over a row takes few shuffles and qdata leaves in
16-byte pieces. The columns' layout gives it 32 or 64 tokens of a pair of features: the maximum over the tokens hardly
leaves the thread, and four tokens of a feature make one 32-bit word of transposed qdata without an exchange. The tile
comes by `cp.async`, through no register. A program takes one tile, and four or five programs fit a multiprocessor:
persistent programs that copy the next tile meanwhile took 5 to 12 % longer to quantize both orientations (H200).

Scaling multiplies bf16 by a power of two, two elements an instruction. It is exact unless the result is
subnormal, and that far below FP8 rounds to zero either way.
Values, words and scale bits are as in `_device`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ._device import fp8_quad, inv_scale, max_u16x2, scale_byte, store_scale, unpack
from .jit import Kernel

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_copies = async_copy.commit_group
await_copies = async_copy.wait_group
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # pyright: ignore[reportAttributeAccessIssue]


class StagedKernel(Kernel, GluonJITFunction):
    """`jit.Kernel` of Gluon."""


def staged_kernel(*, do_not_specialize: list[str]) -> Callable[[Callable[..., Any]], Any]:
    """`jit.kernel` of Gluon."""
    return lambda fn: StagedKernel(fn, do_not_specialize=do_not_specialize)


@gluon.constexpr_function
def row_layout(warps):
    """(128, 64) words: 16 features a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def copy_layout(warps):
    """(128, 64) words in 16-byte pieces."""
    return gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def column_layout(warps):
    """(128, 64) words: 256 / warps tokens of two features a thread."""
    return gl.BlockedLayout([256 // warps, 1], [1, 32], [warps // 2, 2], [1, 0])


@gluon.constexpr_function
def piece_layout(warps):
    """(128, 32) words in 16-byte pieces."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def line_layout(warps):
    """(128,): a scale word a thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


TILE = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
"""(128, 64) words in shared memory, free of bank conflicts in every layout above."""
TRANSPOSED = gl.SwizzledSharedLayout(4, 2, 8, [1, 0])
"""(128, 32) words: features by tokens."""
TRANSPOSED_BYTES = gl.SwizzledSharedLayout(16, 2, 8, [1, 0])
"""The same as (128, 128) bytes."""


@gluon.jit
def copy_tile(x_ptr, buffer, row0, col0, M, K2, LD2):
    """Start the copy of the tile at a token and a word, zero past the edges."""
    L: gl.constexpr = copy_layout(gl.num_warps())
    r = gl.arange(0, 128, gl.SliceLayout(1, L))
    c = gl.arange(0, 64, gl.SliceLayout(0, L))
    left = gl.minimum(M - row0, 128).to(gl.int32)
    at = x_ptr + (row0 * LD2 + col0) + (r[:, None] * LD2 + c[None, :])
    if (left == 128) & (K2 - col0 >= 64):
        copy_async(buffer, at)
    else:
        copy_async(buffer, at, (r < left)[:, None] & (c < K2 - col0)[None, :])
    commit_copies()


@gluon.jit
def mul_bf16x2(a, b):
    text: gl.constexpr = "mul.rn.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def halves_max(m):
    """Bits of the larger of the two bf16 of a word, as fp32."""
    return gl.maximum(m << 16, m & -0x10000)


@gluon.jit
def row_amax(w, BC: gl.constexpr):
    """Words (128, 64) in the rows' layout to bits (128, 128 / BC) of the largest magnitude; two rows share shuffles."""
    N: gl.constexpr = 128 // BC
    a = gl.reduce(gl.reshape(w & 0x7FFF7FFF, (128, 8, 8)), 2, max_u16x2)  # inside a thread
    a = gl.maximum(a & 0xFFFF, a >> 16)
    a = gl.permute(gl.reshape(a, (2, 64, 8)), (1, 2, 0))
    a = gl.convert_layout(a, gl.BlockedLayout([1, 1, 2], [4, 8, 1], [gl.num_warps(), 1, 1], [2, 1, 0]))
    lo, hi = gl.split(a)
    m = gl.reduce(gl.reshape(lo | (hi << 16), (64, N, 8 // N)), 2, max_u16x2)
    m = gl.reshape(m, (64 * N,))  # joined in (64, N), older Triton prints an error and goes on
    both = gl.join(m << 16, m & -0x10000)
    return gl.reshape(gl.permute(both, (1, 0)), (128, N))


@gluon.jit
def byte_words(byte):
    """(128, N) scale bytes to (128,) words of four; N = 1: one serves the whole word."""
    if byte.shape[1] == 1:
        words = gl.reshape(byte, (128,)) * 0x01010101
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
        even, odd = gl.split(gl.reshape(gl.convert_layout(byte, L), (128, 2, 2)))
        low, high = gl.split(even | (odd << 8))
        words = low | (high << 16)
    return gl.convert_layout(words, line_layout(gl.num_warps()))


@gluon.jit
def emit_rows(w, inv, q_ptr, row0, col0, M, K8, E5: gl.constexpr):
    """Scale words w (128, 64) in the rows' layout by the bits inv (128, N) and store qdata, int32 words."""
    N: gl.constexpr = inv.shape[1]
    even, odd = gl.split(gl.reshape(w, (128, 32, 2)))
    L: gl.constexpr = even.type.layout
    B: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, N, 8 // N], [gl.num_warps(), 1, 1], [2, 1, 0])
    f = gl.expand_dims(gl.convert_layout(inv, gl.SliceLayout(2, B)), 2)
    f = (f & -0x10000) | ((f >> 16) & 0xFFFF)
    f = gl.convert_layout(gl.reshape(f.broadcast_to((128, N, 32 // N)), (128, 32)), L)
    a, b = unpack(mul_bf16x2(even, f), tl.bfloat16)
    c, d = unpack(mul_bf16x2(odd, f), tl.bfloat16)
    q = fp8_quad(a, b, c, d, E5)
    r = gl.arange(0, 128, gl.SliceLayout(1, L))
    k = gl.arange(0, 32, gl.SliceLayout(0, L))
    K4 = (K8 // 2) * 4  # says "a multiple of 4", which gives 16-byte stores
    left = gl.minimum(M - row0, 128).to(gl.int32)
    at = q_ptr + (row0 * K4 + col0 // 4) + (r[:, None] * K4 + k[None, :])
    if (left == 128) & (K8 * 8 - col0 >= 128):
        gl.store(at, q)
    else:
        gl.store(at, q, mask=(r < left)[:, None] & (k < K4 - col0 // 4)[None, :])


@gluon.jit
def column_words(buffer):
    """Tokens 4i, 4i + 1, 4i + 2, 4i + 3 of a tile, (32, 64) words each."""
    w = gl.reshape(buffer.load(column_layout(gl.num_warps())), (32, 2, 2, 64))
    low, high = gl.split(gl.permute(w, (0, 3, 2, 1)))
    w0, w1 = gl.split(low)
    w2, w3 = gl.split(high)
    return w0, w1, w2, w3


@gluon.jit
def column_inv(w0, w1, w2, w3, BR: gl.constexpr, BC: gl.constexpr, E5: gl.constexpr, FLOOR: gl.constexpr):
    """Bits of the inverse scales: of tiles (128 / BR, 128 / BC), or for BC = 1 of even features, and of even and of odd
    features, (128 / BR, 64) each.
    """
    G: gl.constexpr = 128 // BR
    m = max_u16x2(max_u16x2(w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF), max_u16x2(w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF))
    m = gl.reduce(gl.reshape(m, (G, 32 // G, 64)), 1, max_u16x2)
    if BC > 1:
        F: gl.constexpr = 128 // BC
        tile = inv_scale(halves_max(gl.reduce(gl.reshape(m, (G, F, 64 // F)), 2, max_u16x2)), E5, FLOOR)
        even = gl.reshape(gl.expand_dims(tile, 2).broadcast_to((G, F, 64 // F)), (G, 64))
        even = gl.convert_layout(even, m.type.layout)
        odd = even
    else:
        even = inv_scale(m << 16, E5, FLOOR)
        odd = inv_scale(m & -0x10000, E5, FLOOR)
        tile = even
    return tile, even, odd


@gluon.jit
def rows_of_tiles(inv):
    """(G, F) inverse scales of tiles to the (128, F) of their rows."""
    G: gl.constexpr = inv.shape[0]
    F: gl.constexpr = inv.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, gl.num_warps() // 4, 1], [2, 1, 0])
    inv = gl.expand_dims(gl.convert_layout(inv, gl.SliceLayout(1, L)), 1)
    return gl.reshape(inv.broadcast_to((G, 128 // G, F)), (128, F))


@gluon.jit
def column_quads(w0, w1, w2, w3, even, odd, E5: gl.constexpr):
    """(128, 32) words of four tokens, features first."""
    G: gl.constexpr = even.shape[0]
    f = gl.expand_dims((odd & -0x10000) | ((even >> 16) & 0xFFFF), 1)
    f = gl.convert_layout(gl.reshape(f.broadcast_to((G, 32 // G, 64)), (32, 64)), w0.type.layout)
    l0, h0 = unpack(mul_bf16x2(w0, f), tl.bfloat16)
    l1, h1 = unpack(mul_bf16x2(w1, f), tl.bfloat16)
    l2, h2 = unpack(mul_bf16x2(w2, f), tl.bfloat16)
    l3, h3 = unpack(mul_bf16x2(w3, f), tl.bfloat16)
    both = gl.join(fp8_quad(l0, l1, l2, l3, E5), fp8_quad(h0, h1, h2, h3, E5))
    return gl.reshape(gl.permute(both, (1, 2, 0)), (128, 32))


@gluon.jit
def column_scale_words(even, odd):
    """(128,) words of the bytes of a feature's four token blocks."""
    byte = gl.join(scale_byte(even), scale_byte(odd))
    return byte_words(gl.reshape(gl.permute(byte, (1, 2, 0)), (128, even.shape[0])))


@gluon.jit
def store_features(part, qt_ptr, row0, col0, K, MT, T_ALIGN: gl.constexpr):
    """Store words or bytes (features, tokens) in shared memory as transposed qdata whose rows are MT bytes apart."""
    W: gl.constexpr = gl.num_warps()
    F: gl.constexpr = part.shape[0]
    N: gl.constexpr = part.shape[1]
    L: gl.constexpr = piece_layout(W) if T_ALIGN == 16 else gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    if T_ALIGN == 16:
        stride = (MT // 16) * 4  # says "a multiple of 4 words", which gives 16-byte stores
    else:
        stride = MT // (128 // N)
    f = gl.arange(0, F, gl.SliceLayout(1, L))
    k = gl.arange(0, N, gl.SliceLayout(0, L))
    token = (row0 // (128 // N)).to(gl.int32)
    at = qt_ptr + (col0.to(gl.int64) * stride + token) + (f[:, None] * stride + k[None, :])
    if (K - col0 >= F) & (stride - token >= N):
        gl.store(at, part.load(L))
    else:
        gl.store(at, part.load(L), mask=(f < K - col0)[:, None] & (k < stride - token)[None, :])


@gluon.jit
def store_transposed(tile, qt_ptr, row0, col0, K, MT, T_ALIGN: gl.constexpr):
    """Store words (128, 32) in shared memory, features first; MT is a multiple of T_ALIGN.

    `qt_ptr` is int32, or uint8 for T_ALIGN = 1. Smaller pieces than 16 bytes go 16 features at a time, for want of
    registers.
    """
    if T_ALIGN == 16:
        store_features(tile, qt_ptr, row0, col0, K, MT, T_ALIGN)
    else:
        if T_ALIGN == 1:
            parts = reinterpret(tile, gl.uint8, [8, 16, 128], TRANSPOSED_BYTES)
        else:
            parts = reinterpret(tile, gl.int32, [8, 16, 32], TRANSPOSED)
        for i in range(8):
            store_features(parts.index(i), qt_ptr, row0, col0 + i * 16, K, MT, T_ALIGN)


@gluon.constexpr_function
def pairs_inside(warps):
    """Of 32 groups of four tokens in `column_layout`, how often halving them by pairs stays inside a thread."""
    return {4: 4, 8: 3}[warps]


@gluon.jit
def sum_groups(x):
    """`_device.sum_groups` of groups in order: inside a thread, then, handed over at once, over what threads have."""
    INSIDE: gl.constexpr = pairs_inside(gl.num_warps())
    for k in gl.static_range(INSIDE):
        x = gl.sum(gl.reshape(x, (16 >> k, 2, 64)), axis=1)
    REST: gl.constexpr = 32 >> INSIDE
    x = gl.convert_layout(x, gl.BlockedLayout([REST, 1], [1, 32], [1, gl.num_warps()], [0, 1]))
    for k in gl.static_range(INSIDE, 5):
        x = gl.sum(gl.reshape(x, (16 >> k, 2, 64)), axis=1)
    return gl.reshape(x, (64,))


@gluon.jit
def sum_columns(w0, w1, w2, w3, line_ptr, col0, K):
    """Store the sums over the 128 tokens of a tile, in the order of `sum_groups`."""
    l0, h0 = unpack(w0, tl.bfloat16)
    l1, h1 = unpack(w1, tl.bfloat16)
    l2, h2 = unpack(w2, tl.bfloat16)
    l3, h3 = unpack(w3, tl.bfloat16)
    lo = sum_groups((l0 + l1) + (l2 + l3))
    hi = sum_groups((h0 + h1) + (h2 + h3))
    c = col0 + 2 * gl.arange(0, 64, lo.type.layout)
    gl.store(line_ptr + c, lo, mask=c < K)
    gl.store(line_ptr + c + 1, hi, mask=c < K)


@gluon.jit
def emit_tile(
    buffer, w, row0, col0, M, K8, MT, q_ptr, s_ptr, qt_ptr, st_ptr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    SWIZZLED: gl.constexpr, T_ALIGN: gl.constexpr = 16,
):  # fmt: skip
    """MXFP8 of a tile in shared memory, transposed and, unless R_BR = 0, row-wise. Overwrites the tile.

    w: the tile in the rows' layout; for R_BR > 1 it is read again.
    """
    W: gl.constexpr = gl.num_warps()
    K = K8 * 8
    line = gl.arange(0, 128, line_layout(W))
    if R_BR == 1:
        inv = inv_scale(row_amax(w, R_BC), R_E5, R_FLOOR)
        emit_rows(w, inv, q_ptr, row0, col0, M, K8, R_E5)
        store_scale(s_ptr, byte_words(scale_byte(inv)), row0 + line, col0 // 32, M, K8 // 4, SWIZZLED, R_ALIGNED)
    w0, w1, w2, w3 = column_words(buffer)
    tile, even, odd = column_inv(w0, w1, w2, w3, C_BR, C_BC, C_E5, C_FLOOR)
    if R_BR > 1:
        if R_BR != C_BR or R_BC != C_BC or R_E5 != C_E5 or R_FLOOR != C_FLOOR:
            tile, _even, _odd = column_inv(w0, w1, w2, w3, R_BR, R_BC, R_E5, R_FLOOR)
        inv = rows_of_tiles(tile)
        emit_rows(buffer.load(row_layout(W)), inv, q_ptr, row0, col0, M, K8, R_E5)
        store_scale(s_ptr, byte_words(scale_byte(inv)), row0 + line, col0 // 32, M, K8 // 4, SWIZZLED, R_ALIGNED)
        barrier()
        w0, w1, w2, w3 = column_words(buffer)  # again: rows and columns together would take 32 registers more
    q = column_quads(w0, w1, w2, w3, even, odd, C_E5)
    out = reinterpret(buffer, gl.int32, [128, 32], TRANSPOSED)
    out.store(q)
    words = column_scale_words(even, odd)
    store_scale(st_ptr, words, col0 + line, (row0 // 32).to(gl.int32), K, (MT + 31) // 32, SWIZZLED, C_ALIGNED)
    store_transposed(out, qt_ptr, row0, col0, K, MT, T_ALIGN)
