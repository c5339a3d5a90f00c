"""What a sampled step is told and has seen, and the sums over its rows that compare the model with its shadow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxfp8_recipe.monitors.live.predictions import SUMS, is_classes, prediction_sums
from mxfp8_recipe.monitors.live.shadow_pass import TrainingCall

STRAY = 0.05
"""Beyond what rounding logits to BF16 moves them."""


@dataclass
class Sampled:
    """One call of the model on a sampled step, and what its shadow made of it.

    `replayed`: the training's own was not seen; this one was made from the batch. `training`: the model's mode.
    """

    call: TrainingCall
    output: Any = None
    shadow: Any = None
    replayed: bool = False
    training: bool = True


@dataclass(frozen=True)
class Given:
    """What `step` was called with."""

    logits: Tensor | None
    labels: Tensor | None
    weights: Tensor | None
    batch: Any

    def check(self) -> None:
        """Raise TypeError for what is no tensor."""
        for name in ("logits", "labels", "weights"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                got = f"got {type(value).__name__} for {name}, expected a tensor"
                raise TypeError(f"monitor.step: {got}; of several tasks, torch.stack([...], -1)")


@dataclass(frozen=True)
class Compared:
    """(len(SUMS), T) sums and (T,) largest errors of this rank's rows; `classes` as `RunningPredictions` has it.

    `strays` (1,): how far the given logits are from those the model gave, relative to 1 + their magnitude.
    """

    sums: Tensor
    largest: Tensor
    classes: int
    strays: Tensor

    @classmethod
    def nothing(cls, columns: int, device: torch.device) -> Compared:
        zeros = torch.zeros(len(SUMS), columns, dtype=torch.float64, device=device)
        return cls(zeros, zeros[0], 0, zeros.new_zeros(1))


def compare(
    sampled: Sampled | None, given: Given, logits_of: Callable[[Any], Tensor], device: torch.device
) -> Compared:
    """Sums over the rows of one step: of the model's own logits where its call was seen, whatever `given` has."""
    if given.labels is None:
        return Compared.nothing(0, device)
    own = None if sampled is None or sampled.output is None else logits_of(sampled.output).detach()
    logits = given.logits if given.logits is not None and not (sampled and sampled.replayed) else own
    if logits is None:
        raise ValueError("monitor.step: got labels without logits, and the model's own were not seen")
    classes = logits.shape[-1] if is_classes(logits, given.labels) else 0
    columns = 1 if classes or logits.dim() < 2 else logits.shape[-1]
    if sampled is None or sampled.shadow is None:
        return Compared.nothing(columns, device)
    shadow = logits_of(sampled.shadow)
    if shadow.numel() != logits.numel():
        shapes = f"got logits {tuple(logits.shape)}, expected those the model gives, {tuple(shadow.shape)}"
        raise ValueError(f"monitor.step: {shapes}; say logits_of=lambda output: ... to name them")
    strays = torch.zeros(1, dtype=torch.float64, device=device)
    if own is not None and own is not logits and logits.numel():
        own = own.reshape(logits.shape).to(device)
        distance = (logits.detach().to(device) - own).abs() / (1 + own.abs())
        strays, logits = distance.nan_to_num(0.0, 0.0).amax().double().reshape(1), own
    values = (logits, shadow.reshape(logits.shape), given.labels, given.weights)
    moved = (x if x is None else x.to(device) for x in values)
    sums, largest = prediction_sums(*moved)  # pyright: ignore[reportArgumentType]
    return Compared(sums, largest, classes, strays)
