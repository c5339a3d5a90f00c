"""`nn.Linear`, and layers that compute the same from a transposed weight, in MXFP8."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..autograd import HeadsSpec, LinearConfig
from ..config import LinearPrecision
from ..functional import mxfp8_activated_linear, mxfp8_awaited_linear, mxfp8_linear, mxfp8_projection, pending
from ..mx_edge import Edge, edge_of, has_backward_hooks
from ..mx_tensor import Traveling
from .nested import is_nested, on_values
from .swapped import describe_config


class MXFP8Linear(nn.Linear):
    """`nn.Linear` whose GEMMs run in MXFP8 per its config; the parameters are an ordinary linear's."""

    original_class: ClassVar[type[nn.Module]] = nn.Linear
    mxfp8_config: LinearConfig

    def forward(self, input: Tensor) -> Any:
        return on_values(self, input) if is_nested(input) else _run(self, input, self.weight, self.bias)

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
        if is_nested(input):
            return on_values(self, input)
        return _run(self, input, self.weight.t(), getattr(self, "bias", None))

    extra_repr = MXFP8Linear.extra_repr


def _run(module: Any, input: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """The linear itself, and on an edge what its reader goes on with: heads, or a value an activation awaits."""
    if isinstance(input, Traveling) and has_backward_hooks(module):
        input.edge.close("a backward hook of its reader")
    edge = edge_of(module)
    if edge is not None and edge.emit is not None:
        parts = (HeadsSpec(weight.shape[0], edge.head_dim, *edge.emit),)
        heads = mxfp8_projection(input, weight, bias, config=module.mxfp8_config, parts=parts, edge=edge, owner=module)
        if heads is not None:
            return heads[0]
        edge = None
    if edge is not None and _is_watched(module, edge):
        edge = None
    if edge is not None and edge.in_epilogue and not _counts_no_writes():
        with_steps = mxfp8_awaited_linear if edge.residual or edge.pair else mxfp8_activated_linear
        return with_steps(input, weight, bias, config=module.mxfp8_config, edge=edge, owner=module)
    if edge is not None and (edge.then is not None or edge.residual):
        edge = None
    return pending(mxfp8_linear(input, weight, bias, config=module.mxfp8_config, owner=module), edge)


def _is_watched(module: Any, edge: Edge) -> bool:
    """Whether a hook needs the output to be a tensor, as it is off an edge; that ends the edge."""
    if edge.reader is not None and has_backward_hooks(edge.reader):
        edge.close("a backward hook of its reader")
    elif module._forward_hooks and (edge.then is not None or edge.residual):
        edge.close(f"a forward hook of {edge.producer or '(root)'}")
    elif edge.residual and any(container._forward_hooks for container in edge.containers):
        edge.close("a forward hook on its way")  # which may take away what the layer is computed from, as FSDP does
    return edge.closed


def _counts_no_writes() -> bool:
    """Whether nobody could tell that the output was written to after something was made of it."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
