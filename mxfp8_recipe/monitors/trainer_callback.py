"""A `NumericsMonitor` for Hugging Face's `Trainer`.

Trainer(model, args, train_dataset=data, callbacks=[NumericsMonitorCallback(sinks=[TensorBoardSink("runs/numerics")])])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from mxfp8_recipe.monitors.live.monitor import NumericsMonitor
from mxfp8_recipe.monitors.live.predictions import logits_in

try:
    from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ModuleNotFoundError(
        'mxfp8_recipe.monitors.trainer_callback needs transformers: pip install "mxfp8-recipe[transformers]"',
        name="transformers",
    ) from error


class NumericsMonitorCallback(TrainerCallback):
    """Attaches when training begins, steps after each optimizer step, detaches when training ends.

    Logits and labels are those of the model's last call. A causal language model shifts its labels by one inside; the
    monitor does so for models whose class name says `ForCausalLM` or `LMHead`.

    Args:
        predictions: from the call's keyword arguments and the model's output to logits, labels and weights; default
            `labels` and the output's `logits`, shifted as said, and no weights.
        **options: of `NumericsMonitor`; `scaler` is the trainer's. `logits_of` has to name logits of the same shape.
    """

    def __init__(
        self, *, predictions: Callable[[Mapping[str, Any], Any], tuple[Any, Any, Any]] | None = None, **options: Any
    ) -> None:
        self.predictions, self.options = predictions, options
        self.monitor: NumericsMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        options: dict[str, Any] = {"scaler": getattr(kwargs.get("optimizer"), "scaler", None)}  # of accelerate
        options |= self.options
        if _shifts(model) and self.predictions is None:
            options.setdefault("logits_of", lambda output: logits_in(output)[:, :-1])
        self.monitor = NumericsMonitor(model, **options).start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert self.monitor is not None
        call = self.monitor.last_call
        if call is None:
            self.monitor.step()
            return
        _, given, output = call
        logits, labels, weights = (self.predictions or _default(model))(given, output)
        self.monitor.step(logits, labels, weights)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()


def _shifts(model: nn.Module) -> bool:
    return any(mark in type(model).__name__ for mark in ("ForCausalLM", "LMHead"))


def _default(model: nn.Module) -> Callable[[Mapping[str, Any], Any], tuple[Any, Any, Any]]:
    def predictions(given: Mapping[str, Any], output: Any) -> tuple[Tensor, Tensor | None, None]:
        logits, labels = logits_in(output), given.get("labels")
        if labels is not None and _shifts(model):
            return logits[:, :-1], labels[:, 1:], None
        return logits, labels, None

    return predictions
