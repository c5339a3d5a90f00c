"""Dgrad with the derivative of the activation before, on Hopper: `gemm_dact` computes `dact.gemm_dact`.

The kernel does the plain activations, SwiGLU and ReGLU, MXFP8 of dz in both orientations, its sums over the tokens and
the transposed MXFP8 of y. What `problem` names, and what `hopper.gemm` would split along K, runs as that GEMM and
`activation_backward` after it, with the same bits.

Bytes moved after the sum, an element, for every output: 2 read and 3 * 33/32 written; apart 4 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._row_stats import sum_strips
from ..activation_quantize import activation_backward
from ..launch import Emission, check_features, padded_tokens, plan_emission
from ..reference_ops import GATED_KINDS, check_same, empty, split_operands
from . import hopper
from ._gluon import launch
from ._hopper_dact_kernel import gemm_dact_kernel
from ._operands import aligned_rows
from .dact import Dact
from .hopper_epilogue import BOX, dealt, is_split, words_descriptor

TILE = 128
"""Tokens and features of a tile."""
PAIRS = ("swiglu", "reglu")
"""Gated kinds whose derivatives fit the registers."""
MOST_TOKENS = 2**24
"""The features of a tile are addressed in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch: two warpgroups that take tiles in turn, stages of operands, and registers as of `hopper.Config`."""

    consumers: int = 2
    stages: int = 4
    registers: int
    loader_registers: int
    group: int = 8


# Chosen by counting, not yet by measuring. Beside two tiles of z and one of row-wise qdata for each warpgroup, shared
# memory holds four stages of 32 KiB. The sums of 128 rows, a chunk's products and the gradient of a tile fit 232
# registers without a spill (triton 3.6), with three stages also where products are promoted every 32 of K.
TURNS = Config(stages=4, registers=232, loader_registers=48)
TURNS_FINE = Config(stages=3, registers=232, loader_registers=48)
# A tile of the gate beside that of up leaves room for two stages: a step is longer than a load takes.
TURNS_GATED = Config(stages=2, registers=232, loader_registers=48)


def choose(variant: hopper.Variant, gated: bool) -> Config:
    """Launch config, a function of the operands' tiles and of what is differentiated alone."""
    if gated:
        return TURNS_GATED
    return TURNS_FINE if variant.chunk == 32 else TURNS


def problem(
    epilogue: Dact, variant: hopper.Variant, dtypes: tuple[torch.dtype, ...], tokens: int, packed: bool
) -> str:  # fmt: skip
    """Why the kernel does not do these steps, or nothing; dtypes: of grad_y, z and y."""
    specs = (epilogue.rowwise, epilogue.colwise, epilogue.act_colwise)
    wide = [spec.tile_name for spec in specs if spec is not None and spec.tile[0] > 1]
    if set(dtypes) != {torch.bfloat16}:
        return f"the kernel rounds to bfloat16, not {' and '.join(sorted({str(t) for t in dtypes}))}"
    if epilogue.activation in GATED_KINDS and epilogue.activation not in PAIRS:
        return f"{epilogue.activation}'s derivatives take more registers than there are"
    if packed:
        return "gate and up come in one matrix"
    if epilogue.emit_high:
        return "dz itself is asked for, which the kernel does not store"
    if wide:
        return f"{wide[0]} tiles are more than one wide"
    if variant.chunk == 32 and variant.across == 1:
        return "a scale for every column and 32 of K leaves no registers"
    if tokens % 4 or tokens >= MOST_TOKENS:
        return f"{tokens} tokens are not a multiple of 4 below {MOST_TOKENS}"
    return ""


def gemm_dact(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    z: Tensor,
    gate: Tensor | None = None,
    *,
    epilogue: Dact,
    out_dtype: torch.dtype = torch.bfloat16,
    y_dtype: torch.dtype | None = None,
    a_tile: tuple[int, int] = (1, 32),
    b_tile: tuple[int, int] = (1, 32),
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, ...]:
    """`dact.gemm_dact` with the bits of `hopper.gemm` and `activation_backward` after it.

    Args:
        a, a_scale, b, b_scale, a_tile, b_tile: as `hopper.gemm` takes them.
        z, gate, epilogue, out_dtype, y_dtype, swizzled, pad_tokens: as for `dact.gemm_dact`.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    m, n, k = hopper._check(a, a_scale, b, b_scale, None, out_dtype, None, None)
    dtypes = (out_dtype, z.dtype, y_dtype or z.dtype)
    variant = hopper.variant_of(a_tile, b_tile)
    padded = padded_tokens(m, pad_tokens)
    unlike = swizzled or not (m and n and k)
    packed = epilogue.activation in GATED_KINDS and gate is None
    if unlike or problem(epilogue, variant, dtypes, padded, packed) or is_split(a, variant, n):
        grad_y = hopper.gemm(a, a_scale, b, b_scale, out_dtype=out_dtype, a_tile=a_tile, b_tile=b_tile)
        return activation_backward(
            grad_y, z, gate, epilogue.activation, epilogue.rowwise, epilogue.colwise, epilogue.emit_bias,
            epilogue.act_colwise, out_dtype=y_dtype, emit_high=epilogue.emit_high, swizzled=swizzled,
            pad_tokens=pad_tokens,
        )  # fmt: skip
    check_features("gemm_dact", n)
    _, _, kind = split_operands("gemm_dact", z, gate, epilogue.activation)
    check_same("gemm_dact", "z", z, z.new_empty(1).expand(m, n))
    with torch.cuda.device_of(a):
        return _run(a, a_scale, b, b_scale, z, gate, kind, epilogue, variant, pad_tokens)


def _run(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, z: Tensor, gate: Tensor | None, kind: str, epilogue: Dact,
    variant: hopper.Variant, pad_tokens: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    m, n = z.shape
    config = choose(variant, gate is not None)
    layout: dict[str, Any] = {"swizzled": False, "pad_tokens": pad_tokens}
    specs = (epilogue.rowwise, epilogue.colwise)
    plan = plan_emission(z, m, n, *specs, **layout)
    gate_plan = plan_emission(z, m, n, *((None, None) if gate is None else specs), **layout)
    act_plan = plan_emission(z, m, n, None, epilogue.act_colwise, **layout)
    sums = n * (1 if gate is None else 2) if epilogue.emit_bias else 0
    partial = torch.empty(-(-m // TILE), sums, dtype=torch.float32, device=z.device)
    a, b, z = hopper._aligned(a), hopper._aligned(b), aligned_rows(z)
    gate = z if gate is None else aligned_rows(gate)
    sa, sb = hopper._words(a_scale, variant), hopper._words(b_scale, variant)
    a_desc = hopper._descriptor(a, BOX, hopper.STEP)
    highs = [words_descriptor(t, hopper.COLS // 2, TILE) for t in (z, gate)]
    rows = [a_desc if p.flags["R_BC"] == 0 else words_descriptor(p.outputs[0], hopper.COLS // 4)
            for p in (plan, gate_plan)]  # fmt: skip
    pointers = [pointer for p in (plan, gate_plan) for pointer in (p.outputs[1], *p.pointers[2:])]
    pointers += act_plan.pointers[2:]
    constants = constants_of(variant, config, kind, epilogue, plan, act_plan)
    word = sa.element_size()
    programs = min(hopper._processors(a.device.index), -(-m // TILE) * -(-n // TILE))
    args = (
        a_desc, dealt(b), *highs, *rows, sa, sb, partial, *pointers,
        m, n, a.shape[1], plan.stride_t, sa.stride(0) * word, sb.stride(0) * word, -(-a.shape[1] // hopper.STEP),
        *constants,
    )  # fmt: skip
    key = (a.dtype, b.dtype, *[p.dtype for p in pointers], *[p.numel() > 0 for p in (partial, *pointers)], constants)
    launch(gemm_dact_kernel, key, a.device.index, programs, args, warps=4)
    none, totals = empty(z, z.dtype), sum_strips(partial)
    if epilogue.activation not in GATED_KINDS:
        biases = totals, empty(z, torch.float32)
    else:
        biases = totals[n:].clone(), totals[:n].clone() if sums else empty(z, torch.float32)
    return none, empty(z, z.dtype), *biases, *plan.outputs, *gate_plan.outputs, *act_plan.outputs[2:]


def constants_of(
    variant: hopper.Variant, config: Config, kind: str, epilogue: Dact, plan: Emission, act_plan: Emission
) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's compile-time arguments, in its order."""
    of_rows = [plan.flags[f"R_{name}"] for name in ("BC", "E5", "FLOOR")]
    of_columns = [plan.flags[f"C_{name}"] for name in ("BR", "E5", "FLOOR", "ALIGNED")]
    of_y = [act_plan.flags[f"C_{name}"] for name in ("BR", "E5", "FLOOR")]
    return (
        config.consumers, variant.across, hopper.STEP // variant.chunk, config.stages, config.group,
        config.registers, config.loader_registers, epilogue.activation in GATED_KINDS, kind, epilogue.emit_bias,
        *of_rows, *of_columns, *of_y, plan.flags["T_ALIGN"],
    )  # fmt: skip
