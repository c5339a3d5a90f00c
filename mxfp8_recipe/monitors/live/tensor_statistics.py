"""What MXFP8 does to one operand, and what one GEMM of it loses: sums and maxima that stay on the device.

Every figure is a function of sums (which add up over calls, micro-batches and ranks) and of maxima, so nothing has to
be read before the report. Per tensor, over blocks of 32 along the contraction:

    sqnr_db           10 log10(sum x^2 / sum (x - Q(x))^2), blocks with NaN or Inf left out
    underflow_frac    share of the nonzero elements that quantize to zero
    saturation_frac   share of the elements beyond the largest magnitude their scale can hold
    scale range       exponents of the smallest and largest scale, blocks of zeros left out
    amax              largest magnitude in rows without NaN or Inf;  non-finite blocks: those with one

amax and non-finite blocks are of the whole tensor, the rest of at most `rows` rows of it, in whole slabs of
`SLAB` rows, so that every tile is the one the layer quantizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_recipe import backends
from mxfp8_recipe.fused.reference import dequantize, random_hadamard, scale_to_float
from mxfp8_recipe.fused.spec import BLOCK, QuantSpec, ScaleRounding
from mxfp8_recipe.monitors.live.records import TensorStatistics

SLAB = 128
"""Rows that are sampled together: a multiple of every tile."""

SUMS = ("signal", "noise", "elements", "nonzero", "kept", "saturated", "blocks", "nonfinite")
MAXIMA = ("amax", "largest_scale", "smallest_scale")
"""Scales as bytes: the largest plus 1, and 1 minus the smallest, both modulo 256, so that the bytes of a non-finite
block (255) and of a block of zeros (0) fall out of the comparison."""

ROOTS = ("signal", "noise")
"""Sums of squares, kept as their roots until they are packed."""

NOTHING = -256.0
"""Below every maximum: no block has been seen."""

Value = Tensor | float


class Fields:
    """The sums and maxima of one tensor, scalars on its device or known ones; `ROOTS` as they are, not yet squared."""

    def __init__(self, sums: list[Value], maxima: list[Value]) -> None:
        self.sums: list[Value] = sums
        self.maxima: list[Value] = maxima

    def add(self, other: Fields) -> None:
        for i, name in enumerate(SUMS):
            a, b = self.sums[i], other.sums[i]
            self.sums[i] = torch.hypot(_double(a), _double(b)) if name in ROOTS else _double(a) + _double(b)
        self.maxima = [torch.maximum(_double(a), _double(b)) for a, b in zip(self.maxima, other.maxima)]


def _double(value: Value) -> Tensor:
    return value.double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def gathered(values: list[list[Value]], device: torch.device) -> Tensor:
    """(rows, columns) fp64 on `device` of rows of scalars, with one copy for each dtype among them."""
    flat = [value for row in values for value in row]
    result = torch.tensor([0.0 if isinstance(v, Tensor) else v for v in flat], dtype=torch.float64).to(device)
    places: dict[torch.dtype, list[int]] = {}
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            places.setdefault(value.dtype, []).append(place)
    for where in places.values():
        stacked = torch.stack([flat[place].to(device) for place in where])  # pyright: ignore[reportAttributeAccessIssue]
        result[torch.tensor(where, device=device)] = stacked.double()
    return result.view(len(values), -1)


def sample_rows(x: Tensor, rows: int) -> Tensor:
    """At most `rows` rows of (M, K), evenly spread slabs of `SLAB` whole ones; all of them if they are few."""
    slabs = max(rows // SLAB, 1)
    if x.shape[0] <= max(rows, SLAB):
        return x
    whole = x.shape[0] // SLAB
    step = max(whole // slabs, 1)
    return x[: whole * SLAB].unflatten(0, (whole, SLAB))[::step][:slabs].flatten(0, 1)


def block_amax(x: Tensor) -> Tensor:
    """(M, ceil(K / 32)) largest magnitude of each block of (M, K); NaN and Inf come through."""
    short = -x.shape[-1] % BLOCK
    x = F.pad(x, (0, short)) if short else x
    return torch.linalg.vector_norm(x.unflatten(-1, (-1, BLOCK)), math.inf, -1)


@dataclass(frozen=True)
class Peaks:
    """Of a whole (M, K) tensor: the largest magnitude of each row (M,), and its blocks with NaN or Inf, out of all."""

    rows: Tensor
    nonfinite: Value
    blocks: int


def peaks_of(x: Tensor) -> Peaks:
    """Peaks of (M, K). Where a kernel quantizes, its scales tell the blocks with NaN or Inf faster than a reduction."""
    if not x.numel():
        return Peaks(x.new_zeros(0), 0.0, 0)
    if backends.select(x.device) != "reference":
        scale = backends.quantize(x, QuantSpec().encode(), "", None, 0, backends.plain(x.device))[1]
        rows = torch.linalg.vector_norm(x, math.inf, -1)
        return Peaks(rows, torch.count_nonzero(scale == 255), scale.numel())
    blocks = block_amax(x)
    return Peaks(blocks.amax(-1), torch.count_nonzero(blocks - blocks), blocks.numel())  # Inf - Inf is NaN


def quantized(x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int) -> tuple[Tensor, ...]:
    """`(qdata, scale, qdata_t, scale_t)` of (M, K) as the layer's own op quantizes it."""
    return backends.quantize(x, rowwise, colwise, seed, stream, backends.plain(x.device))


def tensor_fields(peaks: Peaks, sampled: Tensor, qdata: Tensor, scale: Tensor, spec: QuantSpec) -> Fields:
    """Fields of one operand.

    Args:
        peaks: of the whole tensor. sampled: (R, C) of it, contraction last, before any rotation.
        qdata, scale: (R, C) and (R, ceil(C / 32)) uint8, `sampled` quantized per `spec`.
    """
    values = random_hadamard(sampled, spec.hadamard) if spec.hadamard else sampled.float()
    levels = (
        dequantize(qdata.view(spec.elem.dtype), scale) if qdata.device.type == "cpu" else _levels(qdata, scale, spec)
    )
    sums = _error_sums(values, levels)
    saturated: Value = 0.0
    if spec.scale_rounding is not ScaleRounding.RCEIL:  # which no finite element exceeds
        limit = (scale_to_float(scale) * spec.elem.max).repeat_interleave(BLOCK, dim=-1)[..., : values.shape[-1]]
        saturated = torch.count_nonzero(values.abs() > limit)
    return Fields([*sums, saturated, *_counts(peaks)], [_amax(peaks), *_scale_range(scale)])


def _levels(qdata: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """`dequantize` in three kernels of a device that converts both formats itself."""
    levels = qdata.view(spec.elem.dtype).float()
    factor = scale.view(torch.float8_e8m0fnu).float()
    length = levels.shape[-1]
    if length % BLOCK:
        return levels.mul_(factor.repeat_interleave(BLOCK, dim=-1)[..., :length])
    levels.unflatten(-1, (-1, BLOCK)).mul_(factor.unsqueeze(-1))
    return levels


def unquantized_fields(peaks: Peaks) -> Fields:
    """Fields of an operand that no GEMM quantizes: amax and non-finite blocks."""
    return Fields([0.0] * 6 + _counts(peaks), [_amax(peaks), NOTHING, NOTHING])


def _counts(peaks: Peaks) -> list[Value]:
    return [float(peaks.blocks), peaks.nonfinite]


def _amax(peaks: Peaks) -> Value:
    return peaks.rows.nan_to_num(0.0, 0.0, 0.0).amax() if peaks.blocks else 0.0


def _error_sums(values: Tensor, levels: Tensor) -> list[Value]:
    """Signal, noise, elements, and nonzero ones before and after; a non-finite block's levels are NaN."""
    noise = (values - levels).nan_to_num_(0.0, 0.0, 0.0)
    signal = values.nan_to_num(0.0, 0.0, 0.0)
    counts = torch.count_nonzero(values), torch.count_nonzero(levels)
    return [_norm(signal), _norm(noise), float(values.numel()), *counts]


def _scale_range(scale: Tensor) -> list[Value]:
    """As `MAXIMA` says."""
    if not scale.numel():
        return [NOTHING, NOTHING]
    return [(scale + 1).amax(), -(scale - 1).amin().to(torch.int16)]


def fixed_scale_fields(values: Tensor, exponent: int, spec: QuantSpec) -> Fields:
    """Fields of (M, C) values quantized with one scale, `2**exponent`, as attention's probabilities are."""
    scaled = values * 2.0**-exponent
    elements = scaled.clamp(-spec.elem.max, spec.elem.max).to(spec.elem.dtype)
    peaks = peaks_of(values)
    sums = _error_sums(values, elements.float() * 2.0**exponent)
    saturated = torch.count_nonzero(scaled.abs() > spec.elem.max)
    byte = float(exponent + 127)
    return Fields([*sums, saturated, *_counts(peaks)], [_amax(peaks), byte + 1, 1 - byte])


def product_error(actual: Tensor, expected: Tensor) -> list[Tensor]:
    """Norm of `expected`, and of the difference, over elements that are finite."""
    expected = expected.float()
    difference = (actual.float() - expected).nan_to_num_(0.0, 0.0, 0.0)
    return [_norm(expected.nan_to_num(0.0, 0.0, 0.0)), _norm(difference)]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def statistics_of(sums: list[float], maxima: list[float]) -> TensorStatistics | None:
    """The record of fields that were read, `ROOTS` squared; None for a tensor nobody saw."""
    s, m = dict(zip(SUMS, sums)), dict(zip(MAXIMA, maxima))
    if not s["blocks"]:
        return None
    largest, smallest = int(m["largest_scale"]) - 1, 1 - int(m["smallest_scale"])
    seen = largest > 0 and smallest <= largest
    return TensorStatistics(
        amax=m["amax"],
        scale_min=smallest - 127 if seen else None,
        scale_max=largest - 127 if seen else None,
        sqnr_db=decibels(s["signal"], s["noise"]),
        underflow_frac=max(s["nonzero"] - s["kept"], 0.0) / s["nonzero"] if s["nonzero"] else 0.0,
        saturation_frac=s["saturated"] / s["elements"] if s["elements"] else 0.0,
        nonfinite_blocks=int(s["nonfinite"]),
        blocks=int(s["blocks"]),
    )


def decibels(signal: float, noise: float) -> float | None:
    """`10 log10(signal / noise)`: infinite without noise, None without a signal."""
    if not signal > 0:
        return None
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)
