"""The Blackwell backend without its GPU: what cuBLAS is called with, whole layers over it, and which device gets what.

`scaled_mm` is a fake that enforces what torch documents and checks for MXFP8, and then multiplies by the reference.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("triton", reason="the module that calls cuBLAS also launches Triton kernels")

from mxfp8_recipe import apply_recipe, backends, doctor, load_recipe, plan_recipe
from mxfp8_recipe.backends import table
from mxfp8_recipe.fused import reference, reference_ops
from mxfp8_recipe.fused.gemm import blackwell
from mxfp8_recipe.fused.gemm.epilogue import Epilogue, Rope, gemm_epilogue
from mxfp8_recipe.fused.scale_layout import swizzle_scale, swizzled_numel, unswizzle_scale
from mxfp8_recipe.fused.spec import QuantSpec

SIGNATURE = inspect.signature(F.scaled_mm)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
calls: list[tuple[int, int, int]] = []
epilogues: list[Epilogue] = []


def up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def strict_scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    """What `scaled_mm` demands of MXFP8 operands on a Blackwell GPU, each demand with torch's own words for it.

    Source: torch 2.13, aten/src/ATen/native/cuda/ScaledBlas.cpp; cuBLAS documentation, "Narrow Precision Data Types
    Usage": dimensions and leading dimensions multiples of 16 bytes, addresses aligned to 16.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a, b, sa, sb, bias, out_dtype = (
        bound.arguments[n] for n in ("mat_a", "mat_b", "scale_a", "scale_b", "bias", "output_dtype")
    )
    (m, k), (k_b, n) = a.shape, b.shape
    assert k == k_b, "mat_a and mat_b shapes cannot be multiplied"
    assert {a.dtype, b.dtype} <= {E4M3, E5M2}, "mat_a and mat_b must be fp8 types"
    assert (a.dtype, b.dtype) != (E5M2, E5M2), "Multiplication of two Float8_e5m2 matrices is not supported"
    assert k % 16 == 0 and n % 16 == 0, "must be divisible by 16"  # noqa: PT018
    assert k % 32 == 0, "a block of the contraction is not whole"
    assert a.stride(1) == 1 and a.stride(0) >= k, "mat_a is not row-major"  # noqa: PT018
    assert b.stride(0) == 1 and b.stride(1) >= k, "mat_b is not column-major"  # noqa: PT018
    for x, leading in ((a, a.stride(0)), (b, b.stride(1))):
        assert leading % 16 == 0 and x.data_ptr() % 16 == 0, "rows do not start on 16 bytes"  # noqa: PT018
    for side, scale, rows in (("a", sa, m), ("b", sb, n)):
        assert bound.arguments[f"scale_recipe_{side}"] == F.ScalingType.BlockWise1x32
        assert bound.arguments[f"swizzle_{side}"] == F.SwizzleType.SWIZZLE_32_4_4, "must be swizzled to SWIZZLE_32_4_4"
        assert scale.dtype == torch.float8_e8m0fnu
        assert scale.is_contiguous(), "both scales should be contiguous"
        assert scale.numel() == up(rows, 128) * up(k // 32, 4), f"scale_{side} should have other elements"
        plain = unswizzle_scale(scale, rows, k // 32)
        assert torch.equal(swizzle_scale(plain).view(torch.uint8), scale.view(torch.uint8)), "padding is not zero"
    if bias is not None:
        assert bias.numel() == n
        assert out_dtype != torch.float32, "Bias is not supported when out_dtype is set to Float32"
        assert bias.dtype == out_dtype, "Bias must have the dtype of the output"
        assert out_dtype in (torch.bfloat16, torch.float16)
    assert not bound.arguments["use_fast_accum"]
    assert not bound.arguments["contraction_dim"]
    calls.append((m, n, k))
    scales = unswizzle_scale(sa, m, k // 32), unswizzle_scale(sb, n, k // 32)
    return reference.gemm(a, scales[0], b.t(), scales[1], bias, out_dtype=out_dtype)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    epilogues.clear()
    monkeypatch.setattr(F, "scaled_mm", strict_scaled_mm)


def plain_epilogue(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The definition, of operands whose scales lie in the 128x4 layout."""
    epilogues.append(kwargs["epilogue"])
    blocks = a.shape[1] // 32
    scales = unswizzle_scale(sa, a.shape[0], blocks), unswizzle_scale(sb, b.shape[0], blocks)
    return gemm_epilogue(a, scales[0], b, scales[1], *args, **kwargs)


@pytest.fixture
def on_blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for a Blackwell GPU: its table, its layouts, and plain torch in place of the Triton kernels."""
    rows = dict(table._TABLE)
    for op, backend in list(rows):
        if backend == "blackwell" and op in (*table._MEMORY_BOUND, "gemm_epilogue"):
            kernel = rows[op, backend]
            assert isinstance(kernel, table.Kernel)
            plain = plain_epilogue if op == "gemm_epilogue" else getattr(reference_ops, kernel.name)
            rows[op, backend] = partial(plain, **dict(kernel.options))
        if backend == "blackwell" and op == "matmul":
            rows[op, backend] = reference.matmul
    monkeypatch.setattr(table, "_TABLE", rows)
    monkeypatch.setattr(table, "choose", lambda device: table._for_capability(10, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for cached in (table.resolve, table.layout):
        cached.cache_clear()
    yield
    for cached in (table.resolve, table.layout):
        cached.cache_clear()


@pytest.mark.parametrize("elems", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("tiles", [("1x32", "1x32"), ("1x128", "128x128"), ("32x32", "32x32")], ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 32), (197, 224, 160), (300, 96, 1000), (33, 128, 80)], ids=str)
def test_scaled_mm_gets_what_it_demands(
    shape: tuple[int, int, int], tiles: tuple[str, str], elems: tuple[torch.dtype, torch.dtype]
) -> None:
    m, n, k = shape
    names = {E4M3: "e4m3", E5M2: "e5m2"}
    a = reference.quantize(torch.randn(m, k), tile=tiles[0], elem=names[elems[0]])
    b = reference.quantize(torch.randn(n, k), tile=tiles[1], elem=names[elems[1]])
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        for bias in (None, torch.randn(n, dtype=torch.bfloat16), torch.randn(n)):
            for scales in ((a[1], b[1]), (swizzle_scale(a[1]), swizzle_scale(b[1]).view(torch.uint8))):
                out = blackwell.gemm(a[0], scales[0], b[0], scales[1], bias, out_dtype=out_dtype)
                expected = reference.gemm(*a, *b, bias, out_dtype=out_dtype)
                if k % 32 == 0:
                    assert torch.equal(out, expected)
                else:  # fp32 sums of another length
                    assert (out.double() - expected.double()).norm() <= 4e-3 * expected.double().norm()
                assert out.dtype == out_dtype
    assert calls == [(m, n, up(k, 32))] * 18


def test_strided_and_misaligned_operands_are_copied_first() -> None:
    q, s = reference.quantize(torch.randn(40, 96))
    w, t = reference.quantize(torch.randn(64, 96))
    expected = reference.gemm(q, s, w, t)
    wide = torch.zeros(40, 130, dtype=torch.uint8)
    wide[:, 3:99] = q.view(torch.uint8)
    moved = wide[:, 3:99].view(E4M3)
    transposed = w.t().contiguous().t()
    assert torch.equal(blackwell.gemm(moved, s, transposed, t), expected)


def test_two_e5m2_operands_go_to_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(blackwell, "gemm_epilogue", lambda *args, **kwargs: (launched.append(kwargs), None, None, None))
    q, s = reference.quantize(torch.randn(32, 64), elem="e5m2")
    blackwell.gemm(q, s, q, s)
    assert launched
    assert not calls


def test_empty_operands_and_errors() -> None:
    q, s = reference.quantize(torch.randn(64, 96))
    none = blackwell.gemm(q[:0], s[:0], q, s)
    assert none.shape == (0, 64)
    assert torch.equal(blackwell.gemm(q[:, :0], s[:, :0], q[:, :0], s[:, :0], torch.ones(64)), torch.ones(64, 64))
    y, z, _, qdata, scale, *_ = blackwell.gemm_epilogue(q[:0], s[:0], q, s, epilogue=Epilogue(rowwise=QuantSpec()))
    assert (y.shape, z.shape, qdata.shape, scale.shape) == ((0, 64), (0,), (0, 64), (0, 2))
    with pytest.raises(
        ValueError, match=r"a_scale shape \(64, 1\), expected \(512,\) in the 128x4 layout or \(64, 3\)"
    ):
        blackwell.gemm(q, s[:, :1], q, s)
    with pytest.raises(TypeError, match="expected float8"):
        blackwell.gemm(q.float(), s, q, s)
    with pytest.raises(ValueError, match="multiple of 16"):
        blackwell.gemm(q, s, q[:40], s[:40])
    with pytest.raises(ValueError, match="multiple of 32"):
        blackwell.gemm_epilogue(q, s, q[:48], s[:48], epilogue=Epilogue())
    with pytest.raises(ValueError, match="multiple of 64 for two weights"):
        blackwell.gemm_epilogue(q, s, q[:32], s[:32], epilogue=Epilogue(activation="swiglu"))
    assert "32x32 tiles span rows" in blackwell.problem(Epilogue(rowwise=QuantSpec(tile=(32, 32))), torch.bfloat16)
    assert "whole heads of 96" in blackwell.problem(Epilogue(rope=Rope(head_dim=96)), torch.bfloat16)
    assert not blackwell.problem(Epilogue(rope=Rope(head_dim=96, interleaved=True)), torch.bfloat16)
    assert "wider" in blackwell.problem(Epilogue(activation="swiglu", rowwise=QuantSpec(tile=(1, 128))), torch.bfloat16)
    assert "groups of 128" in blackwell.problem(Epilogue(activation="swiglu", group=128), torch.bfloat16)
    assert not blackwell.problem(Epilogue(activation="gelu", rowwise=QuantSpec(), emit_sum=True), torch.float16)
    pair = blackwell.gemm_epilogue(q[:0], s[:0], q, s, epilogue=Epilogue(activation="swiglu", emit_sum=True))
    assert (pair.y.shape, pair.z.shape, pair.gate.shape) == ((0, 32), (0, 32), (0, 32))
    with pytest.raises(ValueError, match="did you mean 'gelu'"):
        Epilogue(activation="gelo")


def test_the_epilogue_is_what_separate_ops_do() -> None:
    """The definition itself, spelled out once more with torch's own functions."""
    a, b = reference.quantize(torch.randn(40, 64)), reference.quantize(torch.randn(96, 64))
    bias, residual = torch.randn(96), torch.randn(40, 96).bfloat16()
    epilogue = Epilogue(activation="relu", rowwise=QuantSpec(), emit_sum=True)
    y, z, _, qdata, scale, *_ = gemm_epilogue(*a, *b, bias, residual, epilogue=epilogue, swizzled=True)
    expected_z = (reference.dequantize(*a) @ reference.dequantize(*b).t() + bias).bfloat16()
    torch.testing.assert_close(z, expected_z, rtol=2**-7, atol=1e-5)
    assert torch.equal(y, F.relu(z) + residual)
    q, s = reference.quantize(y)
    assert torch.equal(qdata, q.view(torch.uint8))
    assert torch.equal(scale, swizzle_scale(s).view(torch.uint8))
    assert torch.equal(F.relu(z) + residual, y)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_ops_lay_scales_out_by_the_rule(rows: int, blocks: int, tokens_over: int, colwise: bool) -> None:
    """Every byte by the formula, padding zero, on random shapes: (r % 32) * 16 + (r // 32) * 4 + c inside a tile."""
    x = torch.randn(rows + tokens_over, blocks * 32)
    spec = QuantSpec()
    out = reference_ops.quantize_both(x, spec, spec, swizzled=True, pad_tokens=32)
    plain = reference_ops.quantize_both(x, spec, spec, pad_tokens=32)
    flat, matrix = (out[3], plain[3]) if colwise else (out[1], plain[1])
    height, width = matrix.shape
    assert flat.numel() == swizzled_numel(height, width) == up(height, 128) * up(width, 4)
    r, c = torch.meshgrid(torch.arange(up(height, 128)), torch.arange(up(width, 4)), indexing="ij")
    at = (r // 128 * (up(width, 4) // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    expected = torch.zeros(up(height, 128), up(width, 4), dtype=torch.uint8)
    expected[:height, :width] = matrix
    assert torch.equal(flat[at], expected)


def test_padding_is_no_part_of_a_rotation() -> None:
    x, spec = torch.randn(70, 64), QuantSpec(hadamard=32)
    padded, exact = (reference_ops.quantize_both(x, None, spec, pad_tokens=n) for n in (32, 1))
    assert torch.equal(padded[2][:, :70], exact[2])
    assert torch.equal(padded[3], exact[3])
    assert not padded[2][:, 70:].any()


class Block(nn.Module):
    """Norm, up, activation, down and residual: every edge the planner fuses."""

    def __init__(self, width: int = 96, hidden: int = 160) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.act = nn.GELU()
        self.middle, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.middle(F.silu(self.gate(h)) * self.up(h))))


def step(recipe: str, tokens: int, compiled: bool = False, fuse: bool = True) -> list[Any]:
    """Output and every gradient of one step of a block in MXFP8."""
    torch.manual_seed(0)
    net = Block().bfloat16()
    changes = {"gpu_min_features": 32, "rules": {}, "bf16_last_fraction": 0.0, "fuse": fuse}
    small = load_recipe(recipe).model_copy(update=changes)
    report = apply_recipe(net, small, example_inputs=torch.randn(8, 96).bfloat16(), strict=True)
    assert len(report.converted) >= 4
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    torch.manual_seed(2)
    run = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else net
    out = run(x)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters())]


def expected_epilogues(recipe: str) -> list[tuple[str | None, bool]]:
    """The gated pair, `middle` with GELU and MXFP8 out, where their tiles are the kernel's, and `down`'s residual.

    Gem rounds gradients at random, each layer by its own draw: no pair.
    """
    found: list[tuple[str | None, bool]] = [("swiglu", False), ("gelu", False), (None, True)]
    return found[{"mxfp8_square_activations": 2, "mxfp8_hopper": 1, "gem": 1}.get(recipe, 0) :]


RECIPES = ("mxfp8", "mxfp8_hopper", "mxfp8_square", "mxfp8_square_activations", "mxfp8_floor", "gem")


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_those_of_the_reference(recipe: str, tokens: int, request: pytest.FixtureRequest) -> None:
    """Swizzled scales, padded tokens and cuBLAS's layouts through fprop, dgrad and wgrad, fused edges included."""
    expected = step(recipe, tokens)
    request.getfixturevalue("on_blackwell")
    assert backends.select(torch.device("cpu")) == "blackwell"
    found = step(recipe, tokens)
    assert len(calls) >= 8
    assert [(e.activation, e.rowwise is None) for e in epilogues] == expected_epilogues(recipe)
    assert {k for _, _, k in calls} <= {96, 160, up(tokens, 32)}
    for ours, reference_value in zip(found, expected):
        # Zeros past the last token change the order of wgrad's fp32 sum alone.
        assert (ours.double() - reference_value.double()).norm() <= 2e-3 * reference_value.double().norm()
    assert torch.equal(found[0], expected[0])


@pytest.mark.usefixtures("on_blackwell")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hopper"])
def test_a_layer_with_an_epilogue_has_one_implementation(recipe: str) -> None:
    """Unfused, such a layer runs the kernel that has epilogues, without steps; the bits are those of the fused one."""
    fused = step(recipe, 70)
    with_steps, multiplied = len(epilogues), len(calls)
    epilogues.clear()
    calls.clear()
    stored = step(recipe, 70, fuse=False)
    assert [e for e in epilogues if e != Epilogue()] == []
    assert len(epilogues) == with_steps + (recipe == "mxfp8"), "gate and up are one GEMM when fused"
    assert len(calls) == multiplied
    assert all(map(torch.equal, fused, stored))


@pytest.mark.usefixtures("on_blackwell")
def test_traced_shapes_are_the_real_ones() -> None:
    torch._dynamo.reset()
    for eager, compiled in zip(step("mxfp8", 70), step("mxfp8", 70, compiled=True)):
        assert torch.equal(eager, compiled)
    assert calls


@pytest.mark.usefixtures("on_blackwell")
def test_fakes_have_the_layout_of_the_ops() -> None:
    spec = QuantSpec().encode()
    x = torch.randn(70, 96)
    for op, arguments in (
        (torch.ops.mxfp8_recipe.quantize, (x, spec, spec, None, 0, "auto")),
        (torch.ops.mxfp8_recipe.quantize_and_sum, (x, spec, spec, None, 0, "auto")),
        (torch.ops.mxfp8_recipe.activation_quantize, (x, None, "gelu", x.dtype, spec, spec, False, None, 0, "auto")),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


CAPABILITIES = [
    ((8, 9), "reference", "the kernels need 9.0", True),
    ((9, 0), "hopper", "FP8 wgmma", False),
    ((10, 0), "blackwell", "cuBLAS multiplies MXFP8 blocks", False),
    ((10, 3), "blackwell", "cuBLAS multiplies MXFP8 blocks", False),
    ((11, 0), "triton", "tl.dot_scaled multiplies MXFP8 blocks", False),
    ((12, 0), "triton", "tl.dot_scaled multiplies MXFP8 blocks", False),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes `cuda` a GPU of a compute capability."""

    def become(capability: tuple[int, int], cuda: str = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        table.choose.cache_clear()

    yield become
    table.choose.cache_clear()


@pytest.mark.parametrize(("capability", "backend", "why", "emulates"), CAPABILITIES, ids=str)
def test_each_gpu_gets_a_backend_and_is_told_why(
    gpu: Any,
    capability: tuple[int, int],
    backend: str,
    why: str,
    emulates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "version", lambda name: "3.9.0")
    gpu(capability)
    choice = backends.choose(torch.device("cuda"))
    assert (choice.backend, choice.emulates) == (backend, emulates)
    assert why in str(choice)
    assert f"compute capability {capability[0]}.{capability[1]}" in str(choice)
    rows = {row.op: row for row in backends.describe("cuda")}
    assert rows["gemm"].status == ("emulated" if emulates else "native")
    assert why in rows["gemm"].reason
    if backend != "reference":
        assert rows["attention_forward"].status == "missing"
        assert set(table.CORE_OPS) <= {op for op, row in rows.items() if row.status != "missing"}


def test_an_old_cublas_is_said_with_its_remedy(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((10, 0), cuda="12.6")
    choice = backends.choose(torch.device("cuda"))
    assert choice.backend == "triton"
    assert "cuBLAS 12.6 cannot, 12.8 can; install a torch built for CUDA 12.8 or newer" in str(choice)
    monkeypatch.delattr(F, "scaled_mm")
    table.choose.cache_clear()
    assert "no torch.nn.functional.scaled_mm; pip install 'torch>=2.11'" in str(backends.choose(torch.device("cuda")))


def test_an_old_triton_is_said_with_its_remedy(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "version", lambda name: "3.6.0")
    gpu((11, 0))
    choice = backends.choose(torch.device("cuda"))
    assert (choice.backend, choice.remedy) == ("reference", "pip install -U 'triton>=3.9'")
    gpu((12, 0))
    assert backends.select(torch.device("cuda")) == "triton"


def test_doctor_names_the_backend_and_the_remedy(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((10, 0), cuda="12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (line,) = (finding for finding in doctor._backends() if finding.what == "backend")
    assert line.status == "native"
    assert line.reason.startswith("triton: compute capability 10.0")
    assert line.remedy == "install a torch built for CUDA 12.8 or newer"
    gpu((8, 0))
    (line,) = (finding for finding in doctor._backends() if finding.what == "backend")
    assert (line.status, line.reason.split(":")[0]) == ("emulated", "reference")


def test_a_gpu_without_triton_is_told_what_to_install(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((10, 0))
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    choice = backends.choose(torch.device("cuda"))
    assert (choice.backend, choice.remedy) == ("reference", "pip install triton")


def test_plan_and_apply_say_that_a_gpu_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = table._for_capability(8, 6)
    monkeypatch.setattr(backends, "choose", lambda device: choice)
    net = nn.Sequential(nn.Linear(64, 64))
    plan = plan_recipe(net)
    monkeypatch.setattr(type(plan), "gpu_emulates", property(lambda self: self.emulates))
    assert f"NOT NATIVE: {choice.why}" in str(plan)
    with pytest.warns(UserWarning, match="compute capability 8.6, and the kernels need 9.0"):
        apply_recipe(net)


@pytest.mark.usefixtures("on_blackwell")
def test_a_plan_names_its_backend_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "choose", table.choose)
    assert "Backend blackwell: compute capability 10.0: cuBLAS multiplies MXFP8 blocks" in str(
        plan_recipe(nn.Sequential(nn.Linear(256, 256)))
    )


PAGE = Path(__file__).resolve().parents[1] / "docs" / "blackwell.md"
MX_RATE, BF16_RATE, BYTES = 4.5e15, 2.25e15, 8e12


def bound(m: int, n: int, k: int, mx: bool) -> tuple[float, str]:
    """Seconds a GEMM takes at least on a B200, and what bounds it."""
    arithmetic = 2 * m * n * k / (MX_RATE if mx else BF16_RATE)
    memory = (((m + n) * k * (33 / 32 if mx else 2)) + 2 * m * n) / BYTES
    return max(arithmetic, memory), "arithmetic" if arithmetic >= memory else "memory"


def test_the_roofline_is_its_formula_s() -> None:
    rows = re.findall(r"^\| (\d+)x(\d+)x(\d+) \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) >= 6
    for *shape, cells in rows:
        m, n, k = map(int, shape)
        (plain, _), (mx, by) = bound(m, n, k, False), bound(m, n, k, True)
        gemms = [(m, n, k), (m, k, n), (n, k, m)]
        high, low = (sum(bound(*gemm, is_mx)[0] for gemm in gemms) for is_mx in (False, True))
        weight, rest = ((2 + 2 * 33 / 32) * e / BYTES for e in (n * k, m * k + m * n))
        ratios = plain / mx, high / (low + weight + rest), high / (low + weight)
        expected = [f"{plain * 1e6:.0f}", f"{mx * 1e6:.0f}", by, *(f"{ratio:.2f}x" for ratio in ratios)]
        assert cells.split(" | ") == expected
