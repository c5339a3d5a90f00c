"""`mxfp8 bench`: which script it runs, what it writes where, and what it says when it can't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from mxfp8_recipe import bench
from mxfp8_recipe.cli import UsageError, app


def commands_of(*arguments: str, codes: tuple[int, ...] = ()) -> tuple[list[list[str]], int]:
    """Command lines that a call would run on a GPU, and its exit code."""
    ran: list[list[str]] = []

    def run(command: list[str], **unused: Any) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=codes[len(ran) - 1] if codes else 0)

    with mock.patch.object(torch.cuda, "is_available", return_value=True), mock.patch.object(subprocess, "run", run):
        result = CliRunner().invoke(app, ["bench", *arguments])
    return ran, result.exit_code


def test_every_bench_is_known_to_its_script() -> None:
    for name, (script, *arguments) in bench.SCRIPTS.items():
        command = [sys.executable, str(bench.FOLDER / script), *arguments, "--help"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert "--out" in found.stdout, name
        assert "--commit" in found.stdout, name


def test_runs_one_or_all(tmp_path: Path) -> None:
    out = str(tmp_path / "rows.jsonl")
    ran, code = commands_of("linear", "--out", out, "--commit", "abc")
    assert code == 0
    assert ran == [[sys.executable, str(bench.FOLDER / "bench_linear.py"), "linear", "--out", out, "--commit", "abc"]]
    ran, code = commands_of()
    assert code == 0
    assert len(ran) == len(bench.SCRIPTS)


def test_stops_at_the_first_that_fails() -> None:
    ran, code = commands_of(codes=(0, 3))
    assert len(ran) == 2
    assert code == 3


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = CliRunner()
    unknown = runner.invoke(app, ["bench", "speed"]).exception
    assert isinstance(unknown, UsageError)
    assert "'speed'" in str(unknown)
    assert "quantize" in str(unknown)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in str(runner.invoke(app, ["bench"]).exception)
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "nowhere")
    assert "clone" in str(runner.invoke(app, ["bench"]).exception)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip()[0].isdigit()
