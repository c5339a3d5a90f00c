"""The one-liner and its companions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .config import Override, Recipe
from .plan import Plan, plan_recipe
from .swap import carry_out, take_back


@dataclass(frozen=True)
class Report:
    """What `apply_recipe` did; `print(report)` shows every candidate layer."""

    plan: Plan

    @property
    def layers(self) -> Any:
        return self.plan.layers

    @property
    def converted(self) -> Any:
        return self.plan.converted

    def to_dict(self) -> dict[str, Any]:
        return self.plan.to_dict()

    def __str__(self) -> str:
        return str(self.plan)


def apply_recipe(
    model: nn.Module,
    recipe: str | Path | Recipe = "mxfp8",
    *,
    overrides: Mapping[str, Override] | str | Path | None = None,
    example_inputs: Any = None,
    strict: bool = False,
) -> Report:
    """Turn `model`'s layers into MXFP8, in place.

    Every module object, parameter, hook, optimizer reference and `state_dict` key stays what it was; only
    classes change. Nothing is changed if anything is wrong.

    Args:
        model: any torch model, on any device.
        recipe: a shipped recipe's name, a YAML file, or a `Recipe`.
        overrides: per-layer changes, pattern to override, or a YAML file of them.
        example_inputs: arguments of one forward, from which fused edges are found.
        strict: raise where a value would otherwise fall back to high precision with a warning.

    Returns:
        A report whose text shows every candidate layer and why those left alone were left alone.

    Raises:
        ValueError: unknown recipe, a rule that matches nothing, a second application, and the like.
    """
    plan = plan_recipe(model, recipe, overrides=overrides, example_inputs=example_inputs)
    carry_out(model, plan)
    return Report(plan)


def revert(model: nn.Module) -> int:
    """Give the plain model back, in place, with the trained weights; the number of layers restored.

    Raises:
        ValueError: when no recipe was applied.
    """
    return take_back(model)
