"""Recipes as values and as files: validated, frozen, and the same in code and in YAML."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from mxfp8_recipe import Recipe, load_recipe, recipe_names
from mxfp8_recipe.config import BF16, FpropPrecision, LinearPrecision, merge, validate
from mxfp8_recipe.fused.spec import TILES, Elem, QuantSpec, Rounding, ScaleRounding
from mxfp8_recipe.recipe_files import load_overrides

SHIPPED = ("bf16", "gem", "mxfp8", "mxfp8_floor", "mxfp8_hopper", "mxfp8_square", "mxfp8_square_activations")

OPERANDS = {
    "mxfp8": ["1x32"] * 6,
    "mxfp8_floor": ["1x32 floor"] * 6,
    "mxfp8_hopper": ["1x128", "128x128", "1x128", "128x128", "1x128", "1x128"],
    "mxfp8_square": ["1x32", "32x32", "1x32", "32x32", "1x32", "1x32"],
    "mxfp8_square_activations": ["32x32"] * 6,
    "gem": ["1x32"] * 4 + ["1x32 sr h32", "1x32 h32"],
}
"""Specs of (input, weight), (grad_output, weight), (grad_output, input) that each shipped recipe promises."""


def linear(recipe: Recipe) -> LinearPrecision:
    assert isinstance(recipe.linear, LinearPrecision)
    return recipe.linear


def operands(precision: LinearPrecision) -> list[str]:
    gemms = (precision.fprop, precision.dgrad, precision.wgrad)
    return [spec.short for gemm in gemms if gemm != "bf16" for spec in gemm.operands]


def test_the_shipped_recipes_are_what_they_say() -> None:
    assert set(SHIPPED) <= set(recipe_names())
    assert load_recipe("bf16").linear == BF16
    assert {name: operands(linear(load_recipe(name))) for name in OPERANDS} == OPERANDS
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description
    mixing = [name for name in OPERANDS if linear(load_recipe(name)).mixes_tokens]
    assert mixing == ["mxfp8_square_activations"]
    specs = [
        s for n in OPERANDS for g in ("fprop", "dgrad", "wgrad") for s in getattr(linear(load_recipe(n)), g).operands
    ]
    assert {s.elem for s in specs} == {Elem.E4M3}


@pytest.mark.parametrize("name", SHIPPED)
def test_round_trip_through_yaml(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    path = tmp_path / "copy.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    again = load_recipe(path)
    assert again == recipe
    assert again.digest == recipe.digest
    assert hash(again) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert load_recipe(recipe) is recipe


def test_the_digest_is_of_the_numerics_alone() -> None:
    base = load_recipe("mxfp8")
    assert base.model_copy(update={"name": "other", "description": "x"}).digest == base.digest
    assert len({load_recipe(name).digest for name in SHIPPED}) == len(SHIPPED)
    assert base.model_copy(update={"bf16_last_fraction": 0.5}).digest != base.digest


def test_extends_states_only_what_differs(tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    first.write_text("extends: mxfp8_hopper\nlinear: {wgrad: bf16}\n")
    second = tmp_path / "second.yaml"
    second.write_text("extends: first.yaml\nname: mine\nlinear:\n  dgrad: {weight: {tile: 32x32}}\n")
    middle, last = load_recipe(first), load_recipe(second)
    assert middle.name == "first"
    assert linear(middle).fprop == linear(load_recipe("mxfp8_hopper")).fprop
    assert operands(linear(middle)) == ["1x128", "128x128", "1x128", "128x128"]
    assert last.name == "mine"
    assert operands(linear(last)) == ["1x128", "128x128", "1x128", "32x32"]
    assert linear(last).wgrad == BF16
    whole = tmp_path / "whole.yaml"
    whole.write_text("extends: mxfp8\nlinear: bf16\n")
    assert load_recipe(whole).linear == BF16


def test_a_mapping_over_bf16_starts_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("extends: bf16\nname: r\nlinear: {fprop: {input: {tile: 1x128}}}\n")
    assert operands(linear(load_recipe(path)))[:2] == ["1x128", "1x32"]
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4}) == {"a": {"b": 1, "c": 3}, "d": 4}


def test_configs_are_frozen() -> None:
    recipe = load_recipe("mxfp8")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.name = "x"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        QuantSpec().tile = (32, 32)  # pyright: ignore[reportAttributeAccessIssue]


def test_unknown_recipe_names_its_near_misses() -> None:
    with pytest.raises(ValueError, match=r"got 'mxfp8_hoper' \(did you mean 'mxfp8_hopper'"):
        load_recipe("mxfp8_hoper")
    with pytest.raises(ValueError, match=r"expected one of bf16, .*or a path to a YAML file"):
        load_recipe("nothing like it")


def test_missing_files() -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.yaml; shipped recipes are bf16, "):
        load_recipe("absent.yaml")
    with pytest.raises(FileNotFoundError, match=r"no file .*dir/absent"):
        load_recipe("dir/absent")
    with pytest.raises(FileNotFoundError, match=r"overrides: no file .*absent\.yaml"):
        load_overrides("absent.yaml")


def test_an_empty_file_of_overrides_was_hardly_meant(tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("# head: bf16\n")
    with pytest.raises(ValueError, match=r"overrides .*o\.yaml: got a file that states nothing"):
        load_overrides(path)
    path.write_text("{}\n")
    assert load_overrides(path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: r\nlinear: {fprop: [\n", r"not valid YAML at line 3, column 1"),
        ("name: r\n  linear: bf16\n", r"not valid YAML at line 2, column 9"),
        ("- a\n- b\n", r"got list, expected a mapping"),
        ("", r"recipe .*broken\.yaml: got a file that states nothing, expected a mapping"),
        ("# linear: bf16\n---\n", r"got a file that states nothing"),
        ("1: a\n", r"expected a mapping with text keys"),
        ("liner: bf16\n", r"liner: unknown field \(did you mean 'linear'\?\); fields are name"),
        ("linear: {fpro: bf16}\n", r"linear\.fpro: unknown field \(did you mean 'fprop'\?\)"),
        ("linear: fp4\n", r"linear: got 'fp4', expected 'bf16' or a mapping"),
        ("linear: {fprop: {input: 1x32}}\n", r"linear\.fprop\.input: got '1x32', expected a mapping of elem"),
        ("linear: {fprop: {input: {tile: 2x32}}}\n", r"linear\.fprop\.input: tile: got 2x32, expected one of 1x32"),
        ("linear: {fprop: {input: {tle: 1x32}}}\n", r"unknown field 'tle' \(did you mean 'tile'"),
        ("linear: {wgrad: {input: {hadamard: 32}}}\n", r"got None and 32 for grad_output and input, expected the same"),
        ("linear: {fprop: {input: {tile: 32x32, hadamard: 32}}}\n", r"one quantization shares between two GEMMs"),
        ("bf16_last_fraction: 1.5\n", r"bf16_last_fraction: .*\(got 1\.5\)"),
        ("extends: mxfp9\n", r"got 'mxfp9' \(did you mean 'mxfp8'"),
        ("extends: [mxfp8]\n", r"extends: got \['mxfp8'\], expected a recipe's name or a path"),
        ("extends: ./broken.yaml\n", r"extends itself: .*broken\.yaml -> .*broken\.yaml"),
    ],
)
def test_broken_recipes_are_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(path)
    assert "pydantic" not in str(caught.value)
    assert "extends" in text or str(path) in str(caught.value)


def test_every_bad_field_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(
        "bf16_last_fraction: -1\ngpu_min_features: many\nlinear: {dgrad: {weight: {elem: e3m4, tile: 9}}}\n"
    )
    with pytest.raises(ValueError, match="broken") as caught:
        load_recipe(path)
    for part in ("bf16_last_fraction", "gpu_min_features", "elem: got 'e3m4'", "tile: got 9"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_validate_explains_a_precision_in_code() -> None:
    with pytest.raises(ValueError, match=r"here: fprop\.wieght: unknown field \(did you mean 'weight'\?\)"):
        validate(LinearPrecision, {"fprop": {"wieght": {}}}, "here")
    assert validate(LinearPrecision, {"wgrad": "bf16"}, "here").wgrad == BF16
    with pytest.raises(ValidationError):
        FpropPrecision(input=QuantSpec(hadamard=32))


@pytest.mark.parametrize("tile", TILES, ids="{0[0]}x{0[1]}".format)
def test_specs_round_trip_as_text_and_as_mappings(tile: tuple[int, int]) -> None:
    for hadamard in (None, 64):
        if hadamard and tile[0] == tile[1]:
            continue
        spec = QuantSpec(
            elem=Elem.E5M2,
            tile=tile,
            scale_rounding=ScaleRounding.FLOOR,
            rounding=Rounding.STOCHASTIC,
            hadamard=hadamard,
        )
        assert QuantSpec.decode(spec.encode()) == spec
        assert QuantSpec.from_dict(spec.to_dict()) == spec
        assert QuantSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec


def test_square_means_square() -> None:
    """A tile of several rows that is not square cannot serve both contractions, and may carry a rotation."""
    assert [QuantSpec(tile=tile).is_square for tile in TILES] == [False, True, False, False, True]
    assert QuantSpec(tile=(32, 128), hadamard=32).short == "32x128 h32"


def test_overrides_files(tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("heads.0: bf16\n're:tower.*': {wgrad: bf16}\n")
    expected = {"heads.0": "bf16", "re:tower.*": {"wgrad": "bf16"}}
    assert load_overrides(path) == load_overrides(str(path)) == expected
    path.write_text("overrides:\n  heads.0: bf16\n  're:tower.*': {wgrad: bf16}\n")
    assert load_overrides(path) == expected
    assert load_overrides(None) == {}
    path.write_text("overrides: bf16\n")
    with pytest.raises(ValueError, match=r"got 'bf16' under `overrides`, expected a mapping"):
        load_overrides(path)
    path.write_text("a: {b\n")
    with pytest.raises(ValueError, match=r"overrides .*not valid YAML at line 2"):
        load_overrides(path)
