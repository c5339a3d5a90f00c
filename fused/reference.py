"""The MXFP8 format and every fused operation in plain torch, on any device: the definition.

A block of 32 elements along the contraction shares one E8M0 byte b; its values are
`2**(b - 127) * element`. Byte 255 makes the block NaN, byte 0 is 2**-127. Exponents are taken from the
bits of fp32, never through log2, so eager, compiled and kernel code agree to the bit.
Source: OCP Microscaling Formats (MX) v1.0; RCEIL after arXiv:2506.08027.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .philox import random_bits
from .spec import BLOCK, Elem, QuantSpec, Rounding, ScaleRounding

SCALE_DTYPE = torch.float8_e8m0fnu
NAN_BYTE = 255
_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIGN_SEED = 0x5EED


def quantize(
    x: Tensor,
    *,
    axis: int = -1,
    tile: tuple[int, int] | str = (1, 32),
    elem: Elem | str = "e4m3",
    scale_rounding: ScaleRounding | str = "rceil",
    rounding: Rounding | str = "nearest",
    hadamard: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize to MXFP8 in blocks of 32 along `axis`.

    Args:
        x: (..., rows, cols) fp32, bf16 or fp16, any strides; leading dims are batches no tile crosses.
            A 1-D tensor is one row.
        axis: -1 (blocks along the last dim) or -2 (along the one before it): the contraction.
        tile: `(across, along)` the contraction: elements whose common amax sets the scale.
        elem, scale_rounding, rounding, hadamard: as in `QuantSpec`. The transform has one fixed draw of
            signs, so separately quantized operands of a GEMM cancel; a tail shorter than it stays unrotated.
        generator: source of the seed of stochastic rounding (default: torch's global generator).

    Returns:
        qdata: shape of `x`, float8_e4m3fn or float8_e5m2, strides preserved where dense.
        scale: float8_e8m0fnu, shape of `x` with `axis` divided by 32, rounded up. Every byte of a
            tile wider than 32 is equal. A block with NaN or Inf has byte 255.

    Raises:
        TypeError: for another dtype. ValueError: for an axis, tile or name that is not offered.
    """
    spec = QuantSpec(
        elem=elem,  # pyright: ignore[reportArgumentType]
        tile=tile,  # pyright: ignore[reportArgumentType]
        scale_rounding=scale_rounding,  # pyright: ignore[reportArgumentType]
        rounding=rounding,  # pyright: ignore[reportArgumentType]
        hadamard=hadamard,
    )
    seed = None
    if spec.rounding is Rounding.STOCHASTIC:
        device = generator.device if generator is not None else "cpu"
        seed = torch.randint(2**62, (), generator=generator, device=device).to(x.device)
    return quantize_spec(x, spec, axis=axis, seed=seed)


def quantize_spec(
    x: Tensor, spec: QuantSpec, *, axis: int = -1, seed: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor]:
    """`quantize` with its settings as one `QuantSpec` and the stochastic-rounding seed as a tensor.

    `seed` (int64 scalar) and `stream` key the random bits on the logical element index of `x`,
    whichever the axis.
    """
    axis = _check_operand(x, axis)
    if x.dim() == 1:
        qdata, scale = quantize_spec(x.unsqueeze(0), spec, axis=-1, seed=seed, stream=stream)
        return qdata.squeeze(0), scale.squeeze(0)
    bits = None
    if spec.rounding is Rounding.STOCHASTIC:
        if seed is None:
            raise ValueError("stochastic rounding: got no seed, expected an int64 scalar tensor")
        bits = random_bits(x.numel(), seed, stream).view(x.shape)
    if axis == -2:
        bits = None if bits is None else bits.transpose(-1, -2)
        qdata, scale = _quantize_rowwise(x.transpose(-1, -2), spec, bits)
        return qdata.transpose(-1, -2), scale.transpose(-1, -2)
    return _quantize_rowwise(x, spec, bits)


def dequantize(qdata: Tensor, scale: Tensor, *, axis: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    """`2**(scale - 127) * qdata`, exact in fp32 and fp64, rounded once to another `dtype`.

    Args:
        qdata: (..., rows, cols) float8_e4m3fn or float8_e5m2.
        scale: E8M0 bytes (float8_e8m0fnu or uint8), the shape `quantize` returns for `axis`.
    """
    if qdata.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"dequantize: got qdata dtype {qdata.dtype}, expected float8_e4m3fn or float8_e5m2")
    if axis == -2 and qdata.dim() > 1:
        return dequantize(qdata.transpose(-1, -2), scale.transpose(-1, -2), dtype=dtype).transpose(-1, -2)
    length = qdata.shape[-1]
    expected = (*qdata.shape[:-1], -(-length // BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"dequantize: got scale shape {tuple(scale.shape)}, expected {expected}")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    factor = scale_to_float(scale).to(work)
    values = qdata.to(torch.float32).to(work)
    if length % BLOCK:
        values = values * factor.repeat_interleave(BLOCK, dim=-1)[..., :length]
    else:
        values = (values.unflatten(-1, (-1, BLOCK)) * factor.unsqueeze(-1)).flatten(-2)
    return values.to(dtype)


def scale_to_float(scale: Tensor) -> Tensor:
    """E8M0 bytes to fp32 `2**(b - 127)`: byte 0 is a subnormal, byte 255 is NaN."""
    byte = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == NAN_BYTE, 0x7FC00000, bits).view(torch.float32)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`a @ b.T + bias` of two operands quantized along their last dim.

    fp32 multiply and accumulate on the dequantized operands (exact products), one rounding to `out_dtype`.

    Args:
        a: (M, K) float8, a_scale (M, ceil(K / 32)).  b: (N, K) float8, b_scale (N, ceil(K / 32)).
        bias: (N,) or None, added in fp32.

    Returns:
        (M, N) of `out_dtype`.
    """
    return matmul(dequantize(a, a_scale), dequantize(b, b_scale), bias, out_dtype=out_dtype)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype) -> Tensor:
    """`a @ b.T + bias` in high precision: the GEMM of operands left unquantized.

    Half-precision operands are multiplied and accumulated in fp32 and the result rounded once, as a tensor
    core does it; on a CPU without BF16 instructions that is also far faster than a BF16 matmul.

    Args:
        a: (M, K), b: (N, K), any strides; bias: (N,) or None.
    """
    work = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    out = torch.empty(a.shape[0], b.shape[0], dtype=work, device=a.device)
    torch.mm(a.to(work), b.to(work).t(), out=out)  # the out= form is exempt from autocast
    if bias is not None:
        out += bias
    return out.to(out_dtype)


def random_hadamard(x: Tensor, size: int) -> Tensor:
    """Orthonormal random Hadamard transform of each group of `size` along the last dim.

    Signs, then butterflies in ascending stride, then one multiplication by `size**-0.5`, all in fp32:
    a fixed order of evaluation, so every backend gives the same bits. A tail shorter than `size`
    is returned as it is, which both operands of a GEMM agree on.
    """
    whole = x.shape[-1] // size * size
    groups = (x[..., :whole].float().unflatten(-1, (-1, size))) * hadamard_signs(size, x.device)
    stride = 1
    while stride < size:
        pairs = groups.unflatten(-1, (-1, 2, stride))
        low, high = pairs.unbind(-2)
        groups = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    rotated = (groups * torch.tensor(size**-0.5, dtype=torch.float32, device=x.device)).flatten(-2)
    return torch.cat((rotated, x[..., whole:].float()), dim=-1) if whole < x.shape[-1] else rotated


def hadamard_signs(size: int, device: torch.device | str = "cpu") -> Tensor:
    """(size,) fp32 of +-1: the fixed random signs of `random_hadamard`."""
    words = random_bits(size, torch.tensor(_SIGN_SEED), stream=size)
    return ((words & 1) * 2 - 1).to(torch.float32).to(device)


def scale_bytes(amax: Tensor, elem: Elem, scale_rounding: ScaleRounding) -> Tensor:
    """E8M0 byte of each tile amax (fp32, >= 0 or NaN), as int32.

    The format's largest magnitude is 1.75 * 2**max_exponent, so `ceil(log2(amax / max))` is the exponent
    of amax less max_exponent, plus one when its mantissa exceeds 1.75.
    """
    bits = amax.view(torch.int32)
    byte = (bits >> 23) - elem.max_exponent
    if scale_rounding is ScaleRounding.RCEIL:
        byte = byte + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return torch.where(bits >= 0x7F800000, NAN_BYTE, byte.clamp(min=0))


def _quantize_rowwise(x: Tensor, spec: QuantSpec, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape[-2:]
    across, along = spec.tile
    x = x.float() if spec.hadamard is None else random_hadamard(x, spec.hadamard)
    row_tiles, col_tiles, blocks = -(-rows // across), -(-cols // along), -(-cols // BLOCK)
    padding = (0, col_tiles * along - cols, 0, row_tiles * across - rows)
    padded = F.pad(x, padding) if any(padding) else x
    tiled = padded.unflatten(-1, (col_tiles, along)).unflatten(-3, (row_tiles, across))
    amax = tiled.abs().amax(dim=(-3, -1), keepdim=True) if x.numel() else tiled.new_zeros(_amax_shape(tiled))
    byte = scale_bytes(amax, spec.elem, spec.scale_rounding)
    scaled = (tiled * _reciprocal(byte)).flatten(-2).flatten(-3, -2)[..., :rows, :cols]
    qdata = _round_elements(scaled, spec, bits)
    stored = byte.to(torch.uint8).expand(*byte.shape[:-3], across, col_tiles, along // BLOCK)
    scale = stored.flatten(-2).flatten(-3, -2)[..., :rows, :blocks].contiguous()
    return qdata, scale.view(SCALE_DTYPE)


def _amax_shape(tiled: Tensor) -> tuple[int, ...]:
    return (*tiled.shape[:-3], 1, tiled.shape[-2], 1)


def _reciprocal(byte: Tensor) -> Tensor:
    """fp32 `2**(127 - byte)`, NaN for byte 255. Bytes 0..253 have a normal reciprocal."""
    bits = (254 - byte) << 23
    return torch.where(byte == NAN_BYTE, 0x7FC00000, bits).view(torch.float32)


def _round_elements(scaled: Tensor, spec: QuantSpec, bits: Tensor | None) -> Tensor:
    limit = spec.elem.max
    clamped = scaled.clamp(-limit, limit)
    if bits is not None:
        clamped = _round_stochastic(clamped, spec.elem, bits)
    return clamped.to(spec.elem.dtype)


def _round_stochastic(value: Tensor, elem: Elem, bits: Tensor) -> Tensor:
    """Round to the grid of `elem`, up in magnitude with probability equal to the fraction cut off.

    Adding a uniform integer below the kept mantissa bits and truncating does it exactly. Subnormals get
    the smallest normal added first, which gives them the same spacing of bits, and subtracted after.
    """
    dropped = 23 - elem.mantissa_bits
    smallest_normal = math.ldexp(1.0, elem.min_exponent)
    magnitude = value.abs()
    offset = torch.where(magnitude < smallest_normal, smallest_normal, 0.0)
    noise = (bits >> (32 - dropped)).to(torch.int32)
    summed = (magnitude + offset).view(torch.int32) + noise
    rounded = ((summed >> dropped) << dropped).view(torch.float32) - offset
    return torch.where(value.isnan(), value, torch.copysign(rounded, value))


def _check_operand(x: Tensor, axis: int) -> int:
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"quantize: got dtype {x.dtype}, expected float32, bfloat16 or float16")
    if x.dim() == 0:
        raise ValueError("quantize: got a 0-D tensor, expected at least one dimension")
    normalized = axis - x.dim() if axis >= 0 else axis
    if normalized not in (-1, -2) or -normalized > x.dim():
        raise ValueError(f"quantize: got axis {axis} for a {x.dim()}-D tensor, expected -1 or -2")
    return normalized
