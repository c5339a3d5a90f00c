"""MXFP8 of a jagged tensor: elements stay at their positions, blocks begin at the start of each sample.

    along the head dim   qdata (T, H, D)   scale (T, H, ceil(D / 32))
    along the tokens     qdata (T, H, D)   scale (T // 32 + B, H, D)

A sample's blocks along the tokens have their scales at `offset // 32 + b` for sample b and on: that is a row more than
`T / 32` a sample at most, needs no prefix sum over the samples, and no two samples share a row. Rows between them are
zero. A tile of 32x32 is one scale for both orientations, so that `qdata` is the same in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import BLOCK, QuantSpec
from .gemms import Quantized
from .jagged_layout import Jagged
from .reference import quantize_heads


def quantize_jagged(
    x: Tensor,
    offsets: Tensor,
    max_length: int,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    seed: Tensor | None = None,
    stream: int = 0,
    block: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize (T, H, D) along D, along the tokens or both; tiles cross neither a sample nor a head.

    Args:
        offsets: (B + 1,) int32 or int64. max_length: no sample is longer.
        rowwise, colwise: along D, along the tokens; None for an orientation not wanted.
        seed, stream: of stochastic rounding, whose bits are keyed on sample, head, position and dim.
        block: cut each sample into blocks of this many tokens, which tiles do not cross either; 0: do not.

    Returns:
        `(qdata, scale, qdata_t, scale_t)`, uint8, as the module says; empty (0,) for an orientation without a spec.
    """
    layout = Jagged.of(offsets, max_length, len(x))
    layout = layout.blocks(block) if block else layout
    padded = layout.pad_heads(x)
    qdata, scale, qdata_t, scale_t = quantize_heads(padded, rowwise, colwise, seed, stream)
    if rowwise is not None:
        qdata, scale = layout.pack_heads(qdata), layout.pack_heads(scale)
    if colwise is not None:
        qdata_t = layout.pack_heads(qdata_t.transpose(-1, -2))
        scale_t = scale_rows(layout).pack_heads(scale_t.transpose(-1, -2))
    return qdata, scale, qdata_t, scale_t


def scale_rows(layout: Jagged) -> Jagged:
    """Where the scales of blocks along the tokens lie."""
    samples = torch.arange(len(layout.starts), device=layout.starts.device)
    return Jagged(
        starts=layout.starts // BLOCK + samples,
        lengths=-(-layout.lengths // BLOCK),
        length=-(-layout.length // BLOCK),
        total=layout.total // BLOCK + len(layout.starts),
    )


def padded_operand(name: str, quantized: Quantized, layout: Jagged, broadcast_q: bool = False) -> Quantized:
    """A packed operand as dense attention reads it: padded, contraction last; an empty one as it is.

    With `broadcast_q` the operands of q hold one sample, which every sample of `layout` reads.
    """
    qdata, scale = quantized
    if qdata.dim() < 2:
        return quantized
    if broadcast_q and name.startswith("query"):
        one = Jagged.repeated(1, layout.length, qdata.device)
        qdata, scale = _contraction_last(name, qdata, scale, one)
        samples = len(layout.starts)
        return qdata.expand(samples, -1, -1, -1), scale.expand(samples, -1, -1, -1)
    return _contraction_last(name, qdata, scale, layout)


def _contraction_last(name: str, qdata: Tensor, scale: Tensor, layout: Jagged) -> Quantized:
    if not name.endswith("_t"):
        return layout.pad_heads(qdata), layout.pad_heads(scale)
    along = layout.pad_heads(qdata).transpose(-1, -2), scale_rows(layout).pad_heads(scale).transpose(-1, -2)
    return along[0].contiguous(), along[1].contiguous()
