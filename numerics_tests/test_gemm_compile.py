"""What the GEMM kernels become for sm_90a, without a GPU; and the portable one in Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton compiles the kernels")

from mxfp8_recipe.fused.gemm import _hopper_kernel, hopper, portable  # noqa: E402

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
SHARED_MEMORY = 227 * 1024
"""Bytes a block may take on sm_90."""
POINTERS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
FP8 = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}

COARSE, COLUMN, FINE, FINE_COLUMN = ((128, 128), (128, 1), (32, 32), (32, 1))
PRODUCTION = [
    # (chunk, across), config, output, bias, summed
    (COARSE, hopper.TALL, torch.bfloat16, False, False),
    (COARSE, hopper.TALL, torch.bfloat16, True, False),
    (COARSE, hopper.TALL, torch.float32, False, False),
    (COARSE, hopper.WIDE, torch.bfloat16, False, False),
    (COARSE, hopper.WIDE, torch.bfloat16, True, False),
    (COARSE, hopper.SMALL, torch.bfloat16, True, True),
    (COARSE, hopper.SMALL, torch.bfloat16, True, False),
    (COARSE, hopper.SMALL, torch.float32, False, True),
    ((128, 32), hopper.TALL, torch.float16, False, False),
    (COLUMN, hopper.COLUMNS, torch.bfloat16, False, False),
    (COLUMN, hopper.COLUMNS, torch.float32, False, False),
    (COLUMN, hopper.COLUMNS_LOW, torch.bfloat16, True, True),
    (COLUMN, hopper.COLUMNS_LOW, torch.float32, False, True),
    (FINE, hopper.FINE_WIDE, torch.bfloat16, False, False),
    (FINE, hopper.FINE, torch.bfloat16, True, False),
    (FINE, hopper.FINE, torch.float32, False, True),
    (FINE_COLUMN, hopper.FINE, torch.bfloat16, False, False),
    (FINE_COLUMN, hopper.FINE, torch.float32, True, True),
]


def compile_hopper(
    chunk: int, across: int, config: hopper.Config, out: torch.dtype, bias: bool, summed: bool,
    a: torch.dtype = torch.float8_e4m3fn, b: torch.dtype = torch.float8_e4m3fn,
) -> Any:  # fmt: skip
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    variant = hopper.Variant(chunk=chunk, across=across)
    constants = hopper.constants_of(variant, config, out.itemsize, bias, summed)
    names = _hopper_kernel.gemm_kernel.arg_names
    blocks = {"a_desc": (a, 64, 128), "b_desc": (b, hopper.COLS, 128), "c_desc": (out, 64, hopper.COLS)}
    types = {**FP8, **POINTERS}
    signature = {
        name: f"tensordesc<{types[dtype]}[{rows}, {cols}],{hopper.layout_of(rows, cols, dtype)!r}>"
        for name, (dtype, rows, cols) in blocks.items()
    }
    scale = "*u8" if chunk == 128 else "*i32"
    signature |= {"sa_ptr": scale, "sb_ptr": scale, "bias_ptr": "*bf16", "base_ptr": f"*{POINTERS[out]}"}
    runtime = len(names) - len(constants)
    signature |= dict.fromkeys(names[len(signature) : runtime], "i32")
    signature |= dict.fromkeys(names[runtime:], "constexpr")
    values = {(runtime + i,): value for i, value in enumerate(constants)}
    source = GluonASTSource(fn=_hopper_kernel.gemm_kernel, signature=signature, constexprs=values)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Bytes of local memory per thread: what registers spill to."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    report = subprocess.run([tool, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True)
    return max(int(n) for n in re.findall(r"STACK:(\d+)", report.stdout))


ROLE_STACK = 24
"""Bytes a thread that triton 3.9 may put aside before a role's loop: nothing is stored inside it, one word read."""


def local_accesses_beside_products(cubin: bytes, folder: Path) -> int:
    """Accesses to local memory between the first and the last wgmma of a role."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    code = subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True).stdout
    found, roles = 0, " ".join(re.findall(r"\b(USETMAXREG|QGMMA|STL|LDL)\b", code)).split("USETMAXREG")
    for role in roles:
        inside = role[role.find("QGMMA") : role.rfind("QGMMA")] if "QGMMA" in role else ""
        found += inside.count("STL") + inside.count("LDL")
    return found


@pytest.mark.parametrize("case", PRODUCTION, ids=lambda case: f"{case[0]}-{case[1].rows}-{str(case[2])[6:]}-{case[3:]}")
def test_production_configs_are_fp8_wgmma_without_spills(case: tuple[Any, ...], tmp_path: Path) -> None:
    (chunk, across), config, out, bias, summed = case
    built = compile_hopper(chunk, across, config, out, bias, summed)
    instructions = set(re.findall(r"(?:wg)?mma[\w.]*\.m\d+n\d+k\d+[\w.]*", built.asm["ptx"]))
    assert instructions == {"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"}
    assert built.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(built.asm["cubin"], tmp_path) <= (0 if VERSION == (3, 6) else ROLE_STACK)
    assert local_accesses_beside_products(built.asm["cubin"], tmp_path) <= 1


def test_e5m2_operands_reach_the_instruction() -> None:
    built = compile_hopper(128, 128, hopper.SMALL, torch.bfloat16, False, False, a=torch.float8_e5m2)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3" in built.asm["ptx"]


def test_a_launch_is_a_function_of_shape_alone() -> None:
    coarse = hopper.variant_of((1, 128), (128, 128))
    assert hopper.choose(coarse, 8192, 8192, 8192, 132)[0] is hopper.TALL
    assert hopper.choose(coarse, 65536, 1024, 1024, 132)[0] is hopper.WIDE
    assert hopper.choose(coarse, 512, 256, 1024, 132)[0] is hopper.SMALL
    column = hopper.variant_of((1, 128), (1, 128))
    assert hopper.choose(column, 1024, 1024, 65536, 132) == (hopper.COLUMNS, 128)  # four splits of 128 steps
    assert hopper.choose(column, 256, 256, 1024, 132)[0] is hopper.COLUMNS_LOW
    assert hopper.choose(column, 4096, 4096, 16384, 132) == (hopper.COLUMNS, 128)  # all of K
    fine = hopper.variant_of((1, 128), (32, 32))
    assert (fine.chunk, fine.across) == (32, 32)
    assert hopper.variant_of((1, 32), (128, 128)) == hopper.Variant(chunk=32, across=32)


def test_every_choice_fits_its_output() -> None:
    for tiles in (
        ((1, 128), (128, 128)),
        ((1, 128), (32, 128)),
        ((1, 128), (1, 128)),
        ((1, 32), (32, 32)),
        ((1, 32),) * 2,
    ):
        for m, k in ((1, 32), (300, 4096), (262144, 512), (65536, 2048)):
            for flags in ({}, {"bias": True}, {"out_bytes": 4}, {"out_bytes": 4, "summed": True}):
                variant = hopper.variant_of(*tiles, **flags)
                config, steps = hopper.choose(variant, m, 512, k, 132)
                assert steps >= 1
                once = steps >= -(-k // hopper.STEP)
                assert config.stages_fp32 > 0 or (variant.out_bytes == 2 and once)


@pytest.mark.parametrize(
    ("capability", "instruction"),
    [(90, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"), (100, "kind::mxf8f6f4")],
)
def test_portable_gemm_becomes_the_target_s_instruction(capability: int, instruction: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"bias_ptr": "*bf16", "out_ptr": "*bf16"}
    names = portable.portable_kernel.arg_names
    signature = {name: pointers.get(name, "*u8") for name in names[:6]}
    signature |= dict.fromkeys(names[6:14], "i32") | dict.fromkeys(names[14:], "constexpr")
    values = dict(zip(names[14:], ("e4m3", "e4m3", False, False, 128, 128, 128, 8)))
    source = ASTSource(portable.portable_kernel, signature, {(names.index(n),): v for n, v in values.items()})
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert instruction in built.asm["ptx"]


@pytest.mark.skipif(VERSION < (3, 9), reason=f"the interpreter of triton {triton.__version__} has no tl.dot_scaled")
def test_portable_gemm_equals_the_reference_in_the_interpreter() -> None:
    script = Path(__file__).with_name("portable_gemm.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_portable_gemm_checks_its_operands() -> None:
    q, s = torch.zeros(4, 64, dtype=torch.float8_e4m3fn), torch.zeros(4, 2, dtype=torch.uint8)
    assert portable.gemm(q[:0], s[:0], q, s).shape == (0, 4)
    with pytest.raises(ValueError, match="one scale byte per 32"):
        portable.gemm(q, s[:, :1], q, s)
    with pytest.raises(TypeError, match="expected float8"):
        portable.gemm(q.float(), s, q, s)
