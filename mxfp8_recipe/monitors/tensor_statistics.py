"""What MXFP8 does to one operand, and what one GEMM of it loses: sums and maxima that stay on the device.

Every figure is a function of sums (which add up over calls, micro-batches and ranks) and of maxima, so nothing has to
be read before the report. Per tensor, over blocks of 32 along the contraction:

    sqnr_db           10 log10(sum x^2 / sum (x - Q(x))^2), blocks with NaN or Inf left out
    underflow_frac    share of the nonzero elements that quantize to zero
    saturation_frac   share of the elements beyond the largest magnitude their scale can hold
    scale range       exponents of the smallest and largest scale, blocks of zeros left out
    amax              largest finite magnitude;  non-finite blocks: those with NaN or Inf

amax and non-finite blocks are of the whole tensor, the rest of at most `rows` rows of it, in whole slabs of
`SLAB` rows, so that every tile is the one the layer quantizes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_recipe import backends
from mxfp8_recipe.fused.reference import dequantize, random_hadamard, scale_to_float
from mxfp8_recipe.fused.spec import BLOCK, QuantSpec
from mxfp8_recipe.monitors.monitor_records import TensorStatistics

SLAB = 128
"""Rows that are sampled together: a multiple of every tile."""

SUMS = ("signal", "noise", "elements", "nonzero", "underflow", "saturated", "blocks", "nonfinite")
MAXIMA = ("amax", "largest_scale", "smallest_scale_negated")
NO_SCALE = -(2.0**15)
"""Below every exponent: no block has been seen."""


class Fields:
    """The sums and maxima of one tensor: (len(SUMS),) and (len(MAXIMA),) fp64 on its device."""

    def __init__(self, sums: Tensor, maxima: Tensor) -> None:
        self.sums, self.maxima = sums, maxima

    def add(self, other: Fields) -> None:
        self.sums = self.sums + other.sums
        self.maxima = torch.maximum(self.maxima, other.maxima)


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


def quantized(x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int) -> tuple[Tensor, ...]:
    """`(qdata, scale, qdata_t, scale_t)` of (M, K) as the layer's own op quantizes it."""
    return backends.quantize(x, rowwise, colwise, seed, stream, "auto")


def tensor_fields(peaks: Tensor, sampled: Tensor, qdata: Tensor, scale: Tensor, spec: QuantSpec) -> Fields:
    """Fields of one operand.

    Args:
        peaks: `block_amax` of the whole tensor. sampled: (R, C) of it, contraction last, before any rotation.
        qdata, scale: (R, C) and (R, ceil(C / 32)) uint8, `sampled` quantized per `spec`.
    """
    finite = peaks.isfinite()
    amax = peaks.where(finite, 0.0).amax() if peaks.numel() else peaks.new_zeros(())
    values = random_hadamard(sampled, spec.hadamard) if spec.hadamard else sampled.float()
    levels = dequantize(qdata.view(spec.elem.dtype), scale)
    sums = _error_sums(values, levels, qdata, scale, spec)
    sums += [torch.full_like(sums[0], float(peaks.numel())), (~finite).sum()]
    return Fields(_stack(sums), _stack([amax, *_scale_range(scale, qdata)]))


def unquantized_fields(peaks: Tensor) -> Fields:
    """Fields of an operand that no GEMM quantizes: amax and non-finite blocks."""
    finite = peaks.isfinite()
    amax = peaks.where(finite, 0.0).amax() if peaks.numel() else peaks.new_zeros(())
    nothing = torch.zeros((), device=peaks.device)
    sums = [nothing] * 6 + [torch.full_like(nothing, float(peaks.numel())), (~finite).sum()]
    return Fields(_stack(sums), _stack([amax, nothing + NO_SCALE, nothing + NO_SCALE]))


def _error_sums(values: Tensor, levels: Tensor, qdata: Tensor, scale: Tensor, spec: QuantSpec) -> list[Tensor]:
    known = levels.isfinite()
    signal = _power(values.where(known, 0.0))
    noise = _power((values - levels).where(known, 0.0))
    nonzero = values != 0
    lost = nonzero & ((qdata & 0x7F) == 0)
    limit = scale_to_float(scale) * spec.elem.max
    length = values.shape[-1]
    beyond = values.abs() > limit.repeat_interleave(BLOCK, dim=-1)[..., :length]
    elements = torch.full_like(signal, float(values.numel()))
    return [signal, noise, elements, nonzero.sum(), lost.sum(), beyond.sum()]


def _scale_range(scale: Tensor, qdata: Tensor) -> tuple[Tensor, Tensor]:
    """Largest exponent and the negative of the smallest, zero and non-finite blocks left out."""
    exponent = scale.to(torch.float32) - 127
    used = (scale != 255) & (scale != 0)
    nothing = torch.full((), NO_SCALE, device=scale.device)
    if not scale.numel():
        return nothing, nothing
    return exponent.where(used, NO_SCALE).amax(), (-exponent).where(used, NO_SCALE).amax()


def fixed_scale_fields(values: Tensor, exponent: int, spec: QuantSpec) -> Fields:
    """Fields of (M, C) values quantized with one scale, `2**exponent`, as attention's probabilities are."""
    scaled = values * 2.0**-exponent
    elements = scaled.clamp(-spec.elem.max, spec.elem.max).to(spec.elem.dtype)
    known = values.isfinite()
    levels = elements.float() * 2.0**exponent
    nonzero = values != 0
    peaks = block_amax(values).flatten()
    sums = [
        _power(values.where(known, 0.0)),
        _power((values - levels).where(known, 0.0)),
        torch.full((), float(values.numel()), device=values.device),
        nonzero.sum(),
        (nonzero & (levels == 0)).sum(),
        (scaled.abs() > spec.elem.max).sum(),
        torch.full((), float(peaks.numel()), device=values.device),
        (~peaks.isfinite()).sum(),
    ]
    amax = peaks.where(peaks.isfinite(), 0.0).amax() if peaks.numel() else peaks.new_zeros(())
    scale = torch.full((), float(exponent), device=values.device)
    return Fields(_stack(sums), _stack([amax, scale, -scale]))


def product_error(actual: Tensor, expected: Tensor) -> Tensor:
    """(2,) fp64: power of `expected`, and of the difference, over elements that are finite in both."""
    actual, expected = actual.float(), expected.float()
    known = actual.isfinite() & expected.isfinite()
    return _stack([_power(expected.where(known, 0.0)), _power((actual - expected).where(known, 0.0))])


def _power(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _stack(values: list[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in values])


def statistics_of(sums: list[float], maxima: list[float]) -> TensorStatistics | None:
    """The record of fields that were read; None for a tensor nobody saw."""
    s, m = dict(zip(SUMS, sums)), dict(zip(MAXIMA, maxima))
    if not s["blocks"]:
        return None
    seen = m["largest_scale"] > NO_SCALE
    return TensorStatistics(
        amax=m["amax"],
        scale_min=int(-m["smallest_scale_negated"]) if seen else None,
        scale_max=int(m["largest_scale"]) if seen else None,
        sqnr_db=decibels(s["signal"], s["noise"]),
        underflow_frac=s["underflow"] / s["nonzero"] if s["nonzero"] else 0.0,
        saturation_frac=s["saturated"] / s["elements"] if s["elements"] else 0.0,
        nonfinite_blocks=int(s["nonfinite"]),
        blocks=int(s["blocks"]),
    )


def decibels(signal: float, noise: float) -> float | None:
    """`10 log10(signal / noise)`: infinite without noise, None without a signal."""
    if not signal > 0:
        return None
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)
