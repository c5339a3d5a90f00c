"""Layers of tokens on nested tensors: what they give for the packed values, as a nested tensor of the same samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..functional.common import layer_name
from ..mx_edge import edge_of


def is_nested(x: Any) -> bool:
    """Whether x is a nested tensor; what travels on an edge is none."""
    return getattr(x, "is_nested", False)


def on_values(module: nn.Module, x: Any) -> Any:
    """`module.forward` of the values (T, ...) of x (B, j, ...).

    It ends the module's edge: what travels on one is no tensor that could be nested.

    Raises:
        TypeError: for a nested tensor of another layout than `torch.jagged`, or with samples along another dim than 1.
    """
    if x.layout is not torch.jagged or x._ragged_idx != 1:
        raise TypeError(
            f"{layer_name(module, '', type(module).__name__)}: got a nested tensor of layout {x.layout}, expected "
            "layout=torch.jagged with samples along dim 1, (B, j, ...); make it with "
            "torch.nested.nested_tensor_from_jagged(values, offsets)"
        )
    edge = edge_of(module)
    if edge is not None:
        edge.close("a layer of nested tensors")
    values = module.forward(x.values())
    return torch.nested.nested_tensor_from_jagged(
        values, x.offsets(), x.lengths(), min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )
