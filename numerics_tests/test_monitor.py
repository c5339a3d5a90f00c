"""The monitor changes nothing, sees the training's own call, and leaves no trace."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, revert
from mxfp8_recipe.functional.listening import listener
from mxfp8_recipe.monitors import MonitorReport, NumericsMonitor
from mxfp8_recipe.monitors.live.shadow_pass import ShadowPass, TrainingCall
from numerics_tests.monitor_models import GemData, Ranker, Transformer, loss_of, rows, same_state, sequences

STEPS = 50
Setting = tuple[nn.Module, Callable[[int], Any], Callable[[Any], tuple[Tensor, Tensor, Tensor | None]]]


def mlp() -> Setting:
    return Ranker(dropout=0.1), lambda i: rows(i)[0], lambda i: (rows(i)[1], None)


def transformer() -> Setting:
    return Transformer(), lambda i: sequences(i)[0], lambda i: (sequences(i)[1], None)


def gem_small() -> Setting:
    data = GemData.load(4)
    return (
        data.model(),
        lambda i: data.batches[i % len(data.batches)],
        lambda i: (data.batches[i % len(data.batches)].labels, data.batches[i % len(data.batches)].weights),
    )


SETTINGS = {"mlp": mlp, "transformer": transformer, "gem-small": gem_small}


def trained(
    kind: str,
    monitored: bool,
    steps: int = STEPS,
    *,
    example: bool = False,
    wrap: Callable[[nn.Module], Any] = lambda m: m,
    autocast: bool = False,
    recipe: str = "mxfp8",
    **options: Any,
) -> tuple[dict[str, Any], list[MonitorReport]]:
    """Everything a run leaves, and its reports."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    model, inputs, targets = SETTINGS[kind]()
    apply_recipe(model, recipe, example_inputs=(inputs(0),) if example else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called, reports = wrap(model), []
    monitor = NumericsMonitor(called, every=10, **options) if monitored else None
    if monitor is not None:
        monitor.start()
    for step in range(steps):
        optimizer.zero_grad()
        labels, weights = targets(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = called(inputs(step))
        loss_of(logits, labels, weights).backward()
        optimizer.step()
        if monitor is not None and (report := monitor.step(logits, labels, weights)) is not None:
            reports.append(report)
    if monitor is not None:
        monitor.close()
    left = {
        "weights": model.state_dict(),
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
    }
    return left, reports


@pytest.mark.parametrize("kind", SETTINGS)
def test_fifty_steps_are_bitwise_the_same(kind: str) -> None:
    without, _ = trained(kind, False)
    within, reports = trained(kind, True)
    assert same_state(within, without) == []
    assert [report.step for report in reports] == [0, 10, 20, 30, 40]
    assert all(report.layers and not report.notes for report in reports)
    assert all((p.logit_rms > 0) == (p.rows > 0) for report in reports for p in report.predictions)
    assert all(report.predictions[0].rows for report in reports)
    seen = {name for layer in reports[-1].layers for name in layer.tensors}
    assert {"input", "weight", "grad_output"} <= seen
    assert ({"probs", "grad_scores"} <= seen) == (kind != "mlp")


@pytest.mark.parametrize(
    "options",
    [
        {"backward": True},
        {"example": True},
        {"autocast": True},
        {"wrap": lambda m: torch.compile(m, backend="aot_eager"), "backward": True, "example": True},
        {"recipe": "gem"},
    ],
    ids=["backward", "example", "autocast", "compiled", "stochastic"],
)
def test_other_ways_to_train_are_the_same_too(options: dict[str, Any]) -> None:
    ours = {key: value for key, value in options.items() if key != "backward"}
    without, _ = trained("transformer", False, 12, **ours)
    within, reports = trained("transformer", True, 12, **options)
    assert same_state(within, without) == []
    assert all(report.layers for report in reports)
    assert all(math.isfinite(p.logit_rms) for report in reports for p in report.predictions)
    if options.get("backward"):
        assert all(0.9 < cosine < 1.0 for report in reports for cosine in report.gradient_cosine.values())
        assert any("grad_output" in layer.tensors for layer in reports[-1].layers)


def test_off_leaves_no_hook() -> None:
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with NumericsMonitor(model, every=1) as monitor:
        assert len(model._forward_hooks) + len(model._forward_pre_hooks) == hooks[0] + 2
        logits = model(rows(0)[0])
        loss_of(logits, rows(0)[1]).backward()
        monitor.step(logits, rows(0)[1])
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert listener() is None
    after = {name: dict(m.__dict__) for name, m in model.named_modules()}
    assert {name: list(keys) for name, keys in after.items()} == {name: list(keys) for name, keys in before.items()}
    with pytest.raises(RuntimeError, match="not attached"):
        monitor.step(logits, rows(0)[1])


def test_nothing_is_run_on_the_steps_between() -> None:
    model, calls = Ranker(), []
    apply_recipe(model, example_inputs=rows(0)[0])
    model.first.register_forward_hook(lambda *a: calls.append(torch.is_grad_enabled()))
    with NumericsMonitor(model, every=3) as monitor:
        for step in range(6):
            loss_of(model(rows(step)[0]), rows(step)[1]).backward()
            assert (monitor.step(model(rows(step)[0]).detach(), rows(step)[1]) is None) == (step % 3 != 0)
            calls.append("step")
    per_step = " ".join(map(str, calls)).split("step")
    assert [part.split() for part in per_step[:3]] == [
        ["True", "False", "True", "False"],
        ["True", "True"],
        ["True", "True"],
    ]


def shadow_of(model: nn.Module, x: Tensor, seed: int = 3) -> tuple[Tensor, Tensor]:
    """The model's output and its shadow's in fp32, from one random state."""
    torch.manual_seed(seed)
    call = TrainingCall.now(model, (x,), {})
    output = model(x)
    return output, ShadowPass(model, torch.float32).shadow(call)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_shadow_is_what_revert_gives(kind: str) -> None:
    """In fp32; norms keep the recipe's kernels, which agree to an ulp or so, and dropout draws other masks in torch's
    own attention, so it is off."""
    torch.manual_seed(0)
    model, inputs, _ = SETTINGS[kind]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    apply_recipe(model, example_inputs=(inputs(0),))
    output, shadow = shadow_of(model, inputs(1))
    revert(model)
    plain = model(inputs(1))
    assert (plain - shadow).abs().max() < 1e-5 * plain.abs().max()  # measured: 1e-6
    assert (plain - output).abs().max() > 1e-3 * plain.abs().max()


def test_the_shadow_drops_what_the_model_dropped() -> None:
    """Half of everything, attention's probabilities included: other masks would differ as much as two random models."""
    torch.manual_seed(0)
    model = Transformer(dropout=0.5)
    apply_recipe(model, example_inputs=sequences(0)[0])
    output, shadow = shadow_of(model, sequences(1)[0])
    assert (output - shadow).square().mean().sqrt() < 0.1 * output.std()
    other = model(sequences(1)[0])
    assert (other - output).square().mean().sqrt() > 0.3 * output.std()


def test_identity_has_an_exact_shadow() -> None:
    torch.manual_seed(0)
    model = Transformer()
    apply_recipe(model, "bf16")
    with NumericsMonitor(model, every=1, shadow_dtype=torch.float32) as monitor:
        x, y = sequences(0)
        logits = model(x)
        loss_of(logits, y).backward()
        report = monitor.step(logits, y)
    assert report is not None
    (task,) = report.predictions
    assert (task.logit_rms, task.logit_max, task.cross_entropy, task.calibration) == (0.0, 0.0, 0.0, 1.0)
    assert report.layers == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(Ranker):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)  # pyright: ignore[reportReturnType]

    def run(monitored: bool) -> tuple[dict[str, Any], MonitorReport | None]:
        torch.manual_seed(0)
        model, report = Checkpointed(dropout=0.3), None
        apply_recipe(model)
        monitor = NumericsMonitor(model, every=1, backward=True).start() if monitored else None
        for step in range(3):
            x, y = rows(step)
            logits = model(x.requires_grad_())
            loss_of(logits, y).backward()
            report = monitor.step(logits, y) if monitor else None
        if monitor:
            monitor.close()
        return {name: p.grad for name, p in model.named_parameters()} | {"rng": torch.get_rng_state()}, report

    plain, _ = run(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched, report = run(True)
    assert same_state(watched, plain) == []
    assert report is not None
    assert {name for layer in report.layers for name in layer.tensors} == {"input", "weight", "grad_output"}
    assert report.predictions[0].logit_rms < 0.1
    if reentrant:  # torch refuses gradients that bypass `.grad` there
        assert any("backward" in note for note in report.notes)
        assert report.gradient_cosine == {}
    else:
        assert min(report.gradient_cosine.values()) > 0.9


class Stateful(Ranker):
    """Keeps things in forward that a training reads afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(64)
        self.table = nn.Embedding(8, 64, max_norm=0.5)
        self.seen: list[Tensor] = []
        self.penalty: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(x + self.table(torch.arange(len(x)) % 8)) * random.uniform(0.9, 1.1)
        logits = super().forward(x) + float(numpy.random.rand())
        self.penalty = logits.square().mean()
        self.seen.append(self.penalty)
        self.calls += 1
        return logits


def test_what_a_forward_leaves_behind_stays_the_trainings_own() -> None:
    def run(monitored: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = Stateful()
        apply_recipe(model)
        monitor = NumericsMonitor(model, every=1).start() if monitored else None
        for step in range(4):
            x, y = rows(step)
            logits = model(x)
            assert model.penalty is not None
            (loss_of(logits, y) + model.penalty).backward()
            if monitor:
                monitor.step(logits, y)
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {
            "state": model.state_dict(),
            "grads": grads,
            "seen": [s.item() for s in model.seen],
            "calls": model.calls,
        }

    assert same_state(run(True), run(False)) == []


def test_a_model_compiled_in_place_is_shown_its_batch() -> None:
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    model.compile(backend="aot_eager", fullgraph=True)
    with NumericsMonitor(model, every=1) as monitor:
        x, y = rows(0)
        logits = model(x)
        loss_of(logits, y).backward()
        with pytest.warns(UserWarning, match="no training forward"):
            blind = monitor.step(logits, y)
        logits = model(x)
        loss_of(logits, y).backward()
        report = monitor.step(logits, y, batch=x)
    assert blind is not None
    assert "no training forward" in blind.notes[0]
    assert report is not None
    assert len(report.layers) == 3
    assert report.predictions[0].logit_rms > 0


def test_gradient_accumulation_and_evaluation_between() -> None:
    """Every training forward of a sampled step is heard, none of evaluation."""
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    with NumericsMonitor(model, every=1) as monitor:
        for part in range(3):
            x, y = rows(part)
            logits = model(x)
            loss_of(logits, y).backward()
        with torch.no_grad():
            model(torch.full((64, 64), 1e30))
        report = monitor.step(logits, y)
    assert report is not None
    first = report.layers[0].tensors["input"]
    assert first.blocks == 3 * 64 * 2
    assert first.amax < 10


def test_step_before_backward_says_so() -> None:
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    with NumericsMonitor(model, every=1) as monitor:
        logits = model(rows(0)[0])
        with pytest.warns(UserWarning, match="before backward"):
            monitor.step(logits, rows(0)[1])


def test_a_shadow_that_fails_does_not_stop_training() -> None:
    class Once(Ranker):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                raise RuntimeError("only in training")
            return super().forward(x)

    model = Once()
    apply_recipe(model)
    with NumericsMonitor(model, every=1) as monitor:
        with pytest.warns(UserWarning, match="only in training"):
            logits = model(rows(0)[0])
        loss_of(logits, rows(0)[1]).backward()
        report = monitor.step(logits, rows(0)[1])
    assert report is not None
    assert "only in training" in report.notes[0]
    assert report.layers
    logits = model(rows(0)[0])
    loss_of(logits, rows(0)[1]).backward()


def test_a_monitored_model_can_be_copied_and_pickled() -> None:
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    with NumericsMonitor(model, every=1) as monitor:
        twin = copy.deepcopy(model)
        pickled = pickle.dumps(model.first)
        twin(rows(0)[0]).sum().backward()
        assert monitor.last_call is None
    assert pickled
    other = Ranker()
    apply_recipe(other)
    with NumericsMonitor(other, every=1):
        again = pickle.loads(pickle.dumps(torch.nn.Sequential(other.first)))
    assert again(rows(0)[0]).shape == (64, 64)


def test_classes_and_dictionaries() -> None:
    """Integer labels over classes, ignored ones among them; a model that returns a mapping and takes keywords."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 32)

        def forward(self, *, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.body(x).relu())}

    torch.manual_seed(0)
    model = Tagger()
    apply_recipe(model, example_inputs={"x": torch.randn(4, 6, 64)})
    labels = torch.randint(0, 32, (8, 6))
    labels[:, 0] = -100
    with NumericsMonitor(model, every=1, backward=True, shadow_dtype=torch.float32) as monitor:
        logits = model(x=torch.randn(8, 6, 64))["logits"]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        report = monitor.step(logits, labels)
    assert report is not None
    (task,) = report.predictions
    assert task.rows == 40
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
    assert task.mxfp8.log_loss == pytest.approx(expected.item(), rel=1e-12)
    assert task.mxfp8.normalized_entropy is None
    assert report.gradient_cosine.keys() == {"body", "head"}


def test_mistakes_name_what_is_wrong() -> None:
    model = Ranker()
    apply_recipe(model, example_inputs=rows(0)[0])
    with pytest.raises(ValueError, match="every: got 0"):
        NumericsMonitor(model, every=0)
    with pytest.raises(ValueError, match="action: got 'stop'"):
        NumericsMonitor(model, action="stop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="sinks: got str"):
        NumericsMonitor(model, sinks=["out.jsonl"])  # pyright: ignore[reportArgumentType]
    x, y = rows(0)
    for labels, message in ((y[:3], "one shape"), (y + 1, "labels outside"), (None, "")):
        with NumericsMonitor(model, every=1) as monitor, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = model(x)
            if message:
                with pytest.raises(ValueError, match=message):
                    monitor.step(logits, labels)
            else:
                report = monitor.step(logits)
                assert report is not None
                assert report.predictions == ()
