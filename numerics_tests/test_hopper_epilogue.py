"""Hopper GEMMs with an epilogue: their arithmetic in Triton's interpreter, what they become for sm_90a, and on their
GPU every output bitwise that of the GEMM and the kernels after it.
"""

from __future__ import annotations

import itertools
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
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton compiles the kernels")

from mxfp8_recipe.fused import reference, reference_ops  # noqa: E402
from mxfp8_recipe.fused.gemm import apart, hopper, hopper_dact, hopper_epilogue  # noqa: E402
from mxfp8_recipe.fused.gemm.dact import Dact  # noqa: E402
from mxfp8_recipe.fused.gemm.epilogue import Epilogue, interleave, interleaved_tile, split  # noqa: E402
from mxfp8_recipe.fused.spec import QuantSpec  # noqa: E402

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
BF16 = torch.bfloat16
WIDE, NATURAL = QuantSpec(tile=(1, 128)), QuantSpec()
TILES = {
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "1x128 by 1x128": ((1, 128), (1, 128)),
    "1x32 by 32x32": ((1, 32), (32, 32)),
    "1x32 by 1x32": ((1, 32), (1, 32)),
}
TYPES = {
    torch.uint8: "u8", torch.int32: "i32", torch.float32: "fp32", BF16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def test_the_arithmetic_equals_that_of_kernels_for_each_step() -> None:
    """Activations, pairs, residuals, scales and derivatives to the bit; columns under their own scales."""
    script = Path(__file__).with_name("hopper_epilogue_values.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_kernels_leave_to_others() -> None:
    plain: dict[str, Any] = {"across": 128, "residual": False}
    why = hopper_epilogue.problem
    assert why(Epilogue(activation="gelu", rowwise=WIDE), BF16, **plain) == ""
    assert why(Epilogue(activation="swiglu", rowwise=WIDE), BF16, **plain) == ""
    assert "plain GEMM" in why(Epilogue(), BF16, **plain)
    assert "bfloat16" in why(Epilogue(rowwise=WIDE), torch.float16, **plain)
    assert "transposed" in why(Epilogue(colwise=WIDE), BF16, **plain)
    assert "span rows" in why(Epilogue(rowwise=QuantSpec(tile=(32, 32))), BF16, **plain)
    assert "256 columns" in why(Epilogue(activation="swiglu", rowwise=WIDE), BF16, across=1, residual=False)
    assert "residual" in why(Epilogue(activation="swiglu"), BF16, across=128, residual=True)


def test_a_config_follows_from_the_variant_and_k() -> None:
    coarse, column = hopper.variant_of((1, 128), (128, 128)), hopper.variant_of((1, 128), (1, 128))
    choose = hopper_epilogue.choose
    assert choose(coarse, False, False, 128, 1024) is hopper_epilogue.WIDE
    assert choose(coarse, False, False, 128, 2048) is hopper_epilogue.TALL
    assert choose(coarse, True, False, 128, 1024) is hopper_epilogue.NARROW
    assert choose(column, False, False, 128, 1024) is hopper_epilogue.NARROW
    assert choose(coarse, False, True, 128, 1024) is hopper_epilogue.PAIRS
    assert choose(coarse, False, True, 32, 1024) is hopper_epilogue.NARROW


@dataclass(frozen=True)
class Built:
    """A compiled launch: PTX, shared bytes, stack bytes a thread, and the opcodes of each role of its warps."""

    ptx: str
    shared: int
    stack: int
    roles: list[list[str]]

    @property
    def multiplying(self) -> list[list[str]]:
        return [role for role in self.roles if any(opcode.startswith("QGMMA") for opcode in role)]

    def after_products(self, elements: int) -> float:
        """Instructions an element, of `elements` a thread, of the longest way after the last product."""
        return max(len(role) - _last(role, "QGMMA") for role in self.multiplying) / elements


def _last(opcodes: list[str], name: str) -> int:
    return max(i for i, opcode in enumerate(opcodes) if opcode.startswith(name))


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        block = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>"
    return "i32"


def build(call: Callable[[], object], tmp_path: Path) -> Built:
    """Compile the GEMM that `call` launches, as it launches it."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    launches = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel.fn.__name__.startswith("gemm"):
            launches.append((kernel, dict(zip(kernel.arg_names, args)), options))

    with (
        mock.patch.object(hopper, "_processors", return_value=132),
        mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
    ):
        call()
    ((kernel, values, options),) = launches
    names = kernel.arg_names
    constants = {(names.index(p.name),): values[p.name] for p in kernel.params if p.is_constexpr}
    signature = {p.name: "constexpr" if p.is_constexpr else type_of(values[p.name]) for p in kernel.params}
    aligned = [p.name for p in kernel.params if signature[p.name].startswith("*") and not p.do_not_specialize]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    used = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    code = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True).stdout
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", code, flags=re.MULTILINE)
    roles = " ".join(opcodes).split("USETMAXREG")[1:]
    return Built(
        ptx=compiled.asm["ptx"],
        shared=compiled.metadata.shared,
        stack=max(int(n) for n in re.findall(r"STACK:(\d+)", used)),
        roles=[list(role.split()) for role in roles],
    )


def operands(tokens: int, k: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = (torch.zeros(n, k, dtype=torch.uint8).view(torch.float8_e4m3fn) for n in (tokens, rows))
    return a, torch.zeros(tokens, k // 32, dtype=torch.uint8), b, torch.zeros(rows, k // 32, dtype=torch.uint8)


def forward(kind: str) -> Callable[[], object]:
    steps = Epilogue(activation=kind, rowwise=WIDE, emit_high=False, emit_sum=True)
    b_tile = interleaved_tile((128, 128)) if steps.gated else (128, 128)
    return lambda: hopper_epilogue.gemm_epilogue(
        *operands(24576, 1024, 512), None if steps.gated else torch.zeros(512, dtype=BF16), epilogue=steps,
        a_tile=(1, 128), b_tile=b_tile,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "sums", "instructions"),
    # Instructions a sum of the product, counted with triton 3.6 and 3.9: 18.8 (one of them promotes), 8.0.
    [(forward("gelu"), 64, 19.5), (forward("swiglu"), 128, 8.5)],
    ids=["gelu", "swiglu"],
)
def test_launches_for_sm_90a(call: Callable[[], object], sums: int, instructions: float, tmp_path: Path) -> None:
    built = build(call, tmp_path)
    products = set(re.findall(r"(?:wg)?mma[\w.]*\.m\d+n\d+k\d+[\w.]*", built.ptx))
    assert products == {"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"}
    assert built.shared <= 227 * 1024
    assert built.after_products(sums) <= instructions
    # Newer triton computes addresses before the first tile and puts them aside; a tile stores four words at most.
    assert built.stack <= (0 if VERSION == (3, 6) else 256)
    for role in built.multiplying:
        first = next(i for i, opcode in enumerate(role) if opcode.startswith("QGMMA"))
        assert sum(opcode.startswith("STL") for opcode in role[first:]) <= (0 if VERSION == (3, 6) else 4)


# What follows runs on the GPU.

SHAPES = [(4, 32, 32), (300, 224, 1000), (1028, 512, 512), (20000, 512, 512), (24576, 1024, 1024), (20000, 320, 2304)]


@pytest.fixture
def gpu() -> None:
    major = torch.cuda.get_device_capability()[0]
    if major != 9:
        pytest.skip(f"wgmma is Hopper's; this device has compute capability {major}")


def quantized(rows: int, k: int, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, k, device="cuda") * torch.exp2(torch.randint(-6, 7, (rows, 1), device="cuda").float())
    q, s = reference.quantize(x / k**0.5, tile=tile)
    return q, s.view(torch.uint8)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what} {i}"
        bits = [t.contiguous().view(torch.uint8) for t in (a, b)]
        different = int((bits[0] != bits[1]).sum())
        assert different == 0, f"{what}: {different} bytes of output {i} differ"


def poison(*shapes: tuple[int, int]) -> None:
    """What outputs are then allocated from."""
    for rows, cols in shapes:
        torch.empty(rows, cols, dtype=torch.uint8, device="cuda").fill_(255)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_has_the_bits_of_separate_kernels(shape: tuple[int, int, int], tiles: str) -> None:
    (m, n, k), (a_tile, b_tile) = shape, TILES[tiles]
    a, sa = quantized(m, k, a_tile)
    b, sb = quantized(n, k, b_tile)
    spec = QuantSpec(tile=(1, a_tile[1]))
    given: dict[str, Any] = {"a_tile": a_tile, "b_tile": b_tile}
    for kind, with_bias, with_residual in itertools.product(
        (*reference_ops.PLAIN_KINDS, None), (False, True), (False, True)
    ):
        bias = torch.randn(n, device="cuda", dtype=BF16) if with_bias else None
        residual = torch.randn(m, n, device="cuda", dtype=BF16) if with_residual else None
        steps = Epilogue(activation=kind, rowwise=spec, emit_high=True, emit_sum=True)
        poison((m, 2 * n), (m, 2 * n), (m, n))
        found = hopper_epilogue.gemm_epilogue(a, sa, b, sb, bias, residual, epilogue=steps, **given)
        z = hopper.gemm(a, sa, b, sb, bias, out_dtype=BF16, **given)
        expected = apart.finish(z, residual, epilogue=steps, gate=None, rotation=None, swizzled=False, pad_tokens=1)
        same(found, expected, f"{kind} bias={with_bias} residual={with_residual}")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_have_the_bits_of_two_products(shape: tuple[int, int, int], tiles: str) -> None:
    (m, n, k), (a_tile, b_tile) = shape, TILES[tiles]
    a, sa = quantized(m, k, a_tile)
    gate, up = (quantized(n, k, b_tile) for _ in range(2))
    b, sb = (interleave(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(gate, up))
    b = b.view(gate[0].dtype)
    bias = torch.randn(2 * n, device="cuda", dtype=BF16)
    spec, b_tile = QuantSpec(tile=(1, a_tile[1])), interleaved_tile(b_tile)
    given: dict[str, Any] = {"a_tile": a_tile, "b_tile": b_tile}
    for kind, added in itertools.product(reference_ops.GATED_KINDS, (None, bias)):
        steps = Epilogue(activation=kind, rowwise=spec, emit_high=True, emit_sum=True)
        poison((m, 2 * n), (m, 2 * n), (m, n))
        found = hopper_epilogue.gemm_epilogue(a, sa, b, sb, added, epilogue=steps, **given)
        of_gate, of_up = (None, None) if added is None else split(added)
        g = hopper.gemm(a, sa, *gate, of_gate, out_dtype=BF16, **given)
        z = hopper.gemm(a, sa, *up, of_up, out_dtype=BF16, **given)
        expected = apart.finish(z, None, epilogue=steps, gate=g, rotation=None, swizzled=False, pad_tokens=1)
        same(found, expected, f"{kind} bias={added is not None}")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_nan_and_inf_travel_as_they_do_apart() -> None:
    a, sa = quantized(20000, 512, (1, 128))
    b, sb = quantized(512, 512, (128, 128))
    sa[5, 4:8] = 255
    given: dict[str, Any] = {"a_tile": (1, 128), "b_tile": (128, 128)}
    steps = Epilogue(activation="gelu", rowwise=WIDE, emit_sum=True)
    found = hopper_epilogue.gemm_epilogue(a, sa, b, sb, epilogue=steps, **given)
    z = hopper.gemm(a, sa, b, sb, out_dtype=BF16, **given)
    expected = apart.finish(z, None, epilogue=steps, gate=None, rotation=None, swizzled=False, pad_tokens=1)
    assert found.z[5].isnan().all()
    same((*found[3:],), (*expected[3:],), "NaN")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_replay_in_a_cuda_graph_and_empty_operands() -> None:
    a, sa = quantized(20000, 512, (1, 128))
    b, sb = quantized(512, 512, (128, 128))
    z = torch.randn(20000, 512, device="cuda", dtype=BF16)
    given: dict[str, Any] = {"a_tile": (1, 128), "b_tile": (128, 128)}
    steps = Epilogue(activation="gelu", rowwise=WIDE, emit_high=False, emit_sum=True)
    after = Dact(activation="silu", rowwise=WIDE, colwise=WIDE, act_colwise=WIDE, emit_high=False, emit_bias=True)

    def both(rows: int = 20000) -> tuple[Tensor, ...]:
        return (
            *hopper_epilogue.gemm_epilogue(a[:rows], sa[:rows], b, sb, epilogue=steps, **given),
            *hopper_dact.gemm_dact(a[:rows], sa[:rows], b, sb, z[:rows], epilogue=after, **given),
        )

    eager = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.zero_()
    graph.replay()
    same(captured, eager, "graph")
    none = both(0)
    assert none[1].shape == (0, 512)
    assert none[3].shape == (0, 512)
    assert not none[9].any()
