"""Measures one arm of one seed: train, evaluate, and for the BF16 arm compare with its quantized twin."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from mxfp8_recipe import Plan, Recipe, apply_recipe, load_recipe, plan_recipe, revert
from mxfp8_recipe.ab.arms import CANDIDATE, REFERENCE, REFERENCE_ARM, Arm, initial_copy, precision
from mxfp8_recipe.ab.batches import CheckedBatches, SamplingCorrection
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.data import load_dataset
from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.ab.results import ArmResult, Blocks, SegmentBlocks, ShiftSources, TaskResult
from mxfp8_recipe.ab.shift_sources import mean_gate_is_broken, shift_sources
from mxfp8_recipe.ab.training import BaseRateOffset, Diverged, OnStep, Predictions, Trainer, loss_of
from mxfp8_recipe.ab.types import Dataset
from mxfp8_recipe.ab.user_code import user_code
from mxfp8_recipe.monitors.records import SameWeights
from mxfp8_recipe.monitors.shadow import compare_same_weights


@dataclass(frozen=True)
class Measured:
    """One arm of one seed; `same_weights` comes with the BF16 arm."""

    result: ArmResult
    same_weights: SameWeights | None = None
    shift_sources: tuple[ShiftSources, ...] = ()


class Measurer:
    """Everything that measuring needs besides a seed and an arm. Measurements are independent of each other.

    Raises:
        ValueError, TypeError, OSError: on construction, for whatever is wrong with the request: data, model,
            recipe and overrides are all tried before anything trains.
    """

    def __init__(self, config: ABConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.recipe: Recipe = load_recipe(config.recipe)
        # The data's seed stays 0: seeds change the model, never the rows.
        self.dataset: Dataset = load_dataset(
            config.data,
            rows=config.rows_wanted,
            strict=config.strict,
            weight_column=config.weight_column,
            negative_sampling_rate=config.negative_sampling_rate,
            offline=config.offline,
        )
        self.correction = SamplingCorrection(config.negative_sampling_rate)
        self.train_rows = CheckedBatches(self.dataset, "train", config.batch_size)
        self.heldout_rows = CheckedBatches(self.dataset, "heldout", config.batch_size)
        self._offset: BaseRateOffset | None = None
        self._example = next(iter(self.train_rows)).to(self.device)
        self.plan: Plan = self._plan()

    def for_recipe(self, recipe: str) -> Measurer:
        """The same rows and models under another recipe without overrides; what is loaded is shared."""
        other = copy.copy(self)
        other.config = self.config.model_copy(update={"recipe": recipe, "overrides": {}})
        other.recipe = load_recipe(recipe)
        other.plan = other._plan()
        return other

    def measure(self, seed: int, arm: Arm, on_step: OnStep) -> Measured:
        """`train`, and for the BF16 arm `compare`; what a user's own code raises there is a `DataError`."""
        with user_code(self.config.data, self.config.model):
            return self._measure(seed, arm, on_step)

    def _measure(self, seed: int, arm: Arm, on_step: OnStep) -> Measured:
        model, result = self.train(seed, arm, on_step)
        if arm.name != REFERENCE or model is None:
            return Measured(result)
        return Measured(result, *self.compare(model, seed))

    def train(self, seed: int, arm: Arm, on_step: OnStep) -> tuple[nn.Module | None, ArmResult]:
        """Train the arm from the seed's weights and evaluate it; the model comes back plain, or None if MXFP8 diverged.

        Args:
            seed: of the initial weights and of any dropout.
            arm: the precision.
            on_step: told of rows trained so far (all epochs) and the loss, after each step.

        Raises:
            DataError: rows that cannot be used.
            Diverged: an arm other than MXFP8's lost its numbers, which no recipe is to blame for.
        """
        trainer = Trainer(
            device=self.device,
            epochs=self.config.epochs,
            learning_rate=self.config.learning_rate,
            correction=self.correction,
            on_step=on_step,
        )
        start = time.monotonic()
        model = self.started(seed, arm)
        if arm.quantized:
            self.apply(model)
        try:
            progressive, steps = trainer.train(model, arm, seed, self.train_rows, self.train_rows.rows)
        except Diverged as error:
            if arm.name != CANDIDATE:
                raise
            return None, self._divergence(arm, seed, str(error), time.monotonic() - start)
        trained = trainer.evaluate(model, arm, self.heldout_rows)
        if arm.quantized:
            revert(model)
        serves_as_trained = arm.autocast and not arm.quantized
        served = trained if serves_as_trained else trainer.evaluate(model, REFERENCE_ARM, self.heldout_rows)
        seconds = time.monotonic() - start
        return model, self._result(arm, seed, steps, seconds, progressive, trained, served)

    def _initial_model(self, seed: int) -> nn.Module:
        """The seed's model before any arm touches it, on the device."""
        torch.manual_seed(seed)
        return build_model(self.config.model, self.dataset.spec).to(self.device)

    def _plan(self) -> Plan:
        with precision(self.device, autocast=True):
            return plan_recipe(
                self._initial_model(0), self.recipe, overrides=self.config.overrides, example_inputs=(self._example,)
            )

    def apply(self, model: nn.Module, demoted: dict[str, str] | None = None, *, fuse: bool = True) -> None:
        """The recipe, with edges and attention calls found from the first rows, in the precision that trains.

        `demoted` are overrides on top of the configured ones. Unfused has the same bits, and every layer's output to
        look at.
        """
        overrides = {**self.config.overrides, **(demoted or {})}
        recipe = self.recipe if fuse else self.recipe.model_copy(update={"fuse": False})
        with precision(self.device, autocast=True):
            apply_recipe(model, recipe, overrides=overrides, example_inputs=(self._example,))

    def started(self, seed: int, arm: Arm) -> nn.Module:
        """The arm's model before its first step, plain: the seed's weights, an output starting from the base rate."""
        self._offset = self._offset or BaseRateOffset(self.train_rows)
        model = self._initial_model(seed)
        model.register_forward_hook(self._offset)
        return initial_copy(model, arm, seed)

    def compare(self, model: nn.Module, seed: int) -> tuple[SameWeights, tuple[ShiftSources, ...]]:
        """Compare the BF16-trained model with its quantized twin; where a mean shifts too far, seed 0 says whence."""
        twin = copy.deepcopy(model)
        self.apply(twin, fuse=False)
        found = compare_same_weights(
            model,
            twin,
            (batch.to(self.device) for batch in self.heldout_rows),
            tasks=self.dataset.spec.tasks,
            seed=seed,
            precision=partial(precision, self.device, autocast=True),
            loss=loss_of,
            judge=lambda logits, batch: (self.correction.logits(logits), self.correction.weights(batch)),
        )
        if seed != 0 or not mean_gate_is_broken(found):
            return found, ()
        return found, shift_sources(self, model, twin, seed)

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
            trace, sums = progressive.trace(column), served.row_sums(column)
            tasks.append(
                TaskResult(
                    task=task,
                    served=served.metrics(column),
                    trained=trained.metrics(column),
                    progressive=progressive.metrics(column),
                    ne_windowed=trace[-1][1],
                    trace=trace,
                    curve=served.curve(column),
                    blocks=_as_blocks(sums.blocks),
                    segments=tuple(
                        SegmentBlocks(segment=s, rows=x.rows, blocks=_as_blocks(x.blocks))
                        for s, x in sums.segments.items()
                    ),
                    small_segments=sums.small,
                )
            )
        return ArmResult(
            arm=arm.name,
            seed=seed,
            steps=steps,
            train_rows=self.train_rows.rows,
            heldout_rows=self.heldout_rows.rows,
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
            train_rows=self.train_rows.rows,
            heldout_rows=self.heldout_rows.rows,
            window_rows=0,
            seconds=seconds,
            diverged=message,
        )


def _as_blocks(sums: np.ndarray) -> Blocks:
    return tuple(tuple(row) for row in sums.tolist())
