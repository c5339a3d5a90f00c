"""Generalized attention, forward: an activation in the place of the softmax, for every query of a jagged batch.

    S = pre_scale * Q K^T + bias        O = act(S) V * post_scale

A pair that does not take part adds nothing. Without a softmax there is no maximum, no sum and nothing to correct: the
tensor cores add up O from the first block of keys to the last, and between the two products of a block stands the
activation alone (`_pointwise`), which decides how fast this is. It reads Q once and K, V once a tile of queries, from
the L2 cache but for the first tile of a sample, and writes O: `2 H (D + E) (1 + L / BM)` bytes a token for L keys.

Rows of V that are filled with zeros add nothing and need no mask. Under a causal mask or a window, and where the last
block slides back over keys already taken (`_tiles`), pairs are masked after the activation, in those blocks alone.

On Hopper, what is neither masked nor biased and has heads of 128 goes to `gdpa_hopper`, unless most samples have fewer
than 64 keys. Elsewhere, at most 128 keys a sample and more than 128 queries go to `gdpa_short`, if there are tiles
enough: it keeps K and V and walks over Q.

`broadcast_q`: one set of queries for every sample, read from the same rows each time.

gelu_poly is a polynomial of degree 6, within 8.7e-6 of gelu for |S| <= 1 and growing as S^6 beyond: it is legal only
where a norm of queries and keys keeps scores there (`activations`), and the launcher does not check that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from . import gdpa_hopper, gdpa_short
from . import schedule as schedules
from ._pointwise import weight
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
    read_entry,
    score_bias,
    store_some_rows,
    turns_of,
    units_in,
    visible,
)
from .activations import ACTIVATIONS
from .bias import JaggedBias
from .jagged_launch import MAX_WIDTH, Config, Operand, processors, widened

SCALARS = ["H", "GROUP", "QS8", "KS8", "VS8", "window", "P", "N"]


@triton.jit
def biased(
    x, t, s, q_time, k_times_ptr, k0, Lk, position_ptr, time_ptr, bounds_ptr, head, H, P, N,
    POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Scores of queries at positions t and keys at s with the tables' entries added."""
    if POSITION or TIME:
        k_time = s
        if TIME:
            k_time = tl.load(k_times_ptr + k0.to(tl.int64) + s, mask=(s >= 0) & (s < Lk), other=0)
        x += score_bias(
            t[:, None], s[None, :], q_time[:, None], k_time[None, :], position_ptr, time_ptr, bounds_ptr, head, H, P, N,
            POSITION, TIME, STEPS,
        )  # fmt: skip
    return x


@triton.jit
def forward_step(
    out, q, k, v, t, s, first_key, Lk, q_time, k_times_ptr, k0, masked, scale, window,
    position_ptr, time_ptr, bounds_ptr, head, H, P, N,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    STEPS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Add a block of keys; if `masked`, those before first_key, from Lk on and out of sight add nothing."""
    x = product(q, tl.trans(k), "tf32")
    if FOLD:
        p = weight(x, scale, KIND)
    else:
        x = biased(
            x * scale, t, s, q_time, k_times_ptr, k0, Lk, position_ptr, time_ptr, bounds_ptr, head, H, P, N,
            POSITION, TIME, STEPS,
        )  # fmt: skip
        p = weight(x, 1.0, KIND)
    if masked:
        seen = ((s >= first_key) & (s < Lk))[None, :] & visible(t[:, None], s[None, :], window, CAUSAL, WINDOW)
        p = tl.where(seen, p, 0.0)
    return add_product(rounded(p, v.dtype), v, out, "tf32")


@kernel(do_not_specialize=[*SCALARS, "entries"])
def gdpa_forward_kernel(
    q_desc, k_desc, v_desc, q_ptr, k_ptr, v_ptr, out_ptr, schedule_ptr, entries,
    position_ptr, time_ptr, q_times_ptr, k_times_ptr, bounds_ptr, H, GROUP, QS8, KS8, VS8, scale, out_scale, window,
    P, N,
    KIND: tl.constexpr, BROADCAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr,
    TIME: tl.constexpr, STEPS: tl.constexpr, FOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """All units of the schedule's tiles of queries; SUB tiles of BM queries an entry.

    q_desc, k_desc, v_desc: descriptors of the same tensors as (rows, heads * width) if TMA. QS8, KS8, VS8: elements
    from a row to the next, over 8. GROUP: heads of q that share one of k and v. FOLD: scale > 0 goes into the
    activation, and comes back in out_scale.
    """
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
            else:
                q = load_some_rows(q_ptr, own, Lq - first, QS8, head, BM, D)
            shift = Lk - Lq
            t = anchored(first + shift) + tl.arange(0, BM)
            q_time = t
            if TIME:
                at = (q0 + first).to(tl.int64) + tl.arange(0, BM)
                q_time = tl.load(q_times_ptr + at, mask=t < Lk, other=0)
            out = tl.zeros((BM, E), tl.float32)
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
                    out = forward_step(
                        out, q, k, v, t, start + tl.arange(0, BN), block * BN, Lk, q_time, k_times_ptr, k0, masked,
                        scale, window, position_ptr, time_ptr, bounds_ptr, head, H, P, N, KIND, CAUSAL, WINDOW,
                        POSITION, TIME, STEPS, FOLD,
                    )  # fmt: skip
            else:
                for start in tl.range(lo // SHORT * SHORT, hi, SHORT, num_stages=1, disable_licm=True):
                    k = load_some_rows(k_ptr, k0 + start, Lk - start, KS8, shared, SHORT, D)
                    v = load_some_rows(v_ptr, k0 + start, Lk - start, VS8, shared, SHORT, E)
                    out = forward_step(
                        out, q, k, v, t, start + tl.arange(0, SHORT), 0, Lk, q_time, k_times_ptr, k0,
                        CAUSAL or WINDOW, scale, window, position_ptr, time_ptr, bounds_ptr, head, H, P, N, KIND,
                        CAUSAL, WINDOW, POSITION, TIME, STEPS, FOLD,
                    )  # fmt: skip
            rank = anchored(rank)
            first, q0, Lq, k0, Lk, _ = read_entry(schedule_ptr, 1 + rank // (H * SUB))  # again, to keep no registers
            first += rank % (H * SUB) // H * BM
            store_some_rows(out_ptr, out * out_scale, q0 + first, Lq - first, H, rank % H, BM, E)


def forward_config(width: int, masked: bool, tables: bool) -> Config:
    """A function of width and features alone.

    One warpgroup keeps 128 queries, so that K and V pass through the L2 cache once for 128, and two programs share a
    multiprocessor: one's activation, first loads and last stores run while the other multiplies. With 64 keys a step
    they take all 255 registers and wgmma stays asynchronous; at 128 registers, for twice the warps, the assembler
    would wait for each. A step is 9 instructions an element, 6.5 of them the activation's. Masks and tables need
    registers of their own.
    """
    if tables:
        return Config(rows=64, block=32, warps=4, stages=2)
    if masked or width > 128:
        return Config(rows=128, block=64, warps=8, stages=2)
    return Config(rows=128, block=64, warps=4, stages=2)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a forward and a backward have in common.

    Attributes:
        q, k, v: operands, heads as wide as kernels take them. rows: of the output; samples: how many.
        schedule: of this batch. entries: of its lists of queries and of keys.
        bias: what kernels read of it, pointers; sizes: rows of the tables; flags: compile-time arguments.
    """

    q: Operand
    k: Operand
    v: Operand
    rows: int
    samples: int
    schedule: Tensor
    entries: tuple[int, int]
    bias: tuple[Tensor, ...]
    sizes: tuple[int, int]
    flags: dict[str, Any]
    scale: float
    window: int | None

    @property
    def tma(self) -> bool:
        """Blocks come by TMA, which does not read from nothing."""
        x = self.q.x
        return min(x.numel(), self.k.x.numel(), self.v.x.numel()) > 0 and processors(x.device.index)[1]

    @property
    def fold(self) -> bool:
        """The scale goes into the activation. In fp16 weights without it might be too large."""
        return self.scale > 0 and not self.has_bias and self.q.x.dtype == torch.bfloat16

    @property
    def weight_scale(self) -> float:
        """What weights are to be multiplied by that kernels work with."""
        return self.scale if self.fold else 1.0

    @property
    def width(self) -> int:
        """Of the widest head."""
        return max(self.q.x.shape[2], self.v.x.shape[2])

    @property
    def masked(self) -> bool:
        """Not all pairs of a sample take part."""
        return self.flags["CAUSAL"] or self.flags["WINDOW"]

    @property
    def has_bias(self) -> bool:
        """There is a table."""
        return self.flags["POSITION"] or self.flags["TIME"]

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel."""
        widths = {"D": self.q.x.shape[2], "E": self.v.x.shape[2]}
        return {**self.flags, **widths, "FOLD": self.fold, "TMA": self.tma, "enable_fp_fusion": True}


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None,
    *,
    activation: str,
    pre_scale: float,
    causal: bool,
    window: int | None,
    broadcast_q: bool,
) -> Problem:
    """Operands laid out for kernels, with a schedule.

    Raises:
        TypeError: for another dtype than bf16 and fp16. ValueError: for heads wider than 256 or another activation.
    """
    _check(q, k, v, activation)
    samples = k_offsets.numel() - 1
    broadcast = len(q) if broadcast_q else None
    rows = samples * len(q) if broadcast_q else len(q)
    if schedule is None or not schedule.numel():
        schedule = schedules.build(
            None if broadcast_q else q_offsets, k_offsets, rows, len(k), max_q if broadcast is None else broadcast,
            max_k, causal=causal, window=window,
        )  # fmt: skip
    tables = (None,) * 5 if bias is None else bias.tensors
    sizes = tuple(1 if x is None else x.shape[0] for x in tables[:2])
    flags = {
        "KIND": activation, "BROADCAST": broadcast_q, "CAUSAL": causal, "WINDOW": window is not None,
        "POSITION": tables[0] is not None, "TIME": tables[1] is not None, "STEPS": (sizes[1] - 1).bit_length(),
    }  # fmt: skip
    return Problem(
        q=Operand.of(widened(q)), k=Operand.of(widened(k)), v=Operand.of(widened(v)), rows=rows, samples=samples,
        schedule=schedule, entries=schedules.lengths_of_lists(rows, len(k), samples, broadcast=broadcast),
        bias=tuple(schedule if x is None else x.contiguous() for x in tables), sizes=sizes, flags=flags,
        scale=float(pre_scale), window=None if window is None else min(window, schedules.WIDEST),
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, activation: str) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"generalized_attention: got q {q.dtype}, k {k.dtype}, v {v.dtype}, expected bf16 or fp16; the reference"
            " takes any"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"generalized_attention: got activation={activation!r}, expected one of {ACTIVATIONS}")
    if max(q.shape[2], v.shape[2]) > MAX_WIDTH:
        raise ValueError(
            f"generalized_attention: got heads of {q.shape[2]} and {v.shape[2]}, expected at most {MAX_WIDTH}; the"
            " reference takes any"
        )


def forward(
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
    config: Config | None = None,
) -> Tensor:
    """`jagged_reference.generalized_forward` on the GPU.

    Args:
        q, k, v: bf16 or fp16, any strides: what TMA cannot read is copied. Heads up to 256 wide; widths other than 16,
            32, 64, 128 and 256 are padded in a copy.
        schedule: of `schedule.build` for this batch, or None: made here, in two launches more.
        config: a launch other than `forward_config`'s.
        The rest is as in the reference. No synchronization.

    Returns:
        (Tq, H, E), with `broadcast_q` (B * S, H, E), in the dtype of q. The same bits every time.

    Raises:
        TypeError, ValueError: as `problem_of`.
    """
    value_dim = v.shape[2]
    problem = problem_of(
        q, k, v, q_offsets, k_offsets, max_q, max_k, bias, schedule, activation=activation, pre_scale=pre_scale,
        causal=causal, window=window, broadcast_q=broadcast_q,
    )  # fmt: skip
    wide = problem.v.x.shape[2]
    out = torch.empty(problem.rows, q.shape[1], wide, dtype=q.dtype, device=q.device)
    if out.numel():
        if config is None and gdpa_hopper.takes(problem):
            gdpa_hopper.forward(problem, out, max_k, post_scale)
        elif config is None and _is_short(problem, q.shape[0] if broadcast_q else max_q, max_k):
            gdpa_short.forward(
                problem.q, problem.k, problem.v, out, problem.schedule, problem.entries[0], max_k, problem.scale,
                post_scale * problem.weight_scale, activation=activation, broadcast_q=broadcast_q, fold=problem.fold,
            )  # fmt: skip
        else:
            _launch(problem, out, post_scale, config or forward_config(problem.width, problem.masked, problem.has_bias))
    return out if wide == value_dim else out[..., :value_dim].contiguous()


def _is_short(problem: Problem, max_q: int, max_k: int) -> bool:
    """Several tiles of queries pass by keys that a multiprocessor can keep, all of which they see."""
    q = problem.q.x
    several = max_q > schedules.TILE and gdpa_short.run_of(problem.entries[0], q.shape[1], q.device.index) > 1
    few = 0 < max_k <= gdpa_short.MOST_KEYS and problem.width <= 128
    return several and few and not problem.masked and not problem.has_bias


def _launch(problem: Problem, out: Tensor, post_scale: float, config: Config) -> None:
    q, k, v = problem.q, problem.k, problem.v
    heads, tma = q.x.shape[1], problem.tma
    gdpa_forward_kernel[(config.programs(problem.entries[0], heads, q.x.device.index),)](
        q.boxes(config.rows, tma), k.boxes(config.block, tma), v.boxes(config.block, tma), q.x, k.x, v.x, out,
        problem.schedule, problem.entries[0], *problem.bias, heads, heads // k.x.shape[1], q.stride8, k.stride8,
        v.stride8, problem.scale, post_scale * problem.weight_scale, problem.window or 0, *problem.sizes,
        **problem.constants, **config.launch,
    )  # fmt: skip
