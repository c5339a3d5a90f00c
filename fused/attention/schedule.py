"""The tiles of a jagged batch in the order in which programs take them: made once a batch, on its device.

A tile is up to TILE queries (or keys) of one sample; its work is how many keys its queries see together (or how many
queries see its keys), so a causal mask and a window count. Tiles without rows are not in the list. The longest come
first, equal ones in the order of the batch, so that neighbors in the list share their keys in the L2 cache; programs
take one each in this order, or in zigzag if they take several (`_tiles.deal`), and the short ones at the end even out
the rest.
With a window the most that a tile of the sample could see stands for its work: else the first and the last tiles of
all samples would come after all others, when nothing that they share with them is in the cache any more.

Offsets are read here and nowhere else, and held to the rows there are: wrong ones make wrong tiles, but no kernel
reads or writes beyond its tensors before somebody has found out. How many tiles there are is known to the device
alone: the list is as long as T rows in B samples can need at most, and begins with the counts. Two launches make both
lists, for any B: one lays out tiles and their work, one puts each at its rank, the number of tiles that go before it.
Ranks take (tiles)^2 comparisons: 27 million for the 5,200 tiles of 590,000 tokens in 1152 samples, many at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from ._tiles import keys_seen, queries_seeing

TILE = 128
"""Rows of a tile. Kernels whose tiles are half as long take each entry twice."""
ENTRY = 8
"""int32 words of an entry: first row in the sample, q0, Lq, k0, Lk, sample, work, and what it is ranked by. Past the
count all are -1."""
WIDEST = 2**28
"""A window as wide as this hides nothing, and kernels add positions to it in 32 bits."""
_SAMPLES, _RANKS, _CHUNK = 128, 64, 128


def most_tiles(total: int, samples: int) -> int:
    """Tiles that `total` rows in `samples` samples need at most."""
    return min(total, (total + samples * (TILE - 1)) // TILE)


def lengths_of_lists(
    total_q: int, total_k: int, samples: int, *, broadcast: int | None = None
) -> tuple[int, int]:  # fmt: skip
    """Entries for tiles of queries and of keys; `broadcast` queries in every sample, in place of `total_q` in all."""
    queries = most_tiles(total_q, samples) if broadcast is None else samples * -(-broadcast // TILE)
    return queries, most_tiles(total_k, samples)


@triton.jit
def rows_of(offsets_ptr, sample, inside, total):
    """First row and length of samples; of offsets that are wrong, some rows within the tensor."""
    begin = tl.load(offsets_ptr + sample, mask=inside, other=0)
    end = tl.load(offsets_ptr + sample + 1, mask=inside, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), total)
    end = tl.minimum(tl.maximum(end, begin), total)
    return begin.to(tl.int32), (end - begin).to(tl.int32)


@triton.jit
def samples_of(
    q_offsets_ptr, k_offsets_ptr, sample, B, total_q, total_k, max_q, max_k, keys,
    BROADCAST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """First rows and lengths of samples, and the tiles of their keys or of their queries."""
    inside = sample < B
    k0, Lk = rows_of(k_offsets_ptr, sample, inside, total_k)
    if BROADCAST:
        q0 = sample * max_q
        Lq = tl.where(inside, max_q, 0)
    else:
        q0, Lq = rows_of(q_offsets_ptr, sample, inside, total_q)
    tiles = (tl.where(keys, tl.minimum(Lk, max_k), tl.minimum(Lq, max_q)) + SIZE - 1) // SIZE
    return q0, Lq, k0, Lk, tiles


@kernel(do_not_specialize=["B", "total_q", "total_k", "max_q", "max_k", "NQ", "NK", "window"])
def tiles_kernel(
    q_offsets_ptr, k_offsets_ptr, out_ptr, B, total_q, total_k, max_q, max_k, NQ, NK, window,
    BROADCAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, SAMPLES: tl.constexpr,
    ENTRY: tl.constexpr,
):  # fmt: skip
    """Entries of SAMPLES samples in the order of the batch: of queries (axis 1 = 0) or keys, after a row of counts."""
    keys = tl.program_id(1) == 1
    block = tl.program_id(0)
    before = 0
    own = tl.arange(0, SAMPLES)
    for b in range(block):
        _, _, _, _, others = samples_of(
            q_offsets_ptr, k_offsets_ptr, b * SAMPLES + own, B, total_q, total_k, max_q, max_k, keys, BROADCAST, SIZE
        )
        before += tl.sum(others)
    sample = block * SAMPLES + own
    q0, Lq, k0, Lk, tiles = samples_of(
        q_offsets_ptr, k_offsets_ptr, sample, B, total_q, total_k, max_q, max_k, keys, BROADCAST, SIZE
    )
    start = before + tl.cumsum(tiles, 0) - tiles
    before += tl.sum(tiles)
    lists = out_ptr + ENTRY + tl.where(keys, NQ * ENTRY, 0)
    most = tl.where(keys, NK, NQ)
    if block == tl.num_programs(0) - 1:
        tl.store(out_ptr + tl.where(keys, 1, 0), tl.minimum(before, most))
    for i in range((tl.where(keys, max_k, max_q) + SIZE - 1) // SIZE):
        first = i * SIZE
        q_lo, q_hi = queries_seeing(first, tl.minimum(first + SIZE, Lk), Lk - Lq, Lq, window, CAUSAL, WINDOW)
        k_lo, k_hi = keys_seen(first, tl.minimum(first + SIZE, Lq), Lk - Lq, Lk, window, CAUSAL, WINDOW)
        work = tl.maximum(tl.where(keys, q_hi - q_lo, k_hi - k_lo), 0)
        ranked_by = work
        if WINDOW:
            ranked_by = tl.minimum(tl.where(keys, Lq, Lk), (1 if CAUSAL else 2) * window + SIZE)
        at = lists + (start + i) * ENTRY
        mask = (i < tiles) & (start + i < most)
        tl.store(at, tl.zeros_like(q0) + first, mask=mask)
        tl.store(at + 1, q0, mask=mask)
        tl.store(at + 2, Lq, mask=mask)
        tl.store(at + 3, k0, mask=mask)
        tl.store(at + 4, Lk, mask=mask)
        tl.store(at + 5, sample, mask=mask)
        tl.store(at + 6, work, mask=mask)
        tl.store(at + 7, ranked_by, mask=mask)


@kernel(do_not_specialize=["NQ", "NK"])
def rank_kernel(
    from_ptr, out_ptr, NQ, NK, RANKS: tl.constexpr, CHUNK: tl.constexpr, ENTRY: tl.constexpr
):  # fmt: skip
    """Entries of `from` to their ranks in `out`: by their last word, the highest first, then as they are in `from`."""
    keys = tl.program_id(1) == 1
    count = tl.load(from_ptr + tl.where(keys, 1, 0))
    most = tl.where(keys, NK, NQ)
    lists = tl.where(keys, NQ * ENTRY, 0) + ENTRY
    word = tl.arange(0, ENTRY)
    if tl.program_id(0) == 0:
        counts = tl.load(from_ptr + word, mask=word < 2, other=0)
        tl.store(out_ptr + word, counts, mask=tl.where(keys, word == 1, word != 1))
    own = tl.program_id(0) * RANKS + tl.arange(0, RANKS)
    mine = tl.load(from_ptr + lists + own * ENTRY + 7, mask=own < count, other=-1)
    rank = tl.zeros((RANKS,), tl.int32)
    for j in range(0, count, CHUNK):
        other = j + tl.arange(0, CHUNK)
        its = tl.load(from_ptr + lists + other * ENTRY + 7, mask=other < count, other=-1)
        earlier = (its[None, :] == mine[:, None]) & (other[None, :] < own[:, None])
        rank += tl.sum(((its[None, :] > mine[:, None]) | earlier).to(tl.int32), axis=1)
    entry = tl.load(from_ptr + lists + own[:, None] * ENTRY + word[None, :], mask=own[:, None] < count, other=-1)
    place = tl.where(own < count, rank, own)
    tl.store(out_ptr + lists + place[:, None] * ENTRY + word[None, :], entry, mask=own[:, None] < most)


def build(
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    total_q: int,
    total_k: int,
    max_q: int,
    max_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """The schedule of a batch.

    Args:
        q_offsets: (B + 1,) int32 or int64, or None: `max_q` queries in every sample, row b * max_q + i of the output.
        k_offsets: (B + 1,) int32 or int64. total_q, total_k: rows of queries and keys.
        max_q, max_k: no sample is longer.
        causal, window: as the kernels take them; a kernel of another mask may use the schedule, less well balanced.

    Returns:
        (1 + NQ + NK, 8) int32 on the device of `k_offsets`: the counts of both lists, tiles of queries, tiles of keys,
        entries as ENTRY says. No synchronization; of two equal batches the same.
    """
    window = None if window is None else min(window, WIDEST)
    samples = k_offsets.numel() - 1
    broadcast = max_q if q_offsets is None else None
    nq, nk = lengths_of_lists(total_q, total_k, samples, broadcast=broadcast)
    shape = 1 + nq + nk, ENTRY
    if nq + nk == 0:
        return torch.zeros(shape, dtype=torch.int32, device=k_offsets.device)
    if k_offsets.device.type == "cpu":
        return _in_torch(q_offsets, k_offsets, nq, nk, max_q, causal, window)
    return _on_device(q_offsets, k_offsets, total_q, total_k, nq, nk, max_q, max_k, causal, window)


def _on_device(
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    total_q: int,
    total_k: int,
    nq: int,
    nk: int,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    samples = k_offsets.numel() - 1
    unsorted, out = (torch.empty(1 + nq + nk, ENTRY, dtype=torch.int32, device=k_offsets.device) for _ in range(2))
    tiles_kernel[(triton.cdiv(samples, _SAMPLES), 2)](
        k_offsets if q_offsets is None else q_offsets, k_offsets, unsorted, samples, total_q, total_k, max_q, max_k, nq,
        nk, window or 0,
        BROADCAST=q_offsets is None, CAUSAL=causal, WINDOW=window is not None, SIZE=TILE, SAMPLES=_SAMPLES,
        ENTRY=ENTRY, num_warps=4,
    )  # fmt: skip
    rank_kernel[(triton.cdiv(max(nq, nk), _RANKS), 2)](
        unsorted, out, nq, nk, RANKS=_RANKS, CHUNK=_CHUNK, ENTRY=ENTRY, num_warps=8
    )
    return out


def _in_torch(
    q_offsets: Tensor | None, k_offsets: Tensor, nq: int, nk: int, max_q: int, causal: bool, window: int | None
) -> Tensor:
    """The same on the CPU."""
    sample = torch.arange(k_offsets.numel() - 1)
    k0, lk = k_offsets[:-1].long(), k_offsets.diff().long()
    q0, lq = (
        (sample * max_q, torch.full_like(sample, max_q))
        if q_offsets is None
        else (q_offsets[:-1].long(), q_offsets.diff().long())
    )
    counts, lists = [], []
    for keys, length, most in ((False, lq, nq), (True, lk, nk)):
        tiles = -(-length // TILE)
        of = sample.repeat_interleave(tiles)
        first = (torch.arange(of.numel()) - (tiles.cumsum(0) - tiles)[of]) * TILE
        last = torch.minimum(first + TILE, length[of])
        work = _work(first, last, (lk - lq)[of], (lq if keys else lk)[of], keys, causal, window)
        ranked_by = work
        if window is not None:
            ranked_by = (lq if keys else lk)[of].clamp(max=(1 if causal else 2) * window + TILE)
        order = torch.sort(ranked_by, descending=True, stable=True).indices
        columns = (first, q0[of], lq[of], k0[of], lk[of], of, work, ranked_by)
        entries = torch.full((most, ENTRY), -1, dtype=torch.int32)
        entries[: of.numel()] = torch.stack(columns, dim=1)[order].int()
        counts.append(of.numel())
        lists.append(entries)
    return torch.cat((torch.tensor([[*counts, *[0] * (ENTRY - 2)]], dtype=torch.int32), *lists))


def _work(
    first: Tensor, last: Tensor, shift: Tensor, length: Tensor, keys: bool, causal: bool, window: int | None
) -> Tensor:
    """`_tiles.queries_seeing` if `keys`, else `_tiles.keys_seen`, of many tiles: how many of `length` rows."""
    lo, hi = torch.zeros_like(length), length
    begin, end = (first - shift, last - shift) if keys else (first + shift, last + shift)
    if window is not None or (causal and keys):
        lo = (begin - (0 if causal and keys else window or 0)).clamp(min=0)
    if window is not None or (causal and not keys):
        hi = torch.minimum(length, end + (0 if causal and not keys else window or 0))
    return (hi - lo).clamp(min=0)
