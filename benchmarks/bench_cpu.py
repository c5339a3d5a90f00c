"""Forward and backward of a linear layer on the CPU: `MXFP8Linear` against fp32 `nn.Linear` and torchao.

The reference backend emulates MXFP8: it pays for the fp32 GEMMs and, on top, for quantizing all six operands
(input, weight and grad_output, each along two contractions) and for dequantizing them. All providers run in one
process, interleaved, on rotated inputs. No number is written when a result is wrong.

    python benchmarks/bench_cpu.py [--case 4096x1024x1024] [--rounds 15] [--out benchmarks/results/cpu.jsonl]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows import commit_hash
from mxfp8_recipe.config import LinearPrecision
from mxfp8_recipe.fused.reference import dequantize, quantize
from mxfp8_recipe.modules import MXFP8Linear

BENCH = "linear_cpu"
RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
LIMIT = 1.6
"""`MXFP8Linear` may take this many times as long as fp32 `nn.Linear`."""
GATE_DB = 100.0
"""Least SQNR against dequantize, then multiply in fp64; fp32 accumulation alone gives about 130 dB."""
INPUT_SETS = 2

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """Rows M, out_features N and in_features K of one linear layer."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def step_of(linear: nn.Module, weight: Tensor) -> Step:
    """A forward and backward, giving output, gradient of the input, gradient of the weight."""

    def step(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.grad = weight.grad = None
        out = linear(x)
        out.backward(grad)
        assert x.grad is not None
        assert weight.grad is not None
        return out.detach(), x.grad, weight.grad

    return step


def torchao_linear(weight: Tensor, bias: Tensor) -> nn.Module | None:
    """The same layer from torchao's `to_mx`: quantize all six operands, dequantize, multiply; None without torchao."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode  # pyright: ignore[reportMissingImports]
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def seen(x: Tensor) -> Tensor:
        scale, data = to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        return to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.float32)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return torch.addmm(b, seen(x), seen(w).t())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, w = ctx.saved_tensors
            grad_weight = seen(grad.t()) @ seen(x.t()).t()
            return seen(grad) @ seen(w.t()).t(), grad_weight, grad.sum(0)

    class Linear(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Function.apply(x, weight, bias)  # pyright: ignore[reportReturnType]

    return Linear()


def oracle(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The step's results by explicit quantization and fp64 multiplication."""

    def seen(t: Tensor, axis: int) -> Tensor:
        qdata, scale = quantize(t.detach(), axis=axis)
        return dequantize(qdata, scale, axis=axis, dtype=torch.float64)

    out = seen(x, -1) @ seen(weight, -1).t() + bias.detach().double()
    return out, seen(grad, -1) @ seen(weight, -2), seen(grad, -2).t() @ seen(x, -2)


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    noise = (actual.double() - expected).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise))


def gate(providers: dict[str, Step], inputs: tuple[Tensor, Tensor], linear: nn.Linear) -> None:
    """Exit when a quantized provider is not the oracle, or the fp32 one is as close: then nothing was quantized."""
    x, grad = inputs
    expected = oracle(x, linear.weight, linear.bias, grad)
    for name, step in providers.items():
        worst = min(sqnr_db(actual, e) for actual, e in zip(step(x, grad), expected))
        print(f"gate: {name:14s} {worst:6.1f} dB against the fp64 oracle")
        if (worst >= GATE_DB) == (name == "fp32"):
            sys.exit(f"{name}: {worst:.1f} dB is on the wrong side of {GATE_DB} dB; nothing is measured")


def measure(providers: dict[str, Step], inputs: list[tuple[Tensor, Tensor]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every provider in every round, each round starting with another provider."""
    times: dict[str, list[float]] = {name: [] for name in providers}
    names = list(providers)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            x, grad = inputs[index % len(inputs)]
            start = time.perf_counter()
            providers[name](x, grad)
            if index:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def environment() -> dict[str, Any]:
    load = round(os.getloadavg()[0], 1)  # what else was running: above 1, read the ratios with care
    return {"cpu": cpu_name(), "load": load, "torch": torch.__version__, "commit": commit_hash()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def row(case: Case, provider: str, times: list[float], base: list[float]) -> dict[str, Any]:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return {
        "bench": BENCH,
        "case": str(case),
        "variant": "forward+backward, mxfp8, fp32 tensors",
        "provider": provider,
        "ms_median": round(statistics.median(times), 2),
        "ms_p10": round(deciles[0], 2),
        "ms_p90": round(deciles[-1], 2),
        "ratio_to_fp32": round(statistics.median(times) / statistics.median(base), 3),
    }


def run(case: Case, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    linear = nn.Linear(case.k, case.n)
    layers = {
        "fp32": linear,
        "ours": MXFP8Linear.from_float(linear, LinearPrecision()),
        "torchao to_mx": torchao_linear(linear.weight, linear.bias),
    }
    if layers["torchao to_mx"] is None:
        print("torchao is not installed: its row is left out (pip install 'mxfp8-recipe[bench]')")
    providers = {name: step_of(layer, linear.weight) for name, layer in layers.items() if layer is not None}
    inputs = [(torch.randn(case.m, case.k, requires_grad=True), torch.randn(case.m, case.n)) for _ in range(INPUT_SETS)]
    gate(providers, inputs[0], linear)
    times = measure(providers, inputs, rounds)
    return [row(case, name, times[name], times["fp32"]) for name in providers]


def write(rows: list[dict[str, Any]], out: Path, bench: str) -> None:
    """Put the rows in place of a benchmark's earlier ones, and keep those of others."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text().splitlines() if out.exists() else []
    kept = [line for line in lines if json.loads(line).get("bench") != bench]
    out.write_text("".join(line + "\n" for line in [*kept, *map(json.dumps, rows)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=["4096x1024x1024"], help="MxNxK")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="of torch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    about = environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for text in options.case:
            rows += [r | {"threads": threads} for r in run(Case(*map(int, text.split("x"))), options.rounds)]
    for r in rows:
        print(
            f"{r['case']}  {r['threads']} threads  {r['provider']:14s} {r['ms_median']:8.1f} ms"
            f"  ({r['ms_p10']:.1f} .. {r['ms_p90']:.1f})  {r['ratio_to_fp32']:.2f}x of fp32"
        )
        if r["provider"] == "ours":
            verdict = "met" if r["ratio_to_fp32"] <= LIMIT else "NOT met"
            print(f"{'':{len(r['case'])}}  at most {LIMIT}x of fp32: {verdict}")
    write([r | about for r in rows], options.out, BENCH)


if __name__ == "__main__":
    main()
