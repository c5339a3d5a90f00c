"""The A/B runner: arms that differ in precision alone, exact zeros for the identity, harm found, nothing lost."""

import copy
import dataclasses
import math
import re
import types
import warnings
from functools import partial
from pathlib import Path

import ab_tiny
import pytest
import torch
import typer
from typer.testing import CliRunner

from mxfp8_recipe import apply_recipe, revert
from mxfp8_recipe.ab import config as config_module
from mxfp8_recipe.ab import measure as measure_module
from mxfp8_recipe.ab import runner as runner_module
from mxfp8_recipe.ab.arms import ARMS, REFERENCE_ARM, initial_copy, precision
from mxfp8_recipe.ab.batches import CheckedBatches, SamplingCorrection
from mxfp8_recipe.ab.command import ab_command
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.measure import Measurer
from mxfp8_recipe.ab.results import ResumeError
from mxfp8_recipe.ab.runner import ABRun, Runner
from mxfp8_recipe.ab.training import BaseRateOffset, Diverged, Predictions, loss_of
from mxfp8_recipe.monitors import metrics
from mxfp8_recipe.monitors.shadow import compare_same_weights
from mxfp8_recipe.monitors.verdict import Outcome

CPU = torch.device("cpu")
TINY = {
    "data": "ab_tiny:data",
    "model": "ab_tiny:model",
    "batch_size": 200,
    "learning_rate": 0.005,
    "seeds": 2,
    "device": "cpu",
}
AUTOCAST = partial(precision, CPU, autocast=True)


def tiny_run(directory: Path, *, resume: bool = False, **options) -> ABRun:
    return Runner(ABConfig.parse(**{**TINY, **options}), directory).run(resume=resume)


@pytest.fixture(scope="module")
def mxfp8_run(tmp_path_factory) -> ABRun:
    return tiny_run(tmp_path_factory.mktemp("mxfp8"))


def digests(run: ABRun) -> dict:
    return {key: result.digests for key, result in run.results.arms.items()}


# Arms.


def test_arms_start_equal_but_for_the_noise():
    model = ab_tiny.model(ab_tiny.TinyData(10).spec)
    starts = {arm.name: initial_copy(model, arm, seed=0) for arm in ARMS}
    for name, start in starts.items():
        for p, q in zip(model.parameters(), start.parameters()):
            ratio = (q / p - 1)[p != 0]
            if name == "bf16_init_noise":
                assert 0.5e-4 < ratio.std() < 2e-4 or ratio.numel() < 10
            else:
                assert torch.equal(p, q)
    assert not any(p is q for p, q in zip(model.parameters(), starts["mxfp8"].parameters()))


def test_seeds_change_the_weights_and_not_the_rows(mxfp8_run):
    first, second = (mxfp8_run.results.arms[s, "bf16"] for s in (0, 1))
    assert first.digests["served"] != second.digests["served"]
    assert first.train_rows == second.train_rows == 1200
    assert first.task("ctr").served.rows == second.task("ctr").served.rows


def test_every_arm_predicts_otherwise_and_mxfp8_really_ran(mxfp8_run):
    for seed in (0, 1):
        progressive = {mxfp8_run.results.arms[seed, arm.name].digests["progressive"] for arm in ARMS}
        assert len(progressive) == len(ARMS)
    mxfp8 = mxfp8_run.results.arms[0, "mxfp8"]
    assert mxfp8.digests["served"] != mxfp8.digests["trained"]
    layers = {layer.layer: layer for layer in mxfp8_run.results.same_weights[0].layers if layer.quantized}
    assert {"top.0", "top.2"} <= layers.keys()
    # 3 bits after the leading one: one E4M3 rounding is about 31 dB, two independent ones about 28.
    assert all(20 < layers[name].sqnr_db < 40 for name in ("top.0", "top.2"))
    reference = mxfp8_run.results.arms[0, "bf16"]
    assert reference.digests["served"] == reference.digests["trained"]


def test_training_learns(mxfp8_run):
    task = mxfp8_run.results.arms[0, "bf16"].task("ctr")
    assert task.served.ne < 1
    assert task.served.auc > 0.6
    assert task.trace[-1] == (1200, task.ne_windowed)


def test_identity_recipe_is_exactly_zero_and_passes_with_one_seed(tmp_path):
    run = tiny_run(tmp_path, recipe="bf16", seeds=1)
    assert run.decision.outcome is Outcome.PASS
    assert "bitwise identical" in run.decision.reasons[0]
    same = run.results.same_weights[0]
    assert same.identical
    assert all(t.logit_rms == t.logit_mean == t.calibration == t.cross_entropy == 0 for t in same.tasks)
    assert same.gradient.error == 0
    for task in ("ctr", "cvr"):
        gaps, placebos = run.results.gaps(task)
        assert gaps == (0.0,)
        assert all(any(values) for values in placebos.values())
    twins = [run.results.arms[0, arm] for arm in ("bf16", "mxfp8")]
    assert twins[0].digests == twins[1].digests
    assert twins[0].tasks == twins[1].tasks


def test_same_weights_comparison_changes_nothing():
    torch.manual_seed(0)
    rows = ab_tiny.TinyData(400)
    model = ab_tiny.model(rows.spec).train()
    twin = copy.deepcopy(model)
    apply_recipe(twin)
    loss_of(model, rows.batch).backward()
    before = [(p.clone(), p.grad.clone()) for p in model.parameters()]
    compare_same_weights(
        model, twin, rows.heldout_batches(40), tasks=rows.spec.tasks, seed=0, precision=AUTOCAST, loss=loss_of
    )
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    for p, (value, grad) in zip(model.parameters(), before):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, grad)
    assert all(p.grad is None for p in twin.parameters())


def test_the_comparison_reads_every_layer_and_un_fuses_none():
    measurer = Measurer(ABConfig.parse(**TINY, overrides=None))
    model = ab_tiny.model(measurer.dataset.spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        same, _ = measurer.compare(model, seed=1)
    read = {layer.layer for layer in same.layers if layer.sqnr_db is not None}
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears
    assert linears <= read


# Harm.


def harmful(monkeypatch, harm) -> None:
    """Make `apply_recipe` of the runner harm the logits too; `revert` takes the harm away."""
    handles = []

    def apply(model, *args, **options):
        report = apply_recipe(model, *args, **options)
        handles.append(model.register_forward_hook(harm))
        return report

    def undo(model):
        handles.pop().remove()
        return revert(model)

    monkeypatch.setattr(measure_module, "apply_recipe", apply)
    monkeypatch.setattr(measure_module, "revert", undo)


def test_a_biased_logit_breaks_its_gate_with_one_seed(tmp_path, monkeypatch):
    harmful(monkeypatch, lambda module, args, logits: logits + 0.05)
    run = tiny_run(tmp_path, seeds=1)
    assert run.decision.outcome is Outcome.FAIL
    broken = {gate.name for gate in run.decision.gates if not gate.holds}
    assert {"ctr: mean logit error", "cvr: mean logit error", "ctr: calibration change"} <= broken


def test_a_wrong_gradient_breaks_its_gate(tmp_path, monkeypatch):
    def negate(module, args, logits):
        return logits.detach() * 2 - logits

    harmful(monkeypatch, negate)
    run = tiny_run(tmp_path, seeds=1)
    ratio = next(g for g in run.decision.gates if g.name == "gradient error over BF16's own")
    assert not ratio.holds
    assert run.results.same_weights[0].gradient.cosine < -0.9


def test_mxfp8_that_diverges_fails_and_names_the_step(tmp_path, monkeypatch):
    calls = types.SimpleNamespace(count=0)

    def explode(module, args, logits):
        calls.count += module.training
        return logits * (math.nan if calls.count > 3 else 1.0)

    harmful(monkeypatch, explode)
    run = tiny_run(tmp_path, seeds=1)
    assert run.decision.outcome is Outcome.FAIL
    assert "arm mxfp8, seed 0: the loss is nan at step 4" in run.decision.reasons[0]


def test_bf16_that_diverges_is_an_error_not_a_verdict(tmp_path):
    with pytest.raises(Diverged, match=r"arm bf16, seed 0: the loss is (inf|nan) at step 3"):
        tiny_run(tmp_path, model="ab_tiny:exploding")


def test_a_shifted_mean_names_the_layer_it_comes_from(tmp_path, monkeypatch):
    """The harm sits in one layer's output; alone in MXFP8, that layer shifts the mean and the others do not."""

    def apply(model, *args, **options):
        report = apply_recipe(model, *args, **options)
        if type(model.top[2]).__name__ != "Linear":
            model.top[2].register_forward_hook(lambda module, inputs, output: output + 1.0)
        return report

    monkeypatch.setattr(measure_module, "apply_recipe", apply)
    measurer = Measurer(ABConfig.parse(**TINY, overrides=None))
    _, sources = measurer.compare(measurer.started(0, REFERENCE_ARM), 0)
    for task in sources:
        assert {layer.layer for layer in task.layers} >= {"top.0", "top.2"}
        assert task.layers[0].layer == "top.2"
        assert abs(task.layers[0].alone) > 10 * abs(task.layers[1].alone)
        assert task.layers[0].alone == pytest.approx(task.shift, rel=0.2)


def test_looks_are_kept_and_cost_the_next_one(tmp_path):
    first = tiny_run(tmp_path, seeds=2)
    assert first.results.looks == (2,)
    again = tiny_run(tmp_path, seeds=2, resume=True)
    assert again.decision.tasks[0].interval == first.decision.tasks[0].interval
    more = tiny_run(tmp_path, seeds=3, resume=True)
    assert more.results.looks == (2, 3)
    assert more.decision.tasks[0].interval.alpha == pytest.approx(0.05 * (1 / 2 - 1 / 3))


# Interruption and resumption.


def interrupt_after(monkeypatch, arms: int) -> None:
    finished = types.SimpleNamespace(count=0)
    original = Measurer.measure

    def measure(self, *args):
        if finished.count == arms:
            raise KeyboardInterrupt
        finished.count += 1
        return original(self, *args)

    monkeypatch.setattr(Measurer, "measure", measure)


@pytest.mark.parametrize("arms", [0, 1, 5])
def test_ctrl_c_keeps_what_was_measured_and_resume_finishes_bitwise(tmp_path, monkeypatch, mxfp8_run, arms):
    with monkeypatch.context() as patched:
        interrupt_after(patched, arms)
        run = tiny_run(tmp_path)
    assert len(run.results.arms) == arms
    assert any("interrupted: " in reason for reason in run.decision.reasons) or run.decision.outcome is Outcome.FAIL
    assert run.decision.outcome is not Outcome.PASS
    resumed = tiny_run(tmp_path, resume=True)
    assert digests(resumed) == digests(mxfp8_run)
    assert resumed.decision == mxfp8_run.decision


def test_processes_measure_the_same_and_pass_errors_on(tmp_path, mxfp8_run, monkeypatch):
    monkeypatch.setattr(config_module, "cpu_count", lambda: 2 * torch.get_num_threads())
    run = tiny_run(tmp_path / "run", jobs=2, seeds=1)
    assert digests(run) == {key: value for key, value in digests(mxfp8_run).items() if key[0] == 0}
    with pytest.raises(Diverged, match=r"arm (bf16|fp32), seed 0"):  # two processes race; both arms diverge
        tiny_run(tmp_path / "exploding", model="ab_tiny:exploding", jobs=2, seeds=1)


def test_resume_adds_seeds_and_refuses_another_configuration(tmp_path, mxfp8_run):
    tiny_run(tmp_path, seeds=1)
    assert digests(tiny_run(tmp_path, seeds=2, resume=True)) == digests(mxfp8_run)
    with pytest.raises(ResumeError, match=r"batch_size: the earlier run has 200, this one 100"):
        tiny_run(tmp_path, batch_size=100, resume=True)
    (tmp_path / "o.yaml").write_text("top.0: bf16")
    with pytest.raises(ResumeError, match=r"overrides: .*\{\}, this one \{'top.0': 'bf16'\}"):
        tiny_run(tmp_path, overrides=tmp_path / "o.yaml", resume=True)
    with pytest.raises(ResumeError, match="no earlier run"):
        tiny_run(tmp_path / "elsewhere", resume=True)


def test_a_new_run_sets_the_earlier_one_aside(tmp_path):
    tiny_run(tmp_path, seeds=1)
    tiny_run(tmp_path, seeds=1, recipe="bf16")
    assert (tmp_path / "earlier" / "1" / "results" / "seed0-bf16.json").is_file()
    assert len(list((tmp_path / "results").glob("*.json"))) == 5


# Rows.


def test_batches_are_the_same_from_memory_and_from_the_source():
    rows = ab_tiny.TinyData(1000)
    for limit in (0, 1 << 30):
        part = CheckedBatches(rows, "train", 300, limit=limit)
        first, second = list(part), list(part)
        assert part.rows == 800
        assert [len(b) for b in first] == [300, 300, 200]
        assert (first[0] is second[0]) == (limit > 0)
        assert all(torch.equal(a.dense, b.dense) for a, b in zip(first, second))


def test_negative_sampling_correction_closed_form():
    rate = 0.1
    correction = SamplingCorrection(rate)
    batch = ab_tiny.TinyData(50).batch
    logits = torch.randn(50, 2)
    p, q = logits.double().sigmoid(), correction.logits(logits).sigmoid()
    torch.testing.assert_close(q[:, 0], p[:, 0] / (p[:, 0] + (1 - p[:, 0]) / rate), rtol=1e-12, atol=0)
    assert torch.equal(q[:, 1], p[:, 1])
    weights = correction.weights(batch)
    clicked = batch.labels[:, 0] == 1
    assert torch.equal(weights[clicked], batch.weights[clicked])
    torch.testing.assert_close(weights[~clicked, 0], batch.weights[~clicked, 0] * 10)


def test_metrics_are_on_the_corrected_scale():
    """A model calibrated on sampled rows is calibrated on all rows once corrected."""
    generator = torch.Generator().manual_seed(0)
    rate, base = 0.1, 0.02
    rows = ab_tiny.TinyData(200_000).batch
    labels = rows.labels.clone()
    labels[:, 0] = (torch.rand(len(rows), generator=generator) < base).float()
    kept = (labels[:, 0] > 0) | (torch.rand(len(rows), generator=generator) < rate)
    sampled = dataclasses.replace(rows, labels=labels[kept], weights=torch.ones(int(kept.sum()), 2))
    logits = torch.logit(sampled.labels.mean(0)).expand(int(kept.sum()), 2)
    predictions = Predictions()
    predictions.add(logits, sampled, SamplingCorrection(rate))
    measured = predictions.metrics(0)
    assert measured.calibration == pytest.approx(1, rel=1e-5)
    assert measured.ne == pytest.approx(1, rel=1e-6)
    p = predictions.columns(0)[0][0].item()
    assert p == pytest.approx(base, rel=0.05)


def test_base_rate_offset_starts_at_the_base_rate():
    rows = ab_tiny.TinyData(1000)
    offset = BaseRateOffset(rows.train_batches(100), rows=300)
    head = rows.batch.labels[:300]
    assert offset.rows == 300
    assert offset.logit.sigmoid()[0].item() == pytest.approx(head[:, 0].mean().item(), rel=1e-5)
    clicked = head[:, 0] == 1
    assert offset.logit.sigmoid()[1].item() == pytest.approx(head[clicked, 1].mean().item(), rel=1e-5)


def test_predictions_judge_like_the_metrics():
    rows = ab_tiny.TinyData(500).batch
    logits = torch.randn(500, 2)
    predictions = Predictions()
    for part in torch.arange(500).split(120):
        columns = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
        predictions.add(
            logits[part],
            type(rows)(**{k: v[part] if isinstance(v, torch.Tensor) else v for k, v in columns.items()}),
            SamplingCorrection(),
        )
    p = logits.double().sigmoid()
    for task in (0, 1):
        measured = predictions.metrics(task)
        columns = (p[:, task], rows.labels[:, task], rows.weights[:, task])
        assert measured.ne == metrics.normalized_entropy(*columns).item()
        assert measured.auc == metrics.auc(*columns).item()
        assert predictions.trace(task)[-1][0] == 500


# The command.


def command(*arguments: str):
    app = typer.Typer()
    app.command()(ab_command)
    base = ["--data", "ab_tiny:data", "--model", "ab_tiny:model", "--batch-size", "300", "--seeds", "1"]
    return CliRunner().invoke(app, [*base, "--device", "cpu", "--jobs", "1", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mxfp9"], r"recipe: got 'mxfp9' \(did you mean 'mxfp8'"),
        (["--overrides", "unmatched.yaml"], r"'top.9' matches no layer"),
        (["--overrides", "typo.yaml"], r"'top.0': wgrd: unknown field \(did you mean 'wgrad'"),
        (["--overrides", "broken.yaml"], r"broken.yaml: not valid YAML at line"),
        (["--overrides", "missing.yaml"], r"no file missing.yaml"),
        (["--data", "ab_tiny:bad_labels"], r"labels of ctr: got 2.0 at row 70"),
        (["--data", "ab_tiny:nan_features"], r"dense\[:, 0\]: got nan at row 9"),
        (["--data", "criteo:missing.txt"], r"no file"),
        (["--data", "nonsense"], r"got 'nonsense', expected one of"),
        (["--model", "nonsense"], r"got 'nonsense', expected one of"),
        (["--model", "ab_tiny:exploding"], r"arm bf16, seed 0: the loss is"),
        (["--ne-budget", "3"], r"options: ne_budget"),
        (["--seeds", "0", "--batch-size", "0"], r"seeds: .*batch_size: "),
        (["--device", "tpu"], r"device: got 'tpu', expected auto, cpu"),
        (["--resume"], r"no earlier run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("unmatched.yaml").write_text("top.9: bf16")
    Path("typo.yaml").write_text("top.0: {wgrd: bf16}")
    Path("broken.yaml").write_text("top.0: [bf16")
    result = command("--out", "out", *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "last"),
    [
        (["--data", "ab_tiny:raising"], r"ab_tiny:raising: raised KeyError: 'no such table' \(.*, in raising\)", "Key"),
        (["--model", "ab_tiny:raising"], r"ab_tiny:raising: raised KeyError: .*ab_tiny.py:\d+, in raising\)", "Key"),
        (["--model", "ab_tiny:raising_in_forward"], r"raised RuntimeError: .*shapes.*, in forward\)", "Runtime"),
        (["--data", "ab_tiny:raising_later"], r"OverflowError: .*ab_tiny.py:\d+, in heldout_batches", "Overflow"),
        (["--data", "ab_tiny:raising_later", "--jobs", "2"], r"OverflowError: .*in heldout_batches", "Overflow"),
        (["--model", "ab_tiny:refused"], r"ab_tiny:refused: raised ValueError: recipe: got 'no-such", "Value"),
        (["--data", "ab_tiny:leaving"], r"ab_tiny:leaving: raised SystemExit: 1 \(at", "SystemExit"),
        (["--model", "no_syntax:model"], r"no_syntax:model: raised SyntaxError: .* \(at .*no_syntax.py:1", "Syntax"),
        (["--data", "no_name:data"], r"no_name:data: raised NameError: .* \(at .*no_name.py:1, in <module>\)", "Name"),
    ],
)
def test_what_a_users_function_raises_is_one_line_then_their_traceback(tmp_path, monkeypatch, arguments, message, last):
    monkeypatch.chdir(tmp_path)
    Path("no_syntax.py").write_text("def model(spec:\n")
    Path("no_name.py").write_text("load = undefined\n")
    result = command("--out", "out", *arguments)
    assert result.exit_code == 2
    first, heading, *frames = result.stderr.strip().splitlines()
    assert first.startswith("mxfp8 ab: ")
    assert re.search(message, first), result.stderr
    assert heading == "Traceback (most recent call last):"
    assert re.search(r"(ab_tiny|no_syntax|no_name)\.py", frames[0])
    assert frames[-1].startswith(last)


def test_a_crash_of_ours_stays_one_though_the_model_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_module, "mean_gate_is_broken", None)
    result = command("--out", str(tmp_path / "out"), "--rows", "400")
    assert isinstance(result.exception, TypeError)
    assert result.exit_code == 1  # the console script makes it 70


def test_an_earlier_run_is_moved_and_that_is_said(tmp_path):
    out = tmp_path / "out"
    first = command("--out", str(out), "--rows", "400")
    assert "earlier" not in first.stderr
    again = command("--out", str(out), "--rows", "400")
    where = out / "earlier" / "1"
    assert f"{out} held an earlier run, which is in {where} now; --resume would continue it" in again.stderr
    assert (out / "earlier" / "1" / "report.json").is_file()


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.PASS, 0), (Outcome.FAIL, 1), (Outcome.INCONCLUSIVE, 3)])
def test_exit_codes(tmp_path, monkeypatch, outcome, code):
    original = runner_module.decide
    monkeypatch.setattr(
        runner_module, "decide", lambda *args, **kw: dataclasses.replace(original(*args, **kw), outcome=outcome)
    )
    result = command("--out", str(tmp_path / "out"), "--rows", "400")
    assert result.exit_code == code, result.output
    assert (tmp_path / "out" / "report.json").is_file()
    assert (tmp_path / "out" / "report.html").is_file()
