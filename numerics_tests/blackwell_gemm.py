"""Run the Blackwell epilogue kernel in Triton's interpreter, which must be chosen before triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools

import torch

from mxfp8_recipe.fused import activation_quantize, reference
from mxfp8_recipe.fused.gemm import blackwell
from mxfp8_recipe.fused.gemm.epilogue import Epilogue, Rope, Rotation, finish, gemm_epilogue, interleave, rotate
from mxfp8_recipe.fused.scale_layout import swizzle_scale
from mxfp8_recipe.fused.spec import QuantSpec

BF16, FP16 = torch.bfloat16, torch.float16
genuine_empty = torch.empty


def poisoned(*args, **kwargs):
    """torch.empty hands out NaN and 0xFF bytes."""
    x = genuine_empty(*args, **kwargs)
    return x.fill_(float("nan") if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1)


def operands(m: int, n: int, k: int, tiles: tuple[str, str] = ("1x32", "1x32"), elems: tuple[str, str] = ("e4m3",) * 2):
    a = reference.quantize(
        torch.randn(m, k) * torch.exp2(torch.randint(-8, 8, (m, 1)).float()), tile=tiles[0], elem=elems[0]
    )
    b = reference.quantize(torch.randn(n, k), tile=tiles[1], elem=elems[1])
    return *a, *b


def close(actual: torch.Tensor, expected: torch.Tensor, unit: float, what: str) -> None:
    """The order of fp32 sums differs, so a value near a tie may round to its neighbor."""
    assert actual.shape == expected.shape, what
    error = (actual.double() - expected.double()).abs()
    # A row's sum is as large as its terms; 2**-20 of that is 16 fp32 units.
    bound = expected.double().abs() * unit + expected.double().abs().amax(1, keepdim=True) * 2.0**-20
    assert (error <= bound).all(), f"{what}: {(error / bound).max():.2f} of the bound"


def check(m, n, k, epilogue: Epilogue, *, dtype=BF16, bias=False, residual=False, swizzled=True, **kinds) -> None:
    what = f"{m}x{n}x{k} {epilogue} {dtype} {kinds}"
    a, sa, b, sb = operands(m, n, k, **kinds)
    extra = torch.randn(n).to(dtype) if bias else None
    more = torch.randn(m, n).to(dtype) if residual else None
    emit = Epilogue(
        activation=epilogue.activation, rowwise=epilogue.rowwise, emit_high=epilogue.emit_high, emit_sum=True
    )
    z = gemm_epilogue(a, sa, b, sb, extra, epilogue=Epilogue(), out_dtype=dtype)[0]
    out = blackwell.gemm_epilogue(
        a, swizzle_scale(sa), b, sb, extra, more, epilogue=emit, out_dtype=dtype, swizzled=swizzled
    )
    close(out[1], z, torch.finfo(dtype).eps, f"{what} z")
    # Given the kernel's own z, every later step has the bits of the kernel that does it alone.
    y = out[1]
    if epilogue.activation is not None:
        y = activation_quantize.activation_quantize(y, None, epilogue.activation, dtype, None, None, True)[0]
    apart = finish(y, more, epilogue=Epilogue(rowwise=epilogue.rowwise), swizzled=swizzled)
    assert torch.equal(out[0], apart[0] if epilogue.emit_high else apart[0][:0, 0]), f"{what} y"
    for name, fused, alone in zip(("qdata", "scale"), out[3:5], apart[3:5]):
        assert fused.shape == alone.shape, f"{what} {name}"
        assert torch.equal(fused, alone), f"{what} {name} differs in {int((fused != alone).sum())}"
    assert epilogue.rowwise is None or out.qdata.any(), "nothing was quantized"


def check_gated(
    m, n, k, kind: str, row: QuantSpec | None, *, bias=False, residual=False, swizzled=True, **more
) -> None:
    """Two interleaved weights against each alone, by the same kernel, and the steps after it on their own."""
    what = f"{m}x{n}x{k} {kind} {row} {more}"
    (a, sa, up, s_up), (_, _, gate, s_gate) = (operands(m, n, k) for _ in range(2))
    group, dtype = more.get("group", 32), more.get("dtype", BF16)
    of_gate, of_up = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    added = interleave(of_gate, of_up, group) if bias else None
    extra = torch.randn(m, n).to(dtype) if residual else None
    epilogue = Epilogue(activation=kind, rowwise=row, group=group, emit_sum=True, emit_high=more.get("high", True))
    both = interleave(gate, up, group), interleave(s_gate, s_up, group)
    facts = {"epilogue": epilogue, "out_dtype": dtype, "swizzled": swizzled}
    out = blackwell.gemm_epilogue(a, sa, *both, added, extra, **facts)
    for found, w, s, one in ((out.gate, gate, s_gate, of_gate), (out.z, up, s_up, of_up)):
        alone = blackwell.gemm_epilogue(a, sa, w, s, one if bias else None, epilogue=Epilogue(), out_dtype=dtype).y
        assert torch.equal(found, alone), f"{what} z"
    y = activation_quantize.activation_quantize(out.z, out.gate, kind, dtype, None, None, True)[0]
    apart = finish(y, extra, epilogue=Epilogue(rowwise=row, emit_high=epilogue.emit_high), swizzled=swizzled)
    assert all(map(torch.equal, (out.y, *out[3:]), (apart.y, *apart[3:]))), what
    assert row is None or out.qdata.any(), "nothing was quantized"


def check_rope(m, n, k, rope: Rope, row: QuantSpec | None, *, positions: bool, dtype=BF16) -> None:
    """The rotation of the kernel's own z, as the definition turns it."""
    a, sa, b, sb = operands(m, n, k)
    angles = torch.arange(9.0)[:, None] * torch.rand(rope.head_dim // 2)
    rotation = Rotation(angles.cos(), angles.sin(), torch.randint(0, 9, (m,)) if positions else None)
    epilogue = Epilogue(rope=rope, rowwise=row, emit_sum=True)
    assert not blackwell.problem(epilogue, dtype)
    out = blackwell.gemm_epilogue(
        a, sa, b, sb, epilogue=epilogue, rotation=rotation, out_dtype=dtype, swizzled=True
    )  # fmt: skip
    apart = finish(rotate(out.z, rope, rotation), epilogue=Epilogue(rowwise=row), swizzled=True)
    assert all(map(torch.equal, (out.y, *out[3:]), (apart.y, *apart[3:]))), f"{m}x{n}x{k} {rope} {positions}"
    assert not torch.equal(out.y, out.z)


def check_apart() -> None:
    """What the kernel does not do runs in kernels after it, with the bits of the definition after the kernel's sum."""
    a, sa, b, sb = operands(40, 96, 64)
    bias, residual, spec = torch.randn(96).bfloat16(), torch.randn(40, 96).bfloat16(), QuantSpec()
    angles = torch.arange(7.0)[:, None] * torch.rand(16)
    rotation = Rotation(angles.cos(), angles.sin(), torch.randint(0, 7, (40,)))
    for epilogue, more, tables in (
        (Epilogue(rowwise=QuantSpec(tile=(32, 32)), activation="relu", emit_sum=True), None, None),
        (Epilogue(rowwise=spec, colwise=spec, activation="silu", emit_sum=True), residual, None),
        (Epilogue(colwise=spec, rope=Rope(head_dim=32, interleaved=True), emit_sum=True), None, rotation),
    ):
        assert blackwell.problem(epilogue, BF16)
        facts = {"epilogue": epilogue, "rotation": tables, "swizzled": True, "pad_tokens": 32}
        out = blackwell.gemm_epilogue(a, sa, b, sb, bias, more, **facts)
        z = blackwell.gemm_epilogue(a, sa, b, sb, bias, epilogue=Epilogue()).y
        y = z
        if epilogue.activation:
            y = activation_quantize.activation_quantize(z, None, epilogue.activation, BF16, None, None, True)[0]
        if tables is not None:
            y = rotate(z, epilogue.rope, tables)
        expected = finish(
            y, more, epilogue=Epilogue(rowwise=epilogue.rowwise, colwise=epilogue.colwise), swizzled=True, pad_tokens=32
        )
        assert torch.equal(out.z, z)
        assert all(map(torch.equal, (out.y, *out[3:]), (expected.y, *expected[3:]))), epilogue


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoned
    spec = QuantSpec()
    for m, n, k in ((5, 32, 32), (130, 160, 160), (257, 96, 288)):
        check(m, n, k, Epilogue(), bias=True)
        check(m, n, k, Epilogue(rowwise=spec, activation="relu"), bias=True, residual=True)
    check(130, 160, 96, Epilogue(rowwise=spec), swizzled=False)
    check(130, 256, 96, Epilogue(rowwise=QuantSpec(tile=(1, 128)), activation="silu"), swizzled=False)
    check(33, 288, 64, Epilogue(rowwise=QuantSpec(elem="e5m2", scale_rounding="floor"), activation="relu2"), dtype=FP16)
    check(40, 64, 160, Epilogue(rowwise=spec, activation="gelu", emit_high=False), bias=True)
    for m, n, k in ((5, 32, 32), (130, 160, 96), (40, 64, 160)):
        check_gated(m, n, k, "swiglu", spec, bias=True)
    check_gated(33, 96, 64, "geglu", spec, swizzled=False, residual=True, dtype=FP16)
    check_gated(33, 64, 64, "reglu", QuantSpec(elem="e5m2", scale_rounding="floor"), group=8, high=False)
    check_gated(33, 96, 64, "geglu_tanh", None)
    check_gated(9, 64, 64, "swiglu", QuantSpec(tile=(1, 128)), bias=True)
    check_rope(40, 192, 64, Rope(head_dim=64), spec, positions=False)
    check_rope(130, 160, 64, Rope(head_dim=32, columns=96), spec, positions=True)
    check_rope(33, 192, 64, Rope(head_dim=96, interleaved=True, columns=96), None, positions=True, dtype=FP16)
    check_rope(5, 128, 64, Rope(head_dim=128, interleaved=True), QuantSpec(tile=(1, 128)), positions=False)
    check_apart()
    for tiles in itertools.product(("1x32", "32x32", "1x128", "128x128"), repeat=2):
        check(40, 64, 160, Epilogue(rowwise=spec), tiles=tiles)
    for elems in itertools.product(("e4m3", "e5m2"), repeat=2):
        check(16, 64, 64, Epilogue(rowwise=spec), elems=elems)
    a, sa, b, sb = operands(100, 64, 96)
    wide = blackwell.gemm_epilogue(a, sa, b, sb, torch.ones(64), epilogue=Epilogue(), out_dtype=torch.float32)[0]
    close(wide, reference.gemm(a, sa, b, sb, torch.ones(64)), 2.0**-20, "fp32")
    odd = blackwell.gemm_epilogue(a[:, :80], sa, b[:, :80], sb, epilogue=Epilogue(), out_dtype=torch.float32)[0]
    close(odd, reference.gemm(a[:, :80], sa, b[:, :80], sb), 2.0**-20, "K no multiple of 32")
    nan = sa.view(torch.uint8).clone()
    nan[7, 1] = 255
    out = blackwell.gemm_epilogue(a, nan, b, sb, epilogue=Epilogue(rowwise=spec))[0]
    assert bool(out[7].isnan().all())
    assert not bool(out[[*range(7), *range(8, 100)]].isnan().any())
    check_padding(a, sa, b, sb)


def check_padding(a, sa, b, sb) -> None:
    """Rows past M are never multiplied. Blocks past K are: zero bytes add nothing, and others show as NaN."""
    rows, blocks = (-(-a.shape[0] // 128) * 128, -(-sa.shape[1] // 4) * 4)
    assert blocks > sa.shape[1] and rows > a.shape[0]  # noqa: PT018
    expected = blackwell.gemm_epilogue(a, sa, b, sb, epilogue=Epilogue())[0]
    for past_m, past_k, same in ((255, 0, True), (0, 255, False)):
        padded = torch.zeros(rows, blocks, dtype=torch.uint8)
        padded[:, blocks - 1], padded[a.shape[0] :] = past_k, past_m
        padded[: a.shape[0], : sa.shape[1]] = sa.view(torch.uint8)
        out = blackwell.gemm_epilogue(a, swizzle_scale(padded), b, sb, epilogue=Epilogue())[0]
        assert torch.equal(out, expected) if same else bool(out.isnan().all())


main()
