"""Checks of the kernels against the reference, on any device, as functions that raise.

Triton reads TRITON_INTERPRET when it is imported, so the interpreted checks run in a process of their own:
`python kernel_checks.py quantize|norm|activation cpu` with that variable set. On a GPU the same functions run
natively, real shapes included. Every output buffer is poisoned first: a kernel that leaves an element or a padding byte
unwritten fails.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fused import activation_quantize, launch, norm_backward, norm_quantize, quantize, reference_ops, spread
from fused.scale_layout import swizzle_scale
from fused.spec import TILES, QuantSpec
from mxfp8_recipe import backends
from mxfp8_recipe.backends import table

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NATURAL = QuantSpec()
HOPPER = QuantSpec(tile=(1, 128))
SQUARE = QuantSpec(tile=(32, 32))
KERNELS = {key: kernel for key, kernel in table._TABLE.items() if isinstance(kernel, table.Kernel)}


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty hands out NaN and 0xFF bytes."""
    genuine = torch.empty

    def poison(*args, **kwargs):
        x = genuine(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1)

    torch.empty = poison
    try:
        yield
    finally:
        torch.empty = genuine


def values(rows: int, cols: int, dtype: torch.dtype, device: str, *, specials: bool = True) -> Tensor:
    """Magnitudes over 40 binades with zero blocks, signed zeros, a subnormal, NaN and Inf."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-20, 20, (rows, cols)).float())
    flat = x.view(-1)
    if specials and flat.numel() > 2000:
        x[:, 32:64] = 0
        flat[3], flat[flat.numel() // 2], flat[150], flat[40] = float("nan"), -float("inf"), -0.0, 1e-42
    return x.to(device, dtype)


def canonical(qdata: Tensor, spec: QuantSpec | None) -> Tensor:
    """NaN elements as a class: their payloads differ between implementations."""
    if spec is None or not qdata.numel():
        return qdata
    magnitude = qdata & 0x7F
    return torch.where(magnitude > (0x7C if spec.elem.value == "e5m2" else 0x7E), 0x7F, qdata)


def same_bits(expected, actual, rowwise, colwise, what: str) -> None:
    """Fail unless two `(qdata, scale, qdata_t, scale_t)` are equal to the bit."""
    for i, (e, a) in enumerate(zip(expected, actual)):
        assert e.shape == a.shape, f"{what}: output {i} has shape {tuple(a.shape)}, not {tuple(e.shape)}"
        spec = (rowwise, None, colwise, None)[i]
        wrong = canonical(e, spec) != canonical(a, spec)
        assert not wrong.any(), f"{what}: output {i} differs in {int(wrong.sum())} of {wrong.numel()} bytes"


def check_quantize(x: Tensor, rowwise, colwise, **options) -> None:
    """`quantize_both` equals the reference to the bit."""
    with poisoned():
        actual = quantize.quantize_both(x, rowwise, colwise, **options)
    expected = reference_ops.quantize_both(x, rowwise, colwise, **options)
    same_bits(expected, actual, rowwise, colwise, f"quantize {tuple(x.shape)} {x.dtype} {rowwise} {colwise} {options}")
    assert x.numel() == 0 or any(t.any() for t in actual[::2]) or not x.any(), "nothing was quantized"


def check_sum(x: Tensor, rowwise, colwise, **options) -> None:
    """`quantize_and_sum` equals `quantize_both` to the bit; its sums are within the error of fp32, and repeat."""
    with poisoned():
        *actual, total = quantize.quantize_and_sum(x, rowwise, colwise, **options)
        again = quantize.quantize_and_sum(x, rowwise, colwise, **options)[4]
        rounded = quantize.quantize_and_sum(x, rowwise, colwise, sum_dtype=BF16, **options)[4]
    assert torch.equal(rounded.nan_to_num(), total.bfloat16().nan_to_num()), "rounded sums are not fp32 ones, rounded"
    same_bits(quantize.quantize_both(x, rowwise, colwise, **options), actual, rowwise, colwise, f"sum {tuple(x.shape)}")
    assert torch.equal(total, again), "the sums depend on more than their input"
    bound = x.double().abs().sum(0) * 2.0**-20
    assert ((total.double() - x.double().sum(0)).abs() <= bound).all(), f"sum {tuple(x.shape)} {rowwise} {colwise}"


def check_spread(rows: int, cols: int, device: str) -> None:
    """Scales in the 128 x 4 layout come out plain, and what pads that layout is not read into them."""
    with poisoned(), mock.patch.object(launch, "SPREAD_ELEMENTS", 0):
        plan = launch.plan_emission(
            torch.empty(0, device=device), rows, cols, HOPPER, HOPPER, swizzled=False, pad_tokens=1
        )
        held = spread.in_lines(plan)
    assert held is not plan
    expected = [torch.randint(0, 255, scale.shape, dtype=torch.uint8) for scale in plan.outputs[1::2]]
    for scale, lines in zip(expected, held.pointers[1::2]):
        padded = torch.full((-(-len(scale) // 128) * 128, scale.shape[1]), 255, dtype=torch.uint8)
        padded[: len(scale)] = scale
        lines.copy_(swizzle_scale(padded).view(torch.int32))
    spread.spread(held, plan)
    for scale, found in zip(expected, plan.outputs[1::2]):
        assert torch.equal(scale, found.cpu()), f"scales of {rows} x {cols} were not spread over their rows"


def spread_everywhere(check: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A check with the launches of large matrices."""

    def run() -> None:
        with mock.patch.object(launch, "SPREAD_ELEMENTS", 0):
            check(*arguments)

    return run


def within_one_ulp(expected: Tensor, actual: Tensor, fraction: float, what: str, absolute: float = 0.0) -> None:
    """At most `fraction` of the elements differ, none by more than one unit in the last place or `absolute`."""
    assert expected.shape == actual.shape, what
    assert expected.dtype == actual.dtype, what
    if not expected.numel():
        return
    e, a = expected.double(), actual.double()
    unit = torch.exp2(torch.floor(torch.log2(e.abs().clamp(min=1e-30)))) * torch.finfo(expected.dtype).eps
    assert ((e - a).abs() <= unit.clamp(min=absolute)).all(), f"{what}: off by {((e - a).abs() / unit).max():.2f} units"
    different = (e != a).double().mean().item()
    assert different <= fraction, f"{what}: {different:.2%} of the elements differ, expected at most {fraction:.2%}"


def check_norm(rows, cols, kind, dtype, residual, device, specs, *, out=BF16, swizzled=False, bias=None) -> None:
    """Forward and backward: close to the reference, and fused equal to unfused to the bit."""
    bias = kind == "layer" if bias is None else bias
    x, r, g = (torch.randn(rows, cols).to(device, dtype) for _ in range(3))
    w, b = torch.rand(cols).to(device) + 0.5, torch.randn(cols).to(device) if bias else None
    res = r if residual else None
    arguments = (x, res, w, b, 1e-5, kind, out)
    what = f"{kind} {rows}x{cols} {dtype}"
    with poisoned():
        plain = norm_quantize.norm_quantize(*arguments, None, None, True)
        back = norm_backward.norm_backward(g, x, w, plain[6], plain[7], kind, res, bias, None, None)
    expected = reference_ops.norm_quantize(*arguments, None, None, True)
    # fp32 statistics differ in their last bits; y = h * rstd then rounds apart where it lies that close to a tie:
    # a few times 2**-23 / 2**-8 of the elements in bf16, 2**-23 / 2**-11 in fp16.
    # With a bias, y crosses zero between terms whose own fp32 error, about 2**-22 of 8, is then all there is.
    within_one_ulp(expected[0], plain[0], 1e-3, f"{what} y", absolute=2.0**-18 if bias else 0.0)
    assert torch.equal(expected[1], plain[1]), f"{what}: residual"
    torch.testing.assert_close(plain[7], expected[7], rtol=1e-6, atol=1e-6)
    back_expected = reference_ops.norm_backward(g, x, w, plain[6], plain[7], kind, res, bias, None, None)
    # The two terms of dx cancel: an error of a few fp32 units of the terms, not of their difference.
    tolerance = 2.0**-20 if dtype is FP32 else 2.0**-16
    within_one_ulp(back_expected[0], back[0], 1.0 if dtype is FP32 else 5e-3, f"{what} dx", absolute=tolerance)
    for e, a in zip(back_expected[1:3], back[1:3]):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-3 * rows**0.5)
    for rowwise, colwise in specs:
        for emit_high in (True, False):
            with poisoned():
                fused = norm_quantize.norm_quantize(*arguments, rowwise, colwise, emit_high, swizzled=swizzled)
            assert torch.equal(fused[0], plain[0] if emit_high else plain[0][:0, 0]), f"{what}: y depends on the specs"
            for i in (1, 6, 7):
                assert torch.equal(fused[i], plain[i]), f"{what}: output {i} depends on the specs"
            unfused = quantize.quantize_both(plain[0], rowwise, colwise, swizzled=swizzled)
            same_bits(unfused, fused[2:6], rowwise, colwise, f"{what} {rowwise} {colwise}")
            if device == "cpu":
                break
        with poisoned():
            fused = norm_backward.norm_backward(
                g, x, w, plain[6], plain[7], kind, res, bias, rowwise, colwise, swizzled=swizzled
            )
        for i in range(3):
            assert torch.equal(fused[i], back[i]), f"{what}: gradient {i} depends on the specs"
        unfused = quantize.quantize_both(back[0], rowwise, colwise, swizzled=swizzled)
        same_bits(unfused, fused[3:], rowwise, colwise, f"{what} backward {rowwise} {colwise}")


def check_activation(rows, cols, kind, dtype, device, spec, *, packed=False, swizzled=False) -> None:
    """Forward, backward and the re-emission of the activation."""
    gated = kind in reference_ops.GATED_KINDS
    x, g, grad = (torch.randn(rows, cols).to(device, dtype) * 2 for _ in range(3))
    gate = g if gated and not packed else None
    if packed:
        x = torch.cat((g, x), dim=1)
    what = f"{kind} {rows}x{cols} {dtype} packed={packed} {spec}"
    op, ref = activation_quantize, reference_ops
    with poisoned():
        y = op.activation_quantize(x, gate, kind, dtype, spec, spec, True, swizzled=swizzled)
        lean = op.activation_quantize(x, gate, kind, dtype, spec, None, False, swizzled=swizzled)
        back = op.activation_backward(grad, x, gate, kind, spec, spec, True, spec, swizzled=swizzled)
        high = op.activation_backward(grad, x, gate, kind, None, None, False, None)
    # Activations are good to 1e-5 relative; dact crosses zero, where only its absolute error is small.
    fraction = 1.0 if dtype is FP32 else 2e-3
    smallest = 2.0**-18
    expected = ref.activation_quantize(x, gate, kind, dtype, None, None, True)[0]
    if dtype is FP32:
        torch.testing.assert_close(y[0], expected, rtol=2e-5, atol=1e-6)
    else:
        within_one_ulp(expected, y[0], fraction, f"{what} y", absolute=smallest)
    same_bits(quantize.quantize_both(y[0], spec, spec, swizzled=swizzled), y[1:], spec, spec, what)
    assert torch.equal(lean[1], y[1]), f"{what}: qdata depends on the other orientation"
    assert torch.equal(back[12], y[3]), f"{what}: re-emitted qdata"
    assert torch.equal(back[13], y[4]), f"{what}: re-emitted scale"
    expected = ref.activation_backward(grad, x, gate, kind, None, None, True, None)
    for i in (0, 1):
        if dtype is FP32:
            torch.testing.assert_close(back[i], expected[i], rtol=1e-4, atol=1e-5)
        else:
            within_one_ulp(expected[i], back[i], 1e-2, f"{what} gradient {i}", absolute=2.0**-14)
        assert torch.equal(back[i], high[i]), f"{what}: gradient {i} depends on the specs"
        torch.testing.assert_close(back[i + 2], expected[i + 2], rtol=1e-3, atol=2e-2 * rows**0.5)
        if back[i].numel():
            unfused = quantize.quantize_both(back[i], spec, spec, swizzled=swizzled)
            same_bits(unfused, back[4 + 4 * i : 8 + 4 * i], spec, spec, f"{what} gradient {i}")


def check_bias_sums(rows: int, cols: int, kind: str, dtype: torch.dtype, device: str, spec: QuantSpec) -> None:
    """The bias gradient beside a derivative is that of quantizing what it stores, to the bit: fused is unfused.

    Over 40 binades fp32 adds nothing exactly, so another order of the tokens gives other bits.
    """
    x, gate = (torch.randn(rows, cols).to(device, dtype) for _ in range(2))
    grad = values(rows, cols, FP32, device, specials=False)
    grad = (grad.sign() * grad.abs().sqrt() if dtype is FP16 else grad).to(dtype)
    gated = kind in reference_ops.GATED_KINDS
    colwise = QuantSpec(hadamard=64) if spec == HOPPER else spec  # a pass of its own
    back = activation_quantize.activation_backward(grad, x, gate if gated else None, kind, spec, colwise, True, None)
    for i in range(1 + gated):
        apart = quantize.quantize_and_sum(back[i], spec, colwise)[4]
        assert torch.equal(back[i + 2], apart), f"{kind} {dtype} {spec}: sums {i} depend on the kernel"
        doubled = back[i].double()
        error = (apart - doubled.sum(0)).abs() / doubled.abs().sum(0)
        assert (error < 2.0**-22).all(), f"{kind} {dtype} {spec}: sums {i}, off by {error.max():.1e}"
        assert (error > 0).any(), "exact sums say nothing about their order"


def check_every_bf16(kind: str, device: str) -> None:
    """Activation and slope of every bf16 up to 2**60 are rounded correctly, but for near ties and below 2**-40."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).view(512, 128)
    x = torch.where(x.float().abs() < 2.0**60, x, 0).to(device)
    y = activation_quantize.activation_quantize(x, None, kind, BF16, None, None, True)[0]
    slope = activation_quantize.activation_backward(torch.ones_like(x), x, None, kind, None, None, False, None)[0]
    exact = reference_ops._act(x.double(), kind), reference_ops._act_grad(x.double(), kind)
    for actual, expected in zip((y, slope), exact):
        unit = torch.exp2(torch.floor(torch.log2(expected.abs().clamp(min=2.0**-40)))) * 2.0**-7
        error = ((actual.double() - expected).abs() / unit).max().item()
        assert error < 0.505, f"{kind}: off by {error:.4f} units in the last place"


def quantize_checks(device: str) -> Iterator[Callable[[], None]]:
    """Every tile, format, rounding and layout on small odd shapes."""

    def check(rows: int, cols: int, dtype: torch.dtype, row, col, **options) -> Callable[[], None]:
        return lambda: check_quantize(values(rows, cols, dtype, device), row, col, **options)

    seed = torch.tensor(123456789123, device=device)
    pairs = [(row, col) for row, col in itertools.product((None, *TILES), (None, *TILES)) if row or col]
    few = [(row, col) for row, col in pairs if row == col or row is None or (row, col) == ((32, 128), (1, 32))]
    for row, col in pairs if device == "cuda" else few:
        yield check(130, 160, BF16, row and QuantSpec(tile=row), col and QuantSpec(tile=col))
    for elem, rounding, swizzled in itertools.product(("e4m3", "e5m2"), ("rceil", "floor"), (False, True)):
        for tile in ((1, 32), (128, 128)):
            spec = QuantSpec(tile=tile, elem=elem, scale_rounding=rounding)
            yield check(129, 96, FP32, spec, spec, swizzled=swizzled)
        yield check(129, 96, FP16, spec, None, swizzled=swizzled)
    for elem, size in (("e4m3", None), ("e4m3", 128), ("e5m2", 16)):
        spec = QuantSpec(elem=elem, hadamard=size, rounding="stochastic")
        yield check(130, 160, BF16, spec, spec, seed=seed, stream=3)
    yield check(150, 160, BF16, QuantSpec(hadamard=64), QuantSpec(tile=(1, 128)), swizzled=True)
    yield check(150, 160, BF16, None, QuantSpec(hadamard=64), swizzled=True, pad_tokens=32)
    for rows, cols in ((0, 64), (1, 32), (4, 32), (128, 128), (132, 288)):
        yield check(rows, cols, BF16, NATURAL, NATURAL)
        yield check(rows, cols, BF16, SQUARE, SQUARE, swizzled=True, pad_tokens=32)
    for rows, cols, dtype, row, col in (
        (300, 160, BF16, HOPPER, HOPPER), (130, 96, FP32, None, SQUARE), (16, 64, BF16, NATURAL, None),
        (0, 64, BF16, SQUARE, SQUARE),
    ):  # fmt: skip
        x = values(rows, cols, dtype, device, specials=False)
        yield lambda x=x, row=row, col=col: check_sum(x, row, col)
    strided = values(96, 70, BF16, device).t().contiguous().t()[:, 3:67]
    yield lambda: check_quantize(strided, NATURAL, HOPPER)
    for rows, cols in ((384, 640), (4352, 128)):
        yield lambda rows=rows, cols=cols: check_spread(rows, cols, device)
    if device == "cuda":
        for (rows, cols), spec in itertools.product(
            ((8192, 1024), (4224, 4224), (4096, 512), (400, 640)), (NATURAL, HOPPER, SQUARE)
        ):
            yield spread_everywhere(check_quantize, values(rows, cols, BF16, device), spec, spec)
        x = values(8192, 1024, BF16, device, specials=False)
        yield spread_everywhere(check_sum, x, HOPPER, HOPPER)
        for rows, cols in ((8192 + 77, 1024), (4096, 4096), (16384, 512)):
            for spec in (NATURAL, HOPPER, SQUARE):
                yield check(rows, cols, BF16, spec, spec)


def norm_checks(device: str) -> Iterator[Callable[[], None]]:
    """Both kinds, residuals, dtypes, several chunks of 128 features a row, ragged tokens."""

    def check(rows, cols, kind, dtype, residual, specs, **options) -> Callable[[], None]:
        return lambda: check_norm(rows, cols, kind, dtype, residual, device, specs, **options)

    yield check(130, 160, "rms", BF16, True, [(NATURAL, None), (HOPPER, HOPPER)])
    yield check(5, 96, "layer", BF16, False, [(SQUARE, SQUARE), (None, NATURAL)], swizzled=True)
    yield check(33, 64, "layer", FP32, True, [(NATURAL, NATURAL)])
    yield check(20, 416, "rms", FP16, False, [(NATURAL, NATURAL)], out=FP16)
    yield check(0, 64, "layer", BF16, True, [(NATURAL, NATURAL)])
    if device == "cuda":
        specs = [(NATURAL, None), (HOPPER, HOPPER), (SQUARE, SQUARE)]
        for rows, cols in ((32768 + 77, 512), (16384, 1024), (8192 + 3, 2048), (4096, 4096)):
            yield check(rows, cols, "rms", BF16, False, specs)
        yield check(16384 + 5, 1024, "layer", BF16, True, specs)
        yield check(4096 + 5, 2048, "layer", FP32, True, specs)


def activation_checks(device: str) -> Iterator[Callable[[], None]]:
    """Every activation; a gate given apart, packed, and packed with halves no multiple of 128."""

    def check(rows, cols, kind, dtype, spec, **options) -> Callable[[], None]:
        return lambda: check_activation(rows, cols, kind, dtype, device, spec, **options)

    for kind in reference_ops.PLAIN_KINDS:
        yield check(34, 96, kind, BF16, NATURAL)
        yield lambda kind=kind: check_every_bf16(kind, device)
    yield check(130, 32, "gelu", FP32, SQUARE)
    yield check(70, 160, "swiglu", BF16, HOPPER)
    yield check(33, 64, "geglu_tanh", BF16, NATURAL, packed=True)
    yield check(33, 128, "geglu", BF16, HOPPER, packed=True, swizzled=True)
    yield check(0, 64, "reglu", BF16, NATURAL)
    for kind, dtype, spec in itertools.product(("gelu", "swiglu"), (BF16, FP16, FP32), (NATURAL, HOPPER, SQUARE)):
        yield lambda kind=kind, dtype=dtype, spec=spec: check_bias_sums(300, 160, kind, dtype, device, spec)
    if device == "cuda":
        yield check(8192 + 77, 4096, "gelu", BF16, HOPPER)
        yield check(8192, 2048, "swiglu", BF16, SQUARE, packed=True)
        for spec in (NATURAL, HOPPER, SQUARE):
            yield spread_everywhere(check_activation, 1024, 640, "gelu", BF16, device, spec)


def check_rows(op: str, tokens: int, device: str, *before: Any, high: str, groups: tuple[int, ...]) -> None:
    """An op gives a GEMM transposed rows that start on 16 bytes, with the bits and shapes of rows that do not.

    `before`: the op's arguments up to its specs. `high`: those between. `groups`: where its outputs have quantizations.
    """
    backend = "triton" if device == "cpu" else backends.select(torch.device(device))
    spec = HOPPER.encode()
    text = {"": (spec, spec), "high": (spec, spec, False), "both": (spec, spec, spec, False, False)}[high]
    rest = (None, 0, 0, backend) if high == "both" else (None, 0, backend)
    arguments = (*before, *text, *rest)
    with poisoned():
        found = getattr(backends, op)(*arguments)
    with mock.patch.dict(table._TABLE, {key: replace(k, options=()) for key, k in KERNELS.items()}):
        table.resolve.cache_clear()
        with mock.patch.object(table, "LAYOUTS", {}):
            table.layout.cache_clear()
            exact = getattr(backends, op)(*arguments)
    table.resolve.cache_clear()
    table.layout.cache_clear()
    for i, (a, b) in enumerate(zip(found, exact)):
        assert a.shape == b.shape, f"{op}, {tokens} tokens: output {i} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{op}, {tokens} tokens: output {i} differs"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = getattr(backends, op)(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    assert [f.stride() for f in fakes if f.numel()] == [a.stride() for a in found if a.numel()], op
    for start in groups:
        transposed = found[start + 2]
        if tokens:
            assert transposed.stride(0) == -(-tokens // 16) * 16
            whole = transposed.as_strided((len(transposed), transposed.stride(0)), transposed.stride())
            assert not whole[:, tokens:].any(), f"{op}, {tokens} tokens: padding is not zero"


def rows_checks(device: str) -> Iterator[Callable[[], None]]:
    """Every op that quantizes for a GEMM over tokens, at ragged numbers of them."""

    def check(op: str, tokens: int) -> Callable[[], None]:
        def run() -> None:
            x, grad = (torch.randn(tokens, 64, device=device).to(BF16) for _ in range(2))
            weight = torch.rand(64, device=device)
            before: dict[str, tuple[Any, ...]] = {
                "quantize": (x,), "quantize_and_sum": (x,), "norm_quantize": (x, weight, weight, 1e-5, "layer", BF16),
                "activation_quantize": (x, None, "gelu", BF16), "activation_backward": (grad, x, grad, "swiglu", BF16),
            }  # fmt: skip
            high, groups = {
                "norm_quantize": ("high", (1,)), "activation_quantize": ("high", (1,)),
                "activation_backward": ("both", (4, 8, 10)),
            }.get(op, ("", (0,)))  # fmt: skip
            check_rows(op, tokens, device, *before[op], high=high, groups=groups)

        return run

    for tokens in (0, 33, 48):
        for op in ("quantize", "quantize_and_sum", "norm_quantize", "activation_quantize", "activation_backward"):
            yield check(op, tokens)
    yield check("quantize", 130)
    if device == "cuda":
        yield check("quantize", 8191)
        yield check("norm_quantize", 8191)


CHECKS = {"quantize": quantize_checks, "norm": norm_checks, "activation": activation_checks, "rows": rows_checks}


def run(group: str, device: str, share: int = 0, shares: int = 1) -> None:
    """Every `shares`-th check of a group, from number `share`."""
    for i, check in enumerate(CHECKS[group](device)):
        if i % shares == share:
            torch.manual_seed(i)
            check()


if __name__ == "__main__":
    torch.set_num_threads(1)
    start = time.perf_counter()
    run(sys.argv[1], sys.argv[2], *(int(n) for n in sys.argv[3:]))
    print(f"ok {time.perf_counter() - start:.1f} s")
