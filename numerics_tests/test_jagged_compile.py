"""What the jagged attention kernels become for GPUs that are not here; `compile_only.py` does every launch."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton compiles the kernels")

from mxfp8_recipe.fused.attention import jagged, jagged_hopper  # noqa: E402
from numerics_tests.helpers import environment_of_tests  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
POINTERS = {torch.int32: "i32", torch.float32: "fp32", torch.bfloat16: "bf16"}


@pytest.mark.parametrize(
    ("capability", "name", "launches"),
    [
        ("90", "jagged 128 groups=4 full backward", 4), ("100", "jagged 128 groups=4 full backward", 2),
        ("90", "jagged 128 groups=4 window forward on hopper", 1),
    ],
)  # fmt: skip
def test_launches_compile_without_spills(capability: str, name: str, launches: int) -> None:
    """A Hopper has kernels of its own, beside the portable ones."""
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
    assert f": {launches} launches, 0 failures" in result.stdout


def compiled_for_hopper(call: Callable[[], Any]) -> dict[str, Any]:
    """What the launches of a call compile to, by kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    found = {}

    def type_of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return "*" + POINTERS[value.dtype]
        if hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            return f"tensordesc<{POINTERS[value.base.dtype]}{list(value.block_shape)}{layout}>"
        return "fp32" if isinstance(value, float) else "i32"

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = kernel.arg_names
        values = dict(zip(names, args)) | {k: v for k, v in kwargs.items() if k in names}
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature = {n: "constexpr" if n in constants else type_of(values[n]) for n in names}
        pointers = [n for n in names if signature[n].startswith("*")]
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(n),): v for n, v in constants.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in pointers},
        )
        options = {k: v for k, v in kwargs.items() if k not in names}
        found[kernel.fn.__name__] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", run):
        call()
    return found


def instructions(cubin: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+[^;]*);", code, re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("triton.knobs") is None, reason="cuobjdump is found through triton.knobs")
@pytest.mark.parametrize("hopper", [False, True], ids=["portable", "hopper"])
def test_the_inner_loops_are_asynchronous_wgmma_with_scores_from_registers(hopper: bool) -> None:
    """Per step of 64 keys: 8 products of 64x64 from shared memory, then 4 of 64x128 whose left operand, P, stays in
    registers; waits are as few as steps, so the assembler has not serialized the products.
    """
    q, lse = torch.zeros(256, 4, 128, dtype=torch.bfloat16), torch.zeros(256, 4)
    offsets = torch.tensor([0, 256], dtype=torch.int32)
    layout = offsets, offsets, 256, 256, None
    with mock.patch.object(jagged_hopper, "is_hopper", return_value=hopper):
        found = compiled_for_hopper(lambda: jagged.forward(q, q, q, *layout, scale=0.1))
        found |= compiled_for_hopper(lambda: jagged.backward(q, q, q, q, q, lse, *layout, scale=0.1))
    own = "_hopper" if hopper else ""
    assert set(found) == {f"{name}{own}_kernel" for name in ("forward", "dq", "dkdv")}
    for name, built in found.items():
        ptx = built.asm["ptx"]
        assert set(re.findall(r"(?:wg)?mma[\w.]*\.m(\d+)n\d+k16", ptx)) == {"64"}, name
        assert "cp.async.bulk.tensor.2d" in ptx, name
        code = instructions(built.asm["cubin"])
        products = [line for line in code if line.startswith("HGMMA")]
        waits = [line for line in code if line.startswith("WARPGROUP.DEPBAR")]
        from_registers = [line for line in products if re.match(r"HGMMA\.64x128x16\S* R\d+, R\d+", line)]
        assert len(from_registers) >= 4, name
        assert len(waits) <= len(products) / 4, f"{name}: {len(waits)} waits for {len(products)} products"
        if name == "dkdv_hopper_kernel":
            at = [i for i, line in enumerate(code) if line.startswith("HGMMA")]
            step = code[at[0] : at[23] + 1]  # 8 products each of S and dP, 4 each of dV and dK
            assert not [line for line in step if line.startswith("FENCE")], "a fence a step"
