"""The namespace of our torch custom ops.

A custom op is one opaque node to `torch.compile`, so eager and compiled code run the same bits. `qdata` and
`scale` cross it as uint8 storage: mixed-precision wrappers cast float tensors, and FP8 ones with them. An
output nobody asked for is an empty (0,) tensor. Specs cross encoded, `""` for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..fused.replay import launches_seen
from ..fused.scale_layout import swizzled_numel
from ..fused.spec import BLOCK, QuantSpec
from .table import PLAIN, Layout

NAMESPACE = "mxfp8_recipe"
_EVERY_DEVICE = "CompositeExplicitAutograd"
_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an op from its schema, its implementation on every device, and its shapes; the callable op."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    if schema.count("Tensor", schema.index("->")) > 1:
        kernel = _with_distinct(kernel)
    _library.impl(name, kernel, _EVERY_DEVICE)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    @wraps(kernel)
    def call(*args: Any) -> Any:
        return kernel(*args) if not torch.compiler.is_compiling() and launches_seen() else op(*args)

    return call


def _with_distinct(kernel: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    @wraps(kernel)
    def run(*args: Any) -> tuple[Tensor, ...]:
        return tuple(distinct(kernel(*args)))

    return run


def distinct(outputs: Iterable[Tensor]) -> list[Tensor]:
    """An op's outputs, no two the same object, as torch requires: one empty tensor may stand for several."""
    found = list(outputs)
    if len(set(map(id, found))) == len(found):
        return found
    seen = set()
    for i, output in enumerate(found):
        if id(output) in seen:
            found[i] = output.new_empty(0)
        seen.add(id(output))
    return found


def decode(text: str) -> QuantSpec | None:
    """The spec an op got as text."""
    return QuantSpec.decode(text) if text else None


def without_padding(quantized: Sequence[Tensor], tokens: int, layout: Layout) -> tuple[Tensor, ...]:
    """`(qdata, scale, qdata_t, scale_t)` as a kernel gave them, with `qdata_t` the (cols, tokens) part of its rows."""
    qdata, scale, qdata_t, scale_t = quantized
    if layout.row_bytes > 1 and qdata_t.dim() == 2 and qdata_t.shape[1] > tokens:
        qdata_t = qdata_t[:, :tokens]
    return qdata, scale, qdata_t, scale_t


def fake_quantized(
    x: Tensor,
    rowwise: str,
    colwise: str,
    rows: Any = None,
    cols: Any = None,
    layout: Layout = PLAIN,
    *,
    row_bytes: int = 1,
) -> tuple[Tensor, ...]:
    """Shapes of `(qdata, scale, qdata_t, scale_t)` of a (rows, cols) matrix, by default that of `x`.

    `row_bytes`: the layout's, for an op whose outputs are `without_padding`.
    """
    rows, cols = x.shape[0] if rows is None else rows, x.shape[1] if cols is None else cols

    def orientation(wanted: str, outer: Any, along: Any) -> tuple[Tensor, Tensor]:
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8)
        blocks = (along + BLOCK - 1) // BLOCK
        shape = (swizzled_numel(outer, blocks),) if layout.swizzled else (outer, blocks)
        return x.new_empty(outer, along, dtype=torch.uint8), x.new_empty(shape, dtype=torch.uint8)

    tokens = -(-rows // layout.pad_tokens) * layout.pad_tokens
    *whole, qdata_t, scale_t = (*orientation(rowwise, rows, cols), *orientation(colwise, cols, tokens))
    if colwise and row_bytes > 1:
        qdata_t = x.new_empty_strided((cols, tokens), (-(-tokens // row_bytes) * row_bytes, 1), dtype=torch.uint8)
    return (*whole, qdata_t, scale_t)
