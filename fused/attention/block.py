"""BlockAttention: softmax attention inside blocks of 64 tokens that start at a sample's start.

Within a block of one head, `P = softmax(scale Q K^T)`, `O = P V`; no token sees another block, so a tile holds whole
rows of P and neither the running maximum nor the log-sum-exp of flash attention exists. Backward computes P again from
Q and K, has `dP = dO V^T` beside it, and therefore `delta = rowsum(P dP)` without reading O:
`dS = P (dP - delta)`, `dV = P^T dO`, `dQ = scale dS K`, `dK = scale dS^T Q`.

Forward reads Q, K, V and writes O, 8 bytes an element in bf16; backward reads Q, K, V, dO and writes dQ, dK, dV, 14.
At 64 keys a query that is 32 FLOPs a byte forward and 46 backward: memory bound, so a program does no more than keep
loads in flight: it takes one head of one tile, small enough that several share a multiprocessor, and loads all it reads
at once. Heads of a tile lie next to each other and so do their programs.

Nobody counts the blocks. Sample i owns the slots from `offsets[i] // TILE + i`: as many as it has tiles, or one more,
`T // TILE + B` in all, known without asking the device. Programs of superfluous slots end at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from ..launch import next_power_of_2
from ._products import product, rounded

BLOCKS = (32, 64, 128)
LOG2E = 1.4426950408889634
FANOUT = tl.constexpr(128)
"""Offsets a step of the search compares at once."""


@triton.jit
def tile_of(offsets_ptr, slot, B, T, TILE: tl.constexpr):
    """First token and token count of a slot's tile; the count is 0 or less where the slot is superfluous.

    Offsets that are wrong give wrong tiles, but of tokens 0 to T alone.
    """
    lane = tl.arange(0, FANOUT)
    low = slot * 0
    size = low + B
    while size > 1:  # sample in low .. low + size - 1, the last one whose slots begin at `slot` or before
        step = (size + FANOUT - 1) // FANOUT
        inside = lane * step < size
        at = tl.where(inside, low + lane * step, 0)
        begins = tl.load(offsets_ptr + at) // TILE + at
        passed = tl.sum(((begins <= slot) & inside).to(tl.int32)) - 1
        size = tl.minimum(step, size - passed * step)
        low += passed * step
    start = tl.load(offsets_ptr + low).to(tl.int64)
    end = tl.load(offsets_ptr + low + 1).to(tl.int64)
    first = start + (slot - start // TILE - low) * TILE
    count = tl.minimum(tl.minimum(end, T) - first, TILE).to(tl.int32)
    return first, tl.where(first < 0, 0, count)


@triton.jit
def load_tile(
    ptr, first, head, count,
    ROW: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """(TILE, PAD) of one head, zero past `count` tokens and WIDTH features."""
    row = tl.arange(0, TILE)[:, None]
    col = tl.arange(0, PAD)[None, :]
    mask = row < count
    if PAD != WIDTH:
        mask = mask & (col < WIDTH)
    return tl.load(ptr + first * ROW + head * HEAD + (row * ROW + col), mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, first, head, count, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile's rows before `count` and features before WIDTH into a contiguous (T, HEADS, WIDTH)."""
    TILE: tl.constexpr = value.shape[0]
    PAD: tl.constexpr = value.shape[1]
    row = tl.arange(0, TILE)[:, None]
    col = tl.arange(0, PAD)[None, :]
    mask = row < count
    if PAD != WIDTH:
        mask = mask & (col < WIDTH)
    at = ptr + (first * HEADS + head) * WIDTH + (row * (HEADS * WIDTH) + col)
    tl.store(at, rounded(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def exponentials(q, k, count, to_base_2, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """`exp(S - max)` of a tile, 0 where a key is not seen, and its row sums.

    A query past `count` sees everything: its sums are positive, and its Q and dO, which are zero, add nothing.
    """
    TILE: tl.constexpr = q.shape[0]
    query = tl.arange(0, TILE)[:, None]
    key = tl.arange(0, TILE)[None, :]
    s = product(q, tl.trans(k), "tf32") * to_base_2
    seen = key < count
    if BLOCK < TILE:
        seen = seen & (query // BLOCK == key // BLOCK)
    if CAUSAL:
        seen = seen & (key <= query)
    s = tl.where(seen | (query >= count), s, float("-inf"))
    e = tl.exp2(s - tl.max(s, axis=1)[:, None])
    return e, tl.sum(e, axis=1)


@kernel(do_not_specialize=["B", "T"])
def block_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, to_base_2, B, T,
    QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A query head of a tile. QT, QH: strides of a token and a head."""
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    shared = head // (H // G)
    first, count = tile_of(offsets_ptr, slot, B, T, TILE)
    if count > 0:
        q = load_tile(q_ptr, first, head, count, QT, QH, D, TILE, DP)
        k = load_tile(k_ptr, first, shared, count, KT, KH, D, TILE, DP)
        v = load_tile(v_ptr, first, shared, count, VT, VH, E, TILE, EP)
        e, total = exponentials(q, k, count, to_base_2, BLOCK, CAUSAL)
        out = product(rounded(e, v.dtype), v, "tf32") * (1.0 / total)[:, None]
        store_tile(out_ptr, out, first, head, count, H, E)


@triton.jit
def score_gradients(q, k, v, g, count, to_base_2, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """P and dS in the dtype they are multiplied in."""
    e, total = exponentials(q, k, count, to_base_2, BLOCK, CAUSAL)
    p = e * (1.0 / total)[:, None]
    dp = product(g, tl.trans(v), "tf32")
    delta = tl.sum(p * dp, axis=1)
    return rounded(p, q.dtype), rounded(p * (dp - delta[:, None]), q.dtype)


@kernel(do_not_specialize=["B", "T"])
def block_backward_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, to_base_2, scale, B, T,
    GT: tl.constexpr, GH: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr,
    VT: tl.constexpr, VH: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr,
    WANT_Q: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """A query head of a tile. dk, dv: (T, H, .), each query head's own."""
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    shared = head // (H // G)
    first, count = tile_of(offsets_ptr, slot, B, T, TILE)
    if count > 0:
        k = load_tile(k_ptr, first, shared, count, KT, KH, D, TILE, DP)
        v = load_tile(v_ptr, first, shared, count, VT, VH, E, TILE, EP)
        q = load_tile(q_ptr, first, head, count, QT, QH, D, TILE, DP)
        g = load_tile(g_ptr, first, head, count, GT, GH, E, TILE, EP)
        p, ds = score_gradients(q, k, v, g, count, to_base_2, BLOCK, CAUSAL)
        if WANT_V:
            store_tile(dv_ptr, product(tl.trans(p), g, "tf32"), first, head, count, H, E)
        if WANT_K:
            store_tile(dk_ptr, product(tl.trans(ds), q, "tf32") * scale, first, head, count, H, D)
        if WANT_Q:
            store_tile(dq_ptr, product(ds, k, "tf32") * scale, first, head, count, H, D)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Launch of one kernel, a program for every head of every tile."""

    warps: int
    options: dict[str, int] = field(default_factory=dict)


def forward_config(widest: int, tile: int) -> BlockConfig:
    """Four programs a multiprocessor at 128 columns, whose loads and products take turns by themselves: a program
    multiplies for about a microsecond, and the 256 KiB that the four move take eight.
    """
    return BlockConfig(warps=4 if tile * widest <= 64 * 128 else 8)


def backward_config(widest: int, tile: int, shared: bool) -> BlockConfig:
    """Three programs at 128 columns, which 168 registers allow. `shared`: stores of fp32 would spill there."""
    if tile * widest > 64 * 128:
        return BlockConfig(warps=8)
    return BlockConfig(warps=4, options={} if shared else {"maxnreg": 168})


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    scale: float,
    block: int = 64,
    causal: bool = False,
) -> Tensor:
    """Attention of every token to its block's tokens.

    Args:
        q: (T, H, D) bf16 or fp16.  k: (T, G, D), v: (T, G, E), H a multiple of G; D and E multiples of 16 up to
            256, for blocks of 128 up to 128. Rows that do not start on 16 bytes take a copy.
        offsets: (B + 1,) int32 or int64, ascending from 0 to T.  max_length: not used; the ops share a signature.
        scale: of the scores.  block: tokens of a block, 32, 64 or 128.  causal: a token sees no later one.

    Returns:
        (T, H, E) in the dtype of q.

    Raises:
        TypeError: for another dtype. ValueError: for shapes or a block that do not fit.
    """
    _check("block_forward", q, k, v, block)
    tokens, heads, width = q.shape
    groups, out_width = k.shape[1], v.shape[2]
    out = torch.empty(tokens, heads, out_width, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    tile = max(64, block)
    q, k, v = (aligned_rows(x) for x in (q, k, v))
    config = forward_config(max(_padded(width), _padded(out_width)), tile)
    slots = tokens // tile + offsets.numel() - 1
    block_forward_kernel[(slots * heads,)](
        q, k, v, out, offsets.contiguous(), scale * LOG2E, offsets.numel() - 1, tokens,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        heads, groups, width, out_width, _padded(width), _padded(out_width), block, tile, causal,
        num_warps=config.warps, enable_fp_fusion=True, **config.options,
    )  # fmt: skip
    return out


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    scale: float,
    block: int = 64,
    causal: bool = False,
    wanted: str = "qkv",
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of `forward`, in the dtype of q; (0,) where `wanted` lacks the letter.

    Args:
        grad_out: (T, H, E) in the dtype of q; the rest as in `forward`.
    """
    _check("block_backward", q, k, v, block)
    tokens, heads, width = q.shape
    groups, out_width = k.shape[1], v.shape[2]
    if grad_out.shape != (tokens, heads, out_width) or grad_out.dtype != q.dtype:
        raise ValueError(
            f"block_backward: got grad_out {tuple(grad_out.shape)} {grad_out.dtype}, expected"
            f" {(tokens, heads, out_width)} {q.dtype}"
        )
    shared = heads > groups  # then each query head's own dk and dv, to be added up in a fixed order
    shapes = q.shape, (tokens, heads, width), (tokens, heads, out_width)
    dq, dk, dv = (
        torch.empty(
            shape if letter in wanted else (0,),
            dtype=torch.float32 if shared and letter != "q" else q.dtype,
            device=q.device,
        )
        for letter, shape in zip("qkv", shapes)
    )
    if tokens and wanted:
        _launch_backward(grad_out, q, k, v, dq, dk, dv, offsets, scale, block, causal, wanted)
    if shared:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2).to(q.dtype) if x.dim() > 1 else x.to(q.dtype) for x in (dk, dv))
    return dq, dk, dv


def _launch_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    offsets: Tensor,
    scale: float,
    block: int,
    causal: bool,
    wanted: str,
) -> None:
    tile = max(64, block)
    g, q, k, v = (aligned_rows(x) for x in (grad_out, q, k, v))
    heads, width, out_width = q.shape[1], q.shape[2], v.shape[2]
    config = backward_config(max(_padded(width), _padded(out_width)), tile, heads > k.shape[1])
    slots = q.shape[0] // tile + offsets.numel() - 1
    block_backward_kernel[(slots * heads,)](
        g, q, k, v, dq, dk, dv, offsets.contiguous(), scale * LOG2E, float(scale), offsets.numel() - 1, q.shape[0],
        *g.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        heads, k.shape[1], width, out_width, _padded(width), _padded(out_width), block, tile, causal,
        "q" in wanted, "k" in wanted, "v" in wanted, num_warps=config.warps, enable_fp_fusion=True, **config.options,
    )  # fmt: skip


def aligned_rows(x: Tensor) -> Tensor:
    """X (T, H, D) with unit stride along D and rows that start on 16 bytes: a copy only if need be."""
    whole = x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.storage_offset() % 8 == 0
    return x if x.stride(2) == 1 and whole else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _padded(width: int) -> int:
    return next_power_of_2(width)


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{op}: got q {q.dtype}, k {k.dtype}, v {v.dtype}, expected bf16 or fp16; the reference backend takes any"
        )
    if block not in BLOCKS:
        raise ValueError(f"{op}: got block={block}, expected one of {BLOCKS}; the reference backend takes any")
    matches = k.shape == (q.shape[0], v.shape[1], q.shape[2]) and v.shape[0] == q.shape[0]
    if not matches or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{op}: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, expected (T, H, D), (T, G, D) and"
            " (T, G, E) with H a multiple of G"
        )
    most = 256 if block <= 64 else 128
    for name, width in (("D", q.shape[2]), ("E", v.shape[2])):
        if width % 16 or not 16 <= width <= most:
            raise ValueError(
                f"{op}: got {name}={width}, expected a multiple of 16 up to {most} for block={block}; the reference"
                " backend takes any"
            )
