"""`mxfp8 doctor --selftest`: every kernel of this machine's backend against the reference, and blocks in each recipe.

On a GPU the kernels run as training runs them. Without one, those that Triton's interpreter can run do so on the CPU,
on small odd shapes; what is missing is said. Quantized bytes must be equal, elementwise results lie within units in the
last place, a GEMM within the error its sum can have. Checks run in processes of their own, several at a time, since
most of the time goes into compiling; later runs find the compiled kernels in Triton's cache.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from . import backends
from .api import apply_recipe
from .backends.table import CORE_OPS, EPILOGUE_OPS, JAGGED_OPS
from .config import LinearPrecision
from .fused import reference, reference_ops
from .fused.spec import QuantSpec
from .recipe_files import load_recipe, recipe_names
from .selftest_attention import MASKS, check_blocks, check_generalized, check_jagged
from .selftest_gemms import check_dact, check_epilogues, check_hopper_epilogues, check_linear, check_portable
from .selftest_places import (
    ACTIVATIONS,
    INTERPRETER,
    SPECS,
    Measures,
    Place,
    differing,
    relative,
    units,
)


@dataclass(frozen=True)
class Outcome:
    """The largest error of one kind that a check found, and what it may be; NaN is beyond any bound."""

    check: str
    error: float
    bound: float
    unit: str
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def here() -> Place:
    """The backend of this machine's first GPU, else the interpreter, else the reference."""
    if torch.cuda.is_available():
        return Place(backends.select(torch.device("cuda")), "cuda")
    return Place(INTERPRETER if find_spec("triton") is not None else "reference", "cpu")


def missing(place: Place) -> list[str]:
    """What of this project the checks cannot reach here, and why."""
    if place.device == "cpu":
        version = "torch is a CPU build" if torch.version.cuda is None else "torch finds no GPU"
        lines = [f"No GPU ({version}): nothing here is compiled or timed, GEMMs of Hopper and Blackwell do not run."]
        if place.backend == "reference":
            lines.append("No triton (pip install triton): its kernels are not checked, the reference alone is.")
        elif not _interprets_dot():
            lines.append("This triton's interpreter has no tl.dot_scaled (3.9 has): no GEMM kernel is checked.")
        return lines
    choice = backends.choose(torch.device("cuda"))
    lines = [f"Backend {choice.backend}: {choice}."] if choice.emulates else []
    checked = {*CORE_OPS, *EPILOGUE_OPS, *JAGGED_OPS, "jagged_schedule", "matmul"}
    unchecked = [op for op in backends.ops() if op not in checked and backends.has(op, choice.backend)]
    if unchecked and choice.backend != "reference":
        lines.append(f"Not checked: {', '.join(unchecked)}.")
    return lines


def _interprets_dot() -> bool:
    from importlib.metadata import version

    return tuple(int(part) for part in version("triton").split(".")[:2]) >= (3, 9)


def checks(place: Place) -> dict[str, Callable[[Place], Measures]]:
    """Checks by name, the longest first."""
    found: dict[str, Callable[[Place], Measures]] = {}
    recipes = [name for name in recipe_names() if isinstance(load_recipe(name).linear, LinearPrecision)]
    found |= {f"block {name}": _bound(check_block, name) for name in recipes}
    if place.backend != "reference":
        for kind, spec in itertools.product(("rms", "layer"), SPECS):
            found[f"norm {kind} {spec}"] = _bound(check_norm, kind, SPECS[spec])
        for i, kind in enumerate(ACTIVATIONS):
            spec = list(SPECS)[i % len(SPECS)]
            found[f"activation {kind} {spec}"] = _bound(check_activation, kind, SPECS[spec])
        for name in recipes:
            found[f"linear {name}"] = _bound(check_linear, name)
        if place.device == "cuda" or _interprets_dot():
            found["gemm, portable"] = check_portable
        if place.device == "cuda" or _interprets_dot():
            found["gemm, epilogues"] = check_epilogues
        if backends.has("gemm_dact", place.backend):
            found["gemm, derivatives of activations"] = check_dact
        if place.backend == "hopper":
            found["gemm, Hopper's epilogues"] = check_hopper_epilogues
        found |= {f"attention, {mask}": _bound(check_jagged, mask) for mask in MASKS}
        found |= {f"attention, {kind}": _bound(check_generalized, kind) for kind in ("gelu", "silu")}
        found |= {f"attention, blocks of {size}": _bound(check_blocks, size) for size in (32, 64, 128)}
    found["format"] = check_format
    return found


def _bound(function: Callable[..., Measures], *args: Any) -> Callable[[Place], Measures]:
    return lambda place: function(place, *args)


def run(place: Place, jobs: int | None = None, only: str = "") -> list[Outcome]:
    """Run every check whose name contains `only`, `jobs` at a time in processes of their own."""
    names = [name for name in checks(place) if only in name]
    if not names:
        raise ValueError(f"selftest: got {only!r}, expected part of one of {', '.join(checks(place))}")
    jobs = jobs or min(len(names), 16, os.cpu_count() or 1)
    if jobs == 1 and place.backend != INTERPRETER:
        return [outcome for name in names for outcome in run_one(name, place)]
    before = os.environ.get("TRITON_INTERPRET")
    if place.backend == INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when a process first imports it
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(run_one, names, itertools.repeat(place)))
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before
    return [outcome for outcomes in done for outcome in outcomes]


def run_one(name: str, place: Place) -> list[Outcome]:
    """The largest error of each unit that a check finds; an exception is a failure of its own."""
    if place.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    worst: dict[str, tuple[float, float]] = {}
    try:
        for unit, error, bound in checks(place)[name](place):
            known = worst.get(unit)
            if known is None or _share(error, bound) > _share(*known):
                worst[unit] = error, bound
    except Exception as error:
        return [Outcome(name, math.nan, 0.0, "raised", f"{type(error).__name__}: {error}")]
    return [Outcome(name, error, bound, unit) for unit, (error, bound) in worst.items()]


def _share(error: float, bound: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def print_outcomes(outcomes: list[Outcome], place: Place, console: Console) -> None:
    """One line a check and unit, failures with their reason, and what was not checked."""
    table = Table(title=f"Self-test: backend {place.backend} on {place.device}", title_justify="left")
    for column in ("check", "largest error", "bound", "unit", "result"):
        table.add_column(column, justify="right" if column in ("largest error", "bound") else "left")
    last = ""
    for outcome in outcomes:
        result = Text("pass", style="green") if outcome.passed else Text(f"FAIL {outcome.note}".strip(), style="red")
        name, last = "" if outcome.check == last else outcome.check, outcome.check
        table.add_row(name, f"{outcome.error:.3g}", f"{outcome.bound:.3g}", outcome.unit, result)
    console.print(table)
    for line in missing(place):
        console.print(line, highlight=False)
    failed = sum(not outcome.passed for outcome in outcomes)
    console.print(f"{len(outcomes)} results, {failed} failed.", highlight=False)


def as_dicts(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Outcomes as plain data, for `--json`."""
    return [asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes]


def check_norm(place: Place, kind: str, spec: QuantSpec) -> Measures:
    """Forward and backward on their own, and their MXFP8 against quantizing what they store."""
    options = place.layout
    norm, backward, quantize = (place.op(name) for name in ("norm_quantize", "norm_backward", "quantize"))
    for rows, cols in ((33, 96), (70, 160)) if place.small else ((33, 96), (1000, 1024), (300, 4096)):
        x, grad = (torch.randn(rows, cols).to(place.device, torch.bfloat16) for _ in range(2))
        weight = torch.rand(cols, device=place.device) + 0.5
        bias = torch.randn(cols, device=place.device) if kind == "layer" else None
        given = (x, None, weight, bias, 1e-5, kind, torch.bfloat16)
        out, expected = norm(*given, spec, spec, True), reference_ops.norm_quantize(*given, None, None, True)
        yield "units in the last place", units(out[0], expected[0], 2.0**-18), 1.0
        yield "bytes unlike quantize", differing(tuple(quantize(out[0], spec, spec)), tuple(out[2:6])), 0.0
        stats = out[6], out[7]
        for found, exact in zip(stats, expected[6:8]):
            yield "relative, statistics", relative(found, exact), 2e-6
        shared = (grad, x, weight, *stats, kind, None, bias is not None)
        back = backward(*shared, spec, spec)
        exact = reference_ops.norm_backward(*shared, None, None)
        yield "units in the last place", units(back[0], exact[0], 2.0**-16), 1.0
        yield "relative, weight gradient", relative(back[1], exact[1]), 1e-4
        yield "bytes unlike quantize", differing(tuple(quantize(back[0], spec, spec)), tuple(back[3:7])), 0.0
        plain = reference_ops.quantize_both(out[0], spec, spec, **options)
        yield "bytes unlike the reference", differing(plain, tuple(out[2:6])), 0.0


def check_activation(place: Place, kind: str, spec: QuantSpec) -> Measures:
    """Forward, backward and the re-emission of the activation."""
    forward, backward, quantize = (
        place.op(name) for name in ("activation_quantize", "activation_backward", "quantize")
    )
    for rows, cols in ((33, 96),) if place.small else ((33, 96), (1000, 1024)):
        x, other, grad = (torch.randn(rows, cols).to(place.device, torch.bfloat16) * 2 for _ in range(3))
        gate = other if kind in reference_ops.GATED_KINDS else None
        out = forward(x, gate, kind, torch.bfloat16, spec, spec, True)
        exact = reference_ops.activation_quantize(x, gate, kind, torch.bfloat16, None, None, True)[0]
        yield "units in the last place", units(out[0], exact, 2.0**-18), 1.0
        yield "bytes unlike quantize", differing(tuple(quantize(out[0], spec, spec)), tuple(out[1:])), 0.0
        back = backward(grad, x, gate, kind, spec, spec, True, spec)
        expected = reference_ops.activation_backward(grad, x, gate, kind, None, None, True, None)
        for i in (0, 1) if gate is not None else (0,):
            yield "units in the last place", units(back[i], expected[i], 2.0**-14), 1.0
            yield "relative, bias gradient", relative(back[i + 2], expected[i + 2]), 1e-2
            emitted = tuple(back[4 + 4 * i : 8 + 4 * i])
            yield "bytes unlike quantize", differing(tuple(quantize(back[i], spec, spec)), emitted), 0.0
        yield "bytes re-emitted unlike", differing(tuple(out[3:5]), tuple(back[12:14])), 0.0


def check_format(place: Place) -> Measures:
    """Facts of the format that have one right answer, and the 128x4 layout by its formula."""
    from .fused.scale_layout import swizzle_scale

    facts = {448.0: 127, 448.5: 128, 1.0: 119, 0.0: 0, 2.0**-140: 0, math.inf: 255, math.nan: 255, 3.0e38: 247}
    x = torch.zeros(len(facts), 32)
    x[:, 7] = torch.tensor(list(facts))
    _, scale = reference.quantize(x.to(place.device))
    wrong = (scale.view(torch.uint8).flatten().cpu() != torch.tensor(list(facts.values()))).sum()
    yield "scale bytes", float(wrong), 0.0
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = values.float()[values.float().isfinite()].view(-1, 2).repeat(1, 16).to(place.device)
    q, s = reference.quantize(finite * 2.0**3)
    yield "representable values lost", float((reference.dequantize(q, s) != finite * 8).sum()), 0.0
    plain = torch.randint(0, 255, (300, 9), dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(300), torch.arange(9), indexing="ij")
    at = (r // 128 * 3 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    yield "scale bytes", float((swizzle_scale(plain)[at] != plain).sum()), 0.0


class Block(nn.Module):
    """Norm, gated up, activation, down and residual: what the fused edges join."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden)
        self.middle, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.middle(F.silu(self.gate(h)) * self.up(h))))


def check_block(place: Place, name: str) -> Measures:
    """A step of a block: fused and unfused give the same bits, and differ from BF16 by what MXFP8 costs."""
    width, tokens = (96, 33) if place.small else (256, 1000)
    x = torch.randn(tokens, width).to(place.device, torch.bfloat16)
    fused, unfused, plain = (_step(name, variant, x) for variant in ("fused", "unfused", "bf16"))
    yield "elements unlike unfused", float(sum(int((a != b).sum()) for a, b in zip(fused, unfused))), 0.0
    for a, b in zip(fused, plain):
        # The emulation's own on the CPU: 0.08 at worst for rceil, 0.11 for floor, in the gradients of the first layers.
        yield "relative to BF16", relative(a, b), 0.2
    quantized = relative(fused[0] - x, plain[0] - x)
    yield "nothing quantized", float(quantized < 1e-3), 0.0


def _step(name: str, variant: str, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    net = Block(x.shape[1], 2 * x.shape[1]).to(x.device, torch.bfloat16)
    changes = {"gpu_min_features": 32, "rules": {}, "bf16_last_fraction": 0.0, "fuse": variant == "fused"}
    if variant != "bf16":
        apply_recipe(net, load_recipe(name).model_copy(update=changes), example_inputs=x, strict=True)
    x = x.detach().requires_grad_()
    torch.manual_seed(2)
    out = net(x)
    out.float().square().mean().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
