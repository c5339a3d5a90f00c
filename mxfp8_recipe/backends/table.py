"""Which callable runs each op on each backend: explicit, and what `mxfp8 doctor` prints.

A backend is the set of callables for one kind of device: `reference` is plain torch and runs anywhere, `hopper`
is for compute capability 9, `blackwell` for 10 and up, `triton` holds the kernels that run wherever Triton does.
A device gets one backend, whole; an op it lacks is missing from the table and said so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ..fused import reference, reference_ops
from ..fused.attention import reference as attention

BACKENDS = ("reference", "triton", "hopper", "blackwell")
CORE_OPS = (
    "quantize", "quantize_and_sum", "norm_quantize", "norm_backward", "activation_quantize", "activation_backward",
    "gemm", "matmul",
)  # fmt: skip
"""Ops a device's own backend must have before it is selected."""


@dataclass(frozen=True)
class Kernel:
    """A callable in a module that needs triton, imported when it is first used."""

    module: str
    name: str

    def load(self) -> Callable[..., Any]:
        return getattr(import_module(f"{__name__.split('.')[0]}.fused.{self.module}"), self.name)


_MEMORY_BOUND: dict[str, Kernel] = {
    "quantize": Kernel("quantize", "quantize_both"),
    "quantize_and_sum": Kernel("quantize", "quantize_and_sum"),
    "norm_quantize": Kernel("norm_quantize", "norm_quantize"),
    "norm_backward": Kernel("norm_backward", "norm_backward"),
    "activation_quantize": Kernel("activation_quantize", "activation_quantize"),
    "activation_backward": Kernel("activation_quantize", "activation_backward"),
}

_TABLE: dict[tuple[str, str], Callable[..., Any] | Kernel] = {
    ("quantize", "reference"): reference_ops.quantize_both,
    ("quantize_and_sum", "reference"): reference_ops.quantize_and_sum,
    ("norm_quantize", "reference"): reference_ops.norm_quantize,
    ("norm_backward", "reference"): reference_ops.norm_backward,
    ("activation_quantize", "reference"): reference_ops.activation_quantize,
    ("activation_backward", "reference"): reference_ops.activation_backward,
    ("quantize_heads", "reference"): attention.quantize_heads,
    ("quantize_merged", "reference"): attention.quantize_merged,
    ("gemm_heads", "reference"): attention.gemm_heads,
    ("attention_forward", "reference"): attention.attention_forward,
    ("attention_backward", "reference"): attention.attention_backward,
    ("gemm", "reference"): reference.gemm,
    ("matmul", "reference"): reference.matmul,
    ("matmul", "triton"): reference.matmul_native,
    ("matmul", "hopper"): reference.matmul_native,
    ("gemm", "hopper"): Kernel("gemm.hopper", "gemm"),
    **{(op, backend): kernel for op, kernel in _MEMORY_BOUND.items() for backend in ("triton", "hopper")},
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
    """The backend that serves `device`: its own if every core op is there, else `reference`."""
    return _native(device)[0] or "reference"


@lru_cache(maxsize=64)
def _native(device: torch.device) -> tuple[str, str]:
    """The backend made for a device, or `""`, and why not. Asked by every op, so remembered."""
    if device.type != "cuda":
        return "", f"{device.type} has no MXFP8 kernels"
    if find_spec("triton") is None:
        return "", "triton is not installed; pip install triton"
    major, minor = torch.cuda.get_device_capability(device)
    name = "hopper" if major == 9 else "blackwell" if major >= 10 else "triton"
    missing = [op for op in CORE_OPS if (op, name) not in _TABLE]
    if missing:
        return "", f"backend {name} (compute capability {major}.{minor}) has no {', '.join(missing)} yet"
    return name, ""


def has(op: str, backend: str) -> bool:
    """Whether a backend has an op."""
    return (op, backend) in _TABLE


@lru_cache(maxsize=1024)
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
    return found.load() if isinstance(found, Kernel) else found


def ops() -> list[str]:
    """Names of the ops in the table."""
    return sorted({op for op, _ in _TABLE})


def describe(device: torch.device | str = "cpu") -> list[BackendStatus]:
    """What each op runs on for `device`: native, emulated or missing, and why."""
    device = torch.device(device)
    name, reason = _native(device)
    if not name:
        reason = f"plain torch, emulates MXFP8 by dequantizing to fp32: {reason}"
        return [BackendStatus(op, "reference", "emulated", reason) for op in ops() if has(op, "reference")]
    rows = []
    for op in ops():
        found = has(op, name)
        why = "" if found else f"no {name} kernel; layers that need it stay BF16"
        rows.append(BackendStatus(op, name, "native" if found else "missing", why))
    return rows
