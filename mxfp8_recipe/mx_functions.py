"""Values that go into an autograd Function or come out of one, which takes nothing but tensors for inputs and outputs.

    y = down(h);  checkpoint(f, y, use_reentrant=True)      y is no input: no gradient would reach it
    y = checkpoint(down, h, use_reentrant=True)             y is no output: computed later, it would have no gradient

Torch offers no hook on either, so the stack is searched for `Function.apply`, in calls without grad mode alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_APPLY = torch.autograd.Function.apply.__func__.__code__  # pyright: ignore[reportFunctionMemberAccess]


def refuse_lost_gradient(value: Any) -> None:
    """Raise where a value went into an autograd Function, as that of a reentrant checkpoint, or came out of one, which
    took it for no tensor: no gradient would come back through it. Its edge ends, so that the next call gets a tensor.

    Raises:
        RuntimeError: then.
    """
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        name = value.made_in
    else:
        name = enclosing_function(value) if value.requires_grad else ""
    if name:
        edge = value.edge
        edge.fused, edge.closed, edge.reason = False, True, f"given to or by {name}"
        raise RuntimeError(
            f"{edge.producer or '(root)'}: its quantized output was given to or by the autograd Function {name}, which "
            f"would lose its gradient (planned: {', '.join(edge.consumers)}). Run again, now that it is a tensor, "
            "apply the recipe with example_inputs that take this path, or checkpoint with use_reentrant=False"
        )


def enclosing_function(value: Any = None) -> str:
    """The autograd Function whose forward runs, and of which `value` is an argument; else ""."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY and (value is None or any(v is value for v in tree_leaves(frame.f_locals["args"]))):
            return frame.f_locals["cls"].__name__
        frame = frame.f_back
    return ""
