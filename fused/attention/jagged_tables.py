"""Gradients of the bias tables: sums of dS over the pairs of a bucket, the same bits every time.

    dtable[n, h] = sum of dS[h, i, j] over the pairs (i, j) of bucket n

Pairs of one bucket lie in many tiles, so their sums meet in memory: as 64-bit integers, whose addition has no order to
depend on. The unit is a power of two so small that no sum can overflow: `|dS| <= 2 E max|dO| max|V|` times the number
of pairs stays below 2^61, so for 2^30 pairs a unit is 2^-31 of that bound. Positions first add up along the diagonals
of a block in fp32, so that one addition in memory stands for 32 or more pairs; times have no such structure and are
added pair by pair.

The sum of dS over all keys of a query is 0 but for delta's error, `rowsum(dO * (O rounded - O))`, and a bucket that
holds them all, as the outermost may, sums that over its queries. rowsum(P * dP), of the very products it is subtracted
from, has no such error, but would take S and dP of every block twice; adding to all scores of a query what such a
gradient moves changes no output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._tiles import position_bucket, time_bucket
from .bias import JaggedBias


@triton.jit
def to_units(x, unit):
    """Nearest int64 of `x * unit`."""
    x = x * unit
    return (x + tl.where(x < 0, -0.5, 0.5)).to(tl.int64)


@triton.jit
def add_to_tables(
    ds, t, s, seen, q_time, k_time, unit, dposition_ptr, dtime_ptr, bounds_ptr, head, H, P, N,
    POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums of ds, where seen, in units of 1 / unit."""
    ds = tl.where(seen, ds, 0.0)
    if POSITION:
        i = tl.arange(0, BM)[:, None]
        w = tl.arange(0, 2 * BM)[None, :]
        j = i - w + BN - 1  # diagonal w holds the pairs with i - j = w - BN + 1
        inside = (j >= 0) & (j < BN)
        along = tl.sum(tl.where(inside, tl.gather(ds, tl.where(inside, j, 0), 1), 0.0), 0)
        step = tl.arange(0, 2 * BM)
        distance = tl.min(t, 0) - tl.min(s, 0) + step - (BN - 1)
        at = dposition_ptr + position_bucket(distance, 0, P) * H + head
        tl.atomic_add(at, to_units(along, unit), mask=step < BM + BN - 1, sem="relaxed")
    if TIME:
        at = dtime_ptr + time_bucket(q_time[:, None], k_time[None, :], bounds_ptr, N, STEPS) * H + head
        tl.atomic_add(at, to_units(ds, unit), mask=seen, sem="relaxed")


def fixed_unit(grad_out: Tensor, v: Tensor, pairs: int) -> Tensor:
    """fp32 scalar power of two: dS times this, summed over `pairs` pairs, stays below 2^61."""
    if not (grad_out.numel() and v.numel()):
        return torch.ones((), dtype=torch.float32, device=v.device)
    largest = torch.stack([torch.stack(torch.aminmax(x)).abs().amax().float() for x in (grad_out, v)]).prod()
    bits = 61 - math.log2(2 * v.shape[2] * max(pairs, 1))
    return torch.exp2((bits - torch.log2(largest)).floor().clamp(max=120))


@dataclass(frozen=True)
class Tables:
    """int64 sums for the tables' gradients, None where there is none, in units of `1 / unit`."""

    position: Tensor | None = None
    time: Tensor | None = None
    unit: Tensor | None = None

    @classmethod
    def of(cls, bias: JaggedBias, grad_out: Tensor, v: Tensor, max_k: int) -> Tables:
        """Zeros, and a unit that no sum overflows."""
        sums = [
            None if x is None else torch.zeros(x.shape, dtype=torch.int64, device=x.device)
            for x in (bias.position, bias.time)
        ]
        return cls(*sums, fixed_unit(grad_out, v, grad_out.shape[0] * max_k))

    def gradients(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """fp32, or empty (0,)."""
        none = torch.empty(0, dtype=torch.float32, device=device)
        position, time = (
            none.clone() if x is None or self.unit is None else (x.double() / self.unit.double()).float()
            for x in (self.position, self.time)
        )
        return position, time
