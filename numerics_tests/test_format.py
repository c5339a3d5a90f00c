"""The format against recorded answers of independent implementations, a naive quantizer, and its own laws."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxfp8_recipe.fused.reference import (
    dequantize,
    gemm,
    hadamard_signs,
    quantize,
    quantize_spec,
    random_hadamard,
    scale_bytes,
    scale_to_float,
)
from mxfp8_recipe.fused.spec import HADAMARD_SIZES, TILES, Elem, QuantSpec, ScaleRounding
from numerics_tests.helpers import matmul_oracle, same_bits, seen

VECTORS = json.loads((Path(__file__).parent / "mx_vectors.json").read_text())
ELEMS = ("e4m3", "e5m2")
MODES = ("rceil", "floor")
PAIRS = list(itertools.product(ELEMS, MODES))
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
SPECIAL = (math.nan, math.inf, -math.inf)


def block_of(case: dict) -> Tensor:
    words = [int(word, 16) for word in case["x_f32_bits"]]
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.float32).copy())


def recorded_cases(elem: str, mode: str) -> list[tuple[str, Tensor, int, str | None]]:
    """(name, block, scale byte, element bytes) of every answer on which the recorded implementations agree."""
    cases = []
    for case in VECTORS["cases"]:
        agreed = case["expected"].get(f"{elem}/{mode.upper()}", {}).get("agreed")
        if agreed is not None:
            cases.append((case["name"], block_of(case), agreed["scale"], agreed["elems"]))
    for case in VECTORS["torchao_semantic_contract"]["cases"]:
        if (case["elem"], case["mode"]) == (elem, mode.upper()):
            cases.append((f"contract {case['name']}", block_of(case), case["scale"], case["elems"]))
    return cases


def disagreements(cases: list, qdata: Tensor, scale: Tensor) -> list[str]:
    """Names of the cases whose bytes differ; elements of a NaN block are compared as a class, by its byte."""
    wrong = []
    for (name, _, byte, elems), got, got_byte in zip(cases, qdata.view(torch.uint8), scale.view(torch.uint8)):
        expected = None if elems is None or byte == 255 else list(bytes.fromhex(elems))
        if int(got_byte) != byte or (expected is not None and got.tolist() != expected):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("elem", "mode"), PAIRS)
def test_recorded_vectors(elem: str, mode: str) -> None:
    """Every block, as a row, as a column, and alone; also in bf16 and fp16 where the values survive the cast."""
    cases = recorded_cases(elem, mode)
    assert len(cases) >= 30
    blocks = torch.stack([block for _, block, _, _ in cases])
    qdata, scale = quantize(blocks, elem=elem, scale_rounding=mode)
    assert disagreements(cases, qdata, scale[:, 0]) == []
    columns, scales = quantize(blocks.T, axis=-2, elem=elem, scale_rounding=mode)
    assert disagreements(cases, columns.T.contiguous(), scales[0]) == []
    alone = [quantize(block, elem=elem, scale_rounding=mode) for _, block, _, _ in cases]
    assert disagreements(cases, torch.stack([q for q, _ in alone]), torch.cat([s for _, s in alone])) == []
    for dtype in (torch.bfloat16, torch.float16):
        exact = [c for c in cases if torch.allclose(c[1].to(dtype).float(), c[1], 0, 0, equal_nan=True)]
        assert exact
        qdata, scale = quantize(torch.stack([c[1] for c in exact]).to(dtype), elem=elem, scale_rounding=mode)
        assert disagreements(exact, qdata, scale[:, 0]) == []


def exact_byte(amax: float, elem: str, mode: str) -> int:
    """The scale byte from the definition, by exact comparison of fp64 values."""
    if not math.isfinite(amax):
        return 255
    if amax == 0.0:
        return 0
    if mode == "floor":
        exponent = math.frexp(amax)[1] - 1 - {"e4m3": 8, "e5m2": 15}[elem]
    else:
        exponent = math.frexp(amax)[1] - 20
        while amax > math.ldexp(LARGEST[elem], exponent):
            exponent += 1
    return max(exponent + 127, 0)


@pytest.mark.parametrize(("elem", "mode"), PAIRS)
def test_scale_byte_of_every_exponent(elem: str, mode: str) -> None:
    """Mantissas at and beside a power of two and 1.75 * 2**k, for all 255 exponents: where log2 in fp32 goes wrong."""
    mantissas = (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFE, 0x7FFFFF)
    words = np.array([(e << 23) | m for e in range(255) for m in mantissas], dtype=np.int32)
    amax = torch.from_numpy(words.view(np.float32).copy())
    got = scale_bytes(amax, Elem(elem), ScaleRounding(mode)).tolist()
    assert got == [exact_byte(float(a), elem, mode) for a in amax.tolist()]


def test_nan_amax_of_either_sign() -> None:
    """A vectorized maximum returns all ones for NaN, whose sign bit is set."""
    words = torch.tensor([0x7FC00000, 0x7F800001, 0x7F800000, -1, -0x400000], dtype=torch.int32)
    assert scale_bytes(words.view(torch.float32), Elem.E4M3, ScaleRounding.RCEIL).tolist() == [255] * 5


def naive_elements(scaled: np.ndarray, elem: str) -> np.ndarray:
    """Nearest element code by search in the enumerated values, ties to the even code, saturating."""
    dtype = Elem(elem).dtype
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double().numpy()
    grid = values[: int(np.argmax(values == LARGEST[elem])) + 1]
    magnitude = np.minimum(np.abs(scaled), LARGEST[elem])
    above = np.searchsorted(grid, magnitude).clip(1, len(grid) - 1)
    low, high = magnitude - grid[above - 1], grid[above] - magnitude
    pick_low = (low < high) | ((low == high) & ((above - 1) % 2 == 0))
    return np.where(pick_low, above - 1, above) | np.where(np.signbit(scaled), 0x80, 0)


def naive_quantize(x: Tensor, tile: tuple[int, int], elem: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Tile by tile from the definition, blocks along the last dim: element codes and scale bytes."""
    values = x.double().numpy()
    rows, cols = values.shape
    codes, scales = np.zeros((rows, cols), int), np.zeros((rows, -(-cols // 32)), int)
    for r, c in itertools.product(range(0, rows, tile[0]), range(0, cols, tile[1])):
        part = values[r : r + tile[0], c : c + tile[1]]
        byte = exact_byte(float(np.abs(part).max()), elem, mode)
        scales[r : r + tile[0], c // 32 : -(-(c + part.shape[1]) // 32)] = byte
        if byte != 255:
            codes[r : r + tile[0], c : c + tile[1]] = naive_elements(part * 2.0 ** (127 - byte), elem)
    return codes, scales


def spread(shape: tuple[int, ...], octaves: int = 12) -> Tensor:
    """Normal values over many octaves, some zeros of both signs among them."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-octaves, octaves, shape).float())
    return torch.where(torch.rand(shape) < 0.02, torch.copysign(torch.zeros(()), x), x)


@pytest.mark.parametrize("tile", TILES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("shape", [(64, 256), (37, 70), (1, 1), (33, 129), (130, 31)], ids=str)
def test_every_tile_both_axes(tile: tuple[int, int], shape: tuple[int, int]) -> None:
    """Against the naive quantizer, aligned and ragged; the byte is equal in all 32-blocks of a wide tile."""
    x = spread(shape)
    x[-1, -1] = math.nan
    for elem, mode in itertools.product(ELEMS, MODES):
        for axis in (-1, -2):
            operand = x if axis == -1 else x.T
            qdata, scale = quantize(operand, axis=axis, tile=tile, elem=elem, scale_rounding=mode)
            assert qdata.shape == operand.shape
            qdata, scale = (qdata, scale) if axis == -1 else (qdata.T, scale.T)
            codes, bytes_ = naive_quantize(x, tile, elem, mode)
            assert scale.dtype == torch.float8_e8m0fnu
            assert np.array_equal(scale.contiguous().view(torch.uint8).numpy(), bytes_)
            live = np.repeat(bytes_, 32, axis=1)[:, : shape[1]] != 255
            assert np.array_equal(qdata.contiguous().view(torch.uint8).numpy()[live], codes[live])


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("tile", TILES, ids="{0[0]}x{0[1]}".format)
def test_batches_do_not_touch(tile: tuple[int, int], axis: int) -> None:
    x = spread((2, 3, 45, 70))
    qdata, scale = quantize(x, axis=axis, tile=tile)
    for index in itertools.product(range(2), range(3)):
        alone, alone_scale = quantize(x[index], axis=axis, tile=tile)
        assert same_bits(qdata[index], alone)
        assert same_bits(scale[index], alone_scale)


def test_large_tensors_and_strides_change_nothing() -> None:
    """A tensor taken in several pieces, transposed, strided or expanded gives the bytes of its contiguous rows."""
    x = spread((700, 1024))
    x[300, 5] = math.nan
    qdata, scale = quantize(x)
    rows = [quantize(part) for part in x.split(64)]
    assert same_bits(qdata, torch.cat([q.view(torch.uint8) for q, _ in rows]).view(qdata.dtype))
    assert same_bits(scale, torch.cat([s.view(torch.uint8) for _, s in rows]).view(scale.dtype))
    for view in (x.T.contiguous().T, torch.stack((x, x), 1)[:, 0]):
        again, again_scale = quantize(view)
        assert same_bits(again, qdata)
        assert same_bits(again_scale, scale)
    down, down_scale = quantize(x.T, axis=-2)
    assert same_bits(down.T, qdata)
    assert same_bits(down_scale.T, scale)
    wide, wide_scale = quantize(x[:1].expand(40, -1))
    assert same_bits(wide[7], qdata[0])
    assert same_bits(wide_scale[39], scale[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", SPECIAL)
def test_nan_and_infinity_anywhere_mark_exactly_their_block(value: float, mode: str) -> None:
    x = torch.randn(32, 96)
    for position in range(32):
        x[position, 32 + position] = value
    for axis, operand in ((-1, x), (-2, x.T)):
        qdata, scale = quantize(operand, axis=axis, scale_rounding=mode)
        marked = scale.view(torch.uint8) == 255 if axis == -1 else scale.T.contiguous().view(torch.uint8) == 255
        assert marked.tolist() == [[False, True, False]] * 32
        out = dequantize(qdata, scale, axis=axis)
        out = out if axis == -1 else out.T
        assert out[:, 32:64].isnan().all()
        assert out[:, :32].isfinite().all()
        assert out[:, 64:].isfinite().all()


@pytest.mark.parametrize("elem", ELEMS)
def test_zeros_and_byte_zero_blocks(elem: str) -> None:
    """A zero keeps its sign, and a block at the bottom of the range is 2**-127 times its elements, never NaN."""
    zeros = torch.tensor([0.0, -0.0] * 16)
    qdata, scale = quantize(zeros, elem=elem)
    assert scale.view(torch.uint8).tolist() == [0]
    assert qdata.view(torch.uint8).tolist() == [0, 0x80] * 16
    tiny = torch.full((32,), 2.0**-127)
    tiny[1] = -(2.0**-149)
    qdata, scale = quantize(tiny, elem=elem)
    assert scale.view(torch.uint8).tolist() == [0]
    assert dequantize(qdata, scale)[0] == 2.0**-127
    assert torch.signbit(dequantize(qdata, scale)[1])


def test_dequantize_is_exact_for_every_code_and_byte() -> None:
    """256 codes by 256 bytes, in fp64 against their product; NaN by either factor."""
    for elem in ELEMS:
        codes = torch.arange(256, dtype=torch.uint8).view(Elem(elem).dtype)
        qdata = codes.view(torch.uint8).repeat(256, 1).view(codes.dtype)
        scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 8).contiguous()
        out = dequantize(qdata, scale, dtype=torch.float64)
        factors = torch.tensor([math.ldexp(1.0, b - 127) if b < 255 else math.nan for b in range(256)]).double()
        expected = factors.unsqueeze(1) * codes.float().double()
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(torch.signbit(out[:255, 128:]), torch.signbit(expected[:255, 128:]))
    assert scale_to_float(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="float64, expected float32, bfloat16 or float16"):
        quantize(torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="axis 0 for a 3-D tensor"):
        quantize(torch.zeros(2, 2, 2), axis=0)
    with pytest.raises(ValueError, match="tile: got 16x16, expected one of 1x32"):
        quantize(torch.zeros(4, 4), tile=(16, 16))
    with pytest.raises(ValueError, match=r"elem: .*scale_rounding: .*rounding: "):
        quantize(torch.zeros(4, 4), elem="e3m4", scale_rounding="up", rounding="random")
    with pytest.raises(ValueError, match="square tile 32x32"):
        quantize(torch.zeros(4, 4), tile=(32, 32), hadamard=32)
    with pytest.raises(ValueError, match="no seed"):
        quantize_spec(torch.zeros(4, 4), QuantSpec(rounding="stochastic"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"scale shape \(4, 2\), expected \(4, 1\)"):
        dequantize(torch.zeros(4, 32).to(torch.float8_e4m3fn), torch.zeros(4, 2, dtype=torch.uint8))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = st.lists(finite, min_size=32, max_size=32).map(lambda v: torch.tensor(v, dtype=torch.float32))
quick = settings(max_examples=60, deadline=None)


@quick
@given(blocks, st.sampled_from(ELEMS), st.sampled_from(TILES), st.integers(1, 70))
def test_rceil_is_within_half_an_ulp_of_the_tiles_grid(
    block: Tensor, elem: str, tile: tuple[int, int], cols: int
) -> None:
    """For finite input: no NaN, no saturation, and at most half the spacing of the format at each element."""
    x = block.repeat(3)[:cols].repeat(2, 1)
    x[1] *= 2.0**-3
    qdata, scale = quantize(x, tile=tile, elem=elem)
    out = dequantize(qdata, scale, dtype=torch.float64)
    assert out.isfinite().all()
    factor = scale_to_float(scale).double().repeat_interleave(32, 1)[:, :cols]
    scaled = x.double() / factor
    exponent = torch.frexp(scaled.abs())[1] - 1
    spacing = torch.exp2(exponent.clamp(min=Elem(elem).min_exponent).double() - Elem(elem).mantissa_bits)
    assert (scaled.abs() <= LARGEST[elem]).all()
    assert ((out - x.double()).abs() <= factor * spacing / 2).all()


@quick
@given(blocks, st.sampled_from(ELEMS), st.sampled_from(MODES), st.sampled_from(TILES))
def test_values_are_idempotent(block: Tensor, elem: str, mode: str, tile: tuple[int, int]) -> None:
    """Quantizing what was quantized changes no value. Above 2**127 rounding up reaches 2**128, which fp32 lacks."""
    block = block.clamp(-(2.0**127), 2.0**127)
    x = dequantize(*quantize(block.repeat(2, 4), tile=tile, elem=elem, scale_rounding=mode))
    again = dequantize(*quantize(x, tile=tile, elem=elem, scale_rounding=mode))
    assert torch.equal(again, x)


@quick
@given(
    st.lists(st.integers(-(2**23), 2**23), min_size=64, max_size=64),
    st.integers(-60, 60),
    st.sampled_from(MODES),
    st.sampled_from(TILES),
)
def test_scale_equivariance(words: list[int], shift: int, mode: str, tile: tuple[int, int]) -> None:
    """A power of two passes through to the scale bytes alone, away from the ends of the exponent range."""
    x = torch.tensor(words, dtype=torch.float32).view(2, 32)
    qdata, scale = quantize(x, tile=tile, scale_rounding=mode)
    shifted, shifted_scale = quantize(x * 2.0**shift, tile=tile, scale_rounding=mode)
    assert same_bits(qdata, shifted)
    zero = scale.view(torch.uint8) == 0
    moved = torch.where(zero, 0, scale.view(torch.uint8).int() + shift)
    assert torch.equal(shifted_scale.view(torch.uint8).int(), moved)


@quick
@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 2**31), st.sampled_from([(32, 32), (128, 128)]))
def test_square_tiles_are_transpose_invariant(rows: int, cols: int, seed: int, tile: tuple[int, int]) -> None:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    along_rows = dequantize(*quantize(x, tile=tile))
    along_cols = dequantize(*quantize(x, axis=-2, tile=tile), axis=-2)
    assert torch.equal(along_rows, along_cols)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_hadamard_is_orthonormal_and_cancels_in_a_gemm(size: int) -> None:
    """Its matrix is orthogonal to fp32 rounding: log2(size) additions and two multiplications an element."""
    depth = math.log2(size) + 2
    matrix = random_hadamard(torch.eye(size), size).double()
    assert (matrix.abs() - size**-0.5).abs().max() <= size**-0.5 * depth * 2.0**-24
    assert (matrix @ matrix.T - torch.eye(size).double()).abs().max() <= 2 * depth * 2.0**-24
    sylvester = torch.ones(1, 1)
    while len(sylvester) < size:
        sylvester = torch.cat((torch.cat((sylvester, sylvester), 1), torch.cat((sylvester, -sylvester), 1)))
    signs = hadamard_signs(size)
    assert torch.equal(matrix.T.sign().float(), sylvester * signs)
    assert size // 4 < int((signs > 0).sum()) < size - size // 4
    a, b = torch.randn(5, 3 * size + 7), torch.randn(4, 3 * size + 7)
    rotated_a, rotated_b = random_hadamard(a, size), random_hadamard(b, size)
    assert torch.equal(rotated_a[:, 3 * size :], a[:, 3 * size :])
    assert not torch.equal(rotated_a[:, :size], a[:, :size])
    limit = 2 * depth * 2.0**-24 * a.norm(dim=1).double().outer(b.norm(dim=1).double())
    assert ((rotated_a.double() @ rotated_b.double().T - a.double() @ b.double().T).abs() <= limit).all()


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_hadamard_in_a_quantized_gemm(size: int) -> None:
    """The rotated product carries quantization error of the plain one's size, not the same error; columns as rows."""
    a, b = torch.randn(64, 256), torch.randn(64, 256)
    truth = a.double() @ b.double().T
    products = [seen(a, QuantSpec(hadamard=h), -1) @ seen(b, QuantSpec(hadamard=h), -1).T - truth for h in (None, size)]
    plain, rotated = (float(error.norm() / truth.norm()) for error in products)
    assert 0.5 < rotated / plain < 2.0
    assert not torch.equal(products[0], products[1])
    assert torch.equal(seen(a.T, QuantSpec(hadamard=size), -2).T, seen(a, QuantSpec(hadamard=size), -1))


@pytest.mark.parametrize("elem", ELEMS)
def test_gemm_is_exact_through_identity_and_powers_of_two(elem: str) -> None:
    x = torch.randn(40, 96)
    qdata, scale = quantize(x, elem=elem)
    eye, eye_scale = quantize(torch.eye(96), elem=elem)
    assert torch.equal(gemm(qdata, scale, eye, eye_scale), dequantize(qdata, scale))
    powers = torch.exp2(torch.randint(-3, 4, (24, 96)).float()) * torch.randn(24, 96).sign()
    others = torch.exp2(torch.randint(-3, 4, (40, 96)).float())
    out = gemm(*quantize(others, elem=elem), *quantize(powers, elem=elem), torch.ones(24))
    assert torch.equal(out.double(), others.double() @ powers.double().T + 1.0)


def test_gemm_against_fp64() -> None:
    x, w, bias = torch.randn(70, 333), torch.randn(45, 333), torch.randn(45)
    x_q, w_q = quantize(x), quantize(w)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = matmul_oracle(seen(x, QuantSpec(), -1), seen(w, QuantSpec(), -1), bias, dtype)
        out = gemm(*x_q, *w_q, bias, out_dtype=dtype)
        assert out.dtype == dtype
        expected.check(out)
    assert matmul_oracle(seen(x, QuantSpec(), -1), seen(w, QuantSpec(), -1), bias, torch.float32).far_from(
        x @ w.T + bias
    )


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_empty_operands(shape: tuple[int, int], axis: int) -> None:
    qdata, scale = quantize(torch.zeros(shape), axis=axis)
    assert qdata.shape == shape
    assert scale.numel() == 0
    assert dequantize(qdata, scale, axis=axis).shape == shape


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"axis": -2},
        {"tile": "1x128", "elem": "e5m2"},
        {"tile": "32x32", "scale_rounding": "floor"},
        {"hadamard": 64},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_compilation(options: dict) -> None:
    x = spread((65, 200))
    x[3, 3] = math.inf
    expected = quantize(x, **options)
    compiled = torch.compile(lambda t: quantize(t, **options), backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(x), expected):
        assert same_bits(got, want)
