"""The epilogue of dgrad before an activation, and the definition of the result in plain torch.

    grad_y = round(a @ b.T)                       dgrad of the projection after the activation
    dz     = round(grad_y * act'(z))              gated: dz_up = round(grad_y * act(gate)),
                                                  dz_gate = round(grad_y * up * act'(gate))
    dbias  = sum over the tokens of dz            fp32, of the rounded values
    MXFP8 of dz, row-wise and transposed          for dgrad and wgrad of the projection before
    MXFP8 of y = round(act(z)), transposed        for wgrad of the projection after

grad_y is rounded to `out_dtype`, as a kernel that stores it would, and everything after it is
`reference_ops.activation_backward` of that: fused equals unfused, bitwise. A kernel with this epilogue neither writes
nor reads grad_y: `2 * itemsize` bytes an element less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..reference import gemm
from ..reference_ops import GATED_KINDS, PLAIN_KINDS, activation_backward, check_kind
from ..spec import BLOCK, QuantSpec, Rounding


@dataclass(frozen=True, kw_only=True)
class Dact:
    """The steps after a dgrad.

    Attributes:
        activation: one of `reference_ops.PLAIN_KINDS` or `GATED_KINDS`.
        rowwise, colwise: specs of the MXFP8 of dz, rounded to nearest without a rotation; None for none.
        act_colwise: spec of the transposed MXFP8 of y, or None.
        emit_high: return dz. emit_bias: return its sums over the tokens.
    """

    activation: str
    rowwise: QuantSpec | None = None
    colwise: QuantSpec | None = None
    act_colwise: QuantSpec | None = None
    emit_high: bool = True
    emit_bias: bool = False

    def __post_init__(self) -> None:
        check_kind("dgrad epilogue", self.activation, (*PLAIN_KINDS, *GATED_KINDS))
        for name in ("rowwise", "colwise", "act_colwise"):
            spec: QuantSpec | None = getattr(self, name)
            if spec is not None and (spec.hadamard or spec.rounding is not Rounding.NEAREST):
                raise ValueError(
                    f"dgrad epilogue: got {name} {spec.short!r}, expected one rounded to nearest without a rotation; "
                    "store the gradient and quantize it"
                )

    def encode(self) -> str:
        """Short text, which crosses an op: `"gelu row=... col=... act=... bias"`; `decode` is its inverse."""
        specs = (("row", self.rowwise), ("col", self.colwise), ("act", self.act_colwise))
        words = [self.activation, *(f"{name}={spec.encode()}" for name, spec in specs if spec)]
        words += [name for name, asked in (("high", self.emit_high), ("bias", self.emit_bias)) if asked]
        return " ".join(words)

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> Dact:
        activation, *words = text.split(" ")
        specs = {name: QuantSpec.decode(spec) for name, spec in (w.split("=", 1) for w in words if "=" in w)}
        return Dact(
            activation=activation,
            rowwise=specs.get("row"),
            colwise=specs.get("col"),
            act_colwise=specs.get("act"),
            emit_high="high" in words,
            emit_bias="bias" in words,
        )


def gemm_dact(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    z: Tensor,
    gate: Tensor | None = None,
    *,
    epilogue: Dact,
    out_dtype: torch.dtype = torch.bfloat16,
    y_dtype: torch.dtype | None = None,
    a_tile: tuple[int, int] = (1, BLOCK),
    b_tile: tuple[int, int] = (1, BLOCK),
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, ...]:
    """The definition, on any device.

    Args:
        a: (M, N) float8, grad_output, a_scale (M, ceil(N / 32)).  b: (K, N) float8, the weight transposed, b_scale
            (K, ceil(N / 32)).
        z, gate: what `reference_ops.activation_backward` calls x and gate: (M, K), or z packed (M, 2 K) and no gate.
        out_dtype: what grad_y is rounded to. y_dtype: what the forward rounded y to; default that of z.
        a_tile, b_tile, swizzled, pad_tokens: as for `epilogue.gemm_epilogue`.

    Returns:
        The 14 outputs of `reference_ops.activation_backward`.
    """
    grad_y = gemm(a, a_scale, b, b_scale, out_dtype=out_dtype, a_tile=a_tile, b_tile=b_tile)
    return differentiate(grad_y, z, gate, epilogue=epilogue, y_dtype=y_dtype, swizzled=swizzled, pad_tokens=pad_tokens)


def differentiate(
    grad_y: Tensor,
    z: Tensor,
    gate: Tensor | None,
    *,
    epilogue: Dact,
    y_dtype: torch.dtype | None = None,
    swizzled: bool = False,
    pad_tokens: int = 1,
) -> tuple[Tensor, ...]:
    """The steps after grad_y, each on its own."""
    return activation_backward(
        grad_y, z, gate, epilogue.activation, epilogue.rowwise, epilogue.colwise, epilogue.emit_bias,
        epilogue.act_colwise, out_dtype=y_dtype, emit_high=epilogue.emit_high, swizzled=swizzled, pad_tokens=pad_tokens,
    )  # fmt: skip
