"""Device code that the jagged attention kernels share: which tile a program takes, what it sees, how its rows load.

A unit of work is a tile of a schedule and one head. Positions are counted from a sample's start, with the end of its
queries aligned with the end of its keys: query i stands at `t = i + shift`, `shift = Lk - Lq`.

Blocks of a loop never leave their sample: the last one slides back to the sample's end, over rows that the block
before it has taken already, and those are masked. So a full block needs no mask, nothing is zero-filled whose
exponential would have to be subtracted, and no row of the next sample is multiplied, not even by 0. A sample
shorter than a block goes in blocks of SHORT, zero below its end. The rows of a tile that a loop keeps, not those it
walks over, may lie past the end of their sample: each stays by itself, and is not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._device import INTERPRETED
from ._products import product, rounded

ENTRY = tl.constexpr(8)
"""Words of a schedule's entry; see `schedule`."""

LOG2E = tl.constexpr(1.4426950408889634)

FAR = tl.constexpr(2**30)
"""A position that nobody sees; a window of a quarter of it hides nothing."""
SHORT = tl.constexpr(32)
"""Rows of a block in a sample that is shorter than the block of the loop: few, since their loads take registers."""


@triton.jit
def deal(turn):
    """Rank of the unit that a program takes in its `turn`: zigzag, who takes first is last the next time."""
    p = tl.program_id(0)
    n = tl.num_programs(0)
    return turn * n + tl.where(turn % 2 == 1, n - 1 - p, p)


@triton.jit
def units_in(count_ptr, entries, each, PERSISTENT: tl.constexpr):
    """Units of a list of at most `entries` tiles of `each`. Programs of one unit need not know how many there are: an
    entry that is none has first = Lq = Lk = -1, so they begin one load sooner.
    """
    if PERSISTENT:
        units = tl.load(count_ptr) * each
    else:
        units = entries * each
    return units


@triton.jit
def turns_of(units, PERSISTENT: tl.constexpr):
    """How often a program takes a unit; a program each if not PERSISTENT, which needs fewer registers."""
    if PERSISTENT:
        turns = tl.cdiv(units, tl.num_programs(0))
    else:
        turns = 1
    return turns


@triton.jit
def anchored(x):
    """A scalar that the compiler takes for a new one, so that what follows from it is computed here and not kept in
    registers from before a loop.
    """
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def read_entry(schedule_ptr, row):
    """`(first, q0, Lq, k0, Lk, sample)`: the tile's first row in its sample, where the sample lies, and its number."""
    at = schedule_ptr + row * ENTRY
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def keys_seen(first, last, shift, Lk, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """`[lo, hi)` of the keys that queries first..last-1 see; empty where hi <= lo."""
    lo = 0
    hi = Lk
    if WINDOW:
        lo = tl.maximum(first + shift - window, 0)
    if CAUSAL:
        hi = tl.minimum(last + shift, Lk)
    elif WINDOW:
        hi = tl.minimum(last + shift + window, Lk)
    return lo, hi


@triton.jit
def queries_seeing(first, last, shift, Lq, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """`[lo, hi)` of the queries that see some of the keys first..last-1; empty where hi <= lo."""
    lo = 0
    hi = Lq
    if CAUSAL:
        lo = tl.maximum(first - shift, 0)
    elif WINDOW:
        lo = tl.maximum(first - shift - window, 0)
    if WINDOW:
        hi = tl.minimum(last - shift + window, Lq)
    return lo, hi


@triton.jit
def all_visible(
    first, last, key_first, key_last, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Whether queries first..last-1 all see all of the keys key_first..key_last-1."""
    full = True
    if CAUSAL:
        full = key_last <= first + shift + 1
    if WINDOW:
        full = full & (last + shift - key_first <= window + 1)
        if not CAUSAL:
            full = full & (key_last - first - shift <= window + 1)
    return full


@triton.jit
def visible(t, s, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the positions t, s, that broadcast against each other, see each other: one comparison, as unsigned."""
    if WINDOW:
        wide = tl.minimum(window, FAR // 4).to(tl.int32)
        if CAUSAL:
            seen = (t - s).to(tl.uint32, bitcast=True) <= wide.to(tl.uint32)
        else:
            seen = (t + wide - s).to(tl.uint32, bitcast=True) <= (2 * wide).to(tl.uint32)
    elif CAUSAL:
        seen = s <= t
    else:
        seen = (t == t) & (s == s)
    return seen


@triton.jit
def block_start(block, length, SIZE: tl.constexpr):
    """First row of a block of a sample of `length >= SIZE`: the last block slides back to the end."""
    return tl.minimum(block * SIZE, length - SIZE)


@triton.jit
def load_rows(desc, ptr, row, stride, head, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """(ROWS, D) of one head from `row` on; all of them must lie inside the tensor but for the last tile of all.

    Args:
        desc: descriptor of (T, heads * D) in boxes of (ROWS, D), if TMA. ptr: the same tensor.
        row: int32, counted over all samples. stride: elements from a row to the next, as a multiple of 8.
    """
    if TMA:
        x = desc.load([row, head * D])
    else:
        at = row.to(tl.int64) + tl.arange(0, ROWS)[:, None]
        x = tl.load(ptr + at * (stride * 8) + head * D + tl.arange(0, D)[None, :])
    return x


@triton.jit
def load_some_rows(ptr, row, count, stride, head, ROWS: tl.constexpr, D: tl.constexpr):
    """The first `count` of (ROWS, D), zero below: rows of the next sample are never read."""
    r = tl.arange(0, ROWS)[:, None]
    at = ptr + row.to(tl.int64) * (stride * 8) + head * D
    return tl.load(at + r.to(tl.int64) * (stride * 8) + tl.arange(0, D)[None, :], mask=r < count, other=0.0)


@triton.jit
def store_some_rows(ptr, x, row, count, heads, head, ROWS: tl.constexpr, D: tl.constexpr):
    """The first `count` of (ROWS, D) to dense (T, heads, D)."""
    zero = anchored(count) - count
    r = zero + tl.arange(0, ROWS)[:, None]
    at = ptr + (row.to(tl.int64) * heads + head) * D
    stride = (heads * D).to(tl.int64)
    tl.store(at + r * stride + tl.arange(0, D)[None, :], rounded(x, ptr.dtype.element_ty), mask=r < count)


@triton.jit
def stats_row(q0, sample):
    """Where a sample's lse and delta begin: on 16 bytes, as TMA wants it, and past those of the sample before."""
    return (q0 // 4 + sample) * 4


@triton.jit
def position_bucket(t, s, P):
    return tl.minimum(tl.maximum(t - s + P // 2, 0), P - 1)


@triton.jit
def time_bucket(q_time, k_time, bounds_ptr, N, STEPS: tl.constexpr):
    """How many of N - 1 ascending bounds are <= |q_time - k_time|; STEPS = (N - 1).bit_length() halvings."""
    interval = tl.abs(q_time - k_time)
    found = tl.zeros(interval.shape, tl.int32)
    for i in tl.static_range(STEPS):
        probe = found + (1 << (STEPS - 1 - i))
        inside = probe < N
        bound = tl.load(bounds_ptr + probe - 1, mask=inside, other=0)
        found = tl.where(inside & (bound <= interval), probe, found)
    return found


@triton.jit
def score_bias(
    t, s, q_time, k_time, position_ptr, time_ptr, bounds_ptr, head, heads, P, N,
    POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """fp32 sum of both tables' entries at positions t, s, and times of that shape; see `bias.JaggedBias`."""
    if POSITION:
        bias = tl.load(position_ptr + position_bucket(t, s, P) * heads + head).to(tl.float32)
    if TIME:
        added = tl.load(time_ptr + time_bucket(q_time, k_time, bounds_ptr, N, STEPS) * heads + head).to(tl.float32)
        if POSITION:
            bias += added
        else:
            bias = added
    return bias


@triton.jit
def scores(
    q, k, t, s, first_key, Lk, q_time, k_times_ptr, key_row, masked, scale_log2, window,
    position_ptr, time_ptr, bounds_ptr, head, H, P, N,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
    FOLD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a block in base 2, -inf where hidden; if FOLD their scale is still to be applied.

    t, s: positions of queries and keys; keys before first_key or from Lk on are hidden too. masked: false where nothing
    is hidden.
    """
    x = product(q, tl.trans(k), PRECISION)
    if not FOLD:
        x = x * scale_log2
    if POSITION or TIME:
        k_time = s
        if TIME:
            inside = (s >= 0) & (s < Lk)
            k_time = tl.load(k_times_ptr + key_row.to(tl.int64) + s, mask=inside, other=0)
        x += LOG2E * score_bias(
            t[:, None], s[None, :], q_time[:, None], k_time[None, :], position_ptr, time_ptr, bounds_ptr, head, H, P, N,
            POSITION, TIME, STEPS,
        )  # fmt: skip
    if masked:
        inside = (s >= first_key) & (s < Lk)
        if CAUSAL or WINDOW:
            seen = visible(t[:, None], tl.where(inside, s, FAR)[None, :], window, CAUSAL, WINDOW)
        else:
            seen = inside[None, :]
        x = tl.where(seen, x, -float("inf"))
    return x
