"""Backward of RMSNorm or LayerNorm, with MXFP8 of dx.

As forward with a transpose it has two roles in one launch: row sums, with the sums of dweight and dbias over 32 tokens
each, run some strips of 128 tokens ahead of programs that make dx and its MXFP8 in 128 x 128 tiles. A second launch
adds up the partial weight gradients in a fixed order. Results equal `reference_ops` within one unit in the last
place of the rounded dtype.
"""

# ruff: noqa: D103

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from ._device import emit_tile, load_words, pack, row_index, store_rows, unpack
from ._row_stats import (
    announce,
    await_rows,
    chunk_sums,
    row_stat,
    sum_strips_kernel,
    tree_sum,
)
from .jit import kernel
from .launch import DTYPES, Emission, dense_rows, plan_emission, words
from .norm_quantize import SCALARS, load_feature
from .quantize import quantize_both
from .reference_ops import NORM_KINDS, check_kind, check_matrix, check_same, empty
from .spec import QuantSpec


@triton.jit
def normalized(h, mean, rstd, LAYER: tl.constexpr, DTYPE: tl.constexpr):
    lo, hi = unpack(h, DTYPE)
    if LAYER:
        lo, hi = lo - mean[:, None], hi - mean[:, None]
    return lo * rstd[:, None], hi * rstd[:, None]


@triton.jit
def sum_backward_rows(
    g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, line_ptr, w_lo, w_hi, first, M, K8, LDG2, LD2,
    LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,
    LOG2: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row means of `g n w` and `g w` for ROWS rows, and their sums of `g n` and `g` over the rows, into one line."""
    K2 = K8 * 4
    C2: tl.constexpr = 64 << LOG2
    rows = tl.arange(0, R)
    dw_lo = tl.zeros((R, C2), tl.float32)
    dw_hi = tl.zeros((R, C2), tl.float32)
    db_lo = tl.zeros((R, C2), tl.float32)
    db_hi = tl.zeros((R, C2), tl.float32)
    share = 1.0 / (K8 * 8).to(tl.float32)
    for start in range(0, ROWS, R):
        row0 = first + start
        row_ok = (row0 + rows) < M
        rstd = row_stat(rstd_ptr, row0, rows, M)
        mean = row_stat(mean_ptr, row0, rows, M) if LAYER else rstd
        n_lo, n_hi = normalized(load_words(h_ptr, rows, row0, 0, M, K2, LD2, C2), mean, rstd, LAYER, DTYPE)
        g_lo, g_hi = unpack(load_words(g_ptr, rows, row0, 0, M, K2, LDG2, C2), G_DTYPE)
        p_lo, p_hi = g_lo * n_lo, g_hi * n_hi
        if WEIGHT:
            dw_lo += p_lo
            dw_hi += p_hi
            products = tl.fma(p_hi, w_hi, p_lo * w_lo)
        else:
            products = p_lo + p_hi
        if BIAS:
            db_lo += g_lo
            db_hi += g_hi
        tl.store(dot_ptr + row0 + rows, tree_sum(chunk_sums(products), LOG2) * share, mask=row_ok)
        if LAYER:
            scaled = tl.fma(g_hi, w_hi, g_lo * w_lo) if WEIGHT else g_lo + g_hi
            tl.store(total_ptr + row0 + rows, tree_sum(chunk_sums(scaled), LOG2) * share, mask=row_ok)
    cols = tl.arange(0, 2 * C2)
    if WEIGHT:
        line = tl.reshape(tl.join(tl.sum(dw_lo, axis=0), tl.sum(dw_hi, axis=0)), (2 * C2,))
        tl.store(line_ptr + cols, line, mask=cols < K8 * 8)
    if BIAS:
        line = tl.reshape(tl.join(tl.sum(db_lo, axis=0), tl.sum(db_hi, axis=0)), (2 * C2,))
        tl.store(line_ptr + K8 * 8 * WEIGHT + cols, line, mask=cols < K8 * 8)


@triton.jit
def grad_input(
    g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, res_ptr, w_lo, w_hi,
    rows, row0, col0, M, K2, LDG2, LD2, LDR2,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, RES_DTYPE: tl.constexpr,
):  # fmt: skip
    """Words of dx of one subtile, rounded to h's dtype, zero past the edges."""
    rstd = row_stat(rstd_ptr, row0, rows, M)
    mean = row_stat(mean_ptr, row0, rows, M) if LAYER else rstd
    n_lo, n_hi = normalized(load_words(h_ptr, rows, row0, col0, M, K2, LD2, 64), mean, rstd, LAYER, DTYPE)
    lo, hi = unpack(load_words(g_ptr, rows, row0, col0, M, K2, LDG2, 64), G_DTYPE)
    if WEIGHT:
        lo, hi = lo * w_lo, hi * w_hi
    dot = -row_stat(dot_ptr, row0, rows, M)[:, None]
    lo, hi = tl.fma(n_lo, dot, lo), tl.fma(n_hi, dot, hi)
    if LAYER:
        total = row_stat(total_ptr, row0, rows, M)[:, None]
        lo, hi = lo - total, hi - total
    lo, hi = lo * rstd[:, None], hi * rstd[:, None]
    if RES:
        r_lo, r_hi = unpack(load_words(res_ptr, rows, row0, col0, M, K2, LDR2, 64), RES_DTYPE)
        lo, hi = lo + r_lo, hi + r_hi
    dx = pack(lo, hi, DTYPE)
    if LAYER:  # past the last feature the row's mean gradient is left over
        dx = tl.where((col0 // 2 + tl.arange(0, 64) < K2)[None, :], dx, 0)
    return dx


@kernel(do_not_specialize=SCALARS)
def norm_backward_kernel(
    g_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, res_ptr, dx_ptr, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr,
    total_ptr, dot_ptr, counter_ptr, M, K8, LDG8, LD8, LDR8, MT, LEAD,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, W_DTYPE: tl.constexpr, RES_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr, LOG2: tl.constexpr,
    R: tl.constexpr, SUMMING: tl.constexpr,
):  # fmt: skip
    """Roles as in `norm_tile_kernel`. `partial` is (SUMMING * strips, [dweight K | dbias K])."""
    K2 = K8 * 4
    chunks = tl.cdiv(K8, 16)
    u = tl.program_id(0) // (SUMMING + chunks)
    role = tl.program_id(0) % (SUMMING + chunks)
    if role < SUMMING:
        if u * 128 < M:
            w_lo, w_hi = load_feature(w_ptr, 0, K2, 1.0, WEIGHT, W_DTYPE, 64 << LOG2)
            first = u.to(tl.int64) * 128 + role * (128 // SUMMING)
            line = partial_ptr + (u.to(tl.int64) * SUMMING + role) * (K8 * 8 * (WEIGHT + BIAS))
            sum_backward_rows(
                g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, line, w_lo, w_hi, first, M, K8, LDG8 * 4, LD8 * 4,
                LAYER, WEIGHT, BIAS, DTYPE, G_DTYPE, LOG2, R, 128 // SUMMING,
            )  # fmt: skip
            announce(counter_ptr, u)
    elif u >= LEAD:
        strip = u - LEAD
        row0 = strip.to(tl.int64) * 128
        col0 = (role - SUMMING) * 128
        r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
        w_lo, w_hi = load_feature(w_ptr, col0, K2, 1.0, WEIGHT, W_DTYPE, 64)
        await_rows(counter_ptr, strip, SUMMING)
        x0 = grad_input(
            g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, res_ptr, w_lo, w_hi, r0, row0, col0, M, K2,
            LDG8 * 4, LD8 * 4, LDR8 * 4, LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        x1 = grad_input(
            g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, res_ptr, w_lo, w_hi, r1, row0, col0, M, K2,
            LDG8 * 4, LD8 * 4, LDR8 * 4, LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        x2 = grad_input(
            g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, res_ptr, w_lo, w_hi, r2, row0, col0, M, K2,
            LDG8 * 4, LD8 * 4, LDR8 * 4, LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        x3 = grad_input(
            g_ptr, h_ptr, mean_ptr, rstd_ptr, dot_ptr, total_ptr, res_ptr, w_lo, w_hi, r3, row0, col0, M, K2,
            LDG8 * 4, LD8 * 4, LDR8 * 4, LAYER, RES, WEIGHT, DTYPE, G_DTYPE, RES_DTYPE,
        )  # fmt: skip
        store_rows(x0, r0, row0, col0, M, K2, dx_ptr)
        store_rows(x1, r1, row0, col0, M, K2, dx_ptr)
        store_rows(x2, r2, row0, col0, M, K2, dx_ptr)
        store_rows(x3, r3, row0, col0, M, K2, dx_ptr)
        emit_tile(
            x0, x1, x2, x3, row0, col0, M, K2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, DTYPE,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
        )  # fmt: skip


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
    launch.check_features("norm_backward", h.shape[1], launch.MAX_FEATURES)
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
    dbias = totals[sums - cols :].clone() if has_bias else empty(h, torch.float32)  # outputs may not alias
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
    layer = kind == "layer"
    tile = launch.norm_backward_config(layer)
    roles = launch.plan_roles(h, tile, 8192, 4)
    means = torch.empty(2 if layer else 1, rows, dtype=torch.float32, device=h.device)
    partial = torch.empty(roles.strips * 4, sums, dtype=torch.float32, device=h.device)
    norm_backward_kernel[(roles.programs,)](
        words(grad_y), words(h), words(gain), mean, rstd, words(residual), words(dx), partial,
        *plan.pointers, means[-1], means[0], roles.counter,
        rows, cols // 8, grad_y.stride(0) // 8, h.stride(0) // 8, residual.stride(0) // 8, plan.stride_t, roles.lead,
        LAYER=layer, RES=grad_residual is not None, WEIGHT=weight is not None, BIAS=has_bias,
        DTYPE=DTYPES[h.dtype], G_DTYPE=DTYPES[grad_y.dtype], W_DTYPE=DTYPES[gain.dtype],
        RES_DTYPE=DTYPES[residual.dtype],
        **plan.flags, REPS=tile.reps(h.element_size()), **roles.flags,
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
