"""What a GEMM's epilogue already made of the activation that is still pending on its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ready:
    """MXFP8 of `act(z)`, or `act(gate) * z`, row-wise, beside the z and gate that it was made of.

    Attributes:
        kind: the activation, as `fused` names it.
        rowwise: encoded spec. dtype: what that was rounded to before it was quantized.
        qdata, scale: (M, N) and its scales.
        versions: of z and gate when it was made: what is written to them afterwards is not in here.
    """

    kind: str
    rowwise: str
    dtype: torch.dtype
    qdata: Tensor
    scale: Tensor
    versions: tuple[int, ...] = ()

    def serves(self, kind: str, rowwise: str, dtype: torch.dtype, versions: tuple[int, ...]) -> bool:
        """Whether this is what quantizing that would give now."""
        return (self.kind, self.rowwise, self.dtype, self.versions) == (kind, rowwise, dtype, versions)
