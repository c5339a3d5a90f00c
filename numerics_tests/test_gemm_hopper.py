"""The Hopper GEMM on its GPU: exact where arithmetic is, within the derived bound elsewhere, at every edge."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mxfp8_recipe.fused import reference

pytestmark = pytest.mark.gpu

TILES = {
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "1x128 by 32x128": ((1, 128), (32, 128)),
    "1x128 by 1x128": ((1, 128), (1, 128)),
    "1x32 by 32x32": ((1, 32), (32, 32)),
    "1x32 by 1x32": ((1, 32), (1, 32)),
    "32x32 by 1x32": ((32, 32), (1, 32)),
}
SHAPES = [
    (1, 32, 32),
    (77, 96, 160),
    (300, 224, 1000),
    (128, 128, 128),
    (20000, 512, 512),
    (26000, 256, 2304),
    (256, 128, 65536),
]


@pytest.fixture(autouse=True)
def hopper() -> None:
    major = torch.cuda.get_device_capability()[0]
    if major != 9:
        pytest.skip(f"wgmma is Hopper's; this device has compute capability {major}")


def gemm(*args: Any, **kwargs: Any) -> Tensor:
    from mxfp8_recipe.fused.gemm import hopper

    return hopper.gemm(*args, **kwargs)


def quantized(rows: int, k: int, tile: tuple[int, int], elem: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """(qdata, scale, their values in fp64) of data whose rows and blocks differ in magnitude by up to 2**12."""
    x = torch.randn(rows, k, device="cuda")
    x = x * torch.exp2(torch.randint(-6, 7, (rows, 1), device="cuda").float())
    x[:, ::7] *= 16
    qdata, scale = reference.quantize(x, tile=tile, elem=elem)
    return qdata, scale, reference.dequantize(qdata, scale, dtype=torch.float64)


def sum_bound(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, chunk: int) -> Tensor:
    """How far the kernel's fp32 sum may lie from the exact one.

    One wgmma over 32 of K aligns 33 addends (its products and the accumulator) to the largest and cuts each 2**-13
    below it; a chunk makes chunk / 32 of them. The largest is no more than the sum of the chunk's magnitudes. Chunks,
    at most K / chunk + 1 additions with bias or splits, add fp32's own rounding.
    """
    a, b = a.float(), b.float()
    bound = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    magnitude = torch.zeros_like(bound)
    af = reference.scale_to_float(a_scale).double()
    bf = reference.scale_to_float(b_scale).double()
    for k in range(0, a.shape[1], chunk):
        part = a[:, k : k + chunk].abs().double() @ b[:, k : k + chunk].abs().double().t()
        part = part * af[:, k // 32, None] * bf[None, :, k // 32]
        magnitude += part
        bound += chunk // 32 * 33 * 2.0**-13 * part
    return bound + magnitude * (a.shape[1] / chunk + 34) * 2.0**-24


def check(
    out: Tensor, a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor], tiles: str, bias: Tensor | None
) -> None:
    exact = a[2] @ b[2].t()
    if bias is not None:
        exact = exact + bias.double()
    a_tile, b_tile = TILES[tiles]
    bound = sum_bound(a[0], a[1], b[0], b[1], 128 if min(a_tile[1], b_tile[1]) == 128 else 32)
    unit = torch.finfo(out.dtype).eps / 2
    bound = bound + (exact.abs() + bound) * unit + 2.0**-30
    assert not out.isnan().any(), "an element was not written"
    excess = ((out.double() - exact).abs() - bound).max()
    assert excess <= 0, f"{excess:.3g} beyond the derived bound"
    error = (out.double() - exact).norm() / exact.norm()
    print(f"{tiles} {tuple(out.shape)} {out.dtype}: relative error {error:.2e}")
    # Measured in fp32: 2.0e-4 to 3.1e-4 summing 128 of K at a time, 1.5e-4 to 2.0e-4 summing 32.
    assert error < 1e-3 + 2 * unit, f"relative error {error:.2e}"


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_variant_at_every_edge(shape: tuple[int, int, int], tiles: str) -> None:
    m, n, k = shape
    a, b = quantized(m, k, TILES[tiles][0]), quantized(n, k, TILES[tiles][1])
    for dtype, with_bias in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if with_bias else None
        torch.empty(m * n, dtype=dtype, device="cuda").fill_(float("nan"))  # what the output is then allocated from
        out = gemm(a[0], a[1], b[0], b[1], bias, out_dtype=dtype, a_tile=TILES[tiles][0], b_tile=TILES[tiles][1])
        assert (out.shape, out.dtype) == ((m, n), dtype)
        check(out, a, b, tiles, bias)


@pytest.mark.parametrize("tiles", TILES)
def test_identity_and_powers_of_two_come_through_exactly(tiles: str) -> None:
    a_tile, b_tile = TILES[tiles]
    values, scale, exact = quantized(384, 256, a_tile)
    eye = torch.eye(256, device="cuda") * torch.exp2(torch.arange(256, device="cuda") % 8)
    q, s = reference.quantize(eye, tile=b_tile)
    expected = exact @ reference.dequantize(q, s, dtype=torch.float64).t()
    out = gemm(values, scale, q, s, a_tile=a_tile, b_tile=b_tile)
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("elems", list(itertools.product(("e4m3", "e5m2"), repeat=2)), ids=str)
def test_element_formats_mix(elems: tuple[str, str]) -> None:
    a, b = quantized(200, 512, (1, 128), elems[0]), quantized(96, 512, (128, 128), elems[1])
    out = gemm(a[0], a[1], b[0], b[1], out_dtype=torch.float32, a_tile=(1, 128), b_tile=(128, 128))
    check(out, a, b, "1x128 by 128x128", None)


@pytest.mark.parametrize("tiles", TILES)
def test_largest_products_beside_small_ones_stay_within_the_bound(tiles: str) -> None:
    """448 * 448 cancels and leaves products far below it: the tensor core cuts what it is allowed to, no more."""
    a_tile, b_tile = TILES[tiles]
    k = 512
    a, b = torch.exp2(-torch.randint(0, 8, (128, k), device="cuda").float()), torch.ones(128, k, device="cuda")
    a[:, 0::32], a[:, 1::32] = 448.0, -448.0
    b[:, 0::32] = b[:, 1::32] = 448.0
    qa, qb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.full((128, k // 32), 127, dtype=torch.uint8, device="cuda")
    out = gemm(qa, one, qb, one, a_tile=a_tile, b_tile=b_tile)
    exact = qa.double() @ qb.double().t()
    largest = 448.0 * 448.0
    bound = k // 32 * 33 * 2.0**-13 * largest + exact.abs() * 2.0**-20
    error = (out.double() - exact).abs()
    print(f"{tiles}: largest error {error.max():.4g}, allowed {bound.max():.4g}, exact about {exact.mean():.4g}")
    assert (error <= bound).all()
    assert error.max() > 0, "the sum is exact: SUM_BITS understates this tensor core"


def test_scale_bytes_at_the_ends_of_their_range() -> None:
    for tiles in TILES:
        a_tile, b_tile = TILES[tiles]
        q = torch.randint(-8, 9, (256, 256), device="cuda").float().to(torch.float8_e4m3fn)
        sa = torch.full((256, 8), 127, dtype=torch.uint8, device="cuda")
        sb = torch.zeros_like(sa)  # 2**-127
        sa[:] = 127 + 100
        out = gemm(q, sa, q, sb, a_tile=a_tile, b_tile=b_tile)
        exact = q.double() @ q.double().t() * 2.0**-27
        assert torch.equal(out.double(), exact), tiles
        out = gemm(q, sb, q, sa, a_tile=a_tile, b_tile=b_tile)
        assert torch.equal(out.double(), exact), tiles


@pytest.mark.parametrize("tiles", TILES)
def test_a_nan_block_makes_its_row_or_column_nan_and_no_other(tiles: str) -> None:
    a_tile, b_tile = TILES[tiles]
    a, b = quantized(300, 384, a_tile), quantized(160, 384, b_tile)
    sa, sb = a[1].view(torch.uint8).clone(), b[1].view(torch.uint8).clone()
    sa[7 : 7 + 1, 4:8] = 255
    first = 96 // b_tile[0] * b_tile[0]
    sb[first : first + b_tile[0], 8:12] = 255
    out = gemm(a[0], sa, b[0], sb, a_tile=a_tile, b_tile=b_tile)
    expected = torch.zeros(300, 160, dtype=torch.bool, device="cuda")
    expected[7], expected[:, first : first + b_tile[0]] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("shape", [(512, 256, 1024), (128, 128, 32768)], ids=str)
def test_accumulates_into_a_buffer_and_repeats_bit_for_bit(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = quantized(m, k, (1, 128)), quantized(n, k, (1, 128))
    kwargs = {"a_tile": (1, 128), "b_tile": (1, 128)}
    plain = gemm(a[0], a[1], b[0], b[1], **kwargs)
    held = torch.randn(m, n, device="cuda") * plain.abs().mean()
    total = held.clone()
    returned = gemm(a[0], a[1], b[0], b[1], accumulate_into=total, **kwargs)
    assert returned is total
    added = total.double() - held.double()
    assert (added - plain.double()).norm() < 1e-6 * plain.double().norm()
    again = held.clone()
    gemm(a[0], a[1], b[0], b[1], accumulate_into=again, **kwargs)
    assert torch.equal(total, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 224, 1024), (128, 128, 32768), (20000, 512, 512)], ids=str)
@pytest.mark.parametrize("tiles", ["1x128 by 128x128", "1x128 by 1x128", "1x32 by 32x32"])
def test_adds_a_residual_before_rounding(tiles: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    a_tile, b_tile = TILES[tiles]
    a, b = quantized(m, k, a_tile), quantized(n, k, b_tile)
    kwargs = {"a_tile": a_tile, "b_tile": b_tile}
    plain = gemm(a[0], a[1], b[0], b[1], out_dtype=torch.float32, **kwargs)
    wide = (torch.randn(m, 2 * n, device="cuda") * plain.abs().mean()).to(dtype)
    residual, bias = wide[:, n:], torch.randn(n, device="cuda")
    out = gemm(a[0], a[1], b[0], b[1], bias, out_dtype=dtype, residual=residual, **kwargs)
    expected = plain.double() + bias.double() + residual.double()
    assert out.dtype == dtype
    assert (out.double() - expected).norm() < (1e-6 + torch.finfo(dtype).eps / 2) * expected.norm()


def test_empty_operands_and_errors() -> None:
    a, b = quantized(64, 96, (1, 32)), quantized(64, 96, (1, 32))
    assert gemm(a[0][:0], a[1][:0], b[0], b[1]).shape == (0, 64)
    with pytest.raises(ValueError, match="multiple of 32"):
        gemm(a[0], a[1], b[0][:33], b[1][:33])
    with pytest.raises(ValueError, match="a_scale shape"):
        gemm(a[0], a[1][:, :1], b[0], b[1])
    with pytest.raises(ValueError, match="residual of shape"):
        gemm(a[0], a[1], b[0], b[1], residual=torch.zeros(64, 32, device="cuda"))
    with pytest.raises(TypeError, match="accumulate_into of dtype"):
        gemm(a[0], a[1], b[0], b[1], accumulate_into=torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16))


def test_replays_in_a_cuda_graph() -> None:
    a, b = quantized(1000, 512, (1, 128)), quantized(256, 512, (128, 128))
    kwargs = {"out_dtype": torch.bfloat16, "a_tile": (1, 128), "b_tile": (128, 128)}
    eager = gemm(a[0], a[1], b[0], b[1], **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemm(a[0], a[1], b[0], b[1], **kwargs)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, eager)


def test_token_counts_do_not_compile_anew() -> None:
    from mxfp8_recipe.fused.gemm import _gluon

    kwargs = {"out_dtype": torch.bfloat16, "a_tile": (1, 128), "b_tile": (128, 128)}
    b = quantized(256, 512, (128, 128))
    known = []
    for m in (100, 101, 117):
        a = quantized(m, 512, (1, 128))
        gemm(a[0], a[1], b[0], b[1], **kwargs)
        known.append(len(_gluon._compiled))
    assert len(set(known)) == 1
