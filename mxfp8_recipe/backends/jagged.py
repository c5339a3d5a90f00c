"""Ops of attention on jagged batches: softmax, generalized and block attention, forward and backward.

Arguments are those of `fused.attention.jagged_reference`, a bias as the list `JaggedBias.tensors`. `spec` is an encoded
`AttentionSpec`: `""` runs every GEMM in the compute dtype, on the kernels of `jagged_forward` and its like; any other
runs `<op>_mxfp8`, whose operands are `quantized`, qdata and scale each, in the order of `FORWARD_OPERANDS` or
`BACKWARD_OPERANDS`. The forward ops look at the offsets (`offsets`); shapes are looked at before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..fused.attention.bias import JaggedBias
from ..fused.attention.spec import AttentionSpec
from ..fused.spec import BLOCK
from . import jagged_flops as flops
from . import jagged_limits as limits
from .attention import BACKWARD_OPERANDS
from .library import decode, define
from .offsets import WATCH, Claim
from .table import has, resolve, select

FORWARD_OPERANDS = ("query", "key", "value_t")
"""Quantized operands of the forward ops in the order they cross them; for the backward ops `BACKWARD_OPERANDS`."""

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, Tensor?[] bias,"
    " Tensor? schedule, Tensor[] quantized, Tensor? seed, str spec"
)
_MASK = "bool causal, int? window, str backend"
_GENERALIZED = "str activation, float pre_scale, float post_scale, bool broadcast_q"
_BLOCK = (
    "Tensor q, Tensor k, Tensor v, Tensor offsets, SymInt max_length, Tensor[] quantized, Tensor? seed, str spec,"
    " float scale, int block, bool causal, str backend"
)


def _resolved(
    op: str, backend: str, q: Tensor, v: Tensor, spec: str, quantized: list[Tensor], seed: Tensor | None, block: int = 0
) -> Any:
    """The callable of an op, with what it needs to multiply in MXFP8 bound where `spec` asks for it."""
    if not spec:
        name = select(q.device) if backend == "auto" else backend
        if name != "reference" and (reason := limits.problem(op, q, v, block)):
            limits.say(op, reason)
            name = "reference"
        return resolve(op, name, q.device)
    names = FORWARD_OPERANDS if op.endswith("forward") else BACKWARD_OPERANDS
    operands = {name: (quantized[2 * i], quantized[2 * i + 1]) for i, name in enumerate(names)}
    run = resolve(f"{op}_mxfp8", backend, q.device)
    return partial(run, spec=AttentionSpec.decode(spec), operands=operands, seed=seed)


def _bias(tensors: list[Tensor | None]) -> JaggedBias | None:
    if tensors[0] is None and tensors[1] is None:
        return None
    position, time, q_times, k_times, time_bounds = tensors
    return JaggedBias(position=position, time=time, q_times=q_times, k_times=k_times, time_bounds=time_bounds)


def _look(
    op: str,
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    schedule: Tensor | None,
) -> None:
    """Raise for what the tensors beside q, k and v hold, or are too short to hold; see `offsets`."""
    if q_offsets is not None:
        WATCH.check(q_offsets, Claim(op, "q_offsets", len(q), max_q))
    if q_offsets is not k_offsets or len(q) != len(k) or max_q != max_k:
        WATCH.check(k_offsets, Claim(op, "k_offsets", len(k), max_k))
    bounds = bias[4]
    if bounds is not None and bounds.device.type == "cpu" and bool((bounds.diff() < 0).any()):
        raise ValueError(f"{op}: bias.time_bounds: got bounds that decrease, expected them ascending: sort them")
    if schedule is None or schedule.numel() == 0:
        return
    expected = _schedule_shape(q_offsets, k_offsets, len(q), len(k), len(q))
    if schedule.shape != expected:  # kernels would read past the end of a shorter one
        raise ValueError(
            f"{op}: schedule: got {tuple(schedule.shape)}, expected {expected}: it is that of another batch; make one "
            "for each with jagged_schedule(...)"
        )


def _quantize(
    x: Tensor,
    offsets: Tensor,
    max_length: int,
    rowwise: str,
    colwise: str,
    seed: Tensor | None,
    stream: int,
    block: int,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("quantize_jagged", backend, x.device)
    return run(x, offsets, max_length, decode(rowwise), decode(colwise), seed=seed, stream=stream, block=block)


def _quantize_fake(
    x: Tensor,
    offsets: Tensor,
    max_length: int,
    rowwise: str,
    colwise: str,
    seed: Tensor | None,
    stream: int,
    block: int,
    backend: str,
) -> tuple[Tensor, ...]:
    tokens, heads, dim = x.shape
    samples = (offsets.shape[0] - 1) * (-(-max_length // block) if block else 1)

    def orientation(wanted: str, *scales: Any) -> tuple[Tensor, Tensor]:
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8)
        return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)

    along_dim = orientation(rowwise, tokens, heads, -(-dim // BLOCK))
    return *along_dim, *orientation(colwise, tokens // BLOCK + samples, heads, dim)


quantize_jagged = define(
    "quantize_jagged(Tensor x, Tensor offsets, SymInt max_length, str rowwise, str colwise, Tensor? seed, int stream,"
    " int block, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)


def _schedule(
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    total_q: int,
    total_k: int,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
    backend: str,
) -> Tensor:
    name = select(k_offsets.device) if backend == "auto" else backend
    if not has("jagged_schedule", name):
        return k_offsets.new_empty(0, dtype=torch.int32)
    run = resolve("jagged_schedule", name, k_offsets.device)
    return run(q_offsets, k_offsets, total_q, total_k, max_q, max_k, causal=causal, window=window)


def _schedule_fake(
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    total_q: int,
    total_k: int,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
    backend: str,
) -> Tensor:
    if not has("jagged_schedule", select(k_offsets.device) if backend == "auto" else backend):
        return k_offsets.new_empty(0, dtype=torch.int32)
    return k_offsets.new_empty(_schedule_shape(q_offsets, k_offsets, total_q, total_k, max_q), dtype=torch.int32)


def _schedule_shape(q_offsets: Tensor | None, k_offsets: Tensor, total_q: Any, total_k: Any, max_q: Any) -> Any:
    """Of what `schedule.build` makes, without a guard on which number is smaller."""
    from ..fused.attention import schedule

    samples = k_offsets.shape[0] - 1

    def most(total: Any) -> Any:
        return torch.sym_min(total, (total + samples * (schedule.TILE - 1)) // schedule.TILE)

    queries = most(total_q) if q_offsets is not None else samples * -(-max_q // schedule.TILE)
    return 1 + queries + most(total_k), schedule.ENTRY


jagged_schedule = define(
    "jagged_schedule(Tensor? q_offsets, Tensor k_offsets, SymInt total_q, SymInt total_k, SymInt max_q, SymInt max_k,"
    f" {_MASK}) -> Tensor",
    _schedule,
    _schedule_fake,
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    schedule: Tensor | None,
    quantized: list[Tensor],
    seed: Tensor | None,
    spec: str,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str,
) -> tuple[Tensor, ...]:
    _look("jagged_attention", q, k, q_offsets, k_offsets, max_q, max_k, bias, schedule)
    run = _resolved("jagged_forward", backend, q, v, spec, quantized, seed)
    layout = (q_offsets, k_offsets, max_q, max_k, _bias(bias), _given(schedule))
    with torch.no_grad():  # an exported graph calls the op on parameters
        return run(q, k, v, *layout, scale=scale, causal=causal, window=window)


def _given(schedule: Tensor | None) -> Tensor | None:
    return None if schedule is None or schedule.numel() == 0 else schedule


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


jagged_forward = define(
    f"jagged_forward({_TENSORS}, float scale, {_MASK}) -> (Tensor, Tensor)", _forward, _forward_fake
)


def _backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    schedule: Tensor | None,
    quantized: list[Tensor],
    seed: Tensor | None,
    spec: str,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    run = _resolved("jagged_backward", backend, q, v, spec, quantized, seed)
    layout = (q_offsets, k_offsets, max_q, max_k, _bias(bias), _given(schedule))
    return run(
        grad_out, q, k, v, out, lse, *layout, scale=scale, causal=causal, window=window, wanted=wanted
    )  # fmt: skip


def _gradients_fake(q: Tensor, k: Tensor, v: Tensor, bias: list[Tensor | None], wanted: str) -> tuple[Tensor, ...]:
    inputs = (("q", q), ("k", k), ("v", v))
    grads = [x.new_empty(x.shape) if name in wanted else q.new_empty(0) for name, x in inputs]
    for table in bias[:2]:
        shape = table.shape if table is not None and "b" in wanted else (0,)
        grads.append(q.new_empty(shape, dtype=torch.float32))
    return tuple(grads)


def _backward_fake(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    *args: Any,
) -> tuple[Tensor, ...]:
    return _gradients_fake(q, k, v, bias, args[-1])


jagged_backward = define(
    f"jagged_backward(Tensor grad_out, Tensor out, Tensor lse, {_TENSORS}, float scale, {_MASK}, str wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _generalized_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    schedule: Tensor | None,
    quantized: list[Tensor],
    seed: Tensor | None,
    spec: str,
    activation: str,
    pre_scale: float,
    post_scale: float,
    broadcast_q: bool,
    causal: bool,
    window: int | None,
    backend: str,
) -> Tensor:
    _look("generalized_attention", q, k, q_offsets, k_offsets, max_q, max_k, bias, schedule)
    run = _resolved("generalized_forward", backend, q, v, spec, quantized, seed)
    with torch.no_grad():
        return run(
            q, k, v, q_offsets, k_offsets, max_q, max_k, _bias(bias), _given(schedule), activation=activation,
            pre_scale=pre_scale, post_scale=post_scale, causal=causal, window=window, broadcast_q=broadcast_q,
        )  # fmt: skip


def _generalized_forward_fake(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *args: Any
) -> Tensor:
    broadcast_q: bool = args[-4]
    rows = q.shape[0] * (k_offsets.shape[0] - 1) if broadcast_q else q.shape[0]
    return q.new_empty(rows, q.shape[1], v.shape[2])


generalized_forward = define(
    f"generalized_forward({_TENSORS}, {_GENERALIZED}, {_MASK}) -> Tensor",
    _generalized_forward,
    _generalized_forward_fake,
)


def _generalized_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    schedule: Tensor | None,
    quantized: list[Tensor],
    seed: Tensor | None,
    spec: str,
    activation: str,
    pre_scale: float,
    post_scale: float,
    broadcast_q: bool,
    causal: bool,
    window: int | None,
    backend: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    run = _resolved("generalized_backward", backend, q, v, spec, quantized, seed)
    return run(
        grad_out, q, k, v, q_offsets, k_offsets, max_q, max_k, _bias(bias), _given(schedule), activation=activation,
        pre_scale=pre_scale, post_scale=post_scale, causal=causal, window=window, broadcast_q=broadcast_q,
        wanted=wanted,
    )  # fmt: skip


def _generalized_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    bias: list[Tensor | None],
    *args: Any,
) -> tuple[Tensor, ...]:
    return _gradients_fake(q, k, v, bias, args[-1])


generalized_backward = define(
    f"generalized_backward(Tensor grad_out, {_TENSORS}, {_GENERALIZED}, {_MASK}, str wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _generalized_backward,
    _generalized_backward_fake,
)


def _block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    quantized: list[Tensor],
    seed: Tensor | None,
    spec: str,
    scale: float,
    block: int,
    causal: bool,
    backend: str,
) -> Tensor:
    WATCH.check(offsets, Claim("block_attention", "offsets", len(q), max_length))
    run = _resolved("block_forward", backend, q, v, spec, quantized, seed, block)
    with torch.no_grad():
        return run(q, k, v, offsets, max_length, scale=scale, block=block, causal=causal)


def _block_forward_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


block_forward = define(f"block_forward({_BLOCK}) -> Tensor", _block_forward, _block_forward_fake)


def _block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    quantized: list[Tensor],
    seed: Tensor | None,
    spec: str,
    scale: float,
    block: int,
    causal: bool,
    backend: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    run = _resolved("block_backward", backend, q, v, spec, quantized, seed, block)
    return run(grad_out, q, k, v, offsets, max_length, scale=scale, block=block, causal=causal, wanted=wanted)


def _block_backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(q, k, v, [None, None], args[-1])[:3]


block_backward = define(
    f"block_backward(Tensor grad_out, {_BLOCK}, str wanted) -> (Tensor, Tensor, Tensor)",
    _block_backward,
    _block_backward_fake,
)


_OPS = torch.ops.mxfp8_recipe
register_flop_formula([_OPS.jagged_forward, _OPS.generalized_forward], get_raw=True)(flops.forward)
register_flop_formula(_OPS.jagged_backward, get_raw=True)(flops.jagged_backward)
register_flop_formula(_OPS.generalized_backward, get_raw=True)(flops.generalized_backward)
register_flop_formula(_OPS.block_forward, get_raw=True)(flops.block_forward)
register_flop_formula(_OPS.block_backward, get_raw=True)(flops.block_backward)
