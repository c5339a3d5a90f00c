"""A `NumericsMonitor` for Lightning's `Trainer`.

trainer = Trainer(callbacks=[NumericsMonitorCallback(module=lambda m: m.net, sinks=[JSONLSink("numerics.jsonl")])])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mxfp8_recipe.monitors.live.monitor import NumericsMonitor

try:
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ModuleNotFoundError(
        'mxfp8_recipe.monitors.lightning_callback needs lightning: pip install "mxfp8-recipe[lightning]"',
        name="lightning",
    ) from error


def predictions_in(outputs: Any, batch: Any) -> tuple[Any, Any, Any]:
    """`logits`, `labels` and `weights` (if any) of the mapping that `training_step` returned."""
    if not hasattr(outputs, "get") or outputs.get("logits") is None:
        got = f"got {type(outputs).__name__} without logits, expected a dict with loss, logits and labels"
        raise TypeError(f"training_step: {got}; or say predictions=lambda outputs, batch: (logits, labels, weights)")
    return outputs["logits"], outputs.get("labels"), outputs.get("weights")


class NumericsMonitorCallback(Callback):
    """Attaches when training starts, steps after each batch, and detaches when training ends, however it ends.

    Args:
        module: from the LightningModule to the module that a recipe was applied to and that `training_step` calls;
            default the LightningModule itself, where `training_step` calls `self(...)`.
        predictions: from what `training_step` returned, and the batch, to logits, labels and weights.
        **options: of `NumericsMonitor`; its `scaler` is that of the trainer's precision.
    """

    def __init__(
        self,
        *,
        module: Callable[[Any], nn.Module] = lambda lightning_module: lightning_module,
        predictions: Callable[[Any, Any], tuple[Any, Any, Any]] = predictions_in,
        **options: Any,
    ) -> None:
        self.module, self.predictions, self.options = module, predictions, options
        self.monitor: NumericsMonitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        options: dict[str, Any] = {"scaler": scaler} | self.options
        self.monitor = NumericsMonitor(self.module(pl_module), **options).start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.monitor is not None
        found = self.predictions(outputs, batch) if self.monitor.is_sampled else ()
        self.monitor.step(*found)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
