"""Activations and their derivatives on fp32 tensors, as device functions.

Accurate to a few units in the last place of fp32 in relative terms, tails included, because the result is
rounded to bf16 and then shares a scale with its neighbors. Few instructions: at copy speed a multiprocessor has
about 30 for each element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def reciprocal_of(x):
    if INTERPRETED:
        r = 1.0 / x
    else:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return r


@triton.jit
def exp2_of(x):
    if INTERPRETED:
        r = tl.exp2(x)
    else:
        r = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return r


@triton.jit
def sigmoid(x):
    return reciprocal_of(1.0 + exp2_of(x * -LOG2E))


@triton.jit
def normal_tail(x):
    """`(Phi(-|x|), exp(-x^2 / 2))`.

    `Phi(-z) = exp(-z^2 / 2) P(1 / (1 + 0.3075 z))`, P the minimax polynomial without constant term of degree 6 in
    relative error (4.1e-6), so that the tail keeps its relative accuracy.
    """
    t = reciprocal_of(tl.fma(tl.abs(x), 0.3075, 1.0))
    bell = exp2_of(x * x * (-0.5 * LOG2E))
    p = tl.fma(t, -0.07553036510944366, 0.19116804003715515)
    p = tl.fma(t, p, 0.005925232544541359)
    p = tl.fma(t, p, 0.1369253695011139)
    p = tl.fma(t, p, 0.11858081817626953)
    p = tl.fma(t, p, 0.12293041497468948)
    return p * (t * bell), bell


@triton.jit
def tanh_argument(x):
    """Twice the argument of the tanh approximation of gelu: `0.5 (1 + tanh(u)) = sigmoid(2 u)`."""
    return x * tl.fma(x * x, 0.07135481282052, 1.5957691216057308)


@triton.jit
def act(x, KIND: tl.constexpr):
    if KIND == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif KIND == "relu2":
        y = tl.where(x <= 0, 0.0, x)
        y = y * y
    elif KIND == "silu":
        y = x * sigmoid(x)
    elif KIND == "gelu":
        tail, _bell = normal_tail(x)
        y = tl.fma(-tl.abs(x), tail, tl.maximum(x, 0.0))
    else:
        y = x * sigmoid(tanh_argument(x))
    return y


@triton.jit
def slope(x, KIND: tl.constexpr):
    """`act'(x)`."""
    if KIND == "relu":
        d = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "relu2":
        d = 2.0 * tl.where(x <= 0, 0.0, x)
    elif KIND == "silu":
        s = sigmoid(x)
        d = s * tl.fma(x, 1.0 - s, 1.0)
    elif KIND == "gelu":
        tail, bell = normal_tail(x)
        odd = tl.fma(x * bell, 0.3989422804014327, tl.where(x > 0, -tail, tail))
        d = tl.where(x > 0, odd + 1.0, odd)
    else:
        s = sigmoid(tanh_argument(x))
        d = s * tl.fma(x * tl.fma(x * x, 0.21406443846156, 1.5957691216057308), 1.0 - s, 1.0)
    return d
