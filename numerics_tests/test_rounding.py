"""Stochastic rounding: known answers of its generator, unbiased, and keyed on the logical element alone."""

from __future__ import annotations

import math

import pytest
import torch

from mxfp8_recipe.fused.philox import random_bits
from mxfp8_recipe.fused.reference import dequantize, quantize, quantize_spec
from mxfp8_recipe.fused.spec import Elem, QuantSpec, Rounding
from numerics_tests.helpers import same_bits

ONES = 0xFFFFFFFF
Z_LIMIT = 5.0
"""Standard deviations a mean may stray: a right implementation fails one comparison in 1.7 million."""


def stochastic(**options) -> QuantSpec:
    return QuantSpec(rounding=Rounding.STOCHASTIC, **options)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, after Salmon et al. (SC 2011), figure 3."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & ONES, (p >> 32) ^ d ^ k1, p & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return [a, b, c, d]


def test_philox_known_answers() -> None:
    """The vectors published with Random123 hold for the integer version, and it holds for ours."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([ONES] * 4, [ONES] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    for seed, stream in ((0, 0), (2**62 - 12345, 2), (987654321, ONES)):
        words = random_bits(4099, torch.tensor(seed), stream).tolist()
        for i in (0, 1, 5, 1000, 4098):
            assert words[i] == philox([i // 4, 0, stream, 0], [seed & ONES, seed >> 32])[i % 4]


@pytest.mark.parametrize("elem", list(Elem))
@pytest.mark.parametrize("value", [0.6180339887, 1.0 + 1 / 64, 300.123, 2.0**-7 * 1.3, 2.0**-20], ids=str)
def test_unbiased(elem: Elem, value: float) -> None:
    """Among 65,536 roundings of one value, both signs, the share rounded up is the fraction cut off.

    The share is binomial; the last values are subnormals of the element format.
    """
    count = 1 << 15
    x = torch.full((count // 31 + 1, 32), value)
    x[:, 0] = elem.max  # pins the scale byte to 127
    qdata, scale = quantize_spec(torch.cat((x, -x)), stochastic(elem=elem), seed=torch.tensor(7))
    assert set(scale.view(torch.uint8).flatten().tolist()) == {127}
    exact = float(torch.tensor(value))
    for sign, part in zip((1, -1), dequantize(qdata, scale, dtype=torch.float64)[:, 1:].chunk(2)):
        exponent = max(math.frexp(exact)[1] - 1, elem.min_exponent)
        spacing = 2.0 ** (exponent - elem.mantissa_bits)
        low = math.floor(exact / spacing) * spacing
        fraction, n = exact / spacing - low / spacing, part.numel()
        assert set((sign * part).unique().tolist()) <= {low, low + spacing}
        ups = int((sign * part > low).sum())
        assert abs(ups - n * fraction) <= Z_LIMIT * math.sqrt(n * fraction * (1 - fraction)) + 1e-9
        assert 0 < ups < n or fraction < 1e-3


def test_unbiased_over_many_seeds_where_nearest_is_biased() -> None:
    """The mean over seeds converges to the input at every element; nearest rounding stays off by its fixed error."""
    x = torch.randn(8, 64)
    draws = torch.stack(
        [dequantize(*quantize_spec(x, stochastic(), seed=torch.tensor(s))) for s in range(400)]
    ).double()
    deviation = (draws.mean(0) - x.double()).abs() / (draws.std(0) / 20).clamp(min=1e-12)
    assert (deviation[draws.std(0) > 0] <= Z_LIMIT).all()
    nearest = (dequantize(*quantize(x)).double() - x.double()).abs()
    assert nearest.mean() > 10 * (draws.mean(0) - x.double()).abs().mean()


def test_values_on_the_grid_stay() -> None:
    x = dequantize(*quantize(torch.randn(64, 64) * torch.exp2(torch.randint(-20, 20, (64, 1)).float())))
    assert torch.equal(dequantize(*quantize_spec(x, stochastic(), seed=torch.tensor(3))), x)
    top = torch.full((32,), 448.0)
    assert dequantize(*quantize_spec(top, stochastic(), seed=torch.tensor(3))).eq(448.0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_nan(value: float) -> None:
    x = torch.ones(2, 32)
    x[0, 9] = value
    qdata, scale = quantize_spec(x, stochastic(), seed=torch.tensor(3))
    assert scale.view(torch.uint8).flatten().tolist()[0] == 255
    assert dequantize(qdata, scale)[0].isnan().all()
    assert dequantize(qdata, scale)[1].isfinite().all()


def test_keyed_on_the_logical_element() -> None:
    """The same bits along either axis, in any layout, and as the definition gives them element by element."""
    seed = torch.tensor(99)
    x = torch.randn(1200, 512)  # more than is taken at once
    square = stochastic(tile=(32, 32))
    qdata, scale = quantize_spec(x, square, seed=seed, stream=2)
    down, _ = quantize_spec(x, square, axis=-2, seed=seed, stream=2)
    strided, _ = quantize_spec(x.T.contiguous().T, square, seed=seed, stream=2)
    assert same_bits(qdata, down)
    assert same_bits(qdata, strided)
    factor = 2.0 ** (scale.view(torch.uint8).double() - 127).repeat_interleave(32, 1)
    scaled = (x.double() / factor).abs()
    spacing = torch.exp2((torch.frexp(scaled)[1] - 1).clamp(min=-6).double() - 3)
    noise = (random_bits(x.numel(), seed, 2).view(x.shape) >> 12).double() / 2**20
    dropped = (scaled / spacing * 2**20).floor() / 2**20  # bits below fp32's own are none where the value is normal
    expected = torch.copysign((dropped + noise).floor() * spacing * factor, x.double())
    normal = scaled >= 2.0**-6
    assert normal.float().mean() > 0.9
    assert torch.equal(dequantize(qdata, scale, dtype=torch.float64)[normal], expected[normal])


def test_seed_stream_and_generator_decide() -> None:
    x = torch.randn(64, 64)
    base, _ = quantize_spec(x, stochastic(), seed=torch.tensor(1), stream=0)
    for seed, stream in ((2, 0), (1, 1)):
        other, _ = quantize_spec(x, stochastic(), seed=torch.tensor(seed), stream=stream)
        assert not same_bits(base, other)
    draws = [quantize(x, rounding="stochastic", generator=torch.Generator().manual_seed(s))[0] for s in (5, 5, 6)]
    assert same_bits(draws[0], draws[1])
    assert not same_bits(draws[0], draws[2])
    torch.manual_seed(5)
    first, _ = quantize(x, rounding="stochastic")
    second, _ = quantize(x, rounding="stochastic")
    torch.manual_seed(5)
    again, _ = quantize(x, rounding="stochastic")
    assert same_bits(first, again)
    assert not same_bits(first, second)
