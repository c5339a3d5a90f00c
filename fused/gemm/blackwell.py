"""MXFP8 GEMM on Blackwell: cuBLAS where the output is stored as it is, Triton where an epilogue follows.

`gemm` computes what `reference.gemm` defines and calls `torch.nn.functional.scaled_mm`; `gemm_epilogue` computes what
`epilogue.gemm_epilogue` defines and launches `_blackwell_kernel`. The tensor core takes one E8M0 byte per 32 of K
whatever tile they were computed from: coarser tiles repeat bytes, so every recipe's operands are multiplied as they
are. A layer uses one of the two, fused or not, since they may round a sum differently.

Both contract the last dim of both operands: fprop `input . weight`, dgrad `grad_output . weight_t`, wgrad
`grad_output_t . input_t`, whose K is tokens, padded to 32 with zeros by whoever quantized them.

Neither has run on a Blackwell GPU: the launches are compiled for sm_100a, the kernel's arithmetic is checked in
Triton's interpreter, and `scaled_mm` is called as its documentation demands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import DTYPES, Emission, plan_emission
from ..reference_ops import GATED_KINDS
from ..scale_layout import swizzle_scale, swizzled_numel, unswizzle_scale
from . import apart
from ._blackwell_kernel import gemm_kernel
from ._operands import FORMATS, aligned_rows, prepare
from .epilogue import Epilogue, Outputs, Rotation, check_rope, check_steps, finish, split


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tile, pipeline depth and warps of a launch.

    The sum takes `cols` columns of tensor memory, twice since tiles overlap, and scales a few more: 512 are there, so
    256 columns do not fit. 8 warps hold 64 elements a thread in the epilogue; 4 would spill.
    """

    rows: int = 128
    cols: int = 128
    step: int = 128
    warps: int = 8
    stages: int
    group: int = 8


def choose(values: int, itemsize: int = 2, quantized: bool = False, room: int = 227) -> Config:
    """`values`: matrices that the epilogue reads or writes, each 16 KiB an `itemsize` of shared memory a tile; a stage
    takes 33 KiB of the `room` a program has, 99 in compute capability 12 and 227 in 10. `quantized`: it writes MXFP8.
    """
    if room < 227:
        return Config(stages=2 if (values + quantized) * itemsize <= 4 else 1)
    return Config(stages=4 if values * itemsize <= 4 else 3)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    a_tile: tuple[int, int] = (1, 32),
    b_tile: tuple[int, int] = (1, 32),
) -> Tensor:
    """`a @ b.T + bias` of two operands quantized along their last dim, as `reference.gemm`, by cuBLAS.

    Args:
        a: (M, K) float8.  b: (N, K) float8, N a multiple of 16. K that is no multiple of 32 is padded, by a copy.
        a_scale, b_scale: E8M0 bytes in the 128x4 layout of `scale_layout`, 1-D, or plain (rows, ceil(K / 32)), which
            are put into that layout first.
        bias: (N,) or None, added in fp32.
        a_tile, b_tile: tiles of the operands, which make no difference here.

    Returns:
        (M, N) of `out_dtype`: bfloat16, float16 or float32.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    a, a_scale, b, b_scale = _operands(a, a_scale, b, b_scale)
    if out_dtype not in DTYPES:
        raise TypeError(f"gemm: got out_dtype {out_dtype}, expected bfloat16, float16 or float32")
    n = b.shape[0]
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"gemm: got bias shape {tuple(bias.shape)}, expected {(n,)}")
    if a.dtype == b.dtype == torch.float8_e5m2:  # cuBLAS multiplies no two of these
        return gemm_epilogue(a, a_scale, b, b_scale, bias, epilogue=Epilogue(), out_dtype=out_dtype)[0]
    if n % 16:
        raise ValueError(f"gemm: got N = {n}, expected a multiple of 16; the reference backend takes any")
    if a.numel() == 0 or b.numel() == 0:
        out = torch.zeros(a.shape[0], n, dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias.to(out_dtype)
    inside = bias is not None and bias.dtype == out_dtype != torch.float32
    apart = bias is not None and not inside
    out = F.scaled_mm(
        a, b.t(), a_scale.view(torch.float8_e8m0fnu), F.ScalingType.BlockWise1x32,
        b_scale.view(torch.float8_e8m0fnu), F.ScalingType.BlockWise1x32,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4, swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
        bias=bias if inside else None, output_dtype=torch.float32 if apart else out_dtype,
    )  # fmt: skip
    return (out + bias.float()).to(out_dtype) if bias is not None and apart else out


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
    """`epilogue.gemm_epilogue` in one Triton kernel; what `problem` names in that and the kernels after it.

    Args:
        a, a_scale, b, b_scale: as `gemm` takes them; rows of b a multiple of 32, for a gated activation of 64.
        out_dtype: bfloat16, float16 or float32.
        a_tile, b_tile: tiles of the operands, which make no difference here.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    a, a_scale, b, b_scale = _operands(a, a_scale, b, b_scale)
    (m, k), n = a.shape, b.shape[0]
    _check_epilogue(m, n, bias, residual, epilogue, rotation, out_dtype)
    if problem(epilogue, out_dtype) and a.numel() and b.numel():
        z, gate = _sums(a, a_scale, b, b_scale, bias, epilogue, out_dtype)
        facts: dict[str, Any] = {"rotation": rotation, "swizzled": swizzled, "pad_tokens": pad_tokens}
        return apart.finish(z, residual, gate=gate, epilogue=epilogue, **facts)
    if a.numel() == 0 or b.numel() == 0:
        z = torch.zeros(m, n, dtype=out_dtype, device=a.device)
        z = z if bias is None else z + bias.to(out_dtype)
        gate, z = split(z.t(), epilogue.group) if epilogue.gated else (None, z.t())
        return finish(
            z.t(), residual, gate=None if gate is None else gate.t(), epilogue=epilogue, rotation=rotation,
            swizzled=swizzled, pad_tokens=pad_tokens,
        )  # fmt: skip
    features, half = (n // 2, 2) if epilogue.gated else (n, 1)
    asked = epilogue.emit_high, epilogue.emit_sum, epilogue.emit_sum and epilogue.gated
    y, z, gate = (
        torch.empty((m, features) if wanted else 0, dtype=out_dtype, device=a.device) for wanted in asked
    )  # fmt: skip
    plan = plan_emission(a, m, features, epilogue.rowwise, None, swizzled=swizzled, pad_tokens=1)
    values = -(-((residual is not None) + sum(asked)) // half)
    config = choose(values, out_dtype.itemsize, plan.any, _room(a.device))
    tiles = triton.cdiv(m, config.rows) * triton.cdiv(n, config.cols)
    programs = min(tiles, _multiprocessors(a.device))
    scales = _scale_blocks(a_scale, m, k, config.rows, config), _scale_blocks(b_scale, n, k, config.cols, config)
    unused = scales[0]  # what no branch of the kernel reads
    cols = config.cols // half
    tables = [a_scale if t is None else t.contiguous() for t in (rotation or (None, None, None))]
    turning = n if epilogue.rope is None else epilogue.rope.columns or n
    scale_out = a_scale if not plan.any else plan.outputs[1] if epilogue.gated else plan.pointers[1]
    gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [config.rows, config.step]), scales[0],
        TensorDescriptor.from_tensor(b, [config.cols, config.step]), scales[1],
        a_scale if bias is None else bias,
        unused if residual is None else _blocks(aligned_rows(residual), config.rows, cols),
        *(_blocks(out, config.rows, cols) if wanted else unused for out, wanted in zip((y, z, gate), asked)),
        _blocks(plan.outputs[0], config.rows, cols) if plan.any else unused, scale_out,
        *tables, m, n // 32, k, programs, 1 if rotation is None else rotation.cos.shape[0], turning // 2,
        **constants_of(config, a.dtype, b.dtype, out_dtype, bias is not None, residual is not None, epilogue, plan),
        POSITIONS=rotation is not None and rotation.positions is not None,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
        **({"maxnreg": 240} if epilogue.rope else {}),  # else the assembler aims for 128 and spills
    )  # fmt: skip
    return Outputs(y, z, gate, *plan.outputs)


def problem(epilogue: Epilogue, out_dtype: torch.dtype) -> str:
    """Why the kernel does not do these steps, or nothing."""
    row = epilogue.rowwise
    if epilogue.gated and (row is not None and row.tile[1] > 32):
        return f"{row.tile_name} tiles are wider than the kernel's 64 columns of a gated pair have room for"
    if epilogue.gated and (epilogue.group % 2 or 64 % epilogue.group):
        return f"rows are interleaved in groups of {epilogue.group}, of which no whole number fits 64 columns"
    rope = epilogue.rope
    if rope is not None and (rope.head_dim % 4 or 128 % rope.head_dim) and not rope.interleaved:
        return f"a tile of 128 columns does not hold whole heads of {rope.head_dim}"
    if epilogue.colwise is not None:
        return "transposed MXFP8 has no kernel here"
    if row is not None and row.tile[0] > 1:
        return f"{row.tile_name} tiles span rows, and the kernel's are of one row"
    if out_dtype == torch.float32 and epilogue != Epilogue():
        return "the kernel's steps after a sum are those of bfloat16 or float16"
    return ""


def _sums(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, epilogue: Epilogue,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Z, and gate for a gated activation, by the kernel that takes no further step."""
    halves = [(b, b_scale, bias)]
    if epilogue.gated:
        plain = unswizzle_scale(b_scale, b.shape[0], -(-b.shape[1] // 32))
        parts = [(None, None) if t is None else split(t, epilogue.group) for t in (b, plain, bias)]
        halves = list(zip(*parts))[::-1]
    sums = [
        gemm_epilogue(a, a_scale, w, s, added, epilogue=Epilogue(), out_dtype=out_dtype).y  # pyright: ignore[reportArgumentType]
        for w, s, added in halves
    ]
    return sums[0], sums[1] if epilogue.gated else None


def constants_of(
    config: Config, a: torch.dtype, b: torch.dtype, out: torch.dtype, bias: bool, residual: bool, epilogue: Epilogue,
    plan: Emission,
) -> dict[str, Any]:  # fmt: skip
    """The kernel's compile-time arguments."""
    kind = epilogue.activation or ""
    return {
        "A_FORMAT": FORMATS[a],
        "B_FORMAT": FORMATS[b],
        "DTYPE": DTYPES[out],
        "BIAS": bias,
        "ACT": GATED_KINDS.get(kind, kind),
        "PAIR": epilogue.group // 2 if epilogue.gated else 0,
        "ROPE": "" if epilogue.rope is None else "pairs" if epilogue.rope.interleaved else "halves",
        "HEAD": epilogue.rope.head_dim if epilogue.rope else 0,
        "RESIDUAL": residual,
        "EMIT_HIGH": epilogue.emit_high,
        "EMIT_SUM": epilogue.emit_sum,
        "Q_BC": plan.flags["R_BC"],
        "Q_E5": plan.flags["R_E5"],
        "Q_FLOOR": plan.flags["R_FLOOR"],
        "SWIZZLED": plan.flags["SWIZZLED"],
        "ALIGNED": plan.flags["R_ALIGNED"],
        "BM": config.rows,
        "BN": config.cols,
        "BK": config.step,
        "GROUP": config.group,
    }


_WORDS = {torch.uint8: torch.int16, torch.bfloat16: torch.int32, torch.float16: torch.int32}


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; a B200's for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 148


@lru_cache(maxsize=64)
def _room(device: torch.device) -> int:
    """KiB of shared memory of a program on a GPU; a B200's for any other device."""
    return 99 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12 else 227


def _blocks(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """An (M, N) output or residual in the words of two features that the kernel moves, in tiles; fp32 as it is."""
    words = x.view(_WORDS[x.dtype]) if x.dtype in _WORDS else x
    return TensorDescriptor.from_tensor(words, [rows, cols * words.shape[1] // x.shape[1]])


def _scale_blocks(scale: Tensor, rows: int, k: int, tile_rows: int, config: Config) -> TensorDescriptor:
    """Swizzled scales as (1, row tiles, column tiles, 2, 256) bytes: 128x4 tiles, each two lines of TMA's 256 bytes."""
    tiles = scale.view(1, -(-rows // 128), -(-k // 128), 2, 256)
    return TensorDescriptor.from_tensor(tiles, [1, tile_rows // 128, config.step // 128, 2, 256])


def _operands(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands with rows of whole blocks, and their scales as (n,) uint8 in the 128x4 layout."""
    rows, k = (a.shape[0], b.shape[0]), a.shape[-1]
    a, b = prepare(a, b)
    return a, _swizzled("a", rows[0], k, a_scale), b, _swizzled("b", rows[1], k, b_scale)


def _swizzled(name: str, rows: int, k: int, scale: Tensor) -> Tensor:
    blocks = -(-k // 32)
    if scale.dim() == 2 and tuple(scale.shape) == (rows, blocks):
        return swizzle_scale(scale).view(torch.uint8)
    numel = swizzled_numel(rows, blocks)
    if scale.dim() != 1 or scale.numel() != numel:
        raise ValueError(
            f"gemm: got {name}_scale shape {tuple(scale.shape)}, expected {(numel,)} in the 128x4 layout or "
            f"{(rows, blocks)} plain"
        )
    return scale.contiguous().view(torch.uint8)


def _check_epilogue(
    m: int, n: int, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue, rotation: Rotation | None,
    out_dtype: torch.dtype,
) -> None:  # fmt: skip
    check_steps(epilogue, residual, rotation)
    if out_dtype not in DTYPES:
        raise TypeError(f"gemm_epilogue: got out_dtype {out_dtype}, expected bfloat16, float16 or float32")
    if n % (64 if epilogue.gated else 32):
        whole = "of 64 for two weights" if epilogue.gated else "of 32"
        raise ValueError(f"gemm_epilogue: got N = {n}, expected a multiple {whole}; the reference backend takes any")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"gemm_epilogue: got bias shape {tuple(bias.shape)}, expected {(n,)}")
    if epilogue.rope is not None and rotation is not None:
        check_rope(epilogue.rope, rotation, m, n)
    features = n // 2 if epilogue.gated else n
    if residual is not None and (tuple(residual.shape) != (m, features) or residual.dtype != out_dtype):
        raise ValueError(
            f"gemm_epilogue: got residual {tuple(residual.shape)} {residual.dtype}, expected {(m, features)} "
            f"{out_dtype}"
        )
