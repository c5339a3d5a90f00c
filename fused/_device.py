"""Device functions the kernels share: from a tile of values in registers to qdata, scales and their transpose.

A program works on 128 tokens x C features, C a multiple of 128. The tokens come as four subtiles `y0 .. y3` of 32 rows: row
`row_index(j)` of subtile j is chosen so that a thread holds consecutive tokens. Four elements of one feature
then make one 32-bit word without leaving the thread, the transpose goes through shared memory in words
rather than bytes, and each feature's 128 tokens leave as one full line.

`(BR, BC)` is the tile in (tokens, features) whose common amax sets the scale: `rowwise` specs have
`BR, BC = across, along`, `colwise` ones `along, across`. amax is an integer maximum of the bits of |y|,
which propagates NaN and Inf. Four E8M0 bytes travel as one 32-bit word.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter truncates casts to bf16 and fp8 and loses NaN; there they are spelled out."""

TOKENS = 128
"""Tokens a two-orientation program covers: the widest tile, and one full line of transposed qdata."""


@triton.jit
def abs_bits(y):
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax, E5: tl.constexpr, FLOOR: tl.constexpr):
    """E8M0 byte from the bits of amax; see `reference.scale_bytes`."""
    byte = (amax >> 23) - (15 if E5 else 8)
    if not FLOOR:
        byte += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(amax >= 0x7F800000, 255, tl.maximum(byte, 0))


@triton.jit
def reciprocal(byte):
    """fp32 `2**(127 - byte)`, NaN for byte 255."""
    return tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_to(y, DTYPE: tl.constexpr):
    """fp32 to DTYPE, to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = y.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        y = tl.where(y != y, bits | 0x400000, rounded).to(tl.float32, bitcast=True)
    return y.to(DTYPE)


@triton.jit
def software_fp8(scaled, E5: tl.constexpr):
    DROPPED: tl.constexpr = 21 if E5 else 20
    rebias: tl.constexpr = (127 - 15) << 2 if E5 else (127 - 7) << 3
    smallest: tl.constexpr = 2.0**-14 if E5 else 2.0**-6
    per_step: tl.constexpr = 2.0**16 if E5 else 2.0**9
    bits = abs_bits(scaled)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - rebias
    magnitude = bits.to(tl.float32, bitcast=True)
    subnormal = (magnitude * per_step + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < smallest, subnormal, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def to_fp8(scaled, E5: tl.constexpr, FLOOR: tl.constexpr):
    """Round to nearest even; RCEIL scales cannot overflow, FLOOR ones saturate. NaN stays NaN."""
    if FLOOR:
        limit = 57344.0 if E5 else 448.0
        scaled = tl.where(scaled > limit, limit, tl.where(scaled < -limit, -limit, scaled))
    if INTERPRETED:
        q = software_fp8(scaled, E5)
    elif E5:
        q = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        q = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return q


@triton.jit
def row_index(j: tl.constexpr, REPS: tl.constexpr):
    """Token of each of the 32 rows of subtile j: REPS groups of four consecutive tokens per thread."""
    i = tl.arange(0, 32)
    PASS: tl.constexpr = 32 // REPS
    return (i % PASS) * (4 * REPS) + (i // PASS) * 4 + j


@triton.jit
def pack_bytes(byte, W: tl.constexpr, WIDE: tl.constexpr):
    """(R, blocks) scale bytes to (R, W) words of four; WIDE: one byte serves a whole word."""
    if WIDE:
        words = byte * 0x01010101
    else:
        shift = (tl.arange(0, 4) * 8)[None, None, :]
        words = tl.sum(tl.reshape(byte, (byte.shape[0], W, 4)) << shift, axis=2)
    return words


@triton.jit
def store_scale(ptr, words, r, c, R, CB, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr):
    """Store scale words of rows r (A, 1) and scale columns c .. c + 3 (1, B) of an (R, CB) scale matrix.

    Swizzled padding is written as zero. ALIGNED: `ptr` is int32 and every word is whole.
    """
    valid = tl.minimum(tl.maximum(CB - c, 0), 4)
    keep = tl.where(valid == 4, -1, (1 << (valid * 8)) - 1)
    words = tl.where(r < R, words & keep, 0)
    if SWIZZLED:
        tiles = (CB + 3) // 4
        offset = ((r // 128).to(tl.int64) * tiles + c // 4) * 128 + (r % 32) * 4 + (r % 128) // 32
        tl.store(ptr + offset, words, mask=(r < (R + 127) // 128 * 128) & (c < tiles * 4))
    elif ALIGNED:
        tl.store(ptr + r.to(tl.int64) * (CB // 4) + c // 4, words, mask=(r < R) & (c < CB))
    else:
        offset = r.to(tl.int64) * CB + c
        for k in tl.static_range(4):
            tl.store(ptr + offset + k, ((words >> (8 * k)) & 0xFF).to(tl.uint8), mask=(r < R) & (c + k < CB))


@triton.jit
def store_rows(value, rows, row0, col0, M, K, ptr):
    """Store value (R, C) at tokens `row0 + rows` of a (M, K) matrix, in the layout the values were loaded in.

    The extra dimension and the zero `skew`, which leaves the compiler knowing no alignment beyond 8 elements,
    keep Triton from choosing one layout for loads and stores together: the layout of a load, and with it the
    order of the sums over a row, then depends on the input's dtype alone.
    """
    R: tl.constexpr = value.shape[0]
    C: tl.constexpr = value.shape[1]
    skew = (K >> 30) * 8
    cols = (col0 + tl.arange(0, C))[None, None, :]
    tokens = rows[None, :, None]
    at = ptr + (row0 * K + skew) + tokens * K + cols
    tl.store(at, tl.reshape(value, (1, R, C)), mask=((row0 + tokens) < M) & (cols < K))


@triton.jit
def emit_rows(
    y, rows, row0, col0, M, K, q_ptr, s_ptr,
    BC: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Quantize y (R, C) in 1 x BC tiles and store qdata and scales of tokens `row0 + rows`."""
    R: tl.constexpr = y.shape[0]
    C: tl.constexpr = y.shape[1]
    tiled = tl.reshape(y, (R, C // BC, BC))
    byte = scale_byte(tl.max(abs_bits(tiled), axis=2), E5, FLOOR)
    scaled = tl.reshape(tiled * reciprocal(byte)[:, :, None], (R, C))
    store_rows(to_fp8(scaled, E5, FLOOR), rows, row0, col0, M, K, q_ptr)
    W: tl.constexpr = C // 128
    words = pack_bytes(byte, W, BC == 128)
    c = col0 // 32 + 4 * tl.arange(0, W)
    store_scale(s_ptr, words, (row0 + rows)[:, None], c[None, :], M, K // 32, SWIZZLED, ALIGNED)


@triton.jit
def block_amax(m, BR: tl.constexpr, BC: tl.constexpr):
    """m (PASS, C): amax bits of each pass of consecutive tokens; to (128 / BR, C / BC)."""
    G: tl.constexpr = 128 // BR
    C: tl.constexpr = m.shape[1]
    amax = tl.max(tl.reshape(m, (G, m.shape[0] // G, C)), axis=1)
    if BC > 1:
        amax = tl.max(tl.reshape(amax, (G, C // BC, BC)), axis=2)
    return amax


@triton.jit
def spread(inv, REPS: tl.constexpr, C: tl.constexpr):
    """(G, C / BC) per-tile factors to the (32, C) elements of a subtile."""
    G: tl.constexpr = inv.shape[0]
    N: tl.constexpr = inv.shape[1]
    PASS: tl.constexpr = 32 // REPS
    wide = tl.broadcast_to(inv[:, None, :, None], (G, PASS // G, N, C // N))
    wide = tl.reshape(wide, (1, PASS, C))
    return tl.reshape(tl.broadcast_to(wide, (REPS, PASS, C)), (32, C))


@triton.jit
def store_transposed(q0, q1, q2, q3, row0, col0, K, MT, qt_ptr, REPS: tl.constexpr, WORDS: tl.constexpr):
    """Four (32, C) subtiles of bytes to (C, 128) of the transposed qdata, whose rows are MT bytes apart.

    WORDS: `qt_ptr` is int32 and MT a multiple of 4.
    """
    C: tl.constexpr = q0.shape[1]
    PASS: tl.constexpr = 32 // REPS
    word = q0.to(tl.int32) | (q1.to(tl.int32) << 8) | (q2.to(tl.int32) << 16) | (q3.to(tl.int32) << 24)
    word = tl.permute(tl.reshape(word, (REPS, PASS, C)), (2, 1, 0))
    word = tl.reshape(word, (C, 32))
    cols = col0 + tl.arange(0, C)
    if WORDS:
        tokens = row0 // 4 + tl.arange(0, 32)
        at = qt_ptr + cols[:, None].to(tl.int64) * (MT // 4) + tokens[None, :]
        tl.store(at, word, mask=(cols < K)[:, None] & (tokens < MT // 4)[None, :])
    else:
        even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
        odd = tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF)
        byte = tl.reshape(tl.join(even, odd), (C, 128)).to(tl.uint8)
        tokens = row0 + tl.arange(0, 128)
        at = qt_ptr + cols[:, None].to(tl.int64) * MT + tokens[None, :]
        tl.store(at, byte, mask=(cols < K)[:, None] & (tokens < MT)[None, :])


@triton.jit
def quantize4(y0, y1, y2, y3, inv, REPS: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr):
    factor = spread(inv, REPS, y0.shape[1])
    q0 = to_fp8(y0 * factor, E5, FLOOR)
    q1 = to_fp8(y1 * factor, E5, FLOOR)
    q2 = to_fp8(y2 * factor, E5, FLOOR)
    q3 = to_fp8(y3 * factor, E5, FLOOR)
    return q0, q1, q2, q3


@triton.jit
def store_square_row_scale(
    byte, row0, col0, M, K, s_ptr, C: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr
):
    """(G, C / BC) bytes of tiles several tokens high to the row-wise scales of 128 tokens."""
    G: tl.constexpr = byte.shape[0]
    N: tl.constexpr = byte.shape[1]
    W: tl.constexpr = C // 128
    words = pack_bytes(byte, W, N * 32 != C)
    words = tl.reshape(tl.broadcast_to(words[:, None, :], (G, 128 // G, W)), (128, W))
    r = row0 + tl.arange(0, 128)
    c = col0 // 32 + 4 * tl.arange(0, W)
    store_scale(s_ptr, words, r[:, None], c[None, :], M, K // 32, SWIZZLED, ALIGNED)


@triton.jit
def store_col_scale(byte, row0, col0, MT, K, st_ptr, C: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr):
    """(G, C / BC) bytes to the scales of the transposed qdata: one word of four token blocks per feature."""
    G: tl.constexpr = byte.shape[0]
    N: tl.constexpr = byte.shape[1]
    if G == 1:
        words = tl.reshape(byte, (N,)) * 0x01010101
    else:
        words = tl.sum(byte << (tl.arange(0, 4) * 8)[:, None], axis=0)
    words = tl.reshape(tl.broadcast_to(words[:, None], (N, C // N)), (C, 1))
    r = col0 + tl.arange(0, C)
    c = (row0 // 32 + 4 * tl.arange(0, 1)).to(tl.int32)
    store_scale(st_ptr, words, r[:, None], c[None, :], K, (MT + 31) // 32, SWIZZLED, ALIGNED)


@triton.jit
def emit_tile(
    y0, y1, y2, y3, row0, col0, M, K, MT, q_ptr, s_ptr, qt_ptr, st_ptr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, SHARED: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """MXFP8 of a 128 x C tile given as four (32, C) fp32 subtiles, zero past the edges, in either orientation or both.

    R_BR = 0: nothing row-wise; C_BR = 0: nothing transposed. SHARED: both orientations have one tile and one
    format, so elements are rounded once. M, K: extent of qdata; MT: bytes a row of transposed qdata takes.
    """
    C: tl.constexpr = y0.shape[1]
    PASS: tl.constexpr = 32 // REPS
    if R_BR == 1:
        emit_rows(
            y0, row_index(0, REPS), row0, col0, M, K, q_ptr, s_ptr, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED
        )  # fmt: skip
        emit_rows(
            y1, row_index(1, REPS), row0, col0, M, K, q_ptr, s_ptr, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED
        )  # fmt: skip
        emit_rows(
            y2, row_index(2, REPS), row0, col0, M, K, q_ptr, s_ptr, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED
        )  # fmt: skip
        emit_rows(
            y3, row_index(3, REPS), row0, col0, M, K, q_ptr, s_ptr, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED
        )  # fmt: skip
    if C_BR > 0 or R_BR > 1:
        m = tl.maximum(tl.maximum(abs_bits(y0), abs_bits(y1)), tl.maximum(abs_bits(y2), abs_bits(y3)))
        m = tl.max(tl.reshape(m, (REPS, PASS, C)), axis=0)
        if R_BR > 1:
            byte = scale_byte(block_amax(m, R_BR, R_BC), R_E5, R_FLOOR)
            q0, q1, q2, q3 = quantize4(y0, y1, y2, y3, reciprocal(byte), REPS, R_E5, R_FLOOR)
            store_rows(q0, row_index(0, REPS), row0, col0, M, K, q_ptr)
            store_rows(q1, row_index(1, REPS), row0, col0, M, K, q_ptr)
            store_rows(q2, row_index(2, REPS), row0, col0, M, K, q_ptr)
            store_rows(q3, row_index(3, REPS), row0, col0, M, K, q_ptr)
            store_square_row_scale(byte, row0, col0, M, K, s_ptr, C, SWIZZLED, R_ALIGNED)
            if SHARED:
                store_transposed(q0, q1, q2, q3, row0, col0, K, MT, qt_ptr, REPS, WORDS)
                store_col_scale(byte, row0, col0, MT, K, st_ptr, C, SWIZZLED, C_ALIGNED)
        if C_BR > 0 and not SHARED:
            byte = scale_byte(block_amax(m, C_BR, C_BC), C_E5, C_FLOOR)
            q0, q1, q2, q3 = quantize4(y0, y1, y2, y3, reciprocal(byte), REPS, C_E5, C_FLOOR)
            store_transposed(q0, q1, q2, q3, row0, col0, K, MT, qt_ptr, REPS, WORDS)
            store_col_scale(byte, row0, col0, MT, K, st_ptr, C, SWIZZLED, C_ALIGNED)
