"""Calls of jagged attention whose launches `compile_only.py` compiles: its schedule, both passes, widths, features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from fused.attention import jagged, jagged_hopper, schedule
from fused.attention.bias import JaggedBias

ROWS, LONG, HEADS = 256, 1024, 4
TIMES = torch.zeros(ROWS, dtype=torch.int64)
TABLES = {
    "": None,
    " positions": JaggedBias(position=torch.zeros(64, HEADS)),
    " times": JaggedBias(
        time=torch.zeros(64, HEADS), q_times=TIMES, k_times=TIMES, time_bounds=torch.zeros(63, dtype=torch.int64)
    ),
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 9},
    "causal window": {"causal": True, "window": 9},
}
CASES = (
    # width, heads of k and v, mask, tables
    (64, 4, "full", ""), (128, 4, "full", ""), (256, 4, "full", ""), (128, 2, "full", ""), (64, 4, "causal", ""),
    (128, 4, "causal", ""), (128, 4, "window", ""), (128, 2, "causal window", ""), (64, 4, "full", " positions"),
    (128, 4, "causal", " positions"), (64, 4, "full", " times"),
)  # fmt: skip


def as_on_hopper(call: Callable[[], Any]) -> Any:
    """`call`, whose launches are those of a Hopper."""
    with mock.patch.object(jagged_hopper, "is_hopper", return_value=True):
        return call()


def jagged_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and calls."""
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    lists = offsets, offsets, ROWS, ROWS, 4, 4, ROWS, ROWS
    for mask in ("full", "causal", "window"):
        options = MASKS[mask]
        call = partial(schedule._on_device, *lists, options.get("causal", False), options.get("window"))
        yield f"jagged schedule {mask}", call
    for rows, (width, groups, mask, bias) in itertools.product((ROWS, LONG), CASES):
        if rows == LONG and (bias or width > 128):
            continue  # its length chooses nothing
        offsets = torch.tensor([0, rows], dtype=torch.int32)
        q, kv = (torch.zeros(rows, heads, width, dtype=torch.bfloat16) for heads in (HEADS, groups))
        layout = offsets, offsets, rows, rows, TABLES[bias]
        name = f"jagged {width} groups={groups} {mask}{bias}{' long' if rows == LONG else ''}"
        forward = partial(jagged.forward, q, kv, kv, *layout, scale=0.1, **MASKS[mask])
        lse = torch.zeros(rows, HEADS)
        backward = partial(jagged.backward, q, q, kv, kv, q, lse, *layout, scale=0.1, **MASKS[mask])
        yield f"{name} forward", forward
        yield f"{name} backward", backward
        if width == 128 and groups == HEADS and mask in ("full", "window") and not bias:
            yield f"{name} forward on hopper", partial(as_on_hopper, forward)
        if width == 128 and groups == HEADS and mask == "full" and not bias:
            yield f"{name} backward on hopper", partial(as_on_hopper, backward)
