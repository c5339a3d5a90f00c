"""The kernels against their reference: interpreted on small odd shapes here, natively on real shapes on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from numerics_tests.helpers import environment_of_tests

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ROOT / "numerics_tests" / "kernel_checks.py"
SHARES = {"quantize": 2, "norm": 2, "activation": 1, "rows": 1}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_checks(group: str, device: str, share: int, shares: int, **variables: str) -> None:
    """In a process of its own: Triton decides on import whether it interprets."""
    environment = environment_of_tests(**variables)
    command = [sys.executable, "-W", "ignore", str(CHECKS), group, device, str(share), str(shares)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.startswith("ok"), result.stdout


@pytest.mark.parametrize(("group", "share"), [(g, i) for g, n in SHARES.items() for i in range(n)])
def test_interpreted_kernels_equal_the_reference(group: str, share: int) -> None:
    run_checks(group, "cpu", share, SHARES[group], TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "share"), [(g, i) for g in SHARES for i in range(3)])
def test_native_kernels_equal_the_reference(group: str, share: int) -> None:
    run_checks(group, "cuda", share, 3, TRITON_INTERPRET="0")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Addresses past 2**31, in both orientations: the last rows come out as those of a small matrix."""
    import torch

    from fused import quantize
    from fused.spec import QuantSpec

    rows, cols = 2**19 + 128, 4096
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    spec = QuantSpec(tile=(1, 128))
    whole = quantize.quantize_both(x, spec, spec)
    tail = quantize.quantize_both(x[-128:].clone(), spec, spec)
    assert torch.equal(whole[0][-128:], tail[0])
    assert torch.equal(whole[1][-128:], tail[1])
    assert torch.equal(whole[2][:, -128:], tail[2])
    assert torch.equal(whole[3][:, -4:], tail[3])


@pytest.mark.gpu
def test_kernels_run_in_a_cuda_graph_and_repeat_to_the_bit() -> None:
    import torch

    from fused import norm_backward, norm_quantize
    from fused.spec import QuantSpec

    x = torch.randn(3000, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.rand(1024, device="cuda")
    spec = QuantSpec(tile=(1, 128))

    def step():
        y = norm_quantize.norm_quantize(x, x, w, None, 1e-5, "rms", torch.bfloat16, spec, spec, True)
        return (*y, *norm_backward.norm_backward(y[0], y[1], w, y[6], y[7], "rms", None, False, spec, spec))

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(e, r) for e, r in zip(expected, replayed))
