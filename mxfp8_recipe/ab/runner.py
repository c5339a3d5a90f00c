"""Runs the check: every arm of every seed, kept as it finishes, and the verdict on what came out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mxfp8_recipe import Plan
from mxfp8_recipe.ab.arms import ARMS, REFERENCE
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.measure import Measurer
from mxfp8_recipe.ab.results import Results
from mxfp8_recipe.ab.types import Dataset
from mxfp8_recipe.ab.user_code import user_code
from mxfp8_recipe.ab.workers import Unit, measure_here, measure_in_processes
from mxfp8_recipe.config import BF16, KIND_PRECISION
from mxfp8_recipe.monitors.verdict import Decision, Evidence, decide


@dataclass(frozen=True, kw_only=True)
class ABRun:
    """A finished or interrupted run: what was asked, what it ran on, what was measured, what follows."""

    config: ABConfig
    dataset: Dataset
    plan: Plan
    results: Results
    decision: Decision
    seconds: float


class Runner:
    """One A/B check.

    Args:
        config: what to do.
        directory: where results go as they finish.
        console: where progress goes.

    Raises:
        ValueError, TypeError, OSError: on construction, for whatever is wrong with the request.
    """

    def __init__(self, config: ABConfig, directory: Path, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console(stderr=True)
        with user_code(config.data, config.model):
            self.measurer = Measurer(config)
        self.results = Results(directory)

    def run(self, *, resume: bool = False) -> ABRun:
        """Train and measure what is not measured yet; Ctrl-C ends it early and keeps the rest.

        Raises:
            DataError: rows that cannot be used. ResumeError: an earlier run of another configuration.
            Diverged: an arm other than MXFP8's lost its numbers, which no recipe is to blame for.
        """
        moved = self.results.open(self.config.fingerprint(), seeds=self.config.seeds, resume=resume)
        if moved is not None:
            line = f"{self.results.directory} held an earlier run, which is in {moved} now; --resume would continue it"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True, emoji=False)
        start, interrupted = time.monotonic(), ""
        try:
            self._measure_all()
        except KeyboardInterrupt:
            done = len(self.results.complete_seeds())
            interrupted = f"interrupted: {done} of {self.config.seeds} seeds have both twins; --resume continues"
        decision = decide(self._evidence(interrupted), budget=self.config.ne_budget)
        self.results.keep_look()
        return ABRun(
            config=self.config,
            dataset=self.measurer.dataset,
            plan=self.measurer.plan,
            results=self.results,
            decision=decision,
            seconds=time.monotonic() - start,
        )

    def _measure_all(self) -> None:
        units = self._missing()
        with user_code(self.config.data, self.config.model):
            total = self.measurer.train_rows.rows * self.config.epochs
        with self._progress() as progress:
            bars: dict[Unit, TaskID] = {}

            def on_step(unit: Unit, rows: int, loss: float) -> None:
                if unit not in bars:
                    bars[unit] = progress.add_task(f"seed {unit[0]} {unit[1]}", total=total, loss="")
                progress.update(bars[unit], completed=rows, loss=f"loss {loss:.4f}")

            if self.config.jobs == 1 or len(units) < 2:
                finished = measure_here(self.measurer, units, on_step)
            else:
                finished = measure_in_processes(self.config, units, on_step)
            for measured in finished:
                if measured.same_weights is not None:
                    self.results.keep_same_weights(measured.same_weights)
                if measured.shift_sources:
                    self.results.keep_shift_sources(measured.shift_sources)
                result = measured.result
                self.results.keep(result)
                unit = (result.seed, result.arm)
                if unit in bars:
                    progress.update(bars[unit], completed=total)
                if not self.console.is_terminal:
                    line = f"seed {result.seed} {result.arm}: {result.steps} steps in {result.seconds:.1f} s"
                    self.console.print(line, highlight=False)

    def _missing(self) -> list[Unit]:
        """Arms of seeds that are not measured yet, seed by seed."""
        wanted = [(seed, arm.name) for seed in range(self.config.seeds) for arm in ARMS]
        compared = self.results.same_weights
        return [
            (seed, arm)
            for seed, arm in wanted
            if (seed, arm) not in self.results.arms or (arm == REFERENCE and seed not in compared)
        ]

    def _evidence(self, interrupted: str) -> Evidence:
        return evidence_of(self.results, self.measurer.dataset.spec.tasks, self.measurer, interrupted=interrupted)

    @contextmanager
    def _progress(self) -> Iterator[Progress]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows, {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            yield progress


def evidence_of(results: Results, tasks: Sequence[str], measurer: Measurer, *, interrupted: str = "") -> Evidence:
    """What the results so far give a verdict to look at; `measurer` knows the recipe and what it converts."""
    finished = results.of(REFERENCE)
    return Evidence(
        gaps=tuple(results.task_gaps(task) for task in tasks),
        same_weights=tuple(results.same_weights[s] for s in sorted(results.same_weights)),
        rows=finished[0].train_rows + finished[0].heldout_rows if finished else 0,
        segments=tuple(gaps for task in tasks for gaps in results.segment_gaps(task)),
        small_segments=max((results.small_segments(task) for task in tasks), default=0),
        looks=results.looks,
        identical=results.identical(),
        quantizes=bool(measurer.plan.converted),
        identity=all(measurer.recipe.precision(kind) == BF16 for kind in KIND_PRECISION),
        interrupted=interrupted,
        diverged=tuple(results.divergences()),
    )
