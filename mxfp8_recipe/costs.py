"""Predicted time of a layer against BF16, from a few measured rates.

The reference backend emulates: it pays for BF16's arithmetic plus the quantization. Its two rates are fitted
to the linear benchmark of the CPU (`benchmarks/bench_cpu.py`); the ratio depends on them only through their
quotient.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import BF16, LinearPrecision

DEFAULT_TOKENS = 4096
"""Tokens assumed for a layer no forward was recorded for."""

_REFERENCE_FLOPS = 160e9
_REFERENCE_QUANTIZE = 0.3e9


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of forward plus backward in BF16 and in the planned precision."""

    bf16: float
    planned: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bf16 + other.bf16, self.planned + other.planned)

    @property
    def ratio(self) -> float:
        """Above 1: faster than BF16."""
        return self.bf16 / self.planned if self.planned else 1.0


def linear_cost(tokens: int, in_features: int, out_features: int, precision: LinearPrecision | str) -> Cost:
    """Cost of a linear layer on the reference backend."""
    gemm = 2.0 * tokens * in_features * out_features / _REFERENCE_FLOPS
    sizes = {
        "input": tokens * in_features,
        "weight": in_features * out_features,
        "grad_output": tokens * out_features,
    }
    planned = 3 * gemm
    if isinstance(precision, LinearPrecision):
        for part in (precision.fprop, precision.dgrad, precision.wgrad):
            if part != BF16:
                planned += sum(sizes[name] for name in type(part).model_fields) / _REFERENCE_QUANTIZE
    return Cost(3 * gemm, planned)
