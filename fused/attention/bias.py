"""Bias of attention scores by relative position and by time interval, as tables with gradients (HSTU's form).

    bias[h, i, j] = position[clamp(t_i - s_j + P // 2, 0, P - 1), h] + time[bucket(|q_time_i - k_time_j|), h]
    bucket(d)     = how many of time_bounds are <= d

t_i and s_j are positions in the sample as `jagged_layout` counts them. A time bucket is found by comparing integers,
so that every kernel and this reference agree on it to the bit; the logarithm is only in how bounds are made. Read are
two tables of a few hundred rows and a time a token; written nothing but scores, and in backward one fp32 sum of dS
per bucket and head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .jagged_layout import Pairs

HSTU_WIDTH = 0.301
"""Width of a time bucket in the natural logarithm: HSTU's `log(max(1, |dt|)) / 0.301`."""


@dataclass(frozen=True, kw_only=True)
class JaggedBias:
    """What is added to `scale * Q K^T`; a part without its table is absent.

    Attributes:
        position: (P, H) table, fp32 or the compute dtype, or None.
        time: (N, H) table, fp32 or the compute dtype, or None.
        q_times: (Tq,) int64 times of the queries, one for each row of the output. k_times: (Tk,) int64 of the keys.
        time_bounds: (N - 1,) int64, ascending: `log_time_bounds(N)`.
    """

    position: Tensor | None = None
    time: Tensor | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None
    time_bounds: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """`position, time, q_times, k_times, time_bounds`, as they cross an op."""
        return self.position, self.time, self.q_times, self.k_times, self.time_bounds


def log_time_bounds(buckets: int, width: float = HSTU_WIDTH, device: torch.device | str | None = None) -> Tensor:
    """`time_bounds` for `buckets` rows: (buckets - 1,) int64, bucket n begins at the first integer >= e^(n * width).

    Intervals 0 and 1 share bucket 0. A bucket too narrow to hold an integer stays empty; the last one is open. Bounds
    that int64 does not hold end at its largest value. Made on torch's default device where none is named.

    Raises:
        ValueError: fewer than one bucket, or a width that is not above 0.
    """
    if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1:
        raise ValueError(f"log_time_bounds: buckets: got {buckets!r}, expected rows of a table, 1 or more")
    if not 0 < width < math.inf:
        raise ValueError(f"log_time_bounds: width: got {width!r}, expected a number above 0")
    largest = torch.iinfo(torch.int64).max
    bounds = []
    for bucket in range(1, buckets):
        exponent = bucket * width
        bounds.append(largest if exponent > math.log(largest) - 1e-9 else math.ceil(math.exp(exponent)))
    return torch.tensor(bounds, dtype=torch.int64, device=device)


def position_buckets(relative: Tensor, size: int) -> Tensor:
    """Rows of a position table of `size` for `t - s`, int64 of the same shape."""
    return (relative + size // 2).clamp(0, size - 1)


def time_buckets(interval: Tensor, bounds: Tensor) -> Tensor:
    """Rows of the time table for `q_time - k_time`, int64 of the same shape."""
    return torch.bucketize(interval.abs(), bounds, right=True)


def bucketed(bias: JaggedBias | None, pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    """Each table with the bucket (B, Lq, Lk) of every pair of a batch."""
    found: list[tuple[Tensor, Tensor]] = []
    if bias is None:
        return found
    if bias.position is not None:
        found.append((bias.position, position_buckets(pairs.relative, len(bias.position))))
    if bias.time is not None:
        assert bias.q_times is not None
        assert bias.k_times is not None
        assert bias.time_bounds is not None
        interval = pairs.q.pad(bias.q_times)[:, :, None] - pairs.k.pad(bias.k_times)[:, None, :]
        found.append((bias.time, time_buckets(interval, bias.time_bounds)))
    return found


def bias_of(table: Tensor, buckets: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, Lq, Lk) of `dtype` from a table (N, H) and buckets (B, Lq, Lk)."""
    return table.to(dtype)[buckets].movedim(-1, 1)


def table_gradient(grad_scores: Tensor, buckets: Tensor, size: int) -> Tensor:
    """(N, H) sums of dS (B, H, Lq, Lk) over the pairs of each bucket, in the dtype of dS, in a fixed order."""
    rows = grad_scores.movedim(1, -1).flatten(0, 2)
    total, index = rows.new_zeros(size, rows.shape[-1]), buckets.expand(grad_scores[:, 0].shape).flatten()
    if rows.device.type == "cpu":  # each of the two adds in a fixed order where the other does not
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)
