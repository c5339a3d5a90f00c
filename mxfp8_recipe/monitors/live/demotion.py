"""Layers that an alarm took back to BF16: carried out on the model, kept in its plan and so in its checkpoints."""

from __future__ import annotations

from torch import nn

from mxfp8_recipe.monitors.live.records import Alarm, AlarmKind
from mxfp8_recipe.swap import PLAN, demote

DEMOTING = (
    AlarmKind.NONFINITE,
    AlarmKind.SQNR,
    AlarmKind.UNDERFLOW,
    AlarmKind.SATURATION,
    AlarmKind.OUTLIER,
)
"""Alarms that BF16 can answer. A dead layer is as dead there."""


class Demotions:
    """The demoted layers below `model`; `reasons` by FQN, seen from `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [(name, module) for name, module in model.named_modules() if PLAN in module.__dict__]
        self.reasons: dict[str, str] = {}
        for prefix, owner in self._owners:
            for layer, reason in owner.__dict__[PLAN].demoted.items():
                self.reasons[".".join(filter(None, (prefix, layer)))] = reason

    @property
    def possible(self) -> bool:
        """Whether a recipe was applied to `model`, or to something in it."""
        return bool(self._owners)

    def demote(self, layer: str, alarm: Alarm | None) -> None:
        """Take `layer` back to BF16, for `alarm` or for one that another rank saw."""
        reason = "an alarm on another rank" if alarm is None else f"{alarm.kind.value} of {alarm.tensor}"
        step = "" if alarm is None else f", step {alarm.step}"
        for prefix, owner in self._owners:
            inner = layer.removeprefix(f"{prefix}.") if prefix else layer
            if not prefix or layer.startswith(f"{prefix}."):
                demote(owner, inner, f"demoted by the numerics monitor: {reason}{step}")
                self.reasons[layer] = owner.__dict__[PLAN].demoted[inner]
                return
