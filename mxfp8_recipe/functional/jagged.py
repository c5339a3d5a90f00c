"""Attention on jagged batches: softmax (JFA), generalized (GDPA) and block attention.

Values are the tokens of all samples one after another, (T, H, D); offsets (B + 1,) say where each sample begins.
Positions count from a sample's start, and the end of its queries is aligned with the end of its keys: query i stands
at t = i + Lk - Lq. `causal` lets it see keys s <= t, `window` those with |t - s| <= window. What takes no part adds
nothing; a query that sees no key gets 0.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..autograd import AttentionConfig
from ..autograd.jagged import BlockAttentionFunction, JaggedAttentionFunction, JaggedOptions
from ..backends.jagged import jagged_schedule as schedule_op
from ..backends.offsets import WATCH, Claim
from ..fused.attention.bias import JaggedBias, bias_of, bucketed
from ..fused.attention.jagged_layout import Jagged, Pairs
from ..fused.spec import BLOCK
from .common import apply, cast, compute_dtype, draw_seed
from .jagged_checks import (
    check_activation,
    check_bias,
    check_config,
    check_copies,
    check_length,
    check_mask,
    check_numbers,
    check_offsets_form,
    check_operands,
    check_schedule,
    check_tensors,
    in_autocast,
)
from .listening import AttentionCall, listener


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    bias: JaggedBias | None = None,
    causal: bool = False,
    window: int | None = None,
    config: AttentionConfig | None = None,
    schedule: Tensor | None = None,
    cpu_offsets: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`softmax(scale * Q K^T + bias) V` within each sample.

    Args:
        q: (Tq, H, D). k: (Tk, G, D). v: (Tk, G, E), H a multiple of G: head h reads head h // (H / G) of k and v.
        q_offsets, k_offsets: (B + 1,) int32 or int64, from 0 to Tq and Tk. Samples may be empty.
        max_q, max_k: lengths that no sample exceeds.
        scale: of the scores; default `D ** -0.5`.
        bias: tables by relative position and by time interval, whose gradients are computed too.
        causal, window: see the module.
        config: precision of the six GEMMs, `AttentionConfig.of(AttentionPrecision(...))`; None: the compute dtype.
        schedule: from `jagged_schedule`, to share among layers; None: made by this call where kernels use one.
        cpu_offsets: q_offsets and k_offsets on the CPU, where they are at hand: checked at once.

    Returns:
        (Tq, H, E) in the compute dtype: autocast's where autocast is on, else that of q.

    Raises:
        ValueError: shapes, devices, lengths or offsets that do not fit. TypeError: dtypes. What offsets on a GPU hold
            is found out without waiting, and raised by a later call (`backends.offsets`).
    """
    op = check_config("jagged_attention", config)
    q, k, v = _operands(op, q, k, v)
    _check_layout(op, q, k, q_offsets, k_offsets, max_q, max_k, cpu_offsets)
    check_mask(op, causal, window)
    check_schedule(op, schedule, q)
    bias = in_autocast(bias, q)
    check_bias(op, bias, q, k, q.shape[0])
    options = JaggedOptions(_scale(op, scale, q), causal, _reach(window))
    return _run(op, q, k, v, q_offsets, k_offsets, max_q, max_k, bias, schedule, config, options)


def generalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str,
    pre_scale: float,
    post_scale: float,
    bias: JaggedBias | None = None,
    causal: bool = False,
    window: int | None = None,
    broadcast_q: bool = False,
    config: AttentionConfig | None = None,
    schedule: Tensor | None = None,
    cpu_offsets: tuple[Tensor | None, Tensor] | None = None,
) -> Tensor:
    """`act(pre_scale * Q K^T + bias) V * post_scale` within each sample: no softmax, rows do not sum to 1.

    Args:
        activation: gelu, gelu_tanh, silu, relu, identity; or gelu_poly, which is gelu for scores of magnitude up to 1
            alone, as a norm of q and k can promise (`fused.attention.activations` has its error).
        broadcast_q: q is (S, H, D), the queries of every sample (pooled attention); q_offsets is None.
        The rest is as for `jagged_attention`.

    Returns:
        (Tq, H, E), with `broadcast_q` (B * S, H, E), in the compute dtype.

    Raises:
        As `jagged_attention`.
    """
    op = check_config("generalized_attention", config)
    check_activation(f"{op}: activation", activation)
    check_numbers(op, pre_scale=pre_scale, post_scale=post_scale)
    if broadcast_q != (q_offsets is None):
        raise ValueError(f"{op}: q_offsets: expected None with broadcast_q=True, and offsets without it")
    q, k, v = _operands(op, q, k, v)
    _check_layout(op, q, k, q_offsets, k_offsets, max_q, max_k, cpu_offsets, broadcast_q)
    check_mask(op, causal, window)
    check_schedule(op, schedule, q)
    bias = in_autocast(bias, q)
    check_bias(op, bias, q, k, q.shape[0] * (k_offsets.shape[0] - 1) if broadcast_q else q.shape[0])
    options = JaggedOptions(float(pre_scale), causal, _reach(window), activation, float(post_scale), broadcast_q)
    max_q = q.shape[0] if broadcast_q else max_q
    return _run(op, q, k, v, q_offsets, k_offsets, max_q, max_k, bias, schedule, config, options)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    scale: float | None = None,
    block: int = 64,
    causal: bool = False,
    config: AttentionConfig | None = None,
    cpu_offsets: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each `block` tokens, counted from the start of a sample, to themselves.

    Args:
        q: (T, H, D). k: (T, G, D). v: (T, G, E). offsets: (B + 1,). max_length: no sample is longer.
        The rest is as for `jagged_attention`.

    Returns:
        (T, H, E) in the compute dtype.

    Raises:
        As `jagged_attention`.
    """
    op = check_config("block_attention", config)
    q, k, v = _operands(op, q, k, v)
    check_mask(op, causal, None)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{op}: got {q.shape[0]} rows of q and {k.shape[0]} of k, expected as many: self-attention")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"{op}: block: got {block!r}, expected a number of tokens")
    check_offsets_form(op, q, {"offsets": (offsets, max_length, q.shape[0])})
    if cpu_offsets is not None:
        check_copies(op, cpu_offsets, {"offsets": offsets})
        WATCH.trust(offsets, cpu_offsets, Claim(op, "offsets", q.shape[0], max_length))
    options = JaggedOptions(_scale(op, scale, q), causal, block=block)
    config, seed, (q, k, v) = _prepare(op, q, k, v, config, causal, "")
    k, v = k.view_as(k) if k is q else k, v.view_as(v) if v is q or v is k else v
    return apply(BlockAttentionFunction, q, k, v, offsets, max_length, seed, config, options)


def jagged_schedule(
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    total_q: int,
    total_k: int,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """The tiles of a batch in the order kernels take them, to hand to every layer that attends over this batch.

    Args:
        q_offsets, k_offsets, max_q, max_k, causal, window: as those layers get them. total_q, total_k: rows of q and k.

    Returns:
        int32 on the device of k_offsets; empty where no kernel uses one. Made on the device, without waiting.
    """
    named = {} if q_offsets is None else {"q_offsets": (q_offsets, max_q, total_q)}
    check_offsets_form("jagged_schedule", k_offsets, named | {"k_offsets": (k_offsets, max_k, total_k)})
    check_length("jagged_schedule", "max_q", max_q)
    check_mask("jagged_schedule", causal, window)
    return schedule_op(q_offsets, k_offsets, total_q, total_k, max_q, max_k, causal, _reach(window), "auto")


def _scale(op: str, scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    check_numbers(op, scale=scale)
    return float(scale)


def _reach(window: int | None) -> int | None:
    """A window that kernels can add positions to in 32 bits; no two are as far apart as the largest."""
    return None if window is None else min(window, 2**28)


def _operands(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, k and v in the compute dtype, checked."""
    check_tensors(op, q=q, k=k, v=v)
    q, k, v = (cast(x, compute_dtype(x)) for x in (q, k, v))
    check_operands(op, q, k, v)
    return q, k, v


def _check_layout(
    op: str,
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    cpu_offsets: tuple[Tensor | None, Tensor] | None,
    broadcast_q: bool = False,
) -> None:
    named: dict[str, Any] = {"k_offsets": (k_offsets, max_k, k.shape[0])}
    if not broadcast_q:
        named = {"q_offsets": (q_offsets, max_q, q.shape[0])} | named
    check_offsets_form(op, q, named)
    if cpu_offsets is None:
        return
    check_copies(op, cpu_offsets, {"q_offsets": q_offsets, "k_offsets": k_offsets})
    copies = [copy for copy in cpu_offsets if copy is not None]
    for (name, (offsets, longest, rows)), copy in zip(named.items(), copies, strict=True):
        WATCH.trust(offsets, copy, Claim(op, name, rows, longest))


def _run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: JaggedBias | None,
    schedule: Tensor | None,
    config: AttentionConfig | None,
    options: JaggedOptions,
) -> Tensor:
    masked = options.causal or options.window is not None
    config, seed, (q, k, v) = _prepare(op, q, k, v, config, masked, options.activation)
    position, time, q_times, k_times, bounds = (None,) * 5 if bias is None else bias.tensors
    # A Function that is traced takes no tensor twice: None stands for "the same as that of q".
    k_times, same = None if k_times is q_times else k_times, k_offsets is q_offsets
    time = time.view_as(time) if time is not None and time is position else time
    k, v = k.view_as(k) if k is q else k, v.view_as(v) if v is q or v is k else v
    if config is None and schedule is None and torch.is_grad_enabled():
        schedule = schedule_op(
            q_offsets, k_offsets, q.shape[0], k.shape[0], max_q, max_k, options.causal, options.window, "auto"
        )  # shared by forward and backward
    out = apply(
        JaggedAttentionFunction, q, k, v, position, time, q_offsets, None if same else k_offsets, max_q, max_k,
        q_times, k_times, bounds, schedule, seed, config, options,
    )  # fmt: skip
    heard = listener()
    if heard is not None and config is not None and q_offsets is not None and not options.activation:
        samples = Jagged.of(q_offsets, max_q, len(q)), Jagged.of(k_offsets, max_k, len(k))
        pairs = Pairs(*samples, options.causal, options.window)
        heard.attention(_as_dense(config, pairs, q, k, v, bias, seed, out, options))
    return out


def _as_dense(
    config: AttentionConfig,
    pairs: Pairs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: JaggedBias | None,
    seed: Tensor | None,
    out: Tensor,
    options: JaggedOptions,
) -> AttentionCall:
    """A call of softmax attention as a monitor hears of it: padded, with a mask."""
    with torch.no_grad():
        mask = ~pairs.hidden
        if bias is not None:
            added = sum(bias_of(table, buckets, torch.float32) for table, buckets in bucketed(bias, pairs))
            mask = torch.where(mask, added, -torch.inf)
        padded = pairs.q.pad_heads(q), pairs.k.pad_heads(k), pairs.k.pad_heads(v)
    facts = {"scale": options.scale, "causal": False, "dropout_p": 0.0}
    return AttentionCall(config, *padded, (), mask, seed, out, facts, pairs.q.pad_heads)


def _prepare(
    op: str, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig | None, masked: bool, activation: str
) -> tuple[AttentionConfig | None, Tensor | None, tuple[Tensor, ...]]:
    """The config, None where nothing is MXFP8; a seed where something is rounded stochastically; and the operands."""
    if not torch.is_grad_enabled():
        q, k, v = q.detach(), k.detach(), v.detach()  # a Function sees requires_grad alone, and would quantize twice
    if config is None or config.is_high:
        return None, None, (q, k, v)
    odd = [dim for dim in (q.shape[-1], v.shape[-1]) if dim % BLOCK or dim == 0]
    if odd:
        if not torch.compiler.is_compiling():  # warning does not trace
            problem = f"head dim {odd[0]} is not a multiple of {BLOCK}; it runs in high precision"
            warnings.warn(f"{op}: {problem}", stacklevel=4)
        return None, None, (q, k, v)
    mixes = config.mixes_rows or (bool(activation) and config.mixes_weights)  # only softmax's P has no amax
    if masked and not config.mix_masked and mixes:
        raise ValueError(
            f"{op}: a tile of several tokens under causality or a window would let hidden tokens move visible ones; "
            "override this layer with 1x32 tiles or 'bf16', or allow it by name with {'mix_masked': True}"
        )
    return config, draw_seed(q.device) if config.stochastic else None, (q, k, v)
