"""What follows a GEMM on Hopper, in its kernel where it has it: `gemm_epilogue` computes `epilogue.gemm_epilogue`.

The kernel does a bias, an activation or a gated pair, a residual, and BF16 and row-wise MXFP8 out. Anything else, and
what `hopper.gemm` would split along K, runs as the same GEMM and kernels after it, with the same bits: which of the two
it is shows in time alone.

Bytes moved after the sum, an element, for GELU with z kept and MXFP8 out: 2 + 33/32 written; apart 2 + 2 + 33/32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import check_features, plan_emission
from ..reference_ops import GATED_KINDS
from . import hopper
from ._gluon import launch
from ._hopper_epilogue_kernel import gemm_epilogue_kernel
from ._operands import aligned_rows
from .apart import finish
from .epilogue import GROUP, Epilogue, Outputs, Rotation, check_steps, split

BOX = 64
"""Rows of an output that one TMA store writes."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch of one variant.

    Attributes:
        consumers, subtiles: warpgroups that multiply, and how many times 64 rows each takes.
        columns: how many times 128 columns a tile has.
        stages: steps of operands in flight.
        registers, loader_registers: per thread of the consumers (the first gets what the others leave) and loaders.
        group: row tiles that share a pass over the columns.
    """

    consumers: int
    subtiles: int = 1
    columns: int = 1
    stages: int
    registers: int
    loader_registers: int
    group: int = 8

    @property
    def rows(self) -> int:
        return self.consumers * self.subtiles * 64

    @property
    def cols(self) -> int:
        return self.columns * 128


# Short bursts on an H200, taken to choose; `benchmarks/results` holds what the choice gives. 65536x4096x1024 with GELU
# and z kept: 0.731 ms, against 0.740 with TALL and 0.798 with two warpgroups of 64 rows. 152 registers hold the sum and
# the epilogue without a spill from triton 3.6 to 3.9, 144 do not.
WIDE = Config(consumers=3, stages=4, registers=152, loader_registers=56)
# From K = 2048 on, 256 rows are faster without an epilogue, whose share falls with K: operands are read less often.
TALL = Config(consumers=2, subtiles=2, stages=3, registers=224, loader_registers=56)
# A residual, a scale per column or a promotion every 32 of K need more registers than three warpgroups leave.
NARROW = Config(consumers=2, stages=4, registers=216, loader_registers=72)
# A scale over 128 features of gate and up spans 256 columns, which two warpgroups have registers for.
PAIRS = Config(consumers=2, columns=2, stages=3, registers=216, loader_registers=72)


def choose(variant: hopper.Variant, residual: bool, gated: bool, block: int, k: int) -> Config:
    """Launch config, a function of the variant, the epilogue and K alone; `block`: features under a scale, or 0."""
    if gated:
        return PAIRS if block == 128 else NARROW
    if residual or variant.chunk == 32 or variant.across == 1:
        return NARROW
    return WIDE if k <= 1024 else TALL


def problem(epilogue: Epilogue, out_dtype: torch.dtype, across: int, residual: bool) -> str:
    """Why the kernel does not do these steps, or nothing; across: rows of b under one scale."""
    row = epilogue.rowwise
    if out_dtype != torch.bfloat16:
        return f"the kernel rounds to bfloat16, not {out_dtype}"
    if epilogue.rope is not None:
        return "RoPE has no kernel here"
    if epilogue.colwise is not None:
        return "transposed MXFP8 has no kernel here"
    if row is not None and row.tile[0] > 1:
        return f"{row.tile_name} tiles span rows, and a warpgroup holds 64"
    if epilogue.activation is None and row is None:
        return "the plain GEMM stores BF16 as well"
    if epilogue.gated and residual:
        return "a residual after a gated pair has no kernel here"
    if epilogue.gated and epilogue.group != GROUP:
        return f"rows are interleaved in groups of {epilogue.group}, and the kernel knows {GROUP}"
    if epilogue.gated and across == 1 and row is not None and row.tile[1] == 128:
        return "a tile of 256 columns has no room for a scale each"
    return ""


def gemm_epilogue(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epilogue: Epilogue,
    rotation: Rotation | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    a_tile: tuple[int, int] = (1, 32),
    b_tile: tuple[int, int] = (1, 32),
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> Outputs:
    """`epilogue.gemm_epilogue` with the bits of `hopper.gemm` and the memory-bound kernels after it.

    Args:
        a, a_scale, b, b_scale, bias: as `hopper.gemm` takes them; rows of b a multiple of 32, for a gated activation
            of 64.
        residual: (M, N) of `out_dtype` or None.
        a_tile, b_tile: `(across, along)` K under which scale bytes are equal; (1, 32) is always true and slowest.
        swizzled, pad_tokens: layout of the MXFP8 outputs; the kernel's scales are plain.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    check_steps(epilogue, residual, rotation)
    m, rows, k = hopper._check(a, a_scale, b, b_scale, bias, out_dtype, None, None)
    features = rows // 2 if epilogue.gated else rows
    check_features("gemm_epilogue", features)
    if residual is not None and (tuple(residual.shape) != (m, features) or residual.dtype != out_dtype):
        raise ValueError(
            f"gemm_epilogue: got residual {tuple(residual.shape)} {residual.dtype}, expected {(m, features)} "
            f"{out_dtype}"
        )
    variant = hopper.variant_of(a_tile, b_tile, bias=bias is not None)
    unlike = swizzled or not (m and features and k)
    if unlike or problem(epilogue, out_dtype, variant.across, residual is not None) or is_split(a, variant, features):
        z, gate = _apart(a, a_scale, b, b_scale, bias, epilogue, out_dtype, a_tile, b_tile)
        return finish(
            z, residual, gate=gate, epilogue=epilogue, rotation=rotation, swizzled=swizzled, pad_tokens=pad_tokens
        )
    with torch.cuda.device_of(a):
        return _run(a, a_scale, b, b_scale, bias, residual, epilogue, variant)


def is_split(a: Tensor, variant: hopper.Variant, features: int) -> bool:
    """Whether `hopper.gemm` would sum parts of K apart, which rounds otherwise."""
    m, k = a.shape
    return hopper.choose(variant, m, features, k, hopper._processors(a.device.index))[1] < -(-k // hopper.STEP)


def _run(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    epilogue: Epilogue, variant: hopper.Variant,
) -> Outputs:  # fmt: skip
    (m, k), rows = a.shape, b.shape[0]
    features = rows // 2 if epilogue.gated else rows
    plan = plan_emission(a, m, features, epilogue.rowwise, None, swizzled=False, pad_tokens=1)
    asked = epilogue.emit_sum, epilogue.emit_sum and epilogue.gated, epilogue.emit_high
    z, gate, y = (
        torch.empty((m, features) if wanted else 0, dtype=torch.bfloat16, device=a.device) for wanted in asked
    )  # fmt: skip
    config = choose(variant, residual is not None, epilogue.gated, plan.flags["R_BC"], k)
    a, b = hopper._aligned(a), hopper._aligned(b)
    sa, sb = hopper._words(a_scale, variant), hopper._words(b_scale, variant)
    added = sa if bias is None else bias.contiguous()
    more = sa if residual is None else aligned_rows(residual).view(torch.int32)
    a_desc = hopper._descriptor(a, BOX, hopper.STEP)
    width = 32 if epilogue.gated else 64  # words of a box of 16-bit outputs
    highs = [words_descriptor(out, width) if wanted else a_desc for out, wanted in zip((z, gate, y), asked)]
    q_desc = words_descriptor(plan.outputs[0], width // 2) if plan.any else a_desc
    constants = constants_of(variant, config, bias is not None, residual is not None, epilogue, plan.flags)
    word = sa.element_size()
    programs = min(hopper._processors(a.device.index), -(-m // config.rows) * -(-rows // config.cols))
    args = (
        a_desc, dealt(b, epilogue.gated), *highs, q_desc, sa, sb, added, more, plan.outputs[1] if plan.any else sa,
        m, rows, k, sa.stride(0) * word, sb.stride(0) * word, 2 * more.stride(0), -(-k // hopper.STEP), *constants,
    )  # fmt: skip
    launch(gemm_epilogue_kernel, (a.dtype, b.dtype, added.dtype, constants), a.device.index, programs, args, warps=4)
    return Outputs(y, z, gate, *plan.outputs)


def constants_of(
    variant: hopper.Variant, config: Config, bias: bool, residual: bool, epilogue: Epilogue, flags: dict[str, Any]
) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's compile-time arguments, in its order."""
    kind = epilogue.activation or ""
    return (
        config.consumers, config.subtiles, config.columns, variant.across, hopper.STEP // variant.chunk, config.stages,
        config.group, config.registers, config.loader_registers, "pairs" if epilogue.gated else "blocks",
        bias, GATED_KINDS.get(kind, kind), residual, epilogue.emit_high, epilogue.emit_sum,
        flags["R_BC"], flags["R_E5"], flags["R_FLOOR"],
    )  # fmt: skip


def box_layout(words: int) -> Any:
    """Shared-memory layout of boxes of int32 words that TMA moves."""
    return gl.NVMMASharedLayout(128 if words >= 32 else 64, 32, 2)


def words_descriptor(x: Tensor, words: int, rows: int = BOX) -> TensorDescriptor:
    """A dense (M, N) matrix, as int32 words, in boxes of (rows, words)."""
    x = x.view(torch.int32)
    return descriptor(x, tuple(x.shape), tuple(x.stride()), (rows, words), box_layout(words))


def dealt(b: Tensor, pairs: bool = False) -> TensorDescriptor:
    """(R, K) in boxes of 128 rows, whose order in shared memory deals columns to threads as the kernels say.

    Row 8 j + 2 t + i of a box is row 32 t + 2 j + i of the matrix, or with `pairs`, t being 2 t1 + t0, row
    64 t1 + 32 i + 16 t0 + j: a tensor of more dimensions, in another order than that of its strides.
    """
    (rows, k), ld = b.shape, b.stride(0)
    if pairs:
        shape, strides = (16, rows // 64, 2, 2, k), (ld, 64 * ld, 16 * ld, 32 * ld, 1)
    else:
        shape, strides = (16, rows // 32, 2, k), (2 * ld, 32 * ld, ld, 1)
    block = dealt_block(pairs)
    return descriptor(b, shape, strides, block, gl.NVMMASharedLayout(128, 8, len(block)))


def dealt_block(pairs: bool) -> tuple[int, ...]:
    """Shape of a box of `dealt`."""
    return (16, 2, 2, 2, hopper.STEP) if pairs else (16, 4, 2, hopper.STEP)


def descriptor(
    base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any
) -> TensorDescriptor:  # fmt: skip
    """A TMA descriptor without the checks, which the caller's shapes imply."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    fields = {"shape": shape, "strides": strides, "block_shape": list(block), "layout": layout}
    made.__dict__.update(fields, base=base, padding="zero", round_f32_to_tf32=False)
    return made


def _apart(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, epilogue: Epilogue,
    out_dtype: torch.dtype, a_tile: tuple[int, int], b_tile: tuple[int, int],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`(z, gate)`, stored by the plain GEMM."""
    tiles: dict[str, Any] = {"out_dtype": out_dtype, "a_tile": a_tile, "b_tile": b_tile}
    if not epilogue.gated:
        return hopper.gemm(a, a_scale, b, b_scale, bias, **tiles), None
    halves = [(None, None) if t is None else split(t, epilogue.group) for t in (b, b_scale, bias)]
    gate, z = (hopper.gemm(a, a_scale, w, s, added, **tiles) for w, s, added in zip(*halves))  # pyright: ignore[reportArgumentType]
    return z, gate
