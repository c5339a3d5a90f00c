"""Scales leave the tiles of a large matrix in whole lines; a second, small launch spreads them over rows.

A tile of 128 x 128 has four scale bytes of each row and of each feature, and in a plain matrix of scales each four lie
a whole row away from the next: a store of 4 bytes each, for which the L2 cache does what it does for 32. In the 128 x 4
layout (`scale_layout`) they are one run of 512 bytes. So the kernel of tiles writes that layout into scratch, and
`spread` moves the words, 3 % of the bytes of quantizing bf16, from L2 cache to L2 cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from . import launch
from .jit import kernel
from .launch import Emission
from .scale_layout import swizzled_numel

SIZES = ["rows", "row_tiles", "features", "feature_tiles", "row_programs"]


@triton.jit
def spread_block(lines_ptr, scale_ptr, block, first, rows, tiles, T: tl.constexpr):
    """Words of tiles first .. first + T - 1 of a block of 128 rows; `tiles` of them make a row of scales."""
    tile = first + tl.arange(0, T)
    line = tl.arange(0, 128)
    at = (block.to(tl.int64) * tiles + tile)[:, None] * 128 + line[None, :]
    words = tl.load(lines_ptr + at, mask=(tile < tiles)[:, None], other=0)
    words = tl.reshape(tl.permute(tl.reshape(words, (T, 32, 4)), (2, 1, 0)), (128, T))
    row = block * 128 + line
    at = row.to(tl.int64)[:, None] * tiles + tile[None, :]
    tl.store(scale_ptr + at, words, mask=(row < rows)[:, None] & (tile < tiles)[None, :])


@kernel(do_not_specialize=SIZES)
def spread_kernel(
    s_lines_ptr, s_ptr, st_lines_ptr, st_ptr, rows, row_tiles, features, feature_tiles, row_programs,
    R: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Both orientations, R and C tiles of 128 rows or features a program. EARLY: started ahead of what it reads."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    if program < row_programs:
        across = tl.cdiv(row_tiles, R)
        spread_block(s_lines_ptr, s_ptr, program // across, program % across * R, rows, row_tiles, R)
    else:
        program -= row_programs
        across = tl.cdiv(feature_tiles, C)
        spread_block(st_lines_ptr, st_ptr, program // across, program % across * C, features, feature_tiles, C)


def in_lines(plan: Emission) -> Emission:
    """The plan by which a kernel of tiles stores scales for `spread`, or `plan` itself where that does not pay."""
    flags = plan.flags
    both = flags["R_BR"] > 0 and flags["C_BR"] > 0
    whole = flags["R_ALIGNED"] and flags["C_ALIGNED"]  # rows of scales are whole words
    if flags["SWIZZLED"] or not both or not whole or plan.outputs[0].numel() < launch.SPREAD_ELEMENTS:
        return plan
    lines = [
        torch.empty(swizzled_numel(*scale.shape) // 4, dtype=torch.int32, device=scale.device)
        for scale in plan.outputs[1::2]
    ]
    pointers = (plan.pointers[0], lines[0], plan.pointers[2], lines[1])
    return replace(plan, pointers=pointers, flags={**flags, "SWIZZLED": True})


def spread(held: Emission, plan: Emission) -> None:
    """Store the scales of `plan` from those a kernel left by `held`, which is `in_lines(plan)`."""
    if held is plan:
        return
    rows, features = plan.outputs[0].shape
    row_tiles, feature_tiles = (scale.shape[1] // 4 for scale in plan.outputs[1::2])
    R, C = (min(32, launch.next_power_of_2(tiles)) for tiles in (row_tiles, feature_tiles))
    row_programs = -(-rows // 128) * -(-row_tiles // R)
    programs = row_programs + -(-features // 128) * -(-feature_tiles // C)
    early = {} if triton.knobs.runtime.interpret else {"launch_pdl": True}
    spread_kernel[(programs,)](
        held.pointers[1], plan.pointers[1], held.pointers[3], plan.pointers[3],
        rows, row_tiles, features, feature_tiles, row_programs, R=R, C=C, EARLY=bool(early), num_warps=4, **early,
    )  # fmt: skip
