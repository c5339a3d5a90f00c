"""Edges that end in a GEMM's epilogue: what follows a linear, and is known to, before its output is stored.

    up -> act -> down      act and the quantization for down after up's fprop; act's derivative after down's dgrad
    x + down(h)            the sum after down's fprop
    act(gate(h)) * up(h)   the product and the quantization for down after one GEMM of both

The first are found from the edges that `edges` found, so that every rule of theirs holds here too: every reader is
known, nothing in between needs the value itself. What is added: the linear before the activation has no other reader,
and down rounds its input to nearest. A sum follows the linear's call at once.

Not looked for: the halves of one packed linear, which is one GEMM already; and RoPE between a projection and attention,
since models round in the middle of it (x * cos + rotated * sin in BF16 rounds three times), where an epilogue rounds
once: fused would not have the bits of unfused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .autograd import activation_steps, is_emitted
from .backends import PLAIN
from .edges import PRODUCTS, EdgeFinder, EdgePlan
from .epilogue_table import Choice
from .fused.spec import QuantSpec
from .modules import ActivationConfig
from .mx_tensor import GATED
from .record import Node

_SUMS = ("add", "__add__", "__radd__")
_NAMES = {"gelu": "GELU", "gelu_tanh": "GELU by tanh", "silu": "SiLU", "relu": "ReLU", "relu2": "squared ReLU"}


@dataclass(frozen=True, kw_only=True)
class EpiloguePlan:
    """Steps in the epilogue of one GEMM of a linear.

    Attributes:
        linear: its FQN. gemm: `fprop` or `dgrad`.
        steps: text of the `Epilogue`; `""` for a dgrad, whose steps follow from who reads its result.
        edge: producer of the edge that this is part of; `""` for a residual, which is an edge of its own.
        consumers: FQNs of the layers that read what it emits.
        pair: `first` or `last` of two linears that run as one GEMM; `""` for one that does not.
        text: the steps in words.
        crossed: FQNs of the modules whose call the output leaves or enters on its way.
    """

    linear: str
    gemm: str
    steps: str = ""
    edge: str = ""
    consumers: tuple[str, ...] = ()
    pair: str = ""
    text: str
    crossed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text} in its {'' if self.gemm == 'fprop' else f'{self.gemm} '}epilogue"


def find_epilogues(
    finder: EdgeFinder, edges: Iterable[EdgePlan], activations: dict[str, ActivationConfig], choice: Choice
) -> tuple[EpiloguePlan, ...]:
    """The epilogues that `choice` allows on the fused among `edges`.

    Args:
        activations: config of each converted activation module, by FQN.
    """
    found: dict[tuple[str, str], EpiloguePlan] = {}
    for edge in edges:
        if edge.fused and edge.kind in ("activation", "gated", "function"):
            forward = _activation(finder, edge, activations, choice) or _pair(finder, edge, activations, choice)
            for plan in (*forward, *_dact(finder, edge, choice)):
                found.setdefault((plan.linear, plan.gemm), plan)
    if "residual" in choice.steps:
        producers = {edge.producer for edge in edges} | {linear for linear, gemm in found if gemm == "fprop"}
        for plan in _residuals(finder, producers):
            found[plan.linear, plan.gemm] = plan
    return tuple(replace(plan, crossed=finder.crossed(plan.linear, plan.consumers)) for plan in found.values())


def _residuals(finder: EdgeFinder, producers: set[str]) -> Iterator[EpiloguePlan]:
    """The sums of a linear's output and something of its shape."""
    for linear in finder.consumers:
        calls = finder.recording.calls(linear)
        if calls and linear not in producers and _is_free(finder, linear) and all(_is_added(finder, c) for c in calls):
            yield EpiloguePlan(linear=linear, gemm="fprop", steps=PLAIN, consumers=("a residual",), text="a residual")


def _is_added(finder: EdgeFinder, call: Node) -> bool:
    """Whether what follows a linear's call is an addition, of its output alone and of something made before it.

    Then deferring the call changes neither the order of random numbers nor, in backward, that in which gradients of one
    value are summed; the latter only where the linear does not read what is added, too.
    """
    nodes, overwritten = finder.recording.nodes, finder.recording.overwritten
    at = _index(finder, call)
    if len(call.outputs) != 1 or at + 1 == len(nodes) or finder.readers(call.outputs[0]) != [nodes[at + 1]]:
        return False
    reader = nodes[at + 1]
    if call.recomputed != reader.recomputed:  # the layer would leave its checkpoint, and keep what that drops
        return False
    if reader.kind != "function" or reader.name not in _SUMS or reader.options or len(set(reader.inputs)) != 2:
        return False
    size, dims = {math.prod(shape) for shape in (*reader.shapes, *call.shapes)}, {*reader.last_dims}
    if len(size) != 1 or len(dims) != 1 or set(call.inputs) & set(reader.inputs):
        return False
    return not overwritten.intersection((*call.inputs, *reader.inputs)) and not finder.obstacle(call, reader)


def _dact(finder: EdgeFinder, edge: EdgePlan, choice: Choice) -> list[EpiloguePlan]:
    """The derivative in the consumer's dgrad."""
    consumer = finder.consumers[edge.consumers[0]]
    if "dact" not in choice.steps or consumer.several or not consumer.config.dgrad[0]:
        return []
    text = "the activation's derivative and MXFP8 out"
    return [EpiloguePlan(linear=edge.consumers[0], gemm="dgrad", edge=edge.producer, text=text)]


def _activation(
    finder: EdgeFinder, edge: EdgePlan, activations: dict[str, ActivationConfig], choice: Choice
) -> list[EpiloguePlan]:
    """The activation and the quantization for the consumer, in fprop of each linear before it."""
    if "activation" not in choice.steps or edge.kind == "gated":
        return []
    rowwise, kind = _rowwise(finder, edge, choice), ""
    if not rowwise:
        return []
    linears = {edge.producer: ""}
    if edge.kind == "activation":
        config = activations[edge.producer]
        if config.in_place or config.packed:
            return []
        linears, kind = dict.fromkeys(_before(finder, edge.producer), edge.producer), config.kind
    plans = []
    for linear, through in linears.items():
        kinds = {_kind(finder, call, kind, through) for call in finder.recording.calls(linear)}
        if len(kinds) == 1 and "" not in kinds and _is_free(finder, linear):
            (whole,) = kinds
            consumers = tuple(filter(None, (through, *edge.consumers)))
            text = f"{_NAMES[whole]} and MXFP8 out"
            steps = activation_steps(whole, rowwise)
            plans.append(
                EpiloguePlan(
                    linear=linear, gemm="fprop", steps=steps, edge=edge.producer, consumers=consumers, text=text
                )
            )
    return plans


def _rowwise(finder: EdgeFinder, edge: EdgePlan, choice: Choice) -> str:
    """How the consumer quantizes its input, if an epilogue can; else `""`."""
    rowwise = finder.consumers[edge.consumers[0]].config.fprop[0]
    return "" if not is_emitted(rowwise) or (choice.rows_alone and QuantSpec.decode(rowwise).tile[0] > 1) else rowwise


def _pair(
    finder: EdgeFinder, edge: EdgePlan, activations: dict[str, ActivationConfig], choice: Choice
) -> list[EpiloguePlan]:
    """The product of a linear's activation with another's output, of the same input.

    Nothing else may happen between the first call and the product: then the order of gradients that are summed is that
    of two layers (`GatedPairFunction`).
    """
    rowwise = _rowwise(finder, edge, choice)
    calls = finder.recording.calls(edge.producer)
    if "gated" not in choice.steps or not rowwise or len(calls) != 1:
        return []
    if QuantSpec.decode(rowwise).tile[1] > choice.pair_along:
        return []
    made, kind = finder.maker(calls[0].inputs[0]) if edge.kind == "gated" else calls[0], ""
    act = calls[0] if edge.kind == "gated" else _only_reader(finder, calls[0])
    if edge.kind == "gated":
        config = activations[edge.producer]
        kind = "" if config.packed or config.in_place else config.kind
    elif act is not None:
        kind = _after("", act)
    product = None if act is None or made is None else _only_reader(finder, act)
    if made is None or act is None or product is None or kind not in GATED or product.name not in PRODUCTS:
        return []
    (other,) = set(product.inputs) - set(act.outputs) or {act.outputs[0]}
    second = finder.maker(other)
    if second is None or not _is_pair(finder, made, second, (act, product)):
        return []
    gate_last = _index(finder, made) > _index(finder, second)
    facts: dict[str, Any] = {"gemm": "fprop", "steps": activation_steps(GATED[kind], rowwise), "edge": edge.producer}
    readers = tuple(name for name in (edge.producer, *edge.consumers) if name != made.name)
    product_text = f"{_NAMES[kind]} times {second.name} and MXFP8 out"
    return [
        EpiloguePlan(
            **facts, linear=made.name, consumers=(second.name, *readers), pair="last" if gate_last else "first",
            text=product_text,
        ),
        EpiloguePlan(
            **facts, linear=second.name, consumers=(made.name, *readers), pair="first" if gate_last else "last",
            text=f"the product with {made.name} and MXFP8 out",
        ),
    ]  # fmt: skip


def _is_pair(finder: EdgeFinder, gate: Node, up: Node, between: tuple[Node, Node]) -> bool:
    """Whether two linears, and nothing but the activation and the product, follow one another and are alike."""
    act, product = between
    nodes = (gate, up, act, product)
    if any(node.kind != "module" or len(finder.recording.calls(node.name)) != 1 for node in (gate, up)):
        return False
    if not _is_free(finder, gate.name) or not _is_free(finder, up.name) or gate is up:
        return False
    if _only_reader(finder, gate) is not act or _only_reader(finder, up) is not product:
        return False
    at = sorted(_index(finder, node) for node in nodes)
    if len({node.recomputed for node in nodes}) != 1:
        return False
    if at[3] - at[0] != 3 or finder.recording.overwritten.intersection(gate.inputs):
        return False
    configs = {finder.consumers[node.name].config for node in (gate, up)}
    biases = {getattr(finder.modules[node.name], "bias", None) is None for node in (gate, up)}
    alike = gate.inputs == up.inputs and gate.shapes == up.shapes and len(configs) == len(biases) == 1
    if not alike or any(config.stochastic for config in configs):
        return False
    return not any(finder.obstacle(node, reader) for node, reader in ((gate, act), (gate, product), (up, product)))


def _index(finder: EdgeFinder, call: Node) -> int:
    return next(i for i, node in enumerate(finder.recording.nodes) if node is call)


def _only_reader(finder: EdgeFinder, call: Node) -> Node | None:
    """Who alone reads what a call gives, and nobody writes to."""
    if len(call.outputs) != 1 or call.outputs[0] in finder.recording.overwritten:
        return None
    readers = finder.readers(call.outputs[0])
    return readers[0] if len(readers) == 1 else None


def _before(finder: EdgeFinder, activation: str) -> list[str]:
    """The linears whose output a module takes."""
    makers = [finder.maker(call.inputs[0]) for call in finder.recording.calls(activation) if len(call.inputs) == 1]
    return list(dict.fromkeys(node.name for node in makers if node is not None and node.kind == "module"))


def _is_free(finder: EdgeFinder, linear: str) -> bool:
    """Whether a linear multiplies in MXFP8 and nobody gets its output through a hook."""
    consumer = finder.consumers.get(linear)
    return (
        consumer is not None
        and not consumer.several
        and bool(consumer.config.fprop[0])
        and not finder.modules[linear]._forward_hooks
    )


def _kind(finder: EdgeFinder, call: Node, kind: str, through: str) -> str:
    """What is applied to a linear's output on its way to the next, by a module of this kind and functions; "" for what
    no epilogue does.
    """
    value, made = call.outputs[0] if len(call.outputs) == 1 else None, call
    if through:
        readers = [] if value is None else finder.readers(value)
        if len(readers) != 1 or readers[0].name != through or value in finder.recording.overwritten:
            return ""
        if finder.obstacle(call, readers[0]):
            return ""
        made = readers[0]
        value = made.outputs[0] if len(made.outputs) == 1 else None
    while value is not None:
        (reader,) = finder.readers(value)
        if reader.kind == "module":
            return kind
        kind = _after(kind, reader)
        value = reader.outputs[0] if kind else None
    return ""


def _after(kind: str, reader: Node) -> str:
    """The activation that function `reader` makes of one; "" for none."""
    if kind:
        squares = reader.name == "square" or reader.name in ("pow", "__pow__")
        return "relu2" if kind == "relu" and squares else ""
    if reader.name in ("relu", "silu"):
        return reader.name
    if reader.name == "gelu":
        by_tanh = "tanh" in (reader.options.get("approximate"), reader.options.get("arg1"))
        return "gelu_tanh" if by_tanh else "gelu"
    return ""
