"""Where the self-test's checks run, what they measure with, and random operands for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import backends
from .backends.table import layout
from .fused import reference_ops
from .fused.spec import QuantSpec

INTERPRETER = "interpreter"
"""Stands for the `triton` backend on the CPU, in Triton's interpreter."""

SPECS = {"1x32": QuantSpec(), "1x128": QuantSpec(tile=(1, 128)), "32x32": QuantSpec(tile=(32, 32))}
ACTIVATIONS = (*reference_ops.PLAIN_KINDS, *reference_ops.GATED_KINDS)


@dataclass(frozen=True)
class Place:
    """Where checks run: a device and the backend under test there."""

    backend: str
    device: str

    @property
    def small(self) -> bool:
        """Nothing here is fast."""
        return self.device == "cpu"

    def op(self, name: str) -> Callable[..., Any]:
        """The op of the backend, laid out as its GEMM reads it."""
        backend = "triton" if self.backend == INTERPRETER else self.backend
        return backends.resolve(name, backend, torch.device(self.device))

    @property
    def layout(self) -> dict[str, Any]:
        """Keyword arguments that make the reference lay its outputs out alike."""
        backend = "triton" if self.backend == INTERPRETER else self.backend
        laid = layout(backend, torch.device(self.device))
        return {"swizzled": laid.swizzled, "pad_tokens": laid.room}


Measures = Iterator[tuple[str, float, float]]
"""`(unit, error, bound)`."""


def randn(place: Place, rows: int, cols: int) -> Tensor:
    """BF16 values whose rows differ by up to 2**12 in size."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-6, 7, (rows, 1)).float())
    return x.to(place.device, torch.bfloat16)


def differing(expected: tuple[Tensor, ...], actual: tuple[Tensor, ...]) -> float:
    """Bytes of two `(qdata, scale, qdata_t, scale_t)` that differ; a wrong shape counts whole."""
    return float(
        sum(
            max(e.numel(), 1) if e.shape != a.shape else int((e != a.view(e.dtype)).sum())
            for e, a in zip(expected, actual)
        )
    )


def units(actual: Tensor, expected: Tensor, smallest: float) -> float:
    """Largest difference in units in the last place of `actual`'s dtype, or in `smallest` where that is more."""
    exact = expected.double()
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-30)))) * torch.finfo(actual.dtype).eps
    return float(((actual.double() - exact).abs() / unit.clamp(min=smallest)).max())


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))
