"""What the Blackwell and portable GEMMs become for GPUs that are not here: instructions, registers, memory.

The budgets are those that docs/blackwell.md states.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton compiles the kernels")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mxfp8_recipe.fused.gemm import blackwell, portable  # noqa: E402
from mxfp8_recipe.fused.gemm.epilogue import Epilogue, Rope, Rotation  # noqa: E402
from mxfp8_recipe.fused.spec import QuantSpec  # noqa: E402

PAGE = Path(__file__).resolve().parents[1] / "docs" / "blackwell.md"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.float32: "fp32", torch.bfloat16: "bf16",
    torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
MULTIPLY = r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*"
TENSOR_COLUMNS = 512
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
MX = QuantSpec()
M, N, K = 256, 1024, 512


@dataclass(frozen=True)
class Built:
    """A compiled launch: its PTX, registers and stack bytes a thread, shared bytes and tensor-memory columns."""

    ptx: str
    registers: int
    stack: int
    shared: int
    columns: int

    @property
    def multiplies(self) -> set[str]:
        return set(re.findall(MULTIPLY, self.ptx))


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype]}[{', '.join(map(str, value.block_shape))}]>"
    return "i32"


def build(call: Callable[[], object], capability: int, tmp_path: Path) -> Built:
    """Compile the one kernel that `call` launches, as it launches it."""
    launches = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, dict(zip(kernel.arg_names, args)) | kwargs))

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", run):
        call()
    ((kernel, values),) = launches
    names = kernel.arg_names
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {name: value for name, value in values.items() if name not in names}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([CUOBJDUMP, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert used, report
    columns = getattr(compiled.metadata, "tmem_size", 0)
    return Built(compiled.asm["ptx"], int(used[1]), int(used[2]), compiled.metadata.shared, columns)


def operand(rows: int, elem: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, K, dtype=torch.uint8).view(elem), torch.zeros(rows, K // 32, dtype=torch.uint8)


def with_epilogue(elems: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), **options: Any) -> Callable[[], object]:
    """A launch of the Blackwell kernel, which is the same for every shape whose features are a multiple of 128."""
    out = options.pop("out", BF16)
    bias = torch.zeros(N, dtype=out) if options.pop("bias", False) else None
    residual = torch.zeros(M, N, dtype=out) if options.pop("residual", False) else None
    tables = [torch.zeros(M, options["rope"].head_dim // 2) for _ in range(2)] if "rope" in options else None
    facts = {"rotation": Rotation(*tables) if tables else None, "out_dtype": out, "swizzled": True}

    def call() -> object:
        operands = *operand(M, elems[0]), *operand(N, elems[1])
        return blackwell.gemm_epilogue(*operands, bias, residual, epilogue=Epilogue(**options), **facts)

    return call


PRODUCTION = {
    "BF16": with_epilogue(),
    "bias, BF16": with_epilogue(bias=True),
    "bias, FP32": with_epilogue(bias=True, out=torch.float32),
    "MXFP8": with_epilogue(rowwise=MX, emit_high=False),
    "bias, ReLU, MXFP8": with_epilogue(bias=True, activation="relu", rowwise=MX, emit_high=False, emit_sum=True),
    "bias, GELU, MXFP8": with_epilogue(bias=True, activation="gelu", rowwise=MX, emit_high=False, emit_sum=True),
    "bias, GELU by tanh, MXFP8": with_epilogue(
        bias=True, activation="gelu_tanh", rowwise=MX, emit_high=False, emit_sum=True
    ),
    "bias, SiLU, MXFP8": with_epilogue(bias=True, activation="silu", rowwise=MX, emit_high=False, emit_sum=True),
    "bias, GELU, MXFP8 1x128": with_epilogue(
        bias=True, activation="gelu", rowwise=QuantSpec(tile=(1, 128)), emit_high=False, emit_sum=True
    ),
    "bias, residual, BF16": with_epilogue(bias=True, residual=True),
    "bias, residual, BF16 and MXFP8": with_epilogue(bias=True, residual=True, rowwise=MX),
    "bias, GELU, residual, BF16 twice and MXFP8": with_epilogue(
        bias=True, activation="gelu", residual=True, rowwise=MX, emit_sum=True
    ),
    "bias, SwiGLU, MXFP8": with_epilogue(bias=True, activation="swiglu", rowwise=MX, emit_high=False, emit_sum=True),
    "GEGLU, BF16": with_epilogue(activation="geglu"),
    "bias, RoPE by halves, MXFP8": with_epilogue(bias=True, rope=Rope(head_dim=64), rowwise=MX, emit_high=False),
    "bias, RoPE by pairs, MXFP8": with_epilogue(
        bias=True, rope=Rope(head_dim=128, interleaved=True), rowwise=MX, emit_high=False
    ),
    "E5M2 by E4M3, BF16": with_epilogue((E5M2, E4M3)),
}
"""Epilogues in every form that layers use, by the name docs/blackwell.md gives them."""


def budgets() -> dict[str, tuple[int, int, int]]:
    """Registers a thread, KiB of shared memory and tensor-memory columns by epilogue, as the page states them."""
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: (int(registers), int(shared), int(columns)) for name, registers, shared, columns in rows}


def test_the_page_states_a_budget_for_every_launch() -> None:
    assert set(budgets()) == set(PRODUCTION)


@pytest.mark.parametrize("name", PRODUCTION)
def test_launches_for_sm_100a_multiply_blocks_within_their_budget(name: str, tmp_path: Path) -> None:
    built = build(PRODUCTION[name], 100, tmp_path)
    registers, shared, columns = budgets()[name]
    assert built.multiplies
    for instruction in built.multiplies:
        assert re.fullmatch(r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.\S+", instruction)
    assert "sm_100a" in built.ptx
    assert len(re.findall(r"tcgen05\.cp\.", built.ptx)) >= 2, (
        "scales do not go from shared to tensor memory as they are"
    )
    assert len(re.findall(r"cp\.async\.bulk\.tensor\S*\.global", built.ptx)) >= 4, "operands do not come through TMA"
    assert built.stack == 0, f"spills {built.stack} bytes a thread"
    assert built.registers <= registers
    assert built.shared <= shared * 1024 <= 227 * 1024
    assert 0 < built.columns <= columns <= TENSOR_COLUMNS


def test_the_same_kernel_compiles_for_sm_103a(tmp_path: Path) -> None:
    built = build(PRODUCTION["bias, GELU, MXFP8"], 103, tmp_path)
    assert "sm_103a" in built.ptx
    assert built.stack == 0
    assert all("block_scale" in instruction for instruction in built.multiplies)


@pytest.mark.parametrize("name", ["bias, GELU, MXFP8", "bias, residual, BF16", "bias, SwiGLU, MXFP8"])
def test_the_same_kernel_fits_sm_120(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blackwell, "_room", lambda device: 99)
    built = build(PRODUCTION[name], 120, tmp_path)
    assert built.multiplies
    for instruction in built.multiplies:
        assert re.fullmatch(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale\.\S+", instruction)
    assert "cp.async.bulk.tensor" in built.ptx
    assert built.stack <= (8 if VERSION < (3, 9) else 0), f"spills {built.stack} bytes a thread"
    assert built.registers <= 250
    assert built.shared <= 98 * 1024


def run_portable(bias: bool = False) -> Callable[[], object]:
    def call() -> object:
        added = torch.zeros(N, dtype=BF16) if bias else None
        return portable.gemm(*operand(M), *operand(N), added, out_dtype=BF16)

    return call


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("capability", "instruction", "shared", "stack"),
    [
        (120, r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale\.\S+ue8m0", 99, 0),
        pytest.param(
            110,
            r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.\S+",
            227,
            64,
            marks=pytest.mark.skipif(VERSION < (3, 9), reason=f"triton {triton.__version__} does not know sm_110a"),
        ),
        (100, r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.\S+", 227, 64),
    ],
)
def test_portable_launches_multiply_blocks(
    capability: int, instruction: str, shared: int, stack: int, bias: bool, tmp_path: Path
) -> None:
    built = build(run_portable(bias), capability, tmp_path)
    assert built.multiplies
    assert all(re.fullmatch(instruction, found) for found in built.multiplies), built.multiplies
    assert built.stack <= stack, f"spills {built.stack} bytes a thread"
    assert built.shared <= shared * 1024
    assert "ld.global.v4" in built.ptx or "cp.async.cg.shared.global" in built.ptx, "operands load byte by byte"


@pytest.mark.skipif(VERSION < (3, 9), reason=f"the interpreter of triton {triton.__version__} has no tl.dot_scaled")
def test_the_kernel_equals_the_reference_in_the_interpreter() -> None:
    """Odd shapes, every tile and element format, each epilogue bitwise the kernels that do its steps alone."""
    script = Path(__file__).with_name("blackwell_gemm.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
