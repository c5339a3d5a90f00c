"""Finding the edges from the first eager training forward, for a recipe applied without `example_inputs`.

Two hooks on the root surround that forward with a recorder and then remove themselves; the edges fuse from
the second forward on, with the same bits. A forward without grad mode is left alone: in it activation
checkpointing, which decides what may fuse, does not show.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .planner import module_names, pieces, with_recording
from .record import Recorder
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
    if plan is None or not torch.is_grad_enabled() or _RUNNING in model.__dict__:
        return
    names = module_names(model)
    del names[model]  # its own hooks are running
    stack, recorder = ExitStack(), Recorder()
    recording = stack.enter_context(recorder.watch(names, pieces(model, plan) - {model}))
    model.__dict__[_RUNNING] = (stack, recorder, recording)


def _end(model: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or _RUNNING not in model.__dict__:
        return
    stack, recorder, recording = model.__dict__.pop(_RUNNING)
    if output is not None:
        recorder.finish(output)
    stack.close()
    plan, strict = applied_plan(model), model.__dict__.get(_STRICT, False)
    if output is None or plan is None:
        return
    stop_waiting(model)
    connect(model, with_recording(plan, model, recording, "first forward"), strict)
