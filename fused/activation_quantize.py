"""Activation to MXFP8 in one pass, and its backward.

Forward moves itemsize bytes in (twice that for a gated kind) and 1 + 1/32 out per element and orientation.
Backward reads grad_y and the forward's input once and writes, as asked, dx, its MXFP8 in both orientations, bias
gradient partial sums per 128 tokens, and the activation's transposed qdata, which wgrad of the next projection
then need not have kept.
The tile kernels here take any dtype; bf16 on Hopper or later goes to those of `_activation_staged`, whose bits are the
same. Results equal `reference_ops` within one unit in the last place of the rounded dtype; given the same rounded
values, bitwise.
"""

# ruff: noqa: D103

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from ._activation_math import act, slope
from ._device import (
    emit_columns,
    emit_rows,
    emit_tile,
    load_words,
    pack,
    row_index,
    store_rows,
    store_rows_until,
    sum_tokens,
    unpack,
)
from ._row_stats import sum_strips
from .jit import kernel
from .launch import DTYPES, dense_rows, plan_emission, words
from .quantize import quantize_both
from .reference_ops import check_same, empty, split_operands
from .spec import QuantSpec
from .spread import in_lines, spread

SCALARS = ["M", "K8", "LDU8", "LDX8", "LDG8", "MT", "OUT8", "UP_OFFSET8"]


@triton.jit
def activated(
    up_ptr, x_ptr, rows, row0, col0, M, K2, LDU2, LDX2,
    KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, HIGH: tl.constexpr, C2: tl.constexpr,
):  # fmt: skip
    """Words of act(x) or act(x) * up, rounded to HIGH."""
    lo, hi = unpack(load_words(x_ptr, rows, row0, col0, M, K2, LDX2, C2), DTYPE)
    lo, hi = act(lo, KIND), act(hi, KIND)
    if GATED:
        up_lo, up_hi = unpack(load_words(up_ptr, rows, row0, col0, M, K2, LDU2, C2), DTYPE)
        lo, hi = lo * up_lo, hi * up_hi
    return pack(lo, hi, HIGH)


@kernel(do_not_specialize=SCALARS)
def activation_rows_kernel(
    up_ptr, x_ptr, y_ptr, q_ptr, s_ptr, M, K8, LDU8, LDX8,
    KIND: tl.constexpr, GATED: tl.constexpr, EMIT_HIGH: tl.constexpr, DTYPE: tl.constexpr, HIGH: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    SWIZZLED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    K2 = K8 * 4
    chunks = tl.cdiv(K8 * 8, C)
    row0 = (tl.program_id(0) // chunks).to(tl.int64) * R
    col0 = (tl.program_id(0) % chunks) * C
    rows = tl.arange(0, R)
    y = activated(up_ptr, x_ptr, rows, row0, col0, M, K2, LDU8 * 4, LDX8 * 4, KIND, GATED, DTYPE, HIGH, C // 2)
    if EMIT_HIGH:
        store_rows(y, rows, row0, col0, M, K2, y_ptr)
    if R_BR == 1:
        emit_rows(y, rows, row0, col0, M, K2, q_ptr, s_ptr, HIGH, R_BC, R_E5, R_FLOOR, SWIZZLED, R_ALIGNED)


@kernel(do_not_specialize=SCALARS)
def activation_tile_kernel(
    up_ptr, x_ptr, y_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, M, K8, LDU8, LDX8, MT,
    KIND: tl.constexpr, GATED: tl.constexpr, EMIT_HIGH: tl.constexpr, DTYPE: tl.constexpr, HIGH: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    K2 = K8 * 4
    chunks = tl.cdiv(K8, 16)
    row0 = (tl.program_id(0) // chunks).to(tl.int64) * 128
    col0 = (tl.program_id(0) % chunks) * 128
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    LDU2 = LDU8 * 4
    LDX2 = LDX8 * 4
    y0 = activated(up_ptr, x_ptr, r0, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
    y1 = activated(up_ptr, x_ptr, r1, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
    y2 = activated(up_ptr, x_ptr, r2, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
    y3 = activated(up_ptr, x_ptr, r3, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
    if EMIT_HIGH:
        store_rows(y0, r0, row0, col0, M, K2, y_ptr)
        store_rows(y1, r1, row0, col0, M, K2, y_ptr)
        store_rows(y2, r2, row0, col0, M, K2, y_ptr)
        store_rows(y3, r3, row0, col0, M, K2, y_ptr)
    emit_tile(
        y0, y1, y2, y3, row0, col0, M, K2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, HIGH,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
    )  # fmt: skip


@triton.jit
def gradient(
    g_ptr, up_ptr, x_ptr, rows, row0, col0, M, K2, LDG2, LDU2, LDX2,
    OF_UP: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,
):  # fmt: skip
    """Words of the gradient of one subtile, of up or of inner (what the activation applies to)."""
    lo, hi = unpack(load_words(x_ptr, rows, row0, col0, M, K2, LDX2, 64), DTYPE)
    g_lo, g_hi = unpack(load_words(g_ptr, rows, row0, col0, M, K2, LDG2, 64), G_DTYPE)
    if OF_UP:
        d = pack(g_lo * act(lo, KIND), g_hi * act(hi, KIND), DTYPE)
    else:
        if GATED:
            up_lo, up_hi = unpack(load_words(up_ptr, rows, row0, col0, M, K2, LDU2, 64), DTYPE)
            g_lo, g_hi = g_lo * up_lo, g_hi * up_hi
        d = pack(g_lo * slope(lo, KIND), g_hi * slope(hi, KIND), DTYPE)
    return d


@triton.jit
def emit_gradient(
    g_ptr, up_ptr, x_ptr, high_ptr, line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr,
    row0, col0, out0, M, K2, OUT2, LDG2, LDU2, LDX2, MT,
    OF_UP: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, EMIT_HIGH: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """One gradient of the tile at (row0, col0), from loads of its own, to column out0 of its (M, OUT2)-word outputs."""
    r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
    d0 = gradient(
        g_ptr, up_ptr, x_ptr, r0, row0, col0, M, K2, LDG2, LDU2, LDX2, OF_UP, KIND, GATED, DTYPE, G_DTYPE
    )  # fmt: skip
    d1 = gradient(
        g_ptr, up_ptr, x_ptr, r1, row0, col0, M, K2, LDG2, LDU2, LDX2, OF_UP, KIND, GATED, DTYPE, G_DTYPE
    )  # fmt: skip
    d2 = gradient(
        g_ptr, up_ptr, x_ptr, r2, row0, col0, M, K2, LDG2, LDU2, LDX2, OF_UP, KIND, GATED, DTYPE, G_DTYPE
    )  # fmt: skip
    d3 = gradient(
        g_ptr, up_ptr, x_ptr, r3, row0, col0, M, K2, LDG2, LDU2, LDX2, OF_UP, KIND, GATED, DTYPE, G_DTYPE
    )  # fmt: skip
    if EMIT_HIGH:
        end = out0 // 2 - col0 // 2 + K2
        store_rows_until(d0, r0, row0, out0, M, OUT2, end, high_ptr)
        store_rows_until(d1, r1, row0, out0, M, OUT2, end, high_ptr)
        store_rows_until(d2, r2, row0, out0, M, OUT2, end, high_ptr)
        store_rows_until(d3, r3, row0, out0, M, OUT2, end, high_ptr)
    if BIAS:
        sum_tokens(d0, d1, d2, d3, line_ptr, col0, K2 * 2, DTYPE, REPS)
    emit_tile(
        d0, d1, d2, d3, row0, out0, M, OUT2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, DTYPE,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
    )  # fmt: skip


@kernel(do_not_specialize=SCALARS)
def activation_backward_kernel(
    g_ptr, up_ptr, x_ptr, dx_ptr, dup_ptr, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr,
    uq_ptr, us_ptr, uqt_ptr, ust_ptr, at_ptr, ast_ptr, M, K8, LDG8, LDU8, LDX8, OUT8, UP_OFFSET8, MT,
    KIND: tl.constexpr, GATED: tl.constexpr, EMIT_HIGH: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, HIGH: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    A_BR: tl.constexpr, A_BC: tl.constexpr, A_E5: tl.constexpr, A_FLOOR: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """One output of a 128 x 128 tile; consecutive programs make the tile's other outputs and find its inputs in the L2
    cache, since several outputs at a time would not fit the registers. The gradient
    of `inner` goes to (M, 8 * OUT8) outputs at column 0, that of `up` to outputs of
    the same width at column 8 * UP_OFFSET8: the second half of the same matrix, or the start of another.
    `partial` is (strips, [sums of inner K | sums of up K]).
    """
    K2 = K8 * 4
    chunks = tl.cdiv(K8, 16)
    OUTPUTS: tl.constexpr = 1 + (1 if GATED else 0) + (1 if A_BR > 0 else 0)
    output = tl.program_id(0) % OUTPUTS
    strip = tl.program_id(0) // OUTPUTS // chunks
    row0 = strip.to(tl.int64) * 128
    col0 = (tl.program_id(0) // OUTPUTS % chunks) * 128
    up0 = col0 + UP_OFFSET8 * 8
    LDG2 = LDG8 * 4
    LDU2 = LDU8 * 4
    LDX2 = LDX8 * 4
    OUT2 = OUT8 * 4
    line = partial_ptr + strip.to(tl.int64) * (K8 * 8 * (1 + GATED))
    if output == 0:
        emit_gradient(
            g_ptr, up_ptr, x_ptr, dx_ptr, line, q_ptr, s_ptr, qt_ptr, st_ptr,
            row0, col0, col0, M, K2, OUT2, LDG2, LDU2, LDX2, MT, False, KIND, GATED, EMIT_HIGH, BIAS, DTYPE, G_DTYPE,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
        )  # fmt: skip
    elif GATED and output == 1:
        emit_gradient(
            g_ptr, up_ptr, x_ptr, dup_ptr, line + K8 * 8, uq_ptr, us_ptr, uqt_ptr, ust_ptr,
            row0, col0, up0, M, K2, OUT2, LDG2, LDU2, LDX2, MT, True, KIND, GATED, EMIT_HIGH, BIAS, DTYPE, G_DTYPE,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
        )  # fmt: skip
    elif A_BR > 0:
        r0, r1, r2, r3 = row_index(0, REPS), row_index(1, REPS), row_index(2, REPS), row_index(3, REPS)
        y0 = activated(up_ptr, x_ptr, r0, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
        y1 = activated(up_ptr, x_ptr, r1, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
        y2 = activated(up_ptr, x_ptr, r2, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
        y3 = activated(up_ptr, x_ptr, r3, row0, col0, M, K2, LDU2, LDX2, KIND, GATED, DTYPE, HIGH, 64)
        emit_columns(
            y0, y1, y2, y3, row0, col0, K2, MT, at_ptr, ast_ptr, HIGH,
            A_BR, A_BC, A_E5, A_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
        )  # fmt: skip


def activation_quantize(
    x: Tensor,
    gate: Tensor | None,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference_ops.activation_quantize` on the GPU.

    K must be a multiple of 32. A spec with stochastic rounding or a Hadamard transform takes a second launch on
    the stored y. `pad_tokens` as in `quantize_both`.
    """
    up, inner, act_kind = split_operands("activation_quantize", x, gate, kind)
    launch.check_features("activation_quantize", inner.shape[1])
    now_row, now_col, later_row, later_col = launch.split_specs(rowwise, colwise)
    late = later_row is not None or later_col is not None
    rows, cols = inner.shape
    high = emit_high or late
    y = torch.empty(rows, cols, dtype=out_dtype, device=x.device) if high else empty(x, out_dtype)
    plan = plan_emission(x, rows, cols, now_row, now_col, swizzled=swizzled, pad_tokens=pad_tokens)
    if rows and cols and (high or plan.any):
        inner = dense_rows(inner)
        other = inner if up is None else dense_rows(up)
        common: dict[str, Any] = {
            "KIND": act_kind,
            "GATED": up is not None,
            "EMIT_HIGH": high,
            "DTYPE": DTYPES[x.dtype],
            "HIGH": DTYPES[out_dtype],
        }
        strides = (other.stride(0) // 8, inner.stride(0) // 8)
        if plan.rows_alone:
            row = launch.activation_row_config(cols)
            visited = -(-rows // 128) * 128 if swizzled and plan.any else rows
            activation_rows_kernel[(-(-visited // row.rows) * -(-cols // row.cols),)](
                words(other), words(inner), words(y), *plan.pointers[:2], rows, cols // 8, *strides, **common,
                **{k: plan.flags[k] for k in ("R_BR", "R_BC", "R_E5", "R_FLOOR", "R_ALIGNED", "SWIZZLED")},
                R=row.rows, C=row.cols, num_warps=row.warps, enable_fp_fusion=False,
            )  # fmt: skip
        elif out_dtype is torch.bfloat16 and all(launch.staged(t, plan.flags) for t in (inner, other)):
            _staged_forward(other, inner, y, plan, common)
        else:
            tile = launch.activation_tile_config(plan.flags["C_BR"] > 0)
            activation_tile_kernel[(-(-rows // 128) * -(-cols // 128),)](
                words(other), words(inner), words(y), *plan.pointers, rows, cols // 8, *strides, plan.stride_t,
                **common, **plan.flags, REPS=tile.reps(x.element_size()),
                num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
            )  # fmt: skip
    outputs = list(plan.outputs)
    if late:
        later = quantize_both(y, later_row, later_col, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
        outputs = [b if a.numel() == 0 else a for a, b in zip(outputs, later)]
    return y if emit_high else empty(x, out_dtype), outputs[0], outputs[1], outputs[2], outputs[3]


def _staged_forward(other: Tensor, inner: Tensor, y: Tensor, plan: launch.Emission, common: dict[str, Any]) -> None:
    from ._activation_staged import activation_staged_kernel  # Gluon, which the interpreter does not have

    rows, cols = inner.shape
    held = plan if common["GATED"] else in_lines(plan)
    tile = launch.activation_staged_config(common["GATED"], plan.shared_rows)
    activation_staged_kernel[(-(-rows // launch.TOKENS) * -(-cols // 128),)](
        words(other), words(inner), words(y), plan.outputs[0].view(torch.int32), *held.pointers[1:],
        rows, cols // 8, other.stride(0) // 8, inner.stride(0) // 8, plan.stride_t,
        **{name: common[name] for name in ("KIND", "GATED", "EMIT_HIGH")}, **launch.staged_flags(held.flags),
        num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
    )  # fmt: skip
    spread(held, plan)


def activation_backward(
    grad_y: Tensor,
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    want_bias_grad: bool,
    act_colwise: QuantSpec | None,
    *,
    out_dtype: torch.dtype | None = None,
    emit_high: bool = True,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, ...]:
    """`reference_ops.activation_backward` on the GPU: the same tuple of 14.

    K must be a multiple of 32. Specs with stochastic rounding or a Hadamard transform take further launches, and so
    does a packed input whose halves are not multiples of 128 features, where a tile would span both.
    """
    up, inner, act_kind = split_operands("activation_backward", x, gate, kind)
    launch.check_features("activation_backward", inner.shape[1])
    check_same("activation_backward", "grad_y", grad_y, inner, dtype=False)
    rows, cols = inner.shape
    packed = up is not None and gate is None
    fused = launch.one_pass(rowwise) and launch.one_pass(colwise) and not (packed and cols % 128)
    now = (rowwise, colwise) if fused else (None, None)
    act_now = act_colwise if launch.one_pass(act_colwise) else None
    high = emit_high or not fused
    layout: dict[str, Any] = {"swizzled": swizzled, "pad_tokens": pad_tokens}
    width = 2 * cols if packed else cols
    plan = plan_emission(x, rows, width, *now, **layout)
    up_plan = plan_emission(x, rows, cols, *(now if gate is not None else (None, None)), **layout)
    act_plan = plan_emission(x, rows, cols, None, act_now, **layout)
    dinner = torch.empty(rows, width, dtype=x.dtype, device=x.device) if high else empty(x, x.dtype)
    dup = torch.empty_like(dinner) if gate is not None and high else empty(x, x.dtype)
    sums = cols * (2 if up is not None else 1) if want_bias_grad else 0
    totals = torch.zeros(sums, dtype=torch.float32, device=x.device) if rows == 0 else empty(x, torch.float32)
    if rows and cols:
        totals = _launch_backward(
            grad_y, up, inner, act_kind, packed, dinner, dup, high, sums, plan, up_plan, act_plan,
            DTYPES[out_dtype or x.dtype],
        )  # fmt: skip
    quantized, up_quantized, act_quantized = plan.outputs, up_plan.outputs, act_plan.outputs[2:]
    if not fused:
        quantized = quantize_both(dinner, rowwise, colwise, seed, stream, **layout)
        if gate is not None:
            up_quantized = quantize_both(dup, rowwise, colwise, seed, stream, **layout)
    if act_now is not act_colwise:
        act_quantized = activation_quantize(
            x, gate, kind, out_dtype or x.dtype, None, act_colwise, False, seed=seed, stream=stream, **layout
        )[3:]
    highs = (dinner, dup) if emit_high else (empty(x, x.dtype), empty(x, x.dtype))
    if gate is None:
        return *highs, totals, empty(x, torch.float32), *quantized, *up_quantized, *act_quantized
    biases = (totals[cols:].clone(), totals[:cols])  # an op's outputs may not alias
    return highs[1], highs[0], *biases, *up_quantized, *quantized, *act_quantized


def _launch_backward(
    grad_y: Tensor, up: Tensor | None, inner: Tensor, act_kind: str, packed: bool, dinner: Tensor, dup: Tensor,
    high: bool, sums: int, plan: launch.Emission, up_plan: launch.Emission, act_plan: launch.Emission, out: Any,
) -> Tensor:  # fmt: skip
    rows, cols = inner.shape
    grad_y, inner = dense_rows(grad_y), dense_rows(inner)
    other = inner if up is None else dense_rows(up)
    partial = torch.empty(-(-rows // 128), sums, dtype=torch.float32, device=inner.device)
    pointers = (words(grad_y), words(other), words(inner), words(dinner), words(dinner if packed else dup), partial)
    sizes = (
        rows, cols // 8, grad_y.stride(0) // 8, other.stride(0) // 8, inner.stride(0) // 8,
        plan.columns // 8, cols // 8 if packed else 0, plan.stride_t,
    )  # fmt: skip
    plans = (plan, plan if packed else up_plan, act_plan)
    common = {"KIND": act_kind, "GATED": up is not None, "EMIT_HIGH": high, "BIAS": sums > 0}
    common.update({f"A_{name}": act_plan.flags[f"C_{name}"] for name in ("BR", "BC", "E5", "FLOOR")})
    emitted = (plan if plan.any else act_plan).flags
    if out == tl.bfloat16 and all(launch.staged(t, emitted) for t in (grad_y, inner, other)):
        _staged_backward(pointers, sizes, plans, common)
        return sum_strips(partial)
    tile = launch.activation_backward_config(up is not None)
    outputs = 1 + (up is not None) + act_plan.any
    activation_backward_kernel[(outputs * -(-rows // 128) * -(-cols // 128),)](
        *pointers, *plans[0].pointers, *plans[1].pointers, *plans[2].pointers[2:], *sizes, **common,
        DTYPE=DTYPES[inner.dtype], G_DTYPE=DTYPES[grad_y.dtype], HIGH=out, **plan.flags,
        REPS=tile.reps(inner.element_size()), num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
    )  # fmt: skip
    return sum_strips(partial)


def _staged_backward(
    pointers: tuple[Tensor, ...], sizes: tuple[int, ...], plans: tuple[launch.Emission, ...], common: dict[str, Any]
) -> None:
    from ._activation_staged import activation_backward_staged_kernel  # Gluon, which the interpreter does not have

    tile = launch.activation_backward_staged_config(common["GATED"], common["BIAS"])
    emissions = [(plan.outputs[0].view(torch.int32), *plan.pointers[1:]) for plan in plans]
    activation_backward_staged_kernel[(-(-sizes[0] // launch.TOKENS) * -(-sizes[1] // 16),)](
        *pointers, *emissions[0], *emissions[1], *emissions[2][2:], *sizes, **common,
        **launch.staged_flags(plans[0].flags), num_warps=tile.warps, enable_fp_fusion=False, **tile.options,
    )  # fmt: skip
