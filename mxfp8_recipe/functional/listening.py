"""Where monitors hear the operands of MXFP8 ops, on the steps they sample.

A listener changes no value, draws no random number and closes no edge. Compiled code never asks for one, so that it
traces and runs the same whether or not somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..autograd import AttentionConfig, LinearConfig
from ..mx_tensor import Traveling


@dataclass(frozen=True)
class LinearCall:
    """One linear layer's forward, or one part of a projection's.

    Attributes:
        owner: the module that computes it. part: which of its linears, where it has several, such as `in_proj`.
        input: (..., K), perhaps still traveling. weight: (N, K). Both as the layer got them, before any cast.
        output: the (..., N) tensor whose gradient is the layer's grad_output; a carrier where it travels on.
        dtype: the compute dtype.
        repeated: another part of the same projection reported this input already.
    """

    owner: Any
    part: str
    input: Tensor | Traveling
    weight: Tensor
    output: Tensor
    config: LinearConfig
    dtype: torch.dtype
    repeated: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """One attention's forward.

    Attributes:
        query: (..., H, Lq, D). key: (..., G, Lk, D). value: (..., G, Lk, E), in the compute dtype; carriers where
            `given` holds them quantized.
        given: qdata, scale, qdata_t, scale_t of query, key and value, or nothing.
        output: (..., H, Lq, E); a carrier where it travels on.
        options: scale, causal, dropout_p.
        pad: turns a gradient of the output into (..., H, Lq, E), where the output is packed.
    """

    config: AttentionConfig
    query: Tensor
    key: Tensor
    value: Tensor
    given: tuple[Tensor, ...]
    mask: Tensor | None
    seed: Tensor | None
    output: Tensor
    options: dict[str, Any]
    pad: Callable[[Tensor], Tensor] | None = None


class Listener(Protocol):
    """Who hears of each call as it is made."""

    def linear(self, call: LinearCall) -> None: ...

    def attention(self, call: AttentionCall) -> None: ...


_current: tuple[Listener, ...] = ()


@dataclass(frozen=True)
class _Several:
    """Tells each of several listeners."""

    listeners: tuple[Listener, ...]

    def linear(self, call: LinearCall) -> None:
        for each in self.listeners:
            each.linear(call)

    def attention(self, call: AttentionCall) -> None:
        for each in self.listeners:
            each.attention(call)


def listener() -> Listener | None:
    """Who listens now; nobody in compiled code."""
    if not _current or torch.compiler.is_compiling():
        return None
    return _current[0] if len(_current) == 1 else _Several(_current)


def attach(new: Listener) -> None:
    """Let `new` hear the whole process, all its threads included, beside those that listen already."""
    global _current
    if not any(each is new for each in _current):
        _current = (*_current, new)


def detach(old: Listener) -> None:
    """End what `attach` began, if it did."""
    global _current
    _current = tuple(each for each in _current if each is not old)


@contextmanager
def listening(new: Listener | None) -> Iterator[None]:
    """In the block `new` listens, and nobody else."""
    global _current
    previous, _current = _current, () if new is None else (new,)
    try:
        yield
    finally:
        _current = previous
