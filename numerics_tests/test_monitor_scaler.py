"""Gradients that overflow because a GradScaler scaled them are none of the monitor's business; others are."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import AlarmKind, MonitorReport, NumericsMonitor
from numerics_tests.monitor_models import Ranker, loss_of, rows

STEPS = 10


def train(scale: float, *, told: bool, breaks: Any = None, after_update: bool = True, **options: Any) -> Any:
    """fp16 under a scaler that starts at `scale`; the monitor's reports, and the scale before each step."""
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    model.plants[1].change = breaks or model.plants[1].change
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    monitor = NumericsMonitor(model, every=1, scaler=scaler if told else None, **options)
    reports: list[MonitorReport] = []
    scales: list[float] = []
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            for plant in model.plants:
                plant.step = step  # pyright: ignore[reportAttributeAccessIssue]
            x, y = rows(step)
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            scaler.scale(loss_of(logits, y)).backward()
            seen = None if after_update else monitor.step(logits, y)
            scaler.step(optimizer)
            scaler.update()
            seen = monitor.step(logits, y) if after_update else seen
            assert seen is not None
            reports.append(seen)
    return reports, scales, monitor


def nonfinite(reports: list[MonitorReport]) -> list[tuple[int, str, str]]:
    found = (a for r in reports for a in r.alarms if a.kind is AlarmKind.NONFINITE and not a.cleared)
    return [(a.step, a.layer, a.tensor) for a in found]


@pytest.mark.parametrize("after_update", [True, False])
def test_a_scaler_that_looks_for_its_scale(after_update: bool) -> None:
    reports, scales, monitor = train(2.0**25, told=True, after_update=after_update, action="demote")
    overflowed = [r for r in reports if any(t.nonfinite_blocks for la in r.layers for t in la.tensors.values())]
    assert len(overflowed) >= 2
    assert scales[-1] < scales[0]
    assert [alarm for r in reports for alarm in r.alarms] == []
    assert monitor.demoted == {}
    assert all("overflowed at the scaler's scale, in last first" in r.notes[0] for r in overflowed)
    assert [r.notes for r in reports if r not in overflowed] == [()] * (STEPS - len(overflowed))


def test_without_being_told_one_overflow_is_no_failure_yet_and_the_remedy_is_named() -> None:
    reports, _, _ = train(2.0**25, told=False)
    assert nonfinite(reports)[0] == (1, "last", "grad_output")
    assert "give the monitor scaler=" in reports[0].notes[0]


def test_a_forward_that_breaks_is_named_whatever_the_scale() -> None:
    reports, _, _ = train(2.0**8, told=True, breaks=lambda x, step: x / 0.0 if step == 3 else x)
    assert nonfinite(reports)[0] == (3, "second", "input")


def with_nan_gradient(x: Tensor) -> Tensor:
    x = x + 0.0
    if x.requires_grad:  # not in the shadow
        x.register_hook(lambda grad: grad * math.nan)
    return x


def test_gradients_that_break_at_every_scale_are_named_once_it_is_below_one() -> None:
    reports, scales, _ = train(2.0**4, told=True, breaks=lambda x, step: with_nan_gradient(x) if step >= 2 else x)
    step, layer, tensor = nonfinite(reports)[0]
    assert (layer, tensor) == ("first", "grad_output")
    assert scales[step] == 1.0  # and 0.5 after it was skipped


def test_a_scaler_that_is_switched_off_explains_nothing() -> None:
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    model.plants[1].change = lambda x, step: with_nan_gradient(x)  # pyright: ignore[reportAttributeAccessIssue]
    with NumericsMonitor(model, every=1, scaler=torch.amp.GradScaler("cpu", enabled=False)) as monitor:
        loss_of(model(rows(0)[0]), rows(0)[1]).backward()
        with pytest.warns(UserWarning, match="first: grad_output"):
            monitor.step()
    with pytest.raises(TypeError, match=r"got float, expected a torch\.amp\.GradScaler"):
        NumericsMonitor(model, scaler=65536.0)
