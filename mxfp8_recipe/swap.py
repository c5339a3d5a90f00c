"""Carries a plan out on a model, and takes it back.

The root remembers its plan in a plain attribute. `state_dict` keys stay the model's own; the plan's
fingerprint travels in the state dict's `_metadata`, which `torch.save` keeps and a plain model ignores. A copy that has
lost it is loaded with a warning.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .autograd import AttentionConfig, LinearConfig
from .config import BF16
from .costs import Cost
from .epilogue_edges import EpiloguePlan
from .modules import NormModuleConfig, disable_fast_paths, is_slow_encoder, is_swapped, restore, swap_class
from .mx_edge import Edge
from .mx_tensor import Traveling
from .plan import LayerPlan, Plan

PLAN = "_mxfp8_plan"
_METADATA = "mxfp8_recipe"
_EDGE = "mxfp8_edge"
_CALLER = 6
"""Frames from a root's load_state_dict hook up to who called `load_state_dict`."""


def carry_out(model: nn.Module, plan: Plan, strict: bool) -> None:
    """Swap every planned layer of `model` in place, and connect its fused edges."""
    shared: dict[Any, Any] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer in plan.converted:
        assert layer.implementation is not None
        config = layer_config(layer, plan)
        swap_class(modules[layer.fqn], layer.implementation, shared.setdefault(config, config), layer.fqn)
    disable_fast_paths(model)
    model.__dict__[PLAN] = plan
    model.register_state_dict_post_hook(_record_fingerprint)
    model.register_load_state_dict_pre_hook(_check_fingerprint)
    connect(model, plan, strict)


def connect(model: nn.Module, plan: Plan, strict: bool) -> None:
    """Make the plan's fused edges carry: each producer gets its edge, a norm also what to emit on it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer in plan.converted:
        if layer.found_by_recording and not is_swapped(modules[layer.fqn]):
            assert layer.implementation is not None
            swap_class(modules[layer.fqn], layer.implementation, layer_config(layer, plan), layer.fqn)
    for edge in plan.edges:
        if not edge.fused:
            continue
        module = modules[edge.producer]
        if isinstance(module, nn.MultiheadAttention):
            continue  # its edges are inside it
        emit = (edge.rowwise, edge.colwise) if edge.kind in ("projection", "attention") else None
        carrying = Edge(edge.producer, edge.consumers, plan.recipe.fuse, strict, emit=emit, head_dim=edge.head_dim)
        _watch(carrying, edge.crossed, modules)
        module.__dict__[_EDGE] = carrying
        config: Any = module.mxfp8_config
        if isinstance(config, NormModuleConfig):
            norm = replace(config.norm, rowwise=edge.rowwise, colwise=edge.colwise, emit_high=edge.emit_high)
            module.__dict__["mxfp8_config"] = replace(config, norm=norm)
    for epilogue in plan.epilogues:
        _add_epilogue(epilogue, modules, plan.recipe.fuse, strict)
    model.__dict__[PLAN] = plan
    drop_hook(model._forward_hooks, _settle)
    if plan.epilogues or any(edge.fused for edge in plan.edges):
        model.register_forward_hook(_settle)


def _add_epilogue(epilogue: EpiloguePlan, modules: dict[str, nn.Module], fuse: bool, strict: bool) -> None:
    """Have a linear run the GEMM with the kernel that has epilogues, and name the steps where values travel so."""
    linear = modules[epilogue.linear]
    linear.__dict__["mxfp8_config"] = replace(linear.mxfp8_config, **{f"{epilogue.gemm}_steps": True})  # pyright: ignore[reportArgumentType, reportCallIssue]
    if epilogue.gemm == "dgrad":
        return
    if epilogue.edge == epilogue.linear:
        linear.__dict__[_EDGE].steps, linear.__dict__[_EDGE].pair = epilogue.steps, epilogue.pair
        return
    edge = Edge(epilogue.linear, epilogue.consumers, fuse, strict, steps=epilogue.steps, pair=epilogue.pair)
    if epilogue.edge:
        edge.reader = modules[epilogue.edge]
        edge.then = edge.reader.__dict__[_EDGE]
    edge.residual = edge.then is None
    _watch(edge, epilogue.crossed, modules)
    linear.__dict__[_EDGE] = edge


def _watch(edge: Edge, crossed: tuple[str, ...], modules: dict[str, nn.Module]) -> None:
    """Tell an edge of the modules whose backward hooks end it."""
    edge.readers = tuple(modules[name] for name in edge.consumers if name in modules)
    edge.containers = tuple(modules[name] for name in crossed)


def take_back(model: nn.Module) -> int:
    """Restore every swapped layer below `model`; the number restored.

    Raises:
        ValueError: when no recipe was applied to `model`.
    """
    swapped = [module for module in model.modules() if is_swapped(module)]
    owners = [module for module in model.modules() if PLAN in module.__dict__]
    if not swapped and not owners:
        raise ValueError(f"revert: {type(model).__name__} has no recipe applied; call apply_recipe first")
    slowed = [is_slow_encoder(module) for module in swapped]
    for module in swapped:
        restore(module)
        module.__dict__.pop(_EDGE, None)
    for owner in owners:
        del owner.__dict__[PLAN]
        drop_hook(owner._forward_hooks, _settle)
        drop_hook(owner._state_dict_hooks, _record_fingerprint)
        drop_hook(owner._load_state_dict_pre_hooks, _check_fingerprint)
    return sum(not slow for slow in slowed)


def demote(model: nn.Module, fqn: str, reason: str) -> None:
    """Take one layer of `model` back to BF16 while it trains; its plan, and so reports and checkpoints, say so.

    Every edge that the layer makes or reads ends with it.

    Args:
        model: the root that `apply_recipe` was given.

    Raises:
        ValueError: when `fqn` is no MXFP8 layer of it.
    """
    plan = applied_plan(model)
    layer = next((la for la in plan.converted if fqn in (la.fqn, *la.aliases)), None) if plan is not None else None
    if plan is None or layer is None:
        raise ValueError(
            f"{fqn or '(root)'}: got no MXFP8 layer of this name, expected one to take back to BF16; print(report) "
            "shows those there are"
        )
    module = model.get_submodule(fqn)
    for edge in live_edges(model):
        if layer.fqn in (edge.producer, *edge.consumers):
            edge.fused, edge.closed, edge.reason = False, True, reason
    restore(module)
    module.__dict__.pop(_EDGE, None)
    plain = replace(
        layer,
        new_type=None,
        implementation=None,
        precision=BF16,
        reason=reason,
        mixes_tokens=False,
        cost=Cost(layer.cost.bf16, layer.cost.bf16),
    )
    edges = tuple(
        replace(e, fused=False, reason=reason) if layer.fqn in (e.producer, *e.consumers) and e.fused else e
        for e in plan.edges
    )
    model.__dict__[PLAN] = replace(
        plan,
        layers=tuple(plain if la is layer else la for la in plan.layers),
        edges=edges,
        epilogues=tuple(e for e in plan.epilogues if layer.fqn not in (e.linear, e.edge or None, *e.consumers)),
        overrides={**plan.overrides, layer.fqn: BF16},
        demoted={**plan.demoted, layer.fqn: reason},
    )


def applied_plan(model: nn.Module) -> Plan | None:
    """The plan carried out on exactly this module, if any."""
    return model.__dict__.get(PLAN)


def live_edges(model: nn.Module) -> list[Edge]:
    """The edges of a model as they are now, un-fused ones included."""
    return [module.__dict__[_EDGE] for module in model.modules() if _EDGE in module.__dict__]


def drop_hook(hooks: dict[int, Any], function: Any) -> None:
    """Remove every entry of a module's hook table that is `function`."""
    for key in [k for k, hook in hooks.items() if getattr(hook, "hook", hook) is function]:
        del hooks[key]


def layer_config(layer: LayerPlan, plan: Plan) -> Any:
    """What the module of a layer runs with."""
    if layer.kind == "linear":
        return LinearConfig.of(layer.precision)
    if layer.kind == "attention":
        return AttentionConfig.of(layer.precision, layer.fqn, fuse=plan.recipe.fuse)
    return layer.module_config


def _settle(module: nn.Module, args: Any, output: Any) -> Any:
    """No value leaves the planned model on an edge: a path that no recording took may return one."""
    if not any(isinstance(leaf, Traveling) for leaf in tree_leaves(output)):
        return None
    return tree_map_only(Traveling, lambda value: value.high("the caller of the model"), output)


def _record_fingerprint(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    plan = applied_plan(module)
    if plan is not None:
        local_metadata[_METADATA] = plan.fingerprint


def _check_fingerprint(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *unused: Any
) -> None:
    plan, saved = applied_plan(module), local_metadata.get(_METADATA)
    if plan is not None and plan.converted and "version" not in local_metadata:  # which every state_dict() has
        warnings.warn(
            "load_state_dict: this state dict has lost its metadata, as copies such as dict(state_dict) and files of "
            "tensors alone do, so nothing tells which recipe it was trained with; pass what torch.load gave, or "
            f"compare by hand: this model has recipe {plan.recipe.name!r}",
            stacklevel=_CALLER,
        )
    if plan is not None and saved is not None and saved["digest"] != plan.fingerprint["digest"]:
        raise ValueError(
            "load_state_dict: the checkpoint was trained with another recipe or other overrides: "
            f"{_difference(saved, plan.fingerprint)}. Apply the checkpoint's, or, to change them on purpose: "
            "revert(model), load, apply_recipe again"
        )
    if plan is not None and saved is not None:
        _check_demoted(plan, saved.get("demoted", {}))


def _check_demoted(plan: Plan, demoted: dict[str, str]) -> None:
    """Attention calls are no part of the digest, since they show in the first forward only."""
    converted = {layer.fqn for layer in plan.converted}
    known = {layer.fqn for layer in plan.layers} | {fqn for fqn, rule in plan.overrides.items() if rule == BF16}
    missing = {fqn: BF16 for fqn in demoted if fqn in converted or fqn not in known}
    if missing:
        raise ValueError(
            f"load_state_dict: the checkpoint runs {', '.join(missing)} in BF16 since an alarm of its training; "
            f"apply the recipe with overrides={missing}"
        )


def _difference(saved: dict[str, Any], current: dict[str, Any]) -> str:
    changes = []
    if saved["recipe"] != current["recipe"]:
        changes.append(f"recipe: checkpoint {saved['recipe']}, model {current['recipe']}")
    for fqn in sorted(saved["layers"].keys() | current["layers"].keys()):
        before, now = saved["layers"].get(fqn, "bf16"), current["layers"].get(fqn, "bf16")
        if before != now:
            changes.append(f"{fqn or '(root)'}: checkpoint [{before}], model [{now}]")
    shown = changes[:8]
    return "; ".join(shown) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
