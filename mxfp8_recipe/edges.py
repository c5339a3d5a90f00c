"""Which norms and activations may hand their output on quantized, found in a recording.

An edge runs from a producer to the linears that read its output. It fuses when every reader is known, they
quantize alike, and nothing between them needs the value itself: no backward hooks, no change of grad mode
(a reentrant checkpoint), no casting wrapper. Otherwise it stays unfused and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .autograd import LinearConfig
from .record import Node, Recording

_ACTIVATIONS = {"relu", "gelu", "silu", "square", "pow", "__pow__"}
_SQUARES = {"square", "pow", "__pow__"}
PRODUCTS = {"mul", "__mul__", "__rmul__"}


@dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """One producer and who reads it.

    Attributes:
        kind: `norm` (emits qdata), `activation` (an activation module left pending), `gated` (the same, times
            another tensor), `function` (a linear whose output an activation function in a parent's forward reads),
            `projection` (a linear that emits heads for attention), `attention` (attention that emits the input of
            the projection after it).
        producer, consumers: FQNs.
        fused: whether the value travels quantized or pending. reason: why not.
        rowwise, colwise: encoded specs the producer emits. emit_high: it emits the value itself too.
        head_dim: features of a head, for a projection.
        crossed: FQNs of the modules whose call the value leaves or enters on its way.
    """

    kind: str
    producer: str
    consumers: tuple[str, ...] = ()
    fused: bool = False
    reason: str = ""
    rowwise: str = ""
    colwise: str = ""
    emit_high: bool = False
    head_dim: int = 0
    crossed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.fused:
            return f"unfused: {self.reason}"
        also = " and in high precision" if self.emit_high else ""
        return f"{'gated, ' if self.kind == 'gated' else ''}fused into {', '.join(self.consumers)}{also}"


@dataclass(frozen=True)
class Consumer:
    """What an edge needs to know of a layer that multiplies its input: a linear, or attention by its projections.

    Attributes:
        config: of the linear, or of the projections.
        trained: whether the weight that multiplies the input has a gradient.
        several: the layer may take the value as several of its inputs.
    """

    config: LinearConfig
    trained: bool
    several: bool = False


class EdgeFinder:
    """Finds the edges of one recording.

    Args:
        recording: of one forward.
        consumers: converted layers that multiply their input, by FQN. modules: every module by FQN.
        change_rounding: also fuse where fusing replaces functions of the user's own code, which then round once
            instead of twice. Only a recording made before the first step may do that.
    """

    def __init__(
        self,
        recording: Recording,
        consumers: Mapping[str, Consumer],
        modules: Mapping[str, nn.Module],
        change_rounding: bool,
    ) -> None:
        self.recording, self.consumers, self.modules = recording, consumers, modules
        self.change_rounding = change_rounding
        self._names = {module: name for name, module in modules.items()}
        self._by_value: dict[int, list[Node]] = {}
        self._makers = {value: node for node in recording.nodes for value in node.outputs}
        for node in recording.nodes:
            for value in dict.fromkeys(node.inputs):
                self._by_value.setdefault(value, []).append(node)

    def readers(self, value: int) -> list[Node]:
        """Every call that reads a value."""
        return self._by_value.get(value, [])

    def maker(self, value: int) -> Node | None:
        """The call that made a value."""
        return self._makers.get(value)

    def norm(self, name: str) -> EdgePlan:
        """The edge from a norm to the layers that multiply it."""
        plans = {self._norm_call(name, call) for call in self.recording.calls(name)}
        if not plans:
            return EdgePlan(kind="norm", producer=name, reason="the recorded forward does not reach it")
        if len(plans) > 1:
            return EdgePlan(kind="norm", producer=name, reason="its calls have different readers")
        return plans.pop()

    def activation(self, name: str) -> EdgePlan:
        """The edge from an activation module, perhaps through a product, to the linear that reads it."""
        plans = {self._pending_call("activation", name, call, call.outputs) for call in self.recording.calls(name)}
        if len(plans) == 1:
            return plans.pop()
        reason = "its calls have different readers" if plans else "the recorded forward does not reach it"
        return EdgePlan(kind="activation", producer=name, reason=reason)

    def function(self, name: str) -> EdgePlan | None:
        """The edge from a linear through activation functions to another linear; None if no activation reads it."""
        calls = self.recording.calls(name)
        plans = set()
        for call in calls:
            readers = self._by_value.get(call.outputs[0], []) if len(call.outputs) == 1 else []
            if len(readers) != 1 or readers[0].kind != "function" or readers[0].name not in _ACTIVATIONS | {"chunk"}:
                return None
            plans.add(self._pending_call("function", name, call, call.outputs))
        if len(plans) != 1:
            return None
        plan = plans.pop()
        return plan if plan.fused or self._reaches_activation(calls[0]) else None

    def _reaches_activation(self, call: Node) -> bool:
        reader = self._by_value[call.outputs[0]][0]
        return reader.name != "chunk"

    def _norm_call(self, name: str, call: Node) -> EdgePlan:
        def plan(**fields: Any) -> EdgePlan:
            return EdgePlan(kind="norm", producer=name, **fields)

        value = call.outputs[0]
        readers = self._by_value.get(value, [])
        returned = any(reader.kind == "output" for reader in readers)
        consumers = [reader for reader in readers if self._multiplies(reader, value)]
        others = [reader for reader in readers if reader not in consumers]
        if not consumers:
            return plan(reason=f"read by {_describe(others)}, not by an MXFP8 layer")
        if returned:
            return plan(reason="the model returns it too, as a tensor")
        if value in self.recording.overwritten:
            return plan(reason="its output is overwritten in place")
        obstacle = next(filter(None, (self.obstacle(call, reader) for reader in readers)), "")
        if obstacle:
            return plan(reason=obstacle)
        names = tuple(dict.fromkeys(reader.name for reader in consumers))
        specs = {reader: self.consumers[reader].config.input_specs for reader in names}
        trained = [reader for reader in names if self.consumers[reader].trained]
        columns = {specs[reader][1] for reader in trained} - {""}
        if len({row for row, _ in specs.values()}) > 1 or len(columns) > 1:
            return plan(reason=f"{' and '.join(names)} quantize their input differently")
        rowwise, colwise = specs[names[0]][0], next(iter(columns), "")
        if "stochastic" in rowwise + colwise:
            return plan(reason=f"{' and '.join(names)} round their input stochastically, each by its own draw")
        emit_high = bool(others) or any(not self.consumers[reader].config.wgrad[1] for reader in trained)
        return plan(consumers=names, fused=True, rowwise=rowwise, colwise=colwise, emit_high=emit_high)

    def _pending_call(self, kind: str, name: str, call: Node, outputs: tuple[int, ...]) -> EdgePlan:
        def refused(reason: str) -> EdgePlan:
            return EdgePlan(kind=kind, producer=name, reason=reason)

        if len(outputs) != 1:
            return refused("it returns several tensors")
        value, gated, done = outputs[0], False, ""
        in_place = kind == "activation" and getattr(self.modules[name], "inplace", False)
        if kind == "activation" and not in_place and self.recording.overwritten.intersection(call.inputs):
            return refused("its input is overwritten in place")
        while True:
            if value in self.recording.overwritten:
                return refused("its output is overwritten in place")
            readers = self._by_value.get(value, [])
            if len(readers) != 1:
                return refused(f"read by {_describe(readers)}, not by one MXFP8 linear")
            reader = readers[0]
            obstacle = self.obstacle(call, reader)
            if obstacle:
                return refused(obstacle)
            if self._multiplies(reader, value, pending=True):
                return self._pending_plan(kind, name, reader.name, gated)
            step = self._next(reader, value)
            done, before = reader.name, done
            if kind == "function" and not _follows(before, reader):
                step = None
            if step is None:
                return refused(f"read by {_describe([reader])}, not by an MXFP8 linear")
            value, gated = step, gated or reader.name in PRODUCTS or reader.name == "chunk"

    def _pending_plan(self, kind: str, name: str, consumer: str, gated: bool) -> EdgePlan:
        kind = "gated" if gated and kind == "activation" else kind
        if kind != "activation" and not self.change_rounding:
            reason = "pointwise code in a forward fuses only when example_inputs are given"
            return EdgePlan(kind=kind, producer=name, consumers=(consumer,), reason=reason)
        return EdgePlan(kind=kind, producer=name, consumers=(consumer,), fused=True)

    def _next(self, reader: Node, value: int) -> int | None:
        """The value that stands for `value` after `reader`, if that can be left pending."""
        if reader.kind != "function":
            return None
        if reader.name in PRODUCTS and len(reader.outputs) == 1:
            alone = len(reader.inputs) != 2 or len(set(reader.last_dims)) != 1
            return None if alone or self.recording.overwritten.intersection(reader.inputs) else reader.outputs[0]
        if reader.name in _ACTIVATIONS and len(reader.outputs) == 1:
            return reader.outputs[0] if not reader.options.get("inplace") else None
        if reader.name == "chunk" and len(reader.outputs) == 2:
            halves = [self._by_value.get(half, []) for half in reader.outputs]
            for half, readers in zip(reader.outputs, halves):
                if len(readers) == 1 and readers[0].name in _ACTIVATIONS:
                    return half
        return None

    def _multiplies(self, reader: Node, value: int, pending: bool = False) -> bool:
        """Whether `reader` is a converted layer that quantizes `value` for fprop."""
        consumer = self.consumers.get(reader.name) if reader.kind == "module" else None
        if consumer is None or not consumer.config.fprop[0]:
            return False
        return reader.inputs == (value,) or (consumer.several and not pending)

    def crossed(self, producer: str, consumers: tuple[str, ...]) -> tuple[str, ...]:
        """FQNs of the modules whose call a value leaves or enters on its way, by a plan's producer and consumers; what
        is no module's name stands for the call that follows.
        """
        nodes, found = self.recording.nodes, {}
        for at, node in enumerate(nodes):
            if node.kind != "module" or node.name != producer:
                continue
            later = nodes[at + 1 :]
            for name in consumers:
                known = (n for n in later if n.kind == "module" and n.name == name)
                reader = next(known, None) if name in self.modules else next(iter(later), None)
                found |= dict.fromkeys(() if reader is None else _crossed(node, reader))
        return tuple(self._names[module] for module in found if module in self._names)

    def obstacle(self, producer: Node, reader: Node) -> str:
        """Why a value may not travel quantized between two calls, or nothing."""
        apart = not producer.grad_enabled and not producer.without_grad & reader.without_grad
        if producer.grad_enabled != reader.grad_enabled or apart:
            return "grad mode changes on the way (a reentrant checkpoint or no_grad region)"
        crossed = _crossed(producer, reader)
        ends = [self.modules[node.name] for node in (producer, reader) if node.kind == "module"]
        for module in (*crossed, *ends):
            where = self._names.get(module) or type(module).__name__
            if module._backward_hooks or module._backward_pre_hooks:
                return f"{where} has backward hooks, which need the value itself"
            if _casts_inputs(module):
                return f"{where} is wrapped by FSDP with input casting"
        return ""


def _crossed(producer: Node, reader: Node) -> list[nn.Module]:
    """The modules that one of two calls runs in and the other does not."""
    shared = 0
    while shared < min(len(producer.path), len(reader.path)) and producer.path[shared] is reader.path[shared]:
        shared += 1
    return [*producer.path[shared:], *reader.path[shared:]]


def _follows(before: str, reader: Node) -> bool:
    """Whether a fused kernel exists for function `reader` of what function `before` gave (of a linear's output: "")."""
    if reader.name in _SQUARES:
        return before == "relu" and reader.options.get("arg1", reader.options.get("exponent", 2)) == 2
    if reader.name in PRODUCTS:
        return before in _ACTIVATIONS - _SQUARES
    return before in ("", "chunk")


def _casts_inputs(module: nn.Module) -> bool:
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return False
    policy = getattr(state(), "_mp_policy", None)
    return policy is not None and policy.cast_forward_inputs and policy.param_dtype is not None


def _describe(readers: list[Node]) -> str:
    names = list(dict.fromkeys(_label(node) for node in readers))
    return ", ".join(names[:4]) or "nothing the recording saw"


def _label(node: Node) -> str:
    if node.kind == "function" and node.name == "dropout":
        return f"dropout (p={node.options.get('p', node.options.get('arg1', '?'))}, training)"
    return node.name
