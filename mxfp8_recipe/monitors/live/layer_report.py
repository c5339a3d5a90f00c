"""From a collector's device tensors to a report's layers: one fixed layout, so that ranks can add theirs up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mxfp8_recipe.autograd import AttentionConfig, LinearConfig
from mxfp8_recipe.modules import is_swapped
from mxfp8_recipe.monitors.live.collector import Collector
from mxfp8_recipe.monitors.live.records import LayerStatistics
from mxfp8_recipe.monitors.live.tensor_statistics import (
    MAXIMA,
    NOTHING,
    ROOTS,
    SUMS,
    Value,
    decibels,
    gathered,
    statistics_of,
)

LINEAR = ("input", "weight", "grad_output")
GEMMS = ("fprop", "dgrad", "wgrad")
ATTENTION = ("probs", "grad_scores")


@dataclass(frozen=True)
class Site:
    """One row of a report.

    Attributes:
        layer: its name there. module: FQN of the module that an override or a demotion names.
    """

    layer: str
    module: str
    tensors: tuple[str, ...]
    gemms: tuple[str, ...] = ()


def sites(names: dict[nn.Module, str]) -> list[Site]:
    """Every row that the MXFP8 layers among `names` give, in the model's order."""
    found = []
    for module, name in names.items():
        if not is_swapped(module):
            continue
        config = module.__dict__.get("mxfp8_config")
        if isinstance(config, LinearConfig):
            found.append(Site(name, name, LINEAR, GEMMS))
        elif isinstance(config, AttentionConfig):
            if not config.is_high:
                found.append(Site(name, name, ATTENTION))
            if config.projections is not None:
                parts = [".".join(filter(None, (name, part))) for part in ("in_proj", "out_proj")]
                found += [Site(part, name, LINEAR, GEMMS) for part in parts]
    return found


@dataclass(frozen=True)
class Packed:
    """Sums (tensors, len(SUMS)), maxima (tensors, len(MAXIMA)) and GEMM error powers (gemms, 2), fp64."""

    sums: Tensor
    maxima: Tensor
    errors: Tensor


def pack(collector: Collector, rows: list[Site], device: torch.device) -> Packed:
    """Everything collected, in the layout of `rows`; what was not seen adds nothing."""
    sums: list[list[Value]] = []
    maxima: list[list[Value]] = []
    errors: list[list[Value]] = []
    for site in rows:
        for tensor in site.tensors:
            fields = collector.fields.get((site.layer, tensor))
            sums.append([0.0] * len(SUMS) if fields is None else fields.sums)
            maxima.append([0.0, NOTHING, NOTHING] if fields is None else fields.maxima)
        for gemm in site.gemms:
            norms = collector.errors.get((site.layer, gemm))
            errors.append([0.0, 0.0] if norms is None else [norms[0], norms[1]])
    packed = [_gathered(sums, len(SUMS), device), _gathered(maxima, len(MAXIMA), device), _gathered(errors, 2, device)]
    packed[0][:, : len(ROOTS)].square_()
    return Packed(packed[0], packed[1], packed[2].square_())


def _gathered(values: list[list[Value]], width: int, device: torch.device) -> Tensor:
    return gathered(values, device) if values else torch.zeros(0, width, dtype=torch.float64, device=device)


def unpack(packed: Packed, rows: list[Site]) -> tuple[LayerStatistics, ...]:
    """The records of what `pack` gave, read from the device."""
    sums, maxima, errors = (iter(x.tolist()) for x in (packed.sums, packed.maxima, packed.errors))
    layers = []
    for site in rows:
        tensors = {name: statistics_of(next(sums), next(maxima)) for name in site.tensors}
        powers = {gemm: next(errors) for gemm in site.gemms}
        layers.append(
            LayerStatistics(
                layer=site.layer,
                tensors={name: t for name, t in tensors.items() if t is not None},
                gemm_sqnr_db={gemm: decibels(*p) for gemm, p in powers.items() if p != [0.0, 0.0]},
            )
        )
    return tuple(layer for layer in layers if layer.tensors)
