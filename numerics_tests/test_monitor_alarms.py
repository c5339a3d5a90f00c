"""What is planted is caught and named, what is clean raises nothing, and alarms do what they are told to."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import Alarm, AlarmKind, AlarmLimits, MonitorReport, NumericsAlarm, NumericsMonitor
from mxfp8_recipe.monitors.live.alarms import Alarms
from mxfp8_recipe.monitors.live.records import LayerStatistics, TensorStatistics
from numerics_tests.monitor_models import Plant, Ranker, loss_of, rows, set_step

Watched = tuple[list[MonitorReport], list[float]]


def watch(
    model: nn.Module,
    steps: int,
    *,
    batches: Callable[[int], tuple[Tensor, Tensor]] = rows,
    every: int = 1,
    learning_rate: float = 1e-3,
    before: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Watched:
    """Train a model to which a recipe was applied under a monitor; reports and losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    reports, losses = [], []
    with NumericsMonitor(model, every=every, **options) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            before(step)
            set_step(model, step)
            x, y = batches(step)
            optimizer.zero_grad()
            logits = model(x)
            loss = loss_of(logits, y)
            loss.backward()
            report = monitor.step(logits, y)
            optimizer.step()
            losses.append(loss.item())
            reports += [report] if report is not None else []
    return reports, losses


def raised(reports: list[MonitorReport]) -> list[Alarm]:
    return [alarm for report in reports for alarm in report.alarms if not alarm.cleared]


def ranker(recipe: str = "mxfp8") -> Ranker:
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, recipe, example_inputs=rows(0)[0])
    return model


def from_step(start: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, step: change(x) if step >= start else x


def test_a_thousand_clean_steps_raise_nothing() -> None:
    model = ranker()
    reports, losses = watch(model, 1000, every=20, batches=lambda step: rows(step, 16))
    assert len(reports) == 50
    assert raised(reports) == []
    assert sum(losses[-50:]) < 0.9 * sum(losses[:50])


class RecsysBlock(nn.Module):
    """Jagged-user-history shape in small: attention between MXFP8 projections, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Recsys(nn.Module):
    """Two blocks and a head; an outlier may grow in one channel between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(RecsysBlock() for _ in range(2)), nn.Linear(64, 1)
        self.plant = Plant()

    def forward(self, x: Tensor) -> Tensor:
        x = self.plant(self.blocks[0](x))
        return self.head(self.blocks[1](x).mean(1))[:, 0]


def histories(step: int) -> tuple[Tensor, Tensor]:
    x, y = rows(step, 4 * 10)
    return x.view(4, 10, 64), y[:4]


def grow_channel(x: Tensor, step: int) -> Tensor:
    """From step 10 on one channel grows by 32 a step, as a diverging activation does."""
    gain = torch.ones(64)
    gain[5] = min(32.0 ** max(step - 10, 0), 1e38)
    return x * gain


def test_a_growing_outlier_is_named_before_the_loss_dies(tmp_path: Path) -> None:
    """FP8 linears with FP8 attention on a recommendation model: NaN after tens of steps, and nobody knew where from."""
    torch.manual_seed(0)
    model = Recsys()
    report = apply_recipe(model, example_inputs=histories(0)[0])
    kinds = {layer.kind for layer in report.converted}
    assert {"linear", "attention"} <= kinds
    model.plant.change = grow_channel
    reports, losses = watch(model, 38, batches=histories, learning_rate=1e-4, dump_dir=tmp_path)
    died = next(step for step, loss in enumerate(losses) if math.isnan(loss))
    alarms = raised(reports)
    first = alarms[0]
    assert first.step <= died - 5, (first, died)
    assert first.layer.startswith("blocks.1.")
    assert all(a.layer.startswith("blocks.1") for a in alarms if a.tensor == "input" and a.step <= died - 5)
    assert first.layer in first.message
    assert died >= 20
    broken = next(a for a in alarms if a.kind is AlarmKind.NONFINITE)
    assert broken.step <= died + 1
    assert broken.layer.startswith("blocks.1")
    assert broken.dump is not None
    saved = torch.load(broken.dump, weights_only=True)
    assert (saved["layer"], saved["tensor"], saved["step"]) == (broken.layer, broken.tensor, broken.step)
    assert any(not entry["rows"].isfinite().all() for entry in saved["operands"][broken.tensor])
    assert all(entry["rows"].shape[0] == 4 for entry in saved["operands"]["weight"])
    assert Path(broken.dump).stat().st_size < 100_000


def test_a_nan_is_named_where_it_arose() -> None:
    """Every tensor after it holds NaN too; the one named is the first, and it clears when the NaN is gone."""
    model = ranker()

    def poison(x: Tensor, step: int) -> Tensor:
        return torch.where(torch.arange(x.numel()).view(x.shape) == 70, torch.inf, x) if step == 3 else x

    model.plants[1].change = poison
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = []
    with NumericsMonitor(model, every=1, dump_dir="unused_dumps") as monitor, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxfp8_recipe.monitors.live.monitor.dump_operands", lambda *a: None)
        for step in range(5):
            set_step(model, step)
            x, y = rows(step)
            optimizer.zero_grad()
            logits = model(x)
            loss_of(logits, y).backward()
            if step == 3:
                with pytest.warns(UserWarning, match=r"step 3: second: input: 1 of 128 blocks hold NaN or Inf"):
                    reports.append(monitor.step(logits, y))
            else:
                reports.append(monitor.step(logits, y))
    (alarm,) = raised(reports)
    assert (alarm.kind, alarm.layer, alarm.tensor, alarm.step) == (AlarmKind.NONFINITE, "second", "input", 3)
    assert [a.step for r in reports for a in r.alarms if a.cleared and a.kind is AlarmKind.NONFINITE] == [4]


def named(reports: list[MonitorReport], kind: AlarmKind) -> set[tuple[str, str]]:
    return {(a.layer, a.tensor) for a in raised(reports) if a.kind is kind}


def test_a_dead_layer() -> None:
    model = ranker()
    model.plants[2].change = from_step(6, lambda x: x * 0)
    reports, _ = watch(model, 12)
    assert ("last", "input") in named(reports, AlarmKind.DEAD)
    assert all(alarm.step >= 6 for alarm in raised(reports))
    assert not named(reports, AlarmKind.DEAD) & {("first", "input"), ("second", "input"), ("last", "weight")}


def test_a_saturating_layer() -> None:
    """FLOOR scales clip what lies above 1.75 powers of two: here everything does."""
    model = ranker("mxfp8_floor")
    model.plants[1].change = from_step(8, lambda x: x.sign() * 1.9 + 0 * x)
    limits = AlarmLimits(saturation_limit=0.5)  # uniform weights clip 12 % under FLOOR
    reports, _ = watch(model, 14, limits=limits)
    assert named(reports, AlarmKind.SATURATION) == {("second", "input")}
    assert min(a.step for a in raised(reports) if a.kind is AlarmKind.SATURATION) == 9


class GradientPlant(torch.autograd.Function):
    """Leaves a value as it is and multiplies its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(gain)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


def with_gradient_gain(x: Tensor, gain: Tensor) -> Tensor:
    return GradientPlant.apply(x * 1.0, gain)  # pyright: ignore[reportReturnType]


def test_an_underflowing_gradient() -> None:
    """In each block of grad_output one element outgrows the rest, which then quantize to zero."""
    model = ranker()
    gain = torch.ones(64)
    gain[::32] = 2.0**24
    model.plants[1].change = from_step(8, lambda x: with_gradient_gain(x, gain))
    reports, _ = watch(model, 14, learning_rate=1e-5)
    assert named(reports, AlarmKind.UNDERFLOW) == {("first", "grad_output")}
    before, after = (r.layers[0].tensors["grad_output"].underflow_frac for r in (reports[7], reports[9]))
    assert before < 0.05
    assert after > 0.9


def test_a_drifting_calibration() -> None:
    """The predictions move off their labels while every layer stays healthy."""
    model = ranker()
    bias = {"step": 0}
    batches = lambda step: rows(step, 512)  # noqa: E731

    def drift(step: int) -> None:
        bias["step"] = step

    with torch.no_grad():
        model.head.weight.mul_(0.1)
        model.head.bias.fill_(-1.0)
    handle = model.head.register_forward_hook(lambda m, a, out: out + max(bias["step"] - 20, 0) * 0.1)
    reports, _ = watch(model, 44, batches=batches, learning_rate=0.0, before=drift, window=5, tasks=["ctr"])
    handle.remove()
    assert named(reports, AlarmKind.CALIBRATION) == {("ctr", "predictions")}
    assert {a.kind for a in raised(reports)} == {AlarmKind.CALIBRATION}
    assert all(a.step > 20 for a in raised(reports))


def test_a_calibration_that_quantization_moves() -> None:
    """A shift that only the MXFP8 model has, on the same weights and rows."""
    model = ranker()

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1.0 * torch.is_grad_enabled()

    shifted = nn.Sequential(model, Shifted())
    reports, _ = watch(shifted, 4, tasks=["ctr"])
    assert named(reports, AlarmKind.CALIBRATION) == {("ctr", "predictions")}
    assert reports[0].predictions[0].calibration is not None
    assert reports[0].predictions[0].calibration > 1.3


def test_predictions_that_flatten() -> None:
    model = ranker()
    flat = {"now": 1.0}
    handle = model.head.register_forward_hook(lambda m, a, out: out * flat["now"])
    with torch.no_grad():
        model.head.weight.mul_(100)

    def soften(step: int) -> None:
        flat["now"] = 1.0 if step < 20 else 0.2

    reports, _ = watch(model, 40, learning_rate=0.0, before=soften, window=4, tasks=["ctr"])
    handle.remove()
    assert ("ctr", "predictions") in named(reports, AlarmKind.FLATTENING)
    assert all(a.step >= 20 for a in raised(reports))


def test_hysteresis() -> None:
    """A value that hovers around its limit alarms once; a single excursion does not at all."""
    model = ranker()
    gain = torch.ones(64)
    gain[::32] = 2.0**24
    hover = {step: step >= 12 and step % 2 == 0 for step in range(60)}
    hover |= {5: True, **dict.fromkeys(range(30, 34), True), **dict.fromkeys(range(40, 60), False)}

    model.plants[1].change = lambda x, step: with_gradient_gain(x, gain) if hover[step] else x
    reports, _ = watch(model, 50, learning_rate=0.0)
    events = [(a.step, a.cleared) for r in reports for a in r.alarms if a.kind is AlarmKind.UNDERFLOW]
    assert events == [(31, False), (35, True)]


def test_raise() -> None:
    model = ranker()
    model.plants[2].change = from_step(2, lambda x: x * 0)
    with pytest.raises(NumericsAlarm, match=r"step 3: last: input: every element is zero") as caught:
        watch(model, 10, action="raise")
    assert (caught.value.alarms[0].layer, caught.value.alarms[0].tensor) == ("last", "input")


def test_demote_writes_report_and_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, gain = Ranker(), torch.ones(64)
    model.plants[1].change = lambda x, step: with_gradient_gain(x, gain)
    applied = apply_recipe(model, example_inputs=rows(0)[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    reports = []
    with NumericsMonitor(model, every=1, action="demote") as monitor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            gain[::32] = 2.0**24 if step >= 4 else 1.0
            x, y = rows(step)
            optimizer.zero_grad()
            logits = model(x)
            loss_of(logits, y).backward()
            reports.append(monitor.step(logits, y))
            optimizer.step()
    told = [str(w.message) for w in caught if "first: grad_output" in str(w.message)]
    assert [("underflow" in text, "times what it was" in text) for text in told] == [(True, False), (False, True)]
    assert not [w for w in caught if "not planned for" in str(w.message)]
    assert type(model.first) is nn.Linear
    assert monitor.overrides == {"first": "bf16"}
    assert reports[-1].demoted.keys() == {"first"}
    assert "underflow of grad_output, step 5" in reports[-1].demoted["first"]
    assert [layer.layer for layer in reports[-1].layers] == ["second", "last"]
    assert reports[-1].active == ()
    assert "demoted by the numerics monitor" in str(applied)
    torch.save(model.state_dict(), tmp_path / "s.pt")
    resumed = Ranker()
    apply_recipe(resumed, example_inputs=rows(0)[0])
    state = torch.load(tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"first: checkpoint \[bf16\], model \[fprop"):
        resumed.load_state_dict(state)
    again = Ranker()
    apply_recipe(again, overrides=monitor.overrides, example_inputs=rows(0)[0])
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again.eval()(rows(0)[0]), model.eval()(rows(0)[0]))


def test_demoting_attention_is_in_the_checkpoint_too() -> None:
    from mxfp8_recipe.swap import demote

    torch.manual_seed(0)
    model = Recsys()
    apply_recipe(model, example_inputs=histories(0)[0])
    demote(model, "blocks.1", "a test")
    state = model.state_dict()
    assert torch.isfinite(model(histories(0)[0])).all()
    other = Recsys()
    apply_recipe(other, example_inputs=histories(0)[0])
    with pytest.raises(ValueError, match=r"overrides=\{'blocks.1': 'bf16'\}"):
        other.load_state_dict(state)
    third = Recsys()
    apply_recipe(third, overrides={"blocks.1": "bf16"}, example_inputs=histories(0)[0])
    third.load_state_dict(state)
    with pytest.raises(ValueError, match="no MXFP8 layer"):
        demote(model, "blocks.1", "again")


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"patience=0, baseline=-1"):
        AlarmLimits(patience=0, baseline=-1)


def test_one_channel_of_a_wide_layer() -> None:
    """It moves neither SQNR nor underflow of the whole, and is named all the same."""
    torch.manual_seed(0)
    model = Ranker(width=512)
    apply_recipe(model, example_inputs=rows(0, 64, 512)[0])

    def grow(x: Tensor, step: int) -> Tensor:
        gain = torch.ones(512)
        gain[3] = 128.0 ** max(step - 4, 0)
        return x * gain

    model.plants[1].change = grow
    reports, _ = watch(model, 11, batches=lambda step: rows(step, 64, 512), learning_rate=0.0)
    first, *_ = raised(reports)
    assert (first.kind, first.layer, first.tensor) == (AlarmKind.OUTLIER, "second", "input")
    assert first.step <= 10
    at_alarm = reports[first.step].layers[1].tensors["input"]
    assert at_alarm.underflow_frac < 0.1
    assert at_alarm.sqnr_db is not None
    assert at_alarm.sqnr_db > 30


@pytest.mark.parametrize(
    ("tensor_db", "gemm_db", "named"), [(27, 24, []), (27, 17, ["wgrad"]), (23, 24, ["grad_output"])]
)
def test_figures_better_than_the_format_s_are_no_baseline(tensor_db: float, gemm_db: float, named: list[str]) -> None:
    """A layer that starts at zero has gradients that are exact, and then gradients like any other's."""

    def figures(tensor: float, gemm: float) -> list[LayerStatistics]:
        seen = TensorStatistics(
            amax=1.0, scale_min=-8, scale_max=-8, sqnr_db=tensor, underflow_frac=0.0, saturation_frac=0.0,
            nonfinite_blocks=0, blocks=8,
        )  # fmt: skip
        return [LayerStatistics(layer="out", tensors={"grad_output": seen}, gemm_sqnr_db={"wgrad": gemm})]

    alarms, found = Alarms(), []
    for step in range(12):
        found += alarms.check_layers(step, figures(55.0, 40.0) if step < 8 else figures(tensor_db, gemm_db), {})
    assert [alarm.tensor for alarm in found] == named
