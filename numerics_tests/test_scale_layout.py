"""The 128x4 scale layout against the formula for each byte, and what readers and writers owe the padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp8_recipe.fused.reference import dequantize, quantize
from mxfp8_recipe.fused.scale_layout import swizzle_scale, swizzled_numel, unswizzle_scale


def offset(row: int, col: int, cols: int) -> int:
    """Where scale (row, col) lies: the tile, then 32 rows interleaved by four, then the column."""
    tiles_across = (cols + 3) // 4
    tile = (row // 128) * tiles_across + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 13), st.integers(0, 2**31))
def test_every_byte_is_where_the_formula_says(rows: int, cols: int, seed: int) -> None:
    scale = torch.randint(1, 256, (rows, cols), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    swizzled = swizzle_scale(scale)
    expected = [0] * (((rows + 127) // 128 * 128) * ((cols + 3) // 4 * 4))
    for row in range(rows):
        for col in range(cols):
            expected[offset(row, col, cols)] = int(scale[row, col])
    assert swizzled.tolist() == expected
    assert swizzled_numel(rows, cols) == len(expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 13))
def test_a_reader_never_sees_the_padding(rows: int, cols: int) -> None:
    """Padding poisoned with NaN bytes reads back the same scales."""
    scale = torch.randint(0, 255, (rows, cols), dtype=torch.uint8)
    poisoned = torch.full((swizzled_numel(rows, cols),), 0xFF, dtype=torch.uint8)
    for row in range(rows):
        for col in range(cols):
            poisoned[offset(row, col, cols)] = scale[row, col]
    assert torch.equal(unswizzle_scale(poisoned, rows, cols), scale)


@pytest.mark.parametrize("shape", [(2880, 1376), (5, 16), (33, 100)], ids=str)
def test_round_trip_of_quantized_scales(shape: tuple[int, int]) -> None:
    """Widths whose scale columns are no multiple of four, and row counts no multiple of 128."""
    qdata, scale = quantize(torch.randn(shape))
    swizzled = swizzle_scale(scale)
    assert swizzled.dtype == torch.float8_e8m0fnu
    padding = swizzled.numel() - scale.numel()
    assert padding > 0
    assert int((swizzled.view(torch.uint8) == 0).sum()) >= padding
    back = unswizzle_scale(swizzled, *scale.shape)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))
    assert dequantize(qdata, back).isfinite().all()


def test_empty_and_strided_scales() -> None:
    assert swizzle_scale(torch.zeros(0, 3, dtype=torch.uint8)).numel() == 0
    scale = torch.randint(0, 255, (7, 140), dtype=torch.uint8)
    assert torch.equal(swizzle_scale(scale.T), swizzle_scale(scale.T.contiguous()))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype torch\.float32, expected uint8"):
        swizzle_scale(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"got 512 bytes, expected 1024 for \(129, 4\)"):
        unswizzle_scale(torch.zeros(512, dtype=torch.uint8), 129, 4)
