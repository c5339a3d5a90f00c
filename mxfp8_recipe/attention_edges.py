"""Edges into and out of attention: projections that emit heads, and attention that emits its projection's input.

Both need attention whose every operand is MXFP8: no mask, no causal flag, all six GEMMs quantized. On the way
in a projection's output may only be split into heads, (B, L, H * D) to (B, H, L, D), on the way out only merged.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .autograd import AttentionConfig
from .edges import EdgeFinder, EdgePlan
from .modules import JaggedAttention
from .record import Node

_SPLITS, _MERGES = ("view", "reshape", "unflatten"), ("view", "reshape", "flatten")
_ROLES = ("query", "key", "value")


def attention_edges(finder: EdgeFinder, name: str, config: AttentionConfig, module: nn.Module) -> list[EdgePlan]:
    """The edges of one converted attention: a multi-head layer's inner ones, or those around a call."""
    if isinstance(module, JaggedAttention):
        return []  # its projections reach it in high precision
    if isinstance(module, nn.MultiheadAttention):
        return [_multihead(finder, name, config, module)]
    calls = [node for node in finder.recording.nodes if _is_call(node) and node.path and node.path[-1] is module]
    if len(calls) != 1:
        return [EdgePlan(kind="attention", producer=name, reason=f"its forward calls attention {len(calls)} times")]
    return [*_projections(finder, name, config, calls[0]), _output(finder, name, config, calls[0])]


def _is_call(node: Node) -> bool:
    return node.kind == "function" and node.name == "scaled_dot_product_attention"


def _multihead(finder: EdgeFinder, name: str, config: AttentionConfig, module: nn.MultiheadAttention) -> EdgePlan:
    linear, calls = config.projections, finder.recording.calls(name)
    edge = {"kind": "attention", "producer": name, "consumers": (f"{name}.out_proj",)}
    if linear is None or not linear.fprop[0] or not linear.wgrad[1] or linear.stochastic:
        return EdgePlan(**edge, reason="its projections are not MXFP8 in fprop and wgrad")
    if not module.batch_first:
        return EdgePlan(**edge, reason="batch_first=False interleaves the samples")
    reason = _unfit(config) or next((_masked(call) for call in calls if _masked(call)), "")
    return EdgePlan(**edge, fused=not reason, reason=reason)


def _unfit(config: AttentionConfig) -> str:
    return "" if config.takes_heads else "not every GEMM of its attention is MXFP8 with nearest rounding"


def _masked(call: Node) -> str:
    causal = any(value is True for key, value in call.options.items() if key in ("is_causal", "arg5"))
    return "a mask leaves blocks of it in high precision" if causal or len(call.inputs) > 3 else ""


def _projections(finder: EdgeFinder, name: str, config: AttentionConfig, call: Node) -> list[EdgePlan]:
    """One edge for each of query, key and value; they fuse together or not at all."""
    found = [_projection(finder, call, value) for value in call.inputs[:3]]
    reason = _unfit(config) or _masked(call)
    if call.options.get("enable_gqa"):
        reason = reason or "grouped heads"
    if not reason and None in found:
        reason = f"{_ROLES[found.index(None)]} does not come straight from an MXFP8 linear"
    edges = []
    for linear, (rowwise, colwise) in zip(found, config.input_specs):
        if linear is not None:
            producer, head_dim = linear
            facts: dict[str, Any] = {"rowwise": rowwise, "colwise": colwise, "head_dim": head_dim}
            edge = EdgePlan(
                kind="projection", producer=producer, consumers=(name,), fused=not reason, reason=reason, **facts
            )
            edges.append(edge)
    return edges


def _projection(finder: EdgeFinder, call: Node, value: int) -> tuple[str, int] | None:
    """`(linear, head_dim)` of the linear that `value` is the split output of, if it goes nowhere else."""
    turn = finder.maker(value)
    split = finder.maker(turn.inputs[0]) if turn is not None and turn.name in ("transpose", "permute") else None
    made = finder.maker(split.inputs[0]) if split is not None and split.name in _SPLITS else None
    if turn is None or split is None or made is None or made.kind != "module" or made.name not in finder.consumers:
        return None
    consumer = finder.consumers[made.name]
    if consumer.several or not consumer.config.fprop[0] or consumer.config.stochastic:
        return None
    if len(made.shapes[0]) != 3 or len(split.shapes[0]) != 4 or len(turn.shapes[0]) != 4:
        return None
    batch, length, heads, dim = split.shapes[0]
    if made.shapes[0] != (batch, length, heads * dim) or turn.shapes[0] != (batch, heads, length, dim):
        return None
    if any(len(finder.readers(node.outputs[0])) != 1 for node in (made, split, turn)) or finder.obstacle(made, call):
        return None
    return made.name, dim


def _output(finder: EdgeFinder, name: str, config: AttentionConfig, call: Node) -> EdgePlan:
    """The edge from attention to the linear that multiplies its merged output."""

    def refused(reason: str) -> EdgePlan:
        return EdgePlan(kind="attention", producer=name, reason=reason)

    reason = _masked(call)
    if reason:
        return refused(reason)
    value = call.outputs[0]
    for names in (("transpose", "permute"), _MERGES):
        readers = finder.readers(value)
        if len(readers) != 1 or readers[0].name not in names:
            return refused("its output is not merged straight into a linear")
        value = readers[0].outputs[0]
    readers = finder.readers(value)
    consumer = finder.consumers.get(readers[0].name) if len(readers) == 1 else None
    if consumer is None or consumer.several or readers[0].inputs != (value,) or not consumer.config.fprop[0]:
        return refused("its output is not merged straight into an MXFP8 linear")
    if not consumer.config.wgrad[1] or consumer.config.stochastic:
        return refused(f"{readers[0].name} needs its input in high precision, or rounds it stochastically")
    obstacle = finder.obstacle(call, readers[0])
    if obstacle:
        return refused(obstacle)
    rowwise, colwise = consumer.config.input_specs
    return EdgePlan(
        kind="attention", producer=name, consumers=(readers[0].name,), fused=True, rowwise=rowwise, colwise=colwise
    )
