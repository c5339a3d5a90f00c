"""[Residual add +] RMSNorm or LayerNorm to MXFP8 in one pass, and its backward.

Forward moves itemsize bytes in and 1 + 1/32 out per element and orientation. Row-wise alone, a program holds whole
rows. With a transpose, a program holds 128 tokens x 128 features and the programs of a strip exchange row sums
(`_row_stats`), so x is read once however wide the row: holding whole rows of 128 tokens does not fit, and
reading x twice costs half of the speed.
Backward reads grad_y and h once and writes dx, its MXFP8, and one row of weight-gradient partial sums per 128
tokens, which a second launch adds up in a fixed order.
Results equal `reference_ops` within one unit in the last place of the rounded dtype; given the same rounded y, bitwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from ._device import emit_rows, emit_tile, load_words, pack, row_index, store_rows, unpack
from ._row_stats import (
    announce_chunk,
    await_chunks,
    chunk_count,
    chunk_sums,
    get_chunks,
    merge_stats,
    over_chunk,
    put_chunk,
    split4,
    sum_strips_kernel,
    tree_sum,
)
from .launch import DTYPES, Emission, dense_rows, next_power_of_2, plan_emission, words
from .quantize import quantize_both
from .reference_ops import NORM_KINDS, check_kind, check_matrix, check_same, empty
from .spec import QuantSpec

SCALARS = ["M", "K8", "LD8", "LDR8", "MT", "eps"]


@triton.jit
def load_feature(ptr, col0, K2, default, PRESENT: tl.constexpr, DTYPE: tl.constexpr, C2: tl.constexpr):
    """(1, C2) fp32 of the even and the odd entries of a weight or bias, `default` when there is none."""
    if PRESENT:
        cols = col0 // 2 + tl.arange(0, C2)
        lo, hi = unpack(tl.load(ptr + cols, mask=cols < K2, other=0), DTYPE)
        lo, hi = lo[None, :], hi[None, :]
    else:
        lo = tl.full((1, C2), default, tl.float32)
        hi = lo
    return lo, hi


@triton.jit
def add_residual(w, res, DTYPE: tl.constexpr):
    x_lo, x_hi = unpack(w, DTYPE)
    r_lo, r_hi = unpack(res, DTYPE)
    return pack(x_lo + r_lo, x_hi + r_hi, DTYPE)


@triton.jit
def row_sums(h, count, present, LAYER: tl.constexpr, DTYPE: tl.constexpr):
    """(total, square), each (R, chunks), of h (R, C2) words; see `merge_stats`.

    count: (1, chunks) features of each chunk; present: (1, C2) whether a word is inside the row.
    """
    lo, hi = unpack(h, DTYPE)
    if LAYER:
        total = chunk_sums(lo + hi)
        mean = over_chunk(total / count, h.shape[1])
        lo = tl.where(present, lo - mean, 0.0)
        hi = tl.where(present, hi - mean, 0.0)
        square = chunk_sums(tl.fma(hi, hi, lo * lo))
    else:
        square = chunk_sums(tl.fma(hi, hi, lo * lo))
        total = square
    return total, square


@triton.jit
def normalize(
    h, mean, rstd, w_lo, w_hi, b_lo, b_hi, row_ok,
    LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Words of y, rounded to HIGH, zero past the last token."""
    lo, hi = unpack(h, DTYPE)
    if LAYER:
        lo, hi = lo - mean[:, None], hi - mean[:, None]
    lo, hi = lo * rstd[:, None], hi * rstd[:, None]
    if WEIGHT:
        lo, hi = lo * w_lo, hi * w_hi
    if BIAS:
        lo, hi = tl.where(row_ok[:, None], lo + b_lo, 0.0), tl.where(row_ok[:, None], hi + b_hi, 0.0)
    return pack(lo, hi, HIGH)


@triton.jit(do_not_specialize=SCALARS)
def norm_rows_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, q_ptr, s_ptr, mean_ptr, rstd_ptr, M, K8, LD8, LDR8, eps,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, EMIT_HIGH: tl.constexpr,
    DTYPE: tl.constexpr, HIGH: tl.constexpr, W_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    SWIZZLED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """R whole rows, C >= K a power of two, 2**LOG2 = C / 128."""
    K2 = K8 * 4
    row0 = tl.program_id(0).to(tl.int64) * R
    rows = tl.arange(0, R)
    row_ok = (row0 + rows) < M
    h = load_words(x_ptr, rows, row0, 0, M, K2, LD8 * 4, C // 2)
    if RES:
        h = add_residual(h, load_words(res_ptr, rows, row0, 0, M, K2, LDR8 * 4, C // 2), DTYPE)
        store_rows(h, rows, row0, 0, M, K2, h_ptr)
    w_lo, w_hi = load_feature(w_ptr, 0, K2, 1.0, WEIGHT, W_DTYPE, C // 2)
    b_lo, b_hi = load_feature(b_ptr, 0, K2, 0.0, BIAS, B_DTYPE, C // 2)
    present = (tl.arange(0, C // 2) < K2)[None, :]
    total, square = row_sums(h, chunk_count(C // 128, K8 * 8), present, LAYER, DTYPE)
    mean, rstd = merge_stats(total, square, K8 * 8, eps, LAYER, LOG2)
    if LAYER:
        tl.store(mean_ptr + row0 + rows, mean, mask=row_ok)
    tl.store(rstd_ptr + row0 + rows, rstd, mask=row_ok)
    y = normalize(h, mean, rstd, w_lo, w_hi, b_lo, b_hi, row_ok, LAYER, WEIGHT, BIAS, DTYPE, HIGH)
    if EMIT_HIGH:
        store_rows(y, rows, row0, 0, M, K2, y_ptr)
    if R_BR == 1:
        emit_rows(y, rows, row0, 0, M, K2, q_ptr, s_ptr, HIGH, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED)


@triton.jit(do_not_specialize=SCALARS)
def norm_tile_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, mean_ptr, rstd_ptr,
    total_ptr, square_ptr, counter_ptr, M, K8, LD8, LDR8, MT, eps,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, EMIT_HIGH: tl.constexpr,
    DTYPE: tl.constexpr, HIGH: tl.constexpr, W_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr, LOG2: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """128 tokens x 128 features; 2**LOG2 chunks a row. STAGE 0: all; 1: row sums alone; 2: the rest, given them."""
    K2 = K8 * 4
    NCP: tl.constexpr = 1 << LOG2
    chunks = tl.cdiv(K8, 16)
    strip = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    row0 = strip.to(tl.int64) * 128
    col0 = chunk * 128
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    h0 = load_words(x_ptr, r0, row0, col0, M, K2, LD8 * 4, 64)
    h1 = load_words(x_ptr, r1, row0, col0, M, K2, LD8 * 4, 64)
    h2 = load_words(x_ptr, r2, row0, col0, M, K2, LD8 * 4, 64)
    h3 = load_words(x_ptr, r3, row0, col0, M, K2, LD8 * 4, 64)
    if RES:
        h0 = add_residual(h0, load_words(res_ptr, r0, row0, col0, M, K2, LDR8 * 4, 64), DTYPE)
        h1 = add_residual(h1, load_words(res_ptr, r1, row0, col0, M, K2, LDR8 * 4, 64), DTYPE)
        h2 = add_residual(h2, load_words(res_ptr, r2, row0, col0, M, K2, LDR8 * 4, 64), DTYPE)
        h3 = add_residual(h3, load_words(res_ptr, r3, row0, col0, M, K2, LDR8 * 4, 64), DTYPE)
        store_rows(h0, r0, row0, col0, M, K2, h_ptr)
        store_rows(h1, r1, row0, col0, M, K2, h_ptr)
        store_rows(h2, r2, row0, col0, M, K2, h_ptr)
        store_rows(h3, r3, row0, col0, M, K2, h_ptr)
    w_lo, w_hi = load_feature(w_ptr, col0, K2, 1.0, WEIGHT, W_DTYPE, 64)
    b_lo, b_hi = load_feature(b_ptr, col0, K2, 0.0, BIAS, B_DTYPE, 64)
    if STAGE < 2:
        count = tl.minimum(K8 * 8 - (col0 + tl.arange(0, 1)[None, :]), 128).to(tl.float32)
        present = (col0 // 2 + tl.arange(0, 64) < K2)[None, :]
        t0, s0 = row_sums(h0, count, present, LAYER, DTYPE)
        t1, s1 = row_sums(h1, count, present, LAYER, DTYPE)
        t2, s2 = row_sums(h2, count, present, LAYER, DTYPE)
        t3, s3 = row_sums(h3, count, present, LAYER, DTYPE)
        put_chunk(square_ptr, s0, strip, chunk, r0, NCP)
        put_chunk(square_ptr, s1, strip, chunk, r1, NCP)
        put_chunk(square_ptr, s2, strip, chunk, r2, NCP)
        put_chunk(square_ptr, s3, strip, chunk, r3, NCP)
        if LAYER:
            put_chunk(total_ptr, t0, strip, chunk, r0, NCP)
            put_chunk(total_ptr, t1, strip, chunk, r1, NCP)
            put_chunk(total_ptr, t2, strip, chunk, r2, NCP)
            put_chunk(total_ptr, t3, strip, chunk, r3, NCP)
    if STAGE == 0:
        announce_chunk(counter_ptr, strip)
        await_chunks(counter_ptr, strip, chunks)
    if STAGE != 1:
        square, rows = get_chunks(square_ptr, strip, chunks, REPS, NCP)
        total = square
        if LAYER:
            total, rows = get_chunks(total_ptr, strip, chunks, REPS, NCP)
        mean, rstd = merge_stats(total, square, K8 * 8, eps, LAYER, LOG2)
        first = (row0 + rows) < tl.where(chunk == 0, M, 0)
        tl.store(rstd_ptr + row0 + rows, rstd, mask=first)
        i0, i1, i2, i3 = split4(rstd)
        m0, m1, m2, m3 = i0, i1, i2, i3
        if LAYER:
            tl.store(mean_ptr + row0 + rows, mean, mask=first)
            m0, m1, m2, m3 = split4(mean)
        y0 = normalize(h0, m0, i0, w_lo, w_hi, b_lo, b_hi, (row0 + r0) < M, LAYER, WEIGHT, BIAS, DTYPE, HIGH)
        y1 = normalize(h1, m1, i1, w_lo, w_hi, b_lo, b_hi, (row0 + r1) < M, LAYER, WEIGHT, BIAS, DTYPE, HIGH)
        y2 = normalize(h2, m2, i2, w_lo, w_hi, b_lo, b_hi, (row0 + r2) < M, LAYER, WEIGHT, BIAS, DTYPE, HIGH)
        y3 = normalize(h3, m3, i3, w_lo, w_hi, b_lo, b_hi, (row0 + r3) < M, LAYER, WEIGHT, BIAS, DTYPE, HIGH)
        if EMIT_HIGH:
            store_rows(y0, r0, row0, col0, M, K2, y_ptr)
            store_rows(y1, r1, row0, col0, M, K2, y_ptr)
            store_rows(y2, r2, row0, col0, M, K2, y_ptr)
            store_rows(y3, r3, row0, col0, M, K2, y_ptr)
        emit_tile(
            y0, y1, y2, y3, row0, col0, M, K2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, HIGH,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, WORDS, SWIZZLED, REPS,
        )  # fmt: skip


@triton.jit
def normalized(h, mean, rstd, LAYER: tl.constexpr, DTYPE: tl.constexpr):
    lo, hi = unpack(h, DTYPE)
    if LAYER:
        lo, hi = lo - mean[:, None], hi - mean[:, None]
    return lo * rstd[:, None], hi * rstd[:, None]


@triton.jit
def row_stat(ptr, row0, rows, M):
    return tl.load(ptr + row0 + rows, mask=(row0 + rows) < M, other=0.0)


@triton.jit
def backward_sums(
    g, h, mean, rstd, w_lo, w_hi, LAYER: tl.constexpr, WEIGHT: tl.constexpr, DTYPE: tl.constexpr, G_DTYPE: tl.constexpr
):
    """Chunk sums of `g n w` and `g w` for each row, and the summands `g n` and `g` of the sums over tokens."""
    n_lo, n_hi = normalized(h, mean, rstd, LAYER, DTYPE)
    g_lo, g_hi = unpack(g, G_DTYPE)
    p_lo, p_hi = g_lo * n_lo, g_hi * n_hi
    if WEIGHT:
        dot = chunk_sums(tl.fma(p_hi, w_hi, p_lo * w_lo))
        total = chunk_sums(tl.fma(g_hi, w_hi, g_lo * w_lo)) if LAYER else dot
    else:
        dot = chunk_sums(p_lo + p_hi)
        total = chunk_sums(g_lo + g_hi) if LAYER else dot
    return dot, total, p_lo, p_hi, g_lo, g_hi


@triton.jit
def token_sum(a, b, c, d):
    return tl.sum((a + b) + (c + d), axis=0)


@triton.jit
def store_token_sums(ptr, lo, hi, col0, K):
    cols = col0 + tl.arange(0, 128)
    tl.store(ptr + cols, tl.reshape(tl.join(lo, hi), (128,)), mask=cols < K)


@triton.jit
def grad_input(
    g, h, mean, rstd, w_lo, w_hi, dot, total, res_ptr, rows, row0, col0, M, K2, LDR2,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, RES_DTYPE: tl.constexpr,
):  # fmt: skip
    """Words of dx of one subtile, rounded to h's dtype; dot and total are means over the row."""
    n_lo, n_hi = normalized(h, mean, rstd, LAYER, DTYPE)
    lo, hi = unpack(g, G_DTYPE)
    if WEIGHT:
        lo, hi = lo * w_lo, hi * w_hi
    lo, hi = tl.fma(n_lo, -dot[:, None], lo), tl.fma(n_hi, -dot[:, None], hi)
    if LAYER:
        lo, hi = lo - total[:, None], hi - total[:, None]
    lo, hi = lo * rstd[:, None], hi * rstd[:, None]
    if RES:
        r_lo, r_hi = unpack(load_words(res_ptr, rows, row0, col0, M, K2, LDR2, 64), RES_DTYPE)
        lo, hi = lo + r_lo, hi + r_hi
    dx = pack(lo, hi, DTYPE)
    if LAYER:  # past the edges a row's mean gradient is left over
        inside = ((row0 + rows) < M)[:, None] & (col0 // 2 + tl.arange(0, 64) < K2)[None, :]
        dx = tl.where(inside, dx, 0)
    return dx


@triton.jit(do_not_specialize=SCALARS)
def norm_backward_kernel(
    g_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, res_ptr, dx_ptr, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr,
    total_ptr, dot_ptr, counter_ptr, M, K8, LDG8, LD8, LDR8, MT,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, W_DTYPE: tl.constexpr, RES_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr, LOG2: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """As `norm_tile_kernel`. `partial` is (strips, [dweight K | dbias K])."""
    K2 = K8 * 4
    NCP: tl.constexpr = 1 << LOG2
    chunks = tl.cdiv(K8, 16)
    strip = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    row0 = strip.to(tl.int64) * 128
    col0 = chunk * 128
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    h0 = load_words(h_ptr, r0, row0, col0, M, K2, LD8 * 4, 64)
    h1 = load_words(h_ptr, r1, row0, col0, M, K2, LD8 * 4, 64)
    h2 = load_words(h_ptr, r2, row0, col0, M, K2, LD8 * 4, 64)
    h3 = load_words(h_ptr, r3, row0, col0, M, K2, LD8 * 4, 64)
    g0 = load_words(g_ptr, r0, row0, col0, M, K2, LDG8 * 4, 64)
    g1 = load_words(g_ptr, r1, row0, col0, M, K2, LDG8 * 4, 64)
    g2 = load_words(g_ptr, r2, row0, col0, M, K2, LDG8 * 4, 64)
    g3 = load_words(g_ptr, r3, row0, col0, M, K2, LDG8 * 4, 64)
    w_lo, w_hi = load_feature(w_ptr, col0, K2, 1.0, WEIGHT, W_DTYPE, 64)
    i0, i1 = row_stat(rstd_ptr, row0, r0, M), row_stat(rstd_ptr, row0, r1, M)
    i2, i3 = row_stat(rstd_ptr, row0, r2, M), row_stat(rstd_ptr, row0, r3, M)
    m0, m1, m2, m3 = i0, i1, i2, i3
    if LAYER:
        m0, m1 = row_stat(mean_ptr, row0, r0, M), row_stat(mean_ptr, row0, r1, M)
        m2, m3 = row_stat(mean_ptr, row0, r2, M), row_stat(mean_ptr, row0, r3, M)
    if STAGE < 2:
        d0, t0, pl0, ph0, gl0, gh0 = backward_sums(g0, h0, m0, i0, w_lo, w_hi, LAYER, WEIGHT, DTYPE, G_DTYPE)
        d1, t1, pl1, ph1, gl1, gh1 = backward_sums(g1, h1, m1, i1, w_lo, w_hi, LAYER, WEIGHT, DTYPE, G_DTYPE)
        d2, t2, pl2, ph2, gl2, gh2 = backward_sums(g2, h2, m2, i2, w_lo, w_hi, LAYER, WEIGHT, DTYPE, G_DTYPE)
        d3, t3, pl3, ph3, gl3, gh3 = backward_sums(g3, h3, m3, i3, w_lo, w_hi, LAYER, WEIGHT, DTYPE, G_DTYPE)
        put_chunk(dot_ptr, d0, strip, chunk, r0, NCP)
        put_chunk(dot_ptr, d1, strip, chunk, r1, NCP)
        put_chunk(dot_ptr, d2, strip, chunk, r2, NCP)
        put_chunk(dot_ptr, d3, strip, chunk, r3, NCP)
        if LAYER:
            put_chunk(total_ptr, t0, strip, chunk, r0, NCP)
            put_chunk(total_ptr, t1, strip, chunk, r1, NCP)
            put_chunk(total_ptr, t2, strip, chunk, r2, NCP)
            put_chunk(total_ptr, t3, strip, chunk, r3, NCP)
        if STAGE == 0:
            announce_chunk(counter_ptr, strip)
        line = partial_ptr + strip.to(tl.int64) * (K8 * 8 * (WEIGHT + BIAS))
        if WEIGHT:
            store_token_sums(
                line, token_sum(pl0, pl1, pl2, pl3), token_sum(ph0, ph1, ph2, ph3), col0, K8 * 8
            )  # fmt: skip
        if BIAS:
            store_token_sums(
                line + K8 * 8 * WEIGHT,
                token_sum(gl0, gl1, gl2, gl3), token_sum(gh0, gh1, gh2, gh3), col0, K8 * 8,
            )  # fmt: skip
    if STAGE == 0:
        await_chunks(counter_ptr, strip, chunks)
    if STAGE != 1:
        features = (K8 * 8).to(tl.float32)
        dots, rows = get_chunks(dot_ptr, strip, chunks, REPS, NCP)
        e0, e1, e2, e3 = split4(tree_sum(dots, LOG2) / features)
        f0, f1, f2, f3 = e0, e1, e2, e3
        if LAYER:
            totals, rows = get_chunks(total_ptr, strip, chunks, REPS, NCP)
            f0, f1, f2, f3 = split4(tree_sum(totals, LOG2) / features)
        x0 = grad_input(
            g0, h0, m0, i0, w_lo, w_hi, e0, f0, res_ptr, r0, row0, col0, M, K2, LDR8 * 4,
            LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        x1 = grad_input(
            g1, h1, m1, i1, w_lo, w_hi, e1, f1, res_ptr, r1, row0, col0, M, K2, LDR8 * 4,
            LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        x2 = grad_input(
            g2, h2, m2, i2, w_lo, w_hi, e2, f2, res_ptr, r2, row0, col0, M, K2, LDR8 * 4,
            LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        x3 = grad_input(
            g3, h3, m3, i3, w_lo, w_hi, e3, f3, res_ptr, r3, row0, col0, M, K2, LDR8 * 4,
            LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        store_rows(x0, r0, row0, col0, M, K2, dx_ptr)
        store_rows(x1, r1, row0, col0, M, K2, dx_ptr)
        store_rows(x2, r2, row0, col0, M, K2, dx_ptr)
        store_rows(x3, r3, row0, col0, M, K2, dx_ptr)
        emit_tile(
            x0, x1, x2, x3, row0, col0, M, K2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, DTYPE,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, WORDS, SWIZZLED, REPS,
        )  # fmt: skip


def norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    emit_high: bool,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference_ops.norm_quantize` on the GPU.

    K must be a multiple of 32. A spec with stochastic rounding or a Hadamard transform takes a second launch on
    the stored y. `pad_tokens` as in `quantize_both`.
    """
    check_matrix("norm_quantize", "x", x)
    check_kind("norm_quantize", kind, NORM_KINDS)
    if residual is not None:
        check_same("norm_quantize", "residual", residual, x)
    launch.check_features("norm_quantize", x.shape[1])
    now_row, now_col, later_row, later_col = launch.split_specs(rowwise, colwise)
    late = later_row is not None or later_col is not None
    rows, cols = x.shape
    high = emit_high or late
    y = torch.empty(rows, cols, dtype=out_dtype, device=x.device) if high else empty(x, out_dtype)
    h = torch.empty(rows, cols, dtype=x.dtype, device=x.device) if residual is not None else empty(x, x.dtype)
    layer = kind == "layer"
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if layer else empty(x, torch.float32)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    plan = plan_emission(x, rows, cols, now_row, now_col, swizzled=swizzled, pad_tokens=pad_tokens)
    if rows and cols:
        flags = dict(
            LAYER=layer, RES=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None, EMIT_HIGH=high
        )  # fmt: skip
        _launch_forward(x, residual, weight, bias, eps, y, h, mean, rstd, plan, flags)
    outputs = list(plan.outputs)
    if late:
        later = quantize_both(y, later_row, later_col, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
        outputs = [b if a.numel() == 0 else a for a, b in zip(outputs, later)]
    return y if emit_high else empty(x, out_dtype), h, outputs[0], outputs[1], outputs[2], outputs[3], mean, rstd


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    plan: Emission,
    flags: dict[str, bool],
) -> None:
    rows, cols = x.shape
    x = dense_rows(x)
    residual = x if residual is None else dense_rows(residual)
    features = [x if t is None else t.contiguous() for t in (weight, bias)]
    dtypes = dict(
        DTYPE=DTYPES[x.dtype], HIGH=DTYPES[y.dtype], W_DTYPE=DTYPES[features[0].dtype], B_DTYPE=DTYPES[features[1].dtype]
    )
    read = [words(t) for t in features]
    y = words(y)
    row = launch.norm_row_config(cols)
    if plan.rows_alone and row is not None:
        visited = -(-rows // 128) * 128 if plan.flags["SWIZZLED"] and plan.any else rows
        norm_rows_kernel[(-(-visited // row.rows),)](
            words(x), words(residual), *read, y, words(h), *plan.pointers[:2], mean, rstd,
            rows, cols // 8, x.stride(0) // 8, residual.stride(0) // 8, eps, **flags, **dtypes,
            **{k: plan.flags[k] for k in ("R_BR", "R_BC", "R_E5", "R_FLOOR", "R_ALIGNED", "SWIZZLED")},
            R=row.rows, C=row.cols, LOG2=(row.cols // 128).bit_length() - 1,
            num_warps=row.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return
    tile = launch.norm_tile_config()
    scratch = _Scratch(x, 2 if flags["LAYER"] else 1)
    for stage in scratch.stages:
        source, flags = (h, {**flags, "RES": False}) if stage == 2 and flags["RES"] else (x, flags)
        norm_tile_kernel[(scratch.programs,)](
            words(source), words(residual), *read, y, words(h), *plan.pointers, mean, rstd,
            *scratch.sums, scratch.counter,
            rows, cols // 8, source.stride(0) // 8, residual.stride(0) // 8, plan.stride_t, eps, **flags, **dtypes,
            **plan.flags, REPS=tile.reps(x.element_size()), LOG2=scratch.log2, STAGE=stage,
            num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
        )  # fmt: skip


class _Scratch:
    """Row sums a strip's programs exchange, and the counter they wait on."""

    def __init__(self, like: Tensor, planes: int) -> None:
        rows, cols = like.shape
        strips, chunks = -(-rows // 128), -(-cols // 128)
        self.programs = strips * chunks
        self.log2 = next_power_of_2(chunks).bit_length() - 1
        size = strips * 128 << self.log2
        sums = torch.empty(planes * size, dtype=torch.float32, device=like.device)
        self.sums = (sums[:size], sums[(planes - 1) * size :])
        # Interpreted programs run one after another and must not wait: row sums become a launch of their own.
        interpreted = triton.knobs.runtime.interpret
        self.stages = (1, 2) if interpreted else (0,)
        self.counter = torch.zeros(0 if interpreted else strips, dtype=torch.int32, device=like.device)


def norm_backward(
    grad_y: Tensor,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    grad_residual: Tensor | None,
    has_bias: bool,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference_ops.norm_backward` on the GPU; restrictions as for `norm_quantize`."""
    check_matrix("norm_backward", "h", h)
    check_kind("norm_backward", kind, NORM_KINDS)
    check_same("norm_backward", "grad_y", grad_y, h, dtype=False)
    if grad_residual is not None:
        check_same("norm_backward", "grad_residual", grad_residual, h, dtype=False)
    launch.check_features("norm_backward", h.shape[1])
    now_row, now_col, later_row, later_col = launch.split_specs(rowwise, colwise)
    rows, cols = h.shape
    dx = torch.empty(rows, cols, dtype=h.dtype, device=h.device)
    plan = plan_emission(h, rows, cols, now_row, now_col, swizzled=swizzled, pad_tokens=pad_tokens)
    sums = ((weight is not None) + has_bias) * cols
    totals = torch.zeros(sums, dtype=torch.float32, device=h.device) if rows == 0 else empty(h, torch.float32)
    if rows and cols:
        totals = _launch_backward(grad_y, h, weight, mean, rstd, kind, grad_residual, has_bias, dx, plan, sums)
    outputs = list(plan.outputs)
    if later_row is not None or later_col is not None:
        later = quantize_both(dx, later_row, later_col, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
        outputs = [b if a.numel() == 0 else a for a, b in zip(outputs, later)]
    dweight = empty(h, torch.float32) if weight is None else totals[:cols]
    dbias = totals[sums - cols :] if has_bias else empty(h, torch.float32)
    return dx, dweight, dbias, outputs[0], outputs[1], outputs[2], outputs[3]


def _launch_backward(
    grad_y: Tensor,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    grad_residual: Tensor | None,
    has_bias: bool,
    dx: Tensor,
    plan: Emission,
    sums: int,
) -> Tensor:
    rows, cols = h.shape
    grad_y, h = dense_rows(grad_y), dense_rows(h)
    residual = h if grad_residual is None else dense_rows(grad_residual)
    gain = h if weight is None else weight.contiguous()
    tile = launch.norm_backward_config()
    layer = kind == "layer"
    scratch = _Scratch(h, 2 if layer else 1)
    partial = torch.empty(-(-rows // 128), sums, dtype=torch.float32, device=h.device)
    for stage in scratch.stages:
        norm_backward_kernel[(scratch.programs,)](
            words(grad_y), words(h), words(gain), mean, rstd, words(residual), words(dx), partial,
            *plan.pointers, *scratch.sums, scratch.counter,
            rows, cols // 8, grad_y.stride(0) // 8, h.stride(0) // 8, residual.stride(0) // 8, plan.stride_t,
            LAYER=layer, RES=grad_residual is not None, WEIGHT=weight is not None, BIAS=has_bias,
            DTYPE=DTYPES[h.dtype], G_DTYPE=DTYPES[grad_y.dtype], W_DTYPE=DTYPES[gain.dtype],
            RES_DTYPE=DTYPES[residual.dtype],
            **plan.flags, REPS=tile.reps(h.element_size()), LOG2=scratch.log2, STAGE=stage,
            num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
        )  # fmt: skip
    return sum_strips(partial)


def sum_strips(partial: Tensor) -> Tensor:
    """(S, N) fp32 to (N,): the second launch of every sum over tokens, without atomics."""
    strips, width = partial.shape
    out = torch.empty(width, dtype=torch.float32, device=partial.device)
    if width:
        sum_strips_kernel[(-(-width // 32),)](partial, out, strips, width, R=128, C=32, num_warps=8)
    return out
