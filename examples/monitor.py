"""A click model trained in MXFP8 under a `NumericsMonitor`, with an outlier planted that the monitor finds.

    python -m examples.monitor [--steps 60] [--out numerics.jsonl]

The live table shows each report. From step 30 on one channel before the second linear grows by a factor of 4 a step, as
a diverging activation does; the monitor names the layer that reads it and takes it back to BF16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import JSONLSink, LiveTable, NumericsMonitor

PLANTED = 30


class Clicks(nn.Module):
    """Three linears and a head; `gain` scales one channel before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 1)
        self.register_buffer("gain", torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.first(x) * self.gain)
        return self.head(F.silu(self.second(hidden)))[:, 0]


def rows(step: int) -> tuple[Tensor, Tensor]:
    """(256, 64) features and (256,) clicks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(256, 64, generator=generator)
    return x, (torch.rand(256, generator=generator) < (x[:, :4].sum(1) - 1).sigmoid()).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("numerics.jsonl"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Clicks()
    apply_recipe(model, example_inputs=rows(0)[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sinks = [JSONLSink(options.out), LiveTable()]
    with NumericsMonitor(model, every=5, sinks=sinks, tasks=["ctr"], action="demote") as monitor:
        for step in range(options.steps):
            if step >= PLANTED:
                model.gain[7] *= 4.0
            x, y = rows(step)
            optimizer.zero_grad()
            logits = model(x)
            F.binary_cross_entropy_with_logits(logits, y).backward()
            monitor.step(logits, y)
            optimizer.step()
    print(f"to start again with: apply_recipe(model, overrides={monitor.overrides})")


if __name__ == "__main__":
    main()
