"""What a traveling value survives: operations that keep its last dim and the order of its rows.

Each takes the value, of which it needs `nominal`, `shape` and `reshaped`, and the call's other arguments. It gives the
value after the call, or None where its elements are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _view(value: Any, *shape: Any, **named: Any) -> Any:
    shape = (*shape, *named.values())
    if any(isinstance(part, torch.dtype) for part in shape):
        return None
    viewed = value.nominal.reshape(*shape)
    return value.reshaped(viewed) if viewed.shape[-1:] == value.shape[-1:] else None


def _view_as(value: Any, other: Any) -> Any:
    return _view(value, *other.shape)


def _flatten(value: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    viewed = value.nominal.flatten(start_dim, end_dim)
    return value.reshaped(viewed) if viewed.shape[-1:] == value.shape[-1:] else None


def _squeezed(method: str) -> Callable[..., Any]:
    def apply(value: Any, *dims: Any, **kwargs: Any) -> Any:
        viewed = getattr(value.nominal, method)(*dims, **kwargs)
        return value.reshaped(viewed) if viewed.shape[-1:] == value.shape[-1:] else None

    return apply


def _slice(value: Any, index: Any) -> Any:
    """The whole of it, as `h[:, 0:, :]` is: code that may cut tokens off does so with any slice."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, slice) or i is Ellipsis for i in items):
        return None
    cut = value.nominal[index]
    return value.reshaped(cut) if cut.shape == value.shape else None


def _contiguous(value: Any, **kwargs: Any) -> Any:
    return value if kwargs in ({}, {"memory_format": torch.contiguous_format}) else None


def _to(value: Any, *args: Any, **kwargs: Any) -> Any:
    if any(argument is True for argument in (*args, kwargs.get("copy"))) or "memory_format" in kwargs:
        return None
    args = tuple(getattr(arg, "nominal", arg) for arg in args)
    moved = value.nominal.to(*args, **kwargs)
    return value if (moved.dtype, moved.device) == (value.dtype, value.device) else None


def _dropout(value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return value if not training or p == 0.0 else None


RESHAPES: dict[str, Callable[..., Any]] = {
    "view": _view,
    "reshape": _view,
    "view_as": _view_as,
    "flatten": _flatten,
    "squeeze": _squeezed("squeeze"),
    "unsqueeze": _squeezed("unsqueeze"),
    "contiguous": _contiguous,
    "__getitem__": _slice,
    "to": _to,
    "dropout": _dropout,
}
"""By the name of the torch function."""
