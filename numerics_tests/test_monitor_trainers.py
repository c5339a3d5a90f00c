"""The monitor in other people's loops: Lightning's Trainer and Hugging Face's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import JSONLSink, MonitorReport
from numerics_tests.monitor_models import Ranker, loss_of, rows


def reports(path: Path) -> list[MonitorReport]:
    return [MonitorReport.model_validate_json(line) for line in path.read_text().splitlines()]


def fresh(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import one of our callback modules as if for the first time."""
    monkeypatch.setitem(sys.modules, name, None)  # remembers what was there, for the end of the test
    del sys.modules[name]
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("mxfp8_recipe.monitors.lightning_callback", "lightning", "lightning"),
        ("mxfp8_recipe.monitors.trainer_callback", "transformers", "transformers"),
    ],
)
def test_a_missing_library_is_named(module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.pytorch", None)
    with pytest.raises(ModuleNotFoundError, match=rf"mxfp8-recipe\[{extra}\]"):
        fresh(monkeypatch, module)


def test_lightning_events_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Lightning calls, called here: the library itself is too heavy for every run of this suite."""
    base = ModuleType("lightning.pytorch")
    base.Callback = object  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", base)
    callback_class = fresh(monkeypatch, "mxfp8_recipe.monitors.lightning_callback").NumericsMonitorCallback
    holder = nn.Module()
    holder.net = Ranker()
    apply_recipe(holder.net, example_inputs=rows(0)[0])
    callback = callback_class(module=lambda m: m.net, every=2, sinks=[JSONLSink(tmp_path / "r.jsonl")])
    hooks = len(holder.net._forward_hooks)
    scaler = torch.amp.GradScaler("cpu")
    callback.on_train_start(SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler)), holder)
    assert callback.monitor.scaler is scaler
    assert len(holder.net._forward_hooks) == hooks + 1
    for step in range(4):
        x, y = rows(step)
        logits = holder.net(x)
        loss = loss_of(logits, y)
        loss.backward()
        callback.on_train_batch_end(None, holder, {"loss": loss, "logits": logits, "labels": y}, (x, y), step)
    with pytest.raises(TypeError, match="without logits"):
        callback.on_train_batch_end(None, holder, loss, (x, y), step)
    callback.on_exception(None, holder, RuntimeError())
    assert len(holder.net._forward_hooks) == hooks
    assert [r.step for r in reports(tmp_path / "r.jsonl")] == [0, 2]
    assert all(r.predictions[0].logit_rms > 0 and r.layers for r in reports(tmp_path / "r.jsonl"))


def test_lightning_trainer(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from mxfp8_recipe.monitors.lightning_callback import NumericsMonitorCallback

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Ranker()

        def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
            x, y = batch
            logits = self.net(x)
            return {"loss": loss_of(logits, y), "logits": logits, "labels": y}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    task = Task()
    apply_recipe(task.net, example_inputs=rows(0)[0])
    callback = NumericsMonitorCallback(module=lambda m: m.net, every=2, sinks=[JSONLSink(tmp_path / "r.jsonl")])
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_steps=4, accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, **quiet)
    trainer.fit(task, torch.utils.data.DataLoader([rows(i) for i in range(4)], batch_size=None))
    found = reports(tmp_path / "r.jsonl")
    assert [r.step for r in found] == [0, 2]
    assert all("grad_output" in r.layers[0].tensors and r.predictions[0].logit_rms > 0 for r in found)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from mxfp8_recipe.monitors.trainer_callback import NumericsMonitorCallback

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 128, (8, 16))
    apply_recipe(model, example_inputs={"input_ids": tokens[:2]})
    data = [{"input_ids": row, "labels": row} for row in tokens]
    options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    settings = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-3, **options
    )
    callback = NumericsMonitorCallback(every=2, backward=True, sinks=[JSONLSink(tmp_path / "r.jsonl")])
    transformers.Trainer(model, settings, train_dataset=data, callbacks=[callback]).train()
    found = reports(tmp_path / "r.jsonl")
    assert [r.step for r in found] == [0, 2]
    assert all(r.predictions[0].rows == 2 * 15 and r.predictions[0].logit_rms > 0 for r in found)
    assert all(any("grad_output" in layer.tensors for layer in r.layers) for r in found)
    assert 1.0 > min(found[0].gradient_cosine.values()) > 0.9
