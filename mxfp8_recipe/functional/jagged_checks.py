"""What jagged attention must be given: kinds, shapes, dtypes, devices and numbers, none of which waits for a GPU.

What the offsets hold is looked at by the ops (`backends.offsets`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import AttentionConfig
from ..fused.attention.activations import ACTIVATIONS
from ..fused.attention.bias import JaggedBias
from ..fused.spec import near_misses
from ..mx_tensor import Traveling
from .common import DTYPES, autocast_on

OFFSETS = (torch.int32, torch.int64)
TABLES = ("position", "time")


def check_config(op: str, config: Any) -> str:
    """The name for messages: that of the layer where a config has one. Raise for what is no config."""
    if config is None:
        return op
    if not isinstance(config, AttentionConfig):
        got = type(config).__name__
        raise TypeError(f"{op}: config: got {got}, expected AttentionConfig.of(AttentionPrecision(...)) or None")
    return config.layer or op


def check_tensors(op: str, **named: Any) -> None:
    """Raise for an argument that is no tensor."""
    for name, x in named.items():
        if not isinstance(x, Tensor | Traveling):
            raise TypeError(f"{op}: {name}: got {type(x).__name__}, expected a tensor")


def check_operands(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise for q (Tq, H, D), k (Tk, G, D) and v (Tk, G, E) that do not fit each other."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    expected = "expected (Tq, H, D), (Tk, G, D) and (Tk, G, E)"
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"{op}: got q, k, v {shapes}, {expected}: tokens of all samples one after another")
    if q.shape[2] != k.shape[2] or k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"{op}: got q, k, v {shapes}, {expected}")
    if q.shape[2] == 0 or v.shape[2] == 0:
        raise ValueError(f"{op}: got q, k, v {shapes}, {expected} with heads of 1 or more features")
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
        check_length(op, f"the maximum length of {name}", longest)
    _check_devices(op, q, {name: offsets for name, (offsets, _, _) in named.items()})
    if len(named) > 1:
        counts = {name: offsets.shape[0] - 1 for name, (offsets, _, _) in named.items()}
        first, *others = counts.values()
        if any(count != first for count in others):
            raise ValueError(f"{op}: got samples {counts}, expected as many in each")


def check_length(op: str, name: str, longest: Any) -> None:
    """Raise for a declared length that is no int, or less than 0."""
    if isinstance(longest, Tensor):
        raise TypeError(f"{op}: {name} is a tensor, expected an int (a tensor would wait)")
    if isinstance(longest, bool) or not _is_a(longest, int, "__index__"):
        raise TypeError(f"{op}: {name}: got {longest!r}, expected an int")
    if longest < 0:
        raise ValueError(f"{op}: {name}: got {longest}, expected 0 or more")


def check_copies(op: str, copies: Any, named: dict[str, Tensor | None]) -> None:
    """Raise for `cpu_offsets` that are no copies on the CPU of the offsets they stand for."""
    given = copies if isinstance(copies, tuple | list) else (copies,)
    if len(given) != len(named):
        raise ValueError(f"{op}: cpu_offsets: got {len(given)}, expected copies of {' and '.join(named)}")
    for (name, offsets), copy in zip(named.items(), given):
        if offsets is None and copy is None:
            continue
        fits = isinstance(copy, Tensor) and offsets is not None and copy.shape == offsets.shape
        if not fits or copy.device.type != "cpu" or copy.dtype not in OFFSETS:
            got = (
                f"{tuple(copy.shape)} {copy.dtype} on {copy.device}"
                if isinstance(copy, Tensor)
                else type(copy).__name__
            )
            raise ValueError(f"{op}: cpu_offsets: got {got}, expected a copy of {name} on the CPU")


def check_numbers(op: str, **named: Any) -> None:
    """Raise for factors that are no finite numbers; a tensor would wait for a GPU, and lose its gradient."""
    for name, x in named.items():
        if isinstance(x, bool | Tensor) or not _is_a(x, int | float, "__float__"):
            got = "a tensor" if isinstance(x, Tensor) else repr(x)
            remedy = "; multiply q by it" if isinstance(x, Tensor) and name != "post_scale" else ""
            raise TypeError(f"{op}: {name}: got {got}, expected a number{remedy}")
        if not abs(x) < float("inf"):
            raise ValueError(f"{op}: {name}: got {x}, expected a finite number")


def check_activation(op: str, activation: Any, known: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise for a name that is no activation."""
    if not isinstance(activation, str) or activation not in known:
        near = near_misses(activation, list(known)) if isinstance(activation, str) else ""
        raise ValueError(f"{op}: got {activation!r}{near}, expected one of {', '.join(known)}")


def check_mask(op: str, causal: Any, window: Any) -> None:
    """Raise for a flag that is none, or a window that is no number of positions."""
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal: got {causal!r}, expected True or False")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise ValueError(f"{op}: window: got {window!r}, expected None or positions a query looks to each side, >= 0")


def check_schedule(op: str, schedule: Any, q: Tensor) -> None:
    """Raise for a schedule that `jagged_schedule` did not make; whether it is this batch's, the ops look."""
    if schedule is None:
        return
    if not isinstance(schedule, Tensor) or schedule.dtype != torch.int32:
        got = schedule.dtype if isinstance(schedule, Tensor) else type(schedule).__name__
        raise TypeError(f"{op}: schedule: got {got}, expected what jagged_schedule(...) returns, or None")
    _check_devices(op, q, {"schedule": schedule})


def check_bias(op: str, bias: JaggedBias | None, q: Tensor, k: Tensor, rows: Any) -> None:
    """Raise for tables or times that do not fit (rows of output, H heads)."""
    if bias is None:
        return
    if not isinstance(bias, JaggedBias):
        raise TypeError(f"{op}: bias: got {type(bias).__name__}, expected a JaggedBias or None")
    tensors = {name: getattr(bias, name) for name in (*TABLES, "q_times", "k_times", "time_bounds")}
    tensors = {f"bias.{name}": x for name, x in tensors.items() if x is not None}
    check_tensors(op, **tensors)
    for name, table in ((name, getattr(bias, name)) for name in TABLES):
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] < 1 or table.shape[1] != q.shape[1]:
            raise ValueError(f"{op}: bias.{name}: got {tuple(table.shape)}, expected (buckets, {q.shape[1]}) per head")
        if table.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{op}: bias.{name}: got {table.dtype}, expected torch.float32 or {q.dtype}")
    _check_devices(op, q, tensors)
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


def in_autocast(bias: JaggedBias | None, q: Tensor) -> JaggedBias | None:
    """The bias with tables of another half precision in that of q where autocast is on, as q, k and v are."""
    if not isinstance(bias, JaggedBias) or not autocast_on(q.device.type):
        return bias
    halves = (torch.bfloat16, torch.float16)
    position, time = (
        x.to(q.dtype) if isinstance(x, Tensor) and x.dtype in halves else x for x in (bias.position, bias.time)
    )
    return JaggedBias(
        position=position, time=time, q_times=bias.q_times, k_times=bias.k_times, time_bounds=bias.time_bounds
    )


def _is_a(x: Any, kind: Any, method: str) -> bool:
    """Whether x is of `kind`, or where nothing is traced a symbol or a number of NumPy that stands for one."""
    return isinstance(x, kind) or (not torch.compiler.is_compiling() and hasattr(x, method))


def _check_devices(op: str, q: Tensor, named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        if x.device != q.device:
            raise ValueError(f"{op}: {name}: got {x.device}, expected {q.device}, where q is")
