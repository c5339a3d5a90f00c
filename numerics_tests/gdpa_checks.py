"""Checks of block and generalized attention's kernels against the float64 definition, as functions that raise.

`python gdpa_checks.py block|gdpa|hopper|pointwise cpu|cuda [share shares]`, on the CPU with TRITON_INTERPRET=1 in the
environment, which Triton reads when it is imported. Every output buffer is poisoned first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused.attention import _pointwise, block, gdpa, gdpa_backward, gdpa_hopper, gdpa_short, jagged_reference, schedule
from fused.attention.activations import ACTIVATIONS, act, act_grad
from fused.attention.bias import JaggedBias, log_time_bounds
from fused.attention.block import tile_of
from numerics_tests.attention_oracle import sqnr_db
from numerics_tests.jagged_cases import (
    CASES,
    CROSS_CASES,
    LONG_CASES,
    MASKS,
    SELF_CASES,
    JaggedCase,
    offsets_of,
    tensors,
)
from numerics_tests.kernel_checks import poisoned

BF16, FP16 = torch.bfloat16, torch.float16
LEAST_DB = {BF16: 50.0, FP16: 62.0}
"""Roundings of P or dS and of the result: measured 51.8 dB or more in bf16; in fp16 70 dB for block attention, and 65.7
for generalized attention, whose activations are as good as bf16 asks for. Tables: 74 dB."""
BY_NAME = {case.name: case for case in CASES}


def agree(ours: Tensor, exact: Tensor, dtype: torch.dtype, what: str) -> None:
    """Same shape, and the noise of a few roundings."""
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    if exact.numel() == 0 or not exact.any():
        assert not ours.any(), f"{what}: expected zeros"
        return
    found = sqnr_db(ours, exact)
    assert found >= LEAST_DB[dtype], f"{what}: {found:.1f} dB"


def check_block(case: JaggedCase, dtype: torch.dtype, device: str, *, packed: bool = False, **options: Any) -> None:
    """Output and gradients of one batch; `packed`: operands that are slices of one tensor."""
    t = tensors(case, dtype=dtype, device=device, offsets_dtype=torch.int64 if packed else torch.int32)
    q, k, v = t.q, t.k, t.v
    if packed:
        joined = torch.cat((q, k, v), dim=2)
        q, k, v = joined.split((case.dim, case.dim, case.value_dim), dim=2)
    scale = case.dim**-0.5
    offsets = t.q_offsets, t.max_q
    with poisoned():
        out = block.forward(q, k, v, *offsets, scale=scale, **options)
        grads = block.backward(t.grad_out, q, k, v, *offsets, scale=scale, **options)
        if packed or device == "cuda":
            only = block.backward(t.grad_out, q, k, v, *offsets, scale=scale, wanted="k", **options)
            assert [x.numel() for x in only] == [0, t.k.numel(), 0], f"{case}: what is not wanted is not empty"
            assert torch.equal(only[1], grads[1]), f"{case}: dk does not repeat"
    exact = [x.double() for x in (q, k, v)]
    grad = t.grad_out.double()
    agree(out, jagged_reference.block_forward(*exact, *offsets, scale=scale, **options), dtype, f"{case} {options} out")
    expected = jagged_reference.block_backward(grad, *exact, *offsets, scale=scale, **options)
    for name, ours, theirs in zip("qkv", grads, expected):
        agree(ours, theirs, dtype, f"{case} {options} d{name}")


@triton.jit
def tiles_kernel(offsets_ptr, out_ptr, B, T, TILE: tl.constexpr):
    slot = tl.program_id(0)
    first, count = tile_of(offsets_ptr, slot, B, T, TILE)
    tl.store(out_ptr + slot * 2, first)
    tl.store(out_ptr + slot * 2 + 1, count)


def check_tiles(lengths: tuple[int, ...], device: str) -> None:
    """The slots hold every tile of every sample once, whatever the number of samples."""
    offsets = offsets_of(lengths, device)
    total, samples = sum(lengths), len(lengths)
    slots = total // 64 + samples
    found = torch.full((slots, 2), -7, dtype=torch.int64, device=device)
    tiles_kernel[(slots,)](offsets, found, samples, total, 64)
    tiles = sorted((int(first), int(count)) for first, count in found.tolist() if count > 0)
    expected, start = [], 0
    for length in lengths:
        expected += [(start + at, min(64, length - at)) for at in range(0, length, 64)]
        start += length
    assert tiles == expected


def block_checks(device: str) -> Iterator[Callable[[], None]]:
    """Every batch of self-attention; blocks of each size; widths that no tile is as wide as."""
    for case in SELF_CASES:
        yield lambda case=case: check_block(case, BF16, device)
    edges = (63, 64, 127, 129)
    edge = JaggedCase(name="edges", q_lengths=edges, k_lengths=edges, heads=1, groups=1)
    for size in (32, 128):
        yield lambda size=size: check_block(edge, BF16, device, block=size)
    yield lambda: check_block(BY_NAME["odd-gqa"], BF16, device, block=32, causal=True)
    yield lambda: check_block(edge, FP16, device, causal=True, packed=True)
    yield lambda: check_block(replace(edge, dim=48, value_dim=80), BF16, device)
    for lengths in (edges, (0, 0, 5), (1,) * 129, (0, 3, 0) * 50 + (500,) + (0,) * 40):
        yield lambda lengths=lengths: check_tiles(lengths, device)
    if device == "cuda":
        lengths = tuple(int(n) for n in torch.randint(0, 700, (300,), generator=torch.Generator().manual_seed(0)))
        large = JaggedCase(
            name="large", q_lengths=lengths, k_lengths=lengths, heads=4, groups=4, dim=128, value_dim=128
        )
        for size in (32, 64, 128):
            yield lambda size=size: check_block(large, BF16, device, block=size)
        yield lambda: check_block(replace(large, groups=2, dim=256, value_dim=64), FP16, device, causal=True)


def random_bias(case: JaggedCase, queries: int, keys: int, device: str) -> JaggedBias:
    """Both tables, fp32, over few buckets."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    times = (torch.randint(0, 50, (n,), generator=generator).to(device) for n in (queries, keys))
    return JaggedBias(
        position=draw(9, case.heads), time=draw(6, case.heads), q_times=next(times), k_times=next(times),
        time_bounds=log_time_bounds(6, device=device),
    )  # fmt: skip


def check_gdpa(
    case: JaggedCase,
    dtype: torch.dtype,
    device: str,
    activation: str = "gelu",
    *,
    bias: bool = False,
    seeds: int = 0,
    pre_scale: float | None = None,
    wanted: str = "qkvb",
    **mask: Any,
) -> None:
    """Output and the gradients of one batch that are wanted. `seeds`: that many queries for every sample."""
    t = tensors(case, dtype=dtype, device=device)
    q, grad, q_offsets, max_q = t.q, t.grad_out, t.q_offsets, t.max_q
    if seeds:
        drawn = tensors(
            replace(case, q_lengths=(seeds,) * (len(case.k_lengths) + 1), k_lengths=(0,) * (len(case.k_lengths) + 1)),
            dtype=dtype, device=device, seed=1,
        )  # fmt: skip
        q, grad, q_offsets, max_q = drawn.q[:seeds], drawn.grad_out[seeds:], None, seeds
    tables = random_bias(case, len(grad), len(t.k), device) if bias else None
    layout = (q_offsets, t.k_offsets, max_q, t.max_k)
    options: dict[str, Any] = {
        "activation": activation, "pre_scale": case.dim**-0.5 if pre_scale is None else pre_scale, "post_scale": 0.37,
        "broadcast_q": bool(seeds), **mask,
    }  # fmt: skip
    operands = (q, t.k, t.v)
    with poisoned():
        out = gdpa.forward(*operands, *layout, tables, **options)
        grads = gdpa_backward.backward(grad, *operands, *layout, tables, wanted=wanted, **options)
        if device == "cuda":
            again = gdpa_backward.backward(grad, *operands, *layout, tables, wanted=wanted, **options)
            assert all(torch.equal(a, b) for a, b in zip(grads, again)), f"{case}: gradients do not repeat"
    exact = [x.double() for x in operands]
    wide = None if tables is None else replace(tables, position=tables.position.double(), time=tables.time.double())
    what = f"{case} {activation} {mask} bias={bias} seeds={seeds}"
    agree(out, jagged_reference.generalized_forward(*exact, *layout, wide, **options), dtype, f"{what} out")
    expected = jagged_reference.generalized_backward(grad.double(), *exact, *layout, wide, **options)
    for name, ours, theirs in zip(("dq", "dk", "dv", "dposition", "dtime"), grads, expected):
        if name[1] in wanted or len(name) > 2:
            agree(ours, theirs, dtype, f"{what} {name}")


def check_short(*args: Any, **options: Any) -> None:
    """`check_gdpa` of a batch whose forward is that of few keys."""
    enough = mock.patch.object(gdpa_short, "processors", return_value=(4, True))
    with enough, mock.patch.object(gdpa_short, "forward", wraps=gdpa_short.forward) as taken:
        check_gdpa(*args, **options)
    assert taken.called, "it took the other kernel"


def check_schedule_of_another_mask(case: JaggedCase, device: str) -> None:
    """Tiles of a sample that do not follow one another in the schedule give the same output."""
    t = tensors(case, dtype=BF16, device=device)
    options: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.2, "post_scale": 1.0}
    outs = []
    with mock.patch.object(gdpa_short, "processors", return_value=(4, True)):
        for causal in (False, True):
            made = schedule.build(t.q_offsets, t.k_offsets, len(t.q), len(t.k), t.max_q, t.max_k, causal=causal)
            outs.append(gdpa.forward(t.q, t.k, t.v, *t.layout, None, made, **options))
    assert torch.equal(*outs)


def check_isolation(
    device: str, lengths: tuple[int, int, int], max_k: int | None = None, *, dim: int = 32, blocked: bool = True
) -> None:
    """NaN in the middle sample changes no bit of the others, in outputs and gradients; of block attention too if
    `blocked`.
    """
    case = JaggedCase(
        name="isolation", q_lengths=lengths, k_lengths=lengths, heads=1, groups=1, dim=dim, value_dim=dim
    )  # fmt: skip
    t = tensors(case, dtype=BF16, device=device)
    middle = slice(lengths[0], lengths[0] + lengths[1])
    options: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.2, "post_scale": 1.0}
    layout = (t.q_offsets, t.k_offsets, t.max_q, max_k or t.max_k, None)

    def run(operands: list[Tensor]) -> list[Tensor]:
        *qkv, grad = operands
        found = [gdpa.forward(*qkv, *layout, **options)]
        found += gdpa_backward.backward(grad, *qkv, *layout, **options)[:3]
        if blocked:
            found.append(block.forward(*qkv, t.q_offsets, t.max_q, scale=0.2))
            found += block.backward(grad, *qkv, t.q_offsets, t.max_q, scale=0.2)
        return found

    operands = [t.q, t.k, t.v, t.grad_out]
    clean = run(operands)
    spoiled = [x.clone() for x in operands]
    for x in spoiled:
        x[middle] = float("nan")
    for before, after in zip(clean, run(spoiled)):
        others = torch.ones(len(before), dtype=torch.bool, device=device)
        others[middle] = False
        assert after[middle].isnan().all(), "the NaN did not arrive"
        assert torch.equal(before[others], after[others]), f"a sample saw another: {lengths}"


def check_wanted(device: str) -> None:
    """What is not wanted is empty, and what is comes out the same."""
    case = JaggedCase(name="wanted", q_lengths=(9, 33), k_lengths=(40, 3), groups=1)
    t = tensors(case, dtype=BF16, device=device)
    bias = random_bias(case, len(t.q), len(t.k), device)
    options: dict[str, Any] = {"activation": "silu", "pre_scale": 0.2, "post_scale": 1.0}
    whole = gdpa_backward.backward(t.grad_out, t.q, t.k, t.v, *t.layout, bias, **options)
    for wanted in ("q", "v", "b", "kb", ""):
        some = gdpa_backward.backward(t.grad_out, t.q, t.k, t.v, *t.layout, bias, wanted=wanted, **options)
        for letter, a, b in zip("qkvbb", whole, some):
            assert torch.equal(a, b) if letter in wanted else b.numel() == 0, (wanted, letter)


def gdpa_checks(device: str) -> Iterator[Callable[[], None]]:
    """Every batch; every activation, mask and table; seeds; widths that no tile is as wide as."""

    def check(case: JaggedCase, *args: Any, dtype: torch.dtype = BF16, **options: Any) -> Callable[[], None]:
        return lambda: check_gdpa(case, dtype, device, *args, **options)

    for case in (*SELF_CASES, *CROSS_CASES):
        yield check(case if case.groups < case.heads else replace(case, heads=1, groups=1))
    small = JaggedCase(name="small", q_lengths=(33, 0, 65), k_lengths=(70, 5, 31), heads=1, groups=1)
    for activation in ACTIVATIONS:
        if activation != "gelu":
            yield check(small, activation, pre_scale=0.02 if activation == "gelu_poly" else None)
    yield check(small, "silu", pre_scale=-0.1)
    yield check(small, "silu", dtype=FP16)
    for name in ("causal", "window", "causal-window", "itself"):
        yield check(small, "silu", **MASKS[name])
    yield check(replace(small, heads=2, groups=1), "gelu", bias=True)
    yield check(small, "silu", bias=True, **MASKS["causal-window"])
    yield check(small, "gelu", seeds=37)
    yield check(small, "silu", seeds=3, bias=True, **MASKS["window"])
    yield check(BY_NAME["all-empty"], "gelu", seeds=5)
    short = JaggedCase(name="short", q_lengths=(300, 0, 129, 5, 257), k_lengths=(70, 3, 0, 128, 65), groups=1)
    yield lambda: check_short(short, BF16, device)
    yield lambda: check_short(replace(short, k_lengths=(7, 3, 0, 100, 70)), FP16, device, "silu")
    few = replace(short, k_lengths=(9, 3, 0, 64, 9))
    yield lambda: check_short(few, BF16, device, "silu", pre_scale=-0.1, seeds=140)
    yield lambda: check_schedule_of_another_mask(short, device)
    yield check(replace(small, dim=48, value_dim=80))
    yield lambda: check_wanted(device)
    yield lambda: check_isolation(device, (33, 40, 70), max_k=1024)
    yield lambda: check_isolation(device, (130, 3, 20))
    if device == "cuda":
        drawn = torch.randint(0, 700, (2, 120), generator=torch.Generator().manual_seed(0)).tolist()
        large = JaggedCase(name="large", q_lengths=tuple(drawn[0]), k_lengths=tuple(drawn[1]), heads=4, groups=4)
        for dim in (64, 128, 256):
            sized = replace(large, dim=dim, value_dim=dim, groups=2 if dim == 64 else 4)
            for mask in ({}, MASKS["causal"], {"window": 100}):
                for activation in ("gelu", "silu"):
                    yield lambda s=sized, m=mask, a=activation: check_gdpa(s, BF16, device, a, **m)
        wide = replace(large, dim=128, value_dim=128)
        short = replace(wide, k_lengths=tuple(n % 129 for n in drawn[1]))
        yield lambda: check_gdpa(short, BF16, device)
        yield lambda: check_gdpa(wide, BF16, device, bias=True)
        yield lambda: check_gdpa(wide, BF16, device, seeds=32)


@contextmanager
def without_hopper() -> Iterator[None]:
    """Every GPU runs what others than a Hopper do."""
    with mock.patch.object(gdpa_hopper, "is_hopper", return_value=False):
        yield


@contextmanager
def on_hopper(wanted: str) -> Iterator[None]:
    """Raises if the Hopper kernels of the output and of the gradients that are wanted were not launched."""
    names = ["forward"] + ["dq"] * ("q" in wanted) + ["dkdv"] * ("k" in wanted)
    with ExitStack() as stack:
        taken = [
            stack.enter_context(mock.patch.object(gdpa_hopper, name, wraps=getattr(gdpa_hopper, name)))
            for name in names
        ]
        yield
    assert all(x.called for x in taken), f"of {names} not all were launched"


def check_runs(case: JaggedCase, device: str) -> None:
    """Programs take several tiles of a sample in a row, and next one without keys or with as many as fit; the order of
    the schedule changes nothing.
    """
    with mock.patch.object(gdpa_hopper, "run_of", return_value=4):
        with on_hopper("q"):
            check_gdpa(case, BF16, device, wanted="q")
        check_schedule_of_another_mask(case, device)


def hopper_checks(device: str) -> Iterator[Callable[[], None]]:
    """Batches that Hopper's kernels take (`gdpa_hopper.takes`), heads of 128."""

    def check(
        case: JaggedCase, *args: Any, dtype: torch.dtype = BF16, wanted: str = "qkvb", **options: Any
    ) -> Callable[[], None]:
        def run() -> None:
            with on_hopper(wanted):
                check_gdpa(replace(case, dim=128, value_dim=128), dtype, device, *args, wanted=wanted, **options)

        return run

    for case in LONG_CASES:
        yield check(case, wanted="q" if case.groups < case.heads else "qkvb")
    long = LONG_CASES[1]
    yield check(long, "silu", pre_scale=-0.1)
    yield check(long, "silu", dtype=FP16)
    few = replace(long, name="few-keys", q_lengths=(900, 600, 128, 700, 1), k_lengths=(130, 256, 0, 31, 64), groups=1)
    yield lambda: check_runs(replace(few, dim=128, value_dim=128), device)
    for lengths in ((33, 90, 70), (130, 3, 100)):
        yield lambda lengths=lengths: on_hopper("qk")(check_isolation)(device, lengths, dim=128, blocked=False)
    if device == "cuda":
        drawn = torch.randint(0, 700, (2, 120), generator=torch.Generator().manual_seed(0)).tolist()
        large = JaggedCase(name="large", q_lengths=tuple(drawn[0]), k_lengths=tuple(drawn[1]), heads=4, groups=4)
        for activation in ACTIVATIONS:
            yield check(large, activation, pre_scale=0.01 if activation == "gelu_poly" else None)
        yield check(replace(large, k_lengths=tuple(60 + n % 197 for n in drawn[1])), "gelu")


@triton.jit
def pointwise_kernel(x_ptr, w_ptr, y_ptr, d_ptr, scale, KIND: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    s = tl.load(x_ptr + at)
    y, d = _pointwise.weight_and_slope(s, scale, KIND)
    tl.store(w_ptr + at, _pointwise.weight(s, scale, KIND))
    tl.store(y_ptr + at, y)
    tl.store(d_ptr + at, d)


def check_pointwise(activation: str, scale: float, device: str) -> None:
    """Weights round to bf16's neighbor at most, where they are not lost beside others: half a unit, 2^-9, or 1e-5.

    Measured: 1.85e-3 (gelu), 1.73e-3 (silu, gelu_tanh), below 2^-7 8.5e-6; derivatives 1.5e-4.
    """
    reach = 1.0 if activation == "gelu_poly" else 30.0
    x = torch.cat((torch.linspace(-reach, reach, 6144), torch.linspace(-min(reach, 6.0), min(reach, 6.0), 2048)))
    s = (x / scale).to(device)
    w, y, d = (torch.empty_like(s) for _ in range(3))
    pointwise_kernel[(8,)](s, w, y, d, scale, activation, 1024)
    exact = s.double() * torch.tensor(scale, dtype=torch.float32).double()
    expected = act(exact, activation)
    for found in (w, y):
        error = (found.double() * scale - expected).abs()
        assert (error <= torch.clamp(expected.abs() * 2.0**-9, min=1e-5)).all(), (activation, scale, error.max())
    slope_error = (d.double() - act_grad(exact, activation)).abs().max()
    assert slope_error < 3e-4, (activation, scale, slope_error)


def pointwise_checks(device: str) -> Iterator[Callable[[], None]]:
    for activation in ACTIVATIONS:
        for scale in (1.0, 0.125, 3.0):
            yield lambda activation=activation, scale=scale: check_pointwise(activation, scale, device)


CHECKS = {"block": block_checks, "gdpa": gdpa_checks, "hopper": hopper_checks, "pointwise": pointwise_checks}


def run(group: str, device: str, share: int = 0, shares: int = 1) -> None:
    """Every `shares`-th check of a group, from number `share`."""
    with nullcontext() if group == "hopper" else without_hopper():
        for i, check in enumerate(CHECKS[group](device)):
            if i % shares == share:
                check()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start = time.perf_counter()
    run(sys.argv[1], sys.argv[2], *(int(n) for n in sys.argv[3:]))
    print(f"ok {time.perf_counter() - start:.1f} s")
