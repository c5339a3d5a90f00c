"""Device code in Gluon that jagged attention's kernels for Hopper share: rows to and from shared memory.

What says where a tile lies is `_tiles`'s. A tile that a program keeps, and every block it walks over,
is 64 or 32 rows of one head, moved by TMA; rows past a sample's end in a kept tile stay by themselves. A sample shorter
than a block is read row by row and is one block, zero below its end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gemm._gluon import barrier, tma_load
from ._tiles import block_start


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
def load_keys(
    k_desc, v_desc, k_smem, v_smem, full, i, there, k0, Lk, head,
    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy the i-th block of keys and values, if there."""
    stage = i % STAGES
    row = k0 + block_start(i, Lk, BN)
    mbarrier.expect(full.index(stage), 2 * BN * D * 2, pred=there)
    tma_load(k_desc, [row, head * D], full.index(stage), k_smem.index(stage), pred=there)
    tma_load(v_desc, [row, head * D], full.index(stage), v_smem.index(stage), pred=there)


@gluon.jit
def without_others(x, s0, first_key, Lk, masked, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of BN keys from s0 on: -inf for keys before `first_key` and from Lk on. masked: there are such."""
    if masked:
        s = (s0 + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT)))[None, :]
        x = gl.where((s >= first_key) & (s < Lk), x, -float("inf"))
    return x
