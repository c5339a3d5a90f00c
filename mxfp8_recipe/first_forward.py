"""Finding edges and attention calls from the first eager training forward, without `example_inputs`.

Two hooks on the root surround each forward with a recorder until one ran in grad mode (without it activation
checkpointing, which decides what may fuse, does not show); then they remove themselves, and the edges fuse
from the next forward on, with the same bits. Attention that a module's own forward calls runs in its planned
precision from the start: the recorder replaces the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .autograd import AttentionConfig
from .functional import mxfp8_attention
from .plan import Plan
from .planner import call_precision, module_names, pieces, with_recording
from .record import Recorder
from .rules import Rules
from .swap import applied_plan, connect, drop_hook

_STRICT, _RUNNING = "_mxfp8_strict", "_mxfp8_recording"


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
    model.__dict__.pop(_STRICT, None)


def _begin(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    plan = applied_plan(model)
    if plan is None or _RUNNING in model.__dict__:
        return
    names = module_names(model)
    del names[model]  # its own hooks are running
    stack, recorder = ExitStack(), Recorder(_attention(plan, model))
    recording = stack.enter_context(recorder.watch(names, pieces(model, plan) - {model}))
    model.__dict__[_RUNNING] = (stack, recorder, recording)


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
    if torch.compiler.is_compiling() or _RUNNING not in model.__dict__:
        return
    stack, recorder, recording = model.__dict__.pop(_RUNNING)
    if output is not None:
        recorder.finish(output)
    stack.close()
    plan, strict = applied_plan(model), model.__dict__.get(_STRICT, False)
    if output is None or plan is None or not torch.is_grad_enabled():
        return
    stop_waiting(model)
    connect(model, with_recording(plan, model, recording, "first forward"), strict)
