"""What the producer of a traveling value and its readers share while a model runs, and what ends that."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as all_modules


@dataclass
class Edge:
    """What a producer and its planned consumers share at run time.

    Attributes:
        producer: FQN of the module whose output travels.
        consumers: FQNs of the modules planned to read it.
        fused: whether it still travels; `unfuse` ends that for good.
        strict: raise instead of un-fusing.
        reason: why it was un-fused.
        closed: the producer returns plain tensors from now on, not even pending ones.
        emit: specs a projection's or an attention's output is quantized with, along its features (of a head) and
            along the tokens (the sequence); None for an edge on which nothing is emitted this way.
        head_dim: features of a head, where heads matter.
        steps: text of the epilogue that the producer's GEMM has on this edge; `""` for none.
        then: the edge of the module that goes on with the producer's output, where that is one. reader: that module.
        readers: the modules planned to read it. containers: those whose call the value leaves or enters on the way.
        residual: the producer's output is added to a residual, and computed when that happens.
        pair: `first` or `last`: the producer is that one of two linears whose GEMMs run as one, when their product is
            taken; `""` for none.
    """

    producer: str
    consumers: tuple[str, ...] = ()
    fused: bool = True
    strict: bool = False
    reason: str = ""
    closed: bool = False
    emit: tuple[str, str] | None = None
    head_dim: int = 0
    steps: str = ""
    then: Edge | None = None
    reader: Any = None
    readers: tuple[Any, ...] = ()
    containers: tuple[Any, ...] = ()
    residual: bool = False
    pair: str = ""

    @property
    def in_epilogue(self) -> bool:
        """Whether the producer's GEMM takes the steps that follow it."""
        return bool(self.steps) and self.fused and (self.then is None or self.then.fused)

    def unfuse(self, reader: str) -> None:
        """Record that `reader`, whom nobody planned for, read the value.

        Raises:
            RuntimeError: when the edge is strict.
        """
        if not self.fused:
            return
        message = (
            f"{self.producer or '(root)'}: its quantized output was read by {reader}, which was not planned for "
            f"(planned: {', '.join(self.consumers)})"
        )
        if self.strict:
            raise RuntimeError(
                f"{message}. Apply the recipe with example_inputs that take this path, or override "
                f"{self.producer!r} with 'bf16'"
            )
        self.fused, self.reason = False, f"read by {reader}"
        warnings.warn(f"{message}; it is recomputed in high precision and un-fused from now on", stacklevel=3)

    def part(self) -> None:
        """Of a pair whose other half did not come: compute the producer's output where it is called, from now on."""
        if self.pair and not torch.compiler.is_compiling():
            self.steps = self.pair = ""

    def close(self, reader: str) -> None:
        """Un-fuse for a reader that needs plain tensors."""
        self.unfuse(reader)
        self.closed = True


def edge_of(module: Any) -> Edge | None:
    """The edge of a producer module; none once it, or its reader, has backward hooks, which need tensors."""
    edge: Edge | None = module.__dict__.get("mxfp8_edge")
    if edge is None or edge.closed:
        return None
    if has_backward_hooks(module) or has_global_backward_hooks():
        edge.close(f"a backward hook of {edge.producer or '(root)'}")
    for other in (*edge.readers, *edge.containers):  # torch calls their hooks for tensors alone
        if has_backward_hooks(other):
            edge.close("a backward hook of its reader" if other in edge.readers else "a backward hook on its way")
    return None if edge.closed else edge


def has_backward_hooks(module: Any) -> bool:
    """Whether somebody watches or changes the gradients of a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_global_backward_hooks() -> bool:
    """Whether somebody does so for every module."""
    return bool(all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks)
