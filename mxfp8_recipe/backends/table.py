"""Which callable runs each op on each backend: explicit, and what `mxfp8 doctor` prints.

A backend is the set of callables for one kind of device: `reference` is plain torch and runs anywhere, `hopper`
is for compute capability 9, `blackwell` for 10, `triton` for every newer GPU.
A device gets one backend, whole; an op it lacks is missing from the table and said so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from ..fused import reference, reference_ops
from ..fused.attention import jagged_quantize, jagged_reference
from ..fused.attention import reference as attention
from ..fused.gemm import dact, epilogue

BACKENDS = ("reference", "triton", "hopper", "blackwell")
CORE_OPS = (
    "quantize", "quantize_and_sum", "norm_quantize", "norm_backward", "activation_quantize", "activation_backward",
    "gemm", "matmul",
)  # fmt: skip
"""Ops a device's own backend must have before it is selected."""
EPILOGUE_OPS = ("gemm_epilogue", "gemm_dact")
"""Ops that a backend may lack, since kernels of their own do the same steps with the same bits."""


@dataclass(frozen=True)
class Kernel:
    """A callable in a module that needs triton, imported when it is first used."""

    module: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def load(self) -> Callable[..., Any]:
        found = getattr(import_module(f"{__name__.split('.')[0]}.fused.{self.module}"), self.name)
        return partial(found, **dict(self.options)) if self.options else found


@dataclass(frozen=True)
class Layout:
    """How a backend's quantizing ops lay out what its GEMM reads.

    Attributes:
        swizzled: scales come 1-D in the 128x4 layout of `fused.scale_layout`, padding zeroed.
        pad_tokens: tokens of `qdata_t` and `scale_t` are rounded up to a multiple of this, zero past the last.
        row_bytes: rows of `qdata_t` start on multiples of this; only its strides show it.
    """

    swizzled: bool = False
    pad_tokens: int = 1
    row_bytes: int = 1

    @property
    def has_plain_shapes(self) -> bool:
        """Whether every output has the shape it has on the reference backend."""
        return not self.swizzled and self.pad_tokens == 1

    @property
    def room(self) -> int:
        """Tokens of `qdata_t` that there is room for, as a multiple."""
        return max(self.pad_tokens, self.row_bytes)


PLAIN = Layout()
LAYOUTS = {
    "blackwell": Layout(swizzled=True, pad_tokens=32),
    "hopper": Layout(row_bytes=16),  # TMA reads rows that start on 16 bytes, and stores of 16 are the fast ones
    "triton": Layout(row_bytes=16),
}
"""Where it is not `PLAIN`, for the ops of `_MEMORY_BOUND`."""


_MEMORY_BOUND: dict[str, Kernel] = {
    "quantize": Kernel("quantize", "quantize_both"),
    "quantize_and_sum": Kernel("quantize", "quantize_and_sum"),
    "norm_quantize": Kernel("norm_quantize", "norm_quantize"),
    "norm_backward": Kernel("norm_backward", "norm_backward"),
    "activation_quantize": Kernel("activation_quantize", "activation_quantize"),
    "activation_backward": Kernel("activation_quantize", "activation_backward"),
}

JAGGED_OPS = (
    "jagged_forward", "jagged_backward", "generalized_forward", "generalized_backward", "block_forward",
    "block_backward",
)  # fmt: skip
"""Attention on jagged batches; `<op>_mxfp8` is the same op with GEMMs in MXFP8."""

_JAGGED: dict[str, Kernel] = {
    "jagged_schedule": Kernel("attention.schedule", "build"),
    "jagged_forward": Kernel("attention.jagged", "forward"),
    "jagged_backward": Kernel("attention.jagged", "backward"),
    "generalized_forward": Kernel("attention.gdpa", "forward"),
    "generalized_backward": Kernel("attention.gdpa_backward", "backward"),
    "block_forward": Kernel("attention.block", "forward"),
    "block_backward": Kernel("attention.block", "backward"),
}


def _laid(kernel: Kernel, backend: str) -> Kernel:
    """A kernel that lays out what it quantizes as the backend's GEMM reads it."""
    laid = LAYOUTS[backend]
    return replace(kernel, options=(("swizzled", laid.swizzled), ("pad_tokens", laid.room)))


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
    ("quantize_jagged", "reference"): jagged_quantize.quantize_jagged,
    **{(f"{op}{kind}", "reference"): getattr(jagged_reference, op) for op in JAGGED_OPS for kind in ("", "_mxfp8")},
    ("gemm", "reference"): reference.gemm,
    ("gemm_epilogue", "reference"): epilogue.gemm_epilogue,
    ("gemm_dact", "reference"): dact.gemm_dact,
    ("matmul", "reference"): reference.matmul,
    ("matmul", "triton"): reference.matmul_native,
    ("matmul", "hopper"): reference.matmul_native,
    ("matmul", "blackwell"): reference.matmul_native,
    ("gemm", "hopper"): Kernel("gemm.hopper", "gemm"),
    ("gemm_epilogue", "hopper"): Kernel("gemm.hopper_epilogue", "gemm_epilogue"),
    ("gemm_dact", "hopper"): _laid(Kernel("gemm.hopper_dact", "gemm_dact"), "hopper"),
    ("gemm", "blackwell"): Kernel("gemm.blackwell", "gemm"),
    ("gemm_epilogue", "blackwell"): _laid(Kernel("gemm.blackwell", "gemm_epilogue"), "blackwell"),
    ("gemm", "triton"): Kernel("gemm.portable", "gemm"),
    ("gemm_epilogue", "triton"): Kernel("gemm.blackwell", "gemm_epilogue"),
    **{(op, backend): kernel for op, kernel in _JAGGED.items() for backend in ("triton", "hopper", "blackwell")},
    **{(op, backend): _laid(kernel, backend) for op, kernel in _MEMORY_BOUND.items() for backend in LAYOUTS},
}
"""(op, backend) -> callable. An op a backend lacks is missing here, and `describe` says so."""


@dataclass(frozen=True)
class BackendStatus:
    """One line of `mxfp8 doctor`: what runs an op on a backend here, or why nothing does."""

    op: str
    backend: str
    status: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The backend a device gets.

    Attributes:
        backend: its name. why: what made it that one, and how its GEMM multiplies.
        remedy: what to install for a better one; empty when there is none.
        emulates: its GEMM multiplies the operands' values in a wider type.
    """

    backend: str
    why: str
    remedy: str = ""
    emulates: bool = False

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


def select(device: torch.device) -> str:
    """The backend that serves `device`: its own if every core op is there, else `reference`."""
    return choose(device).backend


@lru_cache(maxsize=64)
def choose(device: torch.device) -> Choice:
    """The backend that serves `device`, and why. Asked by every op, so remembered."""
    emulation = "plain torch, emulates MXFP8 by dequantizing to fp32"
    if device.type != "cuda":
        return Choice("reference", f"{emulation}: {device.type} has no MXFP8 kernels", emulates=True)
    if find_spec("triton") is None:
        return Choice("reference", f"{emulation}: triton is not installed", "pip install triton", True)
    found = _for_capability(*torch.cuda.get_device_capability(device))
    missing = [op for op in CORE_OPS if found.backend != "reference" and (op, found.backend) not in _TABLE]
    if missing:
        return Choice("reference", f"{emulation}: backend {found.backend} has no {', '.join(missing)}", emulates=True)
    return found


def _for_capability(major: int, minor: int) -> Choice:
    device = f"compute capability {major}.{minor}"
    if major < 9:
        why = f"plain torch, emulates MXFP8 by dequantizing to fp32: {device}, and the kernels need 9.0"
        return Choice("reference", why, emulates=True)
    if major == 9:
        return Choice("hopper", f"{device}: FP8 wgmma, whose partial sums are scaled in fp32")
    if major == 10:
        problem = _cublas_problem()
        if not problem:
            return Choice("blackwell", f"{device}: cuBLAS multiplies MXFP8 blocks; compiled for it, never run on one")
        return Choice("triton", f"{device}: tl.dot_scaled multiplies MXFP8 blocks, since {problem[0]}", problem[1])
    if major == 11 and tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 9):
        why = f"plain torch, emulates MXFP8 by dequantizing to fp32: triton {version('triton')} does not know {device}"
        return Choice("reference", why, "pip install -U 'triton>=3.9'", True)
    return Choice("triton", f"{device}: tl.dot_scaled multiplies MXFP8 blocks; compiled for it, never run on one")


def _cublas_problem() -> tuple[str, str] | None:
    """Why torch cannot have cuBLAS multiply MXFP8 blocks, and the remedy; None when it can."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm", "pip install 'torch>=2.11'"
    cuda = torch.version.cuda or "0.0"
    if tuple(int(part) for part in cuda.split(".")[:2]) < (12, 8):
        return f"cuBLAS {cuda} cannot, 12.8 can", "install a torch built for CUDA 12.8 or newer"
    return None


@lru_cache(maxsize=256)
def layout(backend: str, device: torch.device) -> Layout:
    """How the quantizing ops of `backend` (`"auto"`: the one `device` gets) lay out their outputs."""
    return LAYOUTS.get(select(device) if backend == "auto" else backend, PLAIN)


def plain(device: torch.device) -> str:
    """A backend for `device` whose scales are (rows, blocks), for a reader that is no GEMM: same bytes."""
    return "auto" if layout("auto", device).has_plain_shapes else "triton"


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
    choice = choose(torch.device(device))
    rows = []
    for op in ops():
        found, emulated = has(op, choice.backend), choice.backend == "reference" or (choice.emulates and op == "gemm")
        if not found and choice.backend == "reference":
            continue
        why = str(choice) if emulated or op == "gemm" else ""
        if not found:
            apart = "the steps after a GEMM are kernels of their own"
            why = f"no {choice.backend} kernel; {apart if op in EPILOGUE_OPS else 'layers that need it stay BF16'}"
        status = "missing" if not found else "emulated" if emulated else "native"
        rows.append(BackendStatus(op, choice.backend, status, why))
    return rows
