"""What a `NumericsMonitor` adds to a training step: between reports, on a reported step, and on average at every=100.

The step is forward, loss, backward and AdamW of a small ranker through `apply_recipe`, in eager mode under BF16
autocast, or `--compiled`. Steps of each kind take turns, so that they share whatever else the machine does. On a GPU a
step's time is wall time, the device synchronized; on a CPU it is the process's CPU time, which other load leaves alone.
A run in which the monitored weights differ from the others in any bit gets no number.

- `off`: no monitor. `between`: microseconds that hooks and `step` take on a step that is not reported.
- `shadow`: a reported step with the forward-only shadow alone. `forward`: and with every layer's statistics.
  `backward`: and with the gradients of both precisions.
- `added_every_100_pct`: what a step costs more on average when each hundredth is reported.

    python benchmarks/bench_monitor.py [--device cuda] [--compiled] [--rounds 20] [--out FILE] [--commit HASH]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_cpu import environment
from benchmarks.rows import add_options, append, gpu_environment, quantiles_ms
from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import NumericsMonitor

BENCH = "monitor"
EVERY = 100
LIMIT = 2.0
"""Percent that a forward-only shadow at every=100 may add to a step."""

SIZES = {"cpu": (4096, 256, 1024, 3), "cuda": (65536, 1024, 4096, 4)}
"""Rows, width, hidden width and blocks."""
RECIPES = {"cpu": "mxfp8", "cuda": "mxfp8_hopper"}


class Block(nn.Module):
    """Norm, up, GELU, down and residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Ranker(nn.Module):
    """Blocks and a head with one logit a row."""

    def __init__(self, width: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(blocks)))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))[:, 0]


class Loop:
    """One model's training; `step()` gives its milliseconds.

    Args:
        kind: `off`, `shadow`, `forward` or `backward`.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, kind: str, compiled: bool) -> None:
        self.kind, self.x, self.y, self.device = kind, x, y, x.device
        self.model = copy.deepcopy(model)
        with torch.autocast(x.device.type, torch.bfloat16):
            apply_recipe(self.model, RECIPES[x.device.type], example_inputs=x)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.called: Any = torch.compile(self.model) if compiled else self.model
        self.monitor: NumericsMonitor | None = None
        if kind != "off":
            statistics, backward = kind != "shadow", kind == "backward"
            self.monitor = NumericsMonitor(self.called, every=1, statistics=statistics, backward=backward).start()

    def step(self) -> float:
        start = self._now()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.called(self.x)
        F.binary_cross_entropy_with_logits(logits.float(), self.y).backward()
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step(logits, self.y)
        return (self._now() - start) * 1e3

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def between_us(calls: int = 3000) -> float:
    """Microseconds a monitor takes on a step that it does not report."""
    module, x = nn.Identity(), torch.zeros(1)
    steps: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(5):
        start = time.process_time()
        for _ in range(calls):
            module(x)
        steps["without"].append(time.process_time() - start)
        with NumericsMonitor(module, every=2**40) as monitor:
            monitor.step(batch=x)  # the first one is reported
            start = time.process_time()
            for _ in range(calls):
                module(x)
                monitor.step(x, x)
            steps["with"].append(time.process_time() - start)
    return (min(steps["with"]) - min(steps["without"])) / calls * 1e6


def run(device: str, compiled: bool, rounds: int, size: tuple[int, ...]) -> list[dict[str, Any]]:
    """The rows of all kinds of step."""
    torch.manual_seed(0)
    rows, width, hidden, blocks = size
    model, x = Ranker(width, hidden, blocks).to(device), torch.randn(rows, width, device=device)
    y = (torch.rand(rows, device=device) < 0.3).float()
    loops = {kind: Loop(model, x, y, kind, compiled) for kind in ("off", "shadow", "forward", "backward")}
    for loop in loops.values():
        for _ in range(3):
            loop.step()
    times: dict[str, list[float]] = {kind: [] for kind in loops}
    for _ in range(rounds):
        for kind, loop in loops.items():
            times[kind].append(loop.step())
    plain = loops["off"].model.state_dict()
    for kind, loop in loops.items():
        differing = [name for name, value in loop.model.state_dict().items() if not torch.equal(value, plain[name])]
        if differing:
            sys.exit(f"{kind}: weights differ from those without a monitor ({differing[0]}); nothing is measured")
    base, between = statistics.median(times["off"]), between_us()
    about: dict[str, Any] = {
        "bench": BENCH,
        "case": "x".join(map(str, size)),
        "mode": "compiled" if compiled else "eager",
    }
    found: list[dict[str, Any]] = [about | {"kind": "between", "us": round(between, 1)}]
    for kind, values in times.items():
        row: dict[str, Any] = about | {"kind": kind} | quantiles_ms(values)
        if kind != "off":
            steps = statistics.median(values) / base
            added = (steps - 1) / EVERY + between / 1e3 / base
            row |= {"steps": round(steps, 2), f"added_every_{EVERY}_pct": round(100 * added, 2)}
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, nargs=4, default=None, help="rows, width, hidden width, blocks")
    add_options(parser)
    options = parser.parse_args()
    about = gpu_environment(options.commit) if options.device == "cuda" else environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    size = tuple(options.size) if options.size else SIZES[options.device]
    rows = run(options.device, options.compiled, options.rounds, size)
    for row in rows:
        print(row)
    added = next(row[f"added_every_{EVERY}_pct"] for row in rows if row["kind"] == "shadow")
    print(f"forward-only shadow adds {added} %, at most {LIMIT} %: {'met' if added <= LIMIT else 'NOT met'}")
    append(options.out, [row | about for row in rows])


if __name__ == "__main__":
    main()
