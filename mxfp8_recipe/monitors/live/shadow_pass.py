"""One training call of a model run again: in BF16, as its shadow, or in MXFP8, as a probe of what compiled code did.

Both run the module that lies under DDP and `torch.compile`, eagerly, on the arguments the training call had, from the
random state it started from, and leave everything as it was (`undisturbed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from mxfp8_recipe.functional.listening import Listener, listening
from mxfp8_recipe.monitors.live.undisturbed import Autocast, RandomState, cuda_devices, high_precision, undisturbed

Loss = Callable[[Tensor], Tensor]


def called_module(model: nn.Module) -> nn.Module:
    """The module whose calls a monitor sees: `model`, or what lies under DDP, compiled or not."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def plain_module(model: nn.Module) -> nn.Module:
    """The module that lies under every wrapper."""
    while isinstance(model, DistributedDataParallel | OptimizedModule):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether some module of `model` runs compiled."""
    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())


@dataclass(frozen=True)
class TrainingCall:
    """Arguments of one call, and the random state and autocast it started in."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    autocast: Autocast

    @classmethod
    def now(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingCall:
        devices = cuda_devices(model)
        return cls(args, kwargs, RandomState.now(devices), Autocast.now("cuda" if devices else "cpu"))

    @classmethod
    def of_batch(cls, model: nn.Module, batch: Any) -> TrainingCall:
        """A call with `batch`: a tuple of positional arguments, a mapping of keywords, or a single argument."""
        if isinstance(batch, tuple):
            return cls.now(model, batch, {})
        if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
            return cls.now(model, (), dict(batch))
        return cls.now(model, (batch,), {})


class ShadowPass:
    """Runs calls of `model` again.

    Args:
        model: the plain module.
        dtype: what a shadow's products run in where neither autocast nor the weights' dtype decides.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype

    def shadow(self, call: TrainingCall) -> Any:
        """The output in BF16, without a graph."""
        with torch.no_grad():
            return self._run(call, high=True)

    def probe(self, call: TrainingCall, listener: Listener | None) -> Any:
        """The output in MXFP8, without a graph, told to `listener`."""
        with torch.no_grad():
            return self._run(call, high=False, listener=listener)

    def gradients(
        self, call: TrainingCall, loss: Callable[[Any], Tensor], parameters: list[Tensor], *, high: bool,
        listener: Listener | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of `loss(output)`, in BF16 or MXFP8; `.grad` is not touched."""

        def ask(output: Any) -> tuple[Tensor | None, ...]:
            value = loss(output)
            return torch.autograd.grad(value, parameters, allow_unused=True)

        with torch.enable_grad():
            return self._run(call, high=high, listener=listener, then=ask)

    def _run(
        self,
        call: TrainingCall,
        *,
        high: bool,
        listener: Listener | None = None,
        then: Callable[[Any], Any] = lambda output: output,
    ) -> Any:
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model, call.random))
            stack.enter_context(high_precision(self.model) if high else nullcontext())
            stack.enter_context(listening(listener))
            stack.enter_context(self._precision(call, high))
            return then(self.model(*call.args, **call.kwargs))

    def _precision(self, call: TrainingCall, high: bool) -> Any:
        if call.autocast.enabled or not high:
            return call.autocast.context()
        single = any(p.dtype is torch.float32 for p in self.model.parameters())
        forced = Autocast(call.autocast.device, single and self.dtype is not torch.float32, self.dtype)
        return forced.context()
