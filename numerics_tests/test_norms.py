"""Norms: recognized by what they compute, equal to the original within rounding, and handed on in MXFP8."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, plan_recipe, revert
from mxfp8_recipe.fused.reference_ops import quantize_both
from mxfp8_recipe.fused.spec import QuantSpec
from mxfp8_recipe.modules import MXFP8Norm, is_swapped
from mxfp8_recipe.mx_tensor import MXTensor
from mxfp8_recipe.recognize import recognize
from numerics_tests import blocks
from numerics_tests.blocks import WIDTH, Pair
from numerics_tests.helpers import FP32_UNIT, gradients, rounded, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRECISIONS = [*((dtype, False) for dtype in DTYPES), (torch.float32, True), (torch.bfloat16, True)]
"""Dtype of the input, and whether under autocast (to bfloat16, with fp32 parameters)."""


def shaken(norm: nn.Module) -> nn.Module:
    """With parameters that tell weight, bias and offset apart."""
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.2, 1.5)
    return norm


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "LayerNorm without parameters": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "LayerNorm, own forward": lambda: blocks.OwnForwardLayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "RMSNorm, eps None": lambda: nn.RMSNorm(WIDTH),
    "RMSNorm without weight": lambda: nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False),
    "cast, then weight": blocks.RMSCastBeforeWeight,
    "zero-centered weight": blocks.RMSZeroCentered,
    "no cast": blocks.RMSInPlainDtype,
    "gamma and beta": blocks.LayerNormByHand,
}
LOOK_ALIKES = [
    blocks.ScaleOnly, blocks.L2Norm, blocks.WeightedSoftmax, blocks.NormOverTokens, blocks.UnbiasedLayerNorm,
    blocks.RMSEpsOutside, blocks.RMSThenTanh,
]  # fmt: skip


def truth(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The fp64 result of the original's formula on the given parameters, and the error of fp32 arithmetic.

    x - mean has an error of u * (|x| + |mean|), multiplied on by rstd * weight; 16 units cover the sums over 64
    elements, whose errors average out, the square root and the products.
    """
    wide = copy.deepcopy(norm).double()
    h = x.double()
    weight = next((p.double() for n, p in norm.named_parameters() if n in ("weight", "gamma", "g")), torch.ones(()))
    if isinstance(norm, blocks.RMSZeroCentered):
        weight = 1 + norm.scale.double()
        value = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm.eps) * weight
    elif isinstance(norm, blocks.RMSCastBeforeWeight):
        value = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm.variance_epsilon) * weight
    elif isinstance(norm, blocks.LayerNormByHand):
        value = nn.functional.layer_norm(h, (WIDTH,), norm.gamma.double(), norm.beta.double(), norm.epsilon)
    elif isinstance(norm, nn.RMSNorm) and norm.eps is None:
        value = nn.functional.rms_norm(h, (WIDTH,), norm.weight.double(), torch.finfo(torch.float32).eps)
    else:
        value = wide(h)
    mean = h.mean(-1, keepdim=True).abs()
    size = (h.abs() + mean) * torch.rsqrt(h.square().mean(-1, keepdim=True)) * weight.abs()
    return value, 16 * FP32_UNIT * (size + value.abs())


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_recognized_on_any_device(name: str) -> None:
    norm = shaken(NORMS[name]())
    for module in (norm, copy.deepcopy(norm).bfloat16(), copy.deepcopy(norm).to("meta")):
        found = recognize(module, None, {})
        assert found is not None
        assert (found.kind, found.in_features, found.reason) == ("norm", WIDTH, "")
        assert found.implementation is MXFP8Norm


@pytest.mark.parametrize("context", ["autocast", "meta", "bfloat16 by default", "inference"])
@pytest.mark.parametrize("make", [blocks.LayerNormByHand, blocks.RMSZeroCentered, blocks.OwnForwardLayerNorm])
def test_recognition_does_not_depend_on_the_context_it_runs_in(make, context: str) -> None:
    norm = make(WIDTH)
    if context == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = recognize(norm, None, {})
    elif context == "meta":
        with torch.device("meta"):
            found = recognize(norm, None, {})
    elif context == "inference":
        with torch.inference_mode():
            found = recognize(norm, None, {})
    else:
        torch.set_default_dtype(torch.bfloat16)
        found = recognize(norm, None, {})
    assert found is not None
    assert found.implementation is MXFP8Norm


@pytest.mark.parametrize("cls", LOOK_ALIKES)
def test_look_alikes_are_not(cls: type[nn.Module]) -> None:
    found = recognize(cls(), None, {})
    assert found is None or found.implementation is None
    model = Pair(cls())
    plain, x = copy.deepcopy(model), torch.randn(3, 7, WIDTH)
    report = apply_recipe(model, example_inputs=x)
    assert not is_swapped(model.norm)
    assert is_swapped(model.linear)
    assert blocks.fused_producers(report) == []
    assert same_bits(model.norm(x), plain.norm(x))


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.GroupNorm(4, WIDTH), torch.randn(5, WIDTH)),
        (nn.BatchNorm1d(WIDTH), torch.randn(5, WIDTH)),
        (nn.InstanceNorm2d(3), torch.randn(2, 3, 4, WIDTH)),
        (nn.LayerNorm((3, WIDTH)), torch.randn(5, 3, WIDTH)),
        (nn.LayerNorm(48), torch.randn(5, 48)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_other_norms_are_left_alone_with_a_reason(module: nn.Module, x: Tensor) -> None:
    model = nn.Sequential(module, nn.Linear(x.shape[-1], 32))
    plain = copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    row = report.layers[0]
    assert (row.kind, row.new_type) == ("norm", None)
    assert (
        "does not normalize over a token's features" in row.reason
        or "not over one dim" in row.reason
        or ("48 is not a multiple of 32" in row.reason)
    )
    assert same_bits(model[0](x), plain[0](x))
    assert (x.shape[-1] % 32 != 0) or not torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_dtypes_and_quantization(name: str, dtype: torch.dtype, autocast: bool) -> None:
    """Within one rounding of the fp64 formula; the dtype is the original's; the edge carries its quantization.

    The original may round up to three times, first in the dtype of its input; together with ours that is 4 units.
    """
    model = Pair(shaken(NORMS[name]()))
    if not autocast:
        model.to(dtype)
    x = (torch.randn(5, 9, WIDTH) * torch.logspace(-1, 1, 9)[:, None] + 0.3).to(dtype)
    plain, stored = copy.deepcopy(model), copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        original = plain.norm(x)
        report = apply_recipe(model, example_inputs=x)
        apply_recipe(stored, blocks.unfused(), example_inputs=x)
        ours, value = stored.norm(x), model.norm(x)
        consumed = model.linear(value)
        assert same_bits(consumed, stored(x))
        assert not torch.equal(consumed, plain(x))
        wanted = torch.bfloat16 if autocast else dtype
        rows = ours.to(wanted).reshape(-1, WIDTH)
    assert blocks.fused_producers(report) == ["norm"]
    assert ours.dtype == value.dtype == original.dtype
    assert isinstance(value, MXTensor)
    expected, error = truth(plain.norm, x)
    rounded(expected, error, ours.dtype).check(ours, name)
    unit = max(torch.finfo(original.dtype).eps, torch.finfo(x.dtype).eps) / 2
    if not isinstance(plain.norm, blocks.RMSInPlainDtype):
        assert ((ours.double() - original.double()).abs() <= 4 * unit * expected.abs() + 4 * error + 1e-7).all()
    qdata, scale, qdata_t, scale_t = quantize_both(rows, QuantSpec(), QuantSpec())
    assert all(
        torch.equal(a, b)
        for a, b in zip((value.qdata, value.scale, value.qdata_t, value.scale_t), (qdata, scale, qdata_t, scale_t))
    )


@pytest.mark.parametrize("name", NORMS)
def test_all_gradients_are_the_originals(name: str) -> None:
    """fp32, of an unfused norm and of one whose consumer's GEMMs are exact: to 1e-5 of each gradient's size."""
    norm = shaken(NORMS[name]())
    plain, x, grad = copy.deepcopy(norm), torch.randn(40, WIDTH) + 0.2, torch.randn(40, WIDTH)
    apply_recipe(norm)
    assert is_swapped(norm)
    ours, theirs = gradients(norm, x, grad), gradients(plain, x, grad)
    assert ours[2].keys() == theirs[2].keys()
    pairs = [(ours[0], theirs[0]), (ours[1], theirs[1]), *((ours[2][n], theirs[2][n]) for n in ours[2])]
    for a, b in pairs:
        assert (a - b).norm() <= 1e-6 * b.norm()  # measured: at most 3e-7


@pytest.mark.parametrize("trained", ["x", "weight", "bias"])
def test_each_gradient_alone(trained: str) -> None:
    model = Pair(shaken(nn.LayerNorm(WIDTH)))
    whole = copy.deepcopy(model)
    x = torch.randn(40, WIDTH)
    for module in (model, whole):
        apply_recipe(module, example_inputs=x)
    expected = gradients(whole, x)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == f"norm.{trained}")
    leaf = x.clone().requires_grad_(trained == "x")
    out = model(leaf)
    assert same_bits(out, expected[0])
    out.backward(torch.ones_like(out))
    got = {name for name, p in model.named_parameters() if p.grad is not None}
    assert got == ({f"norm.{trained}"} - {"norm.x"})
    if trained == "x":
        assert leaf.grad is not None
        assert same_bits(leaf.grad, expected[1])
    else:
        gradient = getattr(model.norm, trained).grad
        assert same_bits(gradient, expected[2][f"norm.{trained}"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_none_is_torchs_for_tiny_inputs(dtype: torch.dtype) -> None:
    """Where the mean square is near the machine epsilon, which one is added decides the result."""
    norm = nn.RMSNorm(WIDTH).to(dtype)
    plain = copy.deepcopy(norm)
    x = (torch.randn(8, WIDTH) * 3e-4).to(dtype)
    apply_recipe(norm)
    ours, theirs = norm(x), plain(x)
    assert is_swapped(norm)
    assert (ours.float() - theirs.float()).abs().max() <= 2 * torch.finfo(dtype).eps * theirs.abs().max()


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (2, 0, WIDTH), (WIDTH,), (2, 3, 5, WIDTH)])
def test_shapes_down_to_nothing(shape: tuple[int, ...]) -> None:
    model = Pair()
    stored, x = copy.deepcopy(model), torch.randn(3, 5, WIDTH)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(stored, blocks.unfused(), example_inputs=x)
    assert blocks.fused_producers(report) == ["norm"]
    x = torch.randn(shape)
    for ours, theirs in zip(gradients(model, x)[:2], gradients(stored, x)[:2]):
        assert same_bits(ours, theirs)
    strided = torch.randn(WIDTH, 33).t()
    assert same_bits(model(strided), stored(strided))


def test_a_norm_keeps_its_object_parameters_and_text() -> None:
    model = Pair(blocks.RMSZeroCentered())
    scale, plain = model.norm.scale, copy.deepcopy(model)
    x = torch.randn(9, WIDTH)
    apply_recipe(model, example_inputs=x)
    assert model.norm.scale is scale
    assert isinstance(model.norm, blocks.RMSZeroCentered)
    assert "emits e4m3" in repr(model)
    assert not torch.equal(model(x), plain(x))
    assert revert(model) == 2
    assert type(model.norm) is blocks.RMSZeroCentered
    assert vars(model.norm).keys() == vars(plain.norm).keys()
    assert same_bits(model(x), plain(x))


def test_the_override_bf16_leaves_a_norm_alone() -> None:
    model = Pair()
    x = torch.randn(9, WIDTH)
    plan = plan_recipe(model, overrides={"norm": "bf16"}, example_inputs=x)
    assert [layer.fqn for layer in plan.converted] == ["linear"]
    assert plan.edges == ()
