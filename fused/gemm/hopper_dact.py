"""Dgrad with the derivative of the activation before, on Hopper: `gemm_dact` computes `dact.gemm_dact`.

The kernel does cheap activations, MXFP8 of dz in both orientations, its sums over the tokens and the transposed MXFP8
of y. What `problem` names, and what `hopper.gemm` would split along K, runs as that GEMM and `activation_backward`
after it, with the same bits.

Bytes moved after the sum, an element, for every output: 2 read and 3 * 33/32 written; apart 4 more. What bounds the
kernel is what its warps issue (`_hopper_dact_kernel`), so the bytes are gained only where the derivative is cheap
(H200, 65536 x 4096 x 1024, every output: SiLU 0.94 ms; GELU 1.17 ms, which is 1.06 ms apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._row_stats import sum_strips
from ..activation_quantize import activation_backward
from ..launch import Emission, check_features, padded_tokens, plan_emission
from ..reference_ops import check_same, empty
from . import hopper
from ._gluon import launch
from ._hopper_dact_kernel import gemm_dact_kernel
from ._operands import aligned_rows
from .dact import Dact
from .hopper_epilogue import BOX, is_split, words_descriptor

TILE = 128
"""Tokens and features of a tile."""
MOST_TOKENS = 2**24
"""The features of a tile are addressed in 32 bits."""


CHEAP = ("relu", "relu2", "silu")
"""Activations whose derivative takes less time in the kernel than the bytes it saves."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch: stages of operands, tiles of dz in flight, and registers of the warpgroups that multiply (the first gets
    what the others leave), of the eight warps that emit, and of the loaders. group: as of `hopper.Config`.
    """

    stages: int
    tiles: int
    registers: int
    emit_registers: int
    loader_registers: int
    group: int


# Groups of 4 row tiles take 1.16 ms for GELU, of 8 1.18 ms; four stages and one tile of dz 1.19 ms. A register more for
# the warps that emit would be one less for the sums.
CONFIG = Config(stages=3, tiles=2, registers=144, emit_registers=72, loader_registers=40, group=4)


def problem(epilogue: Dact, dtypes: tuple[torch.dtype, ...], tokens: int) -> str:
    """Why the kernel does not do these steps, or nothing; dtypes: of grad_y, z and y."""
    if set(dtypes) != {torch.bfloat16}:
        return f"the kernel rounds to bfloat16, not {' and '.join(sorted({str(t) for t in dtypes}))}"
    if epilogue.activation not in CHEAP:
        return f"a kernel after the GEMM takes less time for {epilogue.activation}"
    if epilogue.emit_high:
        return "dz itself is asked for, which the kernel does not store"
    if epilogue.rowwise is not None and epilogue.colwise is None:
        return "dz in rows alone needs no tile, and the kernel has no other way"
    if tokens % 16 or tokens >= MOST_TOKENS:
        return f"{tokens} tokens are not a multiple of 16 below {MOST_TOKENS}"
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
    if unlike or problem(epilogue, dtypes, padded) or is_split(a, variant, n):
        grad_y = hopper.gemm(a, a_scale, b, b_scale, out_dtype=out_dtype, a_tile=a_tile, b_tile=b_tile)
        return activation_backward(
            grad_y, z, gate, epilogue.activation, epilogue.rowwise, epilogue.colwise, epilogue.emit_bias,
            epilogue.act_colwise, out_dtype=y_dtype, emit_high=epilogue.emit_high, swizzled=swizzled,
            pad_tokens=pad_tokens,
        )  # fmt: skip
    check_features("gemm_dact", n)
    check_same("gemm_dact", "z", z, z.new_empty(1).expand(m, n))
    with torch.cuda.device_of(a):
        return _run(a, a_scale, b, b_scale, z, epilogue, variant, pad_tokens)


def _run(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, z: Tensor, epilogue: Dact, variant: hopper.Variant,
    pad_tokens: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    m, n = z.shape
    layout: dict[str, Any] = {"swizzled": False, "pad_tokens": pad_tokens}
    plan = plan_emission(z, m, n, epilogue.rowwise, epilogue.colwise, **layout)
    act_plan = plan_emission(z, m, n, None, epilogue.act_colwise, **layout)
    partial = torch.empty(-(-m // TILE), n if epilogue.emit_bias else 0, dtype=torch.float32, device=z.device)
    a, b, z = hopper._aligned(a), hopper._aligned(b), aligned_rows(z)
    sa, sb = hopper._words(a_scale, variant), hopper._words(b_scale, variant)
    pointers = (plan.outputs[0].view(torch.int32), *plan.pointers[1:], *act_plan.pointers[2:])
    constants = constants_of(variant, CONFIG, epilogue, plan, act_plan)
    word = sa.element_size()
    programs = min(hopper._processors(a.device.index), -(-m // TILE) * -(-n // TILE))
    args = (
        hopper._descriptor(a, BOX, hopper.STEP), hopper._descriptor(b, hopper.COLS, hopper.STEP),
        words_descriptor(z, hopper.COLS // 2, TILE), sa, sb, partial, *pointers,
        m, n, a.shape[1], plan.stride_t, sa.stride(0) * word, sb.stride(0) * word, -(-a.shape[1] // hopper.STEP),
        *constants,
    )  # fmt: skip
    key = (a.dtype, b.dtype, *[p.dtype for p in pointers], *[p.numel() > 0 for p in (partial, *pointers)], constants)
    launch(gemm_dact_kernel, key, a.device.index, programs, args, warps=4)
    none = [empty(z, dtype) for dtype in (z.dtype, z.dtype, torch.float32, *[torch.uint8] * 4)]
    return none[0], none[1], sum_strips(partial), none[2], *plan.outputs, *none[3:], *act_plan.outputs[2:]


def constants_of(
    variant: hopper.Variant, config: Config, epilogue: Dact, plan: Emission, act_plan: Emission
) -> tuple[Any, ...]:
    """The kernel's compile-time arguments, in its order."""
    of_dz = [plan.flags[f"{side}_{name}"] for side in "RC" for name in ("BR", "BC", "E5", "FLOOR", "ALIGNED")]
    of_y = [act_plan.flags[f"C_{name}"] for name in ("BR", "BC", "E5", "FLOOR")]
    return (
        variant.across, hopper.STEP // variant.chunk, config.stages, config.tiles, config.group, config.registers,
        config.emit_registers, config.loader_registers, epilogue.activation, epilogue.emit_bias, *of_dz, *of_y,
    )  # fmt: skip
