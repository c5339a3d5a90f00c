"""Operands of a layer with a NaN or Inf block, in a small file that `torch.load` reads with `weights_only=True`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from mxfp8_recipe.monitors.live.collector import SUSPECT_ROWS, Collector


def dump_path(directory: Path, step: int, layer: str, tensor: str, rank: int) -> Path:
    """Where the rank that holds the block writes it."""
    name = re.sub(r"[^\w.-]", "_", layer or "root")
    return directory / f"step{step}_{name}_{tensor}_rank{rank}.pt"


def dump_operands(path: Path, collector: Collector, step: int, layer: str, tensor: str) -> None:
    """Save, of each operand of `layer` seen on this step, the rows of largest magnitude, non-finite ones first.

    The file holds `{"step", "layer", "tensor", "operands": {name: [{"rows", "index"}, ...]}}`: one entry for each call
    of the layer, `rows` (R, K) in the compute dtype and their `index` (R,) in the operand.
    """
    operands = {
        name: [{"index": s.index.cpu(), "rows": s.rows.cpu()} for s in kept]
        for (owner, name), kept in collector.suspects.items()
        if owner == layer and kept
    }
    if layer in collector.weights:
        weight = collector.weights[layer]
        index = weight.abs().amax(-1).topk(min(SUSPECT_ROWS, len(weight))).indices
        operands["weight"] = [{"index": index.cpu(), "rows": weight[index].cpu()}]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, "layer": layer, "tensor": tensor, "operands": operands}, path)
