"""The one-liner and its companions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .config import Override, Recipe
from .first_forward import await_first_forward, stop_waiting
from .plan import LayerPlan, Plan
from .planner import plan_recipe
from .swap import applied_plan, carry_out, live_edges, take_back

__all__ = ["Report", "apply_recipe", "plan_recipe", "revert"]


class Report:
    """What `apply_recipe` did; `print(report)` shows every candidate layer and edge as they are now."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._applied = model, plan

    @property
    def plan(self) -> Plan:
        """The plan, with the edges of the first forward once it ran."""
        return applied_plan(self._model) or self._applied

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Every candidate, converted or not."""
        return self.plan.layers

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        """The layers that run in MXFP8."""
        return self.plan.converted

    @property
    def unfused(self) -> dict[str, str]:
        """Edges that ended since, by producer, with the reason."""
        return {edge.producer: edge.reason for edge in live_edges(self._model) if edge.reason}

    def to_dict(self) -> dict[str, Any]:
        """The plan as `mxfp8 plan --json` prints it, and the edges that ended since."""
        return self.plan.to_dict() | {"unfused": self.unfused}

    def __str__(self) -> str:
        lines = [str(self.plan)]
        lines += [f"{producer}: un-fused, {reason}" for producer, reason in self.unfused.items()]
        return "\n".join(lines)


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
        overrides: per-layer changes, or a YAML file of them. A pattern is a layer's name, `re:` with a regular
            expression that matches the whole name, or `kind:` with linear, norm, activation or attention. What it
            maps to is `"bf16"`, another recipe's name, or a mapping of GEMMs, such as `{"wgrad": "bf16"}`.
        example_inputs: arguments of one forward (a tuple, a mapping of keywords, or a single argument), from
            which fused edges are found. Without them the first eager training forward is recorded instead.
        strict: raise where a value on a fused edge is read by somebody nobody planned for, instead of
            recomputing it in high precision with a warning.

    Returns:
        A report whose text shows every candidate layer and why those left alone were left alone.

    Warns:
        UserWarning: the model is on a GPU that does not multiply MXFP8 itself; why, and what to install.

    Raises:
        ValueError: unknown recipe, a rule that matches nothing, a second application, and the like.
    """
    plan = plan_recipe(model, recipe, overrides=overrides, example_inputs=example_inputs)
    if plan.gpu_emulates and plan.converted:
        warnings.warn(f"apply_recipe: this GPU runs backend {plan.backend}: {plan.why}", stacklevel=2)
    carry_out(model, plan, strict)
    if not plan.recorded and plan.recipe.converts_something:
        await_first_forward(model, strict)
    return Report(model, plan)


def revert(model: nn.Module) -> int:
    """Give the plain model back, in place, with the trained weights; the number of layers restored.

    Raises:
        ValueError: when no recipe was applied.
    """
    for module in model.modules():
        stop_waiting(module)
    return take_back(model)
