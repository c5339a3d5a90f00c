"""Linear layers that do in their GEMM's epilogue what the next layers would do with their output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..autograd import LinearConfig, activation_of
from ..mx_ready import Ready
from ..mx_tensor import Edge, Pending, Traveling, versions_of
from .linear import multiply, tell
from .listening import LinearCall
from .producers import activation


def mxfp8_activated_linear(
    input: Tensor | Traveling,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: LinearConfig,
    edge: Edge,
    owner: Any = None,
) -> Pending:
    """`mxfp8_linear` before an activation: its output z, and beside it MXFP8 of `act(z)` for the next linear.

    Args:
        input, weight, bias, config, owner: as for `mxfp8_linear`.
        edge: what its epilogue does.

    Returns:
        (..., out_features) in the compute dtype: z itself for whoever reads it, and for the activation that the edge
        names a value that is quantized already.
    """
    z, qdata, scale = multiply(input, weight, bias, config, edge.steps)
    tell(LinearCall(owner, "", input, weight, z, config, z.dtype))
    kind, rowwise = activation_of(edge.steps)
    ready = Ready(kind, rowwise, z.dtype, qdata, scale, versions_of(z))
    return Pending(z, None, "identity", activation, edge, ready=ready)
