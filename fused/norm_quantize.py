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
from ._device import emit_rows, emit_tile, round_to, row_index, store_rows
from ._row_stats import (
    announce_chunk,
    await_chunks,
    chunk_count,
    chunk_sums,
    get_chunks,
    merge_stats,
    put_chunk,
    split4,
    sum_strips_kernel,
    tree_sum,
)
from .launch import Emission, dense_rows, next_power_of_2, plan_emission
from .quantize import load_subtile, quantize_both
from .reference_ops import NORM_KINDS, check_kind, check_matrix, check_same, empty
from .spec import QuantSpec

SCALARS = ["M", "K8", "LD8", "LDR8", "MT", "eps"]


@triton.jit
def load_feature(ptr, cols, K, default, PRESENT: tl.constexpr):
    """(C,) fp32 of a weight or bias, `default` when there is none."""
    if PRESENT:
        value = tl.load(ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    else:
        value = tl.full((cols.shape[0],), default, tl.float32)
    return value


@triton.jit
def add_residual(x, res, RES: tl.constexpr):
    if RES:
        x = round_to(x.to(tl.float32) + res.to(tl.float32), x.dtype)
    return x


@triton.jit
def sum_chunk(h, K, col0, cols, LAYER: tl.constexpr):
    """(total, square) of the single chunk h (R, 128), each (R, 1)."""
    h = h.to(tl.float32)
    if LAYER:
        total = chunk_sums(h)
        count = tl.minimum(tl.maximum(K - col0, 1), 128).to(tl.float32)
        centered = tl.where((cols < K)[None, :], h - total / count, 0.0)
        square = chunk_sums(centered * centered)
    else:
        square = chunk_sums(h * h)
        total = square
    return total, square


@triton.jit
def normalize(h, mean, rstd, w, b, row_ok, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    y = h.to(tl.float32)
    if LAYER:
        y = y - mean[:, None]
    y = y * rstd[:, None]
    if WEIGHT:
        y = y * w[None, :]
    if BIAS:
        y = tl.where(row_ok[:, None], y + b[None, :], 0.0)
    return y


@triton.jit(do_not_specialize=SCALARS)
def norm_rows_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, q_ptr, s_ptr, mean_ptr, rstd_ptr, M, K8, LD8, LDR8, eps,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    SWIZZLED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """R whole rows, C >= K a power of two, 2**LOG2 = C / 128."""
    K = K8 * 8
    row0 = tl.program_id(0).to(tl.int64) * R
    rows = tl.arange(0, R)
    cols = tl.arange(0, C)
    row_ok = (row0 + rows) < M
    mask = row_ok[:, None] & (cols < K)[None, :]
    h = tl.load(x_ptr + row0 * (LD8 * 8) + rows[:, None] * (LD8 * 8) + cols[None, :], mask=mask, other=0.0)
    if RES:
        at = res_ptr + row0 * (LDR8 * 8) + rows[:, None] * (LDR8 * 8) + cols[None, :]
        h = add_residual(h, tl.load(at, mask=mask, other=0.0), RES)
        store_rows(h, rows, row0, 0, M, K, h_ptr)
    w = load_feature(w_ptr, cols, K, 1.0, WEIGHT)
    b = load_feature(b_ptr, cols, K, 0.0, BIAS)
    wide = h.to(tl.float32)
    if LAYER:
        total = chunk_sums(wide)
        centered = tl.reshape(wide, (R, C // 128, 128)) - (total / chunk_count(C // 128, K))[:, :, None]
        centered = tl.where((cols < K)[None, :], tl.reshape(centered, (R, C)), 0.0)
        square = chunk_sums(centered * centered)
    else:
        square = chunk_sums(wide * wide)
        total = square
    mean, rstd = merge_stats(total, square, K, eps, LAYER, LOG2)
    if LAYER:
        tl.store(mean_ptr + row0 + rows, mean, mask=row_ok)
    tl.store(rstd_ptr + row0 + rows, rstd, mask=row_ok)
    high: tl.constexpr = y_ptr.dtype.element_ty
    y = round_to(normalize(h, mean, rstd, w, b, row_ok, LAYER, WEIGHT, BIAS), high)
    if HIGH:
        store_rows(y, rows, row0, 0, M, K, y_ptr)
    if R_BR == 1:
        emit_rows(y.to(tl.float32), rows, row0, 0, M, K, q_ptr, s_ptr, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED)


@triton.jit(do_not_specialize=SCALARS)
def norm_tile_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, mean_ptr, rstd_ptr,
    total_ptr, square_ptr, counter_ptr, M, K8, LD8, LDR8, MT, eps,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, SHARED: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr, LOG2: tl.constexpr,
    STAGE: tl.constexpr,
):  # fmt: skip
    """128 tokens x 128 features; 2**LOG2 chunks a row. STAGE 0: all; 1: row sums alone; 2: the rest, given them."""
    K = K8 * 8
    NCP: tl.constexpr = 1 << LOG2
    chunks = tl.cdiv(K, 128)
    strip = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    row0 = strip.to(tl.int64) * 128
    col0 = chunk * 128
    cols = col0 + tl.arange(0, 128)
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    h0 = load_subtile(x_ptr, 0, row0, col0, M, K, LD8 * 8, 128, REPS)
    h1 = load_subtile(x_ptr, 1, row0, col0, M, K, LD8 * 8, 128, REPS)
    h2 = load_subtile(x_ptr, 2, row0, col0, M, K, LD8 * 8, 128, REPS)
    h3 = load_subtile(x_ptr, 3, row0, col0, M, K, LD8 * 8, 128, REPS)
    if RES:
        h0 = add_residual(h0, load_subtile(res_ptr, 0, row0, col0, M, K, LDR8 * 8, 128, REPS), RES)
        h1 = add_residual(h1, load_subtile(res_ptr, 1, row0, col0, M, K, LDR8 * 8, 128, REPS), RES)
        h2 = add_residual(h2, load_subtile(res_ptr, 2, row0, col0, M, K, LDR8 * 8, 128, REPS), RES)
        h3 = add_residual(h3, load_subtile(res_ptr, 3, row0, col0, M, K, LDR8 * 8, 128, REPS), RES)
        store_rows(h0, r0, row0, col0, M, K, h_ptr)
        store_rows(h1, r1, row0, col0, M, K, h_ptr)
        store_rows(h2, r2, row0, col0, M, K, h_ptr)
        store_rows(h3, r3, row0, col0, M, K, h_ptr)
    w = load_feature(w_ptr, cols, K, 1.0, WEIGHT)
    b = load_feature(b_ptr, cols, K, 0.0, BIAS)
    if STAGE < 2:
        t0, s0 = sum_chunk(h0, K, col0, cols, LAYER)
        t1, s1 = sum_chunk(h1, K, col0, cols, LAYER)
        t2, s2 = sum_chunk(h2, K, col0, cols, LAYER)
        t3, s3 = sum_chunk(h3, K, col0, cols, LAYER)
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
        mean, rstd = merge_stats(total, square, K, eps, LAYER, LOG2)
        first = (row0 + rows) < tl.where(chunk == 0, M, 0)
        tl.store(rstd_ptr + row0 + rows, rstd, mask=first)
        m0, m1, m2, m3 = split4(mean)
        if LAYER:
            tl.store(mean_ptr + row0 + rows, mean, mask=first)
        i0, i1, i2, i3 = split4(rstd)
        high: tl.constexpr = y_ptr.dtype.element_ty
        y0 = round_to(normalize(h0, m0, i0, w, b, (row0 + r0) < M, LAYER, WEIGHT, BIAS), high)
        y1 = round_to(normalize(h1, m1, i1, w, b, (row0 + r1) < M, LAYER, WEIGHT, BIAS), high)
        y2 = round_to(normalize(h2, m2, i2, w, b, (row0 + r2) < M, LAYER, WEIGHT, BIAS), high)
        y3 = round_to(normalize(h3, m3, i3, w, b, (row0 + r3) < M, LAYER, WEIGHT, BIAS), high)
        if HIGH:
            store_rows(y0, r0, row0, col0, M, K, y_ptr)
            store_rows(y1, r1, row0, col0, M, K, y_ptr)
            store_rows(y2, r2, row0, col0, M, K, y_ptr)
            store_rows(y3, r3, row0, col0, M, K, y_ptr)
        emit_tile(
            y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32),
            row0, col0, M, K, MT, q_ptr, s_ptr, qt_ptr, st_ptr, R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED,
            C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, WORDS, SHARED, SWIZZLED, REPS,
        )  # fmt: skip


@triton.jit
def normalized(h, mean, rstd, LAYER: tl.constexpr):
    n = h.to(tl.float32)
    if LAYER:
        n = n - mean[:, None]
    return n * rstd[:, None]


@triton.jit
def row_stat(ptr, row0, rows, M):
    return tl.load(ptr + row0 + rows, mask=(row0 + rows) < M, other=0.0)


@triton.jit
def grad_input(
    grad, h, mean, rstd, w, dot, sum_g, res_ptr, j: tl.constexpr, row0, col0, M, K, LDR,
    LAYER: tl.constexpr, RES: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """dx of subtile j, rounded to h's dtype; dot and sum_g are means over the row."""
    dx = grad.to(tl.float32) * w[None, :] - normalized(h, mean, rstd, LAYER) * dot[:, None]
    if LAYER:
        dx = dx - sum_g[:, None]
    dx = dx * rstd[:, None]
    if RES:
        dx = dx + load_subtile(res_ptr, j, row0, col0, M, K, LDR, 128, REPS).to(tl.float32)
    cols = col0 + tl.arange(0, 128)
    inside = ((row0 + row_index(j, REPS)) < M)[:, None] & (cols < K)[None, :]
    return round_to(tl.where(inside, dx, 0.0), h.dtype)


@triton.jit(do_not_specialize=SCALARS)
def norm_backward_kernel(
    g_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, res_ptr, dx_ptr, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr,
    total_ptr, dot_ptr, counter_ptr, M, K8, LDG8, LD8, LDR8, MT,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, SHARED: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr, LOG2: tl.constexpr,
    STAGE: tl.constexpr,
):  # fmt: skip
    """As `norm_tile_kernel`. `partial` is (strips, [dweight K | dbias K])."""
    K = K8 * 8
    NCP: tl.constexpr = 1 << LOG2
    chunks = tl.cdiv(K, 128)
    strip = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    row0 = strip.to(tl.int64) * 128
    col0 = chunk * 128
    cols = col0 + tl.arange(0, 128)
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    h0 = load_subtile(h_ptr, 0, row0, col0, M, K, LD8 * 8, 128, REPS)
    h1 = load_subtile(h_ptr, 1, row0, col0, M, K, LD8 * 8, 128, REPS)
    h2 = load_subtile(h_ptr, 2, row0, col0, M, K, LD8 * 8, 128, REPS)
    h3 = load_subtile(h_ptr, 3, row0, col0, M, K, LD8 * 8, 128, REPS)
    g0 = load_subtile(g_ptr, 0, row0, col0, M, K, LDG8 * 8, 128, REPS)
    g1 = load_subtile(g_ptr, 1, row0, col0, M, K, LDG8 * 8, 128, REPS)
    g2 = load_subtile(g_ptr, 2, row0, col0, M, K, LDG8 * 8, 128, REPS)
    g3 = load_subtile(g_ptr, 3, row0, col0, M, K, LDG8 * 8, 128, REPS)
    w = load_feature(w_ptr, cols, K, 1.0, WEIGHT)
    i0, i1, i2, i3 = (
        row_stat(rstd_ptr, row0, r0, M), row_stat(rstd_ptr, row0, r1, M),
        row_stat(rstd_ptr, row0, r2, M), row_stat(rstd_ptr, row0, r3, M),
    )  # fmt: skip
    m0, m1, m2, m3 = i0, i1, i2, i3
    if LAYER:
        m0, m1, m2, m3 = (
            row_stat(mean_ptr, row0, r0, M), row_stat(mean_ptr, row0, r1, M),
            row_stat(mean_ptr, row0, r2, M), row_stat(mean_ptr, row0, r3, M),
        )  # fmt: skip
    if STAGE < 2:
        p0 = g0.to(tl.float32) * normalized(h0, m0, i0, LAYER)
        p1 = g1.to(tl.float32) * normalized(h1, m1, i1, LAYER)
        p2 = g2.to(tl.float32) * normalized(h2, m2, i2, LAYER)
        p3 = g3.to(tl.float32) * normalized(h3, m3, i3, LAYER)
        put_chunk(dot_ptr, chunk_sums(p0 * w[None, :]), strip, chunk, r0, NCP)
        put_chunk(dot_ptr, chunk_sums(p1 * w[None, :]), strip, chunk, r1, NCP)
        put_chunk(dot_ptr, chunk_sums(p2 * w[None, :]), strip, chunk, r2, NCP)
        put_chunk(dot_ptr, chunk_sums(p3 * w[None, :]), strip, chunk, r3, NCP)
        if LAYER:
            put_chunk(total_ptr, chunk_sums(g0.to(tl.float32) * w[None, :]), strip, chunk, r0, NCP)
            put_chunk(total_ptr, chunk_sums(g1.to(tl.float32) * w[None, :]), strip, chunk, r1, NCP)
            put_chunk(total_ptr, chunk_sums(g2.to(tl.float32) * w[None, :]), strip, chunk, r2, NCP)
            put_chunk(total_ptr, chunk_sums(g3.to(tl.float32) * w[None, :]), strip, chunk, r3, NCP)
        if STAGE == 0:
            announce_chunk(counter_ptr, strip)
        line = partial_ptr + strip.to(tl.int64) * (K * (WEIGHT + BIAS)) + cols
        if WEIGHT:
            tl.store(line, tl.sum((p0 + p1) + (p2 + p3), axis=0), mask=cols < K)
        if BIAS:
            shifts = (g0.to(tl.float32) + g1.to(tl.float32)) + (g2.to(tl.float32) + g3.to(tl.float32))
            tl.store(line + K * WEIGHT, tl.sum(shifts, axis=0), mask=cols < K)
    if STAGE == 0:
        await_chunks(counter_ptr, strip, chunks)
    if STAGE != 1:
        features = K.to(tl.float32)
        dot, rows = get_chunks(dot_ptr, strip, chunks, REPS, NCP)
        d0, d1, d2, d3 = split4(tree_sum(dot, LOG2) / features)
        e0, e1, e2, e3 = d0, d1, d2, d3
        if LAYER:
            total, rows = get_chunks(total_ptr, strip, chunks, REPS, NCP)
            e0, e1, e2, e3 = split4(tree_sum(total, LOG2) / features)
        dx0 = grad_input(g0, h0, m0, i0, w, d0, e0, res_ptr, 0, row0, col0, M, K, LDR8 * 8, LAYER, RES, REPS)
        dx1 = grad_input(g1, h1, m1, i1, w, d1, e1, res_ptr, 1, row0, col0, M, K, LDR8 * 8, LAYER, RES, REPS)
        dx2 = grad_input(g2, h2, m2, i2, w, d2, e2, res_ptr, 2, row0, col0, M, K, LDR8 * 8, LAYER, RES, REPS)
        dx3 = grad_input(g3, h3, m3, i3, w, d3, e3, res_ptr, 3, row0, col0, M, K, LDR8 * 8, LAYER, RES, REPS)
        store_rows(dx0, r0, row0, col0, M, K, dx_ptr)
        store_rows(dx1, r1, row0, col0, M, K, dx_ptr)
        store_rows(dx2, r2, row0, col0, M, K, dx_ptr)
        store_rows(dx3, r3, row0, col0, M, K, dx_ptr)
        emit_tile(
            dx0.to(tl.float32), dx1.to(tl.float32), dx2.to(tl.float32), dx3.to(tl.float32),
            row0, col0, M, K, MT, q_ptr, s_ptr, qt_ptr, st_ptr, R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED,
            C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, WORDS, SHARED, SWIZZLED, REPS,
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
            LAYER=layer, RES=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None, HIGH=high
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
    row = launch.norm_row_config(cols)
    if plan.rows_alone and row is not None:
        visited = -(-rows // 128) * 128 if plan.flags["SWIZZLED"] and plan.any else rows
        norm_rows_kernel[(-(-visited // row.rows),)](
            x, residual, *features, y, h, *plan.pointers[:2], mean, rstd,
            rows, cols // 8, x.stride(0) // 8, residual.stride(0) // 8, eps, **flags,
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
            source, residual, *features, y, h, *plan.pointers, mean, rstd, *scratch.sums, scratch.counter,
            rows, cols // 8, source.stride(0) // 8, residual.stride(0) // 8, plan.stride_t, eps, **flags,
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
    tile = launch.norm_backward_config()
    layer = kind == "layer"
    scratch = _Scratch(h, 2 if layer else 1)
    partial = torch.empty(-(-rows // 128), sums, dtype=torch.float32, device=h.device)
    for stage in scratch.stages:
        norm_backward_kernel[(scratch.programs,)](
            grad_y, h, h if weight is None else weight.contiguous(), mean, rstd, residual, dx, partial,
            *plan.pointers, *scratch.sums, scratch.counter,
            rows, cols // 8, grad_y.stride(0) // 8, h.stride(0) // 8, residual.stride(0) // 8, plan.stride_t,
            LAYER=layer, RES=grad_residual is not None, WEIGHT=weight is not None, BIAS=has_bias,
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
