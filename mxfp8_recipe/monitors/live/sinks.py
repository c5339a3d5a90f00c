"""Where reports go: a JSONL file, TensorBoard, a live table. A sink that fails is dropped with a warning, no more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mxfp8_recipe.monitors.live.records import MonitorReport


class Sink(Protocol):
    """Takes reports. On several ranks only rank 0's sinks are given any."""

    def write(self, report: MonitorReport) -> None:
        """Take one report."""
        ...

    def close(self) -> None:
        """Finish: no report follows."""
        ...


class JSONLSink:
    """One JSON object a report, appended to `path`; NaN and infinity as Python's `json` reads them.

    `MonitorReport.model_validate_json` reads a line back.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def write(self, report: MonitorReport) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(report.model_dump_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardSink:
    """Scalars under `layer/tensor/figure` and `predictions/task/figure`, alarms as text, into `log_dir`.

    Raises:
        ModuleNotFoundError: on construction, without tensorboard.
    """

    def __init__(self, log_dir: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                'TensorBoardSink needs tensorboard: pip install "mxfp8-recipe[tensorboard]"', name="tensorboard"
            ) from error
        self.log_dir, self._open, self._writer = str(log_dir), SummaryWriter, None

    def write(self, report: MonitorReport) -> None:
        if self._writer is None:  # not before: ranks whose sinks are given nothing leave no empty files
            self._writer = self._open(self.log_dir)
        for tag, value in scalars(report):
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, report.step)
        for alarm in report.alarms:
            self._writer.add_text("alarms", alarm.message, report.step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(report: MonitorReport) -> Iterator[tuple[str, float]]:
    """Every figure of a report that is a number, by tag."""
    for layer in report.layers:
        name = layer.layer or "root"
        for tensor, statistics in layer.tensors.items():
            yield from _numbers(f"{name}/{tensor}", statistics.model_dump())
        yield from _numbers(f"{name}/gemm_sqnr_db", layer.gemm_sqnr_db)
    for task in report.predictions:
        yield from _numbers(f"predictions/{task.task}", task.model_dump(exclude={"task"}))
    yield from _numbers("gradient_cosine", report.gradient_cosine)
    yield "monitor/active_alarms", float(len(report.active))
    yield "monitor/seconds", report.seconds


def _numbers(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


class LiveTable:
    """A table in the terminal that each report redraws: predictions, the layers with the lowest SQNR, alarms.

    In a log file, one table a report.

    Args:
        console: where; default the standard error. layers: how many rows.
    """

    def __init__(self, console: Console | None = None, layers: int = 12) -> None:
        self.console, self.layers = console or Console(stderr=True), layers
        self._live: Live | None = None

    def write(self, report: MonitorReport) -> None:
        if not self.console.is_terminal:
            self.console.print(render(report, self.layers))
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(render(report, self.layers), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def render(report: MonitorReport, layers: int = 12) -> Group:
    """A report as the live table shows it."""
    parts: list[Any] = [_predictions(report), _layers(report, layers)]
    parts += [Text(f"alarm: {line}", style="red") for line in report.active]
    parts += [Text(f"in BF16: {layer or '(root)'}: {why}", style="yellow") for layer, why in report.demoted.items()]
    parts += [Text(note, style="dim") for note in report.notes]
    return Group(*parts)


def _predictions(report: MonitorReport) -> Table:
    table = _table(f"step {report.step}: MXFP8 against its BF16 shadow", "task")
    for name in ("logit\nRMS", "logit\nmean", "dCE", "p\nratio", "NE", "shadow\nNE", "calib.", "shadow\ncalib."):
        table.add_column(name, justify="right", no_wrap=True)
    for t in report.predictions:
        figures = (f"{value:.3g}" for value in (t.logit_rms, t.logit_mean, t.cross_entropy))
        running = (
            t.calibration,
            t.mxfp8.normalized_entropy,
            t.shadow.normalized_entropy,
            t.mxfp8.calibration,
            t.shadow.calibration,
        )
        table.add_row(t.task, *figures, *(_short(value) for value in running))
    return table


def _layers(report: MonitorReport, most: int) -> Table:
    table = _table("tensors with the lowest SQNR", "layer", "tensor")
    for name in ("SQNR\ndB", "amax", "scales\n2^", "under-\nflow", "satu-\nration", "NaN/Inf\nblocks"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(layer.layer, name, t) for layer in report.layers for name, t in layer.tensors.items()]
    rows.sort(key=lambda row: (not row[2].nonfinite_blocks, row[2].sqnr_db is None, row[2].sqnr_db or 0.0))
    for layer, name, t in rows[:most]:
        scales = "-" if t.scale_min is None else f"{t.scale_min} .. {t.scale_max}"
        shares = (f"{t.underflow_frac:.2%}", f"{t.saturation_frac:.2%}", str(t.nonfinite_blocks))
        table.add_row(layer or "(root)", name, _short(t.sqnr_db), _short(t.amax), scales, *shares)
    return table


def _table(title: str, *names: str) -> Table:
    """With columns of names, which give way: no figure is cut or broken in 80 columns."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


class Sinks:
    """Several sinks, of which none stops the training."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            if not callable(getattr(sink, "write", None)):
                raise TypeError(f"sinks: got {type(sink).__name__}, expected objects with write(report) and close()")
        self._open = list(sinks)

    def write(self, report: MonitorReport) -> None:
        """Give a report to every sink; one that fails is given none any more."""
        for sink in list(self._open):
            try:
                sink.write(report)
            except Exception as error:
                self._open.remove(sink)
                self._warn(sink, error, "it gets no more reports")
                self._close(sink)

    def close(self) -> None:
        """Close every sink; one that is given a report again begins anew."""
        for sink in self._open:
            self._close(sink)

    def _close(self, sink: Sink) -> None:
        try:
            if callable(getattr(sink, "close", None)):
                sink.close()
        except Exception as error:
            self._warn(sink, error, "it may be incomplete")

    def _warn(self, sink: Sink, error: Exception, outcome: str) -> None:
        message = f"NumericsMonitor: sink {type(sink).__name__} failed with {type(error).__name__}: {error}; {outcome}"
        warnings.warn(f"{message}, the training goes on", stacklevel=4)
