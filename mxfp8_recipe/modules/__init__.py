"""Module classes: they hold a config and call `functional`; no maths here."""

from .activation import ActivationConfig, MXFP8Activation
from .attention import (
    MXFP8MultiheadAttention,
    ReplaceSDPA,
    SDPAOwner,
    disable_fast_paths,
    is_slow_encoder,
    multihead_problem,
)
from .linear import MXFP8Linear, MXFP8LinearTransposed
from .norm import MXFP8Norm, NormModuleConfig
from .swapped import is_swapped, restore, swap_class

__all__ = [
    "ActivationConfig",
    "MXFP8Activation",
    "MXFP8Linear",
    "MXFP8LinearTransposed",
    "MXFP8MultiheadAttention",
    "MXFP8Norm",
    "NormModuleConfig",
    "ReplaceSDPA",
    "SDPAOwner",
    "disable_fast_paths",
    "is_slow_encoder",
    "is_swapped",
    "multihead_problem",
    "restore",
    "swap_class",
]
