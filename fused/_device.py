"""Device functions the kernels share: from a tile of values in registers to qdata, scales and their transpose.

Values travel as words of two neighboring features (two bf16 or fp16 in 32 bits, two fp32 in 64): one conversion
instruction rounds a pair, one maximum compares a pair of bf16.

A two-orientation program works on 128 tokens x 128 features. The tokens come as four subtiles
`w0 .. w3` of 32 rows: row `row_index(j)` of subtile j is chosen so that a thread holds consecutive tokens. Four
elements of one feature then make one 32-bit word without leaving the thread, the transpose goes through shared memory
in words rather than bytes, and each feature's 128 tokens leave as one full line.

`(BR, BC)` is the tile in (tokens, features) whose common amax sets the scale: `rowwise` specs have
`BR, BC = across, along`, `colwise` ones `along, across`. amax is an integer maximum of the bits of |y|,
which propagates NaN and Inf. Four E8M0 bytes travel as one 32-bit word.
"""

# ruff: noqa: SIM300

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter knows no inline assembly, truncates casts to bf16 and fp8 and loses NaN; there they are
spelled out."""


@triton.jit
def abs_bits(y):
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def unpack(w, DTYPE: tl.constexpr):
    """Word to its two values in fp32, the feature with the lower index first."""
    if DTYPE == tl.bfloat16:
        lo = (w << 16).to(tl.float32, bitcast=True)
        hi = (w & -0x10000).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        lo = (w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        hi = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        lo = (w & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        hi = (w >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return lo, hi


@triton.jit
def software_bf16(y):
    bits = y.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(y != y, 0x7FFF, rounded) & 0xFFFF


@triton.jit
def pack(lo, hi, DTYPE: tl.constexpr):
    """Two fp32 values to a word of DTYPE, rounded to nearest even."""
    if DTYPE == tl.bfloat16:
        if INTERPRETED:
            w = software_bf16(lo) | (software_bf16(hi) << 16)
        else:
            w = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
            )
    elif DTYPE == tl.float16:
        low = lo.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        w = low | (hi.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        low = lo.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        w = low | (hi.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    return w


@triton.jit
def max_u16x2(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def inv_scale(amax, E5: tl.constexpr, FLOOR: tl.constexpr):
    """Bits of fp32 `2**(127 - byte)`, NaN for byte 255, from the bits of amax; see `reference.scale_bytes`.

    RCEIL: adding the distance from 1.75 to 2 carries a mantissa above 1.75 into the exponent.
    """
    carry: tl.constexpr = 0 if FLOOR else 0x1FFFFF
    bias: tl.constexpr = 15 << 23 if E5 else 8 << 23
    exponent = tl.maximum((amax + carry) & 0x7F800000, bias) - bias
    return tl.where(amax >= 0x7F800000, 0x7FC00000, (254 << 23) - exponent)


@triton.jit
def scale_byte(inv):
    """E8M0 byte of a tile from the bits of its inverse scale."""
    return (254 - (inv >> 23)) & 0xFF


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def software_fp8(scaled, E5: tl.constexpr):
    """Byte of fp32, to nearest even, saturating, NaN kept; as int32."""
    DROPPED: tl.constexpr = 21 if E5 else 20
    rebias: tl.constexpr = (127 - 15) << 2 if E5 else (127 - 7) << 3
    smallest: tl.constexpr = 2.0**-14 if E5 else 2.0**-6
    per_step: tl.constexpr = 2.0**16 if E5 else 2.0**9
    limit: tl.constexpr = 57344.0 if E5 else 448.0
    bits = abs_bits(scaled)
    magnitude = bits.to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > limit, limit, magnitude)
    clamped = magnitude.to(tl.int32, bitcast=True)
    normal = ((clamped + ((1 << (DROPPED - 1)) - 1) + ((clamped >> DROPPED) & 1)) >> DROPPED) - rebias
    subnormal = (magnitude * per_step + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < smallest, subnormal, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def fp8_pair(lo, hi, E5: tl.constexpr):
    """Two fp32 tensors to one of int16: lo's byte below hi's."""
    if INTERPRETED:
        q = (software_fp8(lo, E5) | (software_fp8(hi, E5) << 8)).to(tl.int16)
    elif E5:
        q = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $3, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 b, $4, $2; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [lo, hi], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        q = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [lo, hi], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return q


@triton.jit
def fp8_quad(a, b, c, d, E5: tl.constexpr):
    """Four fp32 tensors to one of int32, a's byte lowest."""
    if INTERPRETED:
        q = software_fp8(a, E5) | (software_fp8(b, E5) << 8) | (software_fp8(c, E5) << 16)
        q = q | (software_fp8(d, E5) << 24)
    elif E5:
        q = tl.inline_asm_elementwise(
            "{ .reg .b16 x, y; cvt.rn.satfinite.e5m2x2.f32 x, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 y, $4, $3; mov.b32 $0, {x, y}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        q = tl.inline_asm_elementwise(
            "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return q


@triton.jit
def row_index(j: tl.constexpr, REPS: tl.constexpr):
    """Token of each of the 32 rows of subtile j: REPS groups of four consecutive tokens per thread."""
    i = tl.arange(0, 32)
    PASS: tl.constexpr = 32 // REPS
    return (i % PASS) * (4 * REPS) + (i // PASS) * 4 + j


@triton.jit
def load_words(ptr, rows, row0, col0, M, K2, LD2, C2: tl.constexpr):
    """(R, C2) words of tokens `row0 + rows`, features from col0, zero past the edges; rows are LD2 words apart."""
    cols = col0 // 2 + tl.arange(0, C2)
    mask = ((row0 + rows) < M)[:, None] & (cols < K2)[None, :]
    return tl.load(ptr + row0 * LD2 + rows[:, None] * LD2 + cols[None, :], mask=mask, other=0)


@triton.jit
def store_rows(value, rows, row0, col0, M, K2, ptr):
    """Store words (R, C2) at tokens `row0 + rows`, features from col0, of an (M, K2)-word matrix."""
    store_rows_until(value, rows, row0, col0, M, K2, K2, ptr)


@triton.jit
def store_rows_until(value, rows, row0, col0, M, K2, END2, ptr):
    """`store_rows` of words before END2 alone.

    The extra dimension and the zero `skew`, which leaves the compiler knowing no alignment beyond 4 words,
    keep Triton from choosing one layout for loads and stores together: the layout of a load, and with it the
    order of the sums over a row, then depends on the input's dtype alone.
    """
    R: tl.constexpr = value.shape[0]
    C2: tl.constexpr = value.shape[1]
    skew = (K2 >> 30) * 4
    cols = (col0 // 2 + tl.arange(0, C2))[None, None, :]
    tokens = rows[None, :, None]
    at = ptr + (row0 * K2 + skew) + tokens * K2 + cols
    tl.store(at, tl.reshape(value, (1, R, C2)), mask=((row0 + tokens) < M) & (cols < END2))


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

    ALIGNED: CB is a multiple of 4. `ptr` is int32 when ALIGNED or SWIZZLED, else uint8. Swizzled padding is written
    as zero.
    """
    if not ALIGNED:
        valid = tl.minimum(tl.maximum(CB - c, 0), 4)
        words = words & tl.where(valid == 4, -1, (1 << (valid * 8)) - 1)
    if SWIZZLED:
        tiles = (CB + 3) // 4
        offset = ((r // 128).to(tl.int64) * tiles + c // 4) * 128 + (r % 32) * 4 + (r % 128) // 32
        words = tl.where((r < R) & (c < CB), words, 0)
        tl.store(ptr + offset, words, mask=(r < (R + 127) // 128 * 128) & (c < tiles * 4))
    elif ALIGNED:
        tl.store(ptr + r.to(tl.int64) * (CB // 4) + c // 4, words, mask=(r < R) & (c < CB))
    else:
        offset = r.to(tl.int64) * CB + c
        for k in tl.static_range(4):
            tl.store(ptr + offset + k, ((words >> (8 * k)) & 0xFF).to(tl.uint8), mask=(r < R) & (c + k < CB))


@triton.jit
def row_amax(tiled, DTYPE: tl.constexpr):
    """(R, N, words) to (R, N): bits of the largest magnitude."""
    if DTYPE == tl.bfloat16 and not INTERPRETED:
        both = tl.reduce(tiled & 0x7FFF7FFF, 2, max_u16x2)
        amax = tl.maximum(both << 16, both & -0x10000)
    else:
        lo, hi = unpack(tiled, DTYPE)
        amax = tl.max(tl.maximum(abs_bits(lo), abs_bits(hi)), axis=2)
    return amax


@triton.jit
def quantize_rows(
    w, rows, row0, col0, M, K2, q_ptr, DTYPE: tl.constexpr, BC: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr
):
    """Quantize words w (R, C2) in 1 x BC tiles, store qdata (int16 words); return the scale words (R, C2 / 64)."""
    R: tl.constexpr = w.shape[0]
    C2: tl.constexpr = w.shape[1]
    tiled = tl.reshape(w, (R, 2 * C2 // BC, BC // 2))
    inv = inv_scale(row_amax(tiled, DTYPE), E5, FLOOR)
    factor = as_float(inv)[:, :, None]
    lo, hi = unpack(tiled, DTYPE)
    store_rows(tl.reshape(fp8_pair(lo * factor, hi * factor, E5), (R, C2)), rows, row0, col0, M, K2, q_ptr)
    return pack_bytes(scale_byte(inv), C2 // 64, BC == 128)


@triton.jit
def emit_rows(
    w, rows, row0, col0, M, K2, q_ptr, s_ptr, DTYPE: tl.constexpr,
    BC: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Quantize and store scales of tokens `row0 + rows`, in 1 x BC tiles."""
    words = quantize_rows(w, rows, row0, col0, M, K2, q_ptr, DTYPE, BC, E5, FLOOR)
    c = col0 // 32 + 4 * tl.arange(0, w.shape[1] // 64)
    store_scale(s_ptr, words, (row0 + rows)[:, None], c[None, :], M, K2 // 16, SWIZZLED, ALIGNED)


@triton.jit
def max_passes(a, b, c, d, REPS: tl.constexpr):
    """Four (32, C2) int32 to their maximum over the consecutive tokens a thread holds, (PASS, C2)."""
    m = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    return tl.max(tl.reshape(m, (REPS, 32 // REPS, m.shape[1])), axis=0)


@triton.jit
def column_amax(w0, w1, w2, w3, BR: tl.constexpr, DTYPE: tl.constexpr, REPS: tl.constexpr):
    """Bits of the largest magnitude of each feature over each BR tokens: two (128 / BR, C2), even and odd features."""
    G: tl.constexpr = 128 // BR
    PASS: tl.constexpr = 32 // REPS
    C2: tl.constexpr = w0.shape[1]
    if DTYPE == tl.bfloat16 and not INTERPRETED:
        m = max_u16x2(
            max_u16x2(w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF), max_u16x2(w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF)
        )  # fmt: skip
        m = tl.reduce(tl.reshape(m, (REPS, PASS, C2)), 0, max_u16x2)
        m = tl.reduce(tl.reshape(m, (G, PASS // G, C2)), 1, max_u16x2)
        lo = m << 16
        hi = m & -0x10000
    else:
        l0, h0 = unpack(w0, DTYPE)
        l1, h1 = unpack(w1, DTYPE)
        l2, h2 = unpack(w2, DTYPE)
        l3, h3 = unpack(w3, DTYPE)
        lo = max_passes(abs_bits(l0), abs_bits(l1), abs_bits(l2), abs_bits(l3), REPS)
        hi = max_passes(abs_bits(h0), abs_bits(h1), abs_bits(h2), abs_bits(h3), REPS)
        lo = tl.max(tl.reshape(lo, (G, PASS // G, C2)), axis=1)
        hi = tl.max(tl.reshape(hi, (G, PASS // G, C2)), axis=1)
    return lo, hi


@triton.jit
def spread(inv, REPS: tl.constexpr, C2: tl.constexpr):
    """(G, N) per-tile factors to the (32, C2) words of a subtile."""
    G: tl.constexpr = inv.shape[0]
    N: tl.constexpr = inv.shape[1]
    PASS: tl.constexpr = 32 // REPS
    wide = tl.broadcast_to(inv[:, None, :, None], (G, PASS // G, N, C2 // N))
    wide = tl.reshape(wide, (1, PASS, C2))
    return tl.reshape(tl.broadcast_to(wide, (REPS, PASS, C2)), (32, C2))


@triton.jit
def block_scales(lo, hi, BC: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr):
    """Inverse scales of even and odd features; for BC > 1 both are the (G, C / BC) ones of the common tile."""
    if BC > 1:
        m = tl.maximum(lo, hi)
        m = tl.max(tl.reshape(m, (m.shape[0], 2 * m.shape[1] // BC, BC // 2)), axis=2)
        inv_lo = inv_scale(m, E5, FLOOR)
        inv_hi = inv_lo
    else:
        inv_lo = inv_scale(lo, E5, FLOOR)
        inv_hi = inv_scale(hi, E5, FLOOR)
    return inv_lo, inv_hi


@triton.jit
def store_transposed(lo, hi, row0, col0, K, MT, qt_ptr, REPS: tl.constexpr, T_ALIGN: tl.constexpr):
    """Words of four tokens, (32, 64) each for even and odd features, to (128, 128) of the transposed qdata.

    Its rows are MT bytes apart, MT a multiple of T_ALIGN. `qt_ptr` is int32, or uint8 for T_ALIGN = 1.
    """
    PASS: tl.constexpr = 32 // REPS
    word = tl.reshape(tl.join(lo, hi), (REPS, PASS, 128))
    word = tl.reshape(tl.permute(word, (2, 1, 0)), (128, 32))
    cols = col0 + tl.arange(0, 128)
    if T_ALIGN > 1:
        if T_ALIGN == 16:
            stride = (MT // 16) * 4  # says "a multiple of 4 words", which gives 16-byte stores
        else:
            stride = MT // 4
        tokens = (row0 // 128).to(tl.int32) * 32 + tl.arange(0, 32)
        at = qt_ptr + cols[:, None].to(tl.int64) * stride + tokens[None, :]
        tl.store(at, word, mask=(cols < K)[:, None] & (tokens < stride)[None, :])
    else:
        even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
        odd = tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF)
        byte = tl.reshape(tl.join(even, odd), (128, 128)).to(tl.uint8)
        tokens = row0 + tl.arange(0, 128)
        at = qt_ptr + cols[:, None].to(tl.int64) * MT + tokens[None, :]
        tl.store(at, byte, mask=(cols < K)[:, None] & (tokens < MT)[None, :])


@triton.jit
def store_row_scale_of_tiles(inv, row0, col0, M, K2, s_ptr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr):
    """(G, 128 / BC) inverse scales of tiles several tokens high to the row-wise scales of 128 tokens."""
    G: tl.constexpr = inv.shape[0]
    words = pack_bytes(scale_byte(inv), 1, inv.shape[1] == 1)
    words = tl.reshape(tl.broadcast_to(words[:, None, :], (G, 128 // G, 1)), (128, 1))
    r = row0 + tl.arange(0, 128)
    c = col0 // 32 + 4 * tl.arange(0, 1)
    store_scale(s_ptr, words, r[:, None], c[None, :], M, K2 // 16, SWIZZLED, ALIGNED)


@triton.jit
def token_words(inv):
    """(G, N) inverse scales to (N,) words of the bytes of the four token blocks."""
    byte = scale_byte(inv)
    if inv.shape[0] == 1:
        words = tl.reshape(byte, (inv.shape[1],)) * 0x01010101
    else:
        words = tl.sum(byte << (tl.arange(0, 4) * 8)[:, None], axis=0)
    return words


@triton.jit
def store_col_scale(lo, hi, row0, col0, MT, K, st_ptr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr):
    """`block_scales` to the scales of the transposed qdata: one word of four token blocks per feature."""
    N: tl.constexpr = lo.shape[1]
    words = tl.join(token_words(lo), token_words(hi))
    words = tl.reshape(tl.broadcast_to(words[:, None, :], (N, 64 // N, 2)), (128, 1))
    r = col0 + tl.arange(0, 128)
    c = (row0 // 32 + 4 * tl.arange(0, 1)).to(tl.int32)
    store_scale(st_ptr, words, r[:, None], c[None, :], K, (MT + 31) // 32, SWIZZLED, ALIGNED)


@triton.jit
def sum_groups(x, REPS: tl.constexpr):
    """(C,) sums of x (32, C), whose rows are groups of four tokens as `row_index` has them: neighbors first, then pairs
    of those and so on, an order that depends on tokens alone, not on the warps and layout of a kernel.
    """
    C: tl.constexpr = x.shape[1]
    for k in tl.static_range(5):
        if (1 << k) < REPS:
            x = tl.sum(tl.reshape(x, (REPS >> (k + 1), 2, 32 // REPS, C)), axis=1)
            x = tl.reshape(x, (32 >> (k + 1), C))
        else:
            x = tl.sum(tl.reshape(x, (16 >> k, 2, C)), axis=1)
    return tl.reshape(x, (C,))


@triton.jit
def sum_tokens(w0, w1, w2, w3, line_ptr, col0, K, DTYPE: tl.constexpr, REPS: tl.constexpr):
    """Store the sums over the 128 tokens of four (32, 64) subtiles of words, in the order of `sum_groups`."""
    l0, h0 = unpack(w0, DTYPE)
    l1, h1 = unpack(w1, DTYPE)
    l2, h2 = unpack(w2, DTYPE)
    l3, h3 = unpack(w3, DTYPE)
    lo = sum_groups((l0 + l1) + (l2 + l3), REPS)
    hi = sum_groups((h0 + h1) + (h2 + h3), REPS)
    cols = tl.arange(0, 128)
    tl.store(line_ptr + col0 + cols, tl.reshape(tl.join(lo, hi), (128,)), mask=col0 + cols < K)


@triton.jit
def scaled_row(w, inv, DTYPE: tl.constexpr, E5: tl.constexpr):
    lo, hi = unpack(w, DTYPE)
    return fp8_pair(lo * inv, hi * inv, E5)


@triton.jit
def scaled_columns(w0, w1, w2, w3, inv_lo, inv_hi, DTYPE: tl.constexpr, E5: tl.constexpr):
    l0, h0 = unpack(w0, DTYPE)
    l1, h1 = unpack(w1, DTYPE)
    l2, h2 = unpack(w2, DTYPE)
    l3, h3 = unpack(w3, DTYPE)
    lo = fp8_quad(l0 * inv_lo, l1 * inv_lo, l2 * inv_lo, l3 * inv_lo, E5)
    hi = fp8_quad(h0 * inv_hi, h1 * inv_hi, h2 * inv_hi, h3 * inv_hi, E5)
    return lo, hi


@triton.jit
def emit_columns(
    w0, w1, w2, w3, row0, col0, K2, MT, qt_ptr, st_ptr, DTYPE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr, ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """Transposed qdata and its scales of a 128 x 128 tile given as four (32, 64) subtiles of words."""
    lo, hi = column_amax(w0, w1, w2, w3, BR, DTYPE, REPS)
    inv_lo, inv_hi = block_scales(lo, hi, BC, E5, FLOOR)
    factor_lo = spread(as_float(inv_lo), REPS, 64)
    factor_hi = factor_lo
    if BC == 1:
        factor_hi = spread(as_float(inv_hi), REPS, 64)
    q_lo, q_hi = scaled_columns(w0, w1, w2, w3, factor_lo, factor_hi, DTYPE, E5)
    store_transposed(q_lo, q_hi, row0, col0, K2 * 2, MT, qt_ptr, REPS, T_ALIGN)
    store_col_scale(inv_lo, inv_hi, row0, col0, MT, K2 * 2, st_ptr, SWIZZLED, ALIGNED)


@triton.jit
def emit_tile(
    w0, w1, w2, w3, row0, col0, M, K2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """MXFP8 of 128 x 128 values given as four (32, 64) subtiles of words, zero past the edges, in either orientation
    or both.

    R_BR = 0: nothing row-wise; C_BR = 0: nothing transposed. M, 2 * K2: extent of qdata; MT: bytes a row of
    transposed qdata takes.
    """
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    if R_BR == 1:
        s0 = quantize_rows(w0, r0, row0, col0, M, K2, q_ptr, DTYPE, R_BC, R_E5, R_FLOOR)
        s1 = quantize_rows(w1, r1, row0, col0, M, K2, q_ptr, DTYPE, R_BC, R_E5, R_FLOOR)
        s2 = quantize_rows(w2, r2, row0, col0, M, K2, q_ptr, DTYPE, R_BC, R_E5, R_FLOOR)
        s3 = quantize_rows(w3, r3, row0, col0, M, K2, q_ptr, DTYPE, R_BC, R_E5, R_FLOOR)
        words = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (32, 4))  # all rows at once: one exchange
        r = row0 + r0[:, None] + tl.arange(0, 4)[None, :]
        store_scale(s_ptr, words, r, r0[:, None] * 0 + col0 // 32, M, K2 // 16, SWIZZLED, R_ALIGNED)
    if R_BR > 1:
        lo, hi = column_amax(w0, w1, w2, w3, R_BR, DTYPE, REPS)
        inv, _same = block_scales(lo, hi, R_BC, R_E5, R_FLOOR)
        factor = spread(as_float(inv), REPS, 64)
        store_rows(scaled_row(w0, factor, DTYPE, R_E5), r0, row0, col0, M, K2, q_ptr)
        store_rows(scaled_row(w1, factor, DTYPE, R_E5), r1, row0, col0, M, K2, q_ptr)
        store_rows(scaled_row(w2, factor, DTYPE, R_E5), r2, row0, col0, M, K2, q_ptr)
        store_rows(scaled_row(w3, factor, DTYPE, R_E5), r3, row0, col0, M, K2, q_ptr)
        store_row_scale_of_tiles(inv, row0, col0, M, K2, s_ptr, SWIZZLED, R_ALIGNED)
    if C_BR > 0:
        emit_columns(
            w0, w1, w2, w3, row0, col0, K2, MT, qt_ptr, st_ptr, DTYPE,
            C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
        )  # fmt: skip
