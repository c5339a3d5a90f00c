"""Forward plus backward of a linear, a norm with its linear, and an MLP block, against BF16, on a GPU.

`linear`: the input comes already quantized by its norm; grad_output's quantization and the weight's are inside.
`norm_linear`: RMSNorm and a linear through `apply_recipe`, against the two under `torch.compile`.
`block`: norm, up, GELU, down and residual through `apply_recipe`, against the block under `torch.compile`.
`epilogue`: that block, and one with SwiGLU, with what surrounds a GEMM in its epilogue, against kernels of their own;
`pass=fwd` is the forward alone, without autograd.

Everything is timed by replaying CUDA graphs in turn, except `mode=eager`, which is host time included; there
`one_thread` is backward on the caller's thread, where Python is warmer than on autograd's own. Activations are larger
than L2. A provider whose result is wrong gets no number. `torchao_*` are compiled for the one shape.

    python benchmarks/bench_linear.py [linear|norm_linear|block|epilogue] [--out FILE] [--commit HASH]
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows import RESULTS, add_options, append, gpu_environment, quantiles_ms
from benchmarks.turns import time_in_turn
from mxfp8_recipe import apply_recipe, load_recipe, planner
from mxfp8_recipe.autograd import LinearConfig, NormConfig
from mxfp8_recipe.epilogue_table import Choice
from mxfp8_recipe.functional import mxfp8_linear, mxfp8_norm
from mxfp8_recipe.mx_edge import Edge

SHAPES = ((16384, 4096, 4096), (65536, 1024, 1024), (65536, 2048, 512), (262144, 512, 512))
EAGER_SHAPES = ((65536, 1024, 1024), (65536, 2048, 512))
BLOCKS = ((65536, 1024, 4096), (65536, 512, 2048))
EPILOGUES = {
    "ours": (), "ours_activation": ("activation", "gated"), "ours_dact": ("dact",),
    "ours_epilogue": ("activation", "gated", "dact"),
}  # fmt: skip
"""Provider to the steps that move into a GEMM's epilogue."""
RECIPE = "mxfp8_hopper"
MIN_SQNR_DB = 15.0
STEP_ROUNDS = 12

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Stamp:
    """Where rows go, and what they say of the machine."""

    out: Path | None
    machine: dict[str, str]


class Block(nn.Module):
    """Norm, up, GELU, down and residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GatedBlock(nn.Module):
    """Norm, gate and up, SwiGLU, down and residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(width), nn.Linear(hidden, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def milliseconds(steps: dict[str, Step], graph: bool) -> dict[str, list[float]]:
    """Times of single steps: replays of CUDA graphs, or eager calls timed by the host around a synchronize."""
    for step in steps.values():
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    if not graph:
        return {name: _host_times(step) for name, step in steps.items()}
    return time_in_turn({name: capture(step) for name, step in steps.items()}, rounds=STEP_ROUNDS)


def capture(step: Step) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _host_times(run: Callable[[], Any], budget_s: float = 0.6) -> list[float]:
    """Steady-state time a step: ten steps queued, then synchronized."""
    times, end = [], time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < 5:
        begin = time.perf_counter()
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 100)
    return times


def training_step(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, parameters: Sequence[Tensor]) -> Step:
    """Forward and backward into fresh gradients: output, input gradient and parameter gradients."""

    def step() -> list[Tensor]:
        out = forward(x)
        return [out, *torch.autograd.grad(out, [x, *parameters], grad)]

    return step


def sqnr_db(values: list[Tensor], expected: list[Tensor]) -> float:
    """The lowest signal-to-noise ratio among pairs of tensors."""
    worst = float("inf")
    for a, b in zip(values, expected):
        noise = (a.detach().float() - b.detach().float()).norm() / b.detach().float().norm()
        worst = min(worst, float(-20 * torch.log10(noise)))
    return worst


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def linear_steps(m: int, n: int, k: int) -> dict[str, Step]:
    layer, x, grad = nn.Linear(k, n, device="cuda", dtype=torch.bfloat16), randn(m, k).requires_grad_(), randn(m, n)
    parameters = list(layer.parameters())
    config = LinearConfig.of(load_recipe(RECIPE).linear)  # pyright: ignore[reportArgumentType]
    rowwise, colwise = config.input_specs
    # A norm whose output is x itself up to its scale: its MXFP8 is the input of the linear under test.
    norm = NormConfig("rms", 1e-6, rowwise, colwise, emit_high=False)
    weight = torch.ones(k, device="cuda", dtype=torch.bfloat16)
    quantized = mxfp8_norm(x.detach(), weight, None, config=norm, dtype=x.dtype, edge=Edge("norm", ("linear",)))
    normalized = F.rms_norm(x.detach(), (k,), weight, 1e-6).requires_grad_()
    carrier = quantized.carrier.detach().requires_grad_()  # pyright: ignore[reportAttributeAccessIssue]
    travels = quantized.reshaped(carrier)  # pyright: ignore[reportAttributeAccessIssue]

    def ours(_: Tensor) -> Tensor:
        return mxfp8_linear(travels, layer.weight, layer.bias, config=config)

    return {
        "bf16": training_step(layer, normalized, grad, parameters),
        "ours": training_step(ours, carrier, grad, parameters),
        **torchao_steps(layer, normalized, grad),
    }


def torchao_steps(layer: nn.Linear, x: Tensor, grad: Tensor) -> dict[str, Step]:
    """Float8 training by torchao of the same layer; without torchao, nothing."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    steps, base = {}, nn.Linear(layer.in_features, layer.out_features, device="cuda", dtype=torch.bfloat16)
    base.load_state_dict(layer.state_dict())
    torch._dynamo.reset()
    for recipe in ("tensorwise", "rowwise"):
        config = Float8LinearConfig.from_recipe_name(recipe)
        peer = convert_to_float8_training(nn.Sequential(copy.deepcopy(base)), config=config)
        compiled = torch.compile(peer, dynamic=False)
        steps[f"torchao_{recipe}"] = training_step(compiled, x, grad, list(peer.parameters()))
    return steps


def module_steps(build: Callable[[], nn.Module], m: int, k: int, n: int) -> dict[str, Step]:
    torch.manual_seed(0)
    plain, x, grad = build().cuda().bfloat16(), randn(m, k).requires_grad_(), randn(m, n)
    swapped = build().cuda().bfloat16()
    swapped.load_state_dict(plain.state_dict())
    apply_recipe(swapped, RECIPE, example_inputs=x.detach()[:128])
    torch._dynamo.reset()
    compiled = torch.compile(plain, dynamic=False)
    return {
        "bf16_compiled": training_step(compiled, x, grad, list(plain.parameters())),
        "ours": training_step(swapped, x, grad, list(swapped.parameters())),
    }


def forward_step(forward: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Forward alone, of which nothing is kept."""

    def step() -> list[Tensor]:
        with torch.no_grad():
            return [forward(x)]

    return step


def epilogue_steps(build: Callable[[], nn.Module], m: int, k: int, backward: bool) -> dict[str, Step]:
    """One block of weights under every provider of `EPILOGUES`; the first is what the others must equal."""
    x, grad, steps = randn(m, k).requires_grad_(), randn(m, k), {}
    for name, chosen in EPILOGUES.items():
        if not backward and "dact" in chosen:
            continue
        torch.manual_seed(0)
        net = build().cuda().bfloat16()
        choice = Choice(steps=frozenset(chosen), why="what is measured here")
        with mock.patch.object(planner, "epilogue_choice", return_value=choice):
            apply_recipe(net, RECIPE, example_inputs=x.detach()[:128])
        trained = training_step(net, x, grad, list(net.parameters()))
        steps[name] = trained if backward else forward_step(net, x)
    return steps


def eager_steps(m: int, n: int, k: int) -> dict[str, Step]:
    torch.manual_seed(0)
    plain, x, grad = nn.Linear(k, n).cuda().bfloat16(), randn(m, k).requires_grad_(), randn(m, n)
    swapped = nn.Linear(k, n).cuda().bfloat16()
    swapped.load_state_dict(plain.state_dict())
    apply_recipe(swapped, RECIPE)
    swapped(x)  # the first training forward is recorded
    return {
        "bf16": training_step(plain, x, grad, list(plain.parameters())),
        "ours": training_step(swapped, x, grad, list(swapped.parameters())),
    }


def saved_bytes(forward: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes of distinct storages saved for backward, parameters excluded."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward(x)
    return sum(storages.values())


def measure(bench: str, case: str, variant: str, steps: dict[str, Step], graph: bool, about: Stamp) -> None:
    """Check every provider against the first, time those that are right, and write a row each."""
    names, quality = list(steps), {}
    expected = steps[names[0]]()
    for name in names[1:]:
        quality[name] = sqnr_db(steps[name](), expected)
        if not quality[name] >= MIN_SQNR_DB:
            print(f"{bench} {case} {variant}: {name} is wrong ({quality[name]:.1f} dB), no number", flush=True)
            steps.pop(name)
    del expected
    times = milliseconds(steps, graph)
    base = statistics.median(times[names[0]])
    against = "ratio_to_bf16" if names[0].startswith("bf16") else "ratio_to_unfused"
    for name, found in times.items():
        row = {
            "bench": bench,
            "case": case,
            "variant": variant,
            "provider": name,
            **quantiles_ms(found),
            against: round(base / statistics.median(found), 4),
            "sqnr_db": round(quality[name], 1) if math.isfinite(quality.get(name, math.inf)) else None,
            **about.machine,
        }
        append(about.out, [row])
        print(f"{bench:12s} {case:18s} {variant:40s} {name:18s} {row['ms_median']:9.4f} ms {row[against]}x",
              flush=True)  # fmt: skip


def run(bench: str | None, about: Stamp) -> None:
    """Measure `linear`, `norm_linear` and `block`, or one of them."""
    variant = "tile=128,mode=graph,pass=fwdbwd"
    if bench in (None, "linear"):
        for m, n, k in SHAPES:
            measure("linear", f"{m}x{n}x{k}", f"{variant},op=quantized_input", linear_steps(m, n, k), True, about)
        for m, n, k in EAGER_SHAPES:
            for threads in (True, False):
                kind = f"tile=128,mode=eager,pass=fwdbwd{'' if threads else ',autograd=one_thread'}"
                with torch.autograd.set_multithreading_enabled(threads):
                    measure("linear", f"{m}x{n}x{k}", kind, eager_steps(m, n, k), False, about)
    if bench in (None, "block"):
        for m, width, hidden in BLOCKS:
            steps = module_steps(lambda w=width, h=hidden: Block(w, h), m, width, width)
            measure("block", f"{m}x{width}x{hidden}", variant, steps, True, about)
            measure_saved_bytes(m, width, hidden, about)
    if bench in (None, "epilogue"):
        for kind, block, m, width, hidden in (
            ("gelu", Block, 65536, 1024, 4096),
            ("swiglu", GatedBlock, 65536, 1024, 2816),
        ):
            for backward in (True, False):
                steps = epilogue_steps(lambda b=block, w=width, h=hidden: b(w, h), m, width, backward)
                what = f"tile=128,mode=graph,pass={'fwdbwd' if backward else 'fwd'},op={kind}"
                measure("epilogue", f"{m}x{width}x{hidden}", what, steps, True, about)
    if bench in (None, "norm_linear"):
        for m, n, k in SHAPES:
            steps = module_steps(lambda k=k, n=n: nn.Sequential(nn.RMSNorm(k), nn.Linear(k, n)), m, k, n)
            measure("norm_linear", f"{m}x{n}x{k}", variant, steps, True, about)


def measure_saved_bytes(m: int, width: int, hidden: int, about: Stamp) -> None:
    plain, x = Block(width, hidden).cuda().bfloat16(), randn(m, width).requires_grad_()
    before = saved_bytes(plain, x)
    apply_recipe(plain, RECIPE, example_inputs=x.detach()[:128])
    after = saved_bytes(plain, x)
    case = f"{m}x{width}x{hidden}"
    print(f"block {case}: saved for backward {after} of BF16's {before} bytes, {after / before:.3f}x")
    row = {"bench": "block", "case": case, "variant": "tile=128,op=saved_bytes", "provider": "ours", "bytes": after}
    append(about.out, [row | {"ratio_to_bf16": round(after / before, 4)} | about.machine])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", choices=("linear", "norm_linear", "block", "epilogue"))
    add_options(parser, RESULTS)
    options = parser.parse_args()
    run(options.bench, Stamp(options.out, gpu_environment(options.commit)))
