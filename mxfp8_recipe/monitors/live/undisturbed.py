"""Running a model once more beside its training, leaving everything as it was, bit for bit.

Torch's, Python's and numpy's random states, buffers (BatchNorm statistics among them) and whatever a forward keeps in
its modules are put back; `Parameter.grad` and the optimizer are not reached, since gradients are asked for with
`torch.autograd.grad`. Embeddings with `max_norm`, which write to their weight in forward, do not here: the training
forward before has. Compiled parts run eagerly, so that nothing is compiled for it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from mxfp8_recipe.autograd import AttentionConfig, LinearConfig
from mxfp8_recipe.first_forward import not_waiting
from mxfp8_recipe.fused.attention.spec import GEMMS, AttentionSpec
from mxfp8_recipe.modules import is_swapped

_CONFIG, _EDGE = "mxfp8_config", "mxfp8_edge"
_MUTABLE = (list, dict, set)
_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


@dataclass(frozen=True)
class RandomState:
    """The random state of torch (CPU and the devices of one model), Python and numpy."""

    cpu: Tensor
    cuda: dict[int, Tensor] = field(default_factory=dict)
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, devices: set[int]) -> RandomState:
        cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
        return cls(torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)


@dataclass(frozen=True)
class Autocast:
    """Whether autocast is on for a device type, and to what."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        available = torch.amp.is_autocast_available(device)
        enabled = available and torch.is_autocast_enabled(device)
        return cls(device, enabled, torch.get_autocast_dtype(device) if available else torch.bfloat16)

    def context(self) -> torch.autocast:
        """The same again; without the cache of casts, whose entries made here would lack a gradient there."""
        return torch.autocast(self.device, self.dtype, enabled=self.enabled, cache_enabled=False)


def cuda_devices(model: nn.Module) -> set[int]:
    """Indices of the CUDA devices that hold a parameter or a buffer of `model`."""
    tensors = [*model.parameters(), *model.buffers()]
    return {t.device.index for t in tensors if t.device.type == "cuda"}


@contextmanager
def undisturbed(model: nn.Module, state: RandomState) -> Iterator[None]:
    """In the block `model` may run from the random state `state`; afterwards all is as it was before the block."""
    before = RandomState.now(set(state.cuda))
    kept = [(module, _Kept(module)) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(not_waiting(model))
        try:
            for module, _ in kept:
                _stand_in(module, copies)
            state.restore()
            yield
        finally:
            for module, was in kept:
                was.put_back(module)
            before.restore()


class _Kept:
    """A module's attributes, and the content of lists, dicts and sets among them."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = dict(module.__dict__)
        mutable = {
            name: value
            for name, value in self.attributes.items()
            if type(value) in _MUTABLE and (name in _TABLES or not name.startswith("_"))
        }
        self.contents = [(value, copy.copy(value)) for value in mutable.values()]

    def put_back(self, module: nn.Module) -> None:
        attributes = module.__dict__
        for name in [name for name in attributes if name not in self.attributes]:
            del attributes[name]
        for name, value in self.attributes.items():
            if attributes.get(name, _Kept) is not value:
                attributes[name] = value
        for value, content in self.contents:
            if _same(value, content):
                continue
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)


def _same(value: Any, content: Any) -> bool:
    """Whether a container holds the very objects it held."""
    if isinstance(value, dict):
        return list(map(id, value.values())) == list(map(id, content.values())) and list(value) == list(content)
    return list(map(id, value)) == list(map(id, content))


def _stand_in(module: nn.Module, copies: dict[int, Tensor]) -> None:
    """Copies in place of a module's buffers, shared ones once; `max_norm` off."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    if module.__dict__.get("max_norm") is not None:
        module.__dict__["max_norm"] = None


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """In the block every GEMM of `model`'s MXFP8 layers runs in the compute dtype and no edge is fused.

    It is the model that `revert` gives, but for norms and activations, which keep the recipe's kernels; random numbers
    (dropout's in attention, stochastic rounding's) are drawn where and as the MXFP8 model draws them.
    """
    swapped = [module for module in model.modules() if is_swapped(module)]
    before = [{key: m.__dict__[key] for key in (_CONFIG, _EDGE) if key in m.__dict__} for m in swapped]
    try:
        for module in swapped:
            config = module.__dict__[_CONFIG]
            if isinstance(config, LinearConfig | AttentionConfig):
                module.__dict__[_CONFIG] = _high(config)
            if _EDGE in module.__dict__:
                module.__dict__[_EDGE] = None
        yield
    finally:
        for module, values in zip(swapped, before):
            module.__dict__.update(values)


@lru_cache(maxsize=1024)
def _high(config: Any) -> Any:
    """`config` with every GEMM in high precision; it draws the seeds it drew before."""
    nothing = ("", "")
    if isinstance(config, LinearConfig):
        return replace(config, fprop=nothing, dgrad=nothing, wgrad=nothing)
    projections = config.projections and _high(config.projections)
    gemms: dict[str, Any] = dict.fromkeys(GEMMS, nothing)
    high = AttentionSpec().encode()
    return replace(config, spec=high, share=(False,) * 4, projections=projections, **gemms)
