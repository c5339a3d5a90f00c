"""Generalized attention, backward: scores again from Q and K, one kernel for dQ, one for dK and dV.

    S = pre_scale * Q K^T + bias       W = act(S)       dS = act'(S) * (dO V^T) * post_scale
    dQ = pre_scale * dS K      dK = pre_scale * dS^T Q      dV = post_scale * W^T dO      dtable = sums of dS

On Hopper `gdpa_hopper` has a kernel for either, for what is neither masked nor biased and has heads of 128.

The first kernel keeps a tile of queries and its dO, and walks over their keys; the second keeps a tile of keys and
walks over the queries that see them. No statistics of a row pass between forward and backward, nor between the two:
both read Q, K, V and dO and nothing else. Each sum lives in registers and has one order: no atomics in floating point,
the same bits every time, for two products more than one kernel that adds up dQ in memory. Scales are applied once, to
the sums.

A row of dO or V that is filled with zeros makes dS and its part of dV zero, so short samples need no mask.

Where query heads share a key head, each has its own dK and dV in fp32, and with `broadcast_q` each sample its own dQ;
one sum in a fixed order makes them one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from . import gdpa_hopper
from ._pointwise import weight_and_slope
from ._products import add_product, product, rounded
from ._tiles import (
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
    store_some_rows,
    turns_of,
    units_in,
    visible,
)
from .bias import JaggedBias
from .gdpa import Problem, biased, problem_of
from .jagged_launch import SCALARS, Config, Operand, widened
from .jagged_tables import Tables, add_to_tables


@triton.jit
def dq_step(
    dq, q, do, k, v, t, s, first_key, Lk, q_time, k_times_ptr, k0, masked, scale, window,
    position_ptr, time_ptr, bounds_ptr, dposition_ptr, dtime_ptr, unit, head, H, P, N,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    STEPS: tl.constexpr, FOLD: tl.constexpr, TABLES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add a block of keys; if `masked`, those before first_key and out of sight add nothing."""
    x = product(q, tl.trans(k), "tf32")
    dp = product(do, tl.trans(v), "tf32")
    if FOLD:
        _, slope = weight_and_slope(x, scale, KIND)
    else:
        x = biased(
            x * scale, t, s, q_time, k_times_ptr, k0, Lk, position_ptr, time_ptr, bounds_ptr, head, H, P, N,
            POSITION, TIME, STEPS,
        )  # fmt: skip
        _, slope = weight_and_slope(x, 1.0, KIND)
    ds = dp * slope
    if masked:
        seen = (s >= first_key)[None, :] & visible(t[:, None], s[None, :], window, CAUSAL, WINDOW)
        ds = tl.where(seen, ds, 0.0)
    if TABLES:
        k_time = s
        if TIME:
            k_time = tl.load(k_times_ptr + k0.to(tl.int64) + s, mask=(s >= 0) & (s < Lk), other=0)
        seen = (t < Lk)[:, None] & ((s >= first_key) & (s < Lk))[None, :]
        add_to_tables(
            ds, t, s, seen & visible(t[:, None], s[None, :], window, CAUSAL, WINDOW), q_time, k_time, unit,
            dposition_ptr, dtime_ptr, bounds_ptr, head, H, P, N, POSITION, TIME, STEPS, BM, BN,
        )  # fmt: skip
    return add_product(rounded(ds, k.dtype), k, dq, "tf32")


@kernel(do_not_specialize=[*SCALARS, "GS8", "entries"])
def gdpa_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, schedule_ptr, entries,
    position_ptr, time_ptr, q_times_ptr, k_times_ptr, bounds_ptr, dposition_ptr, dtime_ptr, unit_ptr,
    H, GROUP, QS8, KS8, VS8, GS8, scale, out_scale, window, P, N,
    KIND: tl.constexpr, BROADCAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr,
    TIME: tl.constexpr, STEPS: tl.constexpr, FOLD: tl.constexpr, QUERIES: tl.constexpr, TABLES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Of all tiles of queries: dQ if QUERIES, sums for the tables' gradients if TABLES. See `gdpa_forward_kernel`."""
    units = units_in(schedule_ptr, entries, H * SUB, PERSISTENT)
    for turn in tl.range(turns_of(units, PERSISTENT), disable_licm=True):
        rank = deal(turn)
        if rank < units:
            first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, 1 + rank // (H * SUB))
            first += rank % (H * SUB) // H * BM
            head = rank % H
            shared = head // GROUP
            own = first if BROADCAST else q0 + first
            if TMA:
                q = load_rows(q_desc, q_ptr, own, QS8, head, BM, D, True)
                do = load_rows(do_desc, do_ptr, q0 + first, GS8, head, BM, E, True)
            else:
                q = load_some_rows(q_ptr, own, Lq - first, QS8, head, BM, D)
                do = load_some_rows(do_ptr, q0 + first, Lq - first, GS8, head, BM, E)
            shift = Lk - Lq
            t = anchored(first + shift) + tl.arange(0, BM)
            q_time = t
            unit = 1.0
            if TIME:
                at = (q0 + first).to(tl.int64) + tl.arange(0, BM)
                q_time = tl.load(q_times_ptr + at, mask=t < Lk, other=0)
            if TABLES:
                unit = tl.load(unit_ptr)
            dq = tl.zeros((BM, D), tl.float32)
            last = tl.minimum(first + BM, Lq)
            lo, hi = keys_seen(first, last, shift, Lk, window, CAUSAL, WINDOW)
            if SUB > 1:
                hi = tl.where(first < Lq, hi, 0)  # the second half of a tile may be empty
            if Lk >= BN:
                for block in tl.range(lo // BN, tl.cdiv(tl.maximum(hi, 0), BN), num_stages=STAGES):
                    start = block_start(block, Lk, BN)
                    k = load_rows(k_desc, k_ptr, k0 + start, KS8, shared, BN, D, TMA)
                    v = load_rows(v_desc, v_ptr, k0 + start, VS8, shared, BN, E, TMA)
                    masked = start < block * BN
                    if CAUSAL or WINDOW:
                        masked |= not all_visible(first, last, start, start + BN, shift, window, CAUSAL, WINDOW)
                    dq = dq_step(
                        dq, q, do, k, v, t, start + tl.arange(0, BN), block * BN, Lk, q_time, k_times_ptr, k0, masked,
                        scale, window, position_ptr, time_ptr, bounds_ptr, dposition_ptr, dtime_ptr, unit, head, H, P,
                        N, KIND, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD, TABLES, BM, BN,
                    )  # fmt: skip
            else:
                for start in tl.range(lo // SHORT * SHORT, hi, SHORT, num_stages=1, disable_licm=True):
                    k = load_some_rows(k_ptr, k0 + start, Lk - start, KS8, shared, SHORT, D)
                    v = load_some_rows(v_ptr, k0 + start, Lk - start, VS8, shared, SHORT, E)
                    dq = dq_step(
                        dq, q, do, k, v, t, start + tl.arange(0, SHORT), 0, Lk, q_time, k_times_ptr, k0,
                        CAUSAL or WINDOW, scale, window, position_ptr, time_ptr, bounds_ptr, dposition_ptr, dtime_ptr,
                        unit, head, H, P, N, KIND, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD, TABLES, BM, SHORT,
                    )  # fmt: skip
            if QUERIES:
                rank = anchored(rank)
                first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, 1 + rank // (H * SUB))  # again: keeps no registers
                first += rank % (H * SUB) // H * BM
                store_some_rows(dq_ptr, dq * out_scale, q0 + first, Lq - first, H, rank % H, BM, D)


@triton.jit
def dkdv_step(
    dk, dv, q, do, k, v, t, s, first_query, k_time, q_times_ptr, q0, Lq, Lk, masked, scale, window,
    position_ptr, time_ptr, bounds_ptr, head, H, P, N,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    STEPS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Add a block of queries; if `masked`, those at positions before first_query and out of sight add nothing."""
    x = product(k, tl.trans(q), "tf32")
    dp = product(v, tl.trans(do), "tf32")
    if FOLD:
        w, slope = weight_and_slope(x, scale, KIND)
    else:
        x = x * scale
        if POSITION or TIME:
            q_time = t
            if TIME:
                i = t + Lq - Lk
                q_time = tl.load(q_times_ptr + q0.to(tl.int64) + i, mask=(i >= 0) & (i < Lq), other=0)
            x += score_bias(
                t[None, :], s[:, None], q_time[None, :], k_time[:, None], position_ptr, time_ptr, bounds_ptr, head, H,
                P, N, POSITION, TIME, STEPS,
            )  # fmt: skip
        w, slope = weight_and_slope(x, 1.0, KIND)
    ds = dp * slope
    if masked:
        seen = (t >= first_query)[None, :] & visible(t[None, :], s[:, None], window, CAUSAL, WINDOW)
        w = tl.where(seen, w, 0.0)
        ds = tl.where(seen, ds, 0.0)
    dv = add_product(rounded(w, do.dtype), do, dv, "tf32")
    dk = add_product(rounded(ds, q.dtype), q, dk, "tf32")
    return dk, dv


@kernel(do_not_specialize=[*SCALARS, "GS8", "entries", "skipped"])
def gdpa_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, schedule_ptr, entries, skipped,
    position_ptr, time_ptr, q_times_ptr, k_times_ptr, bounds_ptr, H, GROUP, QS8, KS8, VS8, GS8, scale, dk_scale,
    dv_scale, window, P, N,
    KIND: tl.constexpr, BROADCAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr,
    TIME: tl.constexpr, STEPS: tl.constexpr, FOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Of all tiles of keys: what each query head adds to dK and dV; their list begins after `skipped` rows."""
    units = units_in(schedule_ptr + 1, entries, H * SUB, PERSISTENT)
    for turn in tl.range(turns_of(units, PERSISTENT), disable_licm=True):
        rank = deal(turn)
        if rank < units:
            first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, skipped + rank // (H * SUB))
            first += rank % (H * SUB) // H * BM
            head = rank % H
            shared = head // GROUP
            shift = Lk - Lq
            own = q0 * 0 if BROADCAST else q0
            if TMA:
                k = load_rows(k_desc, k_ptr, k0 + first, KS8, shared, BM, D, True)
                v = load_rows(v_desc, v_ptr, k0 + first, VS8, shared, BM, E, True)
            else:
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
            if SUB > 1:
                hi = tl.where(first < Lk, hi, 0)
            if Lq >= BN:
                for block in tl.range(lo // BN, tl.cdiv(tl.maximum(hi, 0), BN), num_stages=STAGES):
                    start = block_start(block, Lq, BN)
                    q = load_rows(q_desc, q_ptr, own + start, QS8, head, BN, D, TMA)
                    do = load_rows(do_desc, do_ptr, q0 + start, GS8, head, BN, E, TMA)
                    masked = start < block * BN
                    if CAUSAL or WINDOW:
                        masked |= not all_visible(start, start + BN, first, last, shift, window, CAUSAL, WINDOW)
                    dk, dv = dkdv_step(
                        dk, dv, q, do, k, v, start + shift + tl.arange(0, BN), s, block * BN + shift, k_time,
                        q_times_ptr, q0, Lq, Lk, masked, scale, window, position_ptr, time_ptr, bounds_ptr, head, H,
                        P, N, KIND, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD,
                    )  # fmt: skip
            else:
                for start in tl.range(lo // SHORT * SHORT, hi, SHORT, num_stages=1, disable_licm=True):
                    q = load_some_rows(q_ptr, own + start, Lq - start, QS8, head, SHORT, D)
                    do = load_some_rows(do_ptr, q0 + start, Lq - start, GS8, head, SHORT, E)
                    dk, dv = dkdv_step(
                        dk, dv, q, do, k, v, start + shift + tl.arange(0, SHORT), s, shift, k_time, q_times_ptr, q0,
                        Lq, Lk, CAUSAL or WINDOW, scale, window, position_ptr, time_ptr, bounds_ptr, head, H, P, N,
                        KIND, CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD,
                    )  # fmt: skip
            rank = anchored(rank)
            first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, skipped + rank // (H * SUB))
            first += rank % (H * SUB) // H * BM
            store_some_rows(dv_ptr, dv * dv_scale, k0 + first, Lk - first, H, rank % H, BM, E)
            store_some_rows(dk_ptr, dk * dk_scale, k0 + first, Lk - first, H, rank % H, BM, D)


def dq_config(tables: bool) -> Config:
    """A function of whether there are tables, alone.

    With 32 keys a step dQ, S and dP leave room for three programs of one warpgroup on a multiprocessor: on an H200 395
    TFLOP/s against 385 with 64 keys and two programs, for samples of up to 1024; 369 against 355 for 256 keys.
    """
    if tables:
        return Config(rows=64, block=32, warps=8, stages=1)
    return Config(rows=64, block=32, warps=4, stages=2)


def dkdv_config(width: int, masked: bool, tables: bool) -> Config:
    """A function of width and features alone. dK, dV, S and dP of 64 keys and 64 queries take the registers of a
    warpgroup, and masks some more.
    """
    if tables or width > 128:
        return Config(rows=64, block=32, warps=8, stages=2)
    return Config(rows=64, block=32 if masked else 64, warps=4, stages=2)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None = None,
    *,
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool = False,
    window: int | None = None,
    broadcast_q: bool = False,
    wanted: str = "qkvb",
    configs: tuple[Config, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`jagged_reference.generalized_backward` on the GPU.

    Args:
        grad_out: (Tq, H, E) in the dtype of q, any strides.
        configs: launches other than `dq_config`'s and `dkdv_config`'s. The rest is as in `gdpa.forward`.

    Returns:
        `(dq, dk, dv, dposition, dtime)` as the reference; empty (0,) for what is not wanted or absent. The same bits
        every time.

    Raises:
        TypeError, ValueError: as `gdpa.problem_of`.
    """
    problem = problem_of(
        q, k, v, q_offsets, k_offsets, max_q, max_k, bias, schedule, activation=activation, pre_scale=pre_scale,
        causal=causal, window=window, broadcast_q=broadcast_q,
    )  # fmt: skip
    tables = Tables()
    if bias is not None and "b" in wanted and (bias.position is not None or bias.time is not None):
        steep = 4096 if activation == "gelu_poly" else 1  # a polynomial's derivative has no bound
        tables = Tables.of(bias, grad_out, v, max_k * steep)
    do = Operand.of(widened(grad_out))
    of_queries, of_keys = configs or (None, None)
    if of_queries is None and not gdpa_hopper.takes(problem):
        of_queries = dq_config(problem.has_bias)
    if of_keys is None and not gdpa_hopper.takes_keys(problem):
        of_keys = dkdv_config(problem.width, problem.masked, problem.has_bias)
    dq = _dq(problem, do, tables, of_queries, "q" in wanted, post_scale, max_k)
    dk, dv = _dkdv(problem, do, of_keys, wanted, post_scale)
    dq, dk, dv = (
        x[..., : like.shape[2]].contiguous() if x.dim() > 1 and x.shape[2] != like.shape[2] else x
        for x, like in ((dq, q), (dk, k), (dv, v))
    )
    dposition, dtime = tables.gradients(q.device)
    return dq, dk, dv, dposition * post_scale, dtime * post_scale


def _dq(
    problem: Problem, do: Operand, tables: Tables, config: Config | None, wanted: bool, post_scale: float, max_k: int
) -> Tensor:
    """Of every sample, or summed over them with `broadcast_q`. Without a config by Hopper's kernel."""
    q, k, v = problem.q, problem.k, problem.v
    heads, tma, broadcast = q.x.shape[1], problem.tma, problem.flags["BROADCAST"]
    shape = (problem.rows, heads, q.x.shape[2]) if wanted else (0,)
    dq = torch.empty(shape, dtype=torch.float32 if broadcast else q.x.dtype, device=q.x.device)
    if not problem.rows or not (wanted or tables.unit is not None):
        pass
    elif config is None:
        gdpa_hopper.dq(problem, do, dq, max_k, post_scale)
    else:
        unread = problem.schedule
        sums = (unread if x is None else x for x in (tables.position, tables.time, tables.unit))
        gdpa_dq_kernel[(config.programs(problem.entries[0], heads, q.x.device.index),)](
            q.boxes(config.rows, tma), k.boxes(config.block, tma), v.boxes(config.block, tma),
            do.boxes(config.rows, tma), q.x, k.x, v.x, do.x, dq if wanted else q.x, problem.schedule,
            problem.entries[0], *problem.bias, *sums, heads, heads // k.x.shape[1], q.stride8, k.stride8, v.stride8,
            do.stride8, problem.scale, post_scale * problem.scale, problem.window or 0, *problem.sizes,
            QUERIES=wanted, TABLES=tables.unit is not None, **problem.constants, **config.launch,
        )  # fmt: skip
    if broadcast and wanted:
        dq = dq.view(problem.samples, *q.x.shape).sum(0).to(q.x.dtype)
    return dq


def _dkdv(
    problem: Problem, do: Operand, config: Config | None, wanted: str, post_scale: float
) -> tuple[Tensor, Tensor]:
    """Summed over the query heads of a key head. Without a config by Hopper's kernel."""
    q, k, v = problem.q, problem.k, problem.v
    heads, groups, tma = q.x.shape[1], k.x.shape[1], problem.tma
    nothing = q.x.new_empty(0)
    if not ("k" in wanted or "v" in wanted):
        return nothing, nothing.clone()
    dtype = torch.float32 if heads > groups else k.x.dtype
    dk, dv = (torch.empty(len(x.x), heads, x.x.shape[2], dtype=dtype, device=x.x.device) for x in (k, v))
    if not problem.entries[1]:
        pass
    elif config is None:
        gdpa_hopper.dkdv(problem, do, dk, dv, post_scale)
    else:
        gdpa_dkdv_kernel[(config.programs(problem.entries[1], heads, q.x.device.index),)](
            q.boxes(config.block, tma), k.boxes(config.rows, tma), v.boxes(config.rows, tma),
            do.boxes(config.block, tma), q.x, k.x, v.x, do.x, dk, dv, problem.schedule, problem.entries[1],
            1 + problem.entries[0], *problem.bias, heads, heads // groups, q.stride8, k.stride8, v.stride8, do.stride8,
            problem.scale, post_scale * problem.scale, post_scale * problem.weight_scale, problem.window or 0,
            *problem.sizes, **problem.constants, **config.launch,
        )  # fmt: skip
    if heads > groups:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2).to(k.x.dtype) for x in (dk, dv))
    return dk if "k" in wanted else nothing, dv if "v" in wanted else nothing
