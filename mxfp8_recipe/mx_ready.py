"""What a GEMM's epilogue already made of the activation that is still pending on its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ready:
    """MXFP8 of `act(z)`, row-wise, beside the z that it was made of.

    Attributes:
        kind: the activation, as `fused` names it.
        rowwise: encoded spec. dtype: what act(z) was rounded to before it was quantized.
        qdata, scale: (M, N) and its scales.
        versions: of z when it was made: what is written to z afterwards is not in here.
    """

    kind: str
    rowwise: str
    dtype: torch.dtype
    qdata: Tensor
    scale: Tensor
    versions: tuple[int, ...] = ()

    def serves(self, kind: str, rowwise: str, dtype: torch.dtype, versions: tuple[int, ...]) -> bool:
        """Whether this is what quantizing `kind` of z would give now."""
        return (self.kind, self.rowwise, self.dtype, self.versions) == (kind, rowwise, dtype, versions)
