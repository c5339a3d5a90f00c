"""Launches of jagged attention's Gluon kernels for Hopper, and which problems are theirs: what they were held against
float64 on, bf16 and heads of 128, each with its own keys. Anything else, and any other GPU, runs the same sums in the
Triton kernels of `jagged` and `jagged_backward`.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..gemm._gluon import launch
from . import _hopper_dkdv, _hopper_dq, _hopper_forward
from ._tiles import LOG2E
from .jagged_launch import Config, Operand, Problem, processors

WIDTH = 128

KEEP = tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 6)
"""Whether the forward may keep a part of Q in registers: newer triton would put 14 words of a thread aside."""


def fits(problem: Problem) -> bool:
    """Whether these kernels compute its output."""
    q, v = problem.q.x, problem.v.x
    shaped = q.shape[2] == v.shape[2] == WIDTH and q.dtype == torch.bfloat16 and problem.groups == 1
    plain = problem.scale > 0 and not problem.has_bias and not problem.causal
    return shaped and plain and problem.tma and is_hopper(q.device.index)


def fits_backward(problem: Problem) -> bool:
    """Whether these kernels compute its gradients."""
    return fits(problem) and not problem.masked


@lru_cache(maxsize=64)
def is_hopper(device: int | None) -> bool:
    """Whether a GPU has wgmma; the CPU, where kernels are interpreted, has not."""
    return device is not None and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=4096)
def _fields(shape: tuple[int, int], strides: tuple[int, int], rows: int, cols: int) -> dict:
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)
    block = {"block_shape": [rows, cols], "layout": layout, "padding": "zero", "round_f32_to_tf32": False}
    return {"shape": shape, "strides": strides, **block}


def _boxes(base: Tensor, shape: tuple[int, int], stride: int, rows: int, cols: int) -> TensorDescriptor:
    """What `TensorDescriptor` gives, without its checks, which `Operand` has made."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(_fields(shape, (stride, 1), rows, cols), base=base)
    return descriptor


def _heads(operand: Operand, rows: int) -> TensorDescriptor:
    """(T, heads * width) in boxes of `rows` of one head."""
    x = operand.x
    return _boxes(x, (x.shape[0], x.shape[1] * x.shape[2]), x.stride(0), rows, x.shape[2])


def _launch(
    kernel: Any, problem: Problem, config: Config, keys: bool, tensors: tuple[Tensor, ...], args: tuple[Any, ...],
    constants: tuple[Any, ...], each: int = 1,
) -> None:  # fmt: skip
    """`each`: heads a program."""
    device, heads = problem.q.x.device.index, problem.q.x.shape[1]
    constants = *constants, config.rows, config.block, config.tiles, WIDTH
    key = kernel.__name__, problem.q.x.dtype, config, constants, tuple(t.data_ptr() % 16 == 0 for t in tensors)
    programs = config.programs(problem.entries[keys], heads // each, device)
    launch(kernel, key, device, programs, (*args, *constants), warps=config.warps, **dict(config.options))


def forward(problem: Problem, out: Tensor, lse: Tensor, config: Config) -> None:
    """`jagged.forward` into out and lse."""
    q, k, v, heads = problem.q, problem.k, problem.v, problem.q.x.shape[1]
    args = (
        _heads(q, config.rows), _heads(k, config.block), _heads(v, config.block), _heads(Operand(out), config.rows),
        k.x, v.x, out, lse, problem.schedule, k.stride8, v.stride8, problem.scale * LOG2E.value, problem.window or 0,
    )  # fmt: skip
    each = gcd(heads, config.heads)
    constants = problem.window is not None, KEEP and each > 1, each, heads
    tensors = k.x, v.x, out, lse, problem.schedule
    _launch(_hopper_forward.forward_hopper_kernel, problem, config, False, tensors, args, constants, each)


def dq(problem: Problem, do: Operand, o: Operand, lse: Tensor, stats: Any, dq: Tensor, config: Config) -> None:
    """What `stats` holds, and dQ unless that is empty."""
    q, k, v, heads, s = problem.q, problem.k, problem.v, problem.q.x.shape[1], stats.x
    args = (
        *(_heads(x, config.rows) for x in (q, do, o)), _heads(k, config.block), _heads(v, config.block),
        _heads(Operand(dq) if dq.numel() else q, config.rows), k.x, v.x, lse, s, dq if dq.numel() else q.x,
        problem.schedule, k.stride8, v.stride8, s.stride(0), stats.last_at,
        problem.scale, problem.scale * LOG2E.value,
    )  # fmt: skip
    each = gcd(heads, config.heads)
    constants = dq.numel() > 0, stats.block, each, heads
    tensors = k.x, v.x, lse, s, problem.schedule
    _launch(_hopper_dq.dq_hopper_kernel, problem, config, False, tensors, args, constants, each)


def dkdv(problem: Problem, do: Operand, stats: Any, dk: Tensor, dv: Tensor, config: Config) -> None:
    """Of tiles of keys, dK and dV, of one head a program.

    Mixed are all entries of the list that there may be, but for the last two a multiprocessor: how many there are is
    not known here, and programs of those that are none cost least between others.
    """
    q, k, v, s, heads = problem.q, problem.k, problem.v, stats.x, problem.q.x.shape[1]
    pairs = max(problem.entries[1] - 2 * processors(q.x.device.index)[0], 0) // 2
    args = (
        *(_heads(x, config.block) for x in (q, do)), *(_heads(x, config.rows) for x in (k, v)),
        *(_heads(Operand(x), config.rows) for x in (dk, dv)), q.x, do.x, s, dk, dv, problem.schedule,
        1 + problem.entries[0], pairs, q.stride8, do.stride8, s.stride(0), stats.last_at, problem.scale,
        problem.scale * LOG2E.value,
    )  # fmt: skip
    tensors = q.x, do.x, s, dk, dv, problem.schedule
    _launch(_hopper_dkdv.dkdv_hopper_kernel, problem, config, True, tensors, args, (config.stages, heads))
