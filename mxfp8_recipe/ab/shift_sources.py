"""Which layers a shifted mean logit comes from: the same weights and rows again, with one layer at a time in MXFP8.

Rounding errors add up only roughly, so the parts need not sum to the whole. The cost is one forward of a thousand rows
for each quantized layer, BF16 but for that layer.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mxfp8_recipe.ab.arms import precision
from mxfp8_recipe.ab.results import ShiftSource, ShiftSources
from mxfp8_recipe.ab.types import Batch
from mxfp8_recipe.monitors.gates import GateLimits, same_weights_gates
from mxfp8_recipe.monitors.records import SameWeights

if TYPE_CHECKING:
    from mxfp8_recipe.ab.measure import Measurer

ROWS = 1024
MAX_LAYERS = 64


def mean_gate_is_broken(measured: SameWeights) -> bool:
    """Whether a gate on a mean logit error, of all rows or of a segment, is broken."""
    return any("mean logit error" in g.name and g.broken for g in same_weights_gates([measured], GateLimits()))


def shift_sources(measurer: Measurer, model: nn.Module, twin: nn.Module, seed: int) -> tuple[ShiftSources, ...]:
    """One record a task.

    Args:
        measurer: knows recipe, rows and precision.
        model: trained, plain. twin: the same weights with the recipe applied.
    """
    batches = list(_first_rows(measurer))
    rows = sum(map(len, batches))
    reference = _mean_logits(measurer, model, batches)
    shift = _mean_logits(measurer, twin, batches) - reference
    alone: dict[str, Tensor] = {}
    converted = [la for la in measurer.plan.converted if la.fqn]
    multiplying = [la.fqn for la in converted if la.kind in ("linear", "attention")]
    for layer in multiplying[:MAX_LAYERS]:
        one = copy.deepcopy(model)
        measurer.apply(one, {la.fqn: "bf16" for la in converted if la.fqn != layer})
        alone[layer] = _mean_logits(measurer, one, batches) - reference
    found = []
    for column, task in enumerate(measurer.dataset.spec.tasks):
        shifts = {layer: float(values[column]) for layer, values in alone.items()}
        order = sorted(shifts, key=lambda layer: -abs(shifts[layer]))
        layers = tuple(ShiftSource(layer=layer, alone=shifts[layer]) for layer in order)
        found.append(ShiftSources(task=task, seed=seed, rows=rows, shift=float(shift[column]), layers=layers))
    return tuple(found)


def _first_rows(measurer: Measurer) -> list[Batch]:
    needed = -(-ROWS // measurer.config.batch_size)
    return [batch.to(measurer.device) for batch in itertools.islice(measurer.heldout_rows, needed)]


def _mean_logits(measurer: Measurer, model: nn.Module, batches: list[Batch]) -> Tensor:
    """(T,), fp64."""
    training = model.training
    model.eval()
    with torch.no_grad(), precision(measurer.device, autocast=True):
        logits = torch.cat([model(batch).double() for batch in batches])
    model.train(training)
    return logits.mean(0).cpu()
