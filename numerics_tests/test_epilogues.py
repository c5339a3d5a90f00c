"""The definition of a GEMM's epilogue: every step has the bits of the op that does it alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_recipe.fused import reference, reference_ops
from mxfp8_recipe.fused.gemm import epilogue as steps
from mxfp8_recipe.fused.gemm.dact import Dact, differentiate, gemm_dact
from mxfp8_recipe.fused.gemm.epilogue import Epilogue, Rope, Rotation, gemm_epilogue
from mxfp8_recipe.fused.scale_layout import swizzle_scale
from mxfp8_recipe.fused.spec import TILES, QuantSpec
from numerics_tests.helpers import same_bits

M, N, K = 70, 96, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECS = [QuantSpec(tile=tile) for tile in TILES] + [QuantSpec(elem="e5m2", scale_rounding="floor")]  # pyright: ignore[reportArgumentType]
PLAIN, GATED = reference_ops.PLAIN_KINDS, tuple(reference_ops.GATED_KINDS)


def operands(rows: int = N, tile: str = "1x32") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *reference.quantize(torch.randn(M, K)), *reference.quantize(torch.randn(rows, K), tile=tile)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.short)
def test_plain_steps_are_those_of_separate_ops(spec: QuantSpec, dtype: torch.dtype) -> None:
    a = operands()
    bias, residual = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
    for kind, more, (row, col) in itertools.product(
        (None, *PLAIN), (None, residual), ((spec, None), (None, spec), (spec, spec))
    ):
        epilogue = Epilogue(activation=kind, rowwise=row, colwise=col, emit_sum=True)
        out = gemm_epilogue(*a, bias, more, epilogue=epilogue, out_dtype=dtype)
        z = reference.gemm(*a, bias, out_dtype=dtype)
        y = z if kind is None else reference_ops.activation_quantize(z, None, kind, dtype, None, None, True)[0]
        if more is not None:
            y = y + more
        same(out, (y, z, y.new_empty(0), *reference_ops.quantize_both(y, row, col)))
        assert out.qdata.any() == (row is not None)
        assert out.qdata_t.any() == (col is not None)


@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("kind", GATED)
def test_gated_steps_are_those_of_two_layers(kind: str, group: int) -> None:
    """Interleaved weights give what each gives alone, whichever tiles they were quantized in."""
    for dtype, tile in itertools.product(DTYPES, ("1x32", "32x32", "128x128")):
        (a, sa, up, s_up), (_, _, gate, s_gate) = operands(tile=tile), operands(tile=tile)
        of_gate, of_up = torch.randn(N).to(dtype), torch.randn(N).to(dtype)
        spec = QuantSpec()
        both = steps.interleave(gate, up, group), steps.interleave(s_gate, s_up, group)
        epilogue = Epilogue(activation=kind, group=group, rowwise=spec, colwise=spec, emit_sum=True)
        out = gemm_epilogue(a, sa, *both, steps.interleave(of_gate, of_up, group), epilogue=epilogue, out_dtype=dtype)
        z_gate = reference.gemm(a, sa, gate, s_gate, of_gate, out_dtype=dtype)
        z_up = reference.gemm(a, sa, up, s_up, of_up, out_dtype=dtype)
        y, *quantized = reference_ops.activation_quantize(z_up, z_gate, kind, dtype, spec, spec, True)
        same(out, (y, z_up, z_gate, *quantized))


def test_interleaving() -> None:
    gate, up = torch.arange(96), torch.arange(96, 192)
    both = steps.interleave(gate, up)
    assert both[:32].tolist() == gate[:32].tolist()
    assert both[32:64].tolist() == up[:32].tolist()
    rows = torch.arange(2 * 96).view(2, -1, steps.GROUP).transpose(0, 1).flatten()  # of gate's, then up's
    assert torch.equal(both, torch.cat((gate, up))[rows])
    assert all(map(torch.equal, steps.split(both), (gate, up)))
    one, other = torch.randint(0, 255, (2, 96, 5)).to(torch.uint8)
    swizzled = steps.interleave_scale(swizzle_scale(one), swizzle_scale(other), 96, 5, swizzled=True)
    assert torch.equal(swizzled, swizzle_scale(steps.interleave(one, other)))
    assert torch.equal(steps.interleave_scale(one, other, 96, 5), steps.interleave(one, other))
    assert steps.interleaved_tile((128, 128)) == (32, 128)
    with pytest.raises(ValueError, match="a multiple of 32"):
        steps.interleave(gate[:40], up[:40])
    with pytest.raises(ValueError, match="a multiple of 64"):
        steps.split(both[:96])


def by_hand(z: Tensor, rope: Rope, cos: Tensor, sin: Tensor, positions: list[int]) -> Tensor:
    """Element by element, in Python."""
    out, half = z.float().clone(), rope.head_dim // 2
    for row, position in enumerate(positions):
        for head in range(0, rope.columns or z.shape[1], rope.head_dim):
            for i in range(half):
                u, v = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
                a, b = z[row, head + u].float(), z[row, head + v].float()
                c, s = cos[position, i], sin[position, i]
                out[row, head + u], out[row, head + v] = a * c - b * s, a * s + b * c
    return out.to(z.dtype)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("columns", [0, 32])
def test_rope_turns_pairs_of_the_rounded_sum(interleaved: bool, columns: int) -> None:
    a = operands()
    a = (a[0][:9], a[1][:9], *a[2:])
    rope = Rope(head_dim=32, interleaved=interleaved, columns=columns)
    angles = torch.arange(5.0)[:, None] * 10.0 ** -(torch.arange(16) / 16)
    for dtype, at in itertools.product(DTYPES, (None, torch.randint(0, 5, (9,)))):
        rotation = Rotation(angles.cos(), angles.sin(), at)
        epilogue = Epilogue(rope=rope, rowwise=QuantSpec(), colwise=QuantSpec(), emit_sum=True)
        out = gemm_epilogue(*a, epilogue=epilogue, rotation=rotation, out_dtype=dtype)
        positions = [m % 5 for m in range(9)] if at is None else at.tolist()
        assert same_bits(out.z, reference.gemm(*a, out_dtype=dtype))
        assert same_bits(out.y, by_hand(out.z, rope, angles.cos(), angles.sin(), positions))
        same(out[3:], reference_ops.quantize_both(out.y, QuantSpec(), QuantSpec()))
        if columns:
            assert same_bits(out.y[:, 32:], out.z[:, 32:])


@pytest.mark.parametrize("kind", [*PLAIN, *GATED])
def test_the_gradient_s_steps_are_those_of_separate_ops(kind: str) -> None:
    a = operands()
    spec, square = QuantSpec(), QuantSpec(tile=(32, 32))
    for dtype, (row, col, act), high in itertools.product(
        DTYPES, ((None, None, None), (spec, spec, spec), (square, square, None)), (True, False)
    ):
        z, gate = torch.randn(M, N).to(dtype), torch.randn(M, N).to(dtype) if kind in GATED else None
        epilogue = Dact(
            activation=kind, rowwise=row, colwise=col, act_colwise=act, emit_high=high, emit_bias=row is not None
        )
        out = gemm_dact(*a, z, gate, epilogue=epilogue, out_dtype=dtype, pad_tokens=32)
        grad = reference.gemm(*a, out_dtype=dtype)
        expected = reference_ops.activation_backward(
            grad, z, gate, kind, row, col, row is not None, act, emit_high=high, pad_tokens=32
        )
        same(out, expected)
        same(differentiate(grad, z, gate, epilogue=epilogue, pad_tokens=32), expected)


def test_gradients_are_autograd_s() -> None:
    """Within the rounding of fp32 sums: the definition agrees with torch's own derivative of GELU."""
    a = operands()
    z = torch.randn(M, N, requires_grad=True)
    grad = reference.gemm(*a)
    F.gelu(z).backward(grad)
    dz = gemm_dact(*a, z.detach(), epilogue=Dact(activation="gelu"), out_dtype=torch.float32)[0]
    torch.testing.assert_close(dz, z.grad)


def test_texts_say_all_there_is() -> None:
    spec = QuantSpec(tile=(1, 128), elem="e5m2")  # pyright: ignore[reportArgumentType]
    for epilogue in (
        Epilogue(),
        Epilogue(activation="swiglu", group=8, rowwise=spec, emit_high=False, emit_sum=True),
        Epilogue(rope=Rope(head_dim=64, interleaved=True, columns=128), colwise=spec),
    ):
        assert Epilogue.decode(epilogue.encode()) == epilogue
    for dact in (Dact(activation="relu"), Dact(activation="geglu", rowwise=spec, act_colwise=spec, emit_bias=True)):
        assert Dact.decode(dact.encode()) == dact


def test_errors() -> None:
    with pytest.raises(ValueError, match="rounded to nearest without a rotation"):
        Epilogue(rowwise=QuantSpec(hadamard=32))
    with pytest.raises(ValueError, match="rounded to nearest without a rotation"):
        Dact(activation="relu", colwise=QuantSpec(rounding="stochastic"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="gelu and rope, expected one"):
        Epilogue(activation="gelu", rope=Rope(head_dim=32))
    with pytest.raises(ValueError, match="whole heads"):
        Rope(head_dim=32, columns=40)
    a, tables = operands(), (torch.ones(4, 16), torch.ones(4, 16))
    with pytest.raises(ValueError, match="expected both or neither"):
        gemm_epilogue(*a, epilogue=Epilogue(rope=Rope(head_dim=32)))
    with pytest.raises(ValueError, match=r"expected \(positions, 24\) float32"):
        gemm_epilogue(*a, epilogue=Epilogue(rope=Rope(head_dim=48)), rotation=Rotation(*tables))
    residual, wide = torch.zeros(M, N), torch.ones(4, 32)
    with pytest.raises(ValueError, match="rope and a residual"):
        gemm_epilogue(*a, None, residual, epilogue=Epilogue(rope=Rope(head_dim=32)), rotation=Rotation(*tables))
    few = Rotation(*tables, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions \(5,\) torch.int64, expected \(70,\) int64"):
        gemm_epilogue(*a, epilogue=Epilogue(rope=Rope(head_dim=32)), rotation=few)
    with pytest.raises(ValueError, match="whole heads of 64"):
        gemm_epilogue(*a, epilogue=Epilogue(rope=Rope(head_dim=64)), rotation=Rotation(wide, wide))
