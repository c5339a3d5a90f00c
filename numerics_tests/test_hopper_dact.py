"""Hopper dgrad with the derivative of an activation: what it does itself, what it becomes for sm_90a, and on its GPU
every output bitwise that of the GEMM and the kernel after it. `test_hopper_epilogue` tests its arithmetic.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton compiles the kernels")

from mxfp8_recipe.fused import reference_ops
from mxfp8_recipe.fused.activation_quantize import activation_backward
from mxfp8_recipe.fused.gemm import hopper, hopper_dact
from mxfp8_recipe.fused.gemm.dact import Dact
from mxfp8_recipe.fused.spec import QuantSpec
from numerics_tests.test_hopper_epilogue import (
    BF16,
    SHAPES,
    TILES,
    WIDE,
    build,
    gpu,
    operands,
    poison,
    quantized,
    same,
)

__all__ = ["gpu"]


def test_what_the_kernel_leaves_to_others() -> None:
    every = Dact(activation="silu", rowwise=WIDE, colwise=WIDE, act_colwise=WIDE, emit_high=False)
    dtypes = (BF16, BF16, BF16)

    def problem(steps: Dact, dtypes: Any = dtypes, tokens: int = 4096) -> str:
        return hopper_dact.problem(steps, dtypes, tokens)

    assert problem(every) == problem(Dact(activation="relu2", act_colwise=WIDE, emit_high=False)) == ""
    assert "takes less time for gelu" in problem(Dact(activation="gelu", emit_high=False))
    assert "takes less time for swiglu" in problem(Dact(activation="swiglu", emit_high=False))
    assert "multiple of 16" in problem(every, tokens=4100)
    assert "float32" in problem(every, dtypes=(BF16, torch.float32, BF16))
    assert "dz itself" in problem(Dact(activation="silu"))
    assert "rows alone" in problem(Dact(activation="silu", rowwise=WIDE, emit_high=False))


def test_launch_for_sm_90a(tmp_path: Path) -> None:
    """The eight warps that emit run one copy of their code, and all roles together fit the instruction cache."""
    steps = Dact(activation="silu", rowwise=WIDE, colwise=WIDE, act_colwise=WIDE, emit_high=False, emit_bias=True)
    z = torch.zeros(24576, 512, dtype=BF16)
    given: dict[str, Any] = {"epilogue": steps, "a_tile": (1, 128), "b_tile": (128, 128)}
    built = build(lambda: hopper_dact.gemm_dact(*operands(24576, 1024, 512), z, **given), tmp_path)
    assert built.shared <= 227 * 1024
    assert len(built.multiplying) == 2
    # Instructions an element, counted with triton 3.6 and 3.9: 13.6 after the products, 24.8 to emit.
    assert built.after_products(64) <= 15
    assert max(len(role) for role in built.roles if role not in built.multiplying) / 64 <= 26
    assert 16 * sum(len(role) for role in built.roles) <= 96 * 1024


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dgrad_has_the_bits_of_separate_kernels(shape: tuple[int, int, int], tiles: str) -> None:
    (m, n, k), (a_tile, b_tile) = shape, TILES[tiles]
    a, sa = quantized(m, k, a_tile)
    b, sb = quantized(n, k, b_tile)
    z, other = (torch.randn(m, n, device="cuda", dtype=BF16) * 2 for _ in range(2))
    spec, square = QuantSpec(tile=(1, a_tile[1])), QuantSpec(tile=(32, 32))
    given: dict[str, Any] = {"a_tile": a_tile, "b_tile": b_tile}
    grad_y = hopper.gemm(a, sa, b, sb, out_dtype=BF16, **given)
    forms = (
        (spec, spec, spec, True), (spec, None, None, False), (None, spec, None, True), (spec, spec, None, False),
        (square, square, square, True), (None, None, spec, False),
    )  # fmt: skip
    kinds = (*reference_ops.PLAIN_KINDS, *reference_ops.GATED_KINDS)
    for kind, (row, col, again, bias) in itertools.product(kinds, forms):
        gate = other if kind in reference_ops.GATED_KINDS else None
        steps = Dact(
            activation=kind, rowwise=row, colwise=col, act_colwise=again, emit_high=False, emit_bias=bias
        )  # fmt: skip
        poison((m, n), (m, n), (m, n))
        found = hopper_dact.gemm_dact(a, sa, b, sb, z, gate, epilogue=steps, **given)
        expected = activation_backward(grad_y, z, gate, kind, row, col, bias, again, emit_high=False)
        same(found, expected, f"{kind} {row} {col} {again} {bias}")
