"""`quantize.quantize_tile_kernel` for bf16, with tiles in shared memory; see `_staged`."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from ._staged import TILE, await_copies, column_words, copy_tile, emit_tile, row_layout, staged_kernel, sum_columns

SCALARS = ["M", "K8", "LD8", "MT"]


@staged_kernel(do_not_specialize=SCALARS)
def quantize_staged_kernel(
    x_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, partial_ptr, M, K8, LD8, MT, SUM: gl.constexpr,
    R_BR: gl.constexpr, R_BC: gl.constexpr, R_E5: gl.constexpr, R_FLOOR: gl.constexpr, R_ALIGNED: gl.constexpr,
    C_BR: gl.constexpr, C_BC: gl.constexpr, C_E5: gl.constexpr, C_FLOOR: gl.constexpr, C_ALIGNED: gl.constexpr,
    SWIZZLED: gl.constexpr, T_ALIGN: gl.constexpr,
):  # fmt: skip
    chunks = (K8 + 15) // 16
    row0 = (gl.program_id(0) // chunks).to(gl.int64) * 128
    col0 = (gl.program_id(0) % chunks) * 128
    buffer = gl.allocate_shared_memory(gl.int32, [128, 64], TILE)
    copy_tile(x_ptr, buffer, row0, col0 // 2, M, K8 * 4, LD8 * 4)
    await_copies(0)
    if SUM:
        w0, w1, w2, w3 = column_words(buffer)
        sum_columns(w0, w1, w2, w3, partial_ptr + row0 // 128 * (K8 * 8), col0, K8 * 8)
    emit_tile(
        buffer, buffer.load(row_layout(gl.num_warps())), row0, col0, M, K8, MT, q_ptr, s_ptr, qt_ptr, st_ptr,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, SWIZZLED, T_ALIGN,
    )  # fmt: skip
