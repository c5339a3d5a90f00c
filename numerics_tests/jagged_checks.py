"""Checks of the jagged attention kernels against the reference in float64, on any device, as functions that raise.

Triton reads TRITON_INTERPRET when it is imported, so the interpreted checks run in a process of their own:
`python jagged_checks.py schedule|values|edges cpu [share shares]` with that variable set. On a GPU the same functions
run natively. Every output buffer is poisoned first.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused.attention import jagged, jagged_launch, jagged_reference, schedule
from fused.attention.bias import JaggedBias, log_time_bounds
from numerics_tests import jagged_cases
from numerics_tests.jagged_cases import CASES, LONG_CASES, MASKS, JaggedCase, JaggedTensors
from numerics_tests.kernel_checks import poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("out", "lse", "dq", "dk", "dv", "dposition", "dtime")
RELATIVE = {BF16: 8e-3, FP16: 1e-3, FP32: 4e-6}
"""Norm of the error over the norm of the value. P, dS and outputs are rounded once each: measured at most 4.6e-3 in
bf16, 6e-4 in fp16; in fp32 1.5e-6, of sums over a few hundred terms."""
ROUNDING = {BF16: 2.0**-9, FP16: 2.0**-11, FP32: 0.0}
"""Largest relative error of rounding to nearest."""
ABSOLUTE = 1e-4
"""Gradients that cancel to zero, where each query sees one key: measured 1e-6."""
SMALL = jagged_launch.Config(rows=64, block=32, warps=4, stages=2)
TURNS = jagged_launch.Config(rows=64, block=32, warps=4, stages=2, per_processor=1)
GLUON = jagged_launch.Config(rows=64, block=64, warps=4, stages=2, gluon=True)
GLUON_IN_TURN = replace(GLUON, heads=4)


def tables(case: JaggedCase, device: str, dtype: torch.dtype = FP32) -> JaggedBias:
    """Both tables; times that lie together, far apart, and in both orders."""
    generator = torch.Generator().manual_seed(3)

    def times(count: int) -> Tensor:
        return torch.randint(0, 200, (count,), generator=generator).to(device)

    return JaggedBias(
        position=torch.randn(20, case.heads, generator=generator).to(device, dtype),
        time=torch.randn(13, case.heads, generator=generator).to(device, dtype),
        q_times=times(sum(case.q_lengths)),
        k_times=times(sum(case.k_lengths)),
        time_bounds=log_time_bounds(13, device=device),
    )


def double(bias: JaggedBias | None) -> JaggedBias | None:
    if bias is None:
        return None
    position, time = (None if x is None else x.double() for x in (bias.position, bias.time))
    return JaggedBias(
        position=position, time=time, q_times=bias.q_times, k_times=bias.k_times, time_bounds=bias.time_bounds
    )


def exact(t: JaggedTensors, bias: JaggedBias | None, **kwargs: Any) -> tuple[Tensor, ...]:
    """What `run` should give, in float64."""
    q, k, v, do = (x.double() for x in (t.q, t.k, t.v, t.grad_out))
    out, lse = jagged_reference.jagged_forward(q, k, v, *t.layout, double(bias), **kwargs)
    return out, lse, *jagged_reference.jagged_backward(do, q, k, v, out, lse, *t.layout, double(bias), **kwargs)


def run(
    t: JaggedTensors, bias: JaggedBias | None, config: jagged_launch.Config | None = None, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Outputs and all gradients of the kernels; `config` for all that know it, or the ones that ship."""
    masked = kwargs.get("causal", False) or kwargs.get("window") is not None
    with poisoned():
        out, lse = jagged.forward(t.q, t.k, t.v, *t.layout, bias, config=config, **kwargs)
        configs = None if config is None or (config.gluon and masked) else (config, config)
        grads = jagged.backward(t.grad_out, t.q, t.k, t.v, out, lse, *t.layout, bias, configs=configs, **kwargs)
    return out, lse, *grads


def table_noise(t: JaggedTensors, out: Tensor) -> float:
    """What rounding leaves in the tables' gradients beside their sum: delta = rowsum(dO * O) of an O that was rounded,
    and made of a P that was rounded, is off, and a bucket that holds all keys of a query sums P * that to all of it.

    Each rounding is off by u |x| / sqrt(3) at most, as a deviation, and P's together count as much as O's. Three
    deviations of the sum over all queries: 2.4 u |dO * O|; measured at most 1.03.
    """
    return 3 * (2 / 3) ** 0.5 * ROUNDING[t.q.dtype] * (t.grad_out.double() * out).norm().item()


def close(
    expected: tuple[Tensor, ...], actual: tuple[Tensor, ...], dtype: torch.dtype, what: str, noise: float = 0.0
) -> None:
    """`noise`: what the tables' gradients may be off beside."""
    for name, e, a in zip(NAMES, expected, actual, strict=True):
        assert e.shape == a.shape, f"{what} {name}: shape {tuple(a.shape)}, not {tuple(e.shape)}"
        assert a.dtype == (FP32 if name in ("lse", "dposition", "dtime") else dtype), f"{what} {name}: {a.dtype}"
        finite = e.isfinite()
        assert torch.equal(finite, a.isfinite()), f"{what} {name}: not finite elsewhere than the reference"
        assert torch.equal(e[~finite], a[~finite].double()), f"{what} {name}: another infinity"
        error, size = (a.double() - e)[finite].norm().item(), e[finite].norm().item()
        bound = RELATIVE[dtype] * size + ABSOLUTE + (noise if name in ("dposition", "dtime") else 0.0)
        assert error <= bound, f"{what} {name}: off by {error:.2e} of {size:.2e}"


def check(
    case: JaggedCase, mask: str, dtype: torch.dtype, device: str, *, biased: bool = False, **options: Any
) -> None:
    t = jagged_cases.tensors(case, dtype=dtype, device=device)
    bias = tables(case, device) if biased else None
    kwargs = {"scale": case.dim**-0.5, **MASKS[mask]}
    actual = run(t, bias, options.get("config"), **kwargs)
    expected = exact(t, bias, **kwargs)
    close(expected, actual, dtype, f"{case} {mask} {dtype}", table_noise(t, expected[0]))


def value_checks(device: str) -> Iterator[Callable[[], None]]:
    """Every case, every mask, every dtype, both tables, launches that ship and others, one sample of the product."""

    def later(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return lambda: check(*args, device, **kwargs)

    masks = list(MASKS)
    for i, case in enumerate(CASES):
        for j in range(len(masks)) if device == "cuda" else [i % len(masks)]:
            yield later(case, masks[j], BF16, config=SMALL if (i + j) % 2 else None)
    cases = {case.name: case for case in CASES}
    biased = JaggedCase(name="biased", q_lengths=(33, 0, 3), k_lengths=(35, 2, 1), groups=1, dim=16, value_dim=16)
    yield later(biased, "full", FP32, biased=True, config=SMALL)
    yield later(biased, "causal-window", FP32, biased=True)
    yield later(biased, "window", BF16, biased=True)
    yield later(cases["many-queries"], "window", FP16, config=TURNS)
    yield later(JaggedCase(name="narrow", q_lengths=(33, 7), k_lengths=(40, 0), dim=24, value_dim=48), "causal", BF16)
    yield lambda: scale_check(device)
    yield lambda: wide_window_check(device)
    for peak in jagged_cases.CANCELLATION_PEAKS:
        yield lambda peak=peak: cancellation_check(peak, device)
    if device == "cuda":
        for case in CASES:
            yield later(case, "full", BF16, biased=True)
            yield later(case, "causal", FP16)
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        yield from hopper_checks(later)
        yield from hopper_window_checks(lambda *args, **kwargs: lambda: forward_check(*args, device, **kwargs))


def hopper_checks(later: Callable[..., Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """What the kernels in Gluon take: heads of 128, each with its keys; launches that ship and others."""
    for config, case in itertools.product((None, GLUON, GLUON_IN_TURN), (*LONG_CASES, TAILS, *CASES)):
        if config is not None and not sum(case.k_lengths):
            continue  # TMA cannot describe what is empty, and the portable kernels take it
        yield later(replace(case, groups=case.heads, dim=128, value_dim=128), "full", BF16, config=config)


def hopper_window_checks(later: Callable[..., Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """What their forward takes beside: windows, of any width."""
    for window, case in itertools.product((0, 7, 64, 130), (*LONG_CASES, *CASES)):
        if sum(case.k_lengths):
            config = GLUON_IN_TURN if window % 2 else GLUON
            yield later(replace(case, groups=case.heads, dim=128, value_dim=128), config, window=window)


def forward_check(case: JaggedCase, config: jagged_launch.Config | None, device: str, **kwargs: Any) -> None:
    """Output and lse alone."""
    t = jagged_cases.tensors(case, dtype=BF16, device=device)
    q, k, v = (x.double() for x in (t.q, t.k, t.v))
    expected = jagged_reference.jagged_forward(q, k, v, *t.layout, None, scale=0.1, **kwargs)
    with poisoned():
        actual = jagged.forward(t.q, t.k, t.v, *t.layout, None, config=config, scale=0.1, **kwargs)
    for name, e, a in zip(NAMES[:2], expected, actual, strict=True):
        finite = e.isfinite()
        assert torch.equal(finite, a.isfinite()), f"{case} {kwargs} {name}: not finite elsewhere than the reference"
        error, size = (a.double() - e)[finite].norm().item(), e[finite].norm().item()
        assert error <= RELATIVE[BF16] * size + ABSOLUTE, f"{case} {kwargs} {name}: off by {error:.2e} of {size:.2e}"


def scale_check(device: str) -> None:
    """Scales of 0 and below 0, where the largest product is not the largest score."""
    case = JaggedCase(name="scale", q_lengths=(40, 3), k_lengths=(40, 3))
    t = jagged_cases.tensors(case, dtype=BF16, device=device)
    for scale in (0.0, -0.2):
        close(exact(t, None, scale=scale), run(t, None, SMALL, scale=scale), BF16, f"scale {scale}")


def wide_window_check(device: str) -> None:
    """A window wider than 31 bits hides nothing."""
    t = jagged_cases.tensors(JaggedCase(name="wide", q_lengths=(3, 40), k_lengths=(3, 40)), dtype=BF16, device=device)
    close(exact(t, None, scale=0.2), run(t, None, SMALL, scale=0.2, window=2**40), BF16, "wide window")


def cancellation_check(peak: float, device: str) -> None:
    """Row maxima far from 0, either way: padding takes no part in a row's sum."""
    dtype = FP32 if peak < -50 else BF16
    t = jagged_cases.cancellation(peak=peak, dtype=dtype, device=device)
    kwargs: dict[str, Any] = {"scale": t.q.shape[2] ** -0.5}
    expected, actual = exact(t, None, **kwargs), run(t, None, SMALL, **kwargs)
    for x in (*expected[2:4], *actual[2:4]):
        x[..., 0] = 0  # the component that makes the peak, times row sums of dS, which are 0 but for rounding
    close(expected, actual, dtype, f"cancellation {peak} {dtype}")


EDGE = JaggedCase(name="edge", q_lengths=(5, 33, 40), k_lengths=(5, 33, 40), heads=2, groups=1, dim=16, value_dim=16)
TAILS = replace(EDGE, name="tails", q_lengths=(64, 95, 96, 97, 161), k_lengths=(97, 96, 95, 160, 64))
"""Half a block of 64 in a last one, a row less and a row more."""
WIDE = replace(EDGE, name="wide", q_lengths=(65, 33, 200), k_lengths=(65, 33, 200), groups=2, dim=128, value_dim=128)


def edge_checks(device: str) -> Iterator[Callable[[], None]]:
    yield lambda: isolation_check(device)
    yield lambda: stride_check(device)
    yield lambda: order_check(device)
    yield lambda: wanted_check(device)
    yield lambda: refused_check(device)
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        for config in (GLUON, GLUON_IN_TURN):
            yield lambda config=config: isolation_check(device, WIDE, config)
            yield lambda config=config: heads_check(device, config)
            yield lambda config=config: stride_check(device, WIDE, config)
        yield lambda: wanted_check(device, WIDE, biased=False)
        yield lambda: turns_check(device)


def isolation_check(device: str, case: JaggedCase = EDGE, config: jagged_launch.Config = SMALL) -> None:
    """Whatever one sample holds, the others get the same bits."""
    t = jagged_cases.tensors(case, dtype=BF16, device=device)
    clean = run(t, None, config, scale=0.2)
    for index, poison in ((0, float("inf")), (1, float("nan"))):
        dirty = jagged_cases.tensors(case, dtype=BF16, device=device)
        rows, _ = dirty.sample(index)
        for x in (dirty.q, dirty.k, dirty.v, dirty.grad_out):
            x[rows] = poison
        others = torch.ones(len(t.q), dtype=torch.bool, device=device)
        others[rows] = False
        for name, before, after in zip(NAMES[:5], clean, run(dirty, None, config, scale=0.2)):
            assert torch.equal(before[others], after[others]), f"{name}: sample {index} changes others"
            assert not torch.equal(before[~others], after[~others]), f"{name}: nothing was poisoned"


def heads_check(device: str, config: jagged_launch.Config) -> None:
    """Whatever one head holds, the others get the same bits, also from a program that takes them after it."""
    clean = run(jagged_cases.tensors(WIDE, dtype=BF16, device=device), None, config, scale=0.2)
    for poison in (float("inf"), float("nan")):
        dirty = jagged_cases.tensors(WIDE, dtype=BF16, device=device)
        for x in (dirty.q, dirty.k, dirty.v, dirty.grad_out):
            x[:, 0] = poison
        for name, before, after in zip(NAMES[:5], clean, run(dirty, None, config, scale=0.2)):
            assert torch.equal(before[:, 1:], after[:, 1:]), f"{name}: head 0 changes others"
            assert not torch.equal(before[:, :1], after[:, :1]), f"{name}: nothing was poisoned"


def stride_check(device: str, case: JaggedCase = EDGE, config: jagged_launch.Config = SMALL) -> None:
    """Slices of a packed projection, which TMA reads where they lie, and a transposed layout, which it can't."""
    t = jagged_cases.tensors(case, dtype=BF16, device=device)
    expected = run(t, None, config, scale=0.2)
    packed = torch.cat((t.q, t.k, t.v), dim=1)
    spread = packed.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for whole in (packed, spread):
        q, k, v = whole.split((case.heads, case.groups, case.groups), dim=1)
        view = JaggedTensors(
            q=q, k=k, v=v, grad_out=t.grad_out.transpose(0, 1).contiguous().transpose(0, 1),
            q_offsets=t.q_offsets.long(), k_offsets=t.k_offsets.long(), max_q=t.max_q, max_k=t.max_k,
        )  # fmt: skip
        for name, e, a in zip(NAMES, expected, run(view, None, config, scale=0.2), strict=True):
            assert torch.equal(e, a), f"{name}: strides change the result"


def order_check(device: str) -> None:
    """The schedule is an order and nothing else: any other gives the same bits, tables' gradients included."""
    t, bias = jagged_cases.tensors(EDGE, dtype=BF16, device=device), tables(EDGE, device)
    made = schedule.build(t.q_offsets, t.k_offsets, len(t.q), len(t.k), t.max_q, t.max_k)
    first, second = made[0, :2].tolist()
    begin = 1 + schedule.lengths_of_lists(len(t.q), len(t.k), 3)[0]
    shuffled = made.clone()
    shuffled[1 : 1 + first] = made[1 : 1 + first].flip(0)
    shuffled[begin : begin + second] = made[begin : begin + second].roll(2, 0)
    results = []
    for one in (None, made, shuffled):
        out, lse = jagged.forward(t.q, t.k, t.v, *t.layout, bias, one, scale=0.2)
        results.append(
            (out, lse, *jagged.backward(t.grad_out, t.q, t.k, t.v, out, lse, *t.layout, bias, one, scale=0.2))
        )
    for name, *values in zip(NAMES, *results, strict=True):
        assert torch.equal(values[0], values[1]), f"{name}: a shared schedule changes the result"
        assert torch.equal(values[0], values[2]), f"{name}: the order of tiles changes the result"


def turns_check(device: str) -> None:
    """How many heads a program takes is no part of a result, so a batch's mean length is none."""
    t = jagged_cases.tensors(WIDE, dtype=BF16, device=device)
    apart, in_turn = (run(t, None, config, scale=0.2) for config in (GLUON, GLUON_IN_TURN))
    for name, one, other in zip(NAMES, apart, in_turn, strict=True):
        assert torch.equal(one, other), f"{name}: heads in turn change the result"


def wanted_check(device: str, case: JaggedCase = EDGE, biased: bool = True) -> None:
    """Each subset of gradients equals all of them, and is empty elsewhere."""
    t, bias = jagged_cases.tensors(case, dtype=BF16, device=device), tables(case, device) if biased else None
    out, lse, *grads = run(t, bias, scale=0.2)
    for wanted in ("", "k", "b", "vq"):
        with poisoned():
            some = jagged.backward(t.grad_out, t.q, t.k, t.v, out, lse, *t.layout, bias, scale=0.2, wanted=wanted)
        for name, whole, part in zip("qkvbb", grads, some, strict=True):
            assert torch.equal(part, whole) if name in wanted else part.shape == (0,), f"{wanted}: {name}"


def refused_check(device: str) -> None:
    """Heads too wide and dtypes that no kernel takes are refused."""
    case = JaggedCase(name="wide", q_lengths=(3,), k_lengths=(3,), dim=272, value_dim=16)
    for refused, t in (
        (ValueError, jagged_cases.tensors(case, dtype=BF16, device=device)),
        (TypeError, jagged_cases.tensors(EDGE, dtype=torch.float64, device=device)),
    ):
        message = ""
        try:
            jagged.forward(t.q, t.k, t.v, *t.layout, None, scale=1.0)
        except refused as error:
            message = str(error)
        assert "expected" in message


def schedule_checks(device: str) -> Iterator[Callable[[], None]]:
    """The device's lists equal the CPU's."""
    for seed, (samples, longest) in enumerate(((5, 300), (140, 400), (1, 1000), (3, 5))):
        for mask, kind in itertools.product(({}, {"causal": True}, {"window": 40}), ("self", "cross", "broadcast")):
            yield lambda a=(seed, samples, longest, mask, kind): schedule_check(*a, device)


def schedule_check(seed: int, samples: int, longest: int, mask: dict[str, Any], kind: str, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(0, longest + 1, (samples,), generator=generator) for _ in range(2))
    k = q if kind == "self" else k
    q_offsets, k_offsets = (jagged_cases.offsets_of(tuple(x.tolist())) for x in (q, k))
    if kind == "broadcast":
        q_offsets, max_q = None, 200
    else:
        max_q = int(q.max())
    expected = schedule.build(q_offsets, k_offsets, int(q.sum()), int(k.sum()), max_q, int(k.max()), **mask)
    broadcast = max_q if kind == "broadcast" else None
    nq, nk = schedule.lengths_of_lists(int(q.sum()), int(k.sum()), samples, broadcast=broadcast)
    moved = [None if x is None else x.to(device) for x in (q_offsets, k_offsets)]
    with poisoned():
        actual = schedule._on_device(
            moved[0],
            moved[1],
            int(q.sum()),
            int(k.sum()),
            nq,
            nk,
            max_q,
            int(k.max()),
            mask.get("causal", False),
            mask.get("window"),
        )
    assert torch.equal(expected, actual.cpu()), (seed, mask, kind)


CHECKS = {"schedule": schedule_checks, "values": value_checks, "edges": edge_checks}


def main(group: str, device: str, share: int = 0, shares: int = 1) -> None:
    """Every `shares`-th check of a group, from number `share`."""
    for i, one in enumerate(CHECKS[group](device)):
        if i % shares == share:
            torch.manual_seed(i)
            one()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the interpreter divides by the zero sums of rows that see nothing
    start = time.perf_counter()
    main(sys.argv[1], sys.argv[2], *(int(n) for n in sys.argv[3:]))
    print(f"ok {time.perf_counter() - start:.1f} s")
