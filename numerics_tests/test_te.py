"""TransformerEngine beside us: a stand-in namespace everywhere, the real package where it is installed."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
import sys
import types
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, load_recipe, plan_recipe, revert
from mxfp8_recipe.config import Recipe


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclasses.dataclass
class MXFP8BlockScaling:
    """The fields of TransformerEngine 2.20's recipe that ours sets."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None
    enable_2d_quantization: bool = False


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    recipe = sys.modules[names[-1]]
    recipe.Format, recipe.MXFP8BlockScaling = Format, MXFP8BlockScaling  # type: ignore[attr-defined]
    return recipe


def te(name: str, *bases: type, **members: Any) -> type[nn.Module]:
    """A class of TransformerEngine's as far as anybody can see without importing it."""
    return type(name, bases or (nn.Module,), {"__module__": f"transformer_engine.pytorch.{name.lower()}", **members})


class TELinear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


Linear = te("Linear", TELinear)
LayerNormMLP = te("LayerNormMLP", nn.Sequential)


class Mixed(nn.Module):
    """Ours and theirs in turn; their MLP owns plain torch layers whose weights it reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.theirs = Linear(64, 64)
        self.subclass = type("Mine", (Linear,), {"__module__": "user.models"})(64, 64)
        self.mlp = LayerNormMLP(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        self.ours = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.ours(self.mlp(self.subclass(self.theirs(self.norm(x)))))


def test_their_modules_are_planned_around_and_named() -> None:
    net = Mixed()
    x = torch.randn(4, 64)
    before = {name: type(module) for name, module in net.named_modules()}
    report = apply_recipe(net, example_inputs=x, strict=True)
    rows = {layer.fqn: layer for layer in report.layers}
    assert set(rows) == {"norm", "theirs", "subclass", "mlp", "ours"}
    for name, cls in (("theirs", "Linear"), ("subclass", "Linear"), ("mlp", "LayerNormMLP")):
        assert rows[name].new_type is None
        assert f"transformer_engine's {cls} quantizes by its own recipe" in rows[name].reason
        assert type(net.get_submodule(name)) is before[name]
        assert f"transformer_engine's {cls}" in re.sub(r"\s*│[^│]*│\s*", " ", str(report)) or name in str(report)
    assert (rows["theirs"].in_features, rows["theirs"].out_features) == (64, 64)
    for name in before:
        if name.startswith("mlp"):
            assert type(net.get_submodule(name)) is before[name]
    assert rows["ours"].new_type == "MXFP8Linear"
    assert not any(edge.fused for edge in report.plan.edges)  # the norm's reader is theirs
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    revert(net)
    assert {name: type(module) for name, module in net.named_modules()} == before


def test_asking_for_mxfp8_in_one_of_them_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'theirs' asks for MXFP8, but transformer_engine's Linear"):
        plan_recipe(Mixed(), overrides={"theirs": "mxfp8"})


def changed(**linear: Any) -> Recipe:
    base = load_recipe("mxfp8")
    return Recipe.model_validate(
        base.model_dump(mode="json") | {"linear": base.linear.model_dump(mode="json") | linear}
    )  # pyright: ignore[reportAttributeAccessIssue]


GRADIENTS = {name: {"grad_output": {"elem": "e5m2"}} for name in ("dgrad", "wgrad")}


@pytest.mark.usefixtures("installed")
def test_recipes_become_the_block_scaling_that_rounds_alike() -> None:
    assert load_recipe("mxfp8").to_transformer_engine() == MXFP8BlockScaling()
    assert load_recipe("mxfp8_square").to_transformer_engine() == MXFP8BlockScaling(enable_2d_quantization=True)
    assert changed(**GRADIENTS).to_transformer_engine() == MXFP8BlockScaling(fp8_format=Format.HYBRID)
    forward_only = changed(dgrad="bf16", wgrad="bf16").to_transformer_engine()
    assert forward_only == MXFP8BlockScaling(backward_override="high_precision")


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (load_recipe("bf16"), "stay BF16"),
        (load_recipe("mxfp8_hopper"), r"fprop\.input: tile 1x128, expected 1x32; fprop\.weight: tile 128x128"),
        (load_recipe("mxfp8_floor"), r"scale_rounding floor, expected rceil"),
        (load_recipe("gem"), r"wgrad"),
        (changed(wgrad="bf16"), r"wgrad: bf16 goes through Plan\.to_nvdlfw_inspect"),
        (changed(dgrad={"grad_output": {"elem": "e5m2"}}), "E4M3 in one GEMM and E5M2 in another"),
        (changed(fprop={"weight": {"tile": "32x32"}}), r"32x32 for fprop\.weight alone"),
        (changed(fprop={"input": {"elem": "e5m2"}}), "expected e4m3 for all but gradients"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_it_cannot_say_is_named(recipe: Recipe, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        recipe.to_transformer_engine()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match=r"pip install 'mxfp8-recipe\[te\]'"):
        load_recipe("mxfp8").to_transformer_engine()


def test_an_older_package_is_named(installed: types.ModuleType) -> None:
    @dataclasses.dataclass
    class Old:
        margin: int = 0
        fp8_format: Format = Format.E4M3

    installed.MXFP8BlockScaling = Old  # type: ignore[attr-defined]
    assert load_recipe("mxfp8").to_transformer_engine() == Old()
    with pytest.raises(ValueError, match="has no enable_2d_quantization"):
        load_recipe("mxfp8_square").to_transformer_engine()


def planned() -> Any:
    net = nn.ModuleDict(
        {name: nn.Linear(64, 64) for name in ("up", "down", "head")} | {"odd": nn.Linear(60, 64), "act": nn.GELU()}
    )
    return plan_recipe(net, overrides={"head": "bf16", "down": {"wgrad": "bf16"}})


def test_overrides_become_inspect_yaml() -> None:
    sections = yaml.safe_load(planned().to_nvdlfw_inspect())
    layers, gemms = sections["high_precision_layers"], sections["high_precision_wgrad"]
    assert layers["enabled"] and gemms["enabled"]  # noqa: PT018
    assert layers["transformer_engine"] == {"DisableQuantizationLayer": {"enabled": True}}
    assert gemms["transformer_engine"] == {"DisableQuantizationGEMM": {"enabled": True, "gemms": ["wgrad"]}}
    names = ("up", "down", "head", "odd", "model.head", "ahead", "head.inner")
    for section, matched in ((layers, {"head", "odd", "model.head"}), (gemms, {"down"})):
        pattern = re.compile(section["layers"]["layer_name_regex_pattern"])
        assert {name for name in names if pattern.search(name)} == matched


def test_nothing_to_say_is_an_empty_file_and_another_precision_an_error() -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    assert plan_recipe(net).to_nvdlfw_inspect() == ""
    with pytest.raises(ValueError, match=r"to_nvdlfw_inspect: 0: got an MXFP8 precision of their own"):
        plan_recipe(net, overrides={"0": "mxfp8_hopper"}).to_nvdlfw_inspect()


def real(name: str) -> Any:
    """A module that may be absent, or present without the libraries it loads."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} does not import here: {type(error).__name__}: {error}")


def test_the_real_recipe() -> None:
    recipe = real("transformer_engine.common.recipe")
    ours = load_recipe("mxfp8").to_transformer_engine()
    assert isinstance(ours, recipe.MXFP8BlockScaling)
    assert ours.fp8_format == recipe.Format.E4M3
    assert load_recipe("mxfp8_square").to_transformer_engine().enable_2d_quantization


def test_a_real_module_is_planned_around() -> None:
    modules = real("transformer_engine.pytorch")
    net = nn.Sequential(modules.Linear(64, 64, device="meta"), nn.Linear(64, 64, device="meta"))
    plan = plan_recipe(net)
    assert [layer.new_type for layer in plan.layers] == [None, "MXFP8Linear"]
    assert "transformer_engine's Linear" in plan.layers[0].reason


def test_the_real_inspect_reads_the_yaml() -> None:
    manager = real("nvdlfw_inspect.config_manager")
    sections = yaml.safe_load(planned().to_nvdlfw_inspect())
    for section, layer in (("high_precision_layers", "model.head"), ("high_precision_wgrad", "model.down")):
        spec = manager.LayerSpec()
        spec.initialize(sections[section]["layers"])
        spec.verify_validity()
        assert spec.layer_name_regex_pattern.search(layer)
        assert not spec.layer_name_regex_pattern.search("model.up")
