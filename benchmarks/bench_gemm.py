"""MXFP8 GEMMs against cuBLAS: BF16, which they must beat, and FP8 with a scale per row, the practical ceiling; and with
an epilogue, against the same GEMM that stores BF16 and against that GEMM and the kernels after it.

    python benchmarks/bench_gemm.py [--out FILE] [--commit HASH] [--only SUBSTRING]

Every provider gives a correct result first or no number. It runs in a CUDA graph over rotated inputs, timed in turn
with the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows import add_options, append, gpu_environment, quantiles_ms
from benchmarks.turns import time_in_turn
from fused import reference
from fused.activation_quantize import activation_backward, activation_quantize
from fused.gemm import hopper
from fused.gemm.dact import Dact
from fused.gemm.epilogue import Epilogue, interleave, interleaved_tile
from fused.gemm.hopper_dact import gemm_dact
from fused.gemm.hopper_epilogue import gemm_epilogue
from fused.spec import QuantSpec

L2_BYTES = 200e6  # rotated inputs exceed this
ROWS_CHECKED = 256
MAX_ERROR = 2.5e-3  # BF16 output rounds to 1.7e-3


@dataclass(frozen=True)
class Case:
    """One kind of GEMM: tiles of its operands, and shapes as tokens x out x in, contraction last."""

    variant: str
    a_tile: tuple[int, int]
    b_tile: tuple[int, int]
    shapes: tuple[tuple[int, int, int], ...]


SQUARE, ADS = (8192, 8192, 8192), (65536, 1024, 1024)
CASES = (
    Case(
        "tile=128,mode=graph",
        (1, 128),
        (128, 128),
        (SQUARE, (16384, 4096, 4096), ADS, (65536, 512, 2048), (262144, 512, 512), (65536, 2048, 512)),
    ),
    Case("tile=128,op=wgrad,mode=graph", (1, 128), (1, 128), ((1024, 1024, 65536), (512, 512, 262144))),
    Case("tile=32x32,mode=graph", (1, 32), (32, 32), (SQUARE, ADS)),
    Case("tile=1x32,mode=graph", (1, 32), (1, 32), (SQUARE, ADS)),
)


EPILOGUES = (
    ("gelu", "bias, gelu, MXFP8", (65536, 4096, 1024)),
    ("gelu", "bias, gelu, MXFP8", (65536, 2048, 512)),
    ("gelu", "bias, gelu, MXFP8 alone", (65536, 4096, 1024)),
    ("gelu", "bias, gelu, MXFP8 alone", (65536, 2048, 512)),
    ("swiglu", "swiglu, MXFP8", (65536, 2816, 1024)),
    ("swiglu", "swiglu, MXFP8 alone", (65536, 2816, 1024)),
    ("silu", "dgrad, silu', MXFP8 twice, sums, y", (65536, 4096, 1024)),
    ("relu", "dgrad, relu', MXFP8 twice, sums, y", (65536, 4096, 1024)),
)
"""Activation, what follows the GEMM, and its shape: tokens x features of y x in. Unless MXFP8 comes alone, as without
a backward, what the activation applies to is kept."""


@dataclass
class Operands:
    """One set of inputs in every form a provider reads."""

    x: Tensor
    w: Tensor
    a: tuple[Tensor, Tensor]
    b: tuple[Tensor, Tensor]
    ones: tuple[Tensor, Tensor]


def make_operands(shape: tuple[int, int, int], case: Case) -> Operands:
    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    return Operands(x, w, quantize(x, case.a_tile), quantize(w, case.b_tile), ones)


def quantize(x: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    parts = [reference.quantize(rows, tile=tile) for rows in x.split(max(128, 2**24 // x.shape[1] // 128 * 128))]
    return torch.cat([q for q, _ in parts]), torch.cat([s.view(torch.uint8) for _, s in parts])


def providers(case: Case) -> dict[str, Callable[[Operands], Tensor]]:
    def ours(o: Operands) -> Tensor:
        return hopper.gemm(*o.a, *o.b, out_dtype=torch.bfloat16, a_tile=case.a_tile, b_tile=case.b_tile)

    def bf16(o: Operands) -> Tensor:
        return o.x @ o.w.t()

    def cublas_fp8_rowwise(o: Operands) -> Tensor:
        return torch._scaled_mm(o.a[0], o.b[0].t(), *o.ones, out_dtype=torch.bfloat16, use_fast_accum=True)  # pyright: ignore[reportReturnType]

    return {"ours": ours, "bf16": bf16, "cublas_fp8_rowwise": cublas_fp8_rowwise}


def relative_error(out: Tensor, o: Operands) -> float:
    """Of a sample of rows, against float64 on the dequantized operands."""
    rows = torch.linspace(0, out.shape[0] - 1, min(ROWS_CHECKED, out.shape[0]), device=out.device).long()
    exact = torch.zeros(len(rows), out.shape[1], dtype=torch.float64, device=out.device)
    (a, sa), (b, sb) = o.a, o.b
    for k in range(0, a.shape[1], 16384):
        block = slice(k // 32, (k + 16384) // 32)
        x = reference.dequantize(a[rows, k : k + 16384], sa[rows, block], dtype=torch.float64)
        w = reference.dequantize(b[:, k : k + 16384].contiguous(), sb[:, block].contiguous(), dtype=torch.float64)
        exact += x @ w.t()
    finite = not bool(out.isnan().any())
    return float((out[rows].double() - exact).norm() / exact.norm()) if finite else float("nan")


def capture(run: Callable[[Any], Any], sets: Sequence[Any]) -> torch.cuda.CUDAGraph:
    for o in sets:
        run(o)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for o in sets:
            run(o)
    return graph


def measure(case: Case, shape: tuple[int, int, int], stamp: dict[str, str]) -> list[dict[str, Any]]:
    m, n, k = shape
    bytes_read = 2 * (m + n) * k
    sets = [make_operands(shape, case) for _ in range(max(2, min(8, round(L2_BYTES / bytes_read))))]
    runs = providers(case)
    error = relative_error(runs["ours"](sets[0]), sets[0])
    if not error < MAX_ERROR:
        print(f"{case.variant} {m}x{n}x{k}: no number, relative error {error:.2e}", file=sys.stderr)
        runs.pop("ours")
    times = time_in_turn({name: capture(run, sets) for name, run in runs.items()}, len(sets))
    median = {name: values[len(values) // 2] for name, values in times.items()}
    ceiling = 2e-9 * m * n * k / median["cublas_fp8_rowwise"]
    rows = []
    for name, values in times.items():
        tflops = 2e-9 * m * n * k / median[name]
        rows.append(
            {
                "bench": "gemm",
                "case": f"{m}x{n}x{k}",
                "variant": case.variant,
                "provider": name,
                **quantiles_ms(values),
                "tflops": round(tflops, 1),
                "ceiling": round(ceiling, 1),
                "pct_of_ceiling": round(100 * tflops / ceiling, 1),
                "ratio_to_bf16": round(median["bf16"] / median[name], 3),
                **stamp,
            }
        )
    return rows


@dataclass
class Projection:
    """One set of inputs of a projection with an activation: the weight, or gate's and up's; z and other are what came
    before, of a gated pair up and gate.
    """

    x: tuple[Tensor, Tensor]
    w: tuple[Tensor, Tensor]
    gate: tuple[Tensor, Tensor]
    pair: tuple[Tensor, Tensor]
    bias: Tensor
    z: Tensor
    other: Tensor


def make_projection(shape: tuple[int, int, int], case: Case) -> Projection:
    m, n, k = shape
    x, w, gate = (
        quantize(torch.randn(rows, k, device="cuda", dtype=torch.bfloat16), tile)
        for rows, tile in ((m, case.a_tile), (n, case.b_tile), (n, case.b_tile))
    )
    pair = interleave(gate[0].view(torch.uint8), w[0].view(torch.uint8)).view(w[0].dtype), interleave(gate[1], w[1])
    z, other = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Projection(x, w, gate, pair, torch.randn(n, device="cuda", dtype=torch.bfloat16), z, other)


def epilogue_providers(kind: str, op: str, case: Case) -> dict[str, Callable[[Projection], tuple[Tensor, ...]]]:
    """`plain`: the GEMM alone, BF16 out. `apart`: that and a kernel after it. `ours`: one kernel."""
    tiles: dict[str, Any] = {"a_tile": case.a_tile, "b_tile": case.b_tile}
    paired: dict[str, Any] = tiles | {"b_tile": interleaved_tile(case.b_tile)}
    high: dict[str, Any] = tiles | {"out_dtype": torch.bfloat16}
    spec = QuantSpec(tile=case.a_tile)
    steps = Epilogue(activation=kind, rowwise=spec, emit_high=False, emit_sum=not op.endswith("alone"))
    if op.startswith("dgrad"):
        dact = Dact(activation=kind, rowwise=spec, colwise=spec, act_colwise=spec, emit_high=False, emit_bias=True)
        after: tuple[Any, ...] = (kind, spec, spec, True, spec)

        return {
            "plain": lambda p: (hopper.gemm(*p.x, *p.w, **high),),
            "apart": lambda p: activation_backward(
                hopper.gemm(*p.x, *p.w, **high), p.z, p.other if steps.gated else None, *after, emit_high=False
            ),
            "ours": lambda p: gemm_dact(*p.x, *p.w, p.z, p.other if steps.gated else None, epilogue=dact, **tiles),
        }
    if steps.gated:

        def two(p: Projection) -> tuple[Tensor, Tensor]:
            return hopper.gemm(*p.x, *p.w, **high), hopper.gemm(*p.x, *p.gate, **high)

        return {
            "plain": two,
            "apart": lambda p: activation_quantize(*two(p), kind, torch.bfloat16, spec, None, False)[1:3],
            "ours": lambda p: gemm_epilogue(*p.x, *p.pair, epilogue=steps, **paired)[3:5],
        }

    def one(p: Projection) -> Tensor:
        return hopper.gemm(*p.x, *p.w, p.bias, **high)

    return {
        "plain": lambda p: (one(p),),
        "apart": lambda p: activation_quantize(one(p), None, kind, torch.bfloat16, spec, None, False)[1:3],
        "ours": lambda p: gemm_epilogue(*p.x, *p.w, p.bias, epilogue=steps, **tiles)[3:5],
    }


def measure_epilogue(kind: str, op: str, shape: tuple[int, int, int], stamp: dict[str, str]) -> list[dict[str, Any]]:
    """Rows with `ratio_to_plain`, the time of the GEMM alone over that of a provider, and `ratio_to_apart`."""
    case, (m, n, k) = CASES[0], shape
    sets = [make_projection(shape, case) for _ in range(2)]  # each writes more than the L2 cache holds
    runs = epilogue_providers(kind, op, case)
    equal = all(torch.equal(a, b) for a, b in zip(runs["ours"](sets[0]), runs["apart"](sets[0]), strict=True))
    if not equal:
        print(f"{op} {m}x{n}x{k}: no number, bits unlike those of separate kernels", file=sys.stderr)
        runs.pop("ours")
    times = time_in_turn({name: capture(run, sets) for name, run in runs.items()}, len(sets))
    median = {name: values[len(values) // 2] for name, values in times.items()}
    return [
        {
            "bench": "gemm",
            "case": f"{m}x{n}x{k}",
            "variant": f"tile=128,mode=graph,op={op}",
            "provider": name,
            **quantiles_ms(values),
            "ratio_to_plain": round(median["plain"] / median[name], 3),
            "ratio_to_apart": round(median["apart"] / median[name], 3),
            **stamp,
        }
        for name, values in times.items()
    ]


def host_microseconds(stamp: dict[str, str], calls: int = 300) -> dict[str, Any]:
    """Host time of an eager call, on a shape whose device time is far below it."""
    case = CASES[0]
    o = make_operands((256, 256, 256), case)
    run = providers(case)["ours"]
    run(o)  # compiles
    samples = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run(o)
        samples.append((time.perf_counter() - start) / calls * 1e3)
        torch.cuda.synchronize()
    return {
        "bench": "gemm",
        "case": "256x256x256",
        "variant": "tile=128,mode=eager,op=host",
        "provider": "ours",
        **quantiles_ms(samples),
        **stamp,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_options(parser)
    parser.add_argument("--only", default="", help="only variants that contain this, or 'epilogues'")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("bench_gemm: needs a Hopper GPU")
    stamp = gpu_environment(args.commit)
    torch.manual_seed(0)
    rows = [host_microseconds(stamp)]
    print(f"host: {rows[0]['ms_median'] * 1e3:.1f} us a call")
    for case in CASES:
        for shape in case.shapes if args.only in case.variant else ():
            found = measure(case, shape, stamp)
            rows += found
            torch.cuda.empty_cache()
            line = "  ".join(f"{r['provider']} {r['tflops']:.0f} ({r['ratio_to_bf16']:.2f}x)" for r in found)
            print(f"{case.variant:30} {found[0]['case']:18} {line}", flush=True)
    for kind, op, shape in EPILOGUES if args.only in "epilogues" else ():
        found = measure_epilogue(kind, op, shape, stamp)
        rows += found
        torch.cuda.empty_cache()
        line = "  ".join(f"{r['provider']} {r['ms_median']:.3f} ms ({r['ratio_to_plain']:.2f}x)" for r in found)
        print(f"{op:36} {found[0]['case']:18} {line}", flush=True)
    append(args.out, rows)


if __name__ == "__main__":
    main()
