"""Module classes: they hold a config and call `functional`; no maths here."""

from .linear import MXFP8Linear, MXFP8LinearTransposed
from .swapped import Swapped, is_swapped, restore, swap_class

__all__ = ["MXFP8Linear", "MXFP8LinearTransposed", "Swapped", "is_swapped", "restore", "swap_class"]
