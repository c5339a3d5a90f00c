"""`kernel`: `triton.jit` whose launches cost a few microseconds of host time, not tens.

Triton binds and specializes every argument again in each call. Here that happens at the first sight of what the code
depends on: dtypes, alignment and constants. Later calls find the compiled kernel by these and launch it. Launch hooks
are not called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from .replay import ALIGNMENT, launch_compiled, launched

INT32 = range(-(2**31), 2**31)


def kernel(*, do_not_specialize: list[str]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator in place of `triton.jit`; `do_not_specialize` names integers that may take any value."""

    def decorate(fn: Callable[..., Any]) -> Any:
        if triton.knobs.runtime.interpret:
            return triton.jit(fn, do_not_specialize=do_not_specialize)
        return Kernel(fn, do_not_specialize=do_not_specialize)

    return decorate


class Kernel(JITFunction):
    """A jitted function that remembers what it compiled."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        super().__init__(fn, **options)
        self.known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self.constant = [p.is_constexpr for p in self.params]
        self.any_value = [p.do_not_specialize for p in self.params]

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch on `grid`, a tuple; Triton's own `run` when the key is new."""
        values, kinds, index = [], [], None
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                pointer = arg.data_ptr()
                values.append(pointer)
                kinds.append((arg.dtype, pointer % ALIGNMENT == 0))
                index = arg.device.index
            else:
                values.append(arg)
                if self.constant[i] or arg is None:
                    kinds.append(arg)
                elif isinstance(arg, int):
                    kinds.append((arg in INT32, self.any_value[i] or (arg == 1, arg % ALIGNMENT == 0)))
        key = (index, *kinds, *kwargs, *kwargs.values())
        found = self.known.get(key)
        if found is None or warmup:
            compiled = super().run(*args, grid=grid, warmup=warmup, **kwargs)
            if not warmup and hasattr(compiled, "packed_metadata"):
                rest = tuple(kwargs[p.name] for p in self.params[len(args) :])
                self.known[key] = compiled, rest
                launched(compiled, grid, (*args, *rest))
            return compiled
        compiled, rest = found
        launched(compiled, grid, (*args, *rest))
        launch_compiled(compiled, grid, index, (*values, *rest))
        return compiled
