"""Jagged flash attention, backward: S and P again from Q, K and lse, one kernel for dQ, one for dK and dV.

    P = exp(S - lse)      dP = dO V^T      delta = rowsum(dO * O)      dS = P * (dP - delta)
    dQ = scale * dS K     dK = scale * dS^T Q      dV = P^T dO         dtable = sum of dS over the pairs of a bucket

The first kernel keeps a tile of queries, walks over their keys, and writes lse and delta (fp32, 8 bytes a row and
head) beside dQ; the second keeps a tile of keys and walks over the queries that see them, of every head that shares
the keys. Each sum lives in registers and has one order: no atomics, the same bits every time, for two products more
than one kernel that adds up dQ in memory. delta in fp32 stands for rowsum(P * dP), to which it is equal in exact
arithmetic.
The gradients of tables are summed by `jagged_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..jit import kernel
from . import jagged_hopper
from ._products import add_product, product, rounded
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
    queries_seeing,
    read_entry,
    score_bias,
    scores,
    stats_row,
    store_some_rows,
    turns_of,
    units_in,
    visible,
)
from .bias import JaggedBias
from .jagged_configs import dkdv_config, dq_config
from .jagged_launch import SCALARS, Config, Operand, Problem, problem_of, widened
from .jagged_tables import Tables, add_to_tables


@triton.jit
def dq_step(
    dq, q, do, k, v, t, s, lse2, delta, first_key, Lq, Lk, q_time, k_times_ptr, k0, masked, scale_log2, window,
    position_ptr, time_ptr, bounds_ptr, dposition_ptr, dtime_ptr, unit, head, H, P, N,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
    FOLD: tl.constexpr, TABLES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block's part to dq."""
    x = scores(
        q, k, t, s, first_key, Lk, q_time, k_times_ptr, k0, masked, scale_log2, window, position_ptr, time_ptr,
        bounds_ptr, head, H, P, N, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD, PRECISION,
    )  # fmt: skip
    dp = product(do, tl.trans(v), PRECISION)
    if FOLD:
        p = tl.exp2(x * scale_log2 - lse2[:, None])
    else:
        p = tl.exp2(x - lse2[:, None])
    ds = p * (dp - delta[:, None])
    if TABLES:
        k_time = s
        if TIME:
            k_time = tl.load(k_times_ptr + k0.to(tl.int64) + s, mask=(s >= 0) & (s < Lk), other=0)
        seen = (t < Lk)[:, None] & ((s >= first_key) & (s < Lk))[None, :]
        add_to_tables(
            ds, t, s, seen & visible(t[:, None], s[None, :], window, CAUSAL, WINDOW), q_time, k_time, unit,
            dposition_ptr, dtime_ptr, bounds_ptr, head, H, P, N, POSITION, TIME, STEPS, BM, BN,
        )  # fmt: skip
    return add_product(rounded(ds, DTYPE), k, dq, PRECISION)


@kernel(do_not_specialize=[*SCALARS, "GS8", "OS8", "TS", "LAST_AT"])
def dq_kernel(
    k_desc, v_desc, q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, lse_ptr, stats_ptr, dq_ptr, schedule_ptr,
    ENTRIES, position_ptr, time_ptr, q_times_ptr, k_times_ptr, bounds_ptr, dposition_ptr, dtime_ptr, unit_ptr,
    H, GROUP, QS8, KS8, VS8, GS8, OS8, TS, LAST_AT, scale, scale_log2, window, P, N,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
    FOLD: tl.constexpr, QUERIES: tl.constexpr, TABLES: tl.constexpr, LAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Of all tiles of queries: what `load_stats` reads, dQ if QUERIES, sums for the tables' gradients if TABLES."""
    units = units_in(schedule_ptr, ENTRIES, H * SUB, PERSISTENT)
    for turn in tl.range(turns_of(units, PERSISTENT), disable_licm=True):
        rank = deal(turn)
        first, q0, Lq, k0, Lk, sample = read_entry(schedule_ptr, 1 + tl.minimum(rank, units - 1) // (H * SUB))
        first += rank % (H * SUB) // H * BM
        if (rank < units) & (first < Lq):
            head = rank % H
            shared = head // GROUP
            shift = Lk - Lq
            t = anchored(first + shift) + tl.arange(0, BM)
            row = anchored(first) - first + tl.arange(0, BM)
            at = (q0 + first).to(tl.int64) * H + head
            # Plain loads are in flight together, where each of TMA's outside of a loop is waited for.
            o = load_some_rows(o_ptr, q0 + first, Lq - first, OS8, head, BM, E)
            do = load_some_rows(do_ptr, q0 + first, Lq - first, GS8, head, BM, E)
            if QUERIES or TABLES:
                q = load_some_rows(q_ptr, q0 + first, Lq - first, QS8, head, BM, D)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            lse2 = tl.load(lse_ptr + at + row * H, mask=row < Lq - first, other=float("inf")) * LOG2E
            stat = stats_ptr + head.to(tl.int64) * TS
            own = stat + stats_row(q0, sample) + first + row
            tl.store(own, lse2, mask=row < Lq - first)
            tl.store(own + tl.cast(H, tl.int64) * TS, delta, mask=row < Lq - first)
            last_row = first + row - (Lq - LAST)
            again = stat + LAST_AT + sample * LAST + last_row
            is_last = (last_row >= 0) & (last_row < LAST)
            taken = first + row < (Lq - 1) // LAST * LAST
            tl.store(again, tl.where(taken, float("inf"), lse2), mask=is_last)
            tl.store(again + tl.cast(H, tl.int64) * TS, delta, mask=is_last)
            if QUERIES or TABLES:
                q_time = t
                unit = 1.0
                if TIME:
                    q_time = tl.load(q_times_ptr + (q0 + first).to(tl.int64) + row, mask=row < Lq - first, other=0)
                if TABLES:
                    unit = tl.load(unit_ptr)
                dq = tl.zeros((BM, D), tl.float32)
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
                        dq = dq_step(
                            dq, q, do, k, v, t, start + tl.arange(0, BN), lse2, delta, block * BN, Lq, Lk, q_time,
                            k_times_ptr, k0, masked, scale_log2, window, position_ptr, time_ptr, bounds_ptr,
                            dposition_ptr, dtime_ptr, unit, head, H, P, N, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD,
                            TABLES, BM, BN, DTYPE, PRECISION,
                        )  # fmt: skip
                else:
                    for start in tl.range(lo // SHORT * SHORT, hi, SHORT, num_stages=1, disable_licm=True):
                        k = load_some_rows(k_ptr, k0 + start, Lk - start, KS8, shared, SHORT, D)
                        v = load_some_rows(v_ptr, k0 + start, Lk - start, VS8, shared, SHORT, E)
                        dq = dq_step(
                            dq, q, do, k, v, t, start + tl.arange(0, SHORT), lse2, delta, 0, Lq, Lk, q_time,
                            k_times_ptr, k0, True, scale_log2, window, position_ptr, time_ptr, bounds_ptr,
                            dposition_ptr, dtime_ptr, unit, head, H, P, N, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD,
                            TABLES, BM, SHORT, DTYPE, PRECISION,
                        )  # fmt: skip
                if QUERIES:
                    first, q0, Lq, _, _, _ = read_entry(schedule_ptr, 1 + anchored(rank) // (H * SUB))  # not kept
                    first += rank % (H * SUB) // H * BM
                    store_some_rows(dq_ptr, dq * scale, q0 + first, Lq - first, H, head, BM, D)


@triton.jit
def dkdv_step(
    dk, dv, q, do, k, v, t, s, lse2, delta, k_time, q_times_ptr, q0, Lq, Lk, masked, scale_log2, window,
    position_ptr, time_ptr, bounds_ptr, head, H, P, N,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
    FOLD: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of queries; those whose lse2 is +inf take no part."""
    x = product(k, tl.trans(q), PRECISION)
    if not FOLD:
        x = x * scale_log2
    if POSITION or TIME:
        q_time = t
        if TIME:
            i = t + Lq - Lk
            q_time = tl.load(q_times_ptr + q0.to(tl.int64) + i, mask=(i >= 0) & (i < Lq), other=0)
        x += LOG2E * score_bias(
            t[None, :], s[:, None], q_time[None, :], k_time[:, None], position_ptr, time_ptr, bounds_ptr, head, H, P, N,
            POSITION, TIME, STEPS,
        )  # fmt: skip
    if CAUSAL or WINDOW:  # noqa: SIM102 (one is known at compile time)
        if masked:
            x = tl.where(visible(t[None, :], s[:, None], window, CAUSAL, WINDOW), x, -float("inf"))
    if FOLD:
        p = tl.exp2(x * scale_log2 - lse2[None, :])
    else:
        p = tl.exp2(x - lse2[None, :])
    dv = add_product(rounded(p, DTYPE), do, dv, PRECISION)
    dp = product(v, tl.trans(do), PRECISION)
    ds = p * (dp - delta[None, :])
    dk = add_product(rounded(ds, DTYPE), q, dk, PRECISION)
    return dk, dv


@triton.jit
def load_stats(desc, ptr, line, at, TS, ROWS: tl.constexpr, TMA: tl.constexpr):
    """(ROWS,) of a line of (2 H, TS) fp32, `at` a multiple of 4."""
    if TMA:
        x = tl.reshape(desc.load([line, at]), (ROWS,))
    else:
        x = tl.load(ptr + line.to(tl.int64) * TS + at + tl.arange(0, ROWS))
    return x


@triton.jit
def member_of(step, shared, begin, blocks, GROUP: tl.constexpr):
    """Head and block of a step over the blocks of every head that shares keys: one loop, which stays pipelined."""
    if GROUP == 1:
        head = shared
        block = begin + step
    else:
        head = shared * GROUP + step // blocks
        block = begin + step % blocks
    return head, block


@kernel(do_not_specialize=["ENTRIES", "H", "QS8", "KS8", "VS8", "GS8", "TS", "LAST_AT", "skipped", "window", "P", "N"])
def dkdv_kernel(
    q_desc, do_desc, stats_desc, q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, schedule_ptr,
    ENTRIES, skipped, position_ptr, time_ptr, q_times_ptr, k_times_ptr, bounds_ptr, H, QS8, KS8, VS8, GS8, TS, LAST_AT,
    scale, scale_log2, window, P, N,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
    FOLD: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SUB: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Of tiles of BM keys dK and dV, over blocks of BN queries; the tiles of keys follow `skipped` rows."""
    heads = H // GROUP
    units = units_in(schedule_ptr + 1, ENTRIES, heads * SUB, PERSISTENT)
    for turn in tl.range(turns_of(units, PERSISTENT), disable_licm=True):
        rank = deal(turn)
        entry = skipped + tl.minimum(rank, units - 1) // (heads * SUB)
        first, q0, Lq, k0, Lk, sample = read_entry(schedule_ptr, entry)
        first += rank % (heads * SUB) // heads * BM
        if (rank < units) & (first < Lk):
            shared = rank % heads
            shift = Lk - Lq
            k = load_some_rows(k_ptr, k0 + first, Lk - first, KS8, shared, BM, D)
            v = load_some_rows(v_ptr, k0 + first, Lk - first, VS8, shared, BM, E)
            s = anchored(first) + tl.arange(0, BM)
            k_time = s
            if TIME:
                k_time = tl.load(k_times_ptr + k0.to(tl.int64) + s, mask=s < Lk, other=0)
            dk = tl.zeros((BM, D), tl.float32)
            dv = tl.zeros((BM, E), tl.float32)
            last = tl.minimum(first + BM, Lk)
            lo, hi = queries_seeing(first, last, shift, Lq, window, CAUSAL, WINDOW)
            begin = lo // BN
            blocks = tl.maximum(tl.cdiv(tl.maximum(hi, 0), BN) - begin, 0)
            if Lq >= BN:
                for step in tl.range(GROUP * blocks, num_stages=STAGES):
                    head, block = member_of(step, shared, begin, blocks, GROUP)
                    start = block_start(block, Lq, BN)
                    q = load_rows(q_desc, q_ptr, q0 + start, QS8, head, BN, D, TMA)
                    do = load_rows(do_desc, do_ptr, q0 + start, GS8, head, BN, E, TMA)
                    at = stats_row(q0, sample) + start
                    if start < block * BN:
                        at = LAST_AT + sample * BN
                    lse2 = load_stats(stats_desc, stats_ptr, head, at, TS, BN, TMA)
                    delta = load_stats(stats_desc, stats_ptr, H + head, at, TS, BN, TMA)
                    masked = True
                    if CAUSAL or WINDOW:
                        masked = not all_visible(start, start + BN, first, last, shift, window, CAUSAL, WINDOW)
                    dk, dv = dkdv_step(
                        dk, dv, q, do, k, v, start + shift + tl.arange(0, BN), s, lse2, delta, k_time, q_times_ptr, q0,
                        Lq, Lk, masked, scale_log2, window, position_ptr, time_ptr, bounds_ptr, head, H, P, N,
                        CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD, DTYPE, PRECISION,
                    )  # fmt: skip
            else:
                begin = lo // SHORT
                blocks = tl.maximum(tl.cdiv(tl.maximum(hi, 0), SHORT) - begin, 0)
                for step in tl.range(GROUP * blocks, num_stages=1, disable_licm=True):
                    head, block = member_of(step, shared, begin, blocks, GROUP)
                    start = block * SHORT
                    i = start + tl.arange(0, SHORT)
                    q = load_some_rows(q_ptr, q0 + start, Lq - start, QS8, head, SHORT, D)
                    do = load_some_rows(do_ptr, q0 + start, Lq - start, GS8, head, SHORT, E)
                    stat = stats_ptr + head.to(tl.int64) * TS + stats_row(q0, sample) + i
                    lse2 = tl.load(stat, mask=i < Lq, other=float("inf"))
                    delta = tl.load(stat + tl.cast(H, tl.int64) * TS, mask=i < Lq, other=0.0)
                    dk, dv = dkdv_step(
                        dk, dv, q, do, k, v, i + shift, s, lse2, delta, k_time, q_times_ptr, q0, Lq, Lk, True,
                        scale_log2, window, position_ptr, time_ptr, bounds_ptr, head, H, P, N,
                        CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD, DTYPE, PRECISION,
                    )  # fmt: skip
            first, _, _, k0, Lk, _ = read_entry(schedule_ptr, skipped + anchored(rank) // (heads * SUB))  # not kept
            first += rank % (heads * SUB) // heads * BM
            store_some_rows(dk_ptr, dk * scale, k0 + first, Lk - first, heads, shared, BM, D)
            store_some_rows(dv_ptr, dv, k0 + first, Lk - first, heads, shared, BM, E)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
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
    wanted: str = "qkvb",
    configs: tuple[Config, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `jagged.forward`: `jagged_reference.jagged_backward` on the GPU.

    Args:
        grad_out: (Tq, H, E), any strides. out, lse: as the forward gave them.
        configs: launches for dQ and for dK, dV other than `dq_config`'s and `dkdv_config`'s.
        The rest is as for the forward.

    Returns:
        `(dq, dk, dv, dposition, dtime)` as the reference; empty (0,) for what is not wanted or absent. The same bits
        every time, tables included.

    Raises:
        TypeError, ValueError: as `jagged.problem_of`.
    """
    nothing, dim, value_dim = q.new_empty(0), q.shape[2], v.shape[2]
    options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window}
    problem = problem_of(
        widened(q), widened(k), widened(v), q_offsets, k_offsets, max_q, max_k, bias, schedule, **options
    )
    do, o = Operand.of(widened(grad_out)), Operand.of(widened(out))
    tables = "b" in wanted and problem.has_bias
    configs = configs or (dq_config(problem), dkdv_config(problem))
    stats = Stats.of(problem, problem.samples, configs[1].block)
    dq = _like(problem.q) if "q" in wanted else nothing
    tables_of = Tables.of(bias, do.x, problem.v.x, max_k) if tables and bias is not None else Tables()
    if q.numel():
        _launch_dq(problem, do, o, lse, stats, dq, tables_of, configs[0])
    dk = dv = nothing
    if "k" in wanted or "v" in wanted:
        dk, dv = _like(problem.k), _like(problem.v)
        if k.numel() and q.numel():
            _launch_dkdv(problem, do, stats, dk, dv, configs[1])
        elif k.numel():
            dk, dv = dk.zero_(), dv.zero_()
    grads = [_narrowed(x, w) for x, w in ((dq, dim), (dk, dim), (dv, value_dim))]
    picked = [x if name in wanted else nothing for name, x in zip("qkv", grads)]
    return picked[0], picked[1], picked[2], *tables_of.gradients(q.device)


@dataclass(frozen=True)
class Stats:
    """Base-2 lse and delta of every row as dK, dV reads them, (2 H, S) fp32; see `stats_row`.

    TMA begins a row of them on 16 bytes, and a block that slid back begins anywhere. So the last `block` rows of every
    sample lie there once more, from `last_at` on, with lse = +inf for those that an earlier block takes.
    """

    x: Tensor
    last_at: int
    block: int

    @classmethod
    def of(cls, problem: Problem, samples: int, block: int) -> Stats:
        """Not filled yet."""
        total, heads = problem.q.x.shape[:2]
        last_at = (total // 4 + samples) * 4
        x = torch.empty(2 * heads, last_at + samples * block, dtype=torch.float32, device=problem.q.x.device)
        return cls(x, last_at, block)

    def boxes(self, tma: bool) -> Any:
        """A descriptor in boxes of a block of one line, or the tensor itself."""
        return TensorDescriptor(self.x, list(self.x.shape), [self.x.stride(0), 1], [1, self.block]) if tma else self.x


def _like(operand: Operand) -> Tensor:
    return torch.empty(operand.x.shape, dtype=operand.x.dtype, device=operand.x.device)


def _narrowed(x: Tensor, width: int) -> Tensor:
    return x if x.ndim < 3 or x.shape[2] == width else x[..., :width].contiguous()


def _launch_dq(
    problem: Problem, do: Operand, o: Operand, lse: Tensor, stats: Stats, dq: Tensor, tables: Tables, config: Config
) -> None:
    q, k, v, tma = problem.q, problem.k, problem.v, problem.tma
    if config.gluon:
        return jagged_hopper.dq(problem, do, o, lse, stats, dq, config)
    heads, unread = q.x.shape[1], lse
    sums = [unread if x is None else x for x in (tables.position, tables.time, tables.unit)]
    dq_kernel[(config.programs(problem.entries[0], heads, q.x.device.index),)](
        k.boxes(config.block, tma), v.boxes(config.block, tma), q.x, k.x, v.x, do.x, o.x, lse, stats.x,
        dq if dq.numel() else q.x, problem.schedule, problem.entries[0], *problem.bias, *sums, heads, problem.groups,
        q.stride8, k.stride8, v.stride8, do.stride8, o.stride8, stats.x.stride(0), stats.last_at, problem.scale,
        problem.scale * LOG2E.value, problem.window or 0, *problem.sizes, **problem.constants,
        QUERIES=dq.numel() > 0, TABLES=tables.unit is not None, LAST=stats.block, **config.launch,
    )  # fmt: skip


def _launch_dkdv(problem: Problem, do: Operand, stats: Stats, dk: Tensor, dv: Tensor, config: Config) -> None:
    if config.gluon:
        return jagged_hopper.dkdv(problem, do, stats, dk, dv, config)
    q, k, v, tma = problem.q, problem.k, problem.v, problem.tma
    dkdv_kernel[(config.programs(problem.entries[1], k.x.shape[1], q.x.device.index),)](
        q.boxes(config.block, tma), do.boxes(config.block, tma), stats.boxes(tma), q.x, k.x, v.x, do.x, stats.x, dk, dv,
        problem.schedule, problem.entries[1], 1 + problem.entries[0], *problem.bias, q.x.shape[1], q.stride8,
        k.stride8, v.stride8, do.stride8, stats.x.stride(0), stats.last_at, problem.scale,
        problem.scale * LOG2E.value, problem.window or 0, *problem.sizes, **problem.constants, GROUP=problem.groups,
        **config.launch,
    )  # fmt: skip
