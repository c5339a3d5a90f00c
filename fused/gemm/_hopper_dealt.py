"""What epilogues make of sums in registers, whose columns are dealt to threads in blocks of 32.

wgmma deals the columns of its result to the four threads of a row two at a time, so a block of 32, which shares a
scale, would lie in four threads. TMA therefore puts the rows of b into shared memory in another order
(`hopper_epilogue.dealt`), such that a thread gets whole blocks:

    blocks: thread t has columns 32 t .. 32 t + 31, one block; its amax takes no exchange, its qdata two stores

Sums are the same to the bit: which column a sum stands in changes nothing in it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .._device import fp8_quad, pack, scale_byte, unpack
from .._staged import halves_max, mul_bf16x2, reinterpret
from ._gluon import barrier, tma_store


@gluon.jit
def larger_magnitude(a, b):
    """Of two bf16 each the larger magnitude with some sign; NaN if either is."""
    text: gl.constexpr = "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def block_amax(w):
    """Bits of the largest magnitudes (64, blocks) of words (64, blocks, 16)."""
    return halves_max(gl.reduce(w, 2, larger_magnitude) & 0x7FFF7FFF)


@gluon.jit
def over_row(m):
    """The largest of a row's blocks, for each block."""
    return gl.expand_dims(gl.max(m, axis=1), 1).broadcast_to((64, m.shape[1]))


@gluon.jit
def quantize_words(w, inv, E5: gl.constexpr):
    """Words (64, blocks, 16) of bf16 by bits of inverse scales (64, blocks) to qdata, words (64, 8 blocks)."""
    even, odd = gl.split(w.reshape([64, w.shape[1], 8, 2]))
    f = (inv & -0x10000) | ((inv >> 16) & 0xFFFF)
    f = gl.expand_dims(gl.convert_layout(f, gl.SliceLayout(2, even.type.layout), assert_trivial=True), 2)
    a, b = unpack(mul_bf16x2(even, f), tl.bfloat16)
    c, d = unpack(mul_bf16x2(odd, f), tl.bfloat16)
    return fp8_quad(a, b, c, d, E5).reshape([64, w.shape[1] * 8])


@gluon.jit
def words_of(acc, bias, BLOCKS: gl.constexpr, BIAS: gl.constexpr):
    """Sums (64, 32 BLOCKS), and a bias, as words (64, BLOCKS, 16) of bf16."""
    if BIAS:
        acc += gl.expand_dims(bias, 0)
    lo, hi = gl.split(acc.reshape([64, BLOCKS, 16, 2]))
    return pack(lo, hi, tl.bfloat16)


@gluon.jit
def stage(desc, buffer, words, row, col):
    """Store words (64, n) by TMA through a buffer, when all that was stored before has been read from it."""
    W: gl.constexpr = words.shape[1]
    view = reinterpret(buffer, gl.int32, [64, W], gl.NVMMASharedLayout(128 if W >= 32 else 64, 32, 2))
    tma.store_wait(0)
    barrier()
    view.store(words)
    fence_async_shared()
    barrier()
    tma_store(desc, [row, col], view)


@gluon.jit
def store_bytes(inv, s_ptr, row, block, M, blocks):
    """Scale bytes (64, n) of rows from `row` on to columns from `block` on of an (M, blocks) matrix."""
    byte = scale_byte(inv).to(gl.uint8)
    r = row + gl.arange(0, 64, gl.SliceLayout(1, byte.type.layout))
    c = block + gl.arange(0, inv.shape[1], gl.SliceLayout(0, byte.type.layout))
    at = s_ptr + gl.expand_dims(r.to(gl.int64) * blocks, 1) + gl.expand_dims(c, 0)
    gl.store(at, byte, mask=gl.expand_dims(r < M, 1) & gl.expand_dims(c < blocks, 0))
