"""Attention on jagged batches, each of its six GEMMs in MXFP8 or in high precision.

The GEMMs are those of dense attention (`attention`), each within a sample. q, k, v and grad_out are quantized here,
once per contraction; P or A, and dS, inside the ops.

Saved for backward, in bytes: q, k and v as they are, and the offsets; of softmax attention the output and lse
(4 a head and query) too; where GEMMs are MXFP8 also what backward multiplies of q, k and v, an element and 1/32 of a
scale per contraction. Block attention saves no lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.jagged import (
    block_backward,
    block_forward,
    generalized_backward,
    generalized_forward,
    jagged_backward,
    jagged_forward,
    quantize_jagged,
)
from ..fused.attention.gemms import GRAD_STREAM, KEY_STREAM, QUERY_STREAM, VALUE_STREAM
from .attention import AttentionConfig

Maybe = Tensor | None


@dataclass(frozen=True)
class JaggedOptions:
    """What does not change between the batches of a layer.

    Attributes:
        scale: of the scores; of generalized attention `pre_scale`.
        causal, window: as `fused.attention.jagged_layout` says.
        activation, post_scale, broadcast_q: of generalized attention; `""` for softmax.
        block: of block attention; 0 for the others.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    activation: str = ""
    post_scale: float = 1.0
    broadcast_q: bool = False
    block: int = 0


class _Quantizer:
    """Quantizes the operands of one call, or nothing without MXFP8."""

    def __init__(self, config: AttentionConfig | None, seed: Maybe, block: int = 0) -> None:
        self.config = None if config is None or config.is_high else config
        self.seed, self.block = seed, block

    @property
    def spec(self) -> str:
        return self.config.spec if self.config is not None else ""

    @property
    def backend(self) -> str:
        return self.config.backend if self.config is not None else "auto"

    def both(
        self, x: Tensor, offsets: Tensor, longest: int, rowwise: tuple[str, int], colwise: tuple[str, int], stream: int
    ) -> list[Tensor]:
        """qdata, scale, qdata_t, scale_t; a GEMM and the operand's place in it choose a spec, `""` none."""
        config = self.config
        assert config is not None
        specs = [getattr(config, gemm)[place] if gemm else "" for gemm, place in (rowwise, colwise)]
        return list(quantize_jagged(x, offsets, longest, *specs, self.seed, stream, self.block, config.backend))

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: tuple[Tensor, Tensor, int, int], needs: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Operands of the forward op, and of q, k and v those of the backward: query, key, value, key_t, query_t."""
        if self.config is None:
            return [], []
        needs_q, needs_k, needs_scores = needs
        q_offsets, k_offsets, max_q, max_k = layout
        query = self.both(q, q_offsets, max_q, ("qk", 0), ("dk" if needs_k else "", 1), QUERY_STREAM)
        key = self.both(k, k_offsets, max_k, ("qk", 1), ("dq" if needs_q else "", 1), KEY_STREAM)
        value = self.both(v, k_offsets, max_k, ("dp" if needs_scores else "", 1), ("pv", 1), VALUE_STREAM)
        return [*query[:2], *key[:2], *value[2:]], [*query[:2], *key[:2], *value[:2], *key[2:], *query[2:]]

    def backward(
        self, saved: list[Tensor], grad: Tensor, layout: tuple[Tensor, int], needs_v: bool, needs_scores: bool
    ) -> list[Tensor]:
        """Operands of the backward op, in the order of `BACKWARD_OPERANDS`."""
        if self.config is None:
            return []
        row, col = ("dp" if needs_scores else "", 0), ("dv" if needs_v else "", 1)
        return [*saved[:6], *self.both(grad, *layout, row, col, GRAD_STREAM), *saved[6:]]


def _refuse_second_order() -> None:
    """Raise in a backward that records itself, whose terms would go missing silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "attention on jagged batches has no second derivatives (create_graph=True); pad the batch and use "
            "F.scaled_dot_product_attention where they are taken"
        )


def _wanted(names: str, needs: Sequence[bool]) -> str:
    return "".join(name for name, needed in zip(names, needs) if needed)


def _either(k_offsets: Maybe, q_offsets: Maybe) -> Tensor:
    found = q_offsets if k_offsets is None else k_offsets
    assert found is not None
    return found


def _one_sample(x: Tensor) -> Tensor:
    """Offsets of a single sample with all rows of x, made without a copy from the host."""
    return torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]


class JaggedAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, position, time, q_offsets, k_offsets, ..., schedule, seed, config, options)`.

    Args:
        q: (Tq, H, D), k: (Tk, G, D), v: (Tk, G, E) in the compute dtype. position, time: bias tables or None.
        q_offsets: None with `broadcast_q`. k_offsets, k_times: None where they are the same as those of the queries.
        q_times, k_times, time_bounds: of the time table, or None. schedule: shared with other layers, or None.
        config: precision of the GEMMs, or None for the compute dtype. options: of softmax or generalized attention.

    Returns:
        (Tq, H, E), with `broadcast_q` (B * S, H, E). Gradients have the dtype and shape of what they belong to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Maybe,
        time: Maybe,
        q_offsets: Maybe,
        k_offsets: Maybe,
        max_q: int,
        max_k: int,
        q_times: Maybe,
        k_times: Maybe,
        time_bounds: Maybe,
        schedule: Maybe,
        seed: Maybe,
        config: AttentionConfig | None,
        options: JaggedOptions,
    ) -> Tensor:
        needs_q, needs_k, _, *needs_b = ctx.needs_input_grad[:5]
        quantizer = _Quantizer(config, seed)
        k_offsets = _either(k_offsets, q_offsets)
        k_times = q_times if k_times is None else k_times
        bias = [position, time, q_times, k_times, time_bounds]
        queries = (q_offsets, max_q) if q_offsets is not None else (_one_sample(q), q.shape[0])
        needs = (needs_q, needs_k, needs_q or needs_k or any(needs_b))
        operands, saved = quantizer.inputs(q, k, v, (queries[0], k_offsets, queries[1], max_k), needs)
        tensors = (q, k, v, q_offsets, k_offsets, max_q, max_k, bias, schedule, operands, seed, quantizer.spec)
        mask = (options.causal, options.window, quantizer.backend)
        if options.activation:
            facts = (options.activation, options.scale, options.post_scale, options.broadcast_q)
            out, kept = generalized_forward(*tensors, *facts, *mask), ()
        else:
            out, lse = jagged_forward(*tensors, options.scale, *mask)
            kept = (out, lse)
        ctx.save_for_backward(q, k, v, q_offsets, k_offsets, *bias, schedule, seed, *kept, *saved)
        ctx.lengths, ctx.config, ctx.options, ctx.kept = (max_q, max_k), config, options, len(kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        q, k, v, q_offsets, k_offsets, *rest = ctx.saved_tensors
        bias, (schedule, seed), rest = rest[:5], rest[5:7], rest[7:]
        kept, saved = rest[: ctx.kept], rest[ctx.kept :]
        needs, options, (max_q, max_k) = ctx.needs_input_grad[:5], ctx.options, ctx.lengths
        wanted = _wanted("qkv", needs[:3]) + ("b" if any(needs[3:]) else "")
        quantizer, grad = _Quantizer(ctx.config, seed), grads[0].contiguous()
        operands: list[Tensor] = []
        if quantizer.config is not None:
            rows = _rows_of_output(q, q_offsets, k_offsets, max_q)
            operands = quantizer.backward(saved, grad, rows, needs[2], wanted not in ("", "v"))
        tensors = (q, k, v, q_offsets, k_offsets, max_q, max_k, bias, schedule, operands, seed, quantizer.spec)
        mask = (options.causal, options.window, quantizer.backend, wanted)
        if options.activation:
            facts = (options.activation, options.scale, options.post_scale, options.broadcast_q)
            found = generalized_backward(grad, *tensors, *facts, *mask)
        else:
            found = jagged_backward(grad, *kept, *tensors, options.scale, *mask)
        tables = [g.to(table.dtype) if table is not None else g for g, table in zip(found[3:], bias)]
        results = [g if needed else None for g, needed in zip([*found[:3], *tables], needs)]
        return *results, *(None,) * 11


def _rows_of_output(q: Tensor, q_offsets: Maybe, k_offsets: Tensor, max_q: int) -> tuple[Tensor, int]:
    """Offsets of the output's rows and the longest sample among them."""
    if q_offsets is not None:
        return q_offsets, max_q
    return torch.arange(k_offsets.shape[0], dtype=torch.int32, device=q.device) * q.shape[0], q.shape[0]


class BlockAttentionFunction(torch.autograd.Function):
    """`apply(q, k, v, offsets, max_length, seed, config, options)`: block attention, as for the other Function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        max_length: int,
        seed: Maybe,
        config: AttentionConfig | None,
        options: JaggedOptions,
    ) -> Tensor:
        needs_q, needs_k, _ = ctx.needs_input_grad[:3]
        quantizer, layout = _Quantizer(config, seed, options.block), (offsets, offsets, max_length, max_length)
        operands, saved = quantizer.inputs(q, k, v, layout, (needs_q, needs_k, needs_q or needs_k))
        ctx.save_for_backward(q, k, v, offsets, seed, *saved)
        ctx.max_length, ctx.config, ctx.options = max_length, config, options
        facts = (options.scale, options.block, options.causal, quantizer.backend)
        return block_forward(q, k, v, offsets, max_length, operands, seed, quantizer.spec, *facts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        q, k, v, offsets, seed, *saved = ctx.saved_tensors
        needs, options = ctx.needs_input_grad[:3], ctx.options
        quantizer, grad = _Quantizer(ctx.config, seed, options.block), grads[0].contiguous()
        operands = quantizer.backward(saved, grad, (offsets, ctx.max_length), needs[2], needs[0] or needs[1])
        facts = (options.scale, options.block, options.causal, quantizer.backend, _wanted("qkv", needs))
        found = block_backward(
            grad, q, k, v, offsets, ctx.max_length, operands, seed, quantizer.spec, *facts
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip(found, needs)), *(None,) * 5
