"""Cosine between two gradients of one loss, module by module."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

Gradients = Mapping[Tensor, Tensor | None]
"""Gradient by parameter."""


def owners(names: Mapping[nn.Module, str]) -> list[tuple[str, list[nn.Parameter]]]:
    """Modules that own trained parameters, by name."""
    own = ((name, [p for p in m.parameters(recurse=False) if p.requires_grad]) for m, name in names.items())
    return [(name, parameters) for name, parameters in own if parameters]


def powers(rows: list[tuple[str, list[nn.Parameter]]], mxfp8: Gradients, shadow: Gradients) -> Tensor:
    """(rows, 3) fp64: inner product and both squared norms of each module's gradients."""
    found = []
    for _, parameters in rows:
        total = torch.zeros(3, dtype=torch.float64, device=parameters[0].device)
        for p in parameters:
            a, b = mxfp8.get(p), shadow.get(p)
            if a is not None and b is not None:
                a, b = _dense(a), _dense(b)
                total = total + torch.stack([a @ b, a @ a, b @ b])
        found.append(total.to(rows[0][1][0].device))
    return torch.stack(found)


def cosines(rows: list[tuple[str, list[nn.Parameter]]], read: Tensor) -> dict[str, float]:
    """Cosines from what `powers` gave, added up over ranks; modules without a gradient are left out.

    With several ranks it is the cosine of all ranks' gradients side by side, before they are averaged.
    """
    found = {}
    for (name, _), (dot, a, b) in zip(rows, read.tolist()):
        if a > 0 and b > 0:
            found[name] = dot / math.sqrt(a * b)
        elif math.isnan(dot + a + b):
            found[name] = math.nan
    return found


def _dense(grad: Tensor) -> Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).detach().double().flatten()
