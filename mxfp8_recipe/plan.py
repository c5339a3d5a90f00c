"""What a recipe would do to a model: one row a layer, found without touching the model."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from . import backends
from .config import BF16, LinearPrecision, Override, Recipe
from .costs import DEFAULT_TOKENS, Cost, linear_cost
from .modules import is_swapped
from .recipe_files import load_overrides, load_recipe
from .recognize import Candidate, recognize
from .rules import Rules, apply_override, base_precision, check_all_matched, is_bf16

_GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One candidate layer.

    Attributes:
        fqn: fully qualified name, `""` for a root that is itself a layer. aliases: its other names, if used twice.
        kind, in_features, out_features: what it is.
        old_type, new_type: class names; `new_type` is None for a layer left alone, and `reason` says why.
        precision: what each GEMM runs in; `"bf16"` for a layer left alone.
        implementation: the MXFP8 class, None for a layer left alone.
        mixes_tokens: some tile spans several tokens, so one token's value moves another's output.
        cost: predicted times.
    """

    fqn: str
    aliases: tuple[str, ...] = ()
    kind: str
    in_features: int
    out_features: int
    old_type: str
    new_type: str | None
    reason: str
    precision: Any
    implementation: type[nn.Module] | None
    mixes_tokens: bool
    cost: Cost

    @property
    def gemms(self) -> dict[str, str]:
        """Precision of each GEMM as short text, such as `1x32 @ 1x32` or `bf16`."""
        if self.precision == BF16:
            return dict.fromkeys(_GEMMS, BF16)
        return {name: _describe(getattr(self.precision, name)) for name in _GEMMS}

    def to_dict(self) -> dict[str, Any]:
        values = asdict(replace(self, precision=None, implementation=None))
        del values["precision"], values["implementation"], values["cost"]
        return values | {"gemms": self.gemms, "predicted_ratio": self.cost.ratio}


def _describe(gemm: Any) -> str:
    return BF16 if gemm == BF16 else " @ ".join(spec.short for spec in gemm.operands)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The table `print` shows, and what `apply_recipe` carries out."""

    recipe: Recipe
    layers: tuple[LayerPlan, ...]
    device: str
    backend: str
    notes: tuple[str, ...] = field(default=())

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        return tuple(layer for layer in self.layers if layer.new_type is not None)

    @property
    def cost(self) -> Cost:
        return sum((layer.cost for layer in self.layers), start=Cost(0.0, 0.0))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint records: the recipe's name and every layer's precision, plain text and numbers only."""
        layers = {layer.fqn: "; ".join(f"{k}={v}" for k, v in layer.gemms.items()) for layer in self.converted}
        digest = hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()
        return {"recipe": self.recipe.name, "digest": digest, "layers": layers}

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "device": self.device,
            "backend": self.backend,
            "layers": [layer.to_dict() for layer in self.layers],
            "predicted_ratio": self.cost.ratio,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, force_terminal=False)
        console.print(self.table())
        for line in self.summary():
            console.print(line, highlight=False)
        return console.file.getvalue().rstrip()  # pyright: ignore[reportAttributeAccessIssue]

    def table(self) -> Table:
        table = Table(title=f"recipe {self.recipe.name} on {self.device}, backend {self.backend}", expand=False)
        for name in ("layer", "type", "in", "out", "becomes", *_GEMMS, "time ratio", "note"):
            table.add_column(name, overflow="fold", justify="right" if name in ("in", "out", "time ratio") else "left")
        for layer in self.layers:
            note = "; ".join(filter(None, (layer.reason, "mixes tokens" if layer.mixes_tokens else "", _also(layer))))
            table.add_row(
                layer.fqn or "(root)",
                layer.old_type,
                str(layer.in_features or "-"),
                str(layer.out_features or "-"),
                layer.new_type or "-",
                *layer.gemms.values(),
                f"{layer.cost.ratio:.2f}x",
                note,
            )
        return table

    def summary(self) -> list[str]:
        """Sentences under the table: how much is converted, the predicted total, and what to do about it."""
        lines = [f"{len(self.converted)} of {len(self.layers)} candidate layers become MXFP8."]
        ratio = self.cost.ratio
        if self.backend == "reference":
            lines.append(f"The reference backend emulates MXFP8 on {self.device}: for numerics, not for speed.")
        if ratio < 0.995:
            lines.append(
                f"Predicted linear time {ratio:.2f}x of BF16's speed on this device, a loss; "
                "the faster recipe here is 'bf16'."
            )
        elif self.converted:
            lines.append(f"Predicted linear time: {ratio:.2f}x of BF16's speed.")
        return lines + list(self.notes)


def _also(layer: LayerPlan) -> str:
    return f"also {', '.join(layer.aliases)}" if layer.aliases else ""


def plan_recipe(
    model: nn.Module,
    recipe: str | Path | Recipe = "mxfp8",
    *,
    overrides: Mapping[str, Override] | str | Path | None = None,
    example_inputs: Any = None,
) -> Plan:
    """The plan `apply_recipe` would carry out; the model is not touched.

    Args:
        model: any module, on any device, meta included.
        recipe: a shipped recipe's name, a YAML file, or a `Recipe`.
        overrides: pattern to override (see `rules`), or a YAML file of them.
        example_inputs: positional arguments of one forward (a tuple), a mapping of keyword arguments,
            or a single argument.

    Raises:
        ValueError: unknown recipe, bad override, an override that matches no layer or asks the impossible,
            or a model that already has a recipe.
    """
    chosen = load_recipe(recipe)
    user = Rules(load_overrides(overrides), "overrides")
    own = Rules(chosen.rules, f"recipe {chosen.name}")
    names = _names(model)
    _refuse_second(model, names)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = _candidates(model, names)
    planner = _LayerPlanner(chosen, own, user, backends.select(device))
    layers = [planner.plan(names[module], module, candidate) for module, candidate in found]
    layers = _keep_last(layers, chosen, user, names, found)
    check_all_matched(user, [layer.fqn for layer in layers], [n for all_names in names.values() for n in all_names])
    return Plan(recipe=chosen, layers=tuple(layers), device=device.type, backend=planner.backend)


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module, in definition order, with all the names it goes by."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _refuse_second(model: nn.Module, names: dict[nn.Module, list[str]]) -> None:
    for module, found in names.items():
        if is_swapped(module):
            raise ValueError(
                f"{found[0] or type(model).__name__}: already MXFP8 ({type(module).__name__}); a recipe is applied "
                "once, call revert(model) first"
            )


def _candidates(model: nn.Module, names: dict[nn.Module, list[str]]) -> list[tuple[nn.Module, Candidate]]:
    parents = {child: module for module in names for child in module._modules.values() if child is not None}
    cache: dict[object, bool] = {}
    found = ((module, recognize(module, parents.get(module), cache)) for module in names)
    return [(module, candidate) for module, candidate in found if candidate is not None]


class _LayerPlanner:
    def __init__(self, recipe: Recipe, own: Rules, user: Rules, backend: str) -> None:
        self.recipe, self.own, self.user, self.backend = recipe, own, user, backend

    def plan(self, names: list[str], module: nn.Module, candidate: Candidate) -> LayerPlan:
        precision, reason = base_precision(self.recipe, self.own, names, candidate.kind)
        match = self.user.match(names, candidate.kind)
        if match is not None:
            where = f"overrides: {match.pattern!r}"
            precision = apply_override(precision, match.override, candidate.kind, where)
            reason = f"{where} says bf16" if is_bf16(precision) else ""
        if candidate.implementation is None:
            if match is not None and match.exact and not is_bf16(precision):
                raise ValueError(f"{where} asks for MXFP8, but {candidate.reason}; say 'bf16' for it")
            hint = "" if match is not None else f" (say overrides={{{names[0]!r}: 'bf16'}} to record the choice)"
            precision, reason = BF16, f"{candidate.reason}; it stays BF16{hint}"
        elif not is_bf16(precision) and match is None:
            small = self._too_small(candidate)
            precision, reason = (BF16, small) if small else (precision, reason)
        return self._row(names, module, candidate, precision, reason)

    def _too_small(self, candidate: Candidate) -> str:
        smallest = min(candidate.in_features, candidate.out_features)
        if self.backend == "reference" or smallest >= self.recipe.gpu_min_features:
            return ""
        return f"{smallest} features is below gpu_min_features={self.recipe.gpu_min_features}: too small to gain"

    def _row(self, names: list[str], module: nn.Module, candidate: Candidate, precision: Any, reason: str) -> LayerPlan:
        implementation = None if is_bf16(precision) else candidate.implementation
        if implementation is None:
            precision = BF16
        return LayerPlan(
            fqn=names[0],
            aliases=tuple(names[1:]),
            kind=candidate.kind,
            in_features=candidate.in_features,
            out_features=candidate.out_features,
            old_type=type(module).__name__,
            new_type=implementation and f"MXFP8{type(module).__name__}",
            reason=reason,
            precision=precision,
            implementation=implementation,
            mixes_tokens=isinstance(precision, LinearPrecision) and precision.mixes_tokens,
            cost=linear_cost(DEFAULT_TOKENS, candidate.in_features, candidate.out_features, precision),
        )


def _keep_last(
    layers: list[LayerPlan],
    recipe: Recipe,
    user: Rules,
    names: dict[nn.Module, list[str]],
    found: list[tuple[nn.Module, Candidate]],
) -> list[LayerPlan]:
    """Leave the recipe's last share of convertible layers in BF16, except those the user spoke of."""
    convertible = [i for i, layer in enumerate(layers) if layer.new_type is not None]
    count = math.ceil(recipe.bf16_last_fraction * len(convertible))
    for i in convertible[len(convertible) - count :]:
        layer = layers[i]
        if user.match(names[found[i][0]], layer.kind) is None:
            reason = f"recipe {recipe.name} keeps the last {recipe.bf16_last_fraction:.0%} of layers in BF16"
            cost = Cost(layer.cost.bf16, layer.cost.bf16)
            layers[i] = replace(
                layer, new_type=None, implementation=None, precision=BF16, reason=reason, mixes_tokens=False, cost=cost
            )
    return layers
