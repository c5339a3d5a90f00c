"""What training loops and labels look like in practice: each is reported as what it is, or refused by name."""

from __future__ import annotations

import gc
import io
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.functional.listening import listener
from mxfp8_recipe.monitors import JSONLSink, LiveTable, MonitorReport, NumericsMonitor, TensorBoardSink
from mxfp8_recipe.monitors.live import predictions
from mxfp8_recipe.monitors.live.alarms import Alarms
from mxfp8_recipe.monitors.live.predictions import IGNORED, PredictionTracker, default_loss, prediction_sums
from numerics_tests.monitor_models import Ranker, loss_of, rows


def ranker(columns: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, columns))
    apply_recipe(model, example_inputs=torch.randn(4, 64))
    return model


def reported(
    model: nn.Module, x: Tensor, labels: Any, weights: Any = None, given: Any = lambda logits: logits, **options: Any
) -> MonitorReport:
    with NumericsMonitor(model, every=1, **options) as monitor:
        logits = model(x)
        logits.sum().backward()
        report = monitor.step(given(logits), labels, weights)
    assert report is not None
    return report


def test_integer_labels_of_one_binary_task() -> None:
    """(B,) integers beside (B, 1) logits number no classes."""
    x, labels = torch.randn(8, 64), torch.tensor([0, 1] * 4)
    whole, single = (reported(ranker(), x, y).predictions[0] for y in (labels, labels[:, None].float()))
    assert whole == single
    assert whole.mxfp8.normalized_entropy is not None


@pytest.mark.parametrize("nothing", [math.nan, -1.0])
def test_rows_of_weight_zero_take_no_part(nothing: float) -> None:
    """Padding, or a task without a label: whatever the label or the logit there, as if the row were not there."""
    logits, shadow, labels = torch.randn(8, 2), torch.randn(8, 2), torch.rand(8, 2).round()
    weights = torch.rand(8, 2) + 0.5
    weights[5:, 1] = 0.0
    labels[5:, 1] = nothing
    logits[7, 1] = math.inf
    sums, largest = prediction_sums(logits, shadow, labels, weights)
    kept, kept_largest = prediction_sums(logits[:5, 1], shadow[:5, 1], labels[:5, 1], weights[:5, 1])
    torch.testing.assert_close(sums[:, 1:], kept, rtol=1e-15, atol=0)
    assert largest[1] == kept_largest[0]
    assert PredictionTracker(["click", "buy"], 20).add(sums, largest, 0)[1].rows == 5
    assert default_loss(logits.clamp(-9, 9), labels, weights).isfinite()


def test_classes_of_weight_zero_and_classes_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, shadow, labels = torch.randn(9, 5), torch.randn(9, 5), torch.arange(9) % 5
    weights = torch.rand(9) + 0.5
    labels[7], labels[8], weights[8] = IGNORED, 5, 0.0
    sums, largest = prediction_sums(logits, shadow, labels, weights)
    kept, _ = prediction_sums(logits[:7], shadow[:7], labels[:7], weights[:7])
    torch.testing.assert_close(sums, kept, rtol=1e-15, atol=0)
    assert default_loss(logits, labels, weights).isfinite()
    monkeypatch.setattr(predictions, "MOST_LOGITS", 11)  # two rows at a time
    torch.testing.assert_close(prediction_sums(logits, shadow, labels, weights), (sums, largest), rtol=1e-14, atol=0)
    for wrong in (5, -1):
        labels[0] = wrong
        with pytest.raises(ValueError, match="1 labels outside"):
            PredictionTracker(None, 20).add(*prediction_sums(logits, shadow, labels, weights), 5)


def test_logits_that_the_model_did_not_give() -> None:
    """Probabilities, or another micro-batch's: the model's own are compared, and the report says so."""
    x, labels = torch.randn(64, 64), torch.rand(64, 1).round()
    right = reported(ranker(), x, labels)
    assert right.notes == ()
    for wrong in (torch.sigmoid, lambda logits: logits.flip(0)):
        with pytest.warns(UserWarning, match="other logits than the model's last call gave"):
            report = reported(ranker(), x, labels, given=wrong)
        assert report.predictions == right.predictions
    assert reported(ranker(), x, labels, given=lambda logits: logits.bfloat16()).notes == ()


def test_shapes_and_types_are_named() -> None:
    x = torch.randn(8, 64)
    with pytest.raises(TypeError, match=r"got dict for logits.*torch\.stack"):
        reported(ranker(), x, torch.ones(8, 1), given=lambda logits: {"ctr": logits})
    with pytest.raises(TypeError, match="got list for labels"):
        reported(ranker(), x, [0.0] * 8)
    with pytest.raises(ValueError, match=r"got weights \(3,\) for 8 rows of 3 labels"):
        reported(ranker(3), x, torch.ones(8, 3), torch.ones(3))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_rows(count: int) -> None:
    report = reported(ranker(), torch.randn(count, 64), torch.ones(count, 1), backward=True)
    assert report.predictions[0].rows == count
    assert not report.alarms
    assert ("input" in report.layers[0].tensors) == (count > 0)
    assert MonitorReport.model_validate_json(report.model_dump_json()).layers == report.layers


class TwoTowers(nn.Module):
    def __init__(self, user: nn.Module, item: nn.Module) -> None:
        super().__init__()
        self.user, self.item = user, item

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.user(user) + self.item(item)


class CallsAttention(nn.Module):
    """Attention called in its own forward, over (B, L, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 32)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def test_two_monitors_do_not_disturb_each_other() -> None:
    """Two on one model, and one on a part of it: each reports what it reports alone."""

    def run(which: list[int]) -> list[list[MonitorReport]]:
        torch.manual_seed(0)
        model = nn.Sequential(Ranker(), nn.Identity())
        apply_recipe(model, example_inputs=rows(0)[0])
        monitors = [
            NumericsMonitor(model, every=1),
            NumericsMonitor(model, every=2),
            NumericsMonitor(model[0], every=1),
        ]
        found: list[list[MonitorReport]] = [[] for _ in monitors]
        for i in which:
            monitors[i].start()
        for step in range(3):
            x, y = rows(step)
            loss_of(model(x), y).backward()
            for i in which:
                report = monitors[i].step(None, y)
                found[i] += [report.model_copy(update={"seconds": 0.0})] if report else []
        for i in which:
            monitors[i].close()
        assert listener() is None
        return found

    together = run([0, 1, 2])
    assert together == [run([i])[i] for i in range(3)]
    assert all(set(layer.tensors) == {"input", "weight", "grad_output"} for layer in together[1][0].layers)
    assert together[0][0].predictions[0].logit_rms > 0


def test_closing_one_monitor_leaves_the_other_listening() -> None:
    first, second = ranker(), ranker()
    short, long = NumericsMonitor(first, every=1).start(), NumericsMonitor(second, every=1)
    with long:
        second(torch.randn(4, 64)).sum().backward()
        short.close()
        second(torch.randn(4, 64)).sum().backward()
        report = long.step()
    assert report is not None
    assert report.layers[0].tensors["input"].blocks == 2 * 4 * 2


def test_a_part_of_a_model() -> None:
    """Its attention has its name from the whole; demoting would have to write to the whole's plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True), nn.Linear(64, 32))
    apply_recipe(model, example_inputs=torch.randn(2, 32, 64))
    with NumericsMonitor(model[0], every=1) as monitor:
        model(torch.randn(2, 32, 64)).square().sum().backward()
        report = monitor.step()
    assert report is not None
    found = {layer.layer: set(layer.tensors) for layer in report.layers}
    assert found["self_attn"] == {"probs", "grad_scores"}
    assert {"self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"} < found.keys()
    with pytest.raises(ValueError, match="expected all of it for action='demote'"):
        NumericsMonitor(model[0], action="demote")


def test_two_towers_whose_attention_has_one_name() -> None:
    """A recipe applied to each, whose layers know themselves by the name they have there; a teacher's are left out."""

    def tower() -> nn.Module:
        return nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)

    def own_attention() -> nn.Module:
        torch.manual_seed(0)
        return CallsAttention()

    for make in (tower, own_attention):
        torch.manual_seed(0)
        towers, teacher, x = [make(), make()], make(), torch.randn(2, 32, 64)
        for one in (*towers, teacher):
            apply_recipe(one, example_inputs=torch.randn(2, 32, 64))
        model = TwoTowers(*towers)
        with NumericsMonitor(model, every=1) as monitor:
            teacher(x)
            (model(x, x[:1]) + 0.0).square().sum().backward()
            report = monitor.step()
        assert report is not None
        blocks = {la.layer: la.tensors["probs"].blocks for la in report.layers if "probs" in la.tensors}
        assert len(blocks) == 2
        (user,), (item,) = ([n for name, n in blocks.items() if name.startswith(t)] for t in ("user", "item"))
        assert user == 2 * item > 0
        assert all("grad_scores" in la.tensors for la in report.layers if la.layer in blocks)


@pytest.mark.parametrize("evaluation_first", [True, False])
def test_an_evaluation_that_keeps_its_graph(evaluation_first: bool) -> None:
    """Without `no_grad` it looks like training, but for the model's mode."""
    model, x = ranker(), torch.randn(8, 64)

    def evaluate() -> None:
        model.eval()
        model(torch.full((8, 64), 1e30))
        model.train()

    with NumericsMonitor(model, every=1) as monitor:
        if evaluation_first:
            evaluate()
        logits = model(x)
        if not evaluation_first:
            evaluate()
        logits.sum().backward()
        report = monitor.step(logits, torch.ones(8, 1))
    assert report is not None
    assert report.notes == ()
    assert report.layers[0].tensors["input"].amax == x.abs().max()


def test_a_model_without_mxfp8_says_so() -> None:
    with pytest.warns(UserWarning, match="no MXFP8 layer; apply_recipe comes before"):
        report = reported(nn.Linear(64, 1), torch.randn(8, 64), torch.ones(8, 1))
    assert report.predictions[0].rows == 8
    model = nn.Linear(64, 1)
    apply_recipe(model, "bf16")
    assert reported(model, torch.randn(8, 64), torch.ones(8, 1)).notes == ()


def test_attached_again(tmp_path: Path) -> None:
    """Sinks that were closed with the monitor go on where they were; ranks that write nothing leave no file."""
    pytest.importorskip("tensorboard")
    model, logs = ranker(), tmp_path / "logs"
    monitor = NumericsMonitor(model, every=1, sinks=[JSONLSink(tmp_path / "reports.jsonl"), TensorBoardSink(logs)])
    assert not logs.exists()
    for _ in range(2):
        with monitor:
            model(torch.randn(4, 64)).sum().backward()
            monitor.step()
    assert len((tmp_path / "reports.jsonl").read_text().splitlines()) == 2
    assert len(list(logs.iterdir())) == 2


def test_a_sink_without_a_place_to_write_stops_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    taken = tmp_path / "file"
    taken.touch()
    x = torch.randn(4, 64)
    x[0, 0] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sinks = [JSONLSink(taken / "reports.jsonl"), TensorBoardSink(taken / "logs")]
        report = reported(ranker(), x, torch.ones(4, 1), sinks=sinks, dump_dir=taken / "dumps")
    assert {name for name in ("JSONLSink", "TensorBoardSink", "dump:") for w in caught if name in str(w.message)} == {
        "JSONLSink",
        "TensorBoardSink",
        "dump:",
    }
    assert report.alarms[0].dump is None


def test_a_table_in_a_log_file() -> None:
    """80 columns hold every figure whole, and each report is there."""
    stream = io.StringIO()
    model = ranker()
    with NumericsMonitor(model, every=1, sinks=[LiveTable(Console(file=stream, width=80))], tasks=["ctr"]) as monitor:
        for _ in range(2):
            logits = model(torch.randn(8, 64))
            logits.sum().backward()
            report = monitor.step(logits, torch.ones(8, 1))
    assert report is not None
    text, seen = stream.getvalue(), report.predictions[0]
    assert "step 0: MXFP8" in text
    assert "step 1: MXFP8" in text
    assert "…" not in text
    for value in (seen.logit_rms, seen.logit_mean, seen.cross_entropy):
        assert f" {value:.3g} " in text


@pytest.mark.parametrize(("labeled", "expected"), [(20, set()), (2000, {"flattening"})])
def test_a_task_with_few_labels_is_not_compared_with_its_past(labeled: int, expected: set[str]) -> None:
    """What twenty rows tell apart swings from batch to batch; the shadow swings along."""
    torch.manual_seed(0)
    alarms, tracker, found = Alarms(), PredictionTracker(["buy"], 1), []
    for step in range(30):
        logits = torch.randn(labeled) * (3.0 if step < 20 else 0.5)
        sums, largest = prediction_sums(logits, logits, torch.sigmoid(logits), None)
        (seen,) = tracker.add(sums, largest, 0)
        found += alarms.check_predictions(step, seen, tracker.running[0].window_sums())
    assert {alarm.kind.value for alarm in found} == expected


def test_nothing_grows() -> None:
    model = ranker()
    parameters = list(model.parameters())

    def tensors() -> int:
        gc.collect()
        return sum(1 for item in gc.get_objects() if issubclass(type(item), Tensor))

    with NumericsMonitor(model, every=1, backward=True) as monitor:
        for step in range(60):
            x, labels = torch.randn(8, 64), torch.rand(8, 1).round()
            for parameter in parameters:
                parameter.grad = None
            logits = model(x)
            logits.square().mean().backward()
            monitor.step(logits, labels)
            if step == 30:
                before = tensors()
        assert tensors() <= before
