"""[Residual add +] RMSNorm or LayerNorm to MXFP8 in one launch; its backward is in `norm_backward`.

Forward moves itemsize bytes in and 1 + 1/32 out per element and orientation. Row-wise alone, a program holds whole
rows. A transpose needs 128 tokens at a time, which as whole rows do not fit a multiprocessor: there, programs that
take row statistics run some strips of 128 tokens ahead of programs that hold 128 x 128 tiles (`_row_stats`), and
the second read of x comes from the L2 cache.
Results equal `reference_ops` within one unit in the last place of the rounded dtype; given the same rounded y, bitwise.
"""

# ruff: noqa: D103

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from ._device import emit_rows, emit_tile, load_words, pack, row_index, store_rows, unpack
from ._row_stats import (
    announce,
    await_rows,
    chunk_count,
    chunk_sums,
    merge_stats,
    over_chunk,
    row_stat,
)
from .jit import kernel
from .launch import DTYPES, Emission, dense_rows, plan_emission, words
from .quantize import quantize_both
from .reference_ops import NORM_KINDS, check_kind, check_matrix, check_same, empty
from .spec import QuantSpec

SCALARS = ["M", "K8", "LD8", "LDR8", "LDG8", "MT", "LEAD", "eps"]


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
def row_stats(h, K8, eps, LAYER: tl.constexpr, DTYPE: tl.constexpr, LOG2: tl.constexpr):
    """`(mean, rstd)` of whole rows h (R, 64 * 2**LOG2) of words."""
    lo, hi = unpack(h, DTYPE)
    if LAYER:
        total = chunk_sums(lo + hi)
        mean = over_chunk(total / chunk_count(1 << LOG2, K8 * 8), h.shape[1])
        present = (tl.arange(0, 64 << LOG2) < K8 * 4)[None, :]
        lo = tl.where(present, lo - mean, 0.0)
        hi = tl.where(present, hi - mean, 0.0)
    square = chunk_sums(tl.fma(hi, hi, lo * lo))
    if not LAYER:
        total = square
    return merge_stats(total, square, K8 * 8, eps, LAYER, LOG2)


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


@kernel(do_not_specialize=SCALARS)
def norm_rows_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, q_ptr, s_ptr, mean_ptr, rstd_ptr, M, K8, LD8, LDR8, eps,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, EMIT_HIGH: tl.constexpr,
    DTYPE: tl.constexpr, HIGH: tl.constexpr, W_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    SWIZZLED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LOG2: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """RUN times R whole rows, C >= K a power of two, 2**LOG2 = C / 128; the next ones are loaded before these are
    worked on.
    """
    K2 = K8 * 4
    first = tl.program_id(0).to(tl.int64) * (R * RUN)
    rows = tl.arange(0, R)
    w_lo, w_hi = load_feature(w_ptr, 0, K2, 1.0, WEIGHT, W_DTYPE, C // 2)
    b_lo, b_hi = load_feature(b_ptr, 0, K2, 0.0, BIAS, B_DTYPE, C // 2)
    h = load_words(x_ptr, rows, first, 0, M, K2, LD8 * 4, C // 2)
    res = h
    if RES:
        res = load_words(res_ptr, rows, first, 0, M, K2, LDR8 * 4, C // 2)
    for i in range(RUN):
        row0 = first + i * R
        row_ok = (row0 + rows) < M
        end = tl.where(i + 1 < RUN, M, 0)
        next_h = load_words(x_ptr, rows, row0 + R, 0, end, K2, LD8 * 4, C // 2)
        next_res = next_h
        if RES:
            next_res = load_words(res_ptr, rows, row0 + R, 0, end, K2, LDR8 * 4, C // 2)
            h = add_residual(h, res, DTYPE)
            store_rows(h, rows, row0, 0, M, K2, h_ptr)
        mean, rstd = row_stats(h, K8, eps, LAYER, DTYPE, LOG2)
        if LAYER:
            tl.store(mean_ptr + row0 + rows, mean, mask=row_ok)
        tl.store(rstd_ptr + row0 + rows, rstd, mask=row_ok)
        y = normalize(h, mean, rstd, w_lo, w_hi, b_lo, b_hi, row_ok, LAYER, WEIGHT, BIAS, DTYPE, HIGH)
        if EMIT_HIGH:
            store_rows(y, rows, row0, 0, M, K2, y_ptr)
        if R_BR == 1:
            emit_rows(y, rows, row0, 0, M, K2, q_ptr, s_ptr, HIGH, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED)
        h = next_h
        res = next_res


@kernel(do_not_specialize=SCALARS)
def norm_tile_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, mean_ptr, rstd_ptr, counter_ptr,
    M, K8, LD8, LDR8, MT, LEAD, eps,
    LAYER: tl.constexpr, RES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, EMIT_HIGH: tl.constexpr,
    DTYPE: tl.constexpr, HIGH: tl.constexpr, W_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr, LOG2: tl.constexpr,
    R: tl.constexpr, SUMMING: tl.constexpr,
):  # fmt: skip
    """Of every `SUMMING + chunks` programs the first ones take the statistics of strip u, each of as many rows, R rows
    of 128 * 2**LOG2 >= K features at a time; the others a 128 x 128 tile each of strip u - LEAD.
    """
    K2 = K8 * 4
    chunks = tl.cdiv(K8, 16)
    u = tl.program_id(0) // (SUMMING + chunks)
    role = tl.program_id(0) % (SUMMING + chunks)
    if role < SUMMING:
        if u * 128 < M:
            for start in range(0, 128 // SUMMING, R):
                row0 = u.to(tl.int64) * 128 + role * (128 // SUMMING) + start
                rows = tl.arange(0, R)
                row_ok = (row0 + rows) < M
                h = load_words(x_ptr, rows, row0, 0, M, K2, LD8 * 4, 64 << LOG2)
                if RES:
                    h = add_residual(h, load_words(res_ptr, rows, row0, 0, M, K2, LDR8 * 4, 64 << LOG2), DTYPE)
                    store_rows(h, rows, row0, 0, M, K2, h_ptr)
                mean, rstd = row_stats(h, K8, eps, LAYER, DTYPE, LOG2)
                if LAYER:
                    tl.store(mean_ptr + row0 + rows, mean, mask=row_ok)
                tl.store(rstd_ptr + row0 + rows, rstd, mask=row_ok)
            announce(counter_ptr, u)
    elif u >= LEAD:
        strip = u - LEAD
        row0 = strip.to(tl.int64) * 128
        col0 = (role - SUMMING) * 128
        r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
        w_lo, w_hi = load_feature(w_ptr, col0, K2, 1.0, WEIGHT, W_DTYPE, 64)
        b_lo, b_hi = load_feature(b_ptr, col0, K2, 0.0, BIAS, B_DTYPE, 64)
        if RES:  # h is another program's output
            await_rows(counter_ptr, strip, SUMMING)
            source = h_ptr
            stride = K2
        else:
            source = x_ptr
            stride = LD8 * 4
        h0 = load_words(source, r0, row0, col0, M, K2, stride, 64)
        h1 = load_words(source, r1, row0, col0, M, K2, stride, 64)
        h2 = load_words(source, r2, row0, col0, M, K2, stride, 64)
        h3 = load_words(source, r3, row0, col0, M, K2, stride, 64)
        if not RES:
            await_rows(counter_ptr, strip, SUMMING)
        i0, i1 = row_stat(rstd_ptr, row0, r0, M), row_stat(rstd_ptr, row0, r1, M)
        i2, i3 = row_stat(rstd_ptr, row0, r2, M), row_stat(rstd_ptr, row0, r3, M)
        m0, m1, m2, m3 = i0, i1, i2, i3
        if LAYER:
            m0, m1 = row_stat(mean_ptr, row0, r0, M), row_stat(mean_ptr, row0, r1, M)
            m2, m3 = row_stat(mean_ptr, row0, r2, M), row_stat(mean_ptr, row0, r3, M)
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
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
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
    launch.check_features("norm_quantize", x.shape[1], launch.MAX_FEATURES)
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
        flags = {
            "LAYER": layer,
            "RES": residual is not None,
            "WEIGHT": weight is not None,
            "BIAS": bias is not None,
            "EMIT_HIGH": high,
        }
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
    dtypes = {
        "DTYPE": DTYPES[x.dtype],
        "HIGH": DTYPES[y.dtype],
        "W_DTYPE": DTYPES[features[0].dtype],
        "B_DTYPE": DTYPES[features[1].dtype],
    }
    read = [words(t) for t in features]
    y = words(y)
    bare = not (flags["LAYER"] or flags["RES"] or flags["BIAS"])
    row = launch.norm_row_config(cols, bare)
    if plan.rows_alone and row is not None:
        visited = -(-rows // 128) * 128 if plan.flags["SWIZZLED"] and plan.any else rows
        norm_rows_kernel[(-(-visited // (row.rows * row.run)),)](
            words(x), words(residual), *read, y, words(h), *plan.pointers[:2], mean, rstd,
            rows, cols // 8, x.stride(0) // 8, residual.stride(0) // 8, eps, **flags, **dtypes,
            **{k: plan.flags[k] for k in ("R_BR", "R_BC", "R_E5", "R_FLOOR", "R_ALIGNED", "SWIZZLED")},
            R=row.rows, C=row.cols, LOG2=(row.cols // 128).bit_length() - 1, RUN=row.run,
            num_warps=row.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return
    as_is = bare and not flags["EMIT_HIGH"] and dtypes["HIGH"] == dtypes["DTYPE"]
    staged = launch.norm_staged_config(plan.shared_rows, plan.flags)
    if as_is and staged and launch.stageable(x, plan.flags):
        _staged_forward(x, weight, eps, rstd, plan, staged)
        return
    tile = launch.norm_tile_config(plan.shared_rows, bare)
    roles = launch.plan_roles(x, tile, 16384, launch.summing_programs(cols))
    norm_tile_kernel[(roles.programs,)](
        words(x), words(residual), *read, y, words(h), *plan.pointers, mean, rstd, roles.counter,
        rows, cols // 8, x.stride(0) // 8, residual.stride(0) // 8, plan.stride_t, roles.lead, eps, **flags, **dtypes,
        **plan.flags, REPS=tile.reps(x.element_size()), **roles.flags,
        num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
    )  # fmt: skip


def _staged_forward(
    x: Tensor, weight: Tensor | None, eps: float, rstd: Tensor, plan: Emission, staged: launch.TileConfig
) -> None:  # fmt: skip
    """RMSNorm of bf16 without residual, bias and stored y."""
    from ._norm_staged import norm_staged_kernel  # Gluon, which the interpreter does not have

    rows, cols = x.shape
    roles = launch.plan_roles(x, staged, 16384, launch.summing_programs(cols), launch.STAGED_LEAD_PROGRAMS)
    norm_staged_kernel[(roles.programs,)](
        words(x), x if weight is None else weight.contiguous(), plan.outputs[0].view(torch.int32), *plan.pointers[1:],
        rstd, roles.counter, rows, cols // 8, x.stride(0) // 8, plan.stride_t, roles.lead, eps,
        WEIGHT=weight is not None, **plan.flags, **roles.flags,
        num_warps=staged.warps, enable_fp_fusion=False, **staged.options,
    )  # fmt: skip
