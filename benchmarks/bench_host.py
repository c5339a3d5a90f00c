"""Host cost of a fused norm -> linear pair in eager mode: what a step costs above plain torch when the work is tiny.

One row of 32 features, so that Python, autograd and dispatch are what is left. Two rows are written:

- `ours`: the step as it is. On the CPU the `reference` backend's seven ops are themselves Python and make some 500
  torch calls, where a kernel backend launches a kernel each.
- `ours, ops replayed`: the same step with every op of the backend table answering from a recording of one step, at no
  cost. What is left is what a kernel backend pays too, and what the limit is about: 150 us above plain torch, forward
  and backward.

Providers are interleaved; figures are medians over all rounds. A fused pair that differs from the unfused one in any
bit, or that quantizes nothing, gets no number.

    python benchmarks/bench_host.py [--rounds 20] [--out benchmarks/results/cpu.jsonl]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_cpu import RESULTS, environment, write
from mxfp8_recipe import apply_recipe, load_recipe
from mxfp8_recipe.backends import table
from mxfp8_recipe.mx_tensor import MXTensor

BENCH = "host_cpu"
LIMIT_US = 150.0
STEPS = 200
"""Steps of one provider before the next one's turn."""

Step = Callable[[], list[Tensor]]


def step_of(model: nn.Module, x: Tensor, grad: Tensor) -> Step:
    """A forward and backward that gives the output and all gradients."""
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        for tensor in (x, *parameters):
            tensor.grad = None
        out = model(x)
        out.backward(grad)
        return [out, *(tensor.grad for tensor in (x, *parameters) if tensor.grad is not None)]

    return step


def put(entries: dict[tuple[str, str], Any]) -> None:
    """Change the backend table."""
    table._TABLE.update(entries)
    table.resolve.cache_clear()


@contextmanager
def replayed_ops(step: Step) -> Iterator[None]:
    """The backend's ops answer, in order, with what they answered in one step."""
    real, tape = dict(table._TABLE), []

    def recording(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tape.append(op(*args, **kwargs))
            return tape[-1]

        return run

    try:
        put({key: recording(op) for key, op in real.items() if callable(op) and key[1] == "reference"})
        step()
        answers = cycle(tape)
        put({key: lambda *args, **kwargs: next(answers) for key in real if key[1] == "reference"})
        yield
    finally:
        put(real)


def time_steps(step: Step, into: list[float]) -> None:
    """Microseconds of each of `STEPS` steps."""
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        into.append((time.perf_counter() - start) * 1e6)


def gate(fused: nn.Module, steps: dict[str, Step], stored: Step) -> None:
    """Exit unless the pair is fused, quantized, and equal to the unfused one."""
    results = {name: step() for name, step in steps.items()}
    same = all(torch.equal(a, b) for a, b in zip(results["ours"], stored()))
    quantized = not torch.equal(results["ours"][0], results["plain"][0])
    travels = isinstance(fused.get_submodule("0")(torch.ones(1, 32)), MXTensor)
    if not (same and quantized and travels):
        sys.exit(f"equal to unfused: {same}, quantized: {quantized}, fused: {travels}; nothing is measured")


def run(rounds: int) -> list[dict[str, Any]]:
    """The rows of both kinds of cost."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    x, grad = torch.randn(1, 32, requires_grad=True), torch.randn(1, 32)
    fused, stored = copy.deepcopy(plain), copy.deepcopy(plain)
    apply_recipe(fused, example_inputs=x)
    apply_recipe(stored, load_recipe("mxfp8").model_copy(update={"fuse": False}), example_inputs=x)
    steps = {"plain": step_of(plain, x, grad), "ours": step_of(fused, x, grad)}
    gate(fused, steps, step_of(stored, x, grad))
    times: dict[str, list[float]] = {"plain": [], "ours": [], "ours, ops replayed": []}
    for _ in range(rounds):
        time_steps(steps["plain"], times["plain"])
        time_steps(steps["ours"], times["ours"])
        with replayed_ops(steps["ours"]):
            time_steps(steps["ours"], times["ours, ops replayed"])
    return [row(name, values, times["plain"]) for name, values in times.items()]


def row(provider: str, times: list[float], base: list[float]) -> dict[str, Any]:
    """One line of the results file."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return {
        "bench": BENCH,
        "case": "1x32x32",
        "variant": "fused norm -> linear, forward+backward, mxfp8, fp32 tensors",
        "provider": provider,
        "us_median": round(statistics.median(times), 1),
        "us_p10": round(deciles[0], 1),
        "us_p90": round(deciles[-1], 1),
        "us_above_plain": round(statistics.median(times) - statistics.median(base), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = {"load": round(os.getloadavg()[0], 1)} | environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows = run(options.rounds)
    for r in rows:
        spread, above = f"({r['us_p10']:.0f} .. {r['us_p90']:.0f})", f"{r['us_above_plain']:+8.1f} us above plain"
        print(f"{r['provider']:20s} {r['us_median']:8.1f} us  {spread:>16s}  {above}")
    cost = rows[-1]["us_above_plain"]
    print(f"at most {LIMIT_US:.0f} us, ops not counted: {'met' if cost <= LIMIT_US else 'NOT met'}")
    write([r | about for r in rows], options.out, BENCH)


if __name__ == "__main__":
    main()
