"""Finding the plan: which layers convert and to what, by the recipe, its rules and the user's overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import backends
from .attention_edges import attention_edges
from .autograd import AttentionConfig, LinearConfig
from .config import BF16, LinearPrecision, Override, Recipe
from .costs import DEFAULT_TOKENS, Cost, linear_cost
from .edges import Consumer, EdgeFinder, EdgePlan
from .epilogue_edges import EpiloguePlan, find_epilogues
from .epilogue_table import STEPS, Choice, epilogue_choice
from .fused.attention.spec import GEMMS
from .fused.spec import BLOCK
from .modules import JaggedAttention, MXFP8JaggedAttention, SDPAOwner, is_swapped
from .modules.jagged_core import SOFTMAX
from .plan import LayerPlan, Plan
from .recipe_files import load_overrides, load_recipe
from .recognize import Candidate, recognize
from .record import Node, Recorder, Recording
from .rules import Match, Rules, apply_override, base_precision, check_all_matched, is_bf16
from .te_interop import inside_te

SDPA = "scaled_dot_product_attention"
_MIXES = "its tiles span several tokens, which its mask hides from each other"


def plan_recipe(
    model: nn.Module,
    recipe: str | Path | Recipe = "mxfp8",
    *,
    overrides: Mapping[str, Override] | str | Path | None = None,
    example_inputs: Any = None,
) -> Plan:
    """The plan `apply_recipe` would carry out; the model is not touched.

    Args:
        model: any module, on any device, meta included.
        recipe: a shipped recipe's name, a YAML file, or a `Recipe`.
        overrides: pattern to override (see `rules`), or a YAML file of them.
        example_inputs: positional arguments of one forward (a tuple), a mapping of keyword arguments,
            or a single argument. The forward runs once, in the model's current mode, and is recorded.

    Raises:
        ValueError: unknown recipe, bad override, an override that matches no layer or asks the impossible,
            a model that already has a recipe, or example_inputs its forward does not take.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module (a builder has to be called)")
    chosen = load_recipe(recipe)
    user = Rules(load_overrides(overrides), "overrides")
    names = _names(model)
    _refuse_second(names)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = _candidates(names)
    planner = _LayerPlanner(chosen, user, backends.select(device))
    layers = [planner.plan(names[module], module, candidate) for module, candidate in found]
    layers = _keep_last(layers, chosen, user)
    containers = [name for module in names if module._modules for name in names[module]]
    choice = backends.choose(device)
    plan = Plan(
        recipe=chosen,
        layers=tuple(layers),
        device=device.type,
        backend=planner.backend,
        why=str(choice),
        emulates=choice.emulates,
        overrides=user.overrides,
    )
    if example_inputs is not None and device.type == "meta":
        plan = replace(plan, notes=("example_inputs cannot run on the meta device: no edge is fused.",))
    elif example_inputs is not None and chosen.converts_something:
        plan = with_recording(plan, model, record_forward(model, plan, example_inputs), "example_inputs", user)
    awaited = () if plan.recorded else user.may_name_calls(_possible_callers(names))
    check_all_matched(user, [layer.fqn for layer in plan.layers], containers, set(awaited))
    return replace(plan, awaited=awaited)


def with_recording(plan: Plan, model: nn.Module, recording: Recording, source: str, user: Rules | None = None) -> Plan:
    """`plan` with the attention calls, the edges and the token counts that a recorded forward shows."""
    modules = dict(model.named_modules(remove_duplicate=False))
    user = user or Rules(plan.overrides, "overrides")
    calls = _attention_calls(plan, model, recording, user)
    known = plan.layers
    if source == "example_inputs":  # later, a layer that mixes under a mask has raised by itself
        known = tuple(_without_mixing(layer, modules[layer.fqn], recording) for layer in known)
    plan = replace(plan, layers=(*known, *calls))
    if source == "first forward" and plan.awaited:
        known = set(plan.overrides) - set(plan.awaited)
        check_all_matched(user, [layer.fqn for layer in plan.layers], [], known)
    consumers = {
        layer.fqn: consumer
        for layer in plan.converted
        if (consumer := _consumer(layer, modules[layer.fqn])) is not None
    }
    finder = EdgeFinder(recording, consumers, modules, change_rounding=source == "example_inputs")
    edges = [edge for layer in plan.converted if (edge := _edge(finder, layer)) is not None]
    for layer in plan.converted:
        if layer.kind == "attention":
            edges += attention_edges(finder, layer.fqn, AttentionConfig.of(layer.precision), modules[layer.fqn])
    edges = [replace(edge, crossed=finder.crossed(edge.producer, edge.consumers)) for edge in edges]
    layers = tuple(_with_tokens(layer, recording.tokens.get(layer.fqn, 0), plan.backend) for layer in plan.layers)
    epilogues, notes = _epilogues(plan, finder, edges, source)
    return replace(
        plan, layers=layers, edges=tuple(edges), epilogues=epilogues, recorded=source, notes=(*plan.notes, *notes)
    )


def _epilogues(
    plan: Plan, finder: EdgeFinder, edges: list[EdgePlan], source: str
) -> tuple[tuple[EpiloguePlan, ...], tuple[str, ...]]:
    """The steps that GEMMs take into their epilogue, and why none do where some could."""
    choice = epilogue_choice(plan.backend)
    activations = {layer.fqn: layer.module_config for layer in plan.converted if layer.kind == "activation"}
    everything = Choice(steps=frozenset(STEPS), why="")
    possible = find_epilogues(finder, edges, activations, everything)
    if choice.steps and (choice.is_gemm or source == "example_inputs"):
        found = find_epilogues(finder, edges, activations, choice)
        rest = len(possible) - len(found)
        note = f"Backend {plan.backend} leaves the steps after {rest} GEMMs to other kernels: {choice.missing}."
        return found, (note,) if rest else ()
    why = f"{choice.why}; {len(possible)} GEMMs could have steps in theirs"
    if choice.steps:
        why = "they change the order of sums, so they are planned only from example_inputs, before the first step"
    return (), (f"Backend {plan.backend} plans no epilogue: {why}.",) if possible else ()


def _is_masked(call: Node) -> bool:
    """Whether a recorded attention call has a mask: a fourth tensor, or a causal flag."""
    return len(call.inputs) > 3 or any(value is True for key, value in call.options.items() if key != "enable_gqa")


def _mixes_rows(precision: Any, module: JaggedAttention) -> bool:
    """Whether a tile spans tokens; what stands in softmax's place has an amax, which its tile takes."""
    return precision.spec.mixes_rows or (module.activation != SOFTMAX and precision.spec.mixes_weights)


def _consumer(layer: LayerPlan, module: nn.Module) -> Consumer | None:
    if layer.kind == "linear":
        weight = getattr(module, "weight", None)
        return Consumer(LinearConfig.of(layer.precision), weight is not None and weight.requires_grad)
    if layer.kind != "attention" or not isinstance(layer.precision.projections, LinearPrecision):
        return None
    if layer.implementation is SDPAOwner:
        return None
    weights = [p for name, p in module.named_parameters() if "proj_weight" in name]
    trained = any(p.requires_grad for p in weights)
    return Consumer(LinearConfig.of(layer.precision.projections), trained, several=True)


def _attention_calls(plan: Plan, model: nn.Module, recording: Recording, user: Rules) -> list[LayerPlan]:
    """A row for each module whose own forward calls `F.scaled_dot_product_attention`."""
    names = _names(model)
    owners: dict[nn.Module, list[Node]] = {}
    for node in recording.nodes:
        if node.kind == "function" and node.name == SDPA and node.path:
            owners.setdefault(node.path[-1], []).append(node)
    planner = _LayerPlanner(plan.recipe, user, plan.backend)
    return [planner.plan_call(names[owner], owner, calls) for owner, calls in owners.items()]


def call_precision(recipe: Recipe, user: Rules, names: list[str]) -> tuple[Any, str]:
    """Precision of attention called in a module's own forward, by the recipe and the user's overrides, and why."""
    precision: Any = recipe.attention
    reason = f"recipe {recipe.name} leaves attention layers in BF16"
    for rules in (Rules(recipe.rules, f"recipe {recipe.name}"), user):
        match = rules.match(names, "attention")
        if match is not None:
            where = f"{rules.origin}: {match.pattern!r}"
            if match.exact and isinstance(match.override, Mapping) and "projections" in match.override:
                raise ValueError(
                    f"{where}: got projections, expected only GEMMs of attention; its projections are linears of their "
                    "own: override those by name"
                )
            precision = apply_override(precision, match.override, "attention", where)
            reason = f"{where} says bf16"
    if precision != BF16:
        precision = precision.model_copy(update={"projections": BF16})
    return (BF16, reason) if is_bf16(precision) else (precision, "")


def pieces(model: nn.Module, plan: Plan) -> set[nn.Module]:
    """The modules a recording treats as one piece: every candidate layer."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {modules[layer.fqn] for layer in plan.layers}


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module with its first name."""
    return {module: names[0] for module, names in _names(model).items()}


def record_forward(model: nn.Module, plan: Plan, example_inputs: Any) -> Recording:
    """Run one forward under a recorder and put back what it changed: buffers and random state."""
    args, kwargs = _arguments(example_inputs)
    buffers = {buffer: buffer.clone() for buffer in model.buffers() if buffer is not None}
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    recorder = Recorder()
    try:
        with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
            with recorder.watch(module_names(model), pieces(model, plan)) as recording:
                recorder.finish(model(*args, **kwargs))
    except Exception as error:
        raise ValueError(
            f"example_inputs: the forward of {type(model).__name__} failed on them: {type(error).__name__}: {error}; "
            "pass a tuple of positional arguments or a mapping of keyword arguments"
        ) from error
    finally:
        with torch.no_grad():
            for buffer, saved in buffers.items():
                buffer.copy_(saved)
    return recording


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping) and all(isinstance(key, str) for key in example_inputs):
        return (), dict(example_inputs)
    return (example_inputs,), {}


def _edge(finder: EdgeFinder, layer: LayerPlan) -> EdgePlan | None:
    if layer.kind == "norm":
        return finder.norm(layer.fqn)
    if layer.kind == "activation":
        return finder.activation(layer.fqn)
    return finder.function(layer.fqn) if layer.kind == "linear" else None


def _with_tokens(layer: LayerPlan, tokens: int, backend: str) -> LayerPlan:
    if layer.kind != "linear" or not tokens:
        return layer
    cost = linear_cost(tokens, layer.in_features, layer.out_features, layer.precision, backend)
    return replace(layer, tokens=tokens, cost=cost)


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module, in definition order, with all the names it goes by."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _possible_callers(names: dict[nn.Module, list[str]]) -> list[str]:
    """Names of modules whose forward is somebody's own, and so may call attention."""
    return [
        name for module, found in names.items() if not type(module).__module__.startswith("torch.") for name in found
    ]


def _refuse_second(names: dict[nn.Module, list[str]]) -> None:
    for module, found in names.items():
        if is_swapped(module):
            raise ValueError(
                f"{found[0] or type(module).__name__}: already MXFP8 ({type(module).__name__}); a recipe is applied "
                "once, call revert(model) first"
            )


def _candidates(names: dict[nn.Module, list[str]]) -> list[tuple[nn.Module, Candidate]]:
    parents = {child: module for module in names for child in module._modules.values() if child is not None}
    cache: dict[object, Any] = {}
    owned = inside_te(names)
    found = ((module, recognize(module, parents.get(module), cache)) for module in names if module not in owned)
    return [(module, candidate) for module, candidate in found if candidate is not None]


class _LayerPlanner:
    def __init__(self, recipe: Recipe, user: Rules, backend: str) -> None:
        self.recipe, self.user, self.backend = recipe, user, backend
        self.own = Rules(recipe.rules, f"recipe {recipe.name}")

    def plan(self, names: list[str], module: nn.Module, candidate: Candidate) -> LayerPlan:
        if candidate.implementation is MXFP8JaggedAttention:
            assert isinstance(module, JaggedAttention)
            return self.plan_jagged(names, module, candidate)
        precision, reason = base_precision(self.recipe, self.own, names, candidate.kind)
        match = self.user.match(names, candidate.kind)
        if match is not None:
            where = f"overrides: {match.pattern!r}"
            precision = apply_override(precision, match.override, candidate.kind, where)
            reason = f"{where} says bf16" if is_bf16(precision) else ""
        if candidate.implementation is None:
            reason = self._left_alone(names[0], candidate, precision, match)
            precision = BF16
        elif candidate.kind == "attention" and not is_bf16(precision) and not self._has_attention():
            precision, reason = _projections_only(precision), self._no_attention()
        elif not is_bf16(precision) and match is None:
            small = self._too_small(candidate)
            precision, reason = (BF16, small) if small else (precision, reason)
        return self._row(names, module, candidate, precision, reason)

    def plan_jagged(self, names: list[str], module: JaggedAttention, candidate: Candidate) -> LayerPlan:
        """The row of attention on a jagged batch, whose projections are layers of their own."""
        precision, reason = call_precision(self.recipe, self.user, names)
        if not reason and not backends.has("jagged_forward_mxfp8", self.backend):
            reason = f"backend {self.backend} has no MXFP8 kernel of jagged attention: it stays BF16"
        masked = module.causal or module.window is not None
        if not reason and masked and not precision.mix_masked and _mixes_rows(precision, module):
            reason = f"{_MIXES}; use 1x32 tiles or mix_masked"
        return self._row(names, module, candidate, BF16 if reason else precision, reason)

    def plan_call(self, names: list[str], module: nn.Module, calls: list[Node]) -> LayerPlan:
        """The row of a module that calls attention itself."""
        precision, reason = call_precision(self.recipe, self.user, names)
        if not reason and not self._has_attention():
            reason = self._no_attention()
        dims = sorted({dim for call in calls for dim in call.last_dims[:3]})
        implementation = SDPAOwner
        if not reason and any(dim % BLOCK for dim in dims):
            reason = f"head dim {next(dim for dim in dims if dim % BLOCK)} is not a multiple of {BLOCK}"
        if not reason and precision.spec.mixes_rows and not precision.mix_masked and any(map(_is_masked, calls)):
            reason = f"{_MIXES}; use 1x32 tiles or mix_masked"
        if reason:
            precision, implementation = BF16, None
        candidate = Candidate("attention", implementation=implementation)
        row = self._row(names, module, candidate, precision, reason)
        return replace(row, found_by_recording=True, old_type=f"attention call in {type(module).__name__}")

    def _has_attention(self) -> bool:
        return backends.has("attention_forward", self.backend)

    def _no_attention(self) -> str:
        return f"backend {self.backend} has no attention kernel: its attention stays BF16"

    def _left_alone(self, name: str, candidate: Candidate, precision: Any, match: Match | None) -> str:
        if match is not None and match.exact and not is_bf16(precision):
            raise ValueError(f"overrides: {match.pattern!r} asks for MXFP8, but {candidate.reason}; say 'bf16' for it")
        hint = "" if match is not None else f" (say overrides={{{name!r}: 'bf16'}} to record the choice)"
        return f"{candidate.reason}; it stays BF16{hint if candidate.kind == 'linear' else ''}"

    def _too_small(self, candidate: Candidate) -> str:
        if self.backend == "reference" or candidate.kind != "linear":
            return ""
        smallest = min(candidate.in_features, candidate.out_features)
        if smallest >= self.recipe.gpu_min_features:
            return ""
        return f"{smallest} features is below gpu_min_features={self.recipe.gpu_min_features}: too small to gain"

    def _row(self, names: list[str], module: nn.Module, candidate: Candidate, precision: Any, reason: str) -> LayerPlan:
        implementation = None if is_bf16(precision) else candidate.implementation
        if implementation is None:
            precision = BF16
        cost = Cost(0.0, 0.0)
        if candidate.kind == "linear":
            shape = (DEFAULT_TOKENS, candidate.in_features, candidate.out_features)
            cost = linear_cost(*shape, precision, self.backend)
        return LayerPlan(
            fqn=names[0],
            aliases=tuple(names[1:]),
            kind=candidate.kind,
            in_features=candidate.in_features,
            out_features=candidate.out_features,
            old_type=type(module).__name__,
            new_type=implementation and f"MXFP8{type(module).__name__}",
            reason=reason,
            precision=precision,
            implementation=implementation,
            module_config=candidate.config,
            mixes_tokens=bool(getattr(precision, "mixes_tokens", False)),
            cost=cost,
        )


def _projections_only(precision: Any) -> Any:
    """Attention in BF16 between projections of the same precision."""
    return precision.model_copy(update=dict.fromkeys(GEMMS, BF16))


def _without_mixing(layer: LayerPlan, module: nn.Module, recording: Recording) -> LayerPlan:
    """A multi-head layer that was given a mask under tiles of several tokens: its attention stays in BF16."""
    if layer.new_type is None or not isinstance(module, nn.MultiheadAttention):
        return layer
    precision = layer.precision
    mixes = precision.spec.mixes_rows and not precision.mix_masked
    if not mixes or not any(map(_is_masked, recording.calls(layer.fqn))):
        return layer
    precision = _projections_only(precision)
    reason = "its tiles span tokens that its mask hides: its attention stays BF16; use 1x32 tiles or mix_masked"
    row = replace(layer, precision=precision, reason=reason, mixes_tokens=False)
    return row if not is_bf16(precision) else replace(row, precision=BF16, new_type=None, implementation=None)


def _keep_last(layers: list[LayerPlan], recipe: Recipe, user: Rules) -> list[LayerPlan]:
    """Leave the recipe's last share of convertible linears in BF16, except those the user spoke of."""
    convertible = [i for i, layer in enumerate(layers) if layer.new_type is not None and layer.kind == "linear"]
    count = math.ceil(recipe.bf16_last_fraction * len(convertible))
    for i in convertible[len(convertible) - count :]:
        layer = layers[i]
        if user.match((layer.fqn, *layer.aliases), layer.kind) is None:
            reason = f"recipe {recipe.name} keeps the last {recipe.bf16_last_fraction:.0%} of layers in BF16"
            cost = Cost(layer.cost.bf16, layer.cost.bf16)
            layers[i] = replace(
                layer, new_type=None, implementation=None, precision=BF16, reason=reason, mixes_tokens=False, cost=cost
            )
    return layers
