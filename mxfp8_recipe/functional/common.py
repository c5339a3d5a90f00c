"""What every op shares: the compute dtype, seeds, and calling an autograd Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mx_tensor import Traveling

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, whose annotations say nothing of what it returns.

    Outside of compiled code and of `torch.func` it is the one in C, which the one in Python calls after it has looked
    for either.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "privateuseone")
    if torch.amp.is_autocast_available(kind)
)  # fmt: skip
"""Device types that have autocast; asked once, since torch 2.11 cannot trace the question."""


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, at no cost where nothing changes."""
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor | Traveling, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype a matrix multiplication of `x` would run in here: autocast's if it is on, else that of `x`."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return dtype or x.dtype
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocast_on(kind) else dtype or x.dtype


def layer_name(owner: Any, part: str, otherwise: str) -> str:
    """The FQN of a swapped module, or of a part of it, for an error; `otherwise` where it has none."""
    name = "" if owner is None else owner.__dict__.get("mxfp8_name", "")
    return ".".join(filter(None, (name, part))) or otherwise


def autocast_on(kind: str) -> bool:
    """Whether autocast is on for a device type."""
    return kind in _AUTOCAST and torch.is_autocast_enabled(kind)


def draw_seed(device: torch.device) -> Tensor:
    """A seed for stochastic rounding from torch's generator of `device`: int64 scalar.

    Activation checkpointing restores that generator before it recomputes, CUDA graphs register it, and
    a checkpoint that stores its state resumes to the bit, as for dropout.
    """
    return torch.randint(2**62, (), dtype=torch.int64, device=device)
