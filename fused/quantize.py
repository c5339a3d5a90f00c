"""Quantize a matrix to MXFP8 along its rows, its columns or both, from one read.

Moves `itemsize + orientations * (1 + 1/32)` bytes an element. Three kernels: any number of rows at a time when
only rows matter; 128 x C tiles when columns or several-token tiles do; and a plain one, an orientation at a time,
for stochastic rounding and the Hadamard transform.
Bits equal `reference.quantize_spec`.
"""

# ruff: noqa: D103

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from ._device import (
    INTERPRETED,
    abs_bits,
    as_float,
    emit_rows,
    emit_tile,
    inv_scale,
    load_words,
    row_index,
    scale_byte,
    software_fp8,
    store_scale,
    sum_tokens,
)
from ._row_stats import sum_strips
from .jit import kernel
from .launch import DTYPES, Emission, dense_rows, plan_emission, words
from .reference_ops import Quantized, check_matrix
from .spec import QuantSpec, Rounding
from .spread import in_lines, spread

SCALARS = ["M", "K8", "LD8", "MT", "stream"]
"""Never specialized: token counts change every step, and a new one must not compile new code."""


@kernel(do_not_specialize=SCALARS)
def quantize_rows_kernel(
    x_ptr, q_ptr, s_ptr, M, K8, LD8, DTYPE: tl.constexpr,
    BC: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr, SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    K2 = K8 * 4  # in words; says "a multiple of 4", which keeps loads at 16 bytes
    chunks = tl.cdiv(K8 * 8, C)
    row0 = (tl.program_id(0) // chunks).to(tl.int64) * R
    col0 = (tl.program_id(0) % chunks) * C
    rows = tl.arange(0, R)
    w = load_words(x_ptr, rows, row0, col0, M, K2, LD8 * 4, C // 2)
    emit_rows(w, rows, row0, col0, M, K2, q_ptr, s_ptr, DTYPE, BC, E5, FLOOR, SWIZZLED, ALIGNED)


@kernel(do_not_specialize=["M", "K8", "LD8"])
def sum_kernel(x_ptr, partial_ptr, M, K8, LD8, DTYPE: tl.constexpr, REPS: tl.constexpr):
    """(strips, K) sums over 128 tokens: those of `quantize_tile_kernel`, alone."""
    K2 = K8 * 4
    chunks = tl.cdiv(K8, 16)
    row0 = (tl.program_id(0) // chunks).to(tl.int64) * 128
    col0 = (tl.program_id(0) % chunks) * 128
    w0 = load_words(x_ptr, row_index(0, REPS), row0, col0, M, K2, LD8 * 4, 64)
    w1 = load_words(x_ptr, row_index(1, REPS), row0, col0, M, K2, LD8 * 4, 64)
    w2 = load_words(x_ptr, row_index(2, REPS), row0, col0, M, K2, LD8 * 4, 64)
    w3 = load_words(x_ptr, row_index(3, REPS), row0, col0, M, K2, LD8 * 4, 64)
    sum_tokens(w0, w1, w2, w3, partial_ptr + row0 // 128 * (K8 * 8), col0, K2 * 2, DTYPE, REPS)


@kernel(do_not_specialize=SCALARS)
def quantize_tile_kernel(
    x_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, partial_ptr, M, K8, LD8, MT, SUM: tl.constexpr, DTYPE: tl.constexpr,
    R_BR: tl.constexpr, R_BC: tl.constexpr, R_E5: tl.constexpr, R_FLOOR: tl.constexpr, R_ALIGNED: tl.constexpr,
    C_BR: tl.constexpr, C_BC: tl.constexpr, C_E5: tl.constexpr, C_FLOOR: tl.constexpr, C_ALIGNED: tl.constexpr,
    T_ALIGN: tl.constexpr, SWIZZLED: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    K2 = K8 * 4
    chunks = tl.cdiv(K8, 16)
    row0 = (tl.program_id(0) // chunks).to(tl.int64) * 128
    col0 = (tl.program_id(0) % chunks) * 128
    w0 = load_words(x_ptr, row_index(0, REPS), row0, col0, M, K2, LD8 * 4, 64)
    w1 = load_words(x_ptr, row_index(1, REPS), row0, col0, M, K2, LD8 * 4, 64)
    w2 = load_words(x_ptr, row_index(2, REPS), row0, col0, M, K2, LD8 * 4, 64)
    w3 = load_words(x_ptr, row_index(3, REPS), row0, col0, M, K2, LD8 * 4, 64)
    if SUM:
        sum_tokens(w0, w1, w2, w3, partial_ptr + row0 // 128 * (K8 * 8), col0, K2 * 2, DTYPE, REPS)
    emit_tile(
        w0, w1, w2, w3, row0, col0, M, K2, MT, q_ptr, s_ptr, qt_ptr, st_ptr, DTYPE,
        R_BR, R_BC, R_E5, R_FLOOR, R_ALIGNED, C_BR, C_BC, C_E5, C_FLOOR, C_ALIGNED, T_ALIGN, SWIZZLED, REPS,
    )  # fmt: skip


@triton.jit
def to_fp8(scaled, E5: tl.constexpr):
    if INTERPRETED:
        q = software_fp8(scaled, E5).to(tl.uint8)
    elif E5:
        q = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        q = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return q


@triton.jit
def hadamard(y, SIZE: tl.constexpr, LOG2: tl.constexpr):
    """`reference.random_hadamard` along the last dim of y (A, L): same signs, same order of sums."""
    A: tl.constexpr = y.shape[0]
    L: tl.constexpr = y.shape[1]
    counter = tl.arange(0, SIZE // 4)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(0x5EED, counter, zero, zero + SIZE, zero)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (SIZE,))
    signs = ((word.to(tl.int32, bitcast=True) & 1) * 2 - 1).to(tl.float32)
    y = tl.reshape(tl.reshape(y, (A, L // SIZE, SIZE)) * signs[None, None, :], (A, L))
    for k in tl.static_range(LOG2):
        pairs = tl.permute(tl.reshape(y, (A, L // (2 << k), 2, 1 << k)), (0, 1, 3, 2))
        low, high = tl.split(pairs)
        y = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (A, L))
    return y * (SIZE**-0.5)


@triton.jit
def round_stochastic(value, noise, E5: tl.constexpr):
    """See `reference._round_stochastic`; noise: uniform 32-bit words."""
    DROPPED: tl.constexpr = 21 if E5 else 20
    smallest: tl.constexpr = 2.0**-14 if E5 else 2.0**-6
    magnitude = tl.abs(value)
    offset = tl.where(magnitude < smallest, smallest, 0.0)
    low = (noise.to(tl.uint32) >> (32 - DROPPED)).to(tl.int32)
    summed = (magnitude + offset).to(tl.int32, bitcast=True) + low
    rounded = ((summed >> DROPPED) << DROPPED).to(tl.float32, bitcast=True) - offset
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(value != value, value, signed)


@kernel(do_not_specialize=SCALARS)
def quantize_general_kernel(
    x_ptr, q_ptr, s_ptr, seed_ptr, stream, M, K8, LD8, MT,
    COLWISE: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, E5: tl.constexpr, FLOOR: tl.constexpr,
    STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, LOG2: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One orientation of a 128 x 128 tile, `y[across, along]` the contraction."""
    K = K8 * 8
    LD = LD8 * 8
    chunks = tl.cdiv(K, 128)
    pid = tl.program_id(0)
    row0 = (pid // chunks).to(tl.int64) * 128
    col0 = (pid % chunks) * 128
    t = tl.arange(0, 128)
    if COLWISE:
        a0, l0, A, L, LS = col0.to(tl.int64), row0, K, M, MT
        at = (row0 + t)[None, :] * LD + (col0 + t)[:, None]
    else:
        a0, l0, A, L, LS = row0, col0.to(tl.int64), M, K, K
        at = (row0 + t)[:, None] * LD + (col0 + t)[None, :]
    mask = ((a0 + t) < A)[:, None] & ((l0 + t) < L)[None, :]
    y = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HADAMARD > 0:
        y = tl.where(((l0 + t) < L // HADAMARD * HADAMARD)[None, :], hadamard(y, HADAMARD, LOG2), y)
    tiled = tl.reshape(y, (128 // ACROSS, ACROSS, 128 // ALONG, ALONG))
    amax = tl.max(tl.max(abs_bits(tiled), axis=3), axis=1)
    inv = inv_scale(amax, E5, FLOOR)
    byte = scale_byte(inv)
    scaled = tl.reshape(tiled * as_float(inv)[:, None, :, None], (128, 128))
    if FLOOR:
        limit = 57344.0 if E5 else 448.0
        scaled = tl.where(scaled > limit, limit, tl.where(scaled < -limit, -limit, scaled))
    if STOCHASTIC:
        counter = ((row0 + t) * K + col0)[:, None] // 4 + tl.arange(0, 32)[None, :]
        low = (counter & 0xFFFFFFFF).to(tl.uint32)
        zero = low * 0
        w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), low, (counter >> 32).to(tl.uint32), zero + stream, zero)
        noise = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (128, 128))
        if COLWISE:
            noise = tl.trans(noise)
        scaled = round_stochastic(scaled, noise, E5)
    out = ((a0 + t) < A)[:, None] & ((l0 + t) < LS)[None, :]
    tl.store(q_ptr + (a0 + t)[:, None] * LS + (l0 + t)[None, :], to_fp8(scaled, E5), mask=out)
    blocks = tl.broadcast_to(byte[:, None, :, None], (128 // ACROSS, ACROSS, 128 // ALONG, ALONG // 32))
    words = tl.sum(tl.reshape(blocks, (128, 4)) << (tl.arange(0, 4) * 8)[None, :], axis=1)[:, None]
    c = ((l0 // 32).to(tl.int32) + 4 * tl.arange(0, 1))[None, :]
    store_scale(s_ptr, words, (a0 + t)[:, None], c, A, (LS + 31) // 32, SWIZZLED, ALIGNED)


def quantize_both(
    x: Tensor,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    seed: Tensor | None = None,
    stream: int = 0,
    *,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> Quantized:
    """`reference_ops.quantize_both` on the GPU: same bits.

    Args:
        x: (M, K), K a multiple of 32.
        pad_tokens: round the token dimension of `qdata_t` and `scale_t` up to a multiple of this divisor of 128, zero
            past M: a GEMM over the tokens may then read whole tiles.

    Raises:
        ValueError: also for K not a multiple of 32.
    """
    check_matrix("quantize_both", "x", x)
    return _quantize(x, rowwise, colwise, seed, stream, swizzled, pad_tokens, None)


def quantize_and_sum(
    x: Tensor,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    seed: Tensor | None = None,
    stream: int = 0,
    *,
    sum_dtype: torch.dtype = torch.float32,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference_ops.quantize_and_sum` on the GPU: same bits of MXFP8.

    Where a kernel holds tiles of 128 tokens the sums come from its read, else from one of their own: inside a strip
    first, then over the strips, in one order everywhere.
    """
    check_matrix("quantize_and_sum", "x", x)
    rows, cols = x.shape
    x = dense_rows(x)
    at_once = launch.one_pass(rowwise) and colwise is not None and launch.one_pass(colwise)
    partial = torch.empty(-(-rows // launch.TOKENS), cols, dtype=torch.float32, device=x.device)
    quantized = _quantize(x, rowwise, colwise, seed, stream, swizzled, pad_tokens, partial if at_once else None)
    if partial.numel() and not at_once:
        tile = launch.quantize_tile_config(True)
        sum_kernel[(partial.shape[0] * -(-cols // 128),)](
            words(x), partial, rows, cols // 8, x.stride(0) // 8, DTYPE=DTYPES[x.dtype],
            REPS=tile.reps(x.element_size()), num_warps=tile.warps, **tile.options,
        )  # fmt: skip
    return *quantized, sum_strips(partial, sum_dtype)


def _quantize(
    x: Tensor,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    seed: Tensor | None,
    stream: int,
    swizzled: bool,
    pad_tokens: int,
    partial: Tensor | None,
) -> Quantized:
    """`partial`: room for the sums over the tokens of each strip, (strips, K) fp32, for specs of one pass."""
    launch.check_features("quantize_both", x.shape[1])
    x = dense_rows(x)
    rows, cols = x.shape
    plan = plan_emission(x, rows, cols, rowwise, colwise, swizzled=swizzled, pad_tokens=pad_tokens)
    if not plan.any or rows == 0 or cols == 0:
        return plan.outputs
    now_row, now_col, later_row, later_col = launch.split_specs(rowwise, colwise)
    if later_row is not None:
        _quantize_general(x, later_row, plan, False, seed, stream)
    if later_col is not None:
        _quantize_general(x, later_col, plan, True, seed, stream)
    if now_row is not None or now_col is not None:
        _quantize_nearest(x, plan, now_row is not None, now_col is not None, partial)
    return plan.outputs


def _quantize_nearest(x: Tensor, plan: Emission, rowwise: bool, colwise: bool, partial: Tensor | None) -> None:
    rows, cols = x.shape
    flags = dict(plan.flags)
    if not rowwise:
        flags.update(R_BR=0)
    if not colwise:
        flags.update(C_BR=0)
    if not colwise and flags["R_BR"] == 1:
        row = launch.quantize_row_config(cols)
        grid = (-(-launch_rows(rows, flags) // row.rows) * -(-cols // row.cols),)
        quantize_rows_kernel[grid](
            words(x), *plan.pointers[:2], rows, cols // 8, x.stride(0) // 8, DTYPE=DTYPES[x.dtype],
            BC=flags["R_BC"], E5=flags["R_E5"], FLOOR=flags["R_FLOOR"], SWIZZLED=flags["SWIZZLED"],
            ALIGNED=flags["R_ALIGNED"], R=row.rows, C=row.cols, num_warps=row.warps,
        )  # fmt: skip
        return
    if launch.stageable(x, flags):
        _quantize_staged(x, plan, flags, partial)
        return
    tile = launch.quantize_tile_config(flags["R_BR"] != 1)
    grid = (-(-rows // launch.TOKENS) * -(-cols // 128),)
    quantize_tile_kernel[grid](
        words(x), *plan.pointers, x if partial is None else partial, rows, cols // 8, x.stride(0) // 8, plan.stride_t,
        SUM=partial is not None, DTYPE=DTYPES[x.dtype], **flags, REPS=tile.reps(x.element_size()),
        num_warps=tile.warps, **tile.options,
    )  # fmt: skip


def _quantize_staged(x: Tensor, plan: Emission, flags: dict[str, Any], partial: Tensor | None) -> None:
    from ._quantize_staged import quantize_staged_kernel  # Gluon, which the interpreter does not have

    rows, cols = x.shape
    held = in_lines(plan) if flags["R_BR"] > 0 and flags["C_BR"] > 0 else plan
    flags = {**flags, "SWIZZLED": held.flags["SWIZZLED"]}
    tile = launch.quantize_staged_config(flags["R_BR"] != 1)
    grid = (-(-rows // launch.TOKENS) * -(-cols // 128),)
    quantize_staged_kernel[grid](
        words(x), plan.outputs[0].view(torch.int32), *held.pointers[1:], x if partial is None else partial,
        rows, cols // 8, x.stride(0) // 8, plan.stride_t, SUM=partial is not None,
        **flags, num_warps=tile.warps, **tile.options,
    )  # fmt: skip
    spread(held, plan)


def launch_rows(rows: int, flags: dict[str, bool]) -> int:
    """Rows a row-wise kernel must visit: with swizzled scales also the padding, to zero it."""
    return -(-rows // 128) * 128 if flags["SWIZZLED"] else rows


def _quantize_general(
    x: Tensor, spec: QuantSpec, plan: Emission, colwise: bool, seed: Tensor | None, stream: int
) -> None:
    stochastic = spec.rounding is Rounding.STOCHASTIC
    if stochastic and seed is None:
        raise ValueError("stochastic rounding: got no seed, expected an int64 scalar tensor")
    seed = torch.empty(0, dtype=torch.int64, device=x.device) if seed is None else seed.to(x.device, torch.int64)
    rows, cols = x.shape
    prefix = "C" if colwise else "R"
    qdata, scale = (plan.outputs[2], plan.pointers[3]) if colwise else (plan.outputs[0], plan.pointers[1])
    size = spec.hadamard or 0
    grid = (-(-rows // 128) * -(-cols // 128),)
    quantize_general_kernel[grid](
        x, qdata, scale, seed, stream, rows, cols // 8, x.stride(0) // 8, plan.stride_t,
        COLWISE=colwise, ACROSS=spec.tile[0], ALONG=spec.tile[1],
        E5=plan.flags[f"{prefix}_E5"], FLOOR=plan.flags[f"{prefix}_FLOOR"], STOCHASTIC=stochastic,
        HADAMARD=size, LOG2=max(0, size.bit_length() - 1), SWIZZLED=plan.flags["SWIZZLED"],
        ALIGNED=plan.flags[f"{prefix}_ALIGNED"], num_warps=8,
    )  # fmt: skip
