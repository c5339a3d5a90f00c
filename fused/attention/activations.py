"""What generalized attention applies to its scores in the place of a softmax: elementwise, and 0 at 0.

    gelu       x Phi(x), by erf                    gelu_tanh  its tanh approximation
    gelu_poly  0.5 x + x^2 (c2 + c4 x^2 + c6 x^4)   silu       x sigmoid(x)        relu        identity

**gelu_poly** needs no special function, and holds near 0 alone. Its coefficients are the minimax fit on [-1, 1]: there
it lies within `GELU_POLY_ERROR` of gelu (its derivative within 5.2e-4); at 2 it is 0.1 off, and it grows as x^6. It is
for scores that a norm of queries and keys bounds by `GELU_POLY_REACH`, and is never chosen but by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference_ops import _act, _act_grad

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_poly", "silu", "relu", "identity")
GELU_POLY = (0.39876550, -0.06538657, 0.00797440)
"""c2, c4, c6."""
GELU_POLY_REACH = 1.0
GELU_POLY_ERROR = 8.7e-6
"""Largest distance from gelu for |x| <= `GELU_POLY_REACH`."""


def act(x: Tensor, activation: str) -> Tensor:
    """The activation of scores of any float dtype, computed in it."""
    if activation == "identity":
        return x
    if activation == "gelu_poly":
        c2, c4, c6 = GELU_POLY
        square = x * x
        return 0.5 * x + square * (c2 + square * (c4 + square * c6))
    return _act(x, activation)


def act_grad(x: Tensor, activation: str) -> Tensor:
    """Its derivative; relu's at 0 is 0."""
    if activation == "identity":
        return torch.ones_like(x)
    if activation == "gelu_poly":
        c2, c4, c6 = GELU_POLY
        square = x * x
        return 0.5 + x * (2 * c2 + square * (4 * c4 + square * (6 * c6)))
    return _act_grad(x, activation)
