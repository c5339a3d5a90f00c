"""What generalized attention does to a score, in few instructions: its weight, and beside it the derivative.

A score costs 512 FLOPs in the two products of a head of 128, which tensor cores do in the time of 16 additions; so
every instruction here counts. Weights are rounded to bf16 or fp16 next: relative errors stay below 2^-9, half a unit
in the last place of bf16, and derivatives are good to 2^-10.

Scores come raw, as Q K^T left them, and a positive `scale` is folded into constants: `weight` gives
`act(scale s) / scale`, whose factor goes into the scale of the output. z stands for |scale s|.

gelu       x Phi(x) = max(x, 0) - z Phi(-z), Phi(-z) as 2^(cubic in z): relative error 1.9e-3 up to z = 3, and beyond
           9e-6 absolute. Its derivative at -z is Phi(-z) times a quartic, at z 1 minus that.
silu       x sigmoid(x) = max(x, 0) - z e / (1 + e), e = exp(-z), 1 / (1 + e) as a cubic in e (1.8e-3) in place of a
           second special function, a quartic (3e-4) where the derivative is wanted too.
gelu_tanh  the same with e = exp(-z (a + b z^2)).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._activation_math import exp2_of
from .._device import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
TANH_A = tl.constexpr(1.5957691216057308)
TANH_B = tl.constexpr(0.07135481282052)
C2 = tl.constexpr(0.39876550)
C4 = tl.constexpr(-0.06538657)
C6 = tl.constexpr(0.00797440)


@triton.jit
def positive_part(s):
    return tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_sign_of(r, s):
    """R >= 0 with the sign of s: one instruction, of which the assembler would make two."""
    if INTERPRETED:
        sign = s.to(tl.int32, bitcast=True) & -0x80000000
        y = (r.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    else:
        y = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x80000000, 0x78;", "=f,f,f", [r, s], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def gelu_tail(size, scale):
    """Phi(-z) of z = scale * size."""
    p = tl.fma(size, -0.020604076 * scale * scale * scale, -0.51218578 * scale * scale)
    p = tl.fma(size, p, -1.1212647496 * scale)
    return exp2_of(tl.fma(size, p, -1.0026662297))


@triton.jit
def gelu_ratio(size, scale):
    """The derivative of gelu at -z over `gelu_tail`."""
    p = tl.fma(size, 0.0179621787 * scale * scale * scale * scale, -0.122853346 * scale * scale * scale)
    p = tl.fma(size, p, -0.6078071536 * scale * scale)
    p = tl.fma(size, p, -0.81404595 * scale)
    return tl.fma(size, p, 1.0016327477)


@triton.jit
def decay(s, scale, KIND: tl.constexpr):
    """`(z or what stands in its place in the sigmoid, as exp(-it); over |s|)`."""
    if KIND == "silu":
        e = exp2_of(tl.abs(s) * (-LOG2E * scale))
    else:
        slant = tl.fma(s * s, -LOG2E * TANH_B * scale * scale * scale, -LOG2E * TANH_A * scale)
        e = exp2_of(tl.abs(s) * slant)
    return e


@triton.jit
def one_over_one_plus(e, FINE: tl.constexpr):
    if FINE:
        p = tl.fma(e, 0.1522459249, -0.5328607583)
        p = tl.fma(e, p, 0.865896866)
        p = tl.fma(e, p, -0.9848361777)
        p = tl.fma(e, p, 0.9997027634)
    else:
        p = tl.fma(e, -0.2218387456, 0.6655162676)
        p = tl.fma(e, p, -0.9428112882)
        p = tl.fma(e, p, 0.9982675335)
    return p


@triton.jit
def weight(s, scale, KIND: tl.constexpr):
    """`act(scale s) / scale`."""
    if KIND == "gelu":
        y = tl.fma(tl.abs(s) * -1.0, gelu_tail(tl.abs(s), scale), positive_part(s))
    elif KIND == "gelu_poly":
        square = s * s
        p = tl.fma(square, C6 * scale * scale * scale * scale * scale, C4 * scale * scale * scale)
        y = tl.fma(square, tl.fma(square, p, C2 * scale), 0.5 * s)
    elif KIND == "relu":
        y = positive_part(s)
    elif KIND == "identity":
        y = s
    else:
        e = decay(s, scale, KIND)
        y = tl.fma(tl.abs(s) * e * -1.0, one_over_one_plus(e, False), positive_part(s))
    return y


@triton.jit
def weight_and_slope(s, scale, KIND: tl.constexpr):
    """`(act(scale s) / scale, act'(scale s))`."""
    if KIND == "gelu":
        size = tl.abs(s)
        tail = gelu_tail(size, scale)
        y = tl.fma(size * -1.0, tail, positive_part(s))
        d = 0.5 + with_sign_of(tl.fma(tail * -1.0, gelu_ratio(size, scale), 0.5), s)
    elif KIND == "gelu_poly":
        y = weight(s, scale, KIND)
        square = s * s
        p = tl.fma(square, 6 * C6 * scale * scale * scale * scale * scale, 4 * C4 * scale * scale * scale)
        d = tl.fma(s, tl.fma(square, p, 2 * C2 * scale), 0.5)
    elif KIND == "relu":
        y = positive_part(s)
        d = tl.where(s > 0, 1.0, 0.0)
    elif KIND == "identity":
        y = s
        d = s * 0.0 + 1.0
    else:
        size = tl.abs(s)
        e = decay(s, scale, KIND)
        tail = e * one_over_one_plus(e, True)
        y = tl.fma(size * -1.0, tail, positive_part(s))
        spread = tl.fma(tail * -1.0, tail, tail)
        if KIND == "silu":
            steep = size * scale
        else:
            steep = size * tl.fma(s * s, 3 * TANH_B * scale * scale * scale, TANH_A * scale)
        d = 0.5 + with_sign_of(tl.fma(steep, spread, 0.5 - tail), s)
    return y, d
