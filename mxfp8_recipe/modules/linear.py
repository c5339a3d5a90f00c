"""`nn.Linear`, and layers that compute the same from a transposed weight, in MXFP8."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..autograd import LinearConfig
from ..config import LinearPrecision
from ..functional import mxfp8_linear, pending
from .swapped import describe_config


class MXFP8Linear(nn.Linear):
    """`nn.Linear` whose GEMMs run in MXFP8 per its config; the parameters are an ordinary linear's."""

    original_class: ClassVar[type[nn.Module]] = nn.Linear
    mxfp8_config: LinearConfig

    def forward(self, input: Tensor) -> Any:
        output = mxfp8_linear(input, self.weight, self.bias, config=self.mxfp8_config)
        return pending(output, self.__dict__.get("mxfp8_edge"))

    def extra_repr(self) -> str:
        return f"{self.original_class.extra_repr(self)}, {describe_config(self.mxfp8_config)}"

    @classmethod
    def from_float(cls, linear: nn.Linear, precision: LinearPrecision | None = None) -> MXFP8Linear:
        """A new module that shares `linear`'s parameters; `linear` itself is untouched."""
        with torch.device("meta"):
            module = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        module.weight, module.bias = linear.weight, linear.bias
        module.mxfp8_config = LinearConfig.of(precision or LinearPrecision())
        return module.train(linear.training)


class MXFP8LinearTransposed(nn.Module):
    """For layers that hold the weight as (in_features, out_features) and compute `input @ weight + bias`."""

    original_class: ClassVar[type[nn.Module]] = nn.Module
    mxfp8_config: LinearConfig
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Any:
        bias = getattr(self, "bias", None)
        output = mxfp8_linear(input, self.weight.t(), bias, config=self.mxfp8_config)
        return pending(output, self.__dict__.get("mxfp8_edge"))

    extra_repr = MXFP8Linear.extra_repr
