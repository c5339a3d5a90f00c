"""Kernels compile for GPUs that are not here, without spills: a sample; `compile_only.py` does every launch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from numerics_tests.helpers import environment_of_tests

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("capability", ["90", "100"])
@pytest.mark.parametrize(
    "name", ["quantize 1x128 both 512", "norm rms 32x32 both 1024", "activation backward swiglu 1x32"]
)
def test_launches_compile_without_spills(name: str, capability: str) -> None:
    command = [
        sys.executable,
        str(ROOT / "numerics_tests" / "compile_only.py"),
        capability,
        "--jobs",
        "1",
        "--only",
        name,
    ]
    environment = environment_of_tests(TRITON_INTERPRET="0")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert " 0 failures" in result.stdout
    assert ": 0 launches" not in result.stdout
