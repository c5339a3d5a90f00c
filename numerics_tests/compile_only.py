"""Compile every launch the kernels make on real shapes, for GPUs that are not here, and check what it takes.

    python numerics_tests/compile_only.py [90 100 ...] [--jobs N] [--only NAME]

Launches are recorded from the launchers themselves, so what is compiled is what runs. A launch fails that spills
registers to local memory or needs more registers or shared memory than a multiprocessor gives one program.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fused import activation_quantize, norm_backward, norm_quantize, quantize
from fused.gemm import hopper, hopper_dact, hopper_epilogue
from fused.gemm.dact import Dact
from fused.gemm.epilogue import Epilogue, interleaved_tile
from fused.reference_ops import GATED_KINDS, PLAIN_KINDS
from fused.spec import QuantSpec
from numerics_tests import gdpa_launches, jagged_launches
from numerics_tests.gdpa_launches import gdpa_calls
from numerics_tests.jagged_launches import jagged_calls

NEW = tuple(int(part) for part in triton.__version__.split(".")[:2]) > (3, 6)
OF_NEW = {"gemm_epilogue_kernel": 32, "gemm_dact_kernel": 216, "dkdv_kernel": 48, "dq_hopper_kernel": 304}
TOLERATED_STACK = {"norm_staged_kernel": 8, "gemm_dact_kernel": 168} | (OF_NEW if NEW else {})
"""Bytes a thread. At 64 registers newer triton spills two words of the staged norm in tiles of 1 x 32; without, three
programs fit a multiprocessor, not four. Newer triton also computes the addresses of an epilogue before a warpgroup's
first tile and puts them aside: it hardly stores after that. The warps that emit what follows dgrad have 72
registers, and of their 1540 instructions a tile 20 to 70 move an address from or to memory. Of jagged
attention's dK and dV 256 wide it keeps 12 words apart. On Hopper dQ keeps both left operands of a step in registers,
which older triton fits into 254; newer moves some 50 words a step."""
TOLERATED_STACK |= gdpa_launches.TOLERATED_STACK

MAX_REGISTERS = 255
MAX_SHARED = 227 * 1024
BF16 = torch.bfloat16
SPECS = {"1x32": QuantSpec(), "1x128": QuantSpec(tile=(1, 128)), "32x32": QuantSpec(tile=(32, 32))}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel with the types and compile-time values it was launched with."""

    kernel: str
    module: str
    name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def is_hopper(self) -> bool:
        """Whether it multiplies with wgmma, which no other GPU has."""
        return self.kernel.startswith("gemm_") or "_hopper_" in self.kernel


@dataclass(frozen=True)
class Usage:
    """What a compiled launch takes: registers a thread, bytes of stack a thread, bytes of shared memory."""

    registers: int
    stack: int
    shared: int

    def problem(self, kernel: str) -> str | None:
        """What is wrong, or None."""
        if self.stack > TOLERATED_STACK.get(kernel, 0):
            return f"spills {self.stack} bytes a thread"
        if self.registers > MAX_REGISTERS or self.shared > MAX_SHARED:
            return f"takes {self.registers} registers and {self.shared} bytes of shared memory"
        return None


def record(module: Any, name: str, call: Any) -> list[Launch]:
    """The launches `call` makes of kernels of `module`, none of which runs."""
    launches = []

    def run(kernel, *args, grid, **kwargs):
        names = kernel.arg_names
        values = dict(zip(names, args))
        options = {k: v for k, v in kwargs.items() if k not in names}
        values.update({k: v for k, v in kwargs.items() if k in names})
        constants = tuple((p.name, values[p.name]) for p in kernel.params if p.is_constexpr)
        runtime = tuple((p.name, type_of(values[p.name])) for p in kernel.params if not p.is_constexpr)
        options.pop("warmup", None)
        source = kernel.fn.__name__, kernel.fn.__module__
        launches.append(Launch(*source, name, runtime, constants, tuple(options.items())))

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", run):
        call()
    return launches


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype]}{list(value.block_shape)}>"
    if hasattr(value, "block_shape"):
        block = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{POINTERS[value.base.dtype]}[{block}],{value.layout!r}>"
    return "fp32" if isinstance(value, float) else "i32"


GEMM_TILES = {
    "1x128 by 128x128": ((1, 128), (128, 128)), "1x128 by 32x128": ((1, 128), (32, 128)),
    "1x128 by 1x128": ((1, 128), (1, 128)), "1x32 by 32x32": ((1, 32), (32, 32)), "1x32 by 1x32": ((1, 32), (1, 32)),
}  # fmt: skip
"""Of the operands of a GEMM. The tiles of what it emits are as wide as those of its first operand."""
ONE_H200 = 132


def epilogue_launches() -> list[Launch]:
    """The Hopper GEMMs with an epilogue: every activation for the tiles of the fast recipe, some for all tiles."""
    found: list[Launch] = []

    def add(name: str, call: Any) -> None:
        with mock.patch.object(hopper, "_processors", return_value=ONE_H200):
            found.extend(record(hopper, name, call))

    for i, (name, tiles) in enumerate(GEMM_TILES.items()):
        spec = QuantSpec(tile=(1, tiles[0][1]))
        for kind in (*PLAIN_KINDS, *GATED_KINDS, "none") if i == 0 else ("gelu", "swiglu", "none"):
            if kind == "swiglu" and name == "1x128 by 1x128":
                continue  # has no kernel
            for k in (1024, 2048) if i == 0 and kind == "gelu" else (1024,):
                add(f"gemm epilogue {kind} {name} K={k}", partial(run_epilogue, kind, k, spec, tiles))
        for kind in hopper_dact.CHEAP if i == 0 else ("silu",):
            add(f"gemm dact {kind} {name}", partial(run_dact, kind, spec, tiles))
    return found


def gemm_operands(tokens: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros: a, a_scale, b, b_scale."""
    a, b = (torch.zeros(n, k, dtype=torch.uint8).view(torch.float8_e4m3fn) for n in (tokens, rows))
    return a, torch.zeros(tokens, k // 32, dtype=torch.uint8), b, torch.zeros(rows, k // 32, dtype=torch.uint8)


def run_epilogue(kind: str, k: int, spec: QuantSpec, tiles: tuple[Any, Any]) -> Any:
    """An up-projection with its activation, or for "none" a projection with a residual."""
    plain = kind == "none"
    steps = Epilogue(activation=None if plain else kind, rowwise=spec, emit_high=plain, emit_sum=not plain)
    bias = None if kind == "swiglu" else torch.zeros(512, dtype=BF16)
    residual = torch.zeros(24576, 512, dtype=BF16) if plain else None
    b_tile = interleaved_tile(tiles[1]) if steps.gated else tiles[1]
    return hopper_epilogue.gemm_epilogue(
        *gemm_operands(24576, k, 512), bias, residual, epilogue=steps, a_tile=tiles[0], b_tile=b_tile
    )


def run_dact(kind: str, spec: QuantSpec, tiles: tuple[Any, Any]) -> Any:
    """Dgrad of a down-projection with all that follows."""
    steps = Dact(activation=kind, rowwise=spec, colwise=spec, act_colwise=spec, emit_high=False, emit_bias=True)
    z = torch.zeros(24576, 512, dtype=BF16)
    return hopper_dact.gemm_dact(
        *gemm_operands(24576, 1024, 512), z, epilogue=steps, a_tile=tiles[0], b_tile=tiles[1]
    )  # fmt: skip


def production_launches() -> list[Launch]:
    """Every kernel in every config that a shipped recipe chooses, on shapes of several widths."""
    found: dict[tuple, Launch] = {}

    def add(module: Any, name: str, call: Any) -> None:
        for launch in record(module, name, call):
            found.setdefault((launch.kernel, launch.constants, launch.options), launch)

    def matrix(cols: int, rows: int = 256) -> torch.Tensor:
        return torch.zeros(rows, cols, dtype=BF16)

    for tile, spec in SPECS.items():
        for cols in (512, 1024):
            for swizzled in (False, True):
                for other, orient in ((spec, "both"), (None, "row")):
                    add(
                        quantize, f"quantize {tile} {orient} {cols} swizzled={swizzled}",
                        lambda: quantize.quantize_both(matrix(cols), spec, other, swizzled=swizzled),  # noqa: B023
                    )  # fmt: skip
        add(
            quantize, f"quantize {tile} both ragged and sums",
            lambda: [quantize.quantize_and_sum(matrix(512, rows), spec, spec, sum_dtype=BF16) for rows in (256, 250)],  # noqa: B023
        )  # fmt: skip
        add(
            norm_quantize, f"norm rms {tile} both ragged",
            lambda: norm_quantize.norm_quantize(
                matrix(512, 250), None, None, None, 1e-5, "rms", BF16, spec, spec, False  # noqa: B023
            ),
        )  # fmt: skip
        for kind, cols in (("rms", 512), ("rms", 1024), ("rms", 2048), ("rms", 4096), ("layer", 1024)):
            weight, stats, residual = torch.zeros(cols), torch.zeros(256), matrix(cols) if kind == "layer" else None
            bias = weight if kind == "layer" else None
            for other in (spec, None):
                add(
                    norm_quantize, f"norm {kind} {tile} {'both' if other else 'row'} {cols}",
                    lambda: norm_quantize.norm_quantize(
                        matrix(cols), residual, weight, bias, 1e-5, kind, BF16, spec, other, False  # noqa: B023
                    ),
                )  # fmt: skip
            add(
                norm_quantize, f"norm backward {kind} {tile} {cols}",
                lambda: norm_backward.norm_backward(
                    matrix(cols), matrix(cols), weight, stats, stats, kind, residual, bias is not None, spec, spec  # noqa: B023
                ),
            )  # fmt: skip
        for kind in ("gelu", "gelu_tanh", "silu", "swiglu", "geglu"):
            for other in (spec, None):
                add(
                    activation_quantize, f"activation {kind} {tile} {'both' if other else 'row'}",
                    lambda: activation_quantize.activation_quantize(matrix(2048), None, kind, BF16, spec, other, False),  # noqa: B023
                )  # fmt: skip
            width = 1024 if kind in ("swiglu", "geglu") else 2048
            for want_bias in (False, True):
                add(
                    activation_quantize, f"activation backward {kind} {tile}{' bias' if want_bias else ''}",
                    lambda: activation_quantize.activation_backward(
                        matrix(width), matrix(2048), None, kind, spec, spec, want_bias, spec, emit_high=False  # noqa: B023
                    ),
                )  # fmt: skip
    spec = SPECS["1x128"]
    for cols in (512, 1024, 4096):
        x = matrix(cols, 2**26 // cols)
        add(quantize, f"quantize large {cols}", lambda: quantize.quantize_both(x, spec, spec))  # noqa: B023
    add(quantize, "quantize sums alone", lambda: quantize.quantize_and_sum(matrix(512), None, None))
    for launch in epilogue_launches():
        found.setdefault((launch.kernel, launch.constants, launch.signature), launch)
    for name, call in (*jagged_calls(), *gdpa_calls()):
        add(jagged_launches, name, call)
    return list(found.values())


def compile_launch(launch: Launch, capability: int) -> Usage:
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    names = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | dict(launch.signature)
    aligned = {p.name for p in kernel.params if signature[p.name].startswith("*") and not p.do_not_specialize}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in launch.constants},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, kind in launch.signature if n in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        output = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", output.stdout + output.stderr)
    assert match, output.stdout
    return Usage(int(match[1]), int(match[2]), compiled.metadata.shared)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("capabilities", nargs="*", type=int, default=[90, 100])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a launch's name")
    options = parser.parse_args()
    launches = [launch for launch in production_launches() if options.only in launch.name]
    work = [(launch, at) for at in options.capabilities for launch in launches if at == 90 or not launch.is_hopper]
    failures = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for (launch, capability), usage in zip(work, pool.map(compile_launch, *zip(*work))):
            problem = usage.problem(launch.kernel)
            failures += problem is not None
            print(f"sm_{capability}a {launch.name} {launch.kernel}: {usage} {problem or 'ok'}", flush=True)
    print(f"triton {triton.__version__}: {len(work)} launches, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
