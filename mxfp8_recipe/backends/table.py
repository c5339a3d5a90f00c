"""Which callable runs each op on each backend: explicit, and what `mxfp8 doctor` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..fused import reference, reference_ops
from ..fused.attention import reference as attention

BACKENDS = ("reference", "triton", "hopper", "blackwell")

_TABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("quantize", "reference"): reference_ops.quantize_both,
    ("norm_quantize", "reference"): reference_ops.norm_quantize,
    ("norm_backward", "reference"): reference_ops.norm_backward,
    ("activation_quantize", "reference"): reference_ops.activation_quantize,
    ("activation_backward", "reference"): reference_ops.activation_backward,
    ("quantize_heads", "reference"): attention.quantize_heads,
    ("attention_forward", "reference"): attention.attention_forward,
    ("attention_backward", "reference"): attention.attention_backward,
    ("gemm", "reference"): reference.gemm,
    ("matmul", "reference"): reference.matmul,
}
"""(op, backend) -> callable. An op a backend lacks is missing here, and `describe` says so."""


@dataclass(frozen=True)
class BackendStatus:
    """One line of `mxfp8 doctor`: what runs an op on a backend here, or why nothing does."""

    op: str
    backend: str
    status: str
    reason: str


def select(device: torch.device) -> str:
    """The backend that serves `device`."""
    return "reference"


def resolve(op: str, backend: str, device: torch.device) -> Callable[..., Any]:
    """The callable of `op` on `backend` (`"auto"`: the one `device` gets).

    Raises:
        ValueError: when the backend has no such op, naming the ones that do.
    """
    name = select(device) if backend == "auto" else backend
    found = _TABLE.get((op, name))
    if found is None:
        having = ", ".join(b for o, b in _TABLE if o == op) or "none"
        raise ValueError(f"backend {name!r} has no op {op!r}; backends that have it: {having}")
    return found


def ops() -> list[str]:
    """Names of the ops in the table."""
    return sorted({op for op, _ in _TABLE})


def describe(device: torch.device | str = "cpu") -> list[BackendStatus]:
    """What each op runs on for `device`: native or emulated, and why."""
    chosen = select(torch.device(device))
    reason = "plain torch; emulates MXFP8 by dequantizing to fp32" if chosen == "reference" else "native kernels"
    status = "emulated" if chosen == "reference" else "native"
    return [BackendStatus(op, chosen, status, reason) for op in ops()]
