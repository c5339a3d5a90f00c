"""Gluon from triton 3.6 to 3.9 under one set of names, and launches without the JIT's binder.

Renamed between them: TMA loads and stores, and the barrier of a partition's threads. Everything else the kernels
use is the same in both.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..replay import launch_compiled, launched

tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # pyright: ignore[reportAttributeAccessIssue]

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any, key: Hashable, device: int | None, programs: int, args: tuple[Any, ...], warps: int, **options: int
) -> None:  # fmt: skip
    """Run `kernel` on every program, compiling at the first sight of `key`.

    `key` and `device` must determine everything the code depends on: constants, dtypes, descriptors' blocks, and
    `options` of the compiler. Later calls go to the compiled kernel, which costs a quarter of specializing all
    arguments again.
    """
    key = device, key
    found = _compiled.get(key)
    if found is None:
        # Fusing p * s + acc into one instruction loses nothing: p * s is exact. Newer triton no longer does it unasked.
        found = _compiled[key] = kernel[(programs,)](*args, num_warps=warps, enable_fp_fusion=True, **options)
    else:
        launch_compiled(found, (programs,), device, args)
    launched(found, (programs,), args)
