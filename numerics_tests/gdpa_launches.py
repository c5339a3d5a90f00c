"""Calls of generalized and block attention whose launches `compile_only.py` compiles: widths and features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fused.attention import block, gdpa, gdpa_backward
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
TOLERATED_STACK = {
    "block_backward_kernel": 32, "gdpa_forward_kernel": 40, "gdpa_dq_kernel": 8, "gdpa_dkdv_kernel": 8,
}  # fmt: skip
"""Bytes a thread. Block attention's backward keeps up to 8 words apart, once a program, so that three programs fit a
multiprocessor. Of the others newer triton keeps a few words apart that are read after the loop, and every version for
sm_100 where there are tables of times."""
BLOCK_CASES = ((64, 4, 64, False), (128, 4, 64, False), (256, 4, 64, False), (128, 2, 32, True), (128, 4, 128, False))
"""Width, heads of k and v, tokens of a block, causal."""


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
    for width, groups, size, causal in BLOCK_CASES:
        q, kv = (torch.zeros(ROWS, heads, width, dtype=torch.bfloat16) for heads in (HEADS, groups))
        options = {"scale": 0.1, "block": size, "causal": causal}
        name = f"block {width} groups={groups} block={size}{' causal' if causal else ''}"
        yield f"{name} forward", partial(block.forward, q, kv, kv, offsets, ROWS, **options)
        yield f"{name} backward", partial(block.backward, q, q, kv, kv, offsets, ROWS, **options)
