"""Operands as the tensor cores' loads want them: rows of unit stride that start on 16 bytes, of whole MX blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Element types and what `tl.dot_scaled` calls them."""


def prepare(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) and (N, K) float8 with K rounded up to a multiple of 32 by zeros; copies only if need be.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    if a.dtype not in FORMATS or b.dtype not in FORMATS:
        raise TypeError(f"gemm: got {a.dtype} and {b.dtype}, expected float8_e4m3fn or float8_e5m2")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"gemm: got operands {tuple(a.shape)} and {tuple(b.shape)}, expected (M, K) and (N, K)")
    missing = -a.shape[1] % 32
    if missing:
        a, b = (F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) for x in (a, b))
    return aligned_rows(a), aligned_rows(b)


def aligned_rows(x: Tensor) -> Tensor:
    """X itself if its rows have unit stride and start on 16 bytes, else a copy of which that holds.

    The rows of a matrix whose width in bytes is a multiple of 16 do.
    """
    size = x.element_size()
    if x.stride(1) == 1 and x.stride(0) * size % 16 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) >= x.shape[1]:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
