"""Time the memory-bound kernels: quantize, norm_quantize, activation_quantize, forward and backward.

    python benchmarks/bench_memory.py [quantize|norm_quantize|activation_quantize] [--out FILE] [--commit HASH]

The ceiling of each row is a copy of as many bytes as the operation must move, timed in the same run. Each timed
region is a CUDA graph over several sets of buffers, together larger than the L2 cache. No row is written for a result
that does not pass its check first. Providers: `ours`; `unfused`, our kernel storing BF16 and then our quantize;
`torch_compile`, rms_norm and torchao's `to_mx` compiled for the one shape, where torchao is installed;
`bf16_compiled`, the operation in BF16 without quantization; `memcpy`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import RESULTS, add_options, append, gpu_environment
from fused import activation_quantize, norm_quantize, quantize, reference_ops
from fused.norm_backward import norm_backward as run_norm_backward
from fused.spec import QuantSpec

REPLAYS = 30
BF16 = torch.bfloat16
SPECS = {"1x32": QuantSpec(), "128": QuantSpec(tile=(1, 128)), "32x32": QuantSpec(tile=(32, 32))}
SHAPES = ((262144, 512), (65536, 1024), (65536, 2048), (16384, 4096))
QDATA = 1 + 1 / 32
"""Bytes of one element and its share of a scale."""

Run = Callable[[], Any]


@dataclass
class Case:
    """One operation at one shape: what to time, how much it must move, and whether it is right."""

    bench: str
    case: str
    variant: str
    nbytes: float
    providers: dict[str, Callable[[], list[Run]]]
    check: Callable[[], None]


def time_graph(runs: list[Run]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of milliseconds a run, replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run_once in runs:
            run_once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run_once in runs:
            run_once()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) / len(runs) for begin, end in events)
    return times[len(times) // 2], times[len(times) // 10], times[-1 - len(times) // 10]


PIECE = 2**30
"""Bytes of a copy: one of 3 GB runs at 2,720 GB/s, one of 1 GB at 4,290."""


def copies(nbytes: float) -> list[Run]:
    """Copies that read and write `nbytes` in total, over three pairs of buffers."""
    size = int(nbytes / 2) // 16 * 16
    pairs = [tuple(torch.empty(size, dtype=torch.uint8, device="cuda").fill_(i) for _ in range(2)) for i in range(3)]

    def run_once(source: torch.Tensor, target: torch.Tensor) -> None:
        for a, b in zip(source.split(PIECE), target.split(PIECE), strict=True):
            b.copy_(a)

    return [lambda a=a, b=b: run_once(a, b) for a, b in pairs]


def time_copy(nbytes: int) -> tuple[float, float, float]:
    """The ceiling. Some sizes put source and target on the same memory channels and copy at 0.65 of the usual rate, so
    larger copies, scaled, are timed too and the fastest one counts.
    """
    found = []
    for larger in (1.0, 17 / 16, 9 / 8, 5 / 4):
        median, low, high = time_graph(copies(nbytes * larger))
        found.append((median / larger, low / larger, high / larger))
    return min(found)


def rotated(make: Callable[[], tuple], call: Callable[..., Any], sets: int = 3) -> list[Run]:
    """`call` on several sets of inputs."""
    return [lambda inputs=inputs: call(*inputs) for inputs in [make() for _ in range(sets)]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def equal(expected: tuple, actual: tuple) -> None:
    """Raise unless every tensor is equal to the bit."""
    for i, (e, a) in enumerate(zip(expected, actual)):
        if not torch.equal(e, a):
            raise AssertionError(f"output {i} is wrong")


def quantize_cases() -> Iterator[Case]:
    for rows, cols in (SHAPES[0], SHAPES[1], SHAPES[3]):
        for tile, spec in SPECS.items():
            for orient in ("row", "both"):
                other = spec if orient == "both" else None

                def check(spec=spec, other=other, cols=cols) -> None:
                    x = normal(4000, cols)
                    equal(reference_ops.quantize_both(x, spec, other), quantize.quantize_both(x, spec, other))

                yield Case(
                    "quantize", f"{rows}x{cols}", f"tile={tile},orient={orient},mode=graph",
                    rows * cols * (2 + QDATA * (2 if other else 1)),
                    {
                        "ours": lambda spec=spec, other=other, rows=rows, cols=cols: rotated(
                            lambda: (normal(rows, cols),), lambda x: quantize.quantize_both(x, spec, other)
                        )
                    },
                    check,
                )  # fmt: skip


def norm_cases() -> Iterator[Case]:
    for rows, cols in SHAPES:
        for tile, spec in SPECS.items():
            for orient in ("row", "both") if tile != "32x32" else ("both",):
                yield norm_forward(rows, cols, tile, spec, orient)
    for tile in ("1x32", "128", "32x32"):
        yield norm_backward(65536, 1024, tile, SPECS[tile])


def norm_forward(rows: int, cols: int, tile: str, spec: QuantSpec, orient: str) -> Case:
    other = spec if orient == "both" else None
    weight = torch.rand(cols, device="cuda") + 0.5

    def ours(x, rowwise: QuantSpec | None = spec, colwise: QuantSpec | None = other, high=False):
        return norm_quantize.norm_quantize(x, None, weight, None, 1e-6, "rms", BF16, rowwise, colwise, high)

    def unfused(x):
        return quantize.quantize_both(ours(x, None, None, True)[0], spec, other)

    def check() -> None:
        x = normal(4000, cols)
        y = ours(x, None, None, True)[0]
        expected = reference_ops.norm_quantize(x, None, weight, None, 1e-6, "rms", BF16, None, None, True)[0]
        if (y != expected).double().mean() > 1e-3:
            raise AssertionError("y is wrong")
        equal(reference_ops.quantize_both(y, spec, other), ours(x)[2:6])

    def make():
        return (normal(rows, cols),)

    providers = {"ours": lambda: rotated(make, ours), "unfused": lambda: rotated(make, unfused)}
    if (rows, cols) == (65536, 1024) and tile == "1x32" and importlib.util.find_spec("torchao") is not None:
        providers["torch_compile"] = lambda: rotated(make, compiled_norm(weight, orient))
    plain = torch.compile(lambda x: F.rms_norm(x, (cols,), weight.to(BF16), 1e-6), dynamic=False)
    providers["bf16_compiled"] = lambda: rotated(make, plain)
    nbytes = rows * cols * (2 + QDATA * (2 if other else 1)) + 4 * rows
    return Case("norm_quantize", f"{rows}x{cols}", f"tile={tile},orient={orient},mode=graph,pass=fwd,op=rms",
                nbytes, providers, check)  # fmt: skip


def compiled_norm(weight: torch.Tensor, orient: str) -> Callable[[torch.Tensor], Any]:
    """What one writes without our kernels: rms_norm, then torchao's MXFP8, compiled for the shape."""
    from torchao.prototype.mx_formats.mx_tensor import to_mx  # pyright: ignore[reportMissingImports]

    cols = weight.numel()

    def program(x):
        y = F.rms_norm(x, (cols,), weight.to(BF16), 1e-6)
        row = to_mx(y, torch.float8_e4m3fn, 32)
        return (row, to_mx(y.t().contiguous(), torch.float8_e4m3fn, 32)) if orient == "both" else row

    return torch.compile(program, dynamic=False)


def norm_backward(rows: int, cols: int, tile: str, spec: QuantSpec) -> Case:
    weight = torch.rand(cols, device="cuda") + 0.5
    none = torch.empty(0, device="cuda")

    def ours(grad, h, rstd, rowwise: QuantSpec | None = spec, colwise: QuantSpec | None = spec):
        return run_norm_backward(grad, h, weight, none, rstd, "rms", None, False, rowwise, colwise)

    def unfused(grad, h, rstd):
        return quantize.quantize_both(ours(grad, h, rstd, None, None)[0], spec, spec)

    def make(count=rows):
        return normal(count, cols), normal(count, cols), torch.rand(count, device="cuda") + 0.5

    def check() -> None:
        grad, h, rstd = make(4000)
        plain, fused = ours(grad, h, rstd, None, None), ours(grad, h, rstd)
        expected = reference_ops.norm_backward(grad, h, weight, none, rstd, "rms", None, False, None, None)
        if (plain[0] != expected[0]).double().mean() > 1e-2:
            raise AssertionError("dx is wrong")
        torch.testing.assert_close(plain[1], expected[1], rtol=1e-3, atol=1e-1)
        equal(plain[:2], fused[:2])
        equal(reference_ops.quantize_both(plain[0], spec, spec), fused[3:])

    providers = {"ours": lambda: rotated(make, ours, 2), "unfused": lambda: rotated(make, unfused, 2)}
    variant = f"tile={tile},orient=both,mode=graph,pass=bwd,op=rms"
    return Case("norm_quantize", f"{rows}x{cols}", variant, rows * cols * (6 + 2 * QDATA), providers, check)


def activation_cases() -> Iterator[Case]:
    for kind, rows, cols in (("gelu", 65536, 4096), ("gelu_tanh", 65536, 4096), ("swiglu", 65536, 2048)):
        for tile, orient in (("1x32", "row"), ("128", "row"), ("128", "both"), ("32x32", "both")):
            yield activation_forward(kind, rows, cols, tile, orient)
        for tile in ("128", "32x32"):
            yield activation_backward(kind, rows, cols, tile)


def activation_forward(kind: str, rows: int, cols: int, tile: str, orient: str) -> Case:
    spec = SPECS[tile]
    other = spec if orient == "both" else None
    inputs = 2 if kind in reference_ops.GATED_KINDS else 1

    def ours(x, rowwise: QuantSpec | None = spec, colwise: QuantSpec | None = other, high=False):
        return activation_quantize.activation_quantize(x, None, kind, BF16, rowwise, colwise, high)

    def unfused(x):
        return quantize.quantize_both(ours(x, None, None, True)[0], spec, other)

    def check() -> None:
        x = normal(2000, inputs * cols)
        y = ours(x, None, None, True)[0]
        expected = reference_ops.activation_quantize(x, None, kind, BF16, None, None, True)[0]
        if (y != expected).double().mean() > 2e-3:
            raise AssertionError("y is wrong")
        equal(reference_ops.quantize_both(y, spec, other), ours(x)[1:])

    def make():
        return (normal(rows, inputs * cols),)

    providers = {"ours": lambda: rotated(make, ours, 2), "unfused": lambda: rotated(make, unfused, 2)}
    nbytes = rows * cols * (2 * inputs + QDATA * (2 if other else 1))
    variant = f"tile={tile},orient={orient},mode=graph,pass=fwd,op={kind}"
    return Case("activation_quantize", f"{rows}x{cols}", variant, nbytes, providers, check)


def activation_backward(kind: str, rows: int, cols: int, tile: str) -> Case:
    """Gradients in both orientations and the activation's transposed qdata, no BF16 gradient."""
    spec = SPECS[tile]
    inputs = 2 if kind in reference_ops.GATED_KINDS else 1

    def ours(grad, x, specs: tuple[QuantSpec | None, ...] = (spec, spec, spec), high=False):
        row, col, act = specs
        return activation_quantize.activation_backward(grad, x, None, kind, row, col, False, act, emit_high=high)

    def unfused(grad, x):
        dx = ours(grad, x, (None, None, None), True)[0]
        y = activation_quantize.activation_quantize(x, None, kind, BF16, None, None, True)[0]
        return quantize.quantize_both(dx, spec, spec), quantize.quantize_both(y, None, spec)

    def make(count=rows):
        return normal(count, cols), normal(count, inputs * cols)

    def check() -> None:
        grad, x = make(2000)
        plain, fused = ours(grad, x, (None, None, None), True), ours(grad, x)
        expected = reference_ops.activation_backward(grad, x, None, kind, None, None, False, None)
        if (plain[0] != expected[0]).double().mean() > 1e-2:
            raise AssertionError("dx is wrong")
        equal(reference_ops.quantize_both(plain[0], spec, spec), fused[4:8])
        equal(activation_quantize.activation_quantize(x, None, kind, BF16, None, spec, False)[3:], fused[12:])

    providers = {"ours": lambda: rotated(make, ours, 2), "unfused": lambda: rotated(make, unfused, 2)}
    nbytes = rows * cols * (2 + 2 * inputs + QDATA * (2 * inputs + 1))
    variant = f"tile={tile},orient=both,mode=graph,pass=bwd,op={kind}"
    return Case("activation_quantize", f"{rows}x{cols}", variant, nbytes, providers, check)


PLAIN_TIMES: dict[tuple[str, str], tuple[float, float, float]] = {}
"""The BF16 operation does not depend on the tile: timed once a shape."""

BENCHES = {"quantize": quantize_cases, "norm_quantize": norm_cases, "activation_quantize": activation_cases}


def measure(case: Case, machine: dict[str, str], ceilings: dict[int, tuple[float, float, float]]) -> Iterator[dict]:
    """Rows of one case, the memcpy ceiling first."""
    case.check()
    size = int(case.nbytes)
    if size not in ceilings:
        ceilings[size] = time_copy(size)
    times = {"memcpy": ceilings[size]}
    for name, build in case.providers.items():
        if name == "bf16_compiled" and (case.bench, case.case) in PLAIN_TIMES:
            times[name] = PLAIN_TIMES[case.bench, case.case]
            continue
        torch._dynamo.reset()
        try:
            times[name] = time_graph(build())
        except Exception as error:  # a peer that fails is reported, not hidden; ours may not
            if name == "ours":
                raise
            print(f"{case.bench} {case.case} {case.variant} {name}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()
    plain = times.get("bf16_compiled")
    if plain:
        PLAIN_TIMES[case.bench, case.case] = plain
    for name, (median, p10, p90) in times.items():
        moved = name != "bf16_compiled"
        yield {
            "bench": case.bench, "case": case.case, "variant": case.variant, "provider": name,
            "ms_median": round(median, 5), "ms_p10": round(p10, 5), "ms_p90": round(p90, 5),
            "gbps": round(case.nbytes / median / 1e6, 1) if moved else None,
            "ceiling": round(case.nbytes / times["memcpy"][0] / 1e6, 1),
            "pct_of_ceiling": round(100 * times["memcpy"][0] / median, 1) if moved else None,
            "ratio_to_bf16": round(plain[0] / median, 3) if plain and name != "memcpy" else None,
            **machine,
        }  # fmt: skip


def run(bench: str | None, out: Path, revision: str | None = None) -> None:
    """Append the rows of one bench, or of all, to `out`, and print them.

    Raises:
        RuntimeError: without a GPU, or when a check fails. ValueError: for a name that is no bench.
    """
    if bench is not None and bench not in BENCHES:
        raise ValueError(f"bench: got {bench!r}, expected one of {', '.join(BENCHES)}")
    if not torch.cuda.is_available():
        raise RuntimeError("bench_memory: found no CUDA device, and times on another one would say nothing")
    machine = gpu_environment(revision)
    ceilings: dict[int, tuple[float, float, float]] = {}
    for name in [bench] if bench else BENCHES:
        for case in BENCHES[name]():
            for row in measure(case, machine, ceilings):
                append(out, [row])
                share = "" if row["pct_of_ceiling"] is None else f"{row['pct_of_ceiling']:6.1f} %"
                print(f"{row['bench']} {row['case']} {row['variant']} {row['provider']}: "
                      f"{row['ms_median'] * 1e3:.1f} us {share}", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="time the memory-bound kernels on a GPU")
    parser.add_argument("bench", nargs="?", choices=BENCHES)
    add_options(parser, RESULTS)
    parser.add_argument("--check", action="store_true", help="only check results, and fill the compile cache")
    options = parser.parse_args()
    if options.check:
        for checked in BENCHES[options.bench]() if options.bench else (c for b in BENCHES.values() for c in b()):
            checked.check()
        sys.exit()
    run(options.bench, options.out, options.commit)
