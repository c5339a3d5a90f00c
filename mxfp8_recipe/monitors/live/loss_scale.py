"""A `GradScaler` and its overflows: gradients it made too large are its way to find the scale, and no layer's failure.

It multiplies the loss by S so that small gradients do not vanish in fp16, skips the step where something overflows, and
halves S. While S is at least 1 the product may overflow where the gradient does not; below, the gradient itself
overflows, or is NaN. Values of the forward are not scaled: NaN or Inf there is a failure whatever S is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mxfp8_recipe.monitors.live.records import GRADIENTS, LayerStatistics

HALF = (
    "fp16 gradients hold NaN or Inf; where a GradScaler scales the loss that happens in health too: give the monitor "
    "scaler=..., which tells the two apart. Until then two reports in a row count"
)
_BACKWARD = ("dgrad", "wgrad")


def scale_of(scaler: Any) -> float | None:
    """The scale now, read from the device; None without a scaler, or with one that is switched off.

    Raises:
        TypeError: for something else.
    """
    if scaler is None:
        return None
    if not callable(getattr(scaler, "get_scale", None)) or not callable(getattr(scaler, "is_enabled", None)):
        raise TypeError(f"scaler: got {type(scaler).__name__}, expected a torch.amp.GradScaler")
    return float(scaler.get_scale()) if scaler.is_enabled() else None


def gradient_overflow(layers: Iterable[LayerStatistics]) -> str:
    """The last layer, thus the first of backward, whose gradients hold NaN or Inf; `""` where the forward's do too."""
    found = ""
    for layer in layers:
        for name, tensor in layer.tensors.items():
            if tensor.nonfinite_blocks and name not in GRADIENTS:
                return ""
            found = layer.layer or "(root)" if tensor.nonfinite_blocks else found
    return found


def forward_only(layers: Iterable[LayerStatistics]) -> tuple[LayerStatistics, ...]:
    """`layers` without what backward gave them."""
    return tuple(
        layer.model_copy(
            update={
                "tensors": {name: t for name, t in layer.tensors.items() if name not in GRADIENTS},
                "gemm_sqnr_db": {gemm: v for gemm, v in layer.gemm_sqnr_db.items() if gemm not in _BACKWARD},
            }
        )
        for layer in layers
    )
