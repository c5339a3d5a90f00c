"""Jagged flash attention, forward: softmax over the keys of a sample, for every query of it, in one pass.

    S = scale * Q K^T + bias        O = softmax(S) V        lse = log(sum(exp(S)))

A program takes a tile of queries and a head and walks over the blocks of keys that the tile sees; maximum, sum and O
are corrected as the maximum grows, exponentials are of base 2 with the scale folded in. It reads Q once and K, V once
a tile, and writes O and one fp32 a row: `2 H (D + E) (1 + L / BM) + 4 H` bytes a token for L keys in bf16, from the L2
cache but for the first tile of a sample. P goes to the second product from registers.

Only a block that some query of the tile does not see whole is masked: the sample's last, which slides back over keys
already taken (`_tiles`), and those that the causal diagonal or an edge of the window crosses. Blocks outside of the
window are not visited. A query that sees no key gives 0, lse +inf. The alternative for a last block, keys of zero
whose known exponentials are subtracted from the row sum, would lose all bits where true scores lie far below 0; here
nothing is added that would have to be subtracted. Method: FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from . import jagged_hopper
from ._products import add_product, rounded
from ._tiles import (
    LOG2E,
    SHORT,
    all_visible,
    anchored,
    block_start,
    deal,
    keys_seen,
    load_rows,
    load_some_rows,
    read_entry,
    scores,
    store_some_rows,
    turns_of,
    units_in,
)
from .bias import JaggedBias
from .jagged_backward import backward
from .jagged_configs import forward_config
from .jagged_launch import SCALARS, Config, Problem, problem_of, widened

__all__ = ["backward", "forward"]

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(
    out, peak, total, x, v, scale_log2, GUARD: tl.constexpr, FOLD: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a block's scores into the sums. GUARD: a row may see nothing of this block and of those before it."""
    highest = tl.max(x, 1)
    if FOLD:
        highest = highest * scale_log2
    highest = tl.maximum(peak, highest)
    base = highest
    if GUARD:
        base = tl.where(highest == -float("inf"), 0.0, highest)
    if FOLD:
        p = tl.exp2(x * scale_log2 - base[:, None])
    else:
        p = tl.exp2(x - base[:, None])
    correction = tl.exp2(peak - base)
    total = total * correction + tl.sum(p, 1)
    out = add_product(rounded(p, DTYPE), v, out * correction[:, None], PRECISION)
    return out, highest, total


@kernel(do_not_specialize=SCALARS)
def forward_kernel(
    q_desc, k_desc, v_desc, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, schedule_ptr, ENTRIES,
    position_ptr, time_ptr, q_times_ptr, k_times_ptr, bounds_ptr, H, GROUP, QS8, KS8, VS8, scale_log2, window, P, N,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
    FOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TMA: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """All units of the schedule's tiles of queries; SUB tiles of BM queries an entry.

    q_desc, k_desc, v_desc: descriptors of the same tensors as (rows, heads * width) if TMA. QS8, KS8, VS8: elements
    from a row to the next, over 8. GROUP: heads of q that share one of k and v.
    """
    units = units_in(schedule_ptr, ENTRIES, H * SUB, PERSISTENT)
    for turn in tl.range(turns_of(units, PERSISTENT), disable_licm=True):
        rank = deal(turn)
        first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, 1 + tl.minimum(rank, units - 1) // (H * SUB))
        first += rank % (H * SUB) // H * BM
        if (rank < units) & (first < Lq):
            head = rank % H
            shared = head // GROUP
            if TMA:
                q = load_rows(q_desc, q_ptr, q0 + first, QS8, head, BM, D, True)
            else:
                q = load_some_rows(q_ptr, q0 + first, Lq - first, QS8, head, BM, D)
            shift = Lk - Lq
            t = anchored(first + shift) + tl.arange(0, BM)
            q_time = t
            if TIME:
                at = (q0 + first).to(tl.int64) + tl.arange(0, BM)
                q_time = tl.load(q_times_ptr + at, mask=t < Lk, other=0)
            out = tl.zeros((BM, E), tl.float32)
            peak = tl.full((BM,), -float("inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
            last = tl.minimum(first + BM, Lq)
            lo, hi = keys_seen(first, last, shift, Lk, window, CAUSAL, WINDOW)
            if Lk >= BN:
                for block in tl.range(lo // BN, tl.cdiv(tl.maximum(hi, 0), BN), num_stages=STAGES):
                    start = block_start(block, Lk, BN)
                    k = load_rows(k_desc, k_ptr, k0 + start, KS8, shared, BN, D, TMA)
                    v = load_rows(v_desc, v_ptr, k0 + start, VS8, shared, BN, E, TMA)
                    masked = start < block * BN
                    if CAUSAL or WINDOW:
                        masked |= not all_visible(first, last, start, start + BN, shift, window, CAUSAL, WINDOW)
                    x = scores(
                        q, k, t, start + tl.arange(0, BN), block * BN, Lk, q_time, k_times_ptr, k0, masked, scale_log2,
                        window, position_ptr, time_ptr, bounds_ptr, head, H, P, N, CAUSAL, WINDOW, POSITION, TIME,
                        STEPS, FOLD, PRECISION,
                    )  # fmt: skip
                    out, peak, total = softmax_step(
                        out, peak, total, x, v, scale_log2, CAUSAL or WINDOW, FOLD, DTYPE, PRECISION
                    )
            else:
                for start in tl.range(lo // SHORT * SHORT, hi, SHORT, num_stages=1, disable_licm=True):
                    k = load_some_rows(k_ptr, k0 + start, Lk - start, KS8, shared, SHORT, D)
                    v = load_some_rows(v_ptr, k0 + start, Lk - start, VS8, shared, SHORT, E)
                    x = scores(
                        q, k, t, start + tl.arange(0, SHORT), 0, Lk, q_time, k_times_ptr, k0, True, scale_log2, window,
                        position_ptr, time_ptr, bounds_ptr, head, H, P, N, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD,
                        PRECISION,
                    )  # fmt: skip
                    out, peak, total = softmax_step(
                        out, peak, total, x, v, scale_log2, CAUSAL or WINDOW, FOLD, DTYPE, PRECISION
                    )
            some = total > 0.0
            out = out * tl.where(some | (total != total), 1.0 / total, 0.0)[:, None]
            lse = tl.where(some | (total != total), peak * LN2 + tl.log(total), float("inf"))
            first, q0, Lq, _, _, _ = read_entry(schedule_ptr, 1 + anchored(rank) // (H * SUB))  # not kept in registers
            first += rank % (H * SUB) // H * BM
            store_some_rows(out_ptr, out, q0 + first, Lq - first, H, head, BM, E)
            row = tl.arange(0, BM)
            at = lse_ptr + (q0 + first).to(tl.int64) * H + head
            tl.store(at + row * H, lse, mask=row < Lq - first)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """`jagged_reference.jagged_forward` on the GPU.

    Args:
        q, k, v: bf16, fp16 or fp32 of one dtype, any strides: what TMA cannot read is copied. Heads up to 256 wide;
            widths other than 16, 32, 64, 128 and 256 are padded in a copy.
        schedule: of `schedule.build` for this batch, or None: made here, in two launches more.
        config: a launch other than `forward_config`'s.
        The rest is as in the reference. No synchronization; a CUDA graph may hold it.

    Returns:
        out (Tq, H, E) in the dtype of q, lse (Tq, H) fp32. The same bits every time.

    Raises:
        TypeError, ValueError: as `problem_of`.
    """
    value_dim = v.shape[2]
    options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window}
    problem = problem_of(
        widened(q), widened(k), widened(v), q_offsets, k_offsets, max_q, max_k, bias, schedule, **options
    )
    wide = problem.v.x.shape[2]
    out = torch.empty(*q.shape[:2], wide, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        _launch(problem, out, lse, config or forward_config(problem))
    return out if wide == value_dim else out[..., :value_dim].contiguous(), lse


def _launch(problem: Problem, out: Tensor, lse: Tensor, config: Config) -> None:
    if config.gluon:
        return jagged_hopper.forward(problem, out, lse, config)
    q, k, v = problem.q, problem.k, problem.v
    heads, tma = q.x.shape[1], problem.tma
    forward_kernel[(config.programs(problem.entries[0], heads, q.x.device.index),)](
        q.boxes(config.rows, tma), k.boxes(config.block, tma), v.boxes(config.block, tma), q.x, k.x, v.x, out, lse,
        problem.schedule, problem.entries[0], *problem.bias, heads, problem.groups, q.stride8, k.stride8, v.stride8,
        problem.scale * LOG2E.value, problem.window or 0, *problem.sizes, **problem.constants, **config.launch,
    )  # fmt: skip
