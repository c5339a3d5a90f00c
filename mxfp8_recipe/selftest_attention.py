"""The self-test of attention on jagged batches: each op of the backend against the reference in float64.

Histories of length 0 and 1 and around a tile are among the samples; so are a causal mask, a window, tables by position,
shared keys, and query sets that all samples read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fused.attention import jagged_reference as reference
from .fused.attention.bias import JaggedBias
from .selftest_places import Measures, Place, relative

SMALL, LARGE = (5, 0, 33, 1), (65, 0, 1, 127, 300, 64)
"""Tokens of each sample."""
OUTPUT, GRADIENT = 5e-3, 8e-3
"""Bounds on relative errors: BF16 rounds each probability and each result by up to 2**-9, gradients on the way once
more. Plain torch in BF16 is at most 0.0026 off here. A tile left out or taken twice is off by a tenth or more.
"""
MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": 20}}


class Batch:
    """Operands of one call in BF16, and the same values in float64."""

    def __init__(self, place: Place, table: bool) -> None:
        lengths = torch.tensor(SMALL if place.small else LARGE)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
        tokens, self.longest = int(offsets[-1]), int(lengths.max())
        heads, dim = (2, 32) if place.small else (4, 128)
        drawn = [torch.randn(tokens, n, dim).bfloat16() for n in (heads, heads // 2, heads // 2, heads)]
        self.offsets = offsets.to(place.device)
        self.q, self.k, self.v, self.grad = (x.to(place.device) for x in drawn)
        self.scale = dim**-0.5
        rows = (torch.randn(2 * self.longest - 1, heads) * 0.5).to(place.device)
        self.bias = JaggedBias(position=rows) if table else None
        self.exact_bias = JaggedBias(position=rows.double()) if table else None

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q.double(), self.k.double(), self.v.double()

    def layout(self, bias: JaggedBias | None) -> tuple[Any, ...]:
        return self.offsets, self.offsets, self.longest, self.longest, bias


def _errors(found: Any, expected: Any, bound: float, unit: str) -> Measures:
    for a, b in zip(found, expected):
        if b.numel():
            yield unit, relative(a, b), bound


def check_jagged(place: Place, mask: str) -> Measures:
    """Softmax attention, forward and backward; with a table where the mask is causal."""
    batch = Batch(place, table=mask == "causal")
    options = {"scale": batch.scale, **MASKS[mask]}
    layout, exact_layout = batch.layout(batch.bias), batch.layout(batch.exact_bias)
    out, lse = place.op("jagged_forward")(batch.q, batch.k, batch.v, *layout, **options)
    exact = reference.jagged_forward(*batch.exact(), *exact_layout, **options)
    yield from _errors((out, lse), exact, OUTPUT, "relative, output")
    grads = place.op("jagged_backward")(batch.grad, batch.q, batch.k, batch.v, out, lse, *layout, **options)
    expected = reference.jagged_backward(batch.grad.double(), *batch.exact(), *exact, *exact_layout, **options)
    yield from _errors(grads, expected, GRADIENT, "relative, gradients")


def check_generalized(place: Place, activation: str) -> Measures:
    """act(QK) V, of histories to themselves and of one set of queries to all."""
    batch = Batch(place, table=False)
    options: dict[str, Any] = {"activation": activation, "pre_scale": batch.scale, "post_scale": 1 / batch.longest}
    seeds = batch.q[:3]
    calls = (
        (batch.q, batch.layout(None), options),
        (seeds, (None, *batch.layout(None)[1:]), options | {"broadcast_q": True}),
    )
    for q, layout, kwargs in calls:
        out = place.op("generalized_forward")(q, batch.k, batch.v, *layout, **kwargs)
        wide: Any = (q.double(), *batch.exact()[1:])
        exact = reference.generalized_forward(*wide, *layout, **kwargs)
        yield from _errors((out,), (exact,), OUTPUT, "relative, output")
        grad = torch.randn(out.shape).to(place.device, torch.bfloat16)
        grads = place.op("generalized_backward")(grad, q, batch.k, batch.v, *layout, **kwargs)
        expected = reference.generalized_backward(grad.double(), *wide, *layout, **kwargs)
        yield from _errors(grads, expected, GRADIENT, "relative, gradients")


def check_blocks(place: Place, size: int) -> Measures:
    """Attention of each block of tokens to itself."""
    batch = Batch(place, table=False)
    layout, options = (batch.offsets, batch.longest), {"scale": batch.scale, "block": size}
    out = place.op("block_forward")(batch.q, batch.k, batch.v, *layout, **options)
    exact = reference.block_forward(*batch.exact(), *layout, **options)
    yield from _errors((out,), (exact,), OUTPUT, "relative, output")
    grads = place.op("block_backward")(batch.grad, batch.q, batch.k, batch.v, *layout, **options)
    expected = reference.block_backward(batch.grad.double(), *batch.exact(), *layout, **options)
    yield from _errors(grads, expected, GRADIENT, "relative, gradients")
