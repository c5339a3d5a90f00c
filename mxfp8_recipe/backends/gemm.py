"""Ops of the GEMM: quantizing an operand, multiplying quantized operands, and the high-precision product."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..fused.spec import QuantSpec
from .library import decode, define, fake_quantized, without_padding
from .table import layout, resolve


@lru_cache(maxsize=256)
def operand(spec: str) -> tuple[torch.dtype, tuple[int, int]]:
    """Dtype and tile of an operand quantized per an encoded spec."""
    decoded = QuantSpec.decode(spec)
    return decoded.elem.dtype, decoded.tile


def _quantize(
    x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor, ...]:
    run = resolve("quantize", backend, x.device)
    quantized = run(x, decode(rowwise), decode(colwise), seed=seed, stream=stream)
    return without_padding(quantized, x.shape[0], layout(backend, x.device))


def _quantize_fake(
    x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor, ...]:
    laid = layout(backend, x.device)
    return fake_quantized(x, rowwise, colwise, layout=laid, row_bytes=laid.row_bytes)


quantize = define(
    "quantize(Tensor x, str rowwise, str colwise, Tensor? seed, int stream, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)


def _quantize_and_sum(
    x: Tensor,
    rowwise: str,
    colwise: str,
    seed: Tensor | None,
    stream: int,
    backend: str,
    sum_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    run = resolve("quantize_and_sum", backend, x.device)
    *quantized, total = run(x, decode(rowwise), decode(colwise), seed=seed, stream=stream, sum_dtype=sum_dtype)
    return *without_padding(quantized, x.shape[0], layout(backend, x.device)), total


def _quantize_and_sum_fake(
    x: Tensor,
    rowwise: str,
    colwise: str,
    seed: Tensor | None,
    stream: int,
    backend: str,
    sum_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    laid = layout(backend, x.device)
    quantized = fake_quantized(x, rowwise, colwise, layout=laid, row_bytes=laid.row_bytes)
    return *quantized, x.new_empty(x.shape[1], dtype=sum_dtype)


quantize_and_sum = define(
    "quantize_and_sum(Tensor x, str rowwise, str colwise, Tensor? seed, int stream, str backend,"
    " ScalarType sum_dtype=float)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_and_sum,
    _quantize_and_sum_fake,
)


def _gemm(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    run = resolve("gemm", backend, a.device)
    (a_dtype, a_tile), (b_dtype, b_tile) = operand(a_spec), operand(b_spec)
    return run(
        a.view(a_dtype), a_scale, b.view(b_dtype), b_scale, bias, out_dtype=out_dtype, a_tile=a_tile, b_tile=b_tile
    )


def _gemm_fake(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


gemm = define(
    "gemm(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, Tensor? bias,"
    " ScalarType out_dtype, str backend) -> Tensor",
    _gemm,
    _gemm_fake,
)


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, backend: str) -> Tensor:
    return resolve("matmul", backend, a.device)(a, b, bias, out_dtype=out_dtype)


def _matmul_fake(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, backend: str) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


matmul = define(
    "matmul(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor", _matmul, _matmul_fake
)


@register_flop_formula(torch.ops.mxfp8_recipe.gemm)
def _gemm_flops(a: Any, a_scale: Any, a_spec: str, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


@register_flop_formula(torch.ops.mxfp8_recipe.matmul)
def _matmul_flops(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[0]
