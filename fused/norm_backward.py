"""Backward of RMSNorm or LayerNorm, with MXFP8 of dx.

With `n = (h - mean) rstd` and `g = grad_y weight`:
`dx = rstd (g - n mean_K(g n) [- mean_K(g)]) + grad_residual`, `dweight = sum_M(grad_y n)`, `dbias = sum_M(grad_y)`.

One launch reads grad_y and h once and writes dx: 6 bytes an element in bf16. A warp holds whole rows, up to 1024
features of one, so no warp waits for another, and adds up the weight gradients of its rows in registers; the next rows
are copied to shared memory meanwhile. A second launch adds up the partial sums in a fixed order. MXFP8 of dx is
`quantize_both`'s: reading dx again, 2 bytes an element, costs less than programs that sum rows for others to use.
Results equal `reference_ops` within one unit in the last place of the rounded dtype.
"""

# ruff: noqa: D103

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from ._device import pack, unpack
from ._row_stats import sum_strips
from .jit import kernel
from .launch import DTYPES, dense_rows, words
from .quantize import quantize_both
from .reference_ops import NORM_KINDS, check_kind, check_matrix, check_same, empty
from .spec import QuantSpec

SCALARS = ["M", "K8", "LDG8", "LD8", "LDR8"]
LANES = tl.constexpr(128)
"""Words of a row that a warp reads at a time, 16 bytes a thread."""


@triton.jit
def load_rows(ptr, row0, rows, cols, M, K2, LD2):
    """(R, W, P, 128) words of tokens `row0 + rows`, zero past the edges."""
    return tl.load(ptr + row0 * LD2 + rows * LD2 + cols, mask=((row0 + rows) < M) & (cols < K2), other=0)


@triton.jit
def row_value(ptr, row0, rows, M):
    return tl.load(ptr + row0 + rows, mask=(row0 + rows) < M, other=0.0)


@triton.jit
def row_sum(x):
    """First inside a thread, then inside a warp, then over the warps of a row."""
    inside = tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=3, keep_dims=True)
    return tl.sum(inside, axis=1, keep_dims=True)


@triton.jit
def store_sums(ptr, lo, hi, cols, K2):
    """Sums over the rows of (R, W, P, 128) even and odd features."""
    tl.store(ptr + 2 * cols, tl.sum(lo, axis=0, keep_dims=True), mask=cols < K2)
    tl.store(ptr + 2 * cols + 1, tl.sum(hi, axis=0, keep_dims=True), mask=cols < K2)


@kernel(do_not_specialize=SCALARS)
def norm_backward_kernel(
    g_ptr, h_ptr, w_ptr, mean_ptr, rstd_ptr, res_ptr, dx_ptr, partial_ptr, M, K8, LDG8, LD8, LDR8,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, W_DTYPE: tl.constexpr, RES_DTYPE: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, P: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """RUN times R rows. A row is W warps wide and takes each of them P passes, so that
    `256 P W` features hold it. `partial` is (programs, [dweight K | dbias K]).
    """
    K2 = K8 * 4
    first = tl.program_id(0).to(tl.int64) * (R * RUN)
    rows = tl.arange(0, R)[:, None, None, None]
    pieces = tl.arange(0, P)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    cols = pieces * LANES + tl.arange(0, LANES)[None, None, None, :]
    if WEIGHT:
        wide = tl.broadcast_to(cols, (R, W, P, LANES))  # the layout of the rows, whatever the weight's dtype
        w_lo, w_hi = unpack(tl.load(w_ptr + wide, mask=wide < K2, other=0), W_DTYPE)
    dw_lo = tl.zeros((R, W, P, LANES), tl.float32)
    dw_hi = tl.zeros((R, W, P, LANES), tl.float32)
    db_lo = tl.zeros((R, W, P, LANES), tl.float32)
    db_hi = tl.zeros((R, W, P, LANES), tl.float32)
    share = 1.0 / (K8 * 8).to(tl.float32)
    for i in tl.range(0, RUN, num_stages=STAGES):
        row0 = first + i * R
        n_lo, n_hi = unpack(load_rows(h_ptr, row0, rows, cols, M, K2, LD8 * 4), DTYPE)
        g_lo, g_hi = unpack(load_rows(g_ptr, row0, rows, cols, M, K2, LDG8 * 4), G_DTYPE)
        rstd = row_value(rstd_ptr, row0, rows, M)
        if LAYER:
            mean = row_value(mean_ptr, row0, rows, M)
            n_lo, n_hi = n_lo - mean, n_hi - mean
        n_lo, n_hi = n_lo * rstd, n_hi * rstd
        if BIAS:
            db_lo += g_lo
            db_hi += g_hi
        if WEIGHT:
            dw_lo = tl.fma(g_lo, n_lo, dw_lo)
            dw_hi = tl.fma(g_hi, n_hi, dw_hi)
            g_lo, g_hi = g_lo * w_lo, g_hi * w_hi
        dot = row_sum(tl.fma(g_hi, n_hi, g_lo * n_lo)) * (-1.0 * share)
        lo, hi = tl.fma(n_lo, dot, g_lo), tl.fma(n_hi, dot, g_hi)
        if LAYER:
            total = row_sum(g_lo + g_hi) * share
            lo, hi = lo - total, hi - total
        lo, hi = lo * rstd, hi * rstd
        if RES:
            r_lo, r_hi = unpack(load_rows(res_ptr, row0, rows, cols, M, K2, LDR8 * 4), RES_DTYPE)
            lo, hi = lo + r_lo, hi + r_hi
        at = dx_ptr + row0 * K2 + rows * K2 + cols
        tl.store(at, pack(lo, hi, DTYPE), mask=((row0 + rows) < M) & (cols < K2))
    line_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (K8 * 8 * (WEIGHT + BIAS))
    if WEIGHT:
        store_sums(line_ptr, dw_lo, dw_hi, cols, K2)
    if BIAS:
        store_sums(line_ptr + K8 * 8 * WEIGHT, db_lo, db_hi, cols, K2)


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
    rows, cols = h.shape
    dx = torch.empty(rows, cols, dtype=h.dtype, device=h.device)
    sums = ((weight is not None) + has_bias) * cols
    totals = torch.zeros(sums, dtype=torch.float32, device=h.device) if rows == 0 else empty(h, torch.float32)
    if rows and cols:
        totals = _launch(grad_y, h, weight, mean, rstd, kind, grad_residual, has_bias, dx, sums)
    quantized = quantize_both(dx, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
    dweight = empty(h, torch.float32) if weight is None else totals[:cols]
    dbias = totals[sums - cols :].clone() if has_bias else empty(h, torch.float32)  # outputs may not alias
    return dx, dweight, dbias, *quantized


def _launch(
    grad_y: Tensor,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    grad_residual: Tensor | None,
    has_bias: bool,
    dx: Tensor,
    sums: int,
) -> Tensor:
    rows, cols = h.shape
    grad_y, h = dense_rows(grad_y), dense_rows(h)
    residual = h if grad_residual is None else dense_rows(grad_residual)
    gain = h if weight is None else weight.contiguous()
    config = launch.norm_backward_config(rows, cols, kind == "layer" or has_bias)
    programs = -(-rows // (config.rows * config.run))
    partial = torch.empty(programs, sums, dtype=torch.float32, device=h.device)
    across = max(1, config.warps // config.rows)
    norm_backward_kernel[(programs,)](
        words(grad_y), words(h), words(gain), mean, rstd, words(residual), words(dx), partial,
        rows, cols // 8, grad_y.stride(0) // 8, h.stride(0) // 8, residual.stride(0) // 8,
        LAYER=kind == "layer", RES=grad_residual is not None, WEIGHT=weight is not None, BIAS=has_bias,
        DTYPE=DTYPES[h.dtype], G_DTYPE=DTYPES[grad_y.dtype], W_DTYPE=DTYPES[gain.dtype],
        RES_DTYPE=DTYPES[residual.dtype], R=config.rows, W=across, P=config.cols // (256 * across), RUN=config.run,
        STAGES=3, num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return sum_strips(partial)
