"""What a GEMM may do to its sum before storing it, and the definition of the result in plain torch.

    z = round(a @ b.T + bias)               the projection's output
    y = round(act(z))                       with an activation
    y = round(act(z_gate) * z_up)           with a gated one: b holds two weights, see `interleave`
    y = round(y + residual)                 with a residual
    y = round(rotate(z))                    with RoPE, per head, see `rotate`
    qdata, scale = quantize(y)              row-wise, for a contraction over the features
    qdata_t, scale_t = quantize(y, -2)      transposed, for a contraction over the tokens

Every step rounds to `out_dtype`, as separate kernels that store their result would: fused equals unfused, bitwise.
A kernel with an epilogue moves `itemsize` bytes an element less for each value that only the next step reads.

A gated epilogue multiplies one matrix whose rows come from two: `group` of gate, the same `group` of up, and so on. The
default, 32, keeps a block of the output's features, which share a scale, in one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import gemm
from ..reference_ops import (
    GATED_KINDS,
    PLAIN_KINDS,
    activation_quantize,
    check_kind,
    check_same,
    empty,
    quantize_both,
)
from ..scale_layout import swizzle_scale, unswizzle_scale
from ..spec import BLOCK, QuantSpec, Rounding

GROUP = BLOCK
"""Rows of gate, and then of up, that follow one another in an interleaved operand."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of the heads that lie side by side in a row of z.

    Attributes:
        head_dim: features of a head, even.
        interleaved: pairs are features 2 i and 2 i + 1; else i and i + head_dim / 2.
        columns: how many of the leading features are rotated, whole heads; 0: all. The others pass.
    """

    head_dim: int
    interleaved: bool = False
    columns: int = 0

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2 or self.columns % self.head_dim:
            raise ValueError(
                f"rope: got head_dim {self.head_dim} and {self.columns} columns, expected an even head_dim and whole "
                "heads"
            )

    def encode(self) -> str:
        return f"{self.head_dim}:{'pairs' if self.interleaved else 'halves'}:{self.columns}"

    @classmethod
    def decode(cls, text: str) -> Rope:
        head_dim, order, columns = text.split(":")
        return cls(head_dim=int(head_dim), interleaved=order == "pairs", columns=int(columns))


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The steps after a GEMM.

    Attributes:
        activation: one of `reference_ops.PLAIN_KINDS` or `GATED_KINDS`, or None.
        group: rows of one weight that follow one another in b, for a gated activation.
        rope: the rotation, or None; not with an activation or a residual.
        rowwise, colwise: specs of the MXFP8 outputs, rounded to nearest without a rotation; None for none.
        emit_high: return y. emit_sum: return z, which the backward of an activation reads.
    """

    activation: str | None = None
    group: int = GROUP
    rope: Rope | None = None
    rowwise: QuantSpec | None = None
    colwise: QuantSpec | None = None
    emit_high: bool = True
    emit_sum: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None:
            check_kind("epilogue", self.activation, (*PLAIN_KINDS, *GATED_KINDS))
        if self.rope is not None and self.activation is not None:
            raise ValueError(f"epilogue: got {self.activation} and rope, expected one of them")
        for name in ("rowwise", "colwise"):
            spec: QuantSpec | None = getattr(self, name)
            if spec is not None and (spec.hadamard or spec.rounding is not Rounding.NEAREST):
                raise ValueError(
                    f"epilogue: got {name} {spec.short!r}, expected one rounded to nearest without a rotation; store "
                    "the output and quantize it"
                )

    @property
    def gated(self) -> bool:
        """Whether b holds two weights, and y has half as many features as b has rows."""
        return self.activation in GATED_KINDS

    def encode(self) -> str:
        """Short text, which crosses an op: `"gelu sum row=e4m3:1x32:rceil:nearest:0"`; `decode` is its inverse."""
        words = [self.activation or "none"]
        words += [f"group={self.group}"] if self.group != GROUP else []
        words += [f"rope={self.rope.encode()}"] if self.rope else []
        words += [name for name, asked in (("high", self.emit_high), ("sum", self.emit_sum)) if asked]
        words += [f"row={self.rowwise.encode()}"] if self.rowwise else []
        words += [f"col={self.colwise.encode()}"] if self.colwise else []
        return " ".join(words)

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> Epilogue:
        activation, *words = text.split(" ")
        given = dict(word.split("=", 1) for word in words if "=" in word)
        return Epilogue(
            activation=None if activation == "none" else activation,
            group=int(given.get("group", GROUP)),
            rope=Rope.decode(given["rope"]) if "rope" in given else None,
            rowwise=QuantSpec.decode(given["row"]) if "row" in given else None,
            colwise=QuantSpec.decode(given["col"]) if "col" in given else None,
            emit_high="high" in words,
            emit_sum="sum" in words,
        )


class Outputs(NamedTuple):
    """What a GEMM with an epilogue gives; what nobody asked for is (0,).

    Attributes:
        y: (M, N) of `out_dtype`; N is the features of y, half the rows of b for a gated activation.
        z: (M, N) of `out_dtype`, before the activation; for a gated one what its result multiplies.
        gate: (M, N) of `out_dtype`, what a gated activation applies to.
        qdata, scale, qdata_t, scale_t: as `reference_ops` says.
    """

    y: Tensor
    z: Tensor
    gate: Tensor
    qdata: Tensor
    scale: Tensor
    qdata_t: Tensor
    scale_t: Tensor


class Rotation(NamedTuple):
    """Tables of RoPE.

    Attributes:
        cos, sin: (L, head_dim / 2) fp32.
        positions: (M,) int64 rows of the tables, or None: row m of z has position m modulo L.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None


def gemm_epilogue(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epilogue: Epilogue,
    rotation: Rotation | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    a_tile: tuple[int, int] = (1, BLOCK),
    b_tile: tuple[int, int] = (1, BLOCK),
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> Outputs:
    """The definition, on any device.

    Args:
        a: (M, K) float8, a_scale (M, ceil(K / 32)).  b: (R, K) float8, b_scale (R, ceil(K / 32)): R = N, or 2 N rows
            interleaved in groups for a gated activation.
        bias: (R,) or None, added in fp32, interleaved as b is. residual: (M, N) of `out_dtype` or None.
        rotation: tables for `epilogue.rope`.
        a_tile, b_tile: tiles of the operands as they are here (`interleaved_tile`), as `reference.gemm` takes them.
        swizzled, pad_tokens: layout of the MXFP8 outputs, as `reference_ops` says.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    tiles = {"a_tile": a_tile, "b_tile": b_tile}
    if not epilogue.gated:
        z, gate = gemm(a, a_scale, b, b_scale, bias, out_dtype=out_dtype, **tiles), None
    else:  # two products, each as the layer alone computes it
        halves = [(None, None) if t is None else split(t, epilogue.group) for t in (b, b_scale, bias)]
        gate, z = (
            gemm(a, a_scale, w, s, added, out_dtype=out_dtype, **tiles)  # pyright: ignore[reportArgumentType]
            for w, s, added in zip(*halves)
        )
    return finish(
        z, residual, gate=gate, epilogue=epilogue, rotation=rotation, swizzled=swizzled, pad_tokens=pad_tokens
    )


def finish(
    z: Tensor,
    residual: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    epilogue: Epilogue,
    rotation: Rotation | None = None,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> Outputs:
    """The steps after z (and gate), each on its own."""
    check_steps(epilogue, residual, rotation)
    y = z
    if epilogue.activation is not None:
        y = activation_quantize(z, gate, epilogue.activation, z.dtype, None, None, True)[0]
    if epilogue.rope is not None and rotation is not None:
        y = rotate(z, epilogue.rope, rotation)
    if residual is not None:
        check_same("epilogue", "residual", residual, z)
        y = (y.float() + residual.float()).to(z.dtype)
    nothing = empty(z, z.dtype)
    if y is z and epilogue.emit_high and epilogue.emit_sum:
        y = z.clone()  # an op's outputs are tensors of their own
    return Outputs(
        y if epilogue.emit_high else nothing,
        z if epilogue.emit_sum else nothing,
        gate if epilogue.emit_sum and gate is not None else nothing,
        *quantize_both(y, epilogue.rowwise, epilogue.colwise, swizzled=swizzled, pad_tokens=pad_tokens),
    )


def check_steps(epilogue: Epilogue, residual: Tensor | None, rotation: Rotation | None) -> None:
    """Raise ValueError where the tensors given are not those that the steps need."""
    if (epilogue.rope is None) != (rotation is None):
        raise ValueError(f"epilogue: got rope {epilogue.rope} with tables {rotation}, expected both or neither")
    if epilogue.rope is None or rotation is None:
        return
    if residual is not None:
        raise ValueError("epilogue: got rope and a residual, expected one of them")
    cos, sin, half = rotation.cos, rotation.sin, epilogue.rope.head_dim // 2
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != half or {cos.dtype, sin.dtype} != {torch.float32}:
        raise ValueError(
            f"epilogue: got cos {tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype}, expected "
            f"(positions, {half}) float32 each"
        )


def check_rope(rope: Rope, rotation: Rotation, rows: int, features: int) -> None:
    """Raise ValueError where a (rows, features) z does not hold the heads, or positions are not one a row."""
    if features % rope.head_dim or rope.columns > features:
        raise ValueError(
            f"rope: got {features} features, expected whole heads of {rope.head_dim}, {rope.columns} or more"
        )
    at = rotation.positions
    if at is not None and (tuple(at.shape) != (rows,) or at.dtype != torch.int64):
        raise ValueError(f"rope: got positions {tuple(at.shape)} {at.dtype}, expected {(rows,)} int64")


def rotate(z: Tensor, rope: Rope, rotation: Rotation) -> Tensor:
    """RoPE of the rounded z (M, N): `(u cos - v sin, u sin + v cos)` of each pair (u, v), in fp32, rounded once.

    Each product is rounded before the sum: no fused multiply-add.
    """
    check_rope(rope, rotation, *z.shape)
    columns, at = rope.columns or z.shape[1], rotation.positions
    if at is None:
        at = torch.arange(z.shape[0], device=z.device) % rotation.cos.shape[0]
    cos, sin = rotation.cos[at].unsqueeze(1), rotation.sin[at].unsqueeze(1)  # (M, 1, D / 2), the same for every head
    heads = z[:, :columns].float().unflatten(1, (-1, rope.head_dim))
    if rope.interleaved:
        u, v = heads[..., 0::2], heads[..., 1::2]
    else:
        u, v = heads.chunk(2, dim=-1)
    turned = u * cos - v * sin, u * sin + v * cos
    rotated = torch.stack(turned, dim=-1).flatten(-2) if rope.interleaved else torch.cat(turned, dim=-1)
    return torch.cat((rotated.flatten(1).to(z.dtype), z[:, columns:]), dim=1)


def interleave(gate: Tensor, up: Tensor, group: int = GROUP) -> Tensor:
    """Qdata, plain scales or bias (F, ...) of two weights as the (2 F, ...) of one, in groups of rows; a copy.

    The quantized weights are interleaved, not the weights: each keeps the tiles that it was quantized in.
    """
    if gate.shape != up.shape or gate.shape[0] % group:
        raise ValueError(
            f"interleave: got {tuple(gate.shape)} and {tuple(up.shape)}, expected one shape, rows a multiple of {group}"
        )
    pairs = gate.unflatten(0, (-1, group)), up.unflatten(0, (-1, group))
    return torch.stack(pairs, dim=1).flatten(0, 2)


def interleave_scale(
    gate: Tensor, up: Tensor, features: int, blocks: int, group: int = GROUP, *, swizzled: bool = False
) -> Tensor:
    """Scales of two weights of `features` rows and `blocks` bytes a row, plain or in the 128x4 layout, as one's."""
    if not swizzled:
        return interleave(gate, up, group)
    plain = (unswizzle_scale(scale, features, blocks) for scale in (gate, up))
    return swizzle_scale(interleave(*plain, group))


def split(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """The inverse of `interleave`: `(gate, up)`."""
    if x.shape[0] % (2 * group):
        raise ValueError(f"interleave: got {x.shape[0]} rows, expected a multiple of {2 * group}, gate and up in turn")
    gate, up = x.unflatten(0, (-1, 2, group)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def interleaved_tile(tile: tuple[int, int], group: int = GROUP) -> tuple[int, int]:
    """`(across, along)` within which scale bytes are equal once weights quantized in `tile` are interleaved."""
    return min(tile[0], group), tile[1]
