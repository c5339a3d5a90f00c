"""One autograd Function per op, its GEMMs written out as equations."""

from .activation import ActivationFunction, ActivationLinearFunction
from .linear import LinearConfig, MXFP8LinearFunction
from .norm import NormConfig, NormFunction

__all__ = [
    "ActivationFunction",
    "ActivationLinearFunction",
    "LinearConfig",
    "MXFP8LinearFunction",
    "NormConfig",
    "NormFunction",
]
