"""Finding edges and attention calls from the first eager training forward, without `example_inputs`.

Two hooks on the root surround each forward with a recorder until one ran in grad mode (without it activation
checkpointing, which decides what may fuse, does not show); then they remove themselves, and the edges fuse
from the next forward on, with the same bits; after one with activation checkpointing not before its backward
recomputed what it ran. Attention that a module's own forward calls runs in its planned
precision from the start: the recorder replaces the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .autograd import AttentionConfig
from .functional import mxfp8_attention
from .plan import Plan
from .planner import call_precision, module_names, pieces, with_recording
from .record import Recorder, tensors_in
from .rules import Rules
from .swap import applied_plan, connect, drop_hook

_STRICT, _RUNNING = "_mxfp8_strict", "_mxfp8_recording"
_FOUND, _WENT_BACK = "_mxfp8_found", "_mxfp8_went_back"


def await_first_forward(model: nn.Module, strict: bool) -> None:
    """Record the next training forward of `model` and fuse what it shows."""
    model.__dict__[_STRICT] = strict
    model.register_forward_pre_hook(_begin)
    model.register_forward_hook(_end, always_call=True)


def stop_waiting(model: nn.Module) -> None:
    """Remove the hooks, whether or not the forward came."""
    drop_hook(model._forward_pre_hooks, _begin)
    for key in [k for k, hook in model._forward_hooks.items() if hook is _end]:
        del model._forward_hooks[key]
        model._forward_hooks_always_called.pop(key, None)
    for key in (_STRICT, _FOUND, _WENT_BACK):
        model.__dict__.pop(key, None)


@contextmanager
def not_waiting(model: nn.Module) -> Iterator[None]:
    """In the block no forward of `model`, or of a part of it, is taken for the one to record."""
    waiting = [m for m in model.modules() if _begin in m._forward_pre_hooks.values() and _RUNNING not in m.__dict__]
    for module in waiting:
        module.__dict__[_RUNNING] = (None, None, None, None)
    try:
        yield
    finally:
        for module in waiting:
            module.__dict__.pop(_RUNNING, None)


def _begin(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    plan = applied_plan(model)
    if plan is None or _RUNNING in model.__dict__:
        return
    if _WENT_BACK in model.__dict__:
        _fuse(model, model.__dict__[_FOUND])
        return
    names = module_names(model)
    del names[model]  # its own hooks are running
    stack, recorder = ExitStack(), Recorder(_attention(plan, model))
    recording = stack.enter_context(recorder.watch(names, pieces(model, plan) - {model}))
    model.__dict__[_RUNNING] = (stack, recorder, recording, get_ident())


def _attention(plan: Plan, model: nn.Module) -> Callable[..., Any]:
    """What the recorder runs in place of `F.scaled_dot_product_attention`, by the module that calls it."""
    user, names = Rules(plan.overrides, "overrides"), module_names(model)

    def intercept(owner: nn.Module | None, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not F.scaled_dot_product_attention or owner is None:
            return NotImplemented
        name = names.get(owner, "")
        precision, reason = call_precision(plan.recipe, user, [name])
        masked = kwargs.get("is_causal") or kwargs.get("attn_mask") is not None or len(args) > 3
        if reason or (masked and precision.spec.mixes_rows and not precision.mix_masked):
            return NotImplemented
        return mxfp8_attention(*args, **kwargs, config=AttentionConfig.of(precision, name))

    return intercept


def _end(model: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or model.__dict__.get(_RUNNING, (None,))[-1] != get_ident():
        return
    stack, recorder, recording, _ = model.__dict__.pop(_RUNNING)
    if output is not None:
        recorder.finish(output)
    stack.close()
    plan = applied_plan(model)
    if output is None or plan is None or not torch.is_grad_enabled():
        return
    found = with_recording(plan, model, recording, "first forward")
    if not recording.recomputes:
        _fuse(model, found)
        return
    model.__dict__[_FOUND] = found
    made = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not made:
        model.__dict__[_WENT_BACK] = True
    for tensor in made:
        tensor.register_hook(lambda grad: model.__dict__.update({_WENT_BACK: True}))


def _fuse(model: nn.Module, plan: Plan) -> None:
    strict = model.__dict__.get(_STRICT, False)
    stop_waiting(model)
    connect(model, plan, strict)
