"""Sums over a row that come out the same whichever kernel takes them, and the hand-over to those who need them.

A row is summed in chunks of 128 features: inside a chunk by lanes of one warp in a fixed order, then over the chunks by
an explicit pairwise tree. Kernels that differ in rows a program or in warps agree to the bit, which "fused equals
unfused" needs.

`announce` and `await_rows`: programs that sum the rows of a strip of 128 tokens run a fixed number of strips ahead,
in the same launch, of the programs that use the sums. The wait is then over before it begins, and what the first ones
read is still in the L2 cache when the second ones read it again. Summing programs never wait and have
lower ids, and hardware starts programs in order, so no one waits for a program that cannot start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import software_bf16
from .jit import kernel

CHUNK = tl.constexpr(128)


@triton.jit
def chunk_sums(x):
    """Sums of the chunks: (R, C / 2), a word's two values already added, to (R, C / 128)."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 64, 64)), axis=2)


@triton.jit
def over_chunk(x, C2: tl.constexpr):
    """(R, C2 / 64) values of chunks to the (R, C2) words of the row."""
    R: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (R, C2 // 64, 64)), (R, C2))


@triton.jit
def tree_sum(x, LOG2: tl.constexpr):
    """Sum over the last dim, of length 2**LOG2, pairing neighbors. x is 2-D."""
    R: tl.constexpr = x.shape[0]
    for k in tl.static_range(LOG2):
        even, odd = tl.split(tl.reshape(x, (R, 1 << (LOG2 - 1 - k), 2)))
        x = even + odd
    return tl.reshape(x, (R,))


@triton.jit
def chunk_count(NCP: tl.constexpr, K):
    """(1, NCP) features of each chunk, at least 1 so that it divides."""
    start = tl.arange(0, NCP)[None, :] * CHUNK
    return tl.minimum(tl.maximum(K - start, 1), CHUNK).to(tl.float32)


@triton.jit
def merge_stats(total, square, K, eps, LAYER: tl.constexpr, LOG2: tl.constexpr):
    """`(mean, rstd)` of each row from its chunks.

    rms: `square` holds sums of squares and `total` is not read. layer: `total` holds sums and `square` the sums of
    squares about the chunk's own mean, merged as Chan et al. (1983).
    """
    share = 1.0 / K.to(tl.float32)
    if LAYER:
        mean = tree_sum(total, LOG2) * share
        count = chunk_count(1 << LOG2, K)
        shift = total / count - mean[:, None]
        present = tl.arange(0, 1 << LOG2)[None, :] * CHUNK < K
        square = tl.where(present, square + count * (shift * shift), 0.0)
    else:
        mean = tl.zeros((square.shape[0],), tl.float32)
    return mean, tl.rsqrt(tree_sum(square, LOG2) * share + eps)


@triton.jit
def announce(counter_ptr, strip):
    """Say that this program's rows of the strip are done."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    tl.atomic_add(counter_ptr + strip, 1, sem="release", scope="gpu")


@triton.jit
def await_rows(counter_ptr, strip, programs):
    """Return once all `programs` of this strip have announced."""
    while tl.atomic_add(counter_ptr + strip, 0, sem="acquire", scope="gpu") < programs:
        pass
    tl.debug_barrier()


@kernel(do_not_specialize=[])
def sum_strips_kernel(partial_ptr, out_ptr, S, N, R: tl.constexpr, C: tl.constexpr):
    """(S, N) fp32 to (N,) sums over the first dim, in an order that depends on S alone, rounded once if at all."""
    cols = tl.program_id(0) * C + tl.arange(0, C)
    acc = tl.zeros((R, C), tl.float32)
    for start in range(0, S, R):
        rows = start + tl.arange(0, R)
        mask = (rows < S)[:, None] & (cols < N)[None, :]
        acc += tl.load(partial_ptr + rows[:, None].to(tl.int64) * N + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, axis=0)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        total = software_bf16(total).to(tl.int16).to(tl.bfloat16, bitcast=True)  # the interpreter's own cast truncates
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def row_stat(ptr, row0, rows, M):
    return tl.load(ptr + row0 + rows, mask=(row0 + rows) < M, other=0.0)


def sum_strips(partial: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(S, N) fp32 to (N,) of `dtype`: the second launch of every sum over tokens, without atomics."""
    strips, width = partial.shape
    out = torch.empty(width, dtype=dtype, device=partial.device)
    if width:
        sum_strips_kernel[(-(-width // 32),)](partial, out, strips, width, R=512, C=32, num_warps=8)
    return out
