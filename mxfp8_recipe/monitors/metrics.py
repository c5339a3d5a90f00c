"""The metrics as `torchmetrics.Metric` classes, which sync across ranks and sit in Lightning; functions re-exported.

| function | class | | needs |
|---|---|---|---|
| `normalized_entropy` | `NormalizedEntropy` | `SegmentedNE` | four sums |
| `calibration` | `Calibration` | `SegmentedCalibration` | four sums |
| `calibration_free_ne` | `CalibrationFreeNE` | `SegmentedCalibrationFreeNE` | four sums |
| `log_loss` | `LogLoss` | `SegmentedLogLoss` | four sums |
| `field_rce` | | `FieldRCE` | four sums for each value of the field |
| `auc` | `AUC` | | every row |
| `expected_calibration_error` | `ECE` | | every row |

All take predictions (probabilities), labels and weights of shape (N,) or (N, num_tasks), over every row seen or over a
window of the most recent ones, corrected for negative sampling where asked. `entropy`, `ranking` and
`calibration_error` hold the definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from torchmetrics import Metric
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ModuleNotFoundError(
        'mxfp8_recipe.monitors.metrics needs torchmetrics: pip install "mxfp8-recipe[ab]"', name="torchmetrics"
    ) from error

from mxfp8_recipe.monitors.calibration_error import (
    CalibrationBin,
    calibration_curve,
    check_field,
    expected_calibration_error,
    field_rce,
    field_rce_of,
    sums_by_value,
)
from mxfp8_recipe.monitors.entropy import (
    EPSILON,
    EntropySums,
    calibration,
    calibration_free_ne,
    check_rows,
    correct_negative_sampling,
    log_loss,
    normalized_entropy,
)
from mxfp8_recipe.monitors.ranking import auc

__all__ = [
    "AUC",
    "DEFAULT_WINDOW_ROWS",
    "ECE",
    "EPSILON",
    "Calibration",
    "CalibrationBin",
    "CalibrationFreeNE",
    "EntropySums",
    "FieldRCE",
    "LogLoss",
    "NormalizedEntropy",
    "SegmentedAUC",
    "SegmentedCalibration",
    "SegmentedCalibrationFreeNE",
    "SegmentedECE",
    "SegmentedLogLoss",
    "SegmentedNE",
    "auc",
    "calibration",
    "calibration_curve",
    "calibration_free_ne",
    "check_rows",
    "correct_negative_sampling",
    "expected_calibration_error",
    "field_rce",
    "log_loss",
    "normalized_entropy",
]

DEFAULT_WINDOW_ROWS = 10_000_000


class _Windowed(Metric):
    """Checks and corrects rows; keeps one tensor a batch, of the most recent batches or of all of them.

    Args:
        num_tasks: T of predictions (N, T); 1 takes (N,) too.
        window_rows: rows over all ranks that the window holds, in whole batches; None for lifetime.
        negative_sampling_rate: share of the negatives that the rows hold, one for all tasks or one a task; see
            `correct_negative_sampling`.
        **kwargs: of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False
    window_rows: int | None

    def __init__(
        self,
        num_tasks: int = 1,
        *,
        window_rows: int | None = None,
        negative_sampling_rate: float | Sequence[float] = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_tasks < 1 or (window_rows is not None and window_rows < 1):
            raise ValueError(f"num_tasks={num_tasks} and window_rows={window_rows} must be at least 1")
        rates = [negative_sampling_rate] if isinstance(negative_sampling_rate, int | float) else negative_sampling_rate
        if len(rates) not in (1, num_tasks) or not all(0 < r <= 1 for r in rates):
            raise ValueError(
                f"negative_sampling_rate: got {negative_sampling_rate}, expected 1 or {num_tasks} rates inside (0, 1]"
            )
        self.num_tasks = num_tasks
        self.window_rows = window_rows
        self.sampling_rates = tuple(rates)
        self.kept: Any
        self.rows: Any

    def _keep_batches(self, *shape: int) -> None:
        """Two list states: what each batch leaves, of `shape` but for its first dimension, and its row count."""
        self.kept_shape = shape
        self.add_state("kept", [], dist_reduce_fx="cat")
        self.add_state("rows", [], dist_reduce_fx="cat")

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """As torchmetrics does it; a rank that has seen no batch takes part with zero rows."""
        if isinstance(getattr(self, "kept", None), list) and not self.kept:
            self.kept.append(self._nothing())
            self.rows.append(torch.zeros(1, dtype=torch.int64, device=self.device))
        super().sync(*args, **kwargs)

    def _nothing(self) -> Tensor:
        return torch.zeros(0, *self.kept_shape, dtype=torch.float64, device=self.device)

    def _append(self, batch: Tensor, rows: int) -> None:
        self.kept.append(batch)
        self.rows.append(torch.tensor([rows], device=batch.device))
        self._trim()

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        """What `forward` and `merge_state` do with the earlier state; the window holds here too."""
        super()._reduce_states(incoming_state)
        if isinstance(getattr(self, "kept", None), list):
            self._trim()

    def _trim(self) -> None:
        """Drop the oldest batches that the window does not need."""
        if self.window_rows is None:
            return
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        while len(self.rows) > 1 and int(torch.cat(self.rows[1:]).sum()) >= -(-self.window_rows // world):
            self.kept.pop(0)
            self.rows.pop(0)

    def _all_kept(self) -> Tensor:
        """Kept batches in one tensor."""
        return self.kept if isinstance(self.kept, Tensor) else torch.cat([self._nothing(), *self.kept])

    def _prepared(self, predictions: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Checked and corrected columns (N, T), fp64."""
        p, y = self._columns(predictions), self._columns(labels)
        w = torch.ones_like(p) if weights is None else self._columns(weights)
        check_rows(p, y, w)
        if any(r != 1 for r in self.sampling_rates):
            p, w = correct_negative_sampling(p, y, w, self.sampling_rates)
        return p.detach().double(), y.detach().double(), w.detach().double()

    def _columns(self, tensor: Tensor) -> Tensor:
        shaped = tensor.unsqueeze(1) if tensor.ndim == 1 else tensor
        if shaped.ndim != 2 or shaped.shape[1] != self.num_tasks:
            raise ValueError(f"got shape {tuple(tensor.shape)}, expected (N, {self.num_tasks})")
        return shaped

    def _squeezed(self, value: Tensor) -> Tensor:
        return value.squeeze(0) if self.num_tasks == 1 else value


class _EntropyMetric(_Windowed):
    """A metric over `EntropySums`; four numbers a task, times the batches of a window. Arguments of `_Windowed`."""

    def __init__(self, num_tasks: int = 1, *, window_rows: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_tasks, window_rows=window_rows, **kwargs)
        self.sums: Any
        if window_rows is None:
            self.add_state("sums", torch.zeros(1, 4, num_tasks, dtype=torch.float64), dist_reduce_fx="sum")
        else:
            self._keep_batches(4, num_tasks)

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; (N, num_tasks), or (N,) when num_tasks is 1."""
        batch = EntropySums.of(*self._prepared(predictions, labels, weights)).stack().unsqueeze(0)
        if self.window_rows is None:
            self.sums = self.sums + batch
        else:
            self._append(batch, len(predictions))

    def compute(self) -> Tensor:
        """The metric of each task: (num_tasks,), or () when num_tasks is 1."""
        sums = self.sums if self.window_rows is None else self._all_kept()
        return self._squeezed(self._value(EntropySums.unstack(sums.sum(0))))

    def _value(self, sums: EntropySums) -> Tensor:
        raise NotImplementedError


class NormalizedEntropy(_EntropyMetric):
    """Streaming `normalized_entropy`; pass `window_rows=DEFAULT_WINDOW_ROWS` for the windowed one."""

    higher_is_better = False

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.normalized_entropy


class CalibrationFreeNE(_EntropyMetric):
    """Streaming `calibration_free_ne`."""

    higher_is_better = False

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.calibration_free_ne


class Calibration(_EntropyMetric):
    """Streaming `calibration`."""

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.calibration


class LogLoss(_EntropyMetric):
    """Streaming `log_loss`."""

    higher_is_better = False

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.log_loss


class _RowsMetric(_Windowed):
    """A metric of every row seen, or of the rows of a window: 24 bytes a row and task. Arguments of `_Windowed`."""

    def __init__(self, num_tasks: int = 1, **kwargs: Any) -> None:
        super().__init__(num_tasks, **kwargs)
        self._keep_batches(3, num_tasks)

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; (N, num_tasks), or (N,) when num_tasks is 1."""
        self._append(torch.stack(self._prepared(predictions, labels, weights), dim=1), len(predictions))

    def compute(self) -> Tensor:
        """(num_tasks,), or () when num_tasks is 1; NaN before the first row."""
        rows = self._all_kept()
        return self._squeezed(self._value(rows[:, 0], rows[:, 1], rows[:, 2]))

    def _value(self, p: Tensor, y: Tensor, w: Tensor) -> Tensor:
        raise NotImplementedError


class _AUC(_Windowed):
    higher_is_better = True

    def _value(self, p: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return auc(p, y, w)


class _ECE(_Windowed):
    higher_is_better = False

    def __init__(self, num_tasks: int = 1, *, bins: int = 100, **kwargs: Any) -> None:
        super().__init__(num_tasks, **kwargs)
        if bins < 1:
            raise ValueError(f"bins: got {bins}, expected at least 1")
        self.bins = bins

    def _value(self, p: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return expected_calibration_error(p, y, w, bins=self.bins)


class AUC(_AUC, _RowsMetric):
    """Exact streaming `auc`."""


class ECE(_ECE, _RowsMetric):
    """Exact streaming `expected_calibration_error` in `bins` bins of equal count."""


class _SegmentedMetric(_Windowed):
    """A metric over `EntropySums` of each segment. Arguments of `_Windowed`.

    Kept: five numbers for each segment and task; times the batches of a window.
    """

    def __init__(self, num_tasks: int = 1, **kwargs: Any) -> None:
        super().__init__(num_tasks, **kwargs)
        self._keep_batches(5, num_tasks)

    def update(self, predictions: Tensor, labels: Tensor, segments: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; predictions as for the other metrics, `segments` (N,) integers."""
        p, y, w = self._prepared(predictions, labels, weights)
        values, sums = sums_by_value(p, y, segments, w)
        self._append(_with_values(values, sums), len(predictions))

    def _trim(self) -> None:
        """Without a window, one tensor for all batches."""
        super()._trim()
        if self.window_rows is None and len(self.kept) > 1:
            self.kept[:] = [_with_values(*self._merged())]
            self.rows[:] = [torch.cat(self.rows).sum(0, keepdim=True)]

    def _merged(self) -> tuple[Tensor, Tensor]:
        """Segments (S,) and their sums (S, 4, T) over everything kept."""
        kept = self._all_kept()
        values, index = kept[:, 0, 0].unique(sorted=True, return_inverse=True)
        sums = kept.new_zeros(len(values), 4, self.num_tasks).index_add_(0, index, kept[:, 1:])
        return values.long(), sums


def _with_values(values: Tensor, sums: Tensor) -> Tensor:
    """(S, 5, T): the value as a double, exact below 2^53, then the sums."""
    return torch.cat([values.double()[:, None, None].expand(-1, 1, sums.shape[2]), sums], dim=1)


class _SegmentedEntropy(_SegmentedMetric):
    def compute(self) -> dict[int, Tensor]:
        """The metric of each segment seen: (num_tasks,), or () when num_tasks is 1."""
        values, sums = self._merged()
        return {
            segment: self._squeezed(self._value(EntropySums.unstack(of_segment)))
            for segment, of_segment in zip(values.tolist(), sums, strict=True)
        }

    def _value(self, sums: EntropySums) -> Tensor:
        raise NotImplementedError


class SegmentedNE(_SegmentedEntropy):
    """Streaming `normalized_entropy` of each segment, against the segment's own base rate."""

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.normalized_entropy


class SegmentedCalibration(_SegmentedEntropy):
    """Streaming `calibration` of each segment."""

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.calibration


class SegmentedCalibrationFreeNE(_SegmentedEntropy):
    """Streaming `calibration_free_ne` of each segment."""

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.calibration_free_ne


class SegmentedLogLoss(_SegmentedEntropy):
    """Streaming `log_loss` of each segment."""

    def _value(self, sums: EntropySums) -> Tensor:
        return sums.log_loss


class _SegmentedRows(_Windowed):
    """A metric of each segment's rows: 32 bytes a row and task. Arguments of `_Windowed`."""

    def __init__(self, num_tasks: int = 1, **kwargs: Any) -> None:
        super().__init__(num_tasks, **kwargs)
        self._keep_batches(4, num_tasks)

    def update(self, predictions: Tensor, labels: Tensor, segments: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; predictions as for the other metrics, `segments` (N,) integers."""
        p, y, w = self._prepared(predictions, labels, weights)
        values = check_field(segments, p).double()[:, None].expand_as(p)
        self._append(torch.stack((p, y, w, values), dim=1), len(predictions))

    def compute(self) -> dict[int, Tensor]:
        """The metric of each segment seen: (num_tasks,), or () when num_tasks is 1."""
        rows = self._all_kept()
        values, index, counts = rows[:, 3, 0].unique(sorted=True, return_inverse=True, return_counts=True)
        parts = rows[index.argsort(stable=True)].split(counts.tolist())
        return {
            int(value): self._squeezed(self._value(part[:, 0], part[:, 1], part[:, 2]))
            for value, part in zip(values.tolist(), parts)
        }

    def _value(self, p: Tensor, y: Tensor, w: Tensor) -> Tensor:
        raise NotImplementedError


class SegmentedAUC(_AUC, _SegmentedRows):
    """Exact streaming `auc` of each segment."""


class SegmentedECE(_ECE, _SegmentedRows):
    """Exact streaming `expected_calibration_error` of each segment, in `bins` bins of equal count."""


class FieldRCE(_SegmentedMetric):
    """Streaming `field_rce`; pass the field's values as `segments`."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """(num_tasks,), or () when num_tasks is 1; NaN before the first row."""
        return self._squeezed(field_rce_of(self._merged()[1]))
