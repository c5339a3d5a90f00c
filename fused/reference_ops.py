"""Norm, activation and two-orientation quantization in plain torch, on any device: what the kernels compute.

Every function here has the signature, the outputs and the errors of the kernel launcher of the same
name, so a table can hold either. Common to all of them:

- Matrices are 2-D, (M tokens, K features). `rowwise` quantizes along K (blocks of 32 features, the
  contraction of fprop and dgrad), `colwise` along M (blocks of 32 tokens, the contraction of wgrad). Both
  are quantized from the high-precision value, never one from the other.
- qdata and scales are uint8 storage. `qdata` is (M, K) and `scale` (M, ceil(K / 32)); `qdata_t` is (K, M)
  contiguous, K-major for the GEMM that contracts over M, and `scale_t` (K, ceil(M / 32)). With
  `swizzled=True` both scales are 1-D in the 128x4 layout of `scale_layout`, padding zeroed.
- `pad_tokens` rounds the token dimension of `qdata_t` and `scale_t` up to a multiple of it, zero past M, so that a GEMM
  over the tokens may read whole tiles.
- An output nobody asked for is an empty (0,) tensor of its dtype, so the tuples have one length.
- Arithmetic is fp32 inside. A value is rounded once, to the dtype its consumer would have multiplied in,
  and quantized from that rounded value: fused equals "store it, then quantize", bitwise.
- `seed` (int64 scalar tensor) and `stream` are used by stochastic rounding alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .reference import quantize_spec, random_hadamard
from .scale_layout import swizzle_scale
from .spec import QuantSpec, near_misses

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""`(qdata, scale, qdata_t, scale_t)`, uint8."""

NORM_KINDS = ("rms", "layer")
PLAIN_KINDS = ("relu", "relu2", "gelu", "gelu_tanh", "silu")
GATED_KINDS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""Gated kind to the activation of its gate: `act(gate) * up`."""


def quantize_both(
    x: Tensor,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    seed: Tensor | None = None,
    stream: int = 0,
    *,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> Quantized:
    """Quantize a matrix along its rows, its columns or both.

    Args:
        x: (M, K) fp32, bf16 or fp16, any strides.

    Returns:
        `(qdata, scale, qdata_t, scale_t)` as the module says.

    Raises:
        TypeError: for another dtype. ValueError: for a tensor that is not 2-D, or stochastic rounding without a seed.
    """
    check_matrix("quantize_both", "x", x)
    outputs = [empty(x, torch.uint8) for _ in range(4)]
    if rowwise is not None:
        qdata, scale = quantize_spec(x, rowwise, axis=-1, seed=seed, stream=stream)
        outputs[0], outputs[1] = qdata.contiguous().view(torch.uint8), _stored(scale, swizzled)
    if colwise is not None:
        missing = -x.shape[0] % pad_tokens
        if missing and colwise.hadamard is not None:  # the tokens alone are rotated, not the zeros after them
            x, colwise = random_hadamard(x.mT, colwise.hadamard).mT, replace(colwise, hadamard=None)
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
        qdata, scale = quantize_spec(x, colwise, axis=-2, seed=seed, stream=stream)
        outputs[2], outputs[3] = qdata.t().contiguous().view(torch.uint8), _stored(scale.t(), swizzled)
    return outputs[0], outputs[1], outputs[2], outputs[3]


def quantize_and_sum(
    x: Tensor,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    seed: Tensor | None = None,
    stream: int = 0,
    *,
    sum_dtype: torch.dtype = torch.float32,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_both`, and the (K,) sums of x over the tokens, fp32 rounded to `sum_dtype`: a gradient and its bias's.

    The order of summation is the backend's own, always the same for a shape; here it is that of torch's `sum`.
    """
    quantized = quantize_both(x, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
    return *quantized, x.sum(0, dtype=torch.float32).to(sum_dtype)


def norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    emit_high: bool,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`h = x + residual`, `y = norm(h) * weight + bias`, MXFP8 of y.

    Args:
        x: (M, K) fp32, bf16 or fp16; residual: the same shape and dtype, or None. h is rounded to their dtype.
        weight, bias: (K,) of any float dtype, or None (1 and 0).
        eps: added to the mean square (`rms`) or the variance (`layer`) before the square root.
        kind: `"rms"`: `h * rstd`; `"layer"`: `(h - mean) * rstd`.
        out_dtype: dtype y is rounded to before it is stored or quantized.
        emit_high: also return y.

    Returns:
        `(y, residual_out, qdata, scale, qdata_t, scale_t, mean, rstd)`: y (M, K) of `out_dtype` or empty;
        residual_out = h (M, K) or empty without a residual; mean (M,) fp32, empty for `rms`; rstd (M,) fp32.
    """
    check_matrix("norm_quantize", "x", x)
    check_kind("norm_quantize", kind, NORM_KINDS)
    residual_out = empty(x, x.dtype)
    if residual is not None:
        check_same("norm_quantize", "residual", residual, x)
        x = residual_out = (x.float() + residual.float()).to(x.dtype)
    h = x.float()
    mean = empty(x, torch.float32)
    centered = h
    if kind == "layer":
        mean = h.mean(dim=1) if h.numel() else h.new_zeros(h.shape[0])
        centered = h - mean.unsqueeze(1)
    rstd = torch.rsqrt(centered.square().mean(dim=1) + eps)
    y = centered * rstd.unsqueeze(1)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(out_dtype)
    quantized = quantize_both(y, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
    return y if emit_high else empty(x, out_dtype), residual_out, *quantized, mean, rstd


def norm_backward(
    grad_y: Tensor,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    grad_residual: Tensor | None,
    has_bias: bool,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of `norm_quantize` in its input (and residual: they share it), weight and bias.

    With `n = (h - mean) * rstd` and `g = grad_y * weight`:
    `dx = rstd * (g - n * mean_K(g * n) [- mean_K(g) for layer]) + grad_residual`, rounded once to h.dtype;
    `dweight = sum_M(grad_y * n)`, `dbias = sum_M(grad_y)`.

    Args:
        grad_y: (M, K) of any float dtype; h: (M, K), the norm's input after the residual was added.
        mean, rstd: (M,) fp32 as the forward returned them; `mean` is not read for `rms`.
        grad_residual: (M, K), gradient that reached h past the norm, or None.
        has_bias: whether dbias is wanted.
        rowwise, colwise: MXFP8 of dx, for a GEMM that consumes it next.

    Returns:
        `(dx, dweight, dbias, qdata, scale, qdata_t, scale_t)`: dx (M, K) of h.dtype; dweight and dbias (K,)
        fp32, empty when there is no weight or no bias.
    """
    check_matrix("norm_backward", "h", h)
    check_kind("norm_backward", kind, NORM_KINDS)
    grad = grad_y.float()
    centered = h.float() - mean.unsqueeze(1) if kind == "layer" else h.float()
    normalized = centered * rstd.unsqueeze(1)
    scaled = grad if weight is None else grad * weight.float()
    dx = scaled - normalized * (scaled * normalized).mean(dim=1, keepdim=True)
    if kind == "layer":
        dx = dx - scaled.mean(dim=1, keepdim=True)
    dx = dx * rstd.unsqueeze(1)
    if grad_residual is not None:
        check_same("norm_backward", "grad_residual", grad_residual, h, dtype=False)
        dx = dx + grad_residual.float()
    dx = dx.to(h.dtype)
    dweight = empty(h, torch.float32) if weight is None else (grad * normalized).sum(dim=0)
    dbias = grad.sum(dim=0) if has_bias else empty(h, torch.float32)
    return (
        dx,
        dweight,
        dbias,
        *quantize_both(dx, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens),
    )


def activation_quantize(
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    emit_high: bool,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`y = act(x)`, or `act(gate) * x` for a gated kind, and MXFP8 of y.

    Args:
        x: (M, K) fp32, bf16 or fp16. For a gated kind either the up projection (M, K) with `gate` (M, K), or,
            with `gate` None, the packed (M, 2K) whose first half is the gate and whose second half is up.
        gate: (M, K) of x.dtype for a gated kind, else None.
        kind: `relu`, `relu2` (its square), `gelu` (erf), `gelu_tanh`, `silu`; gated `swiglu` (silu), `geglu`
            (gelu), `geglu_tanh`, `reglu`.
        out_dtype: dtype y is rounded to before it is stored or quantized.
        emit_high: also return y.

    Returns:
        `(y, qdata, scale, qdata_t, scale_t)`: y (M, K) of `out_dtype` or empty.
    """
    up, inner, act = split_operands("activation_quantize", x, gate, kind)
    y = _act(inner.float(), act)
    if up is not None:
        y = y * up.float()
    y = y.to(out_dtype)
    quantized = quantize_both(y, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
    return y if emit_high else empty(x, out_dtype), *quantized


def activation_backward(
    grad_y: Tensor,
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    want_bias_grad: bool,
    act_colwise: QuantSpec | None,
    *,
    out_dtype: torch.dtype | None = None,
    emit_high: bool = True,
    seed: Tensor | None = None,
    stream: int = 0,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, ...]:
    """Gradient of `activation_quantize` in x and gate, MXFP8 of it, and the activation's transposed qdata again.

    Args:
        grad_y: (M, K) of any float dtype; x, gate, kind: as the forward took them.
        rowwise, colwise: MXFP8 of dx (and of dgate), for the GEMMs of the projection before the activation.
        want_bias_grad: also sum dx (and dgate) over the tokens, from the rounded values, in fp32.
        act_colwise: re-emit the forward's y quantized along the tokens: wgrad's other operand of the projection
            after the activation, which then need not be saved.
        out_dtype: dtype the forward rounded y to, for the re-emission; default x.dtype.
        emit_high: return dx and dgate themselves; False when only their MXFP8 is read.

    Returns:
        A tuple of 14:

        0 dx, 1 dgate: shape and dtype of x and gate. 2 dbias, 3 dgate_bias: fp32 sums over tokens.
        4-7 qdata, scale, qdata_t, scale_t of dx. 8-11 the same of dgate. 12 act_qdata_t, 13 act_scale_t.

        Packed x (M, 2K): dx is the packed gradient (M, 2K), dbias (2K,), and 4-7 are of that matrix. 1, 3 and
        8-11 are empty unless a gate was given.
    """
    up, inner, act = split_operands("activation_backward", x, gate, kind)
    grad = grad_y.float()
    inner_f = inner.float()
    high = out_dtype or x.dtype
    dinner = grad * _act_grad(inner_f, act) if up is None else grad * up.float() * _act_grad(inner_f, act)
    dinner = dinner.to(x.dtype)
    dup = None if up is None else (grad * _act(inner_f, act)).to(x.dtype)
    if up is None:
        dx, dgate = dinner, None
    elif gate is None:
        dx, dgate = torch.cat((dinner, dup), dim=1), None  # pyright: ignore[reportArgumentType]
    else:
        dx, dgate = dup, dinner
    assert dx is not None
    sums = [d.float().sum(dim=0) if want_bias_grad and d is not None else empty(x, torch.float32) for d in (dx, dgate)]
    quantized = quantize_both(dx, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
    gate_quantized = tuple(empty(x, torch.uint8) for _ in range(4))
    if dgate is not None:
        gate_quantized = quantize_both(dgate, rowwise, colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens)
    act_quantized = (empty(x, torch.uint8), empty(x, torch.uint8))
    if act_colwise is not None:
        y = _act(inner_f, act) if up is None else _act(inner_f, act) * up.float()
        act_quantized = quantize_both(
            y.to(high), None, act_colwise, seed, stream, swizzled=swizzled, pad_tokens=pad_tokens
        )[2:]
    highs = (dx, empty(x, x.dtype) if dgate is None else dgate) if emit_high else (empty(x, x.dtype), empty(x, x.dtype))
    return *highs, *sums, *quantized, *gate_quantized, *act_quantized


def split_operands(op: str, x: Tensor, gate: Tensor | None, kind: str) -> tuple[Tensor | None, Tensor, str]:
    """`(up, inner, act)`: the activation `act` applies to `inner`, and multiplies `up` for a gated kind."""
    check_matrix(op, "x", x)
    check_kind(op, kind, (*PLAIN_KINDS, *GATED_KINDS))
    if kind in PLAIN_KINDS:
        if gate is not None:
            raise ValueError(f"{op}: got a gate for {kind}, which has none; gated kinds are {', '.join(GATED_KINDS)}")
        return None, x, kind
    if gate is not None:
        check_same(op, "gate", gate, x)
        return x, gate, GATED_KINDS[kind]
    if x.shape[1] % 2:
        raise ValueError(f"{op}: got a packed {kind} input of {x.shape[1]} columns, expected an even number")
    half = x.shape[1] // 2
    return x[:, half:], x[:, :half], GATED_KINDS[kind]


def empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands for an output nobody asked for."""
    return torch.empty(0, dtype=dtype, device=like.device)


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """Raise unless x is a 2-D tensor of a supported float dtype."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{op}: got {name} dtype {x.dtype}, expected float32, bfloat16 or float16")
    if x.dim() != 2:
        raise ValueError(f"{op}: got {name} shape {tuple(x.shape)}, expected 2-D (tokens, features); flatten first")


def check_same(op: str, name: str, other: Tensor, x: Tensor, *, dtype: bool = True) -> None:
    """Raise unless `other` has the shape (and dtype) of x."""
    if other.shape != x.shape or (dtype and other.dtype != x.dtype):
        raise ValueError(
            f"{op}: got {name} {tuple(other.shape)} {other.dtype}, expected {tuple(x.shape)} {x.dtype} as its companion"
        )


def check_kind(op: str, kind: str, offered: tuple[str, ...]) -> None:
    """Raise unless `kind` is offered."""
    if kind not in offered:
        hint = near_misses(kind, list(offered))
        raise ValueError(f"{op}: got kind {kind!r}, expected one of {', '.join(offered)}{hint}")


def _stored(scale: Tensor, swizzled: bool) -> Tensor:
    plain = scale.contiguous().view(torch.uint8)
    return swizzle_scale(plain) if swizzled else plain


def _act(x: Tensor, act: str) -> Tensor:
    if act in ("relu", "relu2"):
        rectified = torch.where(x <= 0, 0.0, x)  # NaN stays, -0 becomes +0
        return rectified if act == "relu" else rectified * rectified
    if act == "silu":
        return x * torch.sigmoid(x)
    if act == "gelu":
        return x * _normal_cdf(x)
    return x * torch.sigmoid(_tanh_argument(x))


def _normal_cdf(x: Tensor) -> Tensor:
    """`0.5 (1 + erf(x / sqrt 2))` without the cancellation that leaves its negative tail no correct digit."""
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def _tanh_argument(x: Tensor) -> Tensor:
    """`2 u` of gelu's approximation `0.5 (1 + tanh u) = sigmoid(2 u)`, again without the cancellation."""
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def _act_grad(x: Tensor, act: str) -> Tensor:
    if act == "relu":
        return torch.where(x <= 0, 0.0, 1.0)
    if act == "relu2":
        return 2 * torch.where(x <= 0, 0.0, x)
    if act == "silu":
        sigmoid = torch.sigmoid(x)
        return sigmoid * (1 + x * (1 - sigmoid))
    if act == "gelu":
        density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return _normal_cdf(x) + x * density
    sigmoid = torch.sigmoid(_tanh_argument(x))
    inner = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return sigmoid * (1 + x * inner * (1 - sigmoid))
