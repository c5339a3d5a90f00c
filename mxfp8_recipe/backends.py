"""Which callable runs each op on each backend, and the torch custom ops in front of them.

The table is explicit: an op and a backend name a callable from `fused`, or the reason there is none. The
custom ops make the choice visible to `torch.compile` as one opaque node each, so eager and compiled code
run the same bits. `qdata` and `scale` cross them as uint8 storage: mixed-precision wrappers cast float
tensors, and FP8 ones with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .fused import reference, reference_ops
from .fused.spec import BLOCK, QuantSpec

BACKENDS = ("reference", "triton", "hopper", "blackwell")

_TABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("quantize", "reference"): reference_ops.quantize_both,
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


_library = torch.library.Library("mxfp8_recipe", "DEF")
_library.define(
    "quantize(Tensor x, str rowwise, str colwise, Tensor? seed, int stream, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "gemm(Tensor a, Tensor a_scale, str a_elem, Tensor b, Tensor b_scale, str b_elem, Tensor? bias,"
    " ScalarType out_dtype, str backend) -> Tensor"
)
_library.define("matmul(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor")


def _spec(text: str) -> QuantSpec | None:
    return QuantSpec.decode(text) if text else None


@lru_cache(maxsize=8)
def _elem_dtype(elem: str) -> torch.dtype:
    return torch.float8_e4m3fn if elem == "e4m3" else torch.float8_e5m2


def _quantize(x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str):
    return resolve("quantize", backend, x.device)(x, _spec(rowwise), _spec(colwise), seed=seed, stream=stream)


def _gemm(a, a_scale, a_elem, b, b_scale, b_elem, bias, out_dtype, backend):
    run = resolve("gemm", backend, a.device)
    a, b = a.view(_elem_dtype(a_elem)), b.view(_elem_dtype(b_elem))
    return run(a, a_scale, b, b_scale, bias, out_dtype=out_dtype)


def _matmul(a, b, bias, out_dtype, backend):
    return resolve("matmul", backend, a.device)(a, b, bias, out_dtype=out_dtype)


def _quantize_fake(x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str):
    rows, cols = x.shape

    def orientation(wanted: str, outer: Any, along: Any) -> tuple[Tensor, Tensor]:
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8)
        blocks = (along + BLOCK - 1) // BLOCK
        return x.new_empty(outer, along, dtype=torch.uint8), x.new_empty(outer, blocks, dtype=torch.uint8)

    return (*orientation(rowwise, rows, cols), *orientation(colwise, cols, rows))


def _gemm_fake(a, a_scale, a_elem, b, b_scale, b_elem, bias, out_dtype, backend):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _matmul_fake(a, b, bias, out_dtype, backend):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


for _name, _kernel, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("gemm", _gemm, _gemm_fake),
    ("matmul", _matmul, _matmul_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxfp8_recipe::{_name}", _fake, lib=_library)

_namespace = torch.ops.mxfp8_recipe
quantize = _namespace.quantize.default
gemm = _namespace.gemm.default
matmul = _namespace.matmul.default


@register_flop_formula(_namespace.gemm)
def _gemm_flops(a_shape, a_scale, a_elem, b_shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]


@register_flop_formula(_namespace.matmul)
def _matmul_flops(a_shape, b_shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]
