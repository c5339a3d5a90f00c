"""Norms that can hand their output on in MXFP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..autograd import NormConfig
from ..functional import mxfp8_norm
from ..functional.common import DTYPES, layer_name
from ..mx_edge import edge_of
from .nested import is_nested, on_values


@dataclass(frozen=True)
class NormModuleConfig:
    """Where a norm module keeps what, and what it computes.

    Attributes:
        norm: the norm itself, with what its fused edge emits.
        weight, bias: names of the parameters, None for none.
        weight_offset: added to the weight (1 for norms that store it zero-centered).
        promotes: the result has the promoted dtype of input and weight, as written-out norms give;
            else the input's, fp32 under CUDA autocast, as torch's norms give.
    """

    norm: NormConfig
    weight: str | None = "weight"
    bias: str | None = None
    weight_offset: float = 0.0
    promotes: bool = False

    @property
    def description(self) -> str:
        return f"emits {self.norm.rowwise or 'nothing quantized'}"


class MXFP8Norm(nn.Module):
    """Any layer or RMS norm over the last dim, under whatever names its parameters have."""

    original_class: ClassVar[type[nn.Module]] = nn.Module
    mxfp8_config: NormModuleConfig

    def forward(self, input: Tensor) -> Any:
        if is_nested(input):
            return on_values(self, input)
        config = self.mxfp8_config
        weight = getattr(self, config.weight) if config.weight else None
        bias = getattr(self, config.bias) if config.bias else None
        dtype = _dtype(input, weight, config)
        if dtype not in DTYPES:
            raise TypeError(
                f"{layer_name(self, '', type(self).__name__)}: got {dtype}, expected float32, bfloat16 or float16; "
                "convert the model to one of them, or revert(model) before it is converted"
            )
        if weight is not None and config.weight_offset:
            weight = weight.float() + config.weight_offset  # near 1, half precision would lose the stored digits
        return mxfp8_norm(input, weight, bias, config=config.norm, dtype=dtype, edge=edge_of(self))

    def extra_repr(self) -> str:
        own = self.original_class.extra_repr(self)
        return ", ".join(filter(None, (own, self.mxfp8_config.description)))


def _dtype(input: Tensor, weight: Tensor | None, config: NormModuleConfig) -> torch.dtype:
    if config.promotes:
        return input.dtype if weight is None else torch.promote_types(input.dtype, weight.dtype)
    if input.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return input.dtype
