"""`activation_quantize`'s tile kernels for bf16, with tiles in shared memory; see `_staged`.

A tile's inputs become its outputs in place, so however many outputs there are, none waits in registers.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._activation_math import act, act_and_slope
from ._device import pack, unpack
from ._staged import (
    TILE,
    await_copies,
    barrier,
    column_words,
    copy_tile,
    emit_tile,
    row_layout,
    staged_kernel,
    sum_columns,
)

SCALARS = ["M", "K8", "LDU8", "LDX8", "LDG8", "MT", "OUT8", "UP_OFFSET8"]


@gluon.jit
def store_high(w, first: gl.constexpr, ptr, row0, col0, M, K8):
    """Store words of tokens `row0 + first ..` in the rows' layout to an (M, 8 K8) matrix."""
    L: gl.constexpr = w.type.layout
    K2 = K8 * 4
    r = first + gl.arange(0, w.shape[0], gl.SliceLayout(1, L))
    c = gl.arange(0, 64, gl.SliceLayout(0, L))
    left = gl.minimum(M - row0, 128).to(gl.int32)
    at = ptr + (row0 * K2 + col0 // 2) + (r[:, None] * K2 + c[None, :])
    gl.store(at, w, mask=(r < left)[:, None] & (c < K2 - col0 // 2)[None, :])


@gluon.jit
def activate(xs, ups, KIND: gl.constexpr, GATED: gl.constexpr):
    """Turn x into y = act(x) or act(x) * up in place; return y in the rows' layout."""
    L: gl.constexpr = row_layout(gl.num_warps())
    lo, hi = unpack(xs.load(L), tl.bfloat16)
    lo, hi = act(lo, KIND), act(hi, KIND)
    if GATED:
        up_lo, up_hi = unpack(ups.load(L), tl.bfloat16)
        lo, hi = lo * up_lo, hi * up_hi
    y = pack(lo, hi, tl.bfloat16)
    xs.store(y)
    return y


@staged_kernel(do_not_specialize=SCALARS)
def activation_staged_kernel(
    up_ptr, x_ptr, y_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, M, K8, LDU8, LDX8, MT,
    KIND: gl.constexpr, GATED: gl.constexpr, EMIT_HIGH: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    SWIZZLED: gl.constexpr,
):  # fmt: skip
    K2 = K8 * 4
    chunks = (K8 + 15) // 16
    R: gl.constexpr = 4 * gl.num_warps()
    row0 = (gl.program_id(0) // chunks).to(gl.int64) * 128
    col0 = (gl.program_id(0) % chunks) * 128
    xs = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
    ups = xs
    copy_tile(x_ptr, xs, row0, col0 // 2, M, K2, LDX8 * 4)
    if GATED:
        ups = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
        copy_tile(up_ptr, ups, row0, col0 // 2, M, K2, LDU8 * 4)
    await_copies(0)
    if R_BR == 1:
        y = activate(xs, ups, KIND, GATED)
        if EMIT_HIGH:
            store_high(y, 0, y_ptr, row0, col0, M, K8)
    else:  # nobody needs the whole tile in registers
        y = 0
        for first in gl.static_range(0, 128, R):
            part = activate(xs.slice(first, R), ups.slice(first, R), KIND, GATED)
            if EMIT_HIGH:
                store_high(part, first, y_ptr, row0, col0, M, K8)
    emit_tile(
        xs, y, row0, col0, M, K8, MT, q_ptr, s_ptr, qt_ptr, st_ptr,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, SWIZZLED,
    )  # fmt: skip


@gluon.jit
def emit_gradient(
    buffer, line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, row0, col0, out0, M, K8, OUT8, MT, BIAS: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    SWIZZLED: gl.constexpr,
):  # fmt: skip
    """The gradient of the tile at (row0, col0) to column out0 of outputs 8 OUT8 features wide."""
    if BIAS:
        w0, w1, w2, w3 = column_words(buffer)
        sum_columns(w0, w1, w2, w3, line_ptr, col0, K8 * 8)
        barrier()  # or the assembler starts on the rows before the sums are done and runs out of registers
    if C_BR > 0:
        emit_tile(
            buffer, buffer.load(row_layout(gl.num_warps())), row0, out0, M, OUT8, MT, q_ptr, s_ptr, qt_ptr, st_ptr,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, SWIZZLED,
        )  # fmt: skip


@staged_kernel(do_not_specialize=SCALARS)
def activation_backward_staged_kernel(
    g_ptr, up_ptr, x_ptr, dx_ptr, dup_ptr, partial_ptr, q_ptr, s_ptr, qt_ptr, st_ptr,
    uq_ptr, us_ptr, uqt_ptr, ust_ptr, at_ptr, ast_ptr, M, K8, LDG8, LDU8, LDX8, OUT8, UP_OFFSET8, MT,
    KIND: gl.constexpr, GATED: gl.constexpr, EMIT_HIGH: gl.constexpr, BIAS: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    A_BR: gl.constexpr, A_BC: gl.constexpr, A_E5: gl.constexpr, A_FLOOR: gl.constexpr, SWIZZLED: gl.constexpr,
):  # fmt: skip
    """Arguments as of `activation_backward_kernel`, but all outputs of a tile. x turns into the activation, grad_y and
    up into the gradients of inner and of up, some tokens at a time.
    """
    K2 = K8 * 4
    chunks = (K8 + 15) // 16
    R: gl.constexpr = 4 * gl.num_warps()
    L: gl.constexpr = row_layout(gl.num_warps())
    strip = gl.program_id(0) // chunks
    row0 = strip.to(gl.int64) * 128
    col0 = (gl.program_id(0) % chunks) * 128
    up0 = col0 + UP_OFFSET8 * 8
    line = partial_ptr + strip.to(gl.int64) * (K8 * 8 * (2 if GATED else 1))
    xs = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
    gs = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
    copy_tile(x_ptr, xs, row0, col0 // 2, M, K2, LDX8 * 4)
    copy_tile(g_ptr, gs, row0, col0 // 2, M, K2, LDG8 * 4)
    if GATED:
        ups = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
        copy_tile(up_ptr, ups, row0, col0 // 2, M, K2, LDU8 * 4)
    await_copies(0)
    for first in gl.static_range(0, 128, R):
        lo, hi = unpack(xs.slice(first, R).load(L), tl.bfloat16)
        g_lo, g_hi = unpack(gs.slice(first, R).load(L), tl.bfloat16)
        y_lo, d_lo = act_and_slope(lo, KIND)
        y_hi, d_hi = act_and_slope(hi, KIND)
        if GATED:
            dup = pack(g_lo * y_lo, g_hi * y_hi, tl.bfloat16)
            up_lo, up_hi = unpack(ups.slice(first, R).load(L), tl.bfloat16)
            ups.slice(first, R).store(dup)
            if EMIT_HIGH:
                store_high(dup, first, dup_ptr, row0, up0, M, OUT8)
            y_lo, y_hi = y_lo * up_lo, y_hi * up_hi
            g_lo, g_hi = g_lo * up_lo, g_hi * up_hi
        if A_BR > 0:
            xs.slice(first, R).store(pack(y_lo, y_hi, tl.bfloat16))
        d = pack(g_lo * d_lo, g_hi * d_hi, tl.bfloat16)
        gs.slice(first, R).store(d)
        if EMIT_HIGH:
            store_high(d, first, dx_ptr, row0, col0, M, OUT8)
    if A_BR > 0:
        emit_tile(
            xs, 0, row0, col0, M, K8, MT, q_ptr, s_ptr, at_ptr, ast_ptr,
            0, 0, False, False, R_ALIGNED, A_BR, A_BC, A_E5, A_FLOOR, C_ALIGNED, SWIZZLED,
        )  # fmt: skip
    emit_gradient(
        gs, line, q_ptr, s_ptr, qt_ptr, st_ptr, row0, col0, col0, M, K8, OUT8, MT, BIAS,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, SWIZZLED,
    )  # fmt: skip
    if GATED:
        emit_gradient(
            ups, line + K8 * 8, uq_ptr, us_ptr, uqt_ptr, ust_ptr, row0, col0, up0, M, K8, OUT8, MT, BIAS,
            R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, SWIZZLED,
        )  # fmt: skip
