"""Sums over K whose columns are dealt to threads in blocks of 32, and what is made of them in registers.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .._device import fp8_quad, pack, scale_byte, unpack
from .._staged import halves_max, mul_bf16x2, reinterpret
from ._gluon import barrier, tma_store
from ._hopper_kernel import in_order, multiply


@gluon.jit
def accumulate(
    a_smem, b_smem, a_scale, b_scale, full, empty, after, i, K, steps,
    OWN: gl.constexpr, MT: gl.constexpr, MW: gl.constexpr, NB: gl.constexpr, BA: gl.constexpr, J: gl.constexpr,
    NS: gl.constexpr, HOLD: gl.constexpr, PASS: gl.constexpr, DEAL: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Two sums (64, 128) over all of K, with columns in order: of MW times 64 rows from OWN on, or of NB times 128
    columns; with one of each both are the same.

    HOLD: do not release the last step, beside whose operands the bias lies.
    PASS: arrive at `after` once every step is there. Whoever takes the next steps must not wait for one before: a
        barrier tells a phase only from the one before it, not from the one before that.
    """
    COLS: gl.constexpr = 2 if BA == 1 else BA
    acc0 = in_order(gl.zeros([64, 128], gl.float32, L), [64, 128 // COLS, COLS], DEAL)
    acc1 = acc0
    p = gl.zeros([64, 128], gl.float32, L)
    for kt in range(steps):
        s = i % NS
        mbarrier.wait(full.index(s), (i // NS) & 1)
        if PASS:
            mbarrier.arrive(after, count=1, pred=kt + 1 == steps)
        a = a_smem.index(s * MT + OWN)
        b = b_smem.index(s * NB).reshape([128, 128])
        for j in gl.static_range(J):
            acc0, p = multiply(acc0, p, K < 0, a, b, a_scale, b_scale, s * J + j, OWN, j, J, BA, MT, DEAL, 0)
            if MW == 2:
                a1 = a_smem.index(s * MT + OWN + 1)
                acc1, p = multiply(acc1, p, K < 0, a1, b, a_scale, b_scale, s * J + j, OWN + 1, j, J, BA, MT, DEAL, 0)
            if NB == 2:
                b1 = b_smem.index(s * NB + 1).reshape([128, 128])
                acc1, p = multiply(
                    acc1, p, K < 0, a, b1, a_scale, b_scale, s * J + j, OWN, j, J, BA, MT, DEAL, 128 // COLS
                )  # fmt: skip
        if HOLD:
            mbarrier.arrive(empty.index(s), count=1, pred=kt + 1 < steps)
        else:
            mbarrier.arrive(empty.index(s), count=1)
        i += 1
    return acc0.reshape([64, 128]), acc1.reshape([64, 128]), i


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
