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
from collections.abc import Callable, Iterator
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
from .backends.table import CORE_OPS, EPILOGUE_OPS, Kernel, layout
from .config import BF16, LinearPrecision
from .fused import reference, reference_ops
from .fused.spec import QuantSpec
from .recipe_files import load_recipe, recipe_names

INTERPRETER = "interpreter"
"""Stands for the `triton` backend on the CPU, in Triton's interpreter."""

SPECS = {"1x32": QuantSpec(), "1x128": QuantSpec(tile=(1, 128)), "32x32": QuantSpec(tile=(32, 32))}
ACTIVATIONS = (*reference_ops.PLAIN_KINDS, *reference_ops.GATED_KINDS)


@dataclass(frozen=True)
class Place:
    """Where checks run: a device and the backend under test there."""

    backend: str
    device: str

    @property
    def small(self) -> bool:
        """Nothing here is fast."""
        return self.device == "cpu"

    def op(self, name: str) -> Callable[..., Any]:
        """The op of the backend, laid out as its GEMM reads it."""
        backend = "triton" if self.backend == INTERPRETER else self.backend
        return backends.resolve(name, backend, torch.device(self.device))

    @property
    def layout(self) -> dict[str, Any]:
        """Keyword arguments that make the reference lay its outputs out alike."""
        backend = "triton" if self.backend == INTERPRETER else self.backend
        laid = layout(backend, torch.device(self.device))
        return {"swizzled": laid.swizzled, "pad_tokens": laid.room}


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


Measures = Iterator[tuple[str, float, float]]
"""`(unit, error, bound)`."""


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
    checked = {*CORE_OPS, *EPILOGUE_OPS, "matmul"}
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


def randn(place: Place, rows: int, cols: int) -> Tensor:
    """BF16 values whose rows differ by up to 2**12 in size."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-6, 7, (rows, 1)).float())
    return x.to(place.device, torch.bfloat16)


def differing(expected: tuple[Tensor, ...], actual: tuple[Tensor, ...]) -> float:
    """Bytes of two `(qdata, scale, qdata_t, scale_t)` that differ; a wrong shape counts whole."""
    return float(
        sum(
            max(e.numel(), 1) if e.shape != a.shape else int((e != a.view(e.dtype)).sum())
            for e, a in zip(expected, actual)
        )
    )


def units(actual: Tensor, expected: Tensor, smallest: float) -> float:
    """Largest difference in units in the last place of `actual`'s dtype, or in `smallest` where that is more."""
    exact = expected.double()
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-30)))) * torch.finfo(actual.dtype).eps
    return float(((actual.double() - exact).abs() / unit.clamp(min=smallest)).max())


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
            yield "relative, statistics", _relative(found, exact), 2e-6
        shared = (grad, x, weight, *stats, kind, None, bias is not None)
        back = backward(*shared, spec, spec)
        exact = reference_ops.norm_backward(*shared, None, None)
        yield "units in the last place", units(back[0], exact[0], 2.0**-16), 1.0
        yield "relative, weight gradient", _relative(back[1], exact[1]), 1e-4
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
            yield "relative, bias gradient", _relative(back[i + 2], expected[i + 2]), 1e-2
            emitted = tuple(back[4 + 4 * i : 8 + 4 * i])
            yield "bytes unlike quantize", differing(tuple(quantize(back[i], spec, spec)), emitted), 0.0
        yield "bytes re-emitted unlike", differing(tuple(out[3:5]), tuple(back[12:14])), 0.0


def check_linear(place: Place, name: str) -> Measures:
    """The operands of a recipe's three GEMMs to the byte, and the products within the error of their sums."""
    linear = load_recipe(name).linear
    assert isinstance(linear, LinearPrecision)
    for m, n, k in ((33, 64, 96),) if place.small else ((300, 256, 1024), (1000, 512, 384), (20000, 512, 512)):
        x, weight, grad = randn(place, m, k), randn(place, n, k), randn(place, m, n)
        pairs = {
            "fprop": ((x, -1, "input"), (weight, -1, "weight")),
            "dgrad": ((grad, -1, "grad_output"), (weight, -2, "weight")),
            "wgrad": ((grad, -2, "grad_output"), (x, -2, "input")),
        }
        for gemm, operands in pairs.items():
            precision = getattr(linear, gemm)
            if precision == BF16:
                continue
            specs = [getattr(precision, operand) for _, _, operand in operands]
            quantized = []  # what the GEMM reads, and the same bytes in the plain layout
            for stream, ((value, axis, _), spec) in enumerate(zip(operands, specs)):
                seed = torch.tensor(20_240, device=place.device)
                directions = (spec, None) if axis == -1 else (None, spec)
                found = place.op("quantize")(value, *directions, seed=seed, stream=stream)
                expected = reference_ops.quantize_both(value, *directions, seed=seed, stream=stream, **place.layout)
                yield "bytes unlike the reference", differing(expected, tuple(found)), 0.0
                plain = reference_ops.quantize_both(value, *directions, seed=seed, stream=stream)
                at = 0 if axis == -1 else 2
                quantized.append(((found[at].view(spec.elem.dtype), found[at + 1]), (plain[at], plain[at + 1])))
            if place.backend == INTERPRETER:
                continue  # the GEMM has a check of its own there
            ((a, a_scale), a_plain), ((b, b_scale), b_plain) = quantized
            out = place.op("gemm")(
                a, a_scale, b, b_scale, None, out_dtype=torch.float32, a_tile=specs[0].tile, b_tile=specs[1].tile
            )
            yield from _of_sum(out, a_plain, b_plain, specs)


def check_portable(place: Place) -> Measures:
    """`tl.dot_scaled` on plain scales."""
    gemm = Kernel("gemm.portable", "gemm").load()
    for m, n, k in ((33, 64, 96), (130, 96, 160)) if place.small else ((300, 256, 1024), (77, 96, 160)):
        specs = [SPECS["1x32"]] * 2
        a, b = (reference_ops.quantize_both(randn(place, rows, k), specs[0], None) for rows in (m, n))
        bias = torch.randn(n, device=place.device)
        out = gemm(a[0].view(specs[0].elem.dtype), a[1], b[0].view(specs[0].elem.dtype), b[1], bias)
        yield from _of_sum(out, a, b, specs, bias)


def check_epilogues(place: Place) -> Measures:
    """The sum of the kernel with epilogues, and each later step against the kernels that do it alone."""
    from .fused.gemm.epilogue import Epilogue, finish, interleave

    run_kernel, act = place.op("gemm_epilogue"), place.op("activation_quantize")
    spec = SPECS["1x32"]
    swizzled = {"swizzled": place.layout["swizzled"]}
    for m, n, k in ((130, 96, 160),) if place.small else ((300, 256, 1024), (1000, 480, 384)):
        a, b, c = (reference_ops.quantize_both(randn(place, rows, k), spec, None) for rows in (m, n, n))
        left, up, gate = ((q.view(spec.elem.dtype), scale) for q, scale, *_ in (a, b, c))
        bias = torch.randn(n, device=place.device)
        out = run_kernel(*left, *up, bias, epilogue=Epilogue(), out_dtype=torch.float32)[0]
        yield from _of_sum(out, a, b, [spec, spec], bias)
        residual = torch.randn(m, n).to(place.device, torch.bfloat16)
        for kind in ("relu",) if place.small else reference_ops.PLAIN_KINDS:
            epilogue = Epilogue(activation=kind, rowwise=spec, emit_sum=True)
            y, z, _, *quantized = run_kernel(*left, *up, bias, residual, epilogue=epilogue)
            alone = act(z, None, kind, z.dtype, None, None, True)[0]
            expected = finish(alone, residual, epilogue=Epilogue(rowwise=spec), **swizzled)
            yield "elements unlike separate steps", float((y != expected[0]).sum()), 0.0
            yield "bytes unlike quantize", differing(expected[3:], tuple(quantized)), 0.0
        pair = interleave(gate[0], up[0]), interleave(gate[1], up[1]), interleave(bias, bias)
        alone = [run_kernel(*left, *w, bias, epilogue=Epilogue())[0] for w in (up, gate)]
        for kind in ("swiglu",) if place.small else reference_ops.GATED_KINDS:
            epilogue = Epilogue(activation=kind, rowwise=spec, emit_sum=True)
            y, *sums, qdata, scale, _, _ = run_kernel(*left, *pair, epilogue=epilogue)
            yield "elements unlike two layers", sum(float((x != z).sum()) for x, z in zip(sums, alone)), 0.0
            product = act(*sums, kind, y.dtype, None, None, True)[0]
            expected = finish(product, epilogue=Epilogue(rowwise=spec), **swizzled)
            yield "elements of a product unlike separate steps", float((y != product).sum()), 0.0
            yield "bytes of a product unlike quantize", differing(expected[3:5], (qdata, scale)), 0.0


def check_dact(place: Place) -> Measures:
    """The derivative in dgrad's epilogue against the GEMM and the kernel that takes it alone."""
    from .fused.gemm.dact import Dact

    run_kernel, multiply, apart = (place.op(name) for name in ("gemm_dact", "gemm", "activation_backward"))
    shapes = ((48, 64, 96),) if place.small else ((304, 256, 1024), (1008, 480, 384))
    for (m, n, k), spec in itertools.product(shapes, (SPECS["1x32"], SPECS["1x128"])):
        a, b = (reference_ops.quantize_both(randn(place, rows, k), spec, None) for rows in (m, n))
        operands = a[0].view(spec.elem.dtype), a[1], b[0].view(spec.elem.dtype), b[1]
        tiles = {"a_tile": spec.tile, "b_tile": spec.tile}
        z, gate = torch.randn(2, m, n).to(place.device, torch.bfloat16)
        grad = multiply(*operands, out_dtype=torch.bfloat16, **tiles)
        for kind in (*reference_ops.PLAIN_KINDS, "swiglu"):
            other = gate if kind == "swiglu" else None
            dact = Dact(activation=kind, rowwise=spec, colwise=spec, act_colwise=spec, emit_bias=True)
            out = run_kernel(*operands, z, other, epilogue=dact, **tiles)
            expected = apart(grad, z, other, kind, spec, spec, True, spec, out_dtype=z.dtype)
            yield "elements unlike separate steps", float((out[0] != expected[0]).sum()), 0.0
            yield "bias sums unlike separate steps", float((out[2] != expected[2]).sum()), 0.0
            yield "bytes unlike separate steps", differing(expected[4:], out[4:]), 0.0


def check_hopper_epilogues(place: Place) -> Measures:
    """Hopper's kernels on the tiles of the fast recipe, where they do all that they can, against separate kernels."""
    from .fused.gemm import apart
    from .fused.gemm.dact import Dact
    from .fused.gemm.epilogue import Epilogue, interleave, interleaved_tile

    names = ("gemm_epilogue", "gemm_dact", "gemm", "activation_backward")
    forward, backward, multiply, differentiate = (place.op(name) for name in names)
    spec, weight = SPECS["1x128"], QuantSpec(tile=(128, 128))
    tiles, paired = ({"a_tile": spec.tile, "b_tile": tile} for tile in (weight.tile, interleaved_tile(weight.tile)))
    layout: dict[str, Any] = {"rotation": None, "swizzled": False, "pad_tokens": 1}
    for m, n, k in ((20004, 352, 1056), (20000, 512, 2048)):
        x, up, gate = (
            (q.view(spec.elem.dtype), scale)
            for q, scale, *_ in (
                reference_ops.quantize_both(randn(place, rows, k), of, None)
                for rows, of in ((m, spec), (n, weight), (n, weight))
            )
        )
        bias = torch.randn(n, device=place.device)
        z, other = (multiply(*x, *w, bias, out_dtype=torch.bfloat16, **tiles) for w in (up, gate))
        pair = interleave(gate[0], up[0]), interleave(gate[1], up[1]), interleave(bias, bias)
        for kind in ACTIVATIONS:
            steps, gated = Epilogue(activation=kind, rowwise=spec, emit_sum=True), kind in reference_ops.GATED_KINDS
            given = pair if gated else (*up, bias)
            out = forward(*x, *given, epilogue=steps, **(paired if gated else tiles))
            expected = apart.finish(z, None, gate=other if gated else None, epilogue=steps, **layout)
            differ = sum(float((a != b).sum()) for a, b in zip(out[:3], expected[:3]))
            yield "elements unlike separate steps", differ, 0.0
            yield "bytes unlike separate steps", differing(expected[3:], out[3:]), 0.0
        grad = multiply(*x, *up, out_dtype=torch.bfloat16, **tiles)
        for kind in (*reference_ops.PLAIN_KINDS, "swiglu"):
            gate = other if kind == "swiglu" else None
            dact = Dact(
                activation=kind, rowwise=spec, colwise=spec, act_colwise=spec, emit_high=False, emit_bias=True
            )  # fmt: skip
            out = backward(*x, *up, z, gate, epilogue=dact, **tiles)
            expected = differentiate(grad, z, gate, kind, spec, spec, True, spec, emit_high=False)
            sums = sum(float((a != b).sum()) for a, b in zip(out[2:4], expected[2:4]))
            yield "bias sums unlike separate steps", sums, 0.0
            whole = [t[:, :m] if i in (2, 6, 8) and t.numel() else t for i, t in enumerate(expected[4:])]
            yield "bytes unlike separate steps", differing(tuple(whole), tuple(out[4:])), 0.0


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
        yield "relative to BF16", _relative(a, b), 0.2
    quantized = _relative(fused[0] - x, plain[0] - x)
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


def _relative(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def _of_sum(
    out: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], specs: list[QuantSpec], bias: Tensor | None = None
) -> Measures:
    """Largest error of a sum in units of what it may be, and the error of all in relation to the exact sums.

    FP8 tensor cores align the products of a step of 32 and the sum so far to the largest of them and, on Hopper, cut
    each 13 bits below it, at most four steps in a row; fp32 additions follow. What other tensor cores do is no worse.
    On random data errors average out: measured on an H200 relative errors are 3.1e-4 at most.
    """
    values = []
    for (qdata, scale), spec in zip((a[:2], b[:2]), specs):
        values.append(reference.dequantize(qdata.view(spec.elem.dtype), scale, dtype=torch.float64))
    exact = values[0] @ values[1].t()
    magnitude = values[0].abs() @ values[1].abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = magnitude * (4 * 33 * 2.0**-13 + (values[0].shape[1] / 32 + 34) * 2.0**-24) + 2.0**-40
    yield "of the sum's bound", float(((out.double() - exact).abs() / bound).max()), 1.0
    yield "relative to the exact sums", _relative(out, exact), 1e-3
