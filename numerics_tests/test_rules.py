"""Overrides: exact name, then `re:`, then kind, then the recipe; none of them is ever silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mxfp8_recipe import Recipe, apply_recipe, load_recipe, plan_recipe
from mxfp8_recipe.plan import Plan
from numerics_tests.helpers import gradients, linear_oracle

FPROP = "1x32 @ 1x32"


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.click_head = nn.Linear(32, 32)
        self.odd = nn.Linear(32, 20)


def rows(plan: Plan) -> dict[str, dict[str, str]]:
    """Precision of each GEMM of every linear layer, by name."""
    found = {}
    for layer in plan.layers:
        if layer.kind == "linear":
            plain = dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
            found[layer.fqn] = plain if layer.new_type is None else layer.gemms
    return found


def fprops(overrides, recipe: str | Recipe = "mxfp8") -> list[str]:
    found = rows(plan_recipe(Tower(), recipe, overrides=overrides))
    return [found[f"tower.{i}"]["fprop"] for i in range(3)] + [found["click_head"]["fprop"]]


def test_the_closest_rule_wins_whatever_the_order() -> None:
    overrides = {
        "kind:linear": "bf16",
        r"re:tower\..*": "mxfp8_hopper",
        "tower.1": "mxfp8_square",
    }
    expected = ["1x128 @ 128x128", "1x32 @ 32x32", "1x128 @ 128x128", "bf16"]
    assert fprops(overrides) == expected
    assert fprops(dict(reversed(overrides.items()))) == expected
    assert fprops({}) == [FPROP] * 4


def test_regular_expressions_match_the_whole_name_in_the_order_written() -> None:
    assert fprops({r"re:tower\.[01]": "bf16", r"re:tower\..": "mxfp8_square"}) == [
        "bf16",
        "bf16",
        "1x32 @ 32x32",
        FPROP,
    ]
    with pytest.raises(ValueError, match=r"'re:ower' matches no layer; layers are named like tower\.0"):
        fprops({"re:ower": "bf16"})


def test_partial_specs_change_only_what_they_name() -> None:
    found = rows(plan_recipe(Tower(), overrides={"tower.0": {"wgrad": "bf16", "fprop": {"weight": {"tile": "32x32"}}}}))
    assert found["tower.0"] == {"fprop": "1x32 @ 32x32", "dgrad": FPROP, "wgrad": "bf16"}
    assert found["tower.1"] == {"fprop": FPROP, "dgrad": FPROP, "wgrad": FPROP}
    on_bf16 = rows(plan_recipe(Tower(), "bf16", overrides={"tower.0": {"fprop": {}}, "tower.1": "mxfp8"}))
    assert on_bf16["tower.0"] == {"fprop": FPROP, "dgrad": "bf16", "wgrad": "bf16"}
    assert on_bf16["tower.1"] == {"fprop": FPROP, "dgrad": FPROP, "wgrad": FPROP}
    assert on_bf16["tower.2"]["fprop"] == "bf16"


def test_a_rule_decides_what_runs() -> None:
    """The override's GEMM is the BF16 one to the bit, the others are quantized."""
    model = Tower()
    layer, x = model.tower[0], torch.randn(40, 32)
    plain = gradients(layer, x)
    apply_recipe(model, overrides={"tower.0": {"dgrad": "bf16"}})
    out, grad_input, grads = gradients(layer, x)
    precision = load_recipe("mxfp8").linear
    assert not isinstance(precision, str)
    expected = linear_oracle(
        x,
        layer.weight.detach(),
        layer.bias.detach(),
        torch.ones(40, 32),
        precision.model_copy(update={"dgrad": "bf16"}),
    )
    expected.output.check(out)
    expected.grad_input.check(grad_input)
    expected.grad_weight.check(grads["weight"])
    assert expected.output.far_from(plain[0])
    assert not expected.grad_input.far_from(plain[1])
    assert expected.grad_weight.far_from(plain[2]["weight"])


def test_code_and_yaml_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "overrides.yaml"
    path.write_text("tower.0: {wgrad: bf16}\n're:.*head': bf16\nkind:linear: mxfp8_square\n")
    code = {"tower.0": {"wgrad": "bf16"}, "re:.*head": "bf16", "kind:linear": "mxfp8_square"}
    assert rows(plan_recipe(Tower(), overrides=path)) == rows(plan_recipe(Tower(), overrides=code))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: mxfp8\nrules:\n  tower.0: {wgrad: bf16}\n  're:.*head': bf16\n  'nowhere': bf16\n")
    found = rows(plan_recipe(Tower(), recipe))
    assert found["tower.0"]["wgrad"] == "bf16"
    assert found["click_head"]["fprop"] == "bf16"
    assert found["tower.1"]["wgrad"] == FPROP
    overruled = rows(plan_recipe(Tower(), recipe, overrides={"click_head": "mxfp8_square"}))
    assert overruled["click_head"]["fprop"] == "1x32 @ 32x32"


def test_an_override_may_be_the_path_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text("extends: mxfp8\nlinear: {fprop: {input: {tile: 1x128}}}\n")
    assert fprops({"tower.0": str(path)})[0] == "1x128 @ 1x32"


def test_gem_keeps_heads_and_the_last_layers_in_bf16_and_says_so() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)))
    plan = plan_recipe(model, "gem")
    assert [layer.new_type is None for layer in plan.layers] == [False] * 8 + [True] * 2
    assert "recipe gem keeps the last 15% of layers in BF16" in plan.layers[9].reason
    assert plan.layers[0].gemms["wgrad"] == "1x32 sr h32 @ 1x32 h32"
    assert fprops(None, "gem")[3] == "bf16"
    kept = plan_recipe(model, "gem", overrides={"9": "mxfp8"})
    assert kept.layers[9].new_type == "MXFP8Linear"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tower.00": "bf16"}, r"'tower\.00' matches no layer \(did you mean 'tower\.0'"),
        ({"zzz": "bf16"}, r"'zzz' matches no layer; layers are tower\.0, "),
        ({"tower": "bf16"}, r"'tower' matches no layer; it is a container, say 're:tower"),
        ({"re:tower.[": "bf16"}, r"'re:tower\.\[' is not a regular expression"),
        ({"kind:linaer": "bf16"}, r"got 'kind:linaer', expected one of kind:linear"),
        ({"tower.0": "bf61"}, r"'tower\.0': got 'bf61', expected 'bf16', a mapping or a recipe"),
        ({"tower.0": "mxfp9"}, r"got 'mxfp9' \(did you mean 'mxfp8'"),
        ({"tower.0": {"wgard": "bf16"}}, r"'tower\.0': wgard: unknown field \(did you mean 'wgrad'\?\)"),
        ({"tower.0": {"wgrad": "fp16"}}, r"'tower\.0': wgrad: got 'fp16', expected 'bf16' or a mapping"),
        ({"tower.0": {"fprop": {"input": {"tile": "7x7"}}}}, r"fprop\.input: tile: got 7x7, expected one of"),
        ({"tower.0": 8}, r"'tower\.0': got 8, expected 'bf16', a recipe's name or a mapping"),
        ({"tower.0": None}, r"'tower\.0': got None, expected 'bf16'"),
        ({"odd": "mxfp8"}, r"'odd' asks for MXFP8, but out_features=20 is not a multiple of 32; say 'bf16' for it"),
        ({"tower.0": "absent.yaml"}, r"no file .*absent\.yaml"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_mistakes_are_one_clear_error(overrides: dict, message: str) -> None:
    model = Tower()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        apply_recipe(model, overrides=overrides)
    assert all(type(m) in (Tower, nn.ModuleList, nn.Linear) for m in model.modules())


def test_every_rule_that_matches_nothing_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"'a\.b' matches no layer.*'re:c' matches no layer.*'kind:linear' matches"):
        plan_recipe(nn.Sequential(nn.ReLU()), overrides={"a.b": "bf16", "re:c": "bf16", "kind:linear": "bf16"})


def test_a_broad_rule_may_cover_layers_that_cannot_follow() -> None:
    """Only an exact name that asks the impossible is an error; a pattern leaves such layers alone, with the reason."""
    plan = plan_recipe(Tower(), overrides={"re:.*": "mxfp8_square"})
    (odd,) = (layer for layer in plan.layers if layer.fqn == "odd")
    assert odd.new_type is None
    assert "out_features=20" in odd.reason


def test_layers_too_small_to_gain_stay_bf16_on_a_gpu_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a threshold that is a recipe field; whoever names the layer gets it, and the reference skips nothing."""
    model = nn.Sequential(nn.Linear(96, 256), nn.Linear(256, 128), nn.Linear(128, 96))
    assert len(plan_recipe(model).converted) == 3
    monkeypatch.setattr("mxfp8_recipe.backends.select", lambda device: "triton")
    found = {layer.fqn: layer for layer in plan_recipe(model, overrides={"2": "mxfp8"}).layers}
    assert found["0"].new_type is None
    assert "96 features is below gpu_min_features=128: too small to gain" in found["0"].reason
    assert found["1"].new_type == found["2"].new_type == "MXFP8Linear"
    low = load_recipe("mxfp8").model_copy(update={"gpu_min_features": 64})
    assert len(plan_recipe(model, low).converted) == 3
