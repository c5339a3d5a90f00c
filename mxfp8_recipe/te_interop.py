"""Living with TransformerEngine: its modules are recognized, recipes and per-layer choices are said in its words.

`Recipe.to_transformer_engine()` gives the `MXFP8BlockScaling` that rounds as the recipe does;
`Plan.to_nvdlfw_inspect()` gives, as the YAML that Nvidia-DL-Framework-Inspect reads, the layers and GEMMs that stay in
high precision.
Source: TransformerEngine 2.20, `common/recipe` and `debug/features`; nvdlfw-inspect 0.2.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from .fused.spec import Elem, QuantSpec, Rounding, ScaleRounding

if TYPE_CHECKING:
    from .config import Recipe

PACKAGE = "transformer_engine"
GEMMS = ("fprop", "dgrad", "wgrad")

KINDS = {
    "Linear": "linear",
    "LayerNormLinear": "linear",
    "LayerNormMLP": "linear",
    "GroupedLinear": "linear",
    "LayerNorm": "norm",
    "RMSNorm": "norm",
    "DotProductAttention": "attention",
    "MultiheadAttention": "attention",
    "TransformerLayer": "attention",
}
"""Layer kind of TransformerEngine's modules, by class name."""


def te_class(module: nn.Module) -> type | None:
    """The class of TransformerEngine that `module` is an instance of, or None; nothing is imported."""
    found = (cls for cls in type(module).__mro__ if cls.__module__.split(".")[0] == PACKAGE)
    return next(found, None)


def inside_te(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules that some module of TransformerEngine among `modules` owns, and runs as it likes."""
    owners = (module for module in modules if te_class(module) is not None)
    return {inner for owner in owners for inner in owner.modules() if inner is not owner}


def te_recipe(recipe: Recipe) -> Any:
    """`transformer_engine.common.recipe.MXFP8BlockScaling` of the recipe's linear layers.

    Rules, attention and which layers stay BF16 are no part of it; see `Plan.to_nvdlfw_inspect`.

    Raises:
        ValueError: naming everything about the recipe that MXFP8BlockScaling cannot say.
        ImportError: TransformerEngine is not installed, or does not load.
    """
    options, hybrid = _options(recipe)
    try:
        from transformer_engine.common.recipe import (  # pyright: ignore[reportMissingImports]
            Format,
            MXFP8BlockScaling,
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            f"to_transformer_engine: transformer_engine does not import ({error}); pip install 'mxfp8-recipe[te]'"
        ) from error
    known = {field.name for field in dataclasses.fields(MXFP8BlockScaling)}
    missing = sorted(set(options) - known)
    if missing:
        raise ValueError(
            f"recipe {recipe.name}: this TransformerEngine's MXFP8BlockScaling has no {', '.join(missing)}; "
            "pip install -U 'transformer-engine[pytorch]>=2.20'"
        )
    return MXFP8BlockScaling(fp8_format=Format.HYBRID if hybrid else Format.E4M3, **options)


def _options(recipe: Recipe) -> tuple[dict[str, Any], bool]:
    """What differs from MXFP8BlockScaling's defaults, and whether gradients are E5M2."""
    linear = recipe.linear
    if isinstance(linear, str):
        raise ValueError(f"recipe {recipe.name}: its linear layers stay BF16; train without TransformerEngine's recipe")
    gemms = {name: getattr(linear, name) for name in GEMMS}
    high = [name for name, gemm in gemms.items() if isinstance(gemm, str)]
    options: dict[str, Any] = {}
    problems = []
    if high == ["dgrad", "wgrad"]:
        options["backward_override"] = "high_precision"
    elif high:
        problems.append(f"{' and '.join(high)}: bf16 goes through Plan.to_nvdlfw_inspect, not through the recipe")
    operands = {
        f"{name}.{part}": getattr(gemm, part)
        for name, gemm in gemms.items()
        if not isinstance(gemm, str)
        for part in type(gemm).model_fields
    }
    for name, spec in operands.items():
        problems += [f"{name}: {problem}" for problem in _spec_problems(name, spec)]
    square = {name: spec.tile == (32, 32) for name, spec in operands.items() if name.endswith("weight")}
    if any(square.values()):
        options["enable_2d_quantization"] = True
        if not all(square.values()):
            problems.append(
                f"weights: 32x32 for {', '.join(n for n, s in square.items() if s)} alone, expected for all"
            )
    gradients = {spec.elem for name, spec in operands.items() if name.endswith("grad_output")}
    if len(gradients) > 1:
        problems.append("grad_output: E4M3 in one GEMM and E5M2 in another, expected one format")
    if problems:
        raise ValueError(
            f"recipe {recipe.name}: TransformerEngine's MXFP8BlockScaling cannot say {'; '.join(problems)}"
        )
    return options, gradients == {Elem.E5M2}


def _spec_problems(name: str, spec: QuantSpec) -> list[str]:
    weight = name.endswith("weight")
    problems = []
    if spec.tile != (1, 32) and not (weight and spec.tile == (32, 32)):
        problems.append(f"tile {spec.tile_name}, expected 1x32{' or 32x32' if weight else ''}")
    if spec.scale_rounding is not ScaleRounding.RCEIL:
        problems.append(f"scale_rounding {spec.scale_rounding.value}, expected rceil")
    if spec.rounding is not Rounding.NEAREST:
        problems.append(f"{spec.rounding.value} rounding, expected nearest")
    if spec.hadamard:
        problems.append(f"hadamard {spec.hadamard}, expected null")
    if spec.elem is Elem.E5M2 and not name.endswith("grad_output"):
        problems.append("elem e5m2, expected e4m3 for all but gradients")
    return problems


def inspect_yaml(layers: dict[str, tuple[str, ...]]) -> str:
    """Nvidia-DL-Framework-Inspect's YAML for layers with GEMMs in high precision.

    Args:
        layers: name of each linear layer to its GEMMs of `GEMMS` in high precision; those without any are left out.

    Returns:
        One section a set of GEMMs: `DisableQuantizationLayer` for all three, else `DisableQuantizationGEMM`. Layers are
        named by a regular expression that also matches below a prefix such as `model.`. Empty for nothing to say.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, gemms in layers.items():
        if gemms:
            groups.setdefault(tuple(g for g in GEMMS if g in gemms), []).append(name)
    sections = {}
    for gemms, names in groups.items():
        all_three = gemms == GEMMS
        feature: dict[str, Any] = {"enabled": True} if all_three else {"enabled": True, "gemms": list(gemms)}
        sections["high_precision_" + ("layers" if all_three else "_".join(gemms))] = {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": rf"(?:^|\.)(?:{'|'.join(map(re.escape, names))})$"},
            PACKAGE: {f"DisableQuantization{'Layer' if all_three else 'GEMM'}": feature},
        }
    return yaml.safe_dump(sections, sort_keys=False, width=120) if sections else ""
