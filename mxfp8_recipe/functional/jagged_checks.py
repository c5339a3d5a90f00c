"""What jagged attention must be given: shapes, dtypes, devices and numbers, none of which waits for a GPU.

What the offsets hold is looked at by the ops (`backends.offsets`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fused.attention.bias import JaggedBias
from .common import DTYPES

OFFSETS = (torch.int32, torch.int64)


def check_operands(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise for q (Tq, H, D), k (Tk, G, D) and v (Tk, G, E) that do not fit each other."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    expected = "expected (Tq, H, D), (Tk, G, D) and (Tk, G, E)"
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"{op}: got q, k, v {shapes}, {expected}: tokens of all samples one after another")
    if q.shape[2] != k.shape[2] or k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"{op}: got q, k, v {shapes}, {expected}")
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"{op}: got {heads} heads of q and {groups} of k and v, expected a multiple of them")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in DTYPES:
        names = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        raise TypeError(f"{op}: got {names} for q, k and v, expected one of float32, bfloat16 and float16 for all")
    _check_devices(op, q, {"k": k, "v": v})


def check_offsets_form(op: str, q: Tensor, named: dict[str, tuple[Tensor, Any, Any]]) -> None:
    """Raise for offsets that are no (B + 1,) integers on the device of q, or declared lengths that are no ints.

    `named` has the offsets, the declared maximum length and the rows they divide.
    """
    for name, (offsets, longest, rows) in named.items():
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.shape[0] < 1:
            shape = tuple(offsets.shape) if isinstance(offsets, Tensor) else type(offsets).__name__
            raise ValueError(f"{op}: {name}: got {shape}, expected a tensor of shape (B + 1,) for B samples")
        if offsets.shape[0] == 1 and rows > 0:
            raise ValueError(f"{op}: {name}: got offsets of no sample, expected some that divide {rows} rows")
        if offsets.dtype not in OFFSETS:
            raise TypeError(f"{op}: {name}: got {offsets.dtype}, expected torch.int32 or torch.int64")
        if isinstance(longest, Tensor):
            raise TypeError(f"{op}: the maximum length of {name} is a tensor, expected an int (a tensor would wait)")
        if longest < 0:
            raise ValueError(f"{op}: the maximum length of {name}: got {longest}, expected 0 or more")
    _check_devices(op, q, {name: offsets for name, (offsets, _, _) in named.items()})
    if len(named) > 1:
        counts = {name: offsets.shape[0] - 1 for name, (offsets, _, _) in named.items()}
        first, *others = counts.values()
        if any(count != first for count in others):
            raise ValueError(f"{op}: got samples {counts}, expected as many in each")


def check_mask(op: str, window: Any) -> None:
    """Raise for a window that is no number of positions."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise ValueError(f"{op}: window: got {window!r}, expected None or positions a query looks to each side, >= 0")


def check_bias(op: str, bias: JaggedBias | None, q: Tensor, k: Tensor, rows: Any) -> None:
    """Raise for tables or times that do not fit (rows of output, H heads)."""
    if bias is None:
        return
    if not isinstance(bias, JaggedBias):
        raise TypeError(f"{op}: bias: got {type(bias).__name__}, expected a JaggedBias or None")
    for name, table in (("position", bias.position), ("time", bias.time)):
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] < 1 or table.shape[1] != q.shape[1]:
            raise ValueError(f"{op}: bias.{name}: got {tuple(table.shape)}, expected (buckets, {q.shape[1]}) per head")
        if table.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{op}: bias.{name}: got {table.dtype}, expected torch.float32 or {q.dtype}")
    tensors = {name: getattr(bias, name) for name in ("position", "time", "q_times", "k_times", "time_bounds")}
    _check_devices(op, q, {f"bias.{name}": x for name, x in tensors.items() if x is not None})
    if bias.time is None:
        return
    sizes = {"q_times": rows, "k_times": k.shape[0], "time_bounds": bias.time.shape[0] - 1}
    for name, size in sizes.items():
        x = getattr(bias, name)
        if x is None or x.dim() != 1 or x.shape[0] != size:
            got = None if x is None else tuple(x.shape)
            raise ValueError(f"{op}: bias.{name}: got {got}, expected ({size},)")
        if x.dtype is not torch.int64:
            raise TypeError(f"{op}: bias.{name}: got {x.dtype}, expected torch.int64")


def _check_devices(op: str, q: Tensor, named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        if x.device != q.device:
            raise ValueError(f"{op}: {name}: got {x.device}, expected {q.device}, where q is")
