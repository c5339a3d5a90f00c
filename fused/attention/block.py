"""BlockAttention: softmax attention inside blocks of 64 tokens that start at a sample's start.

Within a block of one head, `P = softmax(scale Q K^T)`, `O = P V`; no token sees another block, so a tile holds whole
rows of P and neither the running maximum nor the log-sum-exp of flash attention exists. Backward computes P again from
Q and K, has `dP = dO V^T` beside it, and therefore `delta = rowsum(P dP)` without reading O:
`dS = P (dP - delta)`, `dV = P^T dO`, `dQ = scale dS K`, `dK = scale dS^T Q`.

Forward reads Q, K, V and writes O, 8 bytes an element in bf16; backward reads Q, K, V, dO and writes dQ, dK, dV, 14.
At 64 keys a query that is 32 FLOPs a byte forward and 46 backward: memory bound, so a program does no more than keep
loads in flight. It takes one tile of tokens, whose heads lie next to each other, and copies those of the next head to
shared memory while it multiplies those of this one.

Nobody counts the blocks. Sample i owns the slots from `offsets[i] // TILE + i`: as many as it has tiles, or one more,
`T // TILE + B` in all, known without asking the device. Programs of superfluous slots end at once.
"""


from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from ..launch import next_power_of_2
from ._products import add_product, product, rounded

BLOCKS = (32, 64, 128)
LOG2E = 1.4426950408889634
SCALARS = ["B", "QT8", "QH8", "KT8", "KH8", "VT8", "VH8", "GT8", "GH8"]
FANOUT = tl.constexpr(128)
"""Offsets a step of the search compares at once."""


@triton.jit
def tile_of(offsets_ptr, slot, B, TILE: tl.constexpr):
    """First token and token count of a slot's tile; the count is 0 or less where the slot is superfluous."""
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
    return first, tl.minimum(end - first, TILE).to(tl.int32)


@triton.jit
def load_tile(ptr, first, head, count, STRIDE_T, STRIDE_H, WIDTH: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr):
    """(TILE, PAD) of one head, zero past `count` tokens and WIDTH features."""
    row = tl.arange(0, TILE)[:, None]
    col = tl.arange(0, PAD)[None, :]
    mask = row < count
    if PAD != WIDTH:
        mask = mask & (col < WIDTH)
    return tl.load(ptr + first * STRIDE_T + head * STRIDE_H + row * STRIDE_T + col, mask=mask, other=0.0)


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
    at = ptr + (first * HEADS + head) * WIDTH + row * (HEADS * WIDTH) + col
    tl.store(at, rounded(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def exponentials(q, k, count, to_base_2, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """`exp(S - max)` of a tile, 0 where a key is not seen, and its row sums.

    A query past `count` sees everything: its sums are positive, and its Q and dO, which are zero, add nothing.
    """
    TILE: tl.constexpr = q.shape[0]
    query = tl.arange(0, TILE)[:, None]
    key = tl.arange(0, TILE)[None, :]
    s = product(q, tl.trans(k), PRECISION) * to_base_2
    seen = key < count
    if BLOCK < TILE:
        seen = seen & (query // BLOCK == key // BLOCK)
    if CAUSAL:
        seen = seen & (key <= query)
    s = tl.where(seen | (query >= count), s, float("-inf"))
    e = tl.exp2(s - tl.max(s, axis=1)[:, None])
    return e, tl.sum(e, axis=1)


@kernel(do_not_specialize=SCALARS)
def block_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, to_base_2, B, QT8, QH8, KT8, KH8, VT8, VH8,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """HEADS query heads of a tile. Strides come as eighths: says that rows start on 16 bytes."""
    slot = tl.program_id(0) // (H // HEADS)
    head0 = tl.program_id(0) % (H // HEADS) * HEADS
    first, count = tile_of(offsets_ptr, slot, B, TILE)
    for i in tl.range(0, tl.where(count > 0, HEADS, 0), num_stages=STAGES):
        head = head0 + i
        shared = head // (H // G)
        q = load_tile(q_ptr, first, head, count, QT8 * 8, QH8 * 8, D, TILE, DP)
        k = load_tile(k_ptr, first, shared, count, KT8 * 8, KH8 * 8, D, TILE, DP)
        v = load_tile(v_ptr, first, shared, count, VT8 * 8, VH8 * 8, E, TILE, EP)
        e, total = exponentials(q, k, count, to_base_2, BLOCK, CAUSAL, PRECISION)
        out = product(rounded(e, v.dtype), v, PRECISION) * (1.0 / total)[:, None]
        store_tile(out_ptr, out, first, head, count, H, E)


@triton.jit
def score_gradients(q, k, v, g, count, to_base_2, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """P and dS in the dtype they are multiplied in."""
    e, total = exponentials(q, k, count, to_base_2, BLOCK, CAUSAL, PRECISION)
    p = e * (1.0 / total)[:, None]
    dp = product(g, tl.trans(v), PRECISION)
    delta = tl.sum(p * dp, axis=1)
    return rounded(p, q.dtype), rounded(p * (dp - delta[:, None]), q.dtype)


@kernel(do_not_specialize=SCALARS)
def block_backward_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, to_base_2, scale, B,
    GT8, GH8, QT8, QH8, KT8, KH8, VT8, VH8,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, WANT_Q: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """HEADS key heads of a tile, each with the H / G query heads that share it."""
    SHARING: tl.constexpr = H // G
    slot = tl.program_id(0) // (G // HEADS)
    head0 = tl.program_id(0) % (G // HEADS) * HEADS
    first, count = tile_of(offsets_ptr, slot, B, TILE)
    for i in tl.range(0, tl.where(count > 0, HEADS, 0), num_stages=STAGES):
        shared = head0 + i
        k = load_tile(k_ptr, first, shared, count, KT8 * 8, KH8 * 8, D, TILE, DP)
        v = load_tile(v_ptr, first, shared, count, VT8 * 8, VH8 * 8, E, TILE, EP)
        if SHARING == 1:
            q = load_tile(q_ptr, first, shared, count, QT8 * 8, QH8 * 8, D, TILE, DP)
            g = load_tile(g_ptr, first, shared, count, GT8 * 8, GH8 * 8, E, TILE, EP)
            p, ds = score_gradients(q, k, v, g, count, to_base_2, BLOCK, CAUSAL, PRECISION)
            if WANT_V:
                dv = product(tl.trans(p), g, PRECISION)
                store_tile(dv_ptr, dv, first, shared, count, G, E)
            if WANT_K:
                dk = product(tl.trans(ds), q, PRECISION) * scale
                store_tile(dk_ptr, dk, first, shared, count, G, D)
            if WANT_Q:
                dq = product(ds, k, PRECISION) * scale
                store_tile(dq_ptr, dq, first, shared, count, H, D)
        else:
            dv_sum = tl.zeros((TILE, EP), tl.float32)
            dk_sum = tl.zeros((TILE, DP), tl.float32)
            for r in range(SHARING):
                head = shared * SHARING + r
                q = load_tile(q_ptr, first, head, count, QT8 * 8, QH8 * 8, D, TILE, DP)
                g = load_tile(g_ptr, first, head, count, GT8 * 8, GH8 * 8, E, TILE, EP)
                p, ds = score_gradients(q, k, v, g, count, to_base_2, BLOCK, CAUSAL, PRECISION)
                if WANT_V:
                    dv_sum = add_product(tl.trans(p), g, dv_sum, PRECISION)
                if WANT_K:
                    dk_sum = add_product(tl.trans(ds), q, dk_sum, PRECISION)
                if WANT_Q:
                    dq = product(ds, k, PRECISION) * scale
                    store_tile(dq_ptr, dq, first, head, count, H, D)
            if WANT_V:
                store_tile(dv_ptr, dv_sum, first, shared, count, G, E)
            if WANT_K:
                store_tile(dk_ptr, dk_sum * scale, first, shared, count, G, D)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A program takes `heads` heads of a tile one after another, of which `stages` are on their way or at work."""

    heads: int
    stages: int
    warps: int


def forward_config(heads: int, widest: int, tile: int, itemsize: int) -> BlockConfig:
    """As many programs as shared memory holds, of which each has a tile's Q, K and V under way."""
    held = 3 * tile * widest * itemsize
    return BlockConfig(heads=_divisor(heads, 4), stages=2 if 2 * held <= 100 << 10 else 1, warps=_warps(tile, widest))


def backward_config(heads: int, sharing: int, widest: int, tile: int, itemsize: int) -> BlockConfig:
    """`forward_config` for Q, K, V and dO. Where query heads share a key head, sums stay in registers meanwhile."""
    held = 4 * tile * widest * itemsize
    return BlockConfig(
        heads=_divisor(heads, 4 if sharing == 1 else 1),
        stages=2 if sharing == 1 and 2 * held <= 160 << 10 else 1,
        warps=_warps(tile, widest),
    )


def _warps(tile: int, widest: int) -> int:
    return 8 if tile * widest > 64 * 128 else 4


def _divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


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
        q: (T, H, D) bf16, fp16 or fp32.  k: (T, G, D), v: (T, G, E), H a multiple of G; D and E multiples of 16 up to
            256. Rows that do not start on 16 bytes take a copy.
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
    config = forward_config(heads, max(_padded(width), _padded(out_width)), tile, q.element_size())
    slots = tokens // tile + offsets.numel() - 1
    block_forward_kernel[(slots * (heads // config.heads),)](
        q, k, v, out, offsets, scale * LOG2E, offsets.numel() - 1, *_strides8(q), *_strides8(k), *_strides8(v),
        heads, groups, width, out_width, _padded(width), _padded(out_width), block, tile, causal, config.heads,
        config.stages, _precision(q), num_warps=config.warps,
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
    dq, dk, dv = (
        torch.empty(shape if letter in wanted else (0,), dtype=q.dtype, device=q.device)
        for letter, shape in zip("qkv", (q.shape, k.shape, v.shape))
    )
    if tokens == 0 or not wanted:
        return dq, dk, dv
    tile = max(64, block)
    g, q, k, v = (aligned_rows(x) for x in (grad_out, q, k, v))
    widest = max(_padded(width), _padded(out_width))
    config = backward_config(groups, heads // groups, widest, tile, q.element_size())
    slots = tokens // tile + offsets.numel() - 1
    block_backward_kernel[(slots * (groups // config.heads),)](
        g, q, k, v, dq, dk, dv, offsets, scale * LOG2E, scale, offsets.numel() - 1,
        *_strides8(g), *_strides8(q), *_strides8(k), *_strides8(v),
        heads, groups, width, out_width, _padded(width), _padded(out_width), block, tile, causal, config.heads,
        config.stages, _precision(q), "q" in wanted, "k" in wanted, "v" in wanted, num_warps=config.warps,
    )  # fmt: skip
    return dq, dk, dv


def aligned_rows(x: Tensor) -> Tensor:
    """X (T, H, D) with unit stride along D and rows that start on 16 bytes: a copy only if need be."""
    whole = x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.storage_offset() % 8 == 0
    return x if x.stride(2) == 1 and whole else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _strides8(x: Tensor) -> tuple[int, int]:
    return x.stride(0) // 8, x.stride(1) // 8


def _padded(width: int) -> int:
    return next_power_of_2(width)


def _precision(x: Tensor) -> str:
    """Products of fp32 in fp32; other dtypes have one way only."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: got q {q.dtype}, k {k.dtype}, v {v.dtype}, expected one of bf16, fp16 and fp32")
    if block not in BLOCKS:
        raise ValueError(f"{op}: got block={block}, expected one of {BLOCKS}; the reference backend takes any")
    matches = k.shape == (q.shape[0], v.shape[1], q.shape[2]) and v.shape[0] == q.shape[0]
    if not matches or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{op}: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, expected (T, H, D), (T, G, D) and"
            " (T, G, E) with H a multiple of G"
        )
    for name, width in (("D", q.shape[2]), ("E", v.shape[2])):
        if width % 16 or not 16 <= width <= 256:
            raise ValueError(
                f"{op}: got {name}={width}, expected a multiple of 16 up to 256; the reference backend takes any"
            )
