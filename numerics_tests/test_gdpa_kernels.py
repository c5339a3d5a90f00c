"""Generalized attention's kernels: interpreted on small odd batches here, natively on large ones on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from numerics_tests.helpers import environment_of_tests

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ROOT / "numerics_tests" / "gdpa_checks.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_checks(group: str, device: str, share: int, shares: int, interpret: str) -> None:
    """In a process of its own: Triton decides on import whether it interprets."""
    environment = environment_of_tests(TRITON_INTERPRET=interpret)
    command = [sys.executable, "-W", "ignore", str(CHECKS), group, device, str(share), str(shares)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.startswith("ok"), result.stdout


@pytest.mark.parametrize("share", range(2))
def test_interpreted_kernels_agree_with_float64(share: int) -> None:
    run_checks("gdpa", "cpu", share, 2, "1")


def test_interpreted_activations_are_as_good_as_bf16() -> None:
    run_checks("pointwise", "cpu", 0, 1, "1")


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(2))
def test_native_kernels_agree_with_float64(share: int) -> None:
    run_checks("gdpa", "cuda", share, 2, "0")


@pytest.mark.gpu
def test_native_activations_are_as_good_as_bf16() -> None:
    run_checks("pointwise", "cuda", 0, 1, "0")


def test_other_operands_are_refused() -> None:
    """An error that names what was found, what is expected and who takes it."""
    import torch

    from fused.attention import gdpa

    q = torch.zeros(3, 2, 32)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    arguments = (offsets, offsets, 3, 3, None)
    options = {"activation": "gelu", "pre_scale": 1.0, "post_scale": 1.0}
    with pytest.raises(TypeError, match=r"got q torch.float32.*expected bf16 or fp16; the reference takes any"):
        gdpa.forward(q, q, q, *arguments, **options)
    half = q.bfloat16()
    with pytest.raises(ValueError, match="got activation='softmax', expected one of"):
        gdpa.forward(half, half, half, *arguments, **{**options, "activation": "softmax"})
    wide = half.new_zeros(3, 2, 272)
    with pytest.raises(ValueError, match="got heads of 272 and 272, expected at most 256"):
        gdpa.forward(wide, wide, wide, *arguments, **options)
