"""One autograd Function per op, its GEMMs written out as equations."""

from .linear import LinearConfig, MXFP8LinearFunction

__all__ = ["LinearConfig", "MXFP8LinearFunction"]
