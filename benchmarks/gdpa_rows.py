"""Rows of `bench_attention.py` for generalized attention, as a share of cuBLAS, and for block attention, of a copy.

`ceiling` is what the same run measured: TFLOP/s of cuBLAS on 8192 x 8192 x 8192 in bf16, or GB/s of a copy. TFLOP/s
count the useful products, `4 H D sum(Lq Lk)` forward and 2.5 times that backward; GB/s what must be read and written,
8 bytes an element of Q forward and 14 backward. Results are held against float64 on a few samples first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_attention import BF16, LEAST_DB, capture, time_in_turn
from benchmarks.bench_memory import time_copy
from benchmarks.rows import quantiles_ms
from fused.attention import block, gdpa, gdpa_backward, jagged_reference, schedule

HEADS, DIM = 4, 128
GEMM = 8192
TOKENS, SAMPLES = 1_500_000, 1152

Passes = dict[str, Callable[[], Any]]


@dataclass
class Operands:
    """Standard normal q, k, v and grad_out in bf16, with offsets and longest samples."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, q_lengths: Tensor, k_lengths: Tensor, max_q: int, max_k: int) -> Operands:
        offsets = [torch.cat((n.new_zeros(1), n.cumsum(0))).int() for n in (q_lengths, k_lengths)]
        totals = [int(o[-1]) for o in offsets]
        q, k, v, do = (torch.randn(totals[i], HEADS, DIM, device="cuda", dtype=BF16) for i in (0, 1, 1, 0))
        return cls(q, k, v, do, offsets[0], offsets[1], max_q, max_k)

    @property
    def layout(self) -> tuple[Tensor, Tensor, int, int]:
        return self.q_offsets, self.k_offsets, self.max_q, self.max_k

    def sample(self, index: int) -> tuple[list[Tensor], tuple[Tensor, Tensor, int, int], slice, slice]:
        """grad_out, q, k and v of one sample in float64, its layout, and where it lies."""
        (q0, q1), (k0, k1) = (o[index : index + 2].tolist() for o in (self.q_offsets, self.k_offsets))
        rows, keys = slice(q0, q1), slice(k0, k1)
        ends = [torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (q1 - q0, k1 - k0)]
        cut = [self.grad_out[rows], self.q[rows], self.k[keys], self.v[keys]]
        return [x.double() for x in cut], (ends[0], ends[1], q1 - q0, k1 - k0), rows, keys


def some_samples(lengths: Tensor) -> list[int]:
    """The longest, the shortest and two others."""
    order = lengths.argsort().tolist()
    return sorted({order[i * (len(order) - 1) // 3] for i in range(4)})


def uniform(samples: int, longest: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    return torch.randint(1, longest + 1, (samples,), device="cuda", generator=generator)


class Noise:
    """Sums of squares over samples, and the SQNR they make."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, actual: Tensor, exact: Tensor) -> None:
        noise, signal = (float(x.square().sum()) for x in (actual.double() - exact, exact))
        total = self.sums.setdefault(name, [0.0, 0.0])
        total[0], total[1] = total[0] + noise, total[1] + signal

    def sqnr(self) -> dict[str, float]:
        """DB by name; raises if one is too low to be worth a time."""
        found = {
            f"sqnr_{name}": round(float(10 * torch.log10(torch.tensor(signal / max(noise, 1e-300)))), 2)
            for name, (noise, signal) in self.sums.items()
        }
        if min(found.values()) < LEAST_DB:
            raise AssertionError(f"wrong results: {found}")
        return found


def timed(passes: Passes, rounds: int) -> dict[str, dict[str, float]]:
    captured = {name: capture(run)[0] for name, run in passes.items()}
    return {name: quantiles_ms(times) for name, times in time_in_turn(captured, rounds).items()}


def cublas_tflops(rounds: int) -> float:
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=BF16) for _ in range(2))
    return 2e-9 * GEMM**3 / timed({"gemm": lambda: a @ b}, rounds)["gemm"]["ms_median"]


def gdpa_passes(o: Operands, activation: str) -> tuple[Passes, dict[str, float]]:
    """Forward and backward on a shared schedule, and their SQNR."""
    made = schedule.build(o.q_offsets, o.k_offsets, len(o.q), len(o.k), o.max_q, o.max_k)
    options: dict[str, Any] = {"activation": activation, "pre_scale": DIM**-0.5, "post_scale": 1.0 / o.max_k}
    operands = o.q, o.k, o.v
    passes: Passes = {
        "fwd": lambda: gdpa.forward(*operands, *o.layout, bias=None, schedule=made, **options),
        "bwd": lambda: gdpa_backward.backward(
            o.grad_out, *operands, *o.layout, bias=None, schedule=made, wanted="qkv", **options
        ),
    }
    out, (dq, dk, dv, *_) = passes["fwd"](), passes["bwd"]()
    noise = Noise()
    for index in some_samples(o.k_offsets.diff()):
        (grad, q, k, v), layout, rows, keys = o.sample(index)
        noise.add("out", out[rows], jagged_reference.generalized_forward(q, k, v, *layout, bias=None, **options))
        grads = jagged_reference.generalized_backward(grad, q, k, v, *layout, bias=None, wanted="qkv", **options)
        for name, ours, place, theirs in zip(("dq", "dk", "dv"), (dq, dk, dv), (rows, keys, keys), grads):
            noise.add(name, ours[place], theirs)
    return passes, noise.sqnr()


def gdpa_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """A jagged batch of self-attention, and many queries over few keys."""
    ceiling = cublas_tflops(rounds)
    jagged = uniform(SAMPLES, 1024)
    many, few = (torch.full((128,), n, device="cuda") for n in (2048, 256))
    shapes = (
        (f"B{SAMPLES}-H{HEADS}-D{DIM}-L1024-fill0.5", lambda: Operands.of(jagged, jagged, 1024, 1024)),
        (f"B128-H{HEADS}-D{DIM}-Q2048-KV256-fill1.0", lambda: Operands.of(many, few, 2048, 256)),
    )
    for case, make in shapes:
        operands = make()
        pairs = float((operands.q_offsets.diff().double() * operands.k_offsets.diff()).sum())
        gflop = {"fwd": 4e-9 * HEADS * DIM * pairs, "bwd": 10e-9 * HEADS * DIM * pairs}
        for activation in ("gelu", "silu"):
            passes, quality = gdpa_passes(operands, activation)
            yield [
                {
                    "bench": "attention", "case": case, "variant": f"op=gdpa-{activation},pass={name},mode=graph",
                    "provider": "ours", **ms, "tflops": round(gflop[name] / ms["ms_median"], 1),
                    "ceiling": round(ceiling, 1),
                    "pct_of_ceiling": round(100 * gflop[name] / ms["ms_median"] / ceiling, 1), **quality, **stamp,
                }
                for name, ms in timed(passes, rounds).items()
            ]  # fmt: skip


def block_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Blocks of 64 over 1.5 million tokens."""
    lengths = uniform(SAMPLES, 2 * TOKENS // SAMPLES)
    o = Operands.of(lengths, lengths, 2 * TOKENS // SAMPLES, 2 * TOKENS // SAMPLES)
    operands, layout, scale = (o.q, o.k, o.v), (o.q_offsets, o.max_q), DIM**-0.5
    passes: Passes = {
        "fwd": lambda: block.forward(*operands, *layout, scale=scale),
        "bwd": lambda: block.backward(o.grad_out, *operands, *layout, scale=scale),
    }
    out, grads = passes["fwd"](), passes["bwd"]()
    noise = Noise()
    for index in some_samples(lengths):
        (grad, *exact), (offsets, _, longest, _), rows, _ = o.sample(index)
        noise.add(
            "out", out[rows], jagged_reference.block_forward(*exact, offsets=offsets, max_length=longest, scale=scale)
        )
        exact_grads = jagged_reference.block_backward(grad, *exact, offsets=offsets, max_length=longest, scale=scale)
        for name, ours, theirs in zip(("dq", "dk", "dv"), grads, exact_grads):
            noise.add(name, ours[rows], theirs)
    nbytes = {"fwd": 8 * o.q.numel(), "bwd": 14 * o.q.numel()}
    ceilings = {name: n / time_copy(n)[0] / 1e6 for name, n in nbytes.items()}
    yield [
        {
            "bench": "attention", "case": f"T{len(o.q)}-H{HEADS}-D{DIM}-block64",
            "variant": f"op=block,pass={name},mode=graph", "provider": "ours", **ms, "tflops": None,
            "gbps": round(nbytes[name] / ms["ms_median"] / 1e6, 1), "ceiling": round(ceilings[name], 1),
            "pct_of_ceiling": round(100 * nbytes[name] / ms["ms_median"] / 1e6 / ceilings[name], 1),
            **noise.sqnr(), **stamp,
        }
        for name, ms in timed(passes, rounds).items()
    ]  # fmt: skip
