"""Generalized attention, forward, of many queries over few keys: a sample's K and V stay, its queries pass by.

    O = act(pre_scale * Q K^T) V * post_scale        at most 128 keys a sample, all of them seen

`gdpa` reads a sample's K and V again for every tile of 128 queries, and begins anew: launch, schedule and first loads
cost as much as a few blocks of keys. Here a program takes up to RUN tiles of the schedule that follow one another. It
loads K and V once a sample, in one or two blocks that are zero below the sample's end and so need no mask, and walks
over tiles of queries, the next of which is on its way meanwhile. It reads `2 H D` bytes a query, writes `2 H E`, and
reads `2 H (D + E)` a key once in RUN tiles.

With 129 to 256 keys, in blocks of 128, it lost on an H200: 348 TFLOP/s against 399 of `gdpa` for 2048 queries on 256
keys. With fewer neither was timed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from ._pointwise import weight
from ._products import add_product, product, rounded
from ._tiles import load_rows, load_some_rows, read_entry, store_some_rows
from .jagged_launch import Config, Operand, processors

MOST_KEYS = 128
_RUN = 8


@triton.jit
def add_block(out, q, kt, v, scale, KIND: tl.constexpr, FOLD: tl.constexpr):
    """Add a block of keys, kt transposed, of which those past the sample's end are zero."""
    x = product(q, kt, "tf32")
    if FOLD:
        p = weight(x, scale, KIND)
    else:
        p = weight(x * scale, 1.0, KIND)
    return add_product(rounded(p, v.dtype), v, out, "tf32")


@triton.jit
def tiles_in_a_row(schedule_ptr, at, end, first, q0, ROWS: tl.constexpr, RUN: tl.constexpr):
    """How many entries from `at` on, `end` excluded, are tiles of one sample that follow one another."""
    step = tl.arange(0, RUN)
    entry = schedule_ptr + (1 + at + step) * 8
    inside = at + step < end
    next_first = tl.load(entry, mask=inside, other=-1)
    next_q0 = tl.load(entry + 1, mask=inside, other=-1)
    follows = inside & (next_first == first + step * ROWS) & (next_q0 == q0)
    return tl.min(tl.where(follows, RUN, step), 0)


@kernel(do_not_specialize=["H", "GROUP", "QS8", "KS8", "VS8", "entries"])
def gdpa_short_kernel(
    q_desc, q_ptr, k_ptr, v_ptr, out_ptr, schedule_ptr, entries, H, GROUP, QS8, KS8, VS8, scale, out_scale,
    KIND: tl.constexpr, BROADCAST: tl.constexpr, FOLD: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """RUN entries of the schedule's tiles of queries, for one head; one or two blocks (BLOCKS) of BN keys a sample."""
    head = tl.program_id(0) % H
    shared = head // GROUP
    at = tl.program_id(0) // H * RUN
    end = tl.minimum(tl.minimum(at + RUN, entries), tl.load(schedule_ptr))
    while at < end:
        first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, 1 + at)
        tiles = tiles_in_a_row(schedule_ptr, at, end, first, q0, BM, RUN)
        k_0 = tl.trans(load_some_rows(k_ptr, k0, Lk, KS8, shared, BN, D))
        v_0 = load_some_rows(v_ptr, k0, Lk, VS8, shared, BN, E)
        if BLOCKS > 1:
            k_1 = tl.trans(load_some_rows(k_ptr, k0 + BN, Lk - BN, KS8, shared, BN, D))
            v_1 = load_some_rows(v_ptr, k0 + BN, Lk - BN, VS8, shared, BN, E)
        for i in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
            row = first + i * BM
            own = row if BROADCAST else q0 + row
            if TMA:
                q = load_rows(q_desc, q_ptr, own, QS8, head, BM, D, True)
            else:
                q = load_some_rows(q_ptr, own, Lq - row, QS8, head, BM, D)
            out = add_block(tl.zeros((BM, E), tl.float32), q, k_0, v_0, scale, KIND, FOLD)
            if BLOCKS > 1:  # noqa: SIM102 - known when this is compiled, the rest is not
                if Lk > BN:
                    out = add_block(out, q, k_1, v_1, scale, KIND, FOLD)
            store_some_rows(out_ptr, out * out_scale, q0 + row, Lq - row, H, head, BM, E)
        at += tiles


CONFIG = Config(rows=128, block=64, warps=8, stages=2)
"""Two warpgroups have a multiprocessor for themselves, and 3 barriers a tile to wait for each other; a warpgroup alone,
two programs of which would fit for 64 keys, does not hold all its addresses.
"""


def run_of(entries: int, heads: int, device: int | None) -> int:
    """Tiles a program takes, a power of two: as many as leave two programs for each multiprocessor."""
    run = min(_RUN, max(1, entries * heads // (2 * processors(device)[0])))
    return 1 << (run.bit_length() - 1)


def forward(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Tensor,
    schedule: Tensor,
    entries: int,
    max_k: int,
    scale: float,
    out_scale: float,
    *,
    activation: str,
    broadcast_q: bool,
    fold: bool,
) -> None:
    """Fill `out` (Tq, H, E); arguments as `gdpa.forward` has them when it calls this."""
    heads = q.x.shape[1]
    tma = processors(q.x.device.index)[1] and q.x.numel() > 0
    run = run_of(entries, heads, q.x.device.index)
    gdpa_short_kernel[(triton.cdiv(entries, run) * heads,)](
        q.boxes(CONFIG.rows, tma), q.x, k.x, v.x, out, schedule, entries, heads, heads // k.x.shape[1], q.stride8,
        k.stride8, v.stride8, scale, out_scale, KIND=activation, BROADCAST=broadcast_q, FOLD=fold,
        BLOCKS=triton.cdiv(max_k, CONFIG.block), RUN=run, BM=CONFIG.rows, BN=CONFIG.block, D=q.x.shape[2],
        E=v.x.shape[2], TMA=tma, STAGES=CONFIG.stages, num_warps=CONFIG.warps, enable_fp_fusion=True,
    )  # fmt: skip
