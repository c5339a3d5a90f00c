"""What generalized and block attention's kernels become for GPUs that are not here; `compile_only.py` does all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton compiles the kernels")

from mxfp8_recipe.fused.attention import gdpa, gdpa_backward, gdpa_hopper  # noqa: E402
from numerics_tests.helpers import environment_of_tests  # noqa: E402
from numerics_tests.test_jagged_compile import compiled_for_hopper, instructions  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "name", ["block 128 groups=4 block=64 backward", "gdpa silu 128 groups=4 full bfloat16 backward"]
)
@pytest.mark.parametrize("capability", ["90", "100"])
def test_launches_compile_without_spills(name: str, capability: str) -> None:
    script = str(ROOT / "numerics_tests" / "compile_only.py")
    command = [sys.executable, script, capability, "--jobs", "1", "--only", name]
    environment = environment_of_tests(TRITON_INTERPRET="0")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert " 0 failures" in result.stdout
    assert ": 0 launches" not in result.stdout


def test_the_inner_loops_are_asynchronous_wgmma_and_few_instructions() -> None:
    """Weights go from registers to the second product, and waits are few: the assembler has not serialized products.
    A score takes one special function and four fused multiply-adds, in backward nine.
    """
    q = torch.zeros(8192, 4, 128, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 8192], dtype=torch.int32)
    layouts = [(offsets, offsets, 8192, longest, None) for longest in (8192, 128)]
    options = {"activation": "gelu", "pre_scale": 0.1, "post_scale": 0.1}
    found = {}
    for layout in layouts:
        found |= compiled_for_hopper(lambda layout=layout: gdpa.forward(q, q, q, *layout, **options))
    found |= compiled_for_hopper(lambda: gdpa_backward.backward(q, q, q, q, *layouts[0], **options))
    with mock.patch.object(gdpa_hopper, "is_hopper", return_value=True):
        found |= compiled_for_hopper(lambda: gdpa_backward.backward(q, q, q, q, *layouts[0], **options))
        forward = compiled_for_hopper(lambda: gdpa.forward(q, q, q, *layouts[0], **options))
        found |= {f"{name} forward": built for name, built in forward.items()}
    assert set(found) == {
        "gdpa_forward_kernel", "gdpa_short_kernel", "gdpa_dq_kernel", "gdpa_dkdv_kernel",
        "gdpa_hopper_queries_kernel forward", "gdpa_hopper_queries_kernel", "gdpa_hopper_keys_kernel",
    }  # fmt: skip
    for name, built in found.items():
        assert set(re.findall(r"(?:wg)?mma[\w.]*\.m(\d+)n\d+k16", built.asm["ptx"])) == {"64"}, name
        code = instructions(built.asm["cubin"])
        products = [line for line in code if line.startswith("HGMMA")]
        waits = [line for line in code if line.startswith("WARPGROUP.DEPBAR")]
        from_registers = [line for line in products if re.match(r"HGMMA\.64x128x16\S* R\d+, R\d+", line)]
        assert len(from_registers) >= 4, name
        assert len(waits) <= len(products) / 4, f"{name}: {len(waits)} waits for {len(products)} products"
        scores = sum(line.startswith("MUFU.EX2") for line in code)
        # three for the exponent, one for the weight, and backward five for the derivative
        most = 4 if "forward" in name or "short" in name else 9
        assert sum(line.startswith("FFMA") for line in code) <= most * scores, name
