"""Calls of generalized and block attention whose launches `compile_only.py` compiles: widths and features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from fused.attention import block, gdpa, gdpa_backward, gdpa_hopper
from numerics_tests.jagged_launches import MASKS, TABLES

ROWS, HEADS, LONG = 256, 4, 1024
GDPA_CASES = (
    # activation, width, heads of k and v, mask, tables, dtype
    ("gelu", 64, 4, "full", "", torch.bfloat16), ("gelu", 128, 4, "full", "", torch.bfloat16),
    ("gelu", 256, 4, "full", "", torch.bfloat16), ("gelu", 128, 2, "full", "", torch.bfloat16),
    ("gelu", 128, 4, "full", "", torch.float16), ("gelu", 128, 4, "causal", "", torch.bfloat16),
    ("silu", 128, 4, "full", "", torch.bfloat16), ("silu", 128, 2, "causal window", "", torch.bfloat16),
    ("silu", 64, 4, "causal", " positions", torch.bfloat16), ("silu", 128, 4, "full", " times", torch.bfloat16),
    ("gelu_tanh", 128, 4, "full", "", torch.bfloat16), ("gelu_poly", 128, 4, "full", "", torch.bfloat16),
    ("relu", 128, 4, "full", "", torch.bfloat16), ("identity", 128, 4, "full", "", torch.bfloat16),
)  # fmt: skip
HOPPER_CASES = (
    # activation, heads of k and v, dtype, longest sample
    ("gelu", 4, torch.bfloat16, LONG), ("gelu", 4, torch.bfloat16, 256), ("gelu", 2, torch.float16, LONG),
    ("silu", 4, torch.bfloat16, LONG), ("silu", 2, torch.bfloat16, 256), ("gelu_tanh", 4, torch.bfloat16, LONG),
    ("gelu_poly", 4, torch.bfloat16, LONG), ("relu", 4, torch.bfloat16, LONG), ("identity", 4, torch.float16, LONG),
)  # fmt: skip
TOLERATED_STACK = {
    "block_backward_kernel": 32, "gdpa_forward_kernel": 40, "gdpa_dq_kernel": 8, "gdpa_dkdv_kernel": 8,
    "gdpa_hopper_queries_kernel": 120, "gdpa_hopper_keys_kernel": 256,
}  # fmt: skip
"""Bytes a thread. Block attention's backward keeps up to 8 words apart, once a program, so that three programs fit a
multiprocessor. Hopper's loaders keep what copies short samples apart, and warpgroups addresses and, of the last block
of a sample, weights; a step of the loops moves a word or two. Of the others newer triton keeps a few words apart that
are read after the loop, and every version for sm_100 where there are tables of times."""
BLOCK_CASES = ((64, 4, 64, False), (128, 4, 64, False), (256, 4, 64, False), (128, 2, 32, True), (128, 4, 128, False))
"""Width, heads of k and v, tokens of a block, causal."""


def hopper_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Those that only a Hopper takes."""

    def on_hopper(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with mock.patch.object(gdpa_hopper, "is_hopper", return_value=True):
            return call(*args, **options)

    for activation, groups, dtype, longest in HOPPER_CASES:
        q, kv = (torch.zeros(8 * LONG, heads, 128, dtype=dtype) for heads in (HEADS, groups))
        offsets = torch.tensor([0, len(q)], dtype=torch.int32)
        layout = offsets, offsets, len(q), longest, None
        options = {"activation": activation, "pre_scale": 0.1, "post_scale": 0.1}
        name = f"gdpa hopper {activation} groups={groups} {str(dtype)[6:]} L={longest}"
        yield f"{name} forward", partial(on_hopper, gdpa.forward, q, kv, kv, *layout, **options)
        yield f"{name} backward", partial(on_hopper, gdpa_backward.backward, q, q, kv, kv, *layout, **options)


def gdpa_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and calls."""
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    scales = {"pre_scale": 0.1, "post_scale": 0.1}
    for activation, width, groups, mask, bias, dtype in GDPA_CASES:
        q, kv = (torch.zeros(ROWS, heads, width, dtype=dtype) for heads in (HEADS, groups))
        layout = offsets, offsets, ROWS, LONG, TABLES[bias]
        options = {"activation": activation, **scales, **MASKS[mask]}
        name = f"gdpa {activation} {width} groups={groups} {mask}{bias} {str(dtype)[6:]}"
        yield f"{name} forward", partial(gdpa.forward, q, kv, kv, *layout, **options)
        yield f"{name} backward", partial(gdpa_backward.backward, q, q, kv, kv, *layout, **options)
    seeds, kv = torch.zeros(32, HEADS, 128, dtype=torch.bfloat16), torch.zeros(ROWS, HEADS, 128, dtype=torch.bfloat16)
    options = {"activation": "gelu", **scales, "broadcast_q": True}
    layout = None, offsets, 32, LONG, None
    yield "gdpa pooled forward", partial(gdpa.forward, seeds, kv, kv, *layout, **options)
    yield "gdpa pooled backward", partial(gdpa_backward.backward, seeds, seeds, kv, kv, *layout, **options)
    q, kv = (torch.zeros(rows, heads, 128, dtype=torch.bfloat16) for rows, heads in ((8 * LONG, HEADS), (ROWS, 2)))
    for longest in (64, 128):
        layout = torch.tensor([0, len(q)], dtype=torch.int32), offsets, len(q), longest, None
        yield f"gdpa short {longest} forward", partial(gdpa.forward, q, kv, kv, *layout, activation="gelu", **scales)
    yield from hopper_calls()
    for width, groups, size, causal in BLOCK_CASES:
        q, kv = (torch.zeros(ROWS, heads, width, dtype=torch.bfloat16) for heads in (HEADS, groups))
        options = {"scale": 0.1, "block": size, "causal": causal}
        name = f"block {width} groups={groups} block={size}{' causal' if causal else ''}"
        yield f"{name} forward", partial(block.forward, q, kv, kv, offsets, ROWS, **options)
        yield f"{name} backward", partial(block.backward, q, q, kv, kv, offsets, ROWS, **options)
