"""The steps after a GEMM as kernels of their own: what a launcher does where its kernel has no such epilogue.

`finish` computes what `epilogue.finish` defines, with the memory-bound kernels, whose bits an epilogue repeats.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..activation_quantize import activation_quantize
from ..quantize import quantize_both
from ..reference_ops import check_same, empty
from .epilogue import Epilogue, Outputs, Rotation, rotate


def finish(
    z: Tensor,
    residual: Tensor | None,
    *,
    gate: Tensor | None,
    epilogue: Epilogue,
    rotation: Rotation | None,
    swizzled: bool,
    pad_tokens: int,
) -> Outputs:
    """`epilogue.finish` by kernels: an activation and the quantization after it take one pass, a residual another."""
    y, quantized, specs = z, None, (epilogue.rowwise, epilogue.colwise)
    layout: dict[str, Any] = {"swizzled": swizzled, "pad_tokens": pad_tokens}
    if epilogue.activation is not None:
        last = residual is None
        y, *quantized = activation_quantize(
            z, gate, epilogue.activation, z.dtype, *(specs if last else (None, None)),
            epilogue.emit_high or not last, **layout,
        )  # fmt: skip
    if epilogue.rope is not None and rotation is not None:
        y = rotate(z, epilogue.rope, rotation)
    if residual is not None:
        check_same("epilogue", "residual", residual, z)
        y, quantized = (y.float() + residual.float()).to(z.dtype), None
    if quantized is None:
        quantized = quantize_both(y, *specs, **layout)
    nothing = empty(z, z.dtype)
    return Outputs(
        y if epilogue.emit_high else nothing,
        z if epilogue.emit_sum else nothing,
        gate if epilogue.emit_sum and gate is not None else nothing,
        *quantized,
    )
