"""Ops of what stands before a GEMM and quantizes for it: norms and activations, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fused.spec import Rounding
from .library import decode, define, fake_quantized, without_padding
from .table import layout, resolve


def _none(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(0, dtype=dtype)


def _norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    emit_high: bool,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("norm_quantize", backend, x.device)
    specs = decode(rowwise), decode(colwise)
    y, _, *rest = run(x, None, weight, bias, eps, kind, out_dtype, *specs, emit_high, seed=seed, stream=stream)
    return y.contiguous(), *without_padding(rest[:4], x.shape[0], layout(backend, x.device)), *rest[4:]


def _norm_quantize_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    emit_high: bool,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, ...]:
    y = x.new_empty(x.shape, dtype=out_dtype) if emit_high else _none(x, out_dtype)
    mean = x.new_empty(x.shape[0] if kind == "layer" else 0, dtype=torch.float32)
    laid = layout(backend, x.device)
    quantized = fake_quantized(x, rowwise, colwise, layout=laid, row_bytes=laid.row_bytes)
    return y, *quantized, mean, x.new_empty(x.shape[0], dtype=torch.float32)


norm_quantize = define(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, str kind, ScalarType out_dtype, str rowwise,"
    " str colwise, bool emit_high, Tensor? seed, int stream, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_quantize,
    _norm_quantize_fake,
)


def _norm_backward(
    grad_y: Tensor,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    has_bias: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("norm_backward", backend, h.device)
    dx, dweight, dbias = run(grad_y, h, weight, mean, rstd, kind, None, has_bias, None, None)[:3]
    return dx.contiguous(), dweight, dbias


def _norm_backward_fake(
    grad_y: Tensor,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    has_bias: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    features = h.shape[1]
    dweight = h.new_empty(0 if weight is None else features, dtype=torch.float32)
    return h.new_empty(h.shape), dweight, h.new_empty(features if has_bias else 0, dtype=torch.float32)


norm_backward = define(
    "norm_backward(Tensor grad_y, Tensor h, Tensor? weight, Tensor mean, Tensor rstd, str kind, bool has_bias,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)


def _activation_quantize(
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    emit_high: bool,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("activation_quantize", backend, x.device)
    specs = decode(rowwise), decode(colwise)
    y, *quantized = run(x, gate, kind, out_dtype, *specs, emit_high, seed=seed, stream=stream)
    return y.contiguous(), *without_padding(quantized, x.shape[0], layout(backend, x.device))


def _activation_quantize_fake(
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    emit_high: bool,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, ...]:
    y = x.new_empty(x.shape, dtype=out_dtype) if emit_high else _none(x, out_dtype)
    laid = layout(backend, x.device)
    return y, *fake_quantized(x, rowwise, colwise, layout=laid, row_bytes=laid.row_bytes)


activation_quantize = define(
    "activation_quantize(Tensor x, Tensor? gate, str kind, ScalarType out_dtype, str rowwise, str colwise,"
    " bool emit_high, Tensor? seed, int stream, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _activation_quantize,
    _activation_quantize_fake,
)


def _activation_backward(
    grad_y: Tensor,
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    act_colwise: str,
    emit_high: bool,
    bias: bool,
    seed: Tensor | None,
    stream: int,
    act_stream: int,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("activation_backward", backend, x.device)
    act_spec = decode(act_colwise)
    rounded_alone = act_spec is not None and act_spec.rounding is Rounding.STOCHASTIC  # by another stream than dx
    out = run(
        grad_y, x, gate, kind, decode(rowwise), decode(colwise), bias, None if rounded_alone else act_spec,
        out_dtype=out_dtype, emit_high=emit_high, seed=seed, stream=stream,
    )  # fmt: skip
    act = out[12:]
    if rounded_alone:
        forward = resolve("activation_quantize", backend, x.device)
        act = forward(x, gate, kind, out_dtype, None, act_spec, False, seed=seed, stream=act_stream)[3:]
    laid, none = layout(backend, x.device), _none(x, torch.uint8)
    of_x, of_gate, (_, _, *act) = (
        without_padding(one, x.shape[0], laid) for one in (out[4:8], out[8:12], (none, none, *act))
    )
    return out[0].contiguous(), out[1].contiguous(), *out[2:4], *of_x, *of_gate, *act


def _activation_backward_fake(
    grad_y: Tensor,
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    out_dtype: torch.dtype,
    rowwise: str,
    colwise: str,
    act_colwise: str,
    emit_high: bool,
    bias: bool,
    seed: Tensor | None,
    stream: int,
    act_stream: int,
    backend: str,
) -> tuple[Tensor, ...]:
    dx = x.new_empty(x.shape) if emit_high else _none(x, x.dtype)
    dgate = x.new_empty(x.shape) if emit_high and gate is not None else _none(x, x.dtype)
    laid = layout(backend, x.device)
    of_x, of_gate, act = (
        fake_quantized(x, row, col, layout=laid, row_bytes=laid.row_bytes)
        for row, col in ((rowwise, colwise), ("", "") if gate is None else (rowwise, colwise), ("", act_colwise))
    )
    sums = [
        x.new_empty(x.shape[1] if bias and present else 0, dtype=torch.float32) for present in (True, gate is not None)
    ]
    return dx, dgate, *sums, *of_x, *of_gate, *act[2:]


activation_backward = define(
    "activation_backward(Tensor grad_y, Tensor x, Tensor? gate, str kind, ScalarType out_dtype, str rowwise,"
    " str colwise, str act_colwise, bool emit_high, bool bias, Tensor? seed, int stream, int act_stream,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,"
    " Tensor, Tensor)",
    _activation_backward,
    _activation_backward_fake,
)
