"""Activations that can leave their result pending for the GEMM that consumes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..functional import mxfp8_activation
from ..mx_edge import edge_of
from .nested import is_nested, on_values


@dataclass(frozen=True)
class ActivationConfig:
    """What an activation module computes.

    Attributes:
        kind: as `fused.reference_ops` names it.
        packed: for a gated kind, which half of the input's last dim the activation applies to: `first`, `second`,
            or `""` for an activation that is not gated.
        in_place: the module overwrites its input, and keeps doing that: who made it may read it there.
    """

    kind: str
    packed: str = ""
    in_place: bool = False

    @property
    def description(self) -> str:
        return f"mxfp8 {self.kind}"


class MXFP8Activation(nn.Module):
    """Any elementwise activation, or a gated one of a packed input, before a linear layer."""

    original_class: ClassVar[type[nn.Module]] = nn.Module
    mxfp8_config: ActivationConfig

    def forward(self, input: Tensor) -> Any:
        if is_nested(input):
            return on_values(self, input)
        config, edge = self.mxfp8_config, edge_of(self)
        if config.packed:
            first, second = input.chunk(2, -1)
            gate, up = (first, second) if config.packed == "first" else (second, first)
            gate, up = (getattr(half, "x", half) for half in (gate, up))
            return mxfp8_activation(up, config.kind, gate=gate, edge=edge)
        if config.in_place:
            input = self.original_class.forward(self, input)  # applied again below, it gives the same bits
            if edge is None:
                return input
        return mxfp8_activation(input, config.kind, edge=edge)

    def extra_repr(self) -> str:
        own = self.original_class.extra_repr(self)
        return ", ".join(filter(None, (own, self.mxfp8_config.description)))
