"""What a GEMM may do to its sum before storing it, and the definition of the result in plain torch.

    z = round(a @ b.T + bias)         the projection's output
    y = round(act(z))                 with an activation
    y = round(y + residual)           with a residual
    qdata, scale = quantize(y)        row-wise, blocks of 32 features

Every step rounds to `out_dtype`, as separate kernels that store their result would: fused equals unfused, bitwise.
A kernel with an epilogue moves `itemsize` bytes an element less for each value that only the next step reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import gemm
from ..reference_ops import PLAIN_KINDS, activation_quantize, check_kind, check_same, empty, quantize_both
from ..spec import QuantSpec


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The steps after a GEMM.

    Attributes:
        activation: one of `reference_ops.PLAIN_KINDS`, or None.
        rowwise: spec of the MXFP8 output, nearest rounding without a rotation, tiles of one row; None for none.
        emit_high: return y. emit_sum: return z, which the backward of an activation reads.
    """

    activation: str | None = None
    rowwise: QuantSpec | None = None
    emit_high: bool = True
    emit_sum: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None:
            check_kind("epilogue", self.activation, PLAIN_KINDS)
        spec = self.rowwise
        if spec is not None and (spec.tile[0] > 1 or spec.hadamard or spec.rounding.value != "nearest"):
            raise ValueError(
                f"epilogue: got rowwise {spec.short!r}, expected a tile of one row rounded to nearest without a "
                "rotation; store the output and quantize it"
            )


Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""`(y, z, qdata, scale)`: (M, N) of `out_dtype`, the same, (M, N) uint8 and its E8M0 bytes; (0,) if not asked for."""


def gemm_epilogue(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epilogue: Epilogue,
    out_dtype: torch.dtype = torch.bfloat16,
    swizzled: bool = False,
) -> Outputs:
    """The definition, on any device.

    Args:
        a: (M, K) float8, a_scale (M, ceil(K / 32)).  b: (N, K) float8, b_scale (N, ceil(K / 32)).
        bias: (N,) or None, added in fp32. residual: (M, N) of `out_dtype` or None.
        swizzled: give the output's scales in the 128x4 layout of `scale_layout`.
    """
    z = gemm(a, a_scale, b, b_scale, bias, out_dtype=out_dtype)
    return finish(z, residual, epilogue=epilogue, swizzled=swizzled)


def finish(z: Tensor, residual: Tensor | None = None, *, epilogue: Epilogue, swizzled: bool = False) -> Outputs:
    """The steps after z, each on its own."""
    y = z
    if epilogue.activation is not None:
        y = activation_quantize(z, None, epilogue.activation, z.dtype, None, None, True)[0]
    if residual is not None:
        check_same("epilogue", "residual", residual, z)
        y = (y.float() + residual.float()).to(z.dtype)
    qdata, scale = quantize_both(y, epilogue.rowwise, None, swizzled=swizzled)[:2]
    return (
        y if epilogue.emit_high else empty(z, z.dtype),
        z if epilogue.emit_sum else empty(z, z.dtype),
        qdata,
        scale,
    )
