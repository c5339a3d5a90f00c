"""Activations before a linear, as modules and as pointwise code: applied by the consuming GEMM, never stored."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.fused.reference import gemm
from mxfp8_recipe.fused.reference_ops import GATED_KINDS, quantize_both
from mxfp8_recipe.fused.spec import QuantSpec
from mxfp8_recipe.modules import MXFP8Activation
from mxfp8_recipe.mx_tensor import Pending
from mxfp8_recipe.recognize import recognize
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.fused_pairs import assert_same_step, fused_and_stored
from numerics_tests.helpers import gradients, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ReLU": (nn.ReLU, "relu"),
    "ReLU in place": (lambda: nn.ReLU(inplace=True), "relu"),
    "ReLU^2": (blocks.SquaredReLU, "relu2"),
    "GELU": (nn.GELU, "gelu"),
    "GELU tanh": (lambda: nn.GELU(approximate="tanh"), "gelu_tanh"),
    "GELU tanh written out": (blocks.TanhGELU, "gelu_tanh"),
    "SiLU": (nn.SiLU, "silu"),
    "SwiGLU": (lambda: blocks.PackedGate("silu"), "swiglu"),
    "SwiGLU, second half": (lambda: blocks.PackedGate("silu", first=False), "swiglu"),
    "GEGLU": (lambda: blocks.PackedGate("gelu"), "geglu"),
    "GEGLU, second half": (lambda: blocks.PackedGate("gelu", first=False), "geglu"),
    "ReGLU": (lambda: blocks.PackedGate("relu"), "reglu"),
}


class WithActivation(nn.Module):
    """linear, activation module, dropout, linear."""

    def __init__(self, activation: nn.Module, packed: bool = False, p: float | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * HIDDEN if packed else HIDDEN)
        self.act = activation
        self.drop = nn.Identity() if p is None else nn.Dropout(p)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


class Pointwise(nn.Module):
    """The same as code: `form(up, gate, packed)` names one way of writing it."""

    def __init__(self, form: Callable[[Pointwise, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.packed = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.form(self, x))


def _chunked(m: Pointwise, x: Tensor) -> Tensor:
    gate, up = m.packed(x).chunk(2, dim=-1)
    return F.silu(gate) * up


def _chunked_second(m: Pointwise, x: Tensor) -> Tensor:
    up, gate = m.packed(x).chunk(2, -1)
    return up * F.gelu(gate)


def _gated_later(m: Pointwise, x: Tensor) -> Tensor:
    up = m.up(x)
    return up * F.silu(m.gate(x))


FORMS: dict[str, tuple[Callable[[Pointwise, Tensor], Tensor], str, str]] = {
    "relu": (lambda m, x: F.relu(m.up(x)), "relu", "up"),
    "torch.relu": (lambda m, x: torch.relu(m.up(x)), "relu", "up"),
    "method": (lambda m, x: m.up(x).relu(), "relu", "up"),
    "relu ** 2": (lambda m, x: F.relu(m.up(x)) ** 2, "relu2", "up"),
    "relu squared": (lambda m, x: torch.square(F.relu(m.up(x))), "relu2", "up"),
    "relu.pow(2)": (lambda m, x: F.relu(m.up(x)).pow(2), "relu2", "up"),
    "gelu": (lambda m, x: F.gelu(m.up(x)), "gelu", "up"),
    "gelu tanh": (lambda m, x: F.gelu(m.up(x), approximate="tanh"), "gelu_tanh", "up"),
    "silu": (lambda m, x: F.silu(m.up(x)), "silu", "up"),
    "swiglu": (lambda m, x: F.silu(m.gate(x)) * m.up(x), "swiglu", "gate"),
    "swiglu, up first": (_gated_later, "swiglu", "gate"),
    "geglu": (lambda m, x: F.gelu(m.gate(x)) * m.up(x), "geglu", "gate"),
    "reglu by torch.mul": (lambda m, x: torch.mul(F.relu(m.gate(x)), m.up(x)), "reglu", "gate"),
    "chunked": (_chunked, "swiglu", "packed"),
    "chunked, second half": (_chunked_second, "geglu", "packed"),
    "dropout p=0": (lambda m, x: F.dropout(F.gelu(m.up(x)), 0.0, m.training), "gelu", "up"),
    "reshaped": (lambda m, x: F.gelu(m.up(x).flatten(0, 1)).view(*x.shape[:-1], HIDDEN), "gelu", "up"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_recognized(name: str) -> None:
    make, kind = MODULES[name]
    found = recognize(make(), None, {})
    assert found is not None
    assert (found.kind, found.implementation, found.config.kind) == ("activation", MXFP8Activation, kind)
    if "second" in name:
        assert found.config.packed == "second"


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.relu(x)


class LeakyByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.01 * x)


class SigmoidGate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.sigmoid(a) * b


@pytest.mark.parametrize(
    "module",
    [
        Doubled(), LeakyByHand(), SigmoidGate(), nn.GLU(), nn.Softplus(), nn.Tanh(), nn.Hardswish(),
        nn.SiLU(inplace=True), blocks.PackedGate("silu", dim=1), nn.Identity(), nn.Dropout(0.5),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_others_are_not(module: nn.Module) -> None:
    found = recognize(module, None, {})
    assert found is None or found.implementation is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_hands_on_its_input_and_the_gemm_applies_it(name: str, dtype: torch.dtype) -> None:
    """The value is pending; the bits are those of storing it in the model dtype and quantizing; all gradients too."""
    make, kind = MODULES[name]
    model = WithActivation(make(), kind in GATED_KINDS, p=0.0).to(dtype)
    x, plain = torch.randn(3, 11, WIDTH).to(dtype), copy.deepcopy(model)
    model, stored, report = fused_and_stored(model, x)
    fused = blocks.fused_producers(report)
    assert fused == ["act"]
    value = model.act(model.up(x))
    assert isinstance(value, Pending)
    assert (value.kind, value.shape, value.dtype) == (kind, (3, 11, HIDDEN), dtype)
    high = stored.act(stored.up(x)).reshape(-1, HIDDEN)
    unit, original = torch.finfo(dtype).eps, plain.act(stored.up(x)).reshape(-1, HIDDEN)
    assert ((high.double() - original.double()).abs() <= 2 * unit * original.double().abs() + 2 * unit).all()
    qdata, scale, _, _ = quantize_both(high.detach(), QuantSpec(), None)
    weight, weight_scale, _, _ = quantize_both(model.down.weight.detach(), QuantSpec(), None)
    as_e4m3 = (t.view(torch.float8_e4m3fn) for t in (qdata, weight))
    q, w = as_e4m3
    out = gemm(q, scale, w, weight_scale, model.down.bias.detach(), out_dtype=dtype)
    assert same_bits(model(x).reshape(-1, WIDTH), out)
    assert not torch.equal(model(x), plain(x))
    assert_same_step(model, stored, x)


@pytest.mark.parametrize("name", MODULES)
def test_activations_alone_have_the_originals_gradients(name: str) -> None:
    make, kind = MODULES[name]
    model = nn.Sequential(make())
    x = torch.randn(40, 2 * HIDDEN if kind in GATED_KINDS else HIDDEN)
    plain, grad = copy.deepcopy(model), torch.randn(40, HIDDEN)
    apply_recipe(model)
    assert isinstance(model[0], MXFP8Activation) or hasattr(type(model[0]), "original_class")

    def step(module: nn.Module) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = module(leaf * 1.0)
        out.backward(grad)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    for a, b in zip(step(model), step(plain)):
        assert (a - b).norm() <= 1e-6 * b.norm()  # measured: at most 2e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_pointwise_code_is_taken_over(name: str, dtype: torch.dtype) -> None:
    """With example_inputs; the bits are those of the same kernel storing its result."""
    form, _, producer = FORMS[name]
    model = Pointwise(form).to(dtype)
    x, plain = torch.randn(2, 17, WIDTH).to(dtype), copy.deepcopy(model)
    model, stored, report = fused_and_stored(model, x)
    fused = blocks.fused_producers(report)
    assert fused == [producer]
    out, original = model(x), plain(x)
    assert not torch.equal(out, original)
    assert (out.float() - original.float()).norm() <= 0.1 * original.float().norm()  # MXFP8's own error: 0.03 to 0.07
    assert_same_step(model, stored, x)
    later = copy.deepcopy(plain)
    apply_recipe(later)
    first = gradients(later, x)
    second = gradients(later, x)
    assert same_bits(first[0], second[0])
    assert (first[0].float() - out.float()).norm() <= 0.02 * original.float().norm()  # rounds twice, as the code says


def test_pointwise_code_stores_nothing() -> None:
    """Of all tensors made between the projections and the output, none holds the activation in high precision."""
    model = Pointwise(FORMS["swiglu"][0]).bfloat16()
    x = torch.randn(34, WIDTH).bfloat16()
    model, stored, _ = fused_and_stored(model, x)
    sizes = []
    for module in (model, stored):
        with blocks.allocations() as seen, torch.no_grad():
            module(x)
        sizes.append(sum(a.shape == (34, HIDDEN) and a.dtype == torch.bfloat16 and "mxfp8" in a.op for a in seen))
    assert sizes == [2, 3]  # up, gate, and the product only where it is stored


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_in_between(p: float) -> None:
    """p = 0 and evaluation are transparent; in training with p > 0 the edge is refused, and says so."""
    model = WithActivation(nn.GELU(), p=p)
    x = torch.randn(40, WIDTH)
    plain, evaluated = copy.deepcopy(model), copy.deepcopy(model).eval()
    report = apply_recipe(model, example_inputs=x)
    edge = next(edge for edge in report.plan.edges if edge.producer == "act")
    assert edge.fused == (p == 0.0)
    if p:
        assert edge.reason == "read by dropout (p=0.5, training), not by an MXFP8 linear"
        assert "dropout (p=0.5, training)" in str(report).replace("\n", "")
    report = apply_recipe(evaluated, example_inputs=x)
    assert blocks.fused_producers(report) == ["act"]
    expected = evaluated(x)
    assert same_bits(model.eval()(x), expected)
    assert not torch.equal(expected, plain.eval()(x))


def test_planned_in_evaluation_and_trained_with_dropout() -> None:
    """The edge carried in evaluation meets dropout: the right value, one warning, un-fused from then on."""
    model = WithActivation(nn.GELU(), p=0.5).eval()
    x = torch.randn(40, WIDTH)
    other = copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(other, blocks.unfused(), example_inputs=x)
    model.train()
    other.train()
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=r"act: its quantized output was read by dropout.*planned: down.*un-fused"):
        ours = gradients(model, x)
    torch.manual_seed(3)
    theirs = gradients(other, x)
    assert same_bits(ours[0], theirs[0])
    assert all(same_bits(ours[2][name], g) for name, g in theirs[2].items())
    assert report.unfused == {"act": "read by dropout"}
    assert "act: un-fused, read by dropout" in str(report)


def test_in_place_relu_still_overwrites_what_others_see() -> None:
    """`self.act(h); return self.down(h)`: code that relies on the side effect gets it, fused or not."""

    class Relies(WithActivation):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            self.act(h)
            return self.down(h)

    model = Relies(nn.ReLU(inplace=True))
    x, plain = torch.randn(40, WIDTH), copy.deepcopy(model)
    model, stored, _ = fused_and_stored(model, x)
    assert_same_step(model, stored, x)
    assert (model(x) - plain(x)).norm() <= 0.1 * plain(x).norm()
    h = model.up(x)
    model.act(h)
    assert (h >= 0).all()
