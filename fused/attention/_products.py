"""Products of tiles on tensor cores, and rounding to what they multiply, that come out the same in the interpreter.

Triton's interpreter multiplies the bits of bf16 as integers and truncates casts to it; both are spelled out there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._device import INTERPRETED, software_bf16


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """`a @ b` in fp32. PRECISION: how operands in fp32 are multiplied."""
    if INTERPRETED:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def add_product(a, b, c, PRECISION: tl.constexpr):
    """`a @ b + c` in fp32."""
    if INTERPRETED:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        c = tl.dot(a, b, c, input_precision=PRECISION)
    return c


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Fp32 to DTYPE, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        y = software_bf16(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y
