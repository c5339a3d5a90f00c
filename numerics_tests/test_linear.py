"""`MXFP8Linear` against explicit quantize, dequantize, multiply in fp64; comparisons also rule out BF16's result."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import load_recipe, recipe_names
from mxfp8_recipe.autograd import LinearConfig
from mxfp8_recipe.config import DgradPrecision, FpropPrecision, LinearPrecision, WgradPrecision
from mxfp8_recipe.functional import draw_seed, mxfp8_linear
from mxfp8_recipe.modules import MXFP8Linear
from numerics_tests.helpers import gradients, linear_oracle, same_bits

RECIPES = [name for name in recipe_names() if load_recipe(name).linear != "bf16"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GEMMS = {"fprop": FpropPrecision(), "dgrad": DgradPrecision(), "wgrad": WgradPrecision()}
SEED = 5


def precision_of(recipe: str) -> LinearPrecision:
    precision = load_recipe(recipe).linear
    assert isinstance(precision, LinearPrecision)
    return precision


def make(
    precision: LinearPrecision | str = "mxfp8", k: int = 96, n: int = 64, bias: bool = True, dtype=torch.float32
) -> tuple[nn.Linear, MXFP8Linear]:
    """A plain linear and an MXFP8 one that shares its parameters."""
    plain = nn.Linear(k, n, bias=bias, dtype=dtype)
    precision = precision_of(precision) if isinstance(precision, str) else precision
    return plain, MXFP8Linear.from_float(plain, precision)


def check_against_oracle(
    plain: nn.Linear, ours: nn.Module, x: Tensor, grad: Tensor, precision: LinearPrecision
) -> None:
    """Forward and all gradients of 2-D operands; GEMMs the precision names are provably quantized."""
    torch.manual_seed(SEED)
    out, grad_input, grads = gradients(ours, x, grad)
    torch.manual_seed(SEED)
    expected = linear_oracle(x, plain.weight.detach(), plain.bias, grad, precision, draw_seed(x.device))
    assert (out.dtype, grad_input.dtype, grads["weight"].dtype) == (x.dtype,) * 3
    expected.output.check(out, "output")
    expected.grad_input.check(grad_input, "grad_input")
    expected.grad_weight.check(grads["weight"], "grad_weight")
    expected.grad_bias.check(grads["bias"], "grad_bias")
    bf16_out, bf16_grad_input, bf16_grads = gradients(plain, x, grad)
    assert expected.output.far_from(bf16_out) == (precision.fprop != "bf16")
    assert expected.grad_input.far_from(bf16_grad_input) == (precision.dgrad != "bf16")
    assert expected.grad_weight.far_from(bf16_grads["weight"]) == (precision.wgrad != "bf16")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_in_every_dtype(recipe: str, dtype: torch.dtype) -> None:
    precision = precision_of(recipe)
    plain, ours = make(precision, dtype=dtype)
    check_against_oracle(plain, ours, torch.randn(100, 96).to(dtype), torch.randn(100, 64).to(dtype), precision)


@pytest.mark.parametrize("quantized", list(itertools.product([False, True], repeat=3)), ids=str)
def test_each_gemm_on_its_own(quantized: tuple[bool, ...]) -> None:
    chosen = {name: GEMMS[name] if on else "bf16" for name, on in zip(GEMMS, quantized)}
    precision = LinearPrecision(**chosen)
    plain, ours = make(precision)
    check_against_oracle(plain, ours, torch.randn(70, 96), torch.randn(70, 64), precision)


UNUSUAL = {
    "32x128 everywhere": ({"tile": "32x128"},) * 3,
    "128x128 activations": ({"tile": "128x128"}, {}, {"tile": "128x128"}),
    "e5m2 gradients": ({}, {"tile": "32x32"}, {"elem": "e5m2"}),
    "everything stochastic": ({"rounding": "stochastic"},) * 3,
    "everything rotated": ({"hadamard": 64, "tile": "1x128"},) * 3,
    "square and stochastic": ({"tile": "32x32", "rounding": "stochastic"},) * 3,
}
"""Specs of input, weight and grad_output."""


@pytest.mark.parametrize("specs", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_specs_no_shipped_recipe_has(specs: tuple[dict, dict, dict]) -> None:
    by_operand = dict(zip(("input", "weight", "grad_output"), specs))
    precision = LinearPrecision.model_validate(
        {name: {operand: by_operand[operand] for operand in type(gemm).model_fields} for name, gemm in GEMMS.items()}
    )
    plain, ours = make(precision, k=160)
    check_against_oracle(plain, ours, torch.randn(140, 160), torch.randn(140, 64), precision)


class Quantizations(TorchDispatchMode):
    """Counts the orientations quantized, however the calls are grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.mxfp8_recipe.quantize.default, torch.ops.mxfp8_recipe.quantize_and_sum.default):
            self.count += sum(bool(spec) for spec in args[1:3])
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_square_activations"])
def test_nothing_is_quantized_in_vain(recipe: str) -> None:
    """One quantization per operand and contraction that some GEMM reads, both of an operand from one read."""
    plain, ours = make(recipe)
    orientations, reads = [], []
    for needs_input, needs_weight in ((True, True), (True, False), (False, True)):
        plain.weight.requires_grad_(needs_weight)
        with Quantizations() as quantizations:
            ours(torch.randn(40, 96, requires_grad=needs_input)).sum().backward()
        orientations.append(quantizations.count)
        reads.append(quantizations.reads)
    assert orientations == [6, 4, 4]
    assert reads == [3, 3, 3]
    with torch.no_grad(), Quantizations() as quantizations:
        ours(torch.randn(40, 96))
    assert quantizations.count == 2


@pytest.mark.parametrize("tokens", [1, 31, 33, 128])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ragged_token_counts(recipe: str, tokens: int) -> None:
    precision = precision_of(recipe)
    plain, ours = make(precision)
    check_against_oracle(plain, ours, torch.randn(tokens, 96), torch.randn(tokens, 64), precision)


@pytest.mark.parametrize(("k", "n"), [(2880, 32), (64, 1376), (160, 32)])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hopper", "mxfp8_square"])
def test_widths_no_tile_divides(recipe: str, k: int, n: int) -> None:
    precision = precision_of(recipe)
    plain, ours = make(precision, k, n)
    check_against_oracle(plain, ours, torch.randn(7, k), torch.randn(7, n), precision)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (7, 96), (3, 11, 96), (2, 3, 5, 96)], ids=str)
def test_leading_dims_are_tokens(shape: tuple[int, ...]) -> None:
    """Whatever the leading dims, the bits are those of the flattened tokens."""
    _, ours = make()
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 64)
    out, grad_input, grads = gradients(ours, x, grad)
    flat_out, flat_grad_input, flat_grads = gradients(ours, x.reshape(-1, 96), grad.reshape(-1, 64))
    assert out.shape == grad.shape
    assert grad_input.shape == shape
    assert same_bits(out.reshape(-1, 64), flat_out)
    assert same_bits(grad_input.reshape(-1, 96), flat_grad_input)
    assert all(same_bits(grads[name], flat_grads[name]) for name in ("weight", "bias"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 96), (3, 0, 96)], ids=str)
def test_no_tokens(recipe: str, shape: tuple[int, ...]) -> None:
    _, ours = make(recipe)
    out, grad_input, grads = gradients(ours, torch.zeros(shape))
    assert out.shape == (*shape[:-1], 64)
    assert grad_input.shape == shape
    assert grads["weight"].eq(0).all()
    assert grads["bias"].eq(0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_strides_change_nothing(recipe: str) -> None:
    """Transposed, strided and expanded inputs and grad_outputs give the bits of their contiguous copies."""
    _, ours = make(recipe)
    views = {
        "transposed": (torch.randn(96, 40).T, torch.randn(64, 40).T),
        "strided": (torch.randn(40, 192)[:, ::2], torch.randn(80, 64)[::2]),
        "expanded": (torch.randn(1, 96).expand(40, -1), torch.randn(1, 1).expand(40, 64)),
    }
    for name, (x, grad) in views.items():
        results = []
        for a, g in ((x, grad), (x.contiguous(), grad.contiguous())):
            leaf = a.detach().requires_grad_()
            ours.zero_grad()
            torch.manual_seed(SEED)
            out = ours(leaf)
            out.backward(g)
            results.append((out.detach(), leaf.grad, ours.weight.grad))
        assert all(same_bits(a, b) for a, b in zip(*results)), name
        expected = linear_oracle(x, ours.weight.detach(), None, grad, LinearPrecision())
        expected.grad_bias.check(ours.bias.grad)  # its sum, as torch's own, follows the layout


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_square_activations", "gem"])
def test_every_subset_of_gradients(recipe: str, needs: tuple[bool, ...]) -> None:
    """A subset computes what the full set computes, and nothing else; the forward does not notice."""
    plain, ours = make(recipe)
    x, grad = torch.randn(40, 96), torch.randn(40, 64)
    torch.manual_seed(SEED)
    full_out, full_x, full = gradients(ours, x, grad)
    ours.zero_grad()
    leaf = x.clone().requires_grad_(needs[0])
    plain.weight.requires_grad_(needs[1])
    plain.bias.requires_grad_(needs[2])
    torch.manual_seed(SEED)
    out = ours(leaf)
    assert same_bits(out.detach(), full_out)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.backward(grad)
    for tensor, needed, expected in zip((leaf, ours.weight, ours.bias), needs, (full_x, full["weight"], full["bias"])):
        assert (tensor.grad is not None) == needed
        assert tensor.grad is None or same_bits(tensor.grad, expected)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gives_the_training_output(grad_mode) -> None:
    _, ours = make()
    x = torch.randn(9, 96)
    trained = ours(x).detach()
    with grad_mode():
        assert same_bits(ours(x).clone(), trained)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_decides_the_compute_dtype(dtype: torch.dtype, amp: torch.dtype, bias: bool) -> None:
    """Operands are rounded to autocast's dtype, then quantized; parameters' gradients come in their own dtype."""
    plain, ours = make(bias=bias, dtype=dtype)
    x, grad = torch.randn(33, 96).to(dtype), torch.randn(33, 64).to(amp)
    with torch.autocast("cpu", dtype=amp):
        out, grad_input, grads = gradients(ours, x, grad)
    assert (out.dtype, grad_input.dtype, grads["weight"].dtype) == (amp, dtype, dtype)
    cast = [None if p is None else p.detach().to(amp) for p in (plain.weight, plain.bias)]
    assert cast[0] is not None
    expected = linear_oracle(x.to(amp), cast[0], cast[1], grad, LinearPrecision())
    expected.output.check(out)
    assert expected.output.far_from(plain(x))
    if torch.finfo(dtype).bits > 16 or dtype == amp:
        expected.grad_input.check(grad_input)
        expected.grad_weight.check(grads["weight"])


def test_autocast_through_a_chain() -> None:
    """The second layer gets autocast's dtype from the first and holds fp32 weights, as in any mixed-precision model."""
    (first, ours), (second, theirs) = make(), make(k=64, n=32)
    x = torch.randn(40, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _, grads = gradients(nn.Sequential(ours, theirs), x)
        hidden = ours(x)
        plain = second(first(x))
    assert hidden.dtype == torch.bfloat16
    weight, bias = second.weight.detach().bfloat16(), second.bias.detach().bfloat16()
    expected = linear_oracle(hidden.detach(), weight, bias, torch.ones(40, 32).bfloat16(), LinearPrecision())
    expected.output.check(out)
    assert expected.output.far_from(plain)
    assert {g.dtype for g in grads.values()} == {torch.float32}


def test_dtypes_that_do_not_fit_are_refused_with_a_remedy() -> None:
    _, ours = make(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"got input torch\.float32 and weight torch\.bfloat16.*autocast"):
        ours(torch.randn(4, 96))
    _, ours = make()
    with pytest.raises(ValueError, match=r"input \(4, 95\) and weight \(64, 96\)"):
        ours(torch.randn(4, 95))
    weight = torch.randn(64, 96, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"compute dtype torch\.float64"):
        mxfp8_linear(weight, weight, config=LinearConfig.of(LinearPrecision()))


def saved_bytes(module: nn.Module, x: Tensor) -> tuple[int, set[torch.dtype]]:
    """Bytes and dtypes autograd keeps of one forward, besides the parameters themselves."""
    kept: list[Tensor] = []
    parameters = {p.data_ptr() for p in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    kept = [t for t in kept if t.data_ptr() not in parameters or t.numel() == 0]
    return sum(t.numel() * t.element_size() for t in kept), {t.dtype for t in kept}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_saved_for_backward(dtype: torch.dtype) -> None:
    """One byte an element and one per 32, of the input and of the weight: nothing in the model's dtype."""
    m, k, n = 128, 96, 64
    plain, ours = make(k=k, n=n, dtype=dtype)
    x = torch.randn(m, k, dtype=dtype, requires_grad=True)
    assert saved_bytes(ours, x) == (m * k + k * m // 32 + n * k + k * n // 32, {torch.uint8})
    assert saved_bytes(ours, x.detach()) == (m * k + k * m // 32, {torch.uint8})
    plain.requires_grad_(False)
    assert saved_bytes(ours, x) == (n * k + k * n // 32, {torch.uint8})
    _, square = make("mxfp8_square_activations", k=k, n=n, dtype=dtype)
    assert saved_bytes(square, x) == (m * k + m * k // 32 + n * k + n * k // 32, {torch.uint8})


def test_a_bf16_gemm_saves_its_operand() -> None:
    _, ours = make(LinearPrecision(wgrad="bf16"), k=96, n=64, dtype=torch.bfloat16)
    x = torch.randn(128, 96, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(ours, x)[0] == 128 * 96 * 2 + 64 * 96 + 96 * 2


def rows_moved(recipe: str) -> tuple[int, int]:
    """How many other rows of output and grad_input change a bit when one token and its gradient grow by 2**12."""
    _, ours = make(recipe)
    x, grad = torch.randn(64, 96), torch.randn(64, 64)
    results = []
    for factor in (1.0, 2.0**12):
        a, g = x.clone(), grad.clone()
        a[40], g[40] = a[40] * factor, g[40] * factor
        torch.manual_seed(SEED)
        results.append(gradients(ours, a, g)[:2])
    others = torch.arange(64) != 40
    (out, grad_input), (moved_out, moved_grad) = results
    assert not same_bits(out[40], moved_out[40])
    return int((out != moved_out).any(1)[others].sum()), int((grad_input != moved_grad).any(1)[others].sum())


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_independent_unless_the_recipe_says_otherwise(recipe: str) -> None:
    """The recipe with 32x32 activations is the control: the perturbation must reach its 31 neighbors."""
    if precision_of(recipe).mixes_tokens:
        assert rows_moved(recipe) == (31, 31)
    else:
        assert rows_moved(recipe) == (0, 0)


def test_a_module_applied_twice() -> None:
    """Its gradient is the sum over both uses, bitwise that of two modules which share the weight."""
    plain, ours = make(k=64, n=64)
    twin = MXFP8Linear.from_float(plain)
    x = torch.randn(50, 64)
    _, grad_input, grads = gradients(nn.Sequential(ours, nn.Tanh(), ours), x)
    _, twin_grad_input, twin_grads = gradients(nn.Sequential(ours, nn.Tanh(), twin), x)
    assert same_bits(grad_input, twin_grad_input)
    assert same_bits(grads["0.weight"], twin_grads["0.weight"])


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_grad_scaler(scale: float) -> None:
    """Scaling by a power of two changes only exponents, so unscaled gradients are the unscaled run's, bitwise."""
    _, ours = make()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    x = torch.randn(40, 96)
    ours(x).square().mean().backward()
    expected = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(ours(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert all(same_bits(p.grad, e) for p, e in zip(ours.parameters(), expected) if p.grad is not None)
    before = ours.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(ours.weight, before)


def test_grad_scaler_skips_an_overflowing_step() -> None:
    """An infinite gradient is not saturated away: it reaches the scaler."""
    _, ours = make()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = ours.weight.detach().clone()
    scaler.scale(ours(torch.randn(40, 96)).sum() * 100).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(ours.weight, before)
    assert scaler.get_scale() == 2.0**126


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "gem"])
def test_recomputation_repeats_the_bits(recipe: str, reentrant: bool) -> None:
    """Under activation checkpointing, stochastic rounding included; a different seed gives other gradients."""
    _, ours = make(recipe)
    x, grad = torch.randn(50, 96), torch.randn(50, 64)
    torch.manual_seed(SEED)
    direct = gradients(ours, x, grad)
    torch.manual_seed(SEED)
    leaf = x.clone().requires_grad_()
    ours.zero_grad()
    checkpoint(ours, leaf, use_reentrant=reentrant).backward(grad)  # pyright: ignore[reportOptionalMemberAccess]
    assert same_bits(leaf.grad, direct[1])
    assert same_bits(ours.weight.grad, direct[2]["weight"])
    torch.manual_seed(SEED + 1)
    other = gradients(ours, x, grad)
    assert same_bits(other[2]["weight"], direct[2]["weight"]) == (recipe == "mxfp8")


def test_stochastic_rounding_draws_anew_in_every_call() -> None:
    _, ours = make("gem")
    x, grad = torch.randn(50, 96), torch.randn(50, 64)
    first, second = (gradients(ours, x, grad)[2]["weight"] for _ in range(2))
    assert not same_bits(first, second)


def test_stochastic_wgrad_is_unbiased_through_the_module() -> None:
    """The mean gradient over draws approaches the one of the unrounded gradient operand, at 5 standard errors."""
    wgrad = WgradPrecision.model_validate({"grad_output": {"rounding": "stochastic"}})
    plain, ours = make(LinearPrecision(fprop="bf16", dgrad="bf16", wgrad=wgrad), k=32, n=32)
    x, grad = torch.randn(64, 32).sign(), torch.randn(64, 32)
    draws = torch.stack([gradients(ours, x, grad)[2]["weight"] for _ in range(200)]).double()
    truth = gradients(plain, x, grad)[2]["weight"].double()  # x is +-1: quantizing it changes nothing
    error = (draws.mean(0) - truth).abs() / (draws.std(0) / 200**0.5)
    assert error.max() <= 5.0
    assert draws.std(0).min() > 0


@pytest.mark.parametrize("context", [nullcontext, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_gradients_of_gradients_are_refused_rather_than_wrong(context) -> None:
    """The backward runs custom ops without a derivative; asking for one must not return silently."""
    _, ours = make()
    x = torch.randn(8, 96, requires_grad=True)
    with context():
        loss = ours(x).square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)
