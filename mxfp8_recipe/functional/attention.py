"""Softmax attention, alone or between its projections."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import AttentionConfig, attention
from ..fused.spec import BLOCK
from ..mx_edge import Edge
from ..mx_heads import AttentionOutput, Heads
from ..mx_tensor import MXTensor, Traveling, computed_from
from .common import DTYPES, compute_dtype, draw_seed
from .listening import AttentionCall, listener


def mxfp8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: AttentionConfig,
    need_weights: bool = False,
    edge: Edge | None = None,
) -> Any:
    """`F.scaled_dot_product_attention`, each GEMM, forward and backward, in the precision `config` gives it.

    Args:
        query: (..., H, Lq, D). key: (..., H, Lk, D). value: (..., H, Lk, E). Leading dims broadcast.
        attn_mask: broadcastable to (..., H, Lq, Lk); bool (True takes part) or float (added), or None. Where it
            hides a pair, and under `is_causal`, the block of scores around it stays in the compute dtype.
        dropout_p: applied whenever above 0, as torch does; drawn from a seed out of torch's generator.
        is_causal: query i sees keys 0..i; with `attn_mask`, both apply.
        scale: of the scores; default `D ** -0.5`.
        enable_gqa: key and value may have fewer heads; head h reads theirs number h // (H / their count).
        config: `AttentionConfig.of(AttentionPrecision(...))`.
        need_weights: also return the weights, (..., H, Lq, Lk), dropout applied.
        edge: the fused edge to the layer that multiplies the output, or None.

    Returns:
        (..., H, Lq, E) in the compute dtype. A query that sees no key gets 0. Head dims that blocks of 32 do not
        divide run torch's own attention, with a warning.

    Raises:
        ValueError: shapes that do not fit; tiles of several tokens under a mask. TypeError: dtypes.
    """
    options: dict[str, Any] = {"scale": scale, "dropout_p": float(dropout_p)}
    if attn_mask is None and not is_causal and not need_weights and not enable_gqa:
        fused = _fused_attention(query, key, value, config, edge, options)
        if fused is not None:
            return fused
    q, k, v = (x.high("attention") if isinstance(x, Traveling) else x for x in (query, key, value))
    problem = "every GEMM is BF16" if config.is_high else _attention_problem(q, k, v)
    if problem and not need_weights:
        if not config.is_high and not torch.compiler.is_compiling():  # warning does not trace
            warnings.warn(f"{config.layer or 'attention'}: {problem}; it runs in high precision", stacklevel=2)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _check_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa, config)
    dtype = compute_dtype(q)
    seed = draw_seed(q.device) if dropout_p > 0 or config.stochastic else None
    q, k, v, options = q.to(dtype), k.to(dtype), v.to(dtype), options | {"causal": is_causal}
    out = attention(q, k, v, attn_mask, seed, config, enable_gqa=enable_gqa, emit_probs=need_weights, **options)
    _tell(config, (q, k, v), (), attn_mask, seed, out[0] if need_weights else out, options)
    return out


def _tell(
    config: AttentionConfig,
    inputs: tuple[Any, ...],
    given: tuple[Tensor, ...],
    mask: Tensor | None,
    seed: Tensor | None,
    output: Tensor,
    options: dict[str, Any],
) -> None:
    """Report a call to whoever listens."""
    heard = listener()
    if heard is not None:
        query, key, value = inputs
        heard.attention(AttentionCall(config, query, key, value, given, mask, seed, output, options))


def _fused_attention(
    query: Any, key: Any, value: Any, config: AttentionConfig, edge: Edge | None, options: dict[str, Any]
) -> Any:
    """Attention of three `Heads`, or to a fused edge, or both; None where it is neither."""
    inputs = (query, key, value)
    arrives = config.takes_heads and all(
        isinstance(x, Heads) and x.is_turned and (x.rowwise, x.colwise) == specs
        for x, specs in zip(inputs, config.input_specs)
    )
    emits = edge is not None and edge.fused and edge.emit is not None and query.dim() == 4
    if not arrives and not emits:
        return None
    given: tuple[Tensor, ...] = ()
    if arrives:
        given = tuple(part for x in inputs for part in x.parts)
        inputs = tuple(x.carrier for x in inputs)
    else:
        inputs = tuple(x.high("attention") if isinstance(x, Traveling) else x for x in inputs)
        dtype = compute_dtype(inputs[0])
        if config.is_high or _attention_problem(*inputs) or len({x.shape[:2] for x in inputs}) > 1:
            return None
        inputs = tuple(x.to(dtype) for x in inputs)
    seed = draw_seed(query.device) if options["dropout_p"] > 0 or config.stochastic else None
    run = partial(attention, *inputs, None, seed, config, given=given, **options)
    if not emits:
        out = run()
        _tell(config, inputs, given, None, seed, out, options)
        return out
    assert edge is not None
    assert edge.emit is not None
    row, col = edge.emit if torch.is_grad_enabled() else (edge.emit[0], "")
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = run(emit=(row, col))
    run = computed_from(run, edge.producer, *inputs)
    carrier = parts[0]
    _tell(config, inputs, given, None, seed, carrier, options)
    merged = MXTensor(*parts, row, col, carrier.dtype, False, partial(_merged_high, run), edge)
    batch, heads, length, dim = carrier.shape
    return AttentionOutput(carrier, merged, (batch, heads, length, dim), run, edge)


def _attention_problem(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why this call cannot run in MXFP8, or nothing."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors are not supported"
    for dim in (query.shape[-1], value.shape[-1]):
        if dim % BLOCK or dim == 0:
            return f"head dim {dim} is not a multiple of {BLOCK}"
    dtype = compute_dtype(query)
    return "" if dtype in DTYPES else f"compute dtype {dtype} is not float32, bfloat16 or float16"


def _check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    config: AttentionConfig,
) -> None:
    name, shapes = config.layer or "mxfp8_attention", [tuple(x.shape) for x in (query, key, value)]
    heads = [shape[-3] if len(shape) > 2 else 1 for shape in shapes]
    gqa = heads[1] == heads[2] and heads[1] > 0 and heads[0] % heads[1] == 0
    if min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise ValueError(f"{name}: got query, key, value {shapes}, expected (..., Lq, D), (..., Lk, D), (..., Lk, E)")
    if not gqa if enable_gqa else len({n for n in heads if n != 1}) > 1:
        remedy = "" if enable_gqa else "; pass enable_gqa=True for grouped heads"
        raise ValueError(f"{name}: got {heads} heads of query, key and value, which do not match{remedy}")
    if len({query.dtype, key.dtype, value.dtype}) > 1 and compute_dtype(query) == query.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise TypeError(f"{name}: got {dtypes} for query, key and value, expected one dtype")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{name}: got dropout_p={dropout_p}, expected a probability")
    if mask is not None and mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: got attn_mask of {mask.dtype}, expected bool or a float dtype")
    if config.mixes_rows and not config.mix_masked and (is_causal or mask is not None):
        raise ValueError(
            f"{name}: a tile of several tokens under {'a causal mask' if is_causal else 'an attention mask'} would let "
            "hidden tokens move visible ones; apply the recipe with example_inputs that have the mask, which leaves "
            f"this attention in BF16, or say overrides={{{config.layer!r}: 'bf16'}}, 1x32 tiles for it, or "
            "{'mix_masked': True} to allow it"
        )


def _merged_high(run: Any) -> Tensor:
    return run().transpose(1, 2).flatten(2)
