"""Host cost of a linear in eager mode on a GPU backend, measured without a GPU: launches that do nothing.

The path is the real one from the module's call to the last launch, forward and backward, on CPU tensors that pass for
CUDA ones: ops allocate what the kernels' launchers allocate and record launches with as many arguments, so that the
second call replays them (`fused.replay`). What is not in the figures: the driver's own time a launch, CUDA's allocator,
and autograd's thread, which CPU tensors do without. Figures are the thread's CPU time, which a busy machine disturbs
less than the clock.

    python benchmarks/bench_host_launches.py [--rounds 20] [--out benchmarks/results/cpu.jsonl]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_cpu import RESULTS, environment, write
from mxfp8_recipe import apply_recipe
from mxfp8_recipe.autograd import linear as linear_function
from mxfp8_recipe.backends import table
from mxfp8_recipe.fused import replay
from mxfp8_recipe.fused.direct import Direct
from mxfp8_recipe.mx_edge import Edge
from mxfp8_recipe.mx_tensor import MXTensor

BENCH = "host_launches_cpu"
ROWS, FEATURES = 128, 64
STEPS = 300
CPU = torch.device("cpu")
TILE_FLAGS, GEMM_FLAGS, SUM_FLAGS = 20, 12, 2
"""Compile-time arguments of the kernels, which their launches carry too."""

Step = Callable[[], Any]


class Descriptor:
    """What a launch carries for a TMA descriptor."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides, self.padding = base, tuple(base.shape), tuple(base.stride()), "zero"


def launch(programs: int, *args: Any) -> None:
    replay.launched(SimpleNamespace(run=lambda *_: None, function=0, packed_metadata=None), (programs,), args)


def nothing(*args: Any) -> None:
    """The launcher in C."""


def direct(
    compiled: Any, grid: tuple[int, ...], args: Sequence[Any], addresses: Sequence[tuple[int, int, int]],
    descriptors: Sequence[tuple[int, type, dict[str, Any], int, int]],
) -> Direct:  # fmt: skip
    """`fused.direct.direct` for the launcher that does nothing."""
    known, flat, moved, maps = {place[0]: place for place in descriptors}, [], {}, []
    for i, arg in enumerate(args):
        moved[i] = len(flat)
        if i in known:
            _, _, fields, slot, offset = known[i]
            maps.append((len(flat), slot, offset, int))
            flat += [None, *fields["shape"], *fields["strides"]]
        else:
            flat.append(arg)
    launcher = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False)
    held = SimpleNamespace(run=launcher, function=0, packed_metadata=())
    return Direct(nothing, held, grid, flat, [(moved[i], slot, offset) for i, slot, offset in addresses], maps)


def quantize(x: Tensor, rowwise: Any, colwise: Any, **options: Any) -> tuple[Tensor, ...]:
    rows, cols = x.shape
    shapes = [(rows, cols), (rows, cols // 32)] if rowwise else [(0,)] * 2
    shapes += [(cols, rows), (cols, -(-rows // 32))] if colwise else [(0,)] * 2
    outputs = tuple(torch.empty(shape, dtype=torch.uint8) for shape in shapes)
    launch(64, x.view(torch.int32), *outputs, x, rows, cols // 8, cols // 8, rows, *range(TILE_FLAGS))
    return outputs


def quantize_and_sum(x: Tensor, rowwise: Any, colwise: Any, *, sum_dtype: torch.dtype, **options: Any) -> Any:
    quantized, partial = quantize(x, rowwise, colwise), torch.empty(4, x.shape[1])
    total = torch.empty(x.shape[1], dtype=sum_dtype)
    launch(8, partial, total, *partial.shape, *range(SUM_FLAGS))
    return *quantized, total


def gemm(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype, **options: Any
) -> Tensor:  # fmt: skip
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype)
    split = bias is None and m < k  # the weight gradient's: its sums go through a workspace
    target = torch.empty(2 * m, n) if split else out
    tensors = (Descriptor(a), Descriptor(b), Descriptor(target), sa, sb, target if bias is None else bias, target)
    launch(132, *tensors, m, n, k, k // 32, k // 32, n, 8, 1, *range(GEMM_FLAGS))
    if split:
        launch(m, target, out, out, out, m, n, m * n, 2, n, n, *range(SUM_FLAGS + 1))
    return out


def passes_for_cuda(tensors: Any) -> torch.device:
    return CPU


def stream(index: Any) -> int:
    return 0


@contextmanager
def launches_that_do_nothing() -> Iterator[None]:
    """The reference backend's linear runs the ops above, and CPU tensors replay as CUDA ones do."""
    ops = {"quantize": quantize, "quantize_and_sum": quantize_and_sum, "gemm": gemm}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(table._TABLE, {(name, "reference"): op for name, op in ops.items()}))
        stack.enter_context(mock.patch.object(replay, "_device", passes_for_cuda))
        stack.enter_context(mock.patch.object(replay, "direct", direct))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", stream, create=True))
        table.resolve.cache_clear()
        yield
    table.resolve.cache_clear()
    for call in (linear_function._forward, linear_function._backward):
        call.tapes.clear()


def steps() -> dict[str, Step]:
    """Forward and backward of torch's linear on one row, which computes next to nothing, and of ours with an input to
    quantize and with one that came quantized.
    """
    torch.manual_seed(0)
    plain, swapped = (nn.Linear(FEATURES, FEATURES).bfloat16() for _ in range(2))
    x, grad = torch.randn(ROWS, FEATURES).bfloat16().requires_grad_(), torch.randn(ROWS, FEATURES).bfloat16()
    apply_recipe(swapped, "mxfp8_hopper")
    swapped(x)  # the first training forward is recorded
    config: Any = swapped.mxfp8_config
    specs = config.input_specs
    carrier = torch.empty((), dtype=x.dtype).expand(x.shape).requires_grad_()
    quantized = quantize(x.detach(), *specs)
    parts: Any = (*quantized, *specs, x.dtype, False, lambda: x, Edge("norm", ("linear",)))
    travels = MXTensor(carrier, *parts)

    one = x[:1].detach().requires_grad_()

    def step(module: nn.Module, value: Any, leaf: Tensor) -> Step:
        leaves, given = [leaf, *module.parameters()], grad[: len(leaf)]
        return lambda: torch.autograd.grad(module(value), leaves, given)

    return {
        "plain": step(plain, one, one),
        "ours": step(swapped, x, x),
        "ours, input quantized": step(swapped, travels, carrier),
    }


def check_replayed() -> None:
    """Exit unless every call had a tape and none ran its Python again."""
    tapes = [tape for call in (linear_function._forward, linear_function._backward) for tape in call.tapes.values()]
    if len(tapes) < 2 or not all(isinstance(tape, replay.Tape) for tape in tapes):
        sys.exit(f"{len(tapes)} recordings, not all of them tapes; nothing is measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with launches_that_do_nothing():
        times = measure(steps(), options.rounds)
        check_replayed()
    rows = [row(provider, values, times["plain"]) for provider, values in times.items()]
    for r in rows:
        print(f"{r['provider']:24s} {r['us_median']:7.1f} us  {r['us_above_plain']:+7.1f} us above torch's linear")
    write([r | environment() for r in rows], options.out, BENCH)


def measure(found: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU time a step, one figure a round, rounds of all interleaved."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, step in found.items():
            start = time.thread_time()
            for _ in range(STEPS):
                step()
            if turn:
                times[name].append((time.thread_time() - start) / STEPS * 1e6)
    return times


def row(provider: str, times: list[float], base: list[float]) -> dict[str, Any]:
    """One line of the results file."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return {
        "bench": BENCH,
        "case": f"{ROWS}x{FEATURES}x{FEATURES}",
        "variant": "linear, forward+backward, mxfp8_hopper, bf16, replayed launches that do nothing, CPU time",
        "provider": provider,
        "us_median": round(statistics.median(times), 1),
        "us_p10": round(deciles[0], 1),
        "us_p90": round(deciles[-1], 1),
        "us_above_plain": round(statistics.median(times) - statistics.median(base), 1),
    }


if __name__ == "__main__":
    main()
