"""Runs the check: every seed through every arm, the same-weights comparison, and the verdict on what came out."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from mxfp8_recipe import Plan, Recipe, apply_recipe, load_recipe, plan_recipe, revert
from mxfp8_recipe.ab.arms import ARMS, CANDIDATE, REFERENCE, Arm, initial_copy, precision
from mxfp8_recipe.ab.batches import CheckedBatches, SamplingCorrection
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.data import load_dataset
from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.ab.results import ArmResult, Results, TaskResult
from mxfp8_recipe.ab.training import BaseRateOffset, Diverged, Predictions, Trainer, loss_of
from mxfp8_recipe.ab.types import Dataset
from mxfp8_recipe.config import BF16, KIND_PRECISION
from mxfp8_recipe.monitors.shadow import compare_same_weights
from mxfp8_recipe.monitors.verdict import Decision, Evidence, TaskGaps, decide


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
        ValueError, TypeError, OSError: on construction, for whatever is wrong with the request: data, model,
            recipe and overrides are all tried before anything trains.
    """

    def __init__(self, config: ABConfig, directory: Path, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console(stderr=True)
        self.device = torch.device(config.device)
        self.recipe: Recipe = load_recipe(config.recipe)
        # The data's seed stays 0: seeds change the model, never the rows.
        self.dataset = load_dataset(
            config.data,
            rows=config.rows,
            strict=config.strict,
            weight_column=config.weight_column,
            negative_sampling_rate=config.negative_sampling_rate,
            offline=config.offline,
        )
        self.plan = plan_recipe(self._initial_model(0), self.recipe, overrides=config.overrides)
        self.correction = SamplingCorrection(config.negative_sampling_rate)
        self.train_rows = CheckedBatches(self.dataset, "train", config.batch_size)
        self.heldout_rows = CheckedBatches(self.dataset, "heldout", config.batch_size)
        self.results = Results(directory)
        self._offset: BaseRateOffset | None = None

    def run(self, *, resume: bool = False) -> ABRun:
        """Train and measure what is not measured yet; Ctrl-C ends it early and keeps the rest.

        Raises:
            DataError: rows that cannot be used. ResumeError: an earlier run of another configuration.
            Diverged: an arm other than MXFP8's lost its numbers, which no recipe is to blame for.
        """
        self.results.open(self.config.fingerprint(), seeds=self.config.seeds, resume=resume)
        start, interrupted = time.monotonic(), ""
        try:
            with self._progress() as progress:
                for seed in range(self.config.seeds):
                    self._run_seed(seed, progress)
        except KeyboardInterrupt:
            done = len(self.results.complete_seeds())
            interrupted = f"interrupted: {done} of {self.config.seeds} seeds have both twins; --resume continues"
        return ABRun(
            config=self.config,
            dataset=self.dataset,
            plan=self.plan,
            results=self.results,
            decision=decide(self._evidence(interrupted), budget=self.config.ne_budget),
            seconds=time.monotonic() - start,
        )

    def _run_seed(self, seed: int, progress: Progress) -> None:
        initial = None
        for arm in ARMS:
            measured = (seed, arm.name) in self.results.arms
            if measured and (arm.name != REFERENCE or seed in self.results.same_weights):
                continue
            initial = self._started_model(seed) if initial is None else initial
            self._run_arm(initial, arm, seed, progress)

    def _run_arm(self, initial: nn.Module, arm: Arm, seed: int, progress: Progress) -> None:
        total = self.train_rows.rows and self.train_rows.rows * self.config.epochs
        bar = progress.add_task(f"seed {seed} {arm.name}", total=total, loss="")

        def on_step(arm: Arm, rows: int, loss: float) -> None:
            progress.update(bar, completed=rows, loss=f"loss {loss:.4f}")

        trainer = Trainer(
            device=self.device,
            epochs=self.config.epochs,
            learning_rate=self.config.learning_rate,
            correction=self.correction,
            on_step=on_step,
        )
        start = time.monotonic()
        model = initial_copy(initial, arm, seed)
        if arm.quantized:
            apply_recipe(model, self.recipe, overrides=self.config.overrides, strict=self.config.strict)
        try:
            progressive, steps = trainer.train(model, arm, seed, self.train_rows)
        except Diverged as error:
            if arm.name != CANDIDATE:
                raise
            self.results.keep(self._divergence(arm, seed, str(error), time.monotonic() - start))
            return
        trained = trainer.evaluate(model, arm, self.heldout_rows)
        if arm.quantized:
            revert(model)
        serves_as_trained = arm.autocast and not arm.quantized
        served = trained if serves_as_trained else trainer.evaluate(model, ARMS[0], self.heldout_rows)
        if arm.name == REFERENCE:
            self.results.keep_same_weights(self._compare(model, seed))
        seconds = time.monotonic() - start
        self.results.keep(self._result(arm, seed, steps, seconds, progressive, trained, served))
        progress.update(bar, total=self.train_rows.rows and self.train_rows.rows * self.config.epochs)
        if not self.console.is_terminal:
            self.console.print(f"seed {seed} {arm.name}: {steps} steps in {seconds:.1f} s", highlight=False)

    def _initial_model(self, seed: int) -> nn.Module:
        """The seed's model before any arm touches it, on the device."""
        torch.manual_seed(seed)
        return build_model(self.config.model, self.dataset.spec).to(self.device)

    def _started_model(self, seed: int) -> nn.Module:
        """`_initial_model` that starts from the base rate."""
        self._offset = self._offset or BaseRateOffset(self.train_rows)
        model = self._initial_model(seed)
        model.register_forward_hook(self._offset)
        return model

    def _compare(self, model: nn.Module, seed: int) -> Any:
        """Same-weights comparison of the BF16-trained model with its quantized twin."""
        twin = copy.deepcopy(model)
        apply_recipe(twin, self.recipe, overrides=self.config.overrides, strict=self.config.strict)
        return compare_same_weights(
            model,
            twin,
            (batch.to(self.device) for batch in self.heldout_rows),
            tasks=self.dataset.spec.tasks,
            seed=seed,
            precision=partial(precision, self.device, autocast=True),
            loss=loss_of,
            judge=lambda logits, batch: (self.correction.logits(logits), self.correction.weights(batch)),
        )

    def _result(
        self,
        arm: Arm,
        seed: int,
        steps: int,
        seconds: float,
        progressive: Predictions,
        trained: Predictions,
        served: Predictions,
    ) -> ArmResult:
        tasks = []
        for column, task in enumerate(self.dataset.spec.tasks):
            trace = progressive.trace(column)
            tasks.append(
                TaskResult(
                    task=task,
                    served=served.metrics(column),
                    trained=trained.metrics(column),
                    progressive=progressive.metrics(column),
                    ne_windowed=trace[-1][1],
                    trace=trace,
                    curve=served.curve(column),
                )
            )
        return ArmResult(
            arm=arm.name,
            seed=seed,
            steps=steps,
            train_rows=self.train_rows.rows or 0,
            heldout_rows=self.heldout_rows.rows or 0,
            window_rows=progressive.window_rows(),
            seconds=seconds,
            tasks=tuple(tasks),
            digests={"served": served.digest, "trained": trained.digest, "progressive": progressive.digest},
        )

    def _divergence(self, arm: Arm, seed: int, message: str, seconds: float) -> ArmResult:
        return ArmResult(
            arm=arm.name,
            seed=seed,
            steps=0,
            train_rows=self.train_rows.rows or 0,
            heldout_rows=self.heldout_rows.rows or 0,
            window_rows=0,
            seconds=seconds,
            diverged=message,
        )

    def _evidence(self, interrupted: str) -> Evidence:
        gaps = []
        for task in self.dataset.spec.tasks:
            mxfp8, placebos = self.results.gaps(task)
            gaps.append(TaskGaps(task=task, mxfp8=mxfp8, placebos=placebos))
        finished = self.results.of(REFERENCE)
        return Evidence(
            gaps=tuple(gaps),
            same_weights=tuple(self.results.same_weights[s] for s in sorted(self.results.same_weights)),
            rows=finished[0].train_rows + finished[0].heldout_rows if finished else 0,
            identical=self.results.identical(),
            quantizes=bool(self.plan.converted),
            identity=all(self.recipe.precision(kind) == BF16 for kind in KIND_PRECISION),
            interrupted=interrupted,
            diverged=tuple(self.results.divergences()),
        )

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
