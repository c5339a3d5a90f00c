"""Block attention's kernels: interpreted on small odd batches here, natively on large ones on a GPU."""

from __future__ import annotations

import pytest
import torch

from numerics_tests.test_gdpa_kernels import run_checks

pytest.importorskip("triton", reason="triton runs the kernels")

from fused.attention import block


def test_interpreted_kernels_agree_with_float64() -> None:
    run_checks("block", "cpu", 0, 1, "1")


@pytest.mark.gpu
def test_native_kernels_agree_with_float64() -> None:
    run_checks("block", "cuda", 0, 1, "0")


def test_other_operands_are_refused() -> None:
    """An error that names what was found, what is expected and who takes it."""
    q = torch.zeros(3, 2, 32)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"got q torch.float32.*expected bf16 or fp16"):
        block.forward(q, q, q, offsets, 3, scale=1.0)
    half = q.bfloat16()
    with pytest.raises(ValueError, match=r"got block=48, expected one of \(32, 64, 128\)"):
        block.forward(half, half, half, offsets, 3, scale=1.0, block=48)
    with pytest.raises(ValueError, match=r"expected \(T, H, D\), \(T, G, D\)"):
        block.forward(half, half[:2], half, offsets, 3, scale=1.0)
    odd = half.new_zeros(3, 2, 40)
    with pytest.raises(ValueError, match="got D=40, expected a multiple of 16 up to 256 for block=64"):
        block.forward(odd, odd, odd, offsets, 3, scale=1.0)
    with pytest.raises(ValueError, match="got grad_out"):
        block.backward(half[:1], half, half, half, offsets, 3, scale=1.0)
