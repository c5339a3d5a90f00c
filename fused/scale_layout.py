"""The 128x4 tile layout in which Blackwell's tensor cores read E8M0 scales.

A (rows, cols) matrix of scale bytes is padded to multiples of (128, 4). Each 128x4 tile takes 512
consecutive bytes; inside it byte `(r, c)` sits at `(r % 32) * 16 + (r // 32) * 4 + c`. Tiles follow in
row-major order. Padding bytes are zero: a reader may multiply them.
Source: cuBLAS documentation, "1D block scaling factors layout" (also known as SWIZZLE_32_4_4).
"""

from __future__ import annotations

import torch
from torch import Tensor


def swizzled_numel(rows: int, cols: int) -> int:
    """Bytes the swizzled layout of a (rows, cols) scale matrix takes, padding included."""
    return -(-rows // 128) * 128 * (-(-cols // 4)) * 4


def swizzle_scale(scale: Tensor) -> Tensor:
    """Plain scales to the tensor-core layout.

    Args:
        scale: (rows, cols), one byte an element (uint8 or float8_e8m0fnu); cols = ceil(K / 32).

    Returns:
        (swizzled_numel(rows, cols),) of the same dtype, padding zeroed.
    """
    _check_bytes(scale)
    rows, cols = scale.shape
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    padded = torch.zeros(row_tiles * 128, col_tiles * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :cols] = scale.view(torch.uint8)
    tiles = padded.view(row_tiles, 4, 32, col_tiles, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


def unswizzle_scale(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `swizzle_scale`: (rows, cols) plain scales; padding bytes are never read into the result."""
    _check_bytes(swizzled)
    expected = swizzled_numel(rows, cols)
    if swizzled.numel() != expected:
        raise ValueError(f"swizzled scale: got {swizzled.numel()} bytes, expected {expected} for ({rows}, {cols})")
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    tiles = swizzled.view(torch.uint8).view(row_tiles, col_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 128, col_tiles * 4)[:rows, :cols].contiguous().view(swizzled.dtype)


def _check_bytes(scale: Tensor) -> None:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"scale: got dtype {scale.dtype}, expected uint8 or float8_e8m0fnu")
