"""CUDA graphs timed in rounds that take every provider in turn, after the same pause.

A GPU at its power limit slows down with the load before, by a tenth within a second, so a provider timed last would pay
for the others, and one timed alone for long would pay for itself.
"""

from __future__ import annotations

import itertools
import time

import torch

ROUNDS, REPLAYS, PAUSE_S = 5, 5, 0.03


def time_in_turn(
    graphs: dict[str, torch.cuda.CUDAGraph], launches: int = 1, rounds: int = ROUNDS
) -> dict[str, list[float]]:  # fmt: skip
    """Sorted milliseconds a launch of each provider, whose graph holds `launches`."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            time.sleep(PAUSE_S)
            graph.replay()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(stop) / launches for start, stop in itertools.pairwise(marks)]
    return {name: sorted(values) for name, values in times.items()}
