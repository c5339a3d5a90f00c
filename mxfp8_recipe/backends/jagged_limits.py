"""Which calls of jagged attention the kernels take. The others run on the reference, and a warning says so.

    op           dtypes             widths of heads                         block
    jagged       bf16, fp16, fp32   up to 256
    generalized  bf16, fp16         up to 256
    block        bf16, fp16         multiples of 16 up to 256, of 128 at    32, 64, 128
                                    block 128

The reference pads the batch and stores its scores: right, but slow and large. A model in fp32 under autocast needs it
for nothing.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
WIDEST = 256
BLOCKS = (32, 64, 128)


def problem(op: str, q: Tensor, v: Tensor, block: int = 0) -> str:
    """Why no kernel takes this call, or nothing. `op`: the name in the table; `block`: of block attention."""
    widths = q.shape[2], v.shape[2]
    if q.dtype not in HALVES and not op.startswith("jagged"):
        return f"got {str(q.dtype).removeprefix('torch.')}, kernels take bf16 and fp16: use autocast"
    if max(widths) > WIDEST:
        return f"got heads {max(widths)} wide, kernels take up to {WIDEST}"
    if not op.startswith("block"):
        return ""
    if block not in BLOCKS:
        return f"got block={block}, kernels take {', '.join(map(str, BLOCKS))}"
    most = WIDEST if block < BLOCKS[-1] else WIDEST // 2
    if any(width % 16 or width > most for width in widths):
        return f"got heads {widths[0]} and {widths[1]} wide, kernels take multiples of 16 up to {most} at block={block}"
    return ""


def say(op: str, reason: str) -> None:
    """Warn of a call that no kernel takes."""
    warnings.warn(f"{op}: {reason}; it runs on the reference, which pads the batch and is slow", stacklevel=2)
