"""The functional API: MXFP8 counterparts of `torch.nn.functional`, with autocast and checks, without modules.

Each op also takes and gives the values of `mx_tensor` that travel between fused layers.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import (
    ActivationFunction,
    ActivationLinearFunction,
    AttentionConfig,
    LinearConfig,
    MXFP8LinearFunction,
    NormConfig,
    NormFunction,
    attention,
)
from .fused.spec import BLOCK
from .mx_tensor import Edge, MXTensor, Pending, Traveling

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mxfp8_linear(
    input: Tensor | Traveling, weight: Tensor, bias: Tensor | None = None, *, config: LinearConfig
) -> Tensor:
    """`input @ weight.T + bias`, each GEMM, forward and backward, in the precision `config` gives it.

    Args:
        input: (..., in_features), any number of leading dims, any token count, 0 included; or a value on a fused
            edge: already quantized, or an activation still to be applied.
        weight: (out_features, in_features), the user's own parameter; quantized anew in every call.
        bias: (out_features,) or None.
        config: `LinearConfig.of(LinearPrecision(...))`.

    Returns:
        (..., out_features) in the compute dtype: autocast's where autocast is on, else the input's.

    Raises:
        ValueError: shapes that do not fit. TypeError: dtypes that `F.linear` would refuse too.
    """
    dtype = compute_dtype(input)
    _check_linear(input, weight, bias, dtype)
    weight = weight.to(dtype)
    if not torch.is_grad_enabled():
        weight = weight.detach()  # a Function sees requires_grad alone, and would quantize the input for wgrad
    bias = None if bias is None else bias.to(dtype)
    seed = draw_seed(input.device) if config.stochastic else None
    if isinstance(input, MXTensor):
        if _fits(input, dtype, config, weight):
            parts = (input.qdata, input.scale, input.qdata_t, input.scale_t)
            return _apply(MXFP8LinearFunction, input.carrier, *parts, weight, bias, seed, config)
        input = input.high("a linear layer of another precision")
    if isinstance(input, Pending):
        if input.edge.fused and input.kind != "identity":
            return _apply(ActivationLinearFunction, input.x, input.gate, weight, bias, seed, input.kind, config)
        input = input.materialize()
    assert isinstance(input, Tensor)
    nothing = (None, None, None, None)
    return _apply(MXFP8LinearFunction, input.to(dtype), *nothing, weight, bias, seed, config)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, whose annotations say nothing of what it returns."""
    return function.apply(*args)


def _fits(input: MXTensor, dtype: torch.dtype, config: LinearConfig, weight: Tensor) -> bool:
    """Whether a quantized input is what this layer would have quantized itself."""
    rowwise, colwise = config.input_specs
    if input.quantized_from != dtype or input.rowwise != rowwise:
        return False
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return True
    return input.colwise == colwise if config.wgrad[1] else input.has_high


def mxfp8_norm(
    input: Tensor | Traveling,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    config: NormConfig,
    dtype: torch.dtype,
    edge: Edge | None = None,
) -> Tensor | MXTensor:
    """RMS or layer norm over the last dim; on a fused edge its MXFP8 instead of a tensor.

    Args:
        input: (..., K). weight, bias: (K,) or None.
        config: what to compute and, where `edge` is fused, what to emit.
        dtype: dtype of the result, as the norm this stands for would give.
        edge: the fused edge, or None for a plain norm.

    Returns:
        (..., K) of `dtype`, or an `MXTensor` that stands for it.
    """
    if isinstance(input, Traveling):
        input = input.high("a norm")
    plain = replace(config, rowwise="", colwise="", emit_high=True)
    if edge is None or not edge.fused or not config.rowwise:
        return _norm_high(input, weight, bias, plain, dtype)
    target = compute_dtype(input, dtype)
    if not torch.is_grad_enabled():
        config = replace(config, colwise="")
    seed = draw_seed(input.device) if config.stochastic else None
    if config.emit_high and target != dtype:
        return _norm_high(input, weight, bias, plain, dtype)
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    parts = _apply(NormFunction, input, weight, bias, seed, config, dtype, target)
    again = partial(_norm_high, input, weight, bias, plain, dtype)
    return MXTensor(*parts, config.rowwise, config.colwise, target, config.emit_high, again, edge)


def _norm_high(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, config: NormConfig, dtype: torch.dtype
) -> Tensor:
    return _apply(NormFunction, input, weight, bias, None, config, dtype, dtype)[0]


def mxfp8_activation(
    input: Tensor | Traveling, kind: str, *, gate: Tensor | None = None, edge: Edge | None = None
) -> Tensor | Pending:
    """`act(input)` or `act(gate) * input`; on a planned edge left pending for the GEMM that consumes it.

    Args:
        input: (..., K); gate: the same shape for a gated kind.
        kind: as `fused.reference_ops` names them.
        edge: the planned edge, or None to compute at once.
    """
    if isinstance(input, Pending) and gate is None:
        pending = input.activated(kind)
        if pending is not None:
            return replace(pending, edge=edge) if edge is not None else pending.materialize()
    if isinstance(input, Traveling):
        input = input.high("an activation")
    if edge is None:
        return activation(input, gate, kind)
    return Pending(input, gate, kind, activation, edge)


def pending(output: Tensor, edge: Edge | None) -> Tensor | Pending:
    """A linear's output as the value an activation function in the caller's code goes on with; itself off an edge."""
    return output if edge is None else Pending(output, None, "identity", activation, edge)


def activation(x: Tensor, gate: Tensor | None, kind: str) -> Tensor:
    """The activation on its own: (..., K) in the dtype of `x`."""
    return _apply(ActivationFunction, x, gate, kind, "auto")


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

    Returns:
        (..., H, Lq, E) in the compute dtype. A query that sees no key gets 0. Head dims that blocks of 32 do not
        divide run torch's own attention, with a warning.

    Raises:
        ValueError: shapes that do not fit; tiles of several tokens under a mask. TypeError: dtypes.
    """
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
    return attention(
        q.to(dtype), k.to(dtype), v.to(dtype), attn_mask, seed, config,
        scale=scale, causal=is_causal, dropout_p=float(dropout_p), enable_gqa=enable_gqa, emit_probs=need_weights,
    )  # fmt: skip


def _attention_problem(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why this call cannot run in MXFP8, or nothing."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors are not supported"
    for dim in (query.shape[-1], value.shape[-1]):
        if dim % BLOCK or dim == 0:
            return f"head dim {dim} is not a multiple of {BLOCK}"
    dtype = compute_dtype(query)
    return "" if dtype in _DTYPES else f"compute dtype {dtype} is not float32, bfloat16 or float16"


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
            "hidden tokens move visible ones; override this layer with 1x32 tiles or 'bf16', or allow it by name with "
            "{'mix_masked': True}"
        )


def compute_dtype(x: Tensor | Traveling, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype a matrix multiplication of `x` would run in here: autocast's if it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if _autocast_on(kind) else dtype or x.dtype


def _autocast_on(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def draw_seed(device: torch.device) -> Tensor:
    """A seed for stochastic rounding from torch's generator of `device`: int64 scalar.

    Activation checkpointing restores that generator before it recomputes, CUDA graphs register it, and
    a checkpoint that stores its state resumes to the bit, as for dropout.
    """
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def _check_linear(input: Tensor | Traveling, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"mxfp8_linear: got input {tuple(input.shape)} and weight {tuple(weight.shape)}, expected "
            "(..., in_features) and (out_features, in_features)"
        )
    if weight.dtype != input.dtype and not _autocast_on(input.device.type):
        raise TypeError(
            f"mxfp8_linear: got input {input.dtype} and weight {weight.dtype}, expected one dtype; "
            "cast the input or run under torch.autocast"
        )
    if dtype not in _DTYPES:
        raise TypeError(f"mxfp8_linear: got compute dtype {dtype}, expected float32, bfloat16 or float16")
