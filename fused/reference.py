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
_SLAB_ROWS = 128  # a multiple of every tile's extent
_SLAB_ELEMENTS = 1 << 19


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
    work = x
    if spec.hadamard is not None:
        work = random_hadamard(x, spec.hadamard) if axis == -1 else random_hadamard(x.mT, spec.hadamard).mT
    qdata = torch.empty_like(work, dtype=spec.elem.dtype)
    scales = [_quantize_slab(work, spec, axis, bits, rows, qdata) for rows in _slabs(work)]
    scale = scales[0] if len(scales) == 1 else torch.cat(scales, dim=-2)
    return qdata, scale.view(SCALE_DTYPE)


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
    if qdata.dim() == 1:
        return dequantize(qdata.unsqueeze(0), scale.unsqueeze(0), dtype=dtype).squeeze(0)
    values = torch.empty_like(qdata, dtype=dtype)
    for rows in _slabs(qdata):
        _dequantize_slab(qdata[..., rows, :], scale[..., rows, :], values[..., rows, :])
    return values


def _dequantize_slab(qdata: Tensor, scale: Tensor, out: Tensor) -> None:
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    length = qdata.shape[-1]
    factor = scale_to_float(scale).to(work)
    values = _elements_to_float(qdata).to(work)
    if length % BLOCK:
        torch.mul(values, factor.repeat_interleave(BLOCK, dim=-1)[..., :length], out=out)
    else:
        blocks = (-1, BLOCK)
        torch.mul(values.unflatten(-1, blocks), factor.unsqueeze(-1), out=out.unflatten(-1, blocks))


def _elements_to_float(qdata: Tensor) -> Tensor:
    """A new fp32 tensor of the elements' values: `qdata.to(float32)`, to which torch brings no vector code for E4M3.

    Sign, exponent and mantissa move to their places in fp16, whose exponent bias is 8 larger: the fp16 number is
    2**-8 times the value. The one pattern that is NaN, all ones below the sign, is the one whose increment carries
    into the top exponent bit.
    """
    if qdata.dtype is not torch.float8_e4m3fn:
        return qdata.to(torch.float32)
    wide = qdata.view(torch.int8).to(torch.int16)
    nan = ((wide & 0x7F) + 1).bitwise_left_shift_(7).bitwise_and_(0x4000)
    wide = wide.bitwise_left_shift_(7).bitwise_and_(-0x4001).bitwise_or_(nan)
    return wide.view(torch.float16).to(torch.float32).mul_(256.0)


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
    a_tile: tuple[int, int] = (1, BLOCK),
    b_tile: tuple[int, int] = (1, BLOCK),
) -> Tensor:
    """`a @ b.T + bias` of two operands quantized along their last dim.

    fp32 multiply and accumulate on the dequantized operands (exact products), one rounding to `out_dtype`.

    Args:
        a: (M, K) float8, a_scale (M, ceil(K / 32)).  b: (N, K) float8, b_scale (N, ceil(K / 32)).
        bias: (N,) or None, added in fp32.
        a_tile, b_tile: `(across, along)` within which the scale bytes are equal; a kernel may use it, the result
            does not depend on it.

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


def matmul_native(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype) -> Tensor:
    """`matmul` by the device's own GEMM, for devices that accumulate half-precision products in fp32.

    Args:
        a: (M, K), b: (N, K) of one dtype, any strides; bias: (N,) of that dtype or None.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    if bias is None:
        torch.mm(a, b.t(), out=out)  # the out= form is exempt from autocast
    else:
        torch.addmm(bias.to(a.dtype), a, b.t(), out=out)
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
    of amax less max_exponent, plus one when its mantissa exceeds 1.75. A NaN may carry either sign: vectorized
    reductions return all ones.
    """
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    byte = (bits >> 23) - elem.max_exponent
    if scale_rounding is ScaleRounding.RCEIL:
        byte = byte + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return torch.where(bits >= 0x7F800000, NAN_BYTE, byte.clamp(min=0))


def _slabs(x: Tensor) -> list[slice]:
    """Slices along dim -2 that no tile crosses; on a CPU of a size whose temporaries stay in cache."""
    rows = x.shape[-2]
    size = max(rows, 1)
    if x.device.type == "cpu" and x.numel() > _SLAB_ELEMENTS:
        size = max(_SLAB_ELEMENTS * rows // x.numel() // _SLAB_ROWS, 1) * _SLAB_ROWS
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def _quantize_slab(x: Tensor, spec: QuantSpec, axis: int, bits: Tensor | None, slab: slice, qdata: Tensor) -> Tensor:
    """Quantize rows `slab` of `x` into those of `qdata`, in the layout of `x`; returns their scale bytes."""
    x, qdata = x[..., slab, :].float(), qdata[..., slab, :]
    rows, cols = x.shape[-2:]
    tile_rows, tile_cols = spec.tile if axis == -1 else spec.tile[::-1]
    row_tiles, col_tiles = -(-rows // tile_rows), -(-cols // tile_cols)
    padding = (0, col_tiles * tile_cols - cols, 0, row_tiles * tile_rows - rows)
    padded = F.pad(x, padding) if any(padding) else x
    tiled = padded.unflatten(-1, (col_tiles, tile_cols)).unflatten(-3, (row_tiles, tile_rows))
    amax = tiled.abs().amax(dim=(-3, -1), keepdim=True) if x.numel() else tiled.new_zeros(_amax_shape(tiled))
    byte = scale_bytes(amax, spec.elem, spec.scale_rounding)
    scaled = (tiled * _reciprocal(byte)).flatten(-2).flatten(-3, -2)[..., :rows, :cols]
    qdata.copy_(_round_elements(scaled, spec, None if bits is None else bits[..., slab, :]))
    stored_rows, stored_cols = (tile_rows, tile_cols // BLOCK) if axis == -1 else (tile_rows // BLOCK, tile_cols)
    stored = byte.to(torch.uint8).expand(*byte.shape[:-4], row_tiles, stored_rows, col_tiles, stored_cols)
    scale = stored.flatten(-2).flatten(-3, -2)[..., : _blocks(rows, axis == -2), : _blocks(cols, axis == -1)]
    return scale.contiguous()


def _blocks(length: int, along: bool) -> int:
    return -(-length // BLOCK) if along else length


def _amax_shape(tiled: Tensor) -> tuple[int, ...]:
    return (*tiled.shape[:-3], 1, tiled.shape[-2], 1)


def _reciprocal(byte: Tensor) -> Tensor:
    """fp32 `2**(127 - byte)`, NaN for byte 255. Bytes 0..253 have a normal reciprocal."""
    bits = (254 - byte) << 23
    return torch.where(byte == NAN_BYTE, 0x7FC00000, bits).view(torch.float32)


def _round_elements(scaled: Tensor, spec: QuantSpec, bits: Tensor | None) -> Tensor:
    """fp32 values that the element format holds, or that a nearest-even cast to it rounds; overwrites `scaled`."""
    clamped = scaled.clamp_(-spec.elem.max, spec.elem.max)
    return clamped if bits is None else _round_stochastic(clamped, spec.elem, bits)


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
