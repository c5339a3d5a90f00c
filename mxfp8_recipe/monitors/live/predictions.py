"""Predictions of a model and of its BF16 shadow on the same rows: sums on the device, then running metrics.

Labels in [0, 1] of the logits' shape make each column a binary task. Integer labels with one dim less than the logits
make one task over classes (`IGNORED` labels take no part): its p is the probability of the predicted class and its y
whether that was right, so that calibration is confidence over accuracy. Rows of weight 0 take no part in a task: they
are padding, or have no label for it, and may hold any label or NaN.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_recipe.monitors.entropy import EPSILON, EntropySums
from mxfp8_recipe.monitors.live.records import RunningMetrics, ShadowAgreement

IGNORED = -100
"""The label `F.cross_entropy` ignores."""

MOST_LOGITS = 2**22
"""Logits over classes that are compared at a time."""

ROW_SUMS = ("rows", "error", "square", "weight", "gap", "gap_square", "invalid", "nonfinite")
SIDE_SUMS = ("cross_entropy", "positives", "negatives", "predicted", "entropy", "variance")
SUMS = (*ROW_SUMS, *(f"{side}_{name}" for side in ("mxfp8", "shadow") for name in SIDE_SUMS))
"""What is summed over rows, per task; beside it the largest absolute logit error. Rows where a model's logit is NaN or
infinite are counted as `nonfinite` and take no other part."""


@dataclass(frozen=True)
class _Side:
    """One model's predictions, all (N, T) fp64: CE, probability, whether positive, entropy."""

    cross_entropy: Tensor
    p: Tensor
    y: Tensor
    entropy: Tensor


def prediction_sums(logits: Tensor, shadow: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(len(SUMS), T)` sums and `(T,)` largest logit errors, fp64 on the device.

    Args:
        logits, shadow: of the two models, (B,), (B, T), or (..., C) for integer labels (...).
        labels: as the module says. weights: of the labels' shape, or (B,) for all T; None for 1.

    Raises:
        ValueError: shapes that do not fit.
    """
    if is_classes(logits, labels):
        return _classes(logits, shadow, labels, weights)
    if labels.numel() != logits.numel():
        raise ValueError(
            f"monitor.step: got logits {tuple(logits.shape)} and labels {tuple(labels.shape)}, expected one shape, or "
            "integer labels with one dim less"
        )
    columns = logits.shape[-1] if logits.dim() > 1 else 1
    both = torch.stack([x.detach().reshape(-1, columns).double() for x in (logits, shadow)])
    y = labels.detach().reshape(-1, columns).double()
    w = torch.ones_like(y) if weights is None else _weights(weights, y)
    taken = w != 0
    y = y.where(taken, 0.0)
    finite = both.isfinite().all(0) & taken
    p = both.nan_to_num(0.0).sigmoid()
    clamped = p.clamp(EPSILON, 1 - EPSILON)
    sides = [_Side(_cross_entropy(y, c), q, y, _cross_entropy(c, c)) for q, c in zip(p, clamped)]
    invalid = ~((y >= 0) & (y <= 1)) | ~((w >= 0) & w.isfinite())
    return _summed((both[0] - both[1]).where(finite, 0.0), w * finite, invalid, finite, taken & ~finite, *sides)


def _cross_entropy(y: Tensor, p: Tensor) -> Tensor:
    return -(y * p.log() + (1 - y) * torch.log1p(-p))


def logits_in(output: Any) -> Tensor:
    """A model's logits: its output, the output's `logits`, or its first tensor.

    Raises:
        TypeError: where there is none.
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    first = next((item for item in output if isinstance(item, Tensor)), None) if isinstance(output, tuple) else None
    if first is None:
        got = type(output).__name__
        raise TypeError(f"the model's output: got {got}, expected logits; say logits_of=lambda output: ...")
    return first


def is_classes(logits: Tensor, labels: Tensor) -> bool:
    """Whether labels are numbers of classes: (B,) for (B, 1) are one binary task."""
    whole = not labels.is_floating_point() and logits.dim() > 0
    return whole and labels.shape == logits.shape[:-1] and logits.shape[-1] != 1


def default_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Mean cross entropy of logits as `prediction_sums` reads them."""
    if is_classes(logits, labels):
        rows, y = logits.flatten(0, -2).float(), labels.flatten()
        if weights is None:
            return F.cross_entropy(rows, y, ignore_index=IGNORED)
        w = _weights(weights, y.float())
        losses = F.cross_entropy(rows, y.where(w != 0, IGNORED), ignore_index=IGNORED, reduction="none")
        return (losses * w).mean()
    y = labels.reshape(logits.shape).float()
    w = None if weights is None else _weights(weights, y).float()
    y = y if w is None else y.where(w != 0, 0.0)
    return F.binary_cross_entropy_with_logits(logits.float(), y, w)


def _weights(weights: Tensor, like: Tensor) -> Tensor:
    if weights.numel() not in (like.numel(), len(like)):
        got = f"got weights {tuple(weights.shape)} for {len(like)} rows of {like[0:1].numel()} labels"
        raise ValueError(f"monitor.step: {got}, expected one a label, or one a row")
    w = weights.detach().to(like.dtype)
    return w.reshape(like.shape) if w.numel() == like.numel() else w.reshape(-1, 1).expand_as(like)


def _classes(logits: Tensor, shadow: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Some rows at a time: in fp64 the logits over a vocabulary would outgrow the training."""
    y = labels.detach().flatten()
    w = torch.ones_like(y, dtype=torch.float64) if weights is None else _weights(weights, y.double()).flatten()
    parts = [x.detach().flatten(0, -2) for x in (logits, shadow)]
    rows = max(MOST_LOGITS // logits.shape[-1], 1)
    pieces = [_some_classes(*piece) for piece in zip(*(x.split(rows) for x in (*parts, y, w)))]
    sums, largest = zip(*pieces)
    return torch.stack(sums).sum(0), torch.stack(largest).amax(0)


def _some_classes(logits: Tensor, shadow: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    classes = logits.shape[-1]
    w = torch.where(y != IGNORED, w, 0.0).unsqueeze(1)
    taken, y = w != 0, y.unsqueeze(1)
    target = y.clamp(0, classes - 1)
    both = torch.stack([logits.double(), shadow.double()])
    finite = both.isfinite().all(0).all(-1, keepdim=True) & taken
    sides = []
    for log_p in both.where(finite, 0.0).log_softmax(-1):
        top = log_p.max(-1, keepdim=True)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        sides.append(_Side(-log_p.gather(1, target), top.values.exp(), (top.indices == target).double(), entropy))
    error = (both[0] - both[1]).where(finite, 0.0)
    invalid = (target != y) & taken | ~((w >= 0) & w.isfinite())
    sums, largest = _summed(error.mean(-1, keepdim=True), w * finite, invalid, finite, taken & ~finite, *sides)
    sums[ROW_SUMS.index("square")] = error.square().mean(-1, keepdim=True).sum(0)
    return sums, error.abs().amax().reshape(1) if error.numel() else largest


def _summed(
    error: Tensor, w: Tensor, invalid: Tensor, seen: Tensor, nonfinite: Tensor, mxfp8: _Side, shadow: _Side
) -> tuple[Tensor, Tensor]:
    gap = w * (mxfp8.cross_entropy - shadow.cross_entropy)
    counts = invalid.double(), nonfinite.double()
    columns = [seen.double(), error, error.square(), w, gap, gap.square(), *counts]
    for side in (mxfp8, shadow):
        columns += [
            w * side.cross_entropy,
            w * side.y,
            w * (1 - side.y),
            w * side.p,
            w * side.entropy,
            w.square() * side.p * (1 - side.p),
        ]
    largest = error.abs().amax(0) if len(error) else error.new_zeros(error.shape[1])
    return torch.stack([column.sum(0) for column in columns]), largest


class RunningPredictions:
    """Running metrics of one task, from the sums of each report.

    Args:
        task: its name. window: reports that the windowed metrics look back. classes: how many, 0 for a binary task.
    """

    def __init__(self, task: str, window: int, classes: int) -> None:
        self.task, self.classes = task, classes
        self.total = torch.zeros(len(SUMS), dtype=torch.float64)
        self.recent: deque[Tensor] = deque(maxlen=window)

    def add(self, sums: Tensor, largest: float) -> ShadowAgreement:
        """Add the sums of one report, (len(SUMS),) on the CPU; what it and those before show."""
        self.total = self.total + sums
        self.recent.append(sums)
        s = dict(zip(SUMS, sums.tolist()))
        rows, weight = max(s["rows"], 1.0), s["weight"] or math.nan
        return ShadowAgreement(
            task=self.task,
            rows=int(s["rows"]),
            logit_rms=math.sqrt(s["square"] / rows) if not math.isnan(s["square"]) else math.nan,
            logit_mean=s["error"] / rows,
            logit_max=largest,
            cross_entropy=s["gap"] / weight,
            cross_entropy_error=_paired_error(s),
            calibration=s["mxfp8_predicted"] / s["shadow_predicted"] if s["shadow_predicted"] else None,
            entropy=s["mxfp8_entropy"] / weight,
            shadow_entropy=s["shadow_entropy"] / weight,
            mxfp8=self._metrics("mxfp8", self.total),
            shadow=self._metrics("shadow", self.total),
            mxfp8_window=self._metrics("mxfp8", self.window),
            shadow_window=self._metrics("shadow", self.window),
        )

    @property
    def window(self) -> Tensor:
        """Sums over the window."""
        return torch.stack(list(self.recent)).sum(0)

    def window_sums(self) -> dict[str, float]:
        """`SUMS` over the window, by name."""
        return dict(zip(SUMS, self.window.tolist()))

    def _metrics(self, side: str, sums: Tensor) -> RunningMetrics:
        values = {name: sums[SUMS.index(f"{side}_{name}")] for name in SIDE_SUMS}
        found = EntropySums(*(values[name] for name in ("cross_entropy", "positives", "negatives", "predicted")))
        normalized = None if self.classes else _number(found.normalized_entropy)
        return RunningMetrics(
            normalized_entropy=normalized,
            calibration=_number(found.calibration),
            log_loss=_number(found.log_loss),
        )


def _paired_error(s: dict[str, float]) -> float:
    """Standard error of the weighted mean CE difference, rows independent."""
    rows, weight = s["rows"], s["weight"]
    if rows < 2 or not weight:
        return math.nan
    return math.sqrt(max(s["gap_square"] - s["gap"] ** 2 / rows, 0.0)) / weight


def _number(value: Tensor) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number


class PredictionTracker:
    """Running metrics of every task of one model.

    Args:
        tasks: names of the columns, or None for their numbers. window: as `RunningPredictions` has it.
    """

    def __init__(self, tasks: Sequence[str] | None, window: int) -> None:
        self.tasks, self.window = tasks, window
        self.running: list[RunningPredictions] = []

    def add(self, sums: Tensor, largest: Tensor, classes: int) -> tuple[ShadowAgreement, ...]:
        """What one report's (len(SUMS), T) sums and (T,) largest errors show, on the CPU.

        Raises:
            ValueError: labels outside [0, 1], weights below 0, or other than the named tasks.
        """
        count = sums.shape[1]
        invalid = int(sums[ROW_SUMS.index("invalid")].sum())
        if invalid:
            raise ValueError(
                f"monitor.step: got {invalid} labels outside [0, 1] or of no class, or weights negative or not finite; "
                "expected probabilities of a positive, and weights of at least 0, 0 where there is no label"
            )
        if self.tasks is not None and len(self.tasks) != count:
            raise ValueError(f"tasks: got {len(self.tasks)} names for logits with {count} columns")
        if len(self.running) != count:
            names = self.tasks or [str(i) for i in range(count)]
            self.running = [RunningPredictions(name, self.window, classes) for name in names]
        return tuple(r.add(s, float(m)) for r, s, m in zip(self.running, sums.unbind(1), largest))
