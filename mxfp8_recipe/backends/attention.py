"""Ops of attention: quantizing heads along either dim, and softmax attention forward and backward.

`spec` is an encoded `AttentionSpec`. A high-precision tensor that an op does not read may be a stand-in without
storage: only its shape, dtype and device count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..fused.attention.spec import AttentionSpec
from ..fused.spec import BLOCK, QuantSpec
from .library import decode, define, distinct, fake_quantized
from .table import resolve

BACKWARD_OPERANDS = ("query", "key", "value", "grad", "grad_t", "key_t", "query_t")
"""Quantized operands of `attention_backward` in the order they cross the op, qdata and scale each."""


def _quantize_heads(
    x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor, ...]:
    run = resolve("quantize_heads", backend, x.device)
    return run(x, decode(rowwise), decode(colwise), seed=seed, stream=stream)


def _quantize_heads_fake(
    x: Tensor, rowwise: str, colwise: str, seed: Tensor | None, stream: int, backend: str
) -> tuple[Tensor, ...]:
    batch, heads, length, dim = x.shape

    def orientation(wanted: str, outer: Any, along: Any) -> tuple[Tensor, Tensor]:
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8)
        blocks = (along + BLOCK - 1) // BLOCK
        qdata = x.new_empty(batch, heads, outer, along, dtype=torch.uint8)
        return qdata, x.new_empty(batch, heads, outer, blocks, dtype=torch.uint8)

    return (*orientation(rowwise, length, dim), *orientation(colwise, dim, length))


quantize_heads = define(
    "quantize_heads(Tensor x, str rowwise, str colwise, Tensor? seed, int stream, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_heads,
    _quantize_heads_fake,
)


def _quantize_merged(out: Tensor, rowwise: str, colwise: str, backend: str) -> tuple[Tensor, ...]:
    run = resolve("quantize_merged", backend, out.device)
    return run(out, decode(rowwise), decode(colwise))


def _quantize_merged_fake(out: Tensor, rowwise: str, colwise: str, backend: str) -> tuple[Tensor, ...]:
    batch, heads, length, dim = out.shape
    return fake_quantized(out, rowwise, colwise, batch * length, heads * dim)


quantize_merged = define(
    "quantize_merged(Tensor out, str rowwise, str colwise, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_merged,
    _quantize_merged_fake,
)


def _gemm_heads(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: int,
    features: list[int],
    head_dims: list[int],
    rowwise: list[str],
    colwise: list[str],
    backend: str,
) -> list[Tensor]:
    run, specs = resolve("gemm_heads", backend, a.device), (QuantSpec.decode(a_spec), QuantSpec.decode(b_spec))
    pairs = [(decode(row), decode(col)) for row, col in zip(rowwise, colwise)]
    operands = (a.view(specs[0].elem.dtype), a_scale, b.view(specs[1].elem.dtype), b_scale, bias)
    return distinct(run(*operands, out_dtype=out_dtype, batch=batch, parts=list(zip(features, head_dims, pairs))))


def _gemm_heads_fake(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: int,
    features: list[int],
    head_dims: list[int],
    rowwise: list[str],
    colwise: list[str],
    backend: str,
) -> list[Tensor]:
    outputs: list[Tensor] = []
    for width, dim, row, col in zip(features, head_dims, rowwise, colwise):
        heads = a.new_empty(batch, width // dim, a.shape[0] // batch, dim, dtype=out_dtype)
        outputs += _quantize_heads_fake(heads, row, col, None, 0, backend)
    return outputs


gemm_heads = define(
    "gemm_heads(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, Tensor? bias,"
    " ScalarType out_dtype, SymInt batch, int[] features, int[] head_dims, str[] rowwise, str[] colwise, str backend)"
    " -> Tensor[]",
    _gemm_heads,
    _gemm_heads_fake,
)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    quantized: list[Tensor],
    mask: Tensor | None,
    seed: Tensor | None,
    spec: str,
    scale: float,
    causal: bool,
    dropout_p: float,
    emit_probs: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("attention_forward", backend, query.device)
    pairs = [(quantized[i], quantized[i + 1]) for i in (0, 2, 4)]
    with torch.no_grad():  # an exported graph calls the op on parameters
        return run(
            query, key, value, *pairs, mask, seed, AttentionSpec.decode(spec),
            scale=scale, causal=causal, dropout_p=dropout_p, emit_probs=emit_probs,
        )  # fmt: skip


def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    quantized: list[Tensor],
    mask: Tensor | None,
    seed: Tensor | None,
    spec: str,
    scale: float,
    causal: bool,
    dropout_p: float,
    emit_probs: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    rows = query.shape[:-1]
    probs = query.new_empty(*rows, key.shape[-2]) if emit_probs else query.new_empty(0)
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32), probs


attention_forward = define(
    "attention_forward(Tensor query, Tensor key, Tensor value, Tensor[] quantized, Tensor? mask, Tensor? seed,"
    " str spec, float scale, bool causal, float dropout_p, bool emit_probs, str backend) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)


def _backward(
    grad_out: Tensor,
    grad_probs: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    quantized: list[Tensor],
    mask: Tensor | None,
    seed: Tensor | None,
    spec: str,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: str,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("attention_backward", backend, grad_out.device)
    operands = {name: (quantized[2 * i], quantized[2 * i + 1]) for i, name in enumerate(BACKWARD_OPERANDS)}
    return run(
        grad_out, grad_probs, query, key, value, lse, operands, mask, seed, AttentionSpec.decode(spec),
        scale=scale, causal=causal, dropout_p=dropout_p, wanted=wanted,
    )  # fmt: skip


def _backward_fake(
    grad_out: Tensor,
    grad_probs: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    quantized: list[Tensor],
    mask: Tensor | None,
    seed: Tensor | None,
    spec: str,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: str,
    backend: str,
) -> tuple[Tensor, ...]:
    tensors = {"q": query, "k": key, "v": value}
    grads = [x.new_empty(x.shape) if name in wanted else query.new_empty(0) for name, x in tensors.items()]
    return *grads, mask.new_empty(mask.shape) if mask is not None and "m" in wanted else query.new_empty(0)


attention_backward = define(
    "attention_backward(Tensor grad_out, Tensor? grad_probs, Tensor query, Tensor key, Tensor value,"
    " Tensor lse, Tensor[] quantized, Tensor? mask, Tensor? seed, str spec, float scale, bool causal,"
    " float dropout_p, str wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


@register_flop_formula(torch.ops.mxfp8_recipe.attention_forward)
def _forward_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[-2] * (dim + value[-1])


@register_flop_formula(torch.ops.mxfp8_recipe.attention_backward)
def _backward_flops(
    grad_out: Any, grad_probs: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[-2] * (3 * dim + 2 * value[-1])
