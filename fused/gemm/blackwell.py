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
from ..reference_ops import empty
from ..scale_layout import swizzle_scale, swizzled_numel
from ._blackwell_kernel import gemm_kernel
from ._operands import FORMATS, aligned_rows, prepare
from .epilogue import Epilogue, Outputs, Rotation, check_steps, finish


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


def choose(values: int, itemsize: int = 2) -> Config:
    """`values`: matrices that the epilogue reads or writes, each 16 KiB an `itemsize` of shared memory a tile; a stage
    takes 33 KiB of the 227.
    """
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
    """`epilogue.gemm_epilogue` in one Triton kernel.

    Args:
        a, a_scale, b, b_scale: as `gemm` takes them; N a multiple of 32.
        epilogue: what `problem` has no objection to.
        out_dtype: bfloat16 or float16; float32 for an epilogue of the bias alone.
        a_tile, b_tile: tiles of the operands, which make no difference here.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    a, a_scale, b, b_scale = _operands(a, a_scale, b, b_scale)
    (m, k), n = a.shape, b.shape[0]
    _check_epilogue(m, n, bias, residual, epilogue, rotation, out_dtype)
    if a.numel() == 0 or b.numel() == 0:
        z = torch.zeros(m, n, dtype=out_dtype, device=a.device)
        z = z if bias is None else z + bias.to(out_dtype)
        return finish(z, residual, epilogue=epilogue, swizzled=swizzled, pad_tokens=pad_tokens)
    y = torch.empty(m, n, dtype=out_dtype, device=a.device) if epilogue.emit_high else empty(a, out_dtype)
    z = torch.empty(m, n, dtype=out_dtype, device=a.device) if epilogue.emit_sum else empty(a, out_dtype)
    plan = plan_emission(a, m, n, epilogue.rowwise, None, swizzled=swizzled, pad_tokens=1)
    config = choose((residual is not None) + epilogue.emit_high + epilogue.emit_sum, out_dtype.itemsize)
    tiles = triton.cdiv(m, config.rows) * triton.cdiv(n, config.cols)
    programs = min(tiles, _multiprocessors(a.device))
    scales = _scale_blocks(a_scale, m, k, config.rows, config), _scale_blocks(b_scale, n, k, config.cols, config)
    unused = scales[0]  # what no branch of the kernel reads
    gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [config.rows, config.step]), scales[0],
        TensorDescriptor.from_tensor(b, [config.cols, config.step]), scales[1],
        a_scale if bias is None else bias,
        unused if residual is None else _blocks(aligned_rows(residual), config),
        _blocks(y, config) if epilogue.emit_high else unused, _blocks(z, config) if epilogue.emit_sum else unused,
        _blocks(plan.outputs[0], config) if plan.any else unused, plan.pointers[1] if plan.any else a_scale,
        m, n // 32, k, programs,
        **constants_of(config, a.dtype, b.dtype, out_dtype, bias is not None, residual is not None, epilogue, plan),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return Outputs(y, z, empty(a, out_dtype), *plan.outputs)


def problem(epilogue: Epilogue) -> str:
    """Why the kernel does not do these steps, or nothing."""
    if epilogue.gated:
        return "two weights interleaved have no kernel here"
    if epilogue.rope is not None:
        return "RoPE has no kernel here"
    if epilogue.colwise is not None:
        return "transposed MXFP8 has no kernel here"
    if epilogue.rowwise is not None and epilogue.rowwise.tile[0] > 1:
        return f"{epilogue.rowwise.tile_name} tiles span rows, and the kernel's are of one row"
    return ""


def constants_of(
    config: Config, a: torch.dtype, b: torch.dtype, out: torch.dtype, bias: bool, residual: bool, epilogue: Epilogue,
    plan: Emission,
) -> dict[str, Any]:  # fmt: skip
    """The kernel's compile-time arguments."""
    return {
        "A_FORMAT": FORMATS[a],
        "B_FORMAT": FORMATS[b],
        "DTYPE": DTYPES[out],
        "BIAS": bias,
        "ACT": epilogue.activation or "",
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


def _blocks(x: Tensor, config: Config) -> TensorDescriptor:
    """An (M, N) output or residual in the words of two features that the kernel moves, in tiles; fp32 as it is."""
    words = x.view(_WORDS[x.dtype]) if x.dtype in _WORDS else x
    return TensorDescriptor.from_tensor(words, [config.rows, config.cols * words.shape[1] // x.shape[1]])


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
    if problem(epilogue):
        raise ValueError(f"gemm_epilogue: got {epilogue.encode()!r}, but {problem(epilogue)}; store the output first")
    if out_dtype not in DTYPES:
        raise TypeError(f"gemm_epilogue: got out_dtype {out_dtype}, expected bfloat16, float16 or float32")
    if n % 32:
        raise ValueError(f"gemm_epilogue: got N = {n}, expected a multiple of 32; the reference backend takes any")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"gemm_epilogue: got bias shape {tuple(bias.shape)}, expected {(n,)}")
    if residual is not None and (tuple(residual.shape) != (m, n) or residual.dtype != out_dtype):
        raise ValueError(
            f"gemm_epilogue: got residual {tuple(residual.shape)} {residual.dtype}, expected {(m, n)} {out_dtype}"
        )
    if out_dtype == torch.float32 and (epilogue != Epilogue() or residual is not None):
        raise TypeError(
            "gemm_epilogue: got out_dtype torch.float32, expected bfloat16 or float16 before more than a bias"
        )
