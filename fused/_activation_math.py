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
def normal_tail(z):
    """`Phi(-z)`, z >= 0, as 2 to the power of a polynomial.

    log2 Phi(-z) has no singularity near the half-line, so degree 7 does: minimax on [0, 7] with a weight of
    exp(3 - z) past 3. Relative error 3e-6 up to 3, 1e-5 up to 5, 2e-4 up to 7; beyond, where Phi is below 1e-12, it
    falls to zero faster than Phi.
    """
    p = tl.fma(z, -1.7353401062791818e-06, 5.979347042739391e-05)
    p = tl.fma(z, p, -0.0009180885972455144)
    p = tl.fma(z, p, 0.008466956205666065)
    p = tl.fma(z, p, -0.053893640637397766)
    p = tl.fma(z, p, -0.4585134983062744)
    p = tl.fma(z, p, -1.1512380838394165)
    p = tl.fma(z, p, -0.9999958276748657)
    return exp2_of(p)


@triton.jit
def tanh_argument(x):
    """Twice the argument of the tanh approximation of gelu: `0.5 (1 + tanh(u)) = sigmoid(2 u)`."""
    return x * tl.fma(x * x, 0.07135481282052, 1.5957691216057308)


@triton.jit
def act_and_slope(x, KIND: tl.constexpr):
    """`(act(x), act'(x))`."""
    if KIND == "relu":
        y = tl.where(x <= 0, 0.0, x)
        d = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "relu2":
        r = tl.where(x <= 0, 0.0, x)
        y = r * r
        d = 2.0 * r
    elif KIND == "silu":
        s = sigmoid(x)
        y = x * s
        d = tl.fma(y, 1.0 - s, s)
    elif KIND == "gelu":
        z = tl.abs(x)
        tail = normal_tail(z)
        bell = exp2_of(tl.fma(x * x, -0.5 * LOG2E, -1.325748064736159))  # exp(-x^2 / 2) / sqrt(2 pi)
        minus_z = z * -1.0  # a multiplication folds into the next instruction, a negation does not
        y = tl.fma(minus_z, tail, tl.maximum(x, 0.0))
        left = tl.fma(minus_z, bell, tail)
        d = tl.where(x > 0, 1.0 - left, left)
    else:
        s = sigmoid(tanh_argument(x))
        y = x * s
        d = tl.fma(y * (1.0 - s), tl.fma(x * x, 0.21406443846156, 1.5957691216057308), s)
    return y, d


@triton.jit
def act(x, KIND: tl.constexpr):
    y, _slope = act_and_slope(x, KIND)
    return y


@triton.jit
def slope(x, KIND: tl.constexpr):
    _y, d = act_and_slope(x, KIND)
    return d
