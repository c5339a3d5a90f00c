"""Device code in Gluon that jagged attention's kernels for Hopper share: rows to and from shared memory, and masks.

What says where a tile lies and what it sees is `_tiles`'s. A tile that a program keeps, and every block it walks over,
is 64 or 32 rows of one head, moved by TMA; rows past a sample's end in a kept tile stay by themselves. A sample shorter
than a block is read row by row and is one block, zero below its end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gemm._gluon import barrier


@gluon.jit
def some_rows(ptr, row, count, stride8, column, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """The first `count` of (ROWS, D) from `column` on, zero below; rows `8 * stride8` elements apart."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    stride = stride8.to(gl.int64) * 8
    at = ptr + row.to(gl.int64) * stride + column
    return gl.load(at + r.to(gl.int64) * stride + c, mask=r < count, other=0.0)


@gluon.jit
def store_some_rows(
    ptr, x, smem, row, count, heads, head, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The first `count` of (ROWS, D) to dense (T, heads, D), by way of shared memory that nothing else uses."""
    smem.store(x.to(ptr.dtype.element_ty))
    barrier()
    y = smem.load(LAYOUT)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    at = ptr + (row.to(gl.int64) * heads + head) * D
    gl.store(at + r.to(gl.int64) * (heads * D) + c, y, mask=r < count)


@gluon.jit
def seen(t, s, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which of the positions t of queries and s of keys, that broadcast against each other, see each other."""
    ahead = t - s
    if CAUSAL:
        some = ahead >= 0
    else:
        some = ahead == ahead
    if WINDOW:
        some = some & (ahead <= window)
        if not CAUSAL:
            some = some & (ahead >= -window)
    return some


@gluon.jit
def without_hidden(
    x, t0, s0, first_key, Lk, window, masked,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of BM queries from position t0 on and BN keys from s0 on: -inf where hidden, and for keys before
    `first_key` or from Lk on. masked: false where nothing is hidden.
    """
    if masked:
        s = (s0 + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT)))[None, :]
        some = (s >= first_key) & (s < Lk)
        if CAUSAL or WINDOW:
            t = (t0 + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT)))[:, None]
            some = some & seen(t, s, window, CAUSAL, WINDOW)
        x = gl.where(some, x, -float("inf"))
    return x
