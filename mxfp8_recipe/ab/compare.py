"""The verdict from two runs' predictions of the same rows: what `mxfp8 compare` works out.

Two questions, and the user says which one the files answer:

* Two trainings (the default). Their difference is held against its spread over seeds, the gaps of placebo files, and
  the noise of rows, as in the A/B check.
* One set of weights served in two precisions (`same_weights`). There is no training noise: gates on the logits apply,
  and the row noise alone tells whether cross entropy moved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mxfp8_recipe.ab.compare_files import CompareError
from mxfp8_recipe.ab.compare_rows import Aligned
from mxfp8_recipe.ab.environment import command_line, describe
from mxfp8_recipe.ab.report import finite, verdict_row
from mxfp8_recipe.monitors import metrics
from mxfp8_recipe.monitors.bootstrap import BLOCKS, relative_calibration_gap, relative_ne_gap, row_noise
from mxfp8_recipe.monitors.entropy import EntropySums
from mxfp8_recipe.monitors.equivalence import TaskGaps, seed_interval
from mxfp8_recipe.monitors.records import TaskAgreement
from mxfp8_recipe.monitors.row_sums import RowSums, gaps_of
from mxfp8_recipe.monitors.shadow import _LogitErrors
from mxfp8_recipe.monitors.verdict import Decision, Evidence, Outcome, decide, decide_same_weights

CHUNK = 1 << 18
THREADS = 2
"""Files whose metrics are worked out at the same time; each takes 400 MB for 10,000,000 rows of one seed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked besides the files.

    Attributes:
        task: name of what the label is. budget: relative NE gap that would matter.
        same_weights: the files are one set of weights in two precisions.
        negative_sampling_rate: share of the negatives that the rows hold.
        looks: numbers of seeds at which these runs were compared before.
    """

    task: str = "label"
    budget: float = 0.001
    same_weights: bool = False
    negative_sampling_rate: float = 1.0
    looks: tuple[int, ...] = ()


@dataclass
class Run:
    """One file's predictions by seed: on the scale of all rows, and their sums."""

    path: Path
    sums: list[RowSums]
    metrics: list[dict[str, float]]
    curve: list[metrics.CalibrationBin]


def compare(rows: Aligned, options: Options) -> tuple[Decision, dict[str, Any]]:
    """The verdict and the report of a comparison; `rows.rows.others` are the candidate, then the placebos.

    Raises:
        CompareError: files that hold the same predictions where trainings of their own are expected.
    """
    _distinct(rows, options)
    weights = _corrected(rows, options.negative_sampling_rate)
    with ThreadPoolExecutor(THREADS) as pool:
        reference, candidate, *placebos = pool.map(
            lambda path, predictions, detail: _run(rows, Path(path), predictions, weights, detail=detail),
            rows.paths,
            [rows.rows.prediction, *rows.rows.others],
            [True, True, *[False] * (len(rows.paths) - 2)],
        )
    identical = np.array_equal(rows.rows.prediction, rows.rows.others[0])
    if options.same_weights:
        agreements = [_agreement(rows, where, weights, options.task) for where in rows.seeds.values()]
        changes = [change_of(a, b, options.task) for a, b in zip(reference.sums, candidate.sums)]
        decision = decide_same_weights(
            list(zip(rows.seeds, agreements)), changes, rows=reference.sums[0].rows, budget=options.budget
        )
    else:
        evidence = _evidence(rows, reference, candidate, placebos, options, identical)
        decision = decide(evidence, budget=options.budget)
    return decision, _report(rows, options, decision, [reference, candidate, *placebos])


def _distinct(rows: Aligned, options: Options) -> None:
    """One training under several names would show less spread than there is, and so would decide too much."""
    predictions = [rows.rows.prediction, *rows.rows.others]
    for path, placebo in zip(rows.paths[2:], predictions[2:]):
        for other, those in zip(rows.paths[:2], predictions[:2]):
            if np.array_equal(placebo, those):
                raise CompareError(
                    f"--placebo: {path}: got the predictions of {other}, row by row, expected those of a training of "
                    "its own; leave it out"
                )
    if options.same_weights:
        return
    for path, run in zip(rows.paths, predictions):
        seen: dict[bytes, str] = {}
        for seed, where in rows.seeds.items():
            values = run[where]
            twin = seen.setdefault(hashlib.sha256(np.ascontiguousarray(values).data).digest(), seed)
            if twin != seed and values.min() < values.max():
                raise CompareError(
                    f"{path}: column seed: got the same predictions for {twin} and {seed}, expected a training of its "
                    "own for each seed; leave one out"
                )


def _corrected(rows: Aligned, rate: float) -> np.ndarray | None:
    """Weights on the scale of all rows; predictions are shifted in place."""
    table = rows.rows
    if rate == 1.0:
        return table.weight
    label, given = torch.from_numpy(table.label), None if table.weight is None else torch.from_numpy(table.weight)

    def corrected(predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, w = metrics.correct_negative_sampling(torch.from_numpy(predictions), label, given, rate)
        return p.numpy(), w.numpy()

    table.prediction, weight = corrected(table.prediction)
    table.others = [corrected(p)[0] for p in table.others]
    return weight


def _run(rows: Aligned, path: Path, predictions: np.ndarray, weights: np.ndarray | None, *, detail: bool) -> Run:
    """Sums of every seed; metrics of each and the first seed's curve where they are shown."""
    run = Run(path, [], [], [])
    blocks = min(BLOCKS, *(where.stop - where.start for where in rows.seeds.values()))
    for where in rows.seeds.values():
        segments = None if rows.rows.segment is None else rows.rows.segment[where]
        weight = None if weights is None else weights[where]
        p, y = predictions[where], rows.rows.label[where]
        run.sums.append(RowSums.of(p, y, weight, segments, blocks=blocks))
        if detail:
            columns = [t if t is None else torch.from_numpy(t) for t in (p, y, weight)]
            order = columns[0].argsort(stable=True)  # type: ignore[union-attr]
            sums = EntropySums.unstack(torch.from_numpy(run.sums[-1].blocks.sum(0)))
            run.metrics.append(
                {
                    "ne": float(sums.normalized_entropy),
                    "calibration": float(sums.calibration),
                    "ne_calibration_free": float(sums.calibration_free_ne),
                    "log_loss": float(sums.log_loss),
                    "auc": float(metrics.auc(*columns, order=order)),  # type: ignore[arg-type]
                    "ece": float(metrics.expected_calibration_error(*columns, order=order)),  # type: ignore[arg-type]
                }
            )
            if not run.curve:
                run.curve = metrics.calibration_curve(*columns, bins=12, order=order)  # type: ignore[arg-type]
    return run


def _evidence(
    rows: Aligned, reference: Run, candidate: Run, placebos: Sequence[Run], options: Options, identical: bool
) -> Evidence:
    """Two trainings a seed, and the gaps of placebos against the same references."""
    segments = [
        _gaps(options.task, reference, candidate, placebos, segment=code, label=f"segment {rows.segments[code]}")
        for code in reference.sums[0].segments
        if all(code in s.segments for s in reference.sums)
    ]
    return Evidence(
        gaps=(_gaps(options.task, reference, candidate, placebos),),
        same_weights=(),
        rows=reference.sums[0].rows,
        segments=tuple(segments),
        small_segments=reference.sums[0].small + len(reference.sums[0].segments) - len(segments),
        looks=options.looks,
        twins_only=True,
        identical=identical,
        identity=identical,
    )


def _gaps(
    task: str, reference: Run, candidate: Run, placebos: Sequence[Run], *, segment: int | None = None, label: str = ""
) -> TaskGaps:
    def blocks(run: Run) -> list[np.ndarray]:
        return [s.blocks if segment is None else s.segments[segment].blocks for s in run.sums]

    base = blocks(reference)
    harmless = {
        f"placebo {i}": [float(relative_ne_gap(a.sum(0), b.sum(0))) for a, b in zip(base, blocks(placebo))]
        for i, placebo in enumerate(placebos, 1)
    }
    sums = reference.sums[0]
    rows = sums.rows if segment is None else sums.segments[segment].rows
    return gaps_of(task, base, blocks(candidate), harmless, segment=label, rows=rows)


def change_of(reference: RowSums, candidate: RowSums, task: str) -> tuple[TaskGaps, float]:
    """One seed's gap and its standard error over rows, for `decide_same_weights`."""
    gaps = gaps_of(task, [reference.blocks], [candidate.blocks], {}, rows=reference.rows)
    return gaps, math.sqrt(gaps.shared_row_variance)


def _agreement(rows: Aligned, where: slice, weights: np.ndarray | None, task: str) -> TaskAgreement:
    """Logit errors of one seed, some rows at a time."""
    errors = _LogitErrors(task)
    for start in range(where.start, where.stop, CHUNK):
        part = slice(start, min(start + CHUNK, where.stop))
        pair = [torch.from_numpy(p[part]).clamp(metrics.EPSILON, 1 - metrics.EPSILON).logit()
                for p in (rows.rows.prediction, rows.rows.others[0])]  # fmt: skip
        label = torch.from_numpy(rows.rows.label[part])
        weight = torch.ones_like(label) if weights is None else torch.from_numpy(weights[part])
        segments = None if rows.rows.segment is None else torch.from_numpy(rows.rows.segment[part])
        errors.add(torch.stack([*pair, pair[0]]), label, weight, segments)
    found = errors.record()
    shifts = [
        s if s.segment is None else s.model_copy(update={"segment": rows.segments[int(s.segment)]})
        for s in found.segments
    ]
    return found.model_copy(update={"segments": tuple(shifts)})


def _report(rows: Aligned, options: Options, decision: Decision, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything the comparison has to say; NaN and infinity are None."""
    reference, candidate, *placebos = runs
    return finite(
        {
            "verdict": decision.outcome.value,
            "headline": headline(decision.outcome, candidate.path.name, reference.path.name),
            "reasons": decision.reasons,
            "decided": decision.decided,
            "undecided": decision.undecided,
            "budget": decision.budget,
            "gates": [vars(g) for g in decision.gates],
            "task": options.task,
            "same_weights": options.same_weights,
            "seeds": list(rows.seeds),
            "rows": [s.rows for s in reference.sums],
            "files": {"A": str(reference.path), "B": str(candidate.path), "placebos": [str(p.path) for p in placebos]},
            "metrics": {name: _mean(run.metrics) for name, run in (("A", reference), ("B", candidate))},
            "gap": [verdict_row(t) for t in decision.tasks],
            "segments": [verdict_row(t) for t in decision.segments],
            "calibration_gap": _calibration(reference, candidate, options.looks),
            "placebo_gaps": [
                [float(relative_ne_gap(a.blocks.sum(0), b.blocks.sum(0))) for a, b in zip(reference.sums, p.sums)]
                for p in placebos
            ],
            "row_noise": _row_noise(reference, candidate),
            "power": vars(decision.power),
            "curves": {"A": [vars(b) for b in reference.curve], "B": [vars(b) for b in candidate.curve]},
            "mismatches": rows.notes,
            "environment": {k: v for k, v in describe("cpu", torch.get_num_threads()).items() if k != "BF16 products"},
            "command": command_line(),
        }
    )


def headline(outcome: Outcome, candidate: str, reference: str) -> str:
    """The verdict in one sentence."""
    return {
        Outcome.PASS: f"Pass: {candidate} has the NE of {reference} to within the budget.",
        Outcome.FAIL: f"Fail: {candidate} is not within what this check allows of {reference}.",
        Outcome.INCONCLUSIVE: f"Inconclusive: these rows and seeds cannot tell whether {candidate} is as good as "
        f"{reference}.",
    }[outcome]


def _mean(metrics_of: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: math.fsum(m[name] for m in metrics_of) / len(metrics_of) for name in metrics_of[0]}


def _calibration(reference: Run, candidate: Run, looks: Sequence[int]) -> dict[str, Any]:
    """Relative change of calibration with its interval over seeds; told, not judged."""
    gaps = tuple(
        float(relative_calibration_gap(a.blocks.sum(0), b.blocks.sum(0)))
        for a, b in zip(reference.sums, candidate.sums)
    )
    interval = seed_interval(TaskGaps(task="", mxfp8=gaps), looks)
    return {"per_seed": gaps, "mean": interval.mean, "interval": [interval.low, interval.high]}


def _row_noise(reference: Run, candidate: Run) -> dict[str, float]:
    """Standard errors of the NE gap over rows, by paired block bootstrap."""
    noise = row_noise(np.stack([s.blocks for s in reference.sums]), np.stack([s.blocks for s in candidate.sums]))
    return {"one_seed": math.sqrt(noise.single), "shared_by_seeds": math.sqrt(noise.shared)}
