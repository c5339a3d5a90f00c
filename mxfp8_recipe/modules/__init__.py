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
from .jagged import CrossAttention, HSTUAttention, JaggedMultiheadAttention, PooledAttention
from .jagged_core import JaggedAttention, MXFP8JaggedAttention, jagged_problem
from .linear import MXFP8Linear, MXFP8LinearTransposed
from .norm import MXFP8Norm, NormModuleConfig
from .swapped import is_swapped, restore, swap_class

__all__ = [
    "ActivationConfig",
    "CrossAttention",
    "HSTUAttention",
    "JaggedAttention",
    "JaggedMultiheadAttention",
    "MXFP8Activation",
    "MXFP8JaggedAttention",
    "MXFP8Linear",
    "MXFP8LinearTransposed",
    "MXFP8MultiheadAttention",
    "MXFP8Norm",
    "NormModuleConfig",
    "PooledAttention",
    "ReplaceSDPA",
    "SDPAOwner",
    "disable_fast_paths",
    "is_slow_encoder",
    "is_swapped",
    "jagged_problem",
    "multihead_problem",
    "restore",
    "swap_class",
]
