"""What each arm of each seed measured, kept on disk as it finishes, so that nothing measured is lost."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from mxfp8_recipe.ab.arms import CANDIDATE, PLACEBOS, REFERENCE
from mxfp8_recipe.ab.config import difference
from mxfp8_recipe.monitors.bootstrap import relative_ne_gap
from mxfp8_recipe.monitors.equivalence import TaskGaps
from mxfp8_recipe.monitors.records import Record, SameWeights
from mxfp8_recipe.monitors.row_sums import gaps_of


class ResumeError(ValueError):
    """An earlier run that cannot be continued as asked; the message says how to."""


class Metrics(Record):
    """Metrics of one task over one set of rows; NaN where a class is missing. `rows` have positive weight."""

    rows: int
    ne: float
    calibration: float
    ne_calibration_free: float
    log_loss: float
    auc: float


class CurvePoint(Record):
    """`metrics.CalibrationBin`, as a record."""

    predicted: float
    observed: float
    observed_error: float
    rows: int


Blocks = tuple[tuple[float, float, float, float], ...]
"""Sums of `EntropySums` by block of time."""


class SegmentBlocks(Record):
    """`row_sums.SegmentSums`, as a record."""

    segment: int
    rows: int
    blocks: Blocks


class TaskResult(Record):
    """One task of one arm.

    Attributes:
        served: held-out rows, trained weights run in BF16, which is what serves. The verdict looks at this.
        trained: held-out rows, in the precision the arm trained in.
        progressive: every training row predicted before it was trained on (first epoch), lifetime.
        ne_windowed: progressive NE over the last window.
        trace: (rows seen, NE of the window ending there), progressive.
        curve: calibration curve of `served`.
        blocks: sums of `served` by block of time; segments: the same for each segment large enough to be judged alone.
        small_segments: how many are not.
    """

    task: str
    served: Metrics
    trained: Metrics
    progressive: Metrics
    ne_windowed: float
    trace: tuple[tuple[int, float], ...]
    curve: tuple[CurvePoint, ...]
    blocks: Blocks = ()
    segments: tuple[SegmentBlocks, ...] = ()
    small_segments: int = 0


class ShiftSource(Record):
    """Mean logit error with one layer alone in MXFP8."""

    layer: str
    alone: float


class ShiftSources(Record):
    """Which layers a task's mean logit error comes from.

    Attributes:
        shift: mean logit error of the whole recipe over `rows` held-out rows.
        layers: one for each quantized layer, the one that accounts for most first.
    """

    task: str
    seed: int
    rows: int
    shift: float
    layers: tuple[ShiftSource, ...]


class ArmResult(Record):
    """One arm of one seed.

    Attributes:
        tasks: empty for an arm that diverged.
        digests: SHA-256 of all predictions by name (`served`, `trained`, `progressive`): equal means bitwise equal.
        diverged: what happened, or empty.
    """

    arm: str
    seed: int
    steps: int
    train_rows: int
    heldout_rows: int
    window_rows: int
    seconds: float
    tasks: tuple[TaskResult, ...] = ()
    digests: dict[str, str] = Field(default_factory=dict)
    diverged: str = ""

    def task(self, name: str) -> TaskResult:
        return next(task for task in self.tasks if task.task == name)


class Results:
    """The results of a run so far, and the directory that holds them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.arms: dict[tuple[int, str], ArmResult] = {}
        self.same_weights: dict[int, SameWeights] = {}
        self.shift_sources: tuple[ShiftSources, ...] = ()
        self.looks: tuple[int, ...] = ()

    def complete_seeds(self) -> list[int]:
        """Seeds with both twins trained to the end, in order."""
        finished = {key for key, result in self.arms.items() if result.tasks}
        return sorted(s for s, arm in finished if arm == CANDIDATE and (s, REFERENCE) in finished)

    def of(self, arm: str) -> list[ArmResult]:
        """Results of an arm, by seed."""
        return [result for (_, name), result in sorted(self.arms.items()) if name == arm and result.tasks]

    def divergences(self) -> list[str]:
        return [result.diverged for _, result in sorted(self.arms.items()) if result.diverged]

    def identical(self) -> bool:
        """Every prediction of the twins, trained and held out, is bitwise equal in every complete seed."""
        seeds = self.complete_seeds()
        twins = [(self.arms[s, REFERENCE].digests, self.arms[s, CANDIDATE].digests) for s in seeds]
        shadows = [self.same_weights[s].identical for s in seeds if s in self.same_weights]
        return bool(seeds) and all(a == b for a, b in twins) and all(shadows)

    def gaps(self, task: str) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
        """Relative NE gaps to the BF16 twin of the same seed: MXFP8's, and each placebo's."""
        seeds = self.complete_seeds()

        def gap(seed: int, arm: str) -> float:
            base = self.arms[seed, REFERENCE].task(task).served.ne
            return self.arms[seed, arm].task(task).served.ne / base - 1

        placebos = {
            name: tuple(gap(s, name) for s in seeds if (s, name) in self.arms)
            for name in PLACEBOS
            if any((s, name) in self.arms for s in seeds)
        }
        return tuple(gap(s, CANDIDATE) for s in seeds), placebos

    def task_gaps(self, task: str) -> TaskGaps:
        """The gaps of a task with the row noise that seeds share, and the classes its rows hold."""
        mxfp8, placebos = self.gaps(task)
        seeds = self.complete_seeds()
        if not seeds:
            return TaskGaps(task=task, mxfp8=mxfp8, placebos=placebos)
        base, other = (self._blocks(task, [(s, arm) for s in seeds]) for arm in (REFERENCE, CANDIDATE))
        rows = self.arms[seeds[0], REFERENCE].task(task).served.rows
        return replace(gaps_of(task, base, other, placebos, rows=rows), mxfp8=mxfp8)

    def segment_gaps(self, task: str) -> tuple[TaskGaps, ...]:
        """The gaps of each segment large enough to be judged alone."""
        seeds = self.complete_seeds()
        found = self.arms[seeds[0], REFERENCE].task(task).segments if seeds else ()
        gaps = []
        for index, segment in enumerate(found):
            base, other = (self._blocks(task, [(s, arm) for s in seeds], index) for arm in (REFERENCE, CANDIDATE))
            placebos = {}
            for name in PLACEBOS:
                pairs = [(s, name) for s in seeds if (s, name) in self.arms]
                if pairs:
                    harmless = np.stack(self._blocks(task, pairs, index)).sum(1)
                    own = np.stack(self._blocks(task, [(s, REFERENCE) for s, _ in pairs], index)).sum(1)
                    placebos[name] = tuple(relative_ne_gap(own, harmless).tolist())
            label = f"segment {segment.segment}"
            gaps.append(gaps_of(task, base, other, placebos, segment=label, rows=segment.rows))
        return tuple(gaps)

    def small_segments(self, task: str) -> int:
        seeds = self.complete_seeds()
        return self.arms[seeds[0], REFERENCE].task(task).small_segments if seeds else 0

    def _blocks(self, task: str, keys: list[tuple[int, str]], segment: int | None = None) -> list[np.ndarray]:
        """Block sums of each (seed, arm), of all rows or of the segment at an index."""
        tasks = [self.arms[key].task(task) for key in keys]
        return [np.asarray(t.blocks if segment is None else t.segments[segment].blocks) for t in tasks]

    def keep_look(self) -> None:
        """Note that the seeds at hand were judged; a later judgment of more seeds has that much less level left."""
        seeds = len(self.complete_seeds())
        if seeds > 1 and seeds not in self.looks:
            self.looks = tuple(sorted((*self.looks, seeds)))
            _replace(self.directory / "looks.json", json.dumps(self.looks))

    def keep_shift_sources(self, found: tuple[ShiftSources, ...]) -> None:
        self.shift_sources = found
        _replace(self.directory / "shift_sources.json", json.dumps([f.model_dump(mode="json") for f in found]))

    def keep(self, result: ArmResult) -> None:
        self.arms[result.seed, result.arm] = result
        self._write(f"seed{result.seed}-{result.arm}.json", result)

    def keep_same_weights(self, measured: SameWeights) -> None:
        self.same_weights[measured.seed] = measured
        self._write(f"seed{measured.seed}-same_weights.json", measured)

    def open(self, fingerprint: dict[str, Any], *, seeds: int, resume: bool) -> Path | None:
        """Prepare the directory; where an earlier run's files went, if there were any.

        With `resume`, load what an earlier run of the same configuration finished of the first `seeds` seeds.
        Without, move what an earlier run left into `earlier/N`.

        Raises:
            ResumeError: the earlier run's configuration differs, or there is none to resume.
        """
        record, moved = self.directory / "config.json", None
        if resume:
            self._check(record, fingerprint)
            self._load(seeds)
        else:
            moved = _set_aside(self.directory)
        (self.directory / "results").mkdir(parents=True, exist_ok=True)
        _replace(record, json.dumps(fingerprint, indent=2))
        return moved

    def _check(self, record: Path, fingerprint: dict[str, Any]) -> None:
        if not record.is_file():
            raise ResumeError(f"--resume: {self.directory} holds no earlier run; leave --resume out to start one")
        try:
            earlier = json.loads(record.read_text())
        except json.JSONDecodeError as error:
            raise ResumeError(f"--resume: {record} is not valid JSON ({error}); leave --resume out") from None
        changed = difference(earlier, fingerprint)
        if changed:
            raise ResumeError(
                f"--resume: {self.directory} was measured under another configuration: {'; '.join(changed)}. "
                "Repeat the earlier options, or choose another --out"
            )

    def _load(self, seeds: int) -> None:
        looks, sources = self.directory / "looks.json", self.directory / "shift_sources.json"
        self.looks = tuple(json.loads(looks.read_text())) if looks.is_file() else ()
        found = json.loads(sources.read_text()) if sources.is_file() else []
        self.shift_sources = tuple(ShiftSources.model_validate(f) for f in found)
        for path in sorted((self.directory / "results").glob("seed*.json")):
            if path.stem.endswith("same_weights"):
                measured = _read(path, SameWeights)
                if measured.seed < seeds:
                    self.same_weights[measured.seed] = measured
            else:
                result = _read(path, ArmResult)
                if result.seed < seeds:
                    self.arms[result.seed, result.arm] = result

    def _write(self, name: str, record: Record) -> None:
        _replace(self.directory / "results" / name, record.model_dump_json())


_R = TypeVar("_R", bound=Record)


def _read(path: Path, kind: type[_R]) -> _R:
    try:
        return kind.model_validate_json(path.read_text())
    except ValueError as error:
        raise ResumeError(f"--resume: {path} is no result of this version ({error}); delete it and resume") from None


def _replace(path: Path, text: str) -> None:
    """Write so that a reader, or a later run, sees the old file or the new one and never half of it."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


def _set_aside(directory: Path) -> Path | None:
    names = ("config.json", "results", "report.json", "report.html", "looks.json", "shift_sources.json")
    found = [directory / name for name in names]
    found = [path for path in found if path.exists()]
    if not found:
        return None
    number = 1
    while (directory / "earlier" / str(number)).exists():
        number += 1
    destination = directory / "earlier" / str(number)
    destination.mkdir(parents=True)
    for path in found:
        path.rename(destination / path.name)
    return destination
