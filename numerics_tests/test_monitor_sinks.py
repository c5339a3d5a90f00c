"""Sinks hold what the report says, and none of them can stop a training."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import JSONLSink, LiveTable, MonitorReport, NumericsMonitor, Sink, TensorBoardSink
from mxfp8_recipe.monitors.live.sinks import scalars
from numerics_tests.monitor_models import Ranker, loss_of, rows


def run(sinks: list[Sink], steps: int = 4) -> list[MonitorReport]:
    torch.manual_seed(0)
    model, reports = Ranker(), []
    apply_recipe(model, example_inputs=rows(0)[0])
    with NumericsMonitor(model, every=2, sinks=sinks, tasks=["ctr"]) as monitor:
        for step in range(steps):
            x, y = rows(step)
            logits = model(x)
            loss_of(logits, y).backward()
            report = monitor.step(logits, y)
            reports += [report] if report is not None else []
    return reports


def test_jsonl_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "reports.jsonl"
    reports = run([JSONLSink(path)])
    lines = path.read_text().splitlines()
    assert [MonitorReport.model_validate_json(line) for line in lines] == reports
    assert json.loads(lines[1])["predictions"][0]["task"] == "ctr"


def test_tensorboard_event_file_is_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reports = run([TensorBoardSink(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    read = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for tag in (
        "second/input/sqnr_db",
        "last/grad_output/amax",
        "first/gemm_sqnr_db/wgrad",
        "predictions/ctr/logit_rms",
    ):
        expected = [(report.step, dict(scalars(report))[tag]) for report in reports]
        assert read[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
        assert all(value > 0 for _, value in read[tag])
    assert {tag for report in reports for tag, _ in scalars(report)} == read.keys()


def test_live_table_shows_predictions_and_the_worst_layers() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    run([LiveTable(console)])
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for text in ("step 2", "ctr", "grad_output", "RMS", "lowest SQNR"):
        assert text in shown


class Failing:
    """Breaks on its second report."""

    def __init__(self, on_close: bool = False) -> None:
        self.written, self.on_close = 0, on_close

    def write(self, report: MonitorReport) -> None:
        self.written += 1
        if self.written > 1 and not self.on_close:
            raise OSError("disk full")

    def close(self) -> None:
        if self.on_close:
            raise RuntimeError("gone")


def test_a_failing_sink_never_stops_training(tmp_path: Path) -> None:
    failing, path = Failing(), tmp_path / "r.jsonl"
    with pytest.warns(UserWarning, match="sink Failing failed with OSError: disk full") as caught:
        reports = run([failing, JSONLSink(path)], steps=8)
    assert len([w for w in caught if "disk full" in str(w.message)]) == 1
    assert (len(reports), failing.written) == (4, 2)
    assert len(path.read_text().splitlines()) == 4
    with pytest.warns(UserWarning, match="gone"):
        run([Failing(on_close=True)])
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="JSONLSink failed"):
        run([JSONLSink(tmp_path / "file" / "r.jsonl")])


def test_tensorboard_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"mxfp8-recipe\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_quiet_runs_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([])


def test_the_example_finds_its_outlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import monitor as example

    monkeypatch.setattr(sys, "argv", ["monitor", "--out", str(tmp_path / "r.jsonl")])
    with pytest.warns(UserWarning, match=r"second: input: its amax"):
        example.main()
    assert "'second': 'bf16'" in capsys.readouterr().out
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    first = next(a for line in lines for a in MonitorReport.model_validate_json(line).alarms)
    assert (first.layer, first.tensor) == ("second", "input")
    assert first.step > example.PLANTED
