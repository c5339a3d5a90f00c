"""One autograd Function per op, its GEMMs written out as equations."""

from .activation import ActivationFunction, ActivationLinearFunction
from .attention import AttentionConfig, MXFP8AttentionFunction, attention
from .epilogue import EpilogueLinearFunction, GatedPairFunction, activation_of, activation_steps, is_emitted
from .gradient import MXGradient, gradient_spec
from .linear import LinearConfig, MXFP8LinearFunction
from .norm import NormConfig, NormFunction
from .projection import HeadsSpec, ProjectionFunction

__all__ = [
    "ActivationFunction",
    "ActivationLinearFunction",
    "AttentionConfig",
    "EpilogueLinearFunction",
    "GatedPairFunction",
    "HeadsSpec",
    "LinearConfig",
    "MXFP8AttentionFunction",
    "MXFP8LinearFunction",
    "MXGradient",
    "NormConfig",
    "NormFunction",
    "ProjectionFunction",
    "activation_of",
    "activation_steps",
    "attention",
    "gradient_spec",
    "is_emitted",
]
