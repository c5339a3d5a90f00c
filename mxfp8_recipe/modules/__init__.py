"""Module classes: they hold a config and call `functional`; no maths here."""

from .activation import ActivationConfig, MXFP8Activation
from .linear import MXFP8Linear, MXFP8LinearTransposed
from .norm import MXFP8Norm, NormModuleConfig
from .swapped import Swapped, is_swapped, restore, swap_class

__all__ = [
    "ActivationConfig",
    "MXFP8Activation",
    "MXFP8Linear",
    "MXFP8LinearTransposed",
    "MXFP8Norm",
    "NormModuleConfig",
    "Swapped",
    "is_swapped",
    "restore",
    "swap_class",
]
