"""MXFP8 GEMM on whatever Triton runs on: `tl.dot_scaled` on plain scales.

Where the hardware multiplies MX operands (compute capability 10 and 12) it becomes that instruction; elsewhere (9)
Triton upcasts to BF16, where a scaled element is still exact: emulation, for its results and not for its speed. Hopper
has a kernel of its own, several times faster than this one there, and Blackwell's data center parts have another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from ._operands import FORMATS, prepare

_ROWS, _COLS, _STEP, _GROUP = 128, 128, 128, 8


@kernel(do_not_specialize=["M", "N", "K32", "LDA16", "LDB16", "LDSA", "LDSB", "LDO"])
def portable_kernel(
    a_ptr, sa_ptr, b_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K32, LDA16, LDB16, LDSA, LDSB, LDO,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one BM x BN tile. Past the edges elements and scale bytes are zero, which adds nothing."""
    K = K32 * 32  # says "a multiple of 32", as LDA16 and LDB16 do of 16: loads are 16 bytes wide
    LDA = LDA16 * 16
    LDB = LDB16 * 16
    nm = tl.cdiv(M, BM)
    nn = tl.cdiv(N, BN)
    t = tl.program_id(0)
    group = t // (GROUP * nn)
    rows = tl.minimum(nm - group * GROUP, GROUP)
    row0 = (group * GROUP + (t % (GROUP * nn)) % rows).to(tl.int64) * BM
    col0 = ((t % (GROUP * nn)) // rows).to(tl.int64) * BN
    m = row0 + tl.arange(0, BM)
    n = col0 + tl.arange(0, BN)
    k = tl.arange(0, BK)
    block = tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        in_k = k0 + k < K
        in_block = k0 // 32 + block < K32
        a = tl.load(a_ptr + m[:, None] * LDA + (k0 + k)[None, :], mask=(m < M)[:, None] & in_k[None, :], other=0)
        b = tl.load(b_ptr + n[None, :] * LDB + (k0 + k)[:, None], mask=in_k[:, None] & (n < N)[None, :], other=0)
        sa_at = sa_ptr + m[:, None] * LDSA + (k0 // 32 + block)[None, :]
        sb_at = sb_ptr + n[:, None] * LDSB + (k0 // 32 + block)[None, :]
        sa = tl.load(sa_at, mask=(m < M)[:, None] & in_block[None, :], other=0)
        sb = tl.load(sb_at, mask=(n < N)[:, None] & in_block[None, :], other=0)
        acc = tl.dot_scaled(a, sa, A_FORMAT, b, sb, B_FORMAT, acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m[:, None] * LDO + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=mask, other=0.0)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """`a @ b.T + bias` of two operands quantized along their last dim, as `reference.gemm`.

    Args:
        a: (M, K) float8, a_scale (M, ceil(K / 32)) E8M0 bytes.  b: (N, K) float8, b_scale (N, ceil(K / 32)). K that is
            no multiple of 32, and rows that do not start on 16 bytes, take a copy.
        bias: (N,) or None, added in fp32.
        a_tile, b_tile: tiles of the operands, which make no difference here.
        accumulate_into: (M, N) fp32 with unit stride along rows, or None: add to it in place of a new tensor.

    Returns:
        (M, N) of `out_dtype`, or `accumulate_into`.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    shapes = tuple(a_scale.shape), tuple(b_scale.shape)
    blocks = triton.cdiv(a.shape[-1], 32)
    if a.shape[-1] == b.shape[-1] and shapes != ((a.shape[0], blocks), (b.shape[0], blocks)):
        raise ValueError(
            f"gemm: got scales {shapes[0]} and {shapes[1]} for operands {tuple(a.shape)} and {tuple(b.shape)}, expected"
            " one scale byte per 32 elements along K"
        )
    a, b = prepare(a, b)
    m, n = a.shape[0], b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device) if accumulate_into is None else accumulate_into
    if m == 0 or n == 0:
        return out
    sa, sb = (x if x.stride(1) == 1 else x.contiguous() for x in (a_scale, b_scale))
    programs = triton.cdiv(m, _ROWS) * triton.cdiv(n, _COLS)
    portable_kernel[(programs,)](
        a.view(torch.uint8), sa.view(torch.uint8), b.view(torch.uint8), sb.view(torch.uint8),
        out if bias is None else bias, out, m, n, blocks, a.stride(0) // 16, b.stride(0) // 16, sa.stride(0),
        sb.stride(0), out.stride(0), FORMATS[a.dtype], FORMATS[b.dtype], bias is not None, accumulate_into is not None,
        _ROWS, _COLS, _STEP, _GROUP, num_warps=8, num_stages=3,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
