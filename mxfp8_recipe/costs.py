"""Predicted time of a linear against BF16, from a few measured rates of each backend.

`reference` emulates: it pays for BF16's arithmetic plus the quantization; its rates are fitted to
`benchmarks/bench_cpu.py`. `hopper` multiplies FP8 at a rate that depends on how many elements along the
contraction share a scale; its rates are read off `benchmarks/results/h200.jsonl`. `blackwell` is a prediction that
nobody measured: public figures of a B200 times the share of such figures that an H200 reaches (docs/blackwell.md).
`triton` stands for other GPUs of that generation, of which the ratios are taken to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import BF16, LinearPrecision

DEFAULT_TOKENS = 4096
"""Tokens assumed for a layer no forward was recorded for."""

FAST_RECIPES = {"hopper": "mxfp8_hopper"}
"""The recipe that suits a backend's speed, where one does."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a backend does in a second, forward plus backward.

    Attributes:
        bf16_flops: of a BF16 GEMM. mx_flops: of an MXFP8 GEMM by elements along K that share a scale.
        quantized: elements quantized, one orientation.
        launch: seconds a GEMM costs besides.
    """

    bf16_flops: float
    mx_flops: dict[int, float]
    quantized: float
    launch: float = 0.0


_BLACKWELL = Rates(bf16_flops=1.5e15, mx_flops={32: 2.7e15, 128: 2.7e15}, quantized=2.3e12, launch=4e-6)
RATES = {
    "reference": Rates(bf16_flops=160e9, mx_flops={32: 160e9, 128: 160e9}, quantized=0.3e9),
    "hopper": Rates(bf16_flops=700e12, mx_flops={32: 410e12, 128: 1050e12}, quantized=1.4e12, launch=4e-6),
    "blackwell": _BLACKWELL,
    "triton": _BLACKWELL,
}


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


def linear_cost(
    tokens: int, in_features: int, out_features: int, precision: LinearPrecision | str, backend: str
) -> Cost:
    """Cost of a linear layer whose operands are all quantized on their own."""
    rates = RATES.get(backend, RATES["reference"])
    flops = 2.0 * tokens * in_features * out_features
    gemm = flops / rates.bf16_flops + rates.launch
    if not isinstance(precision, LinearPrecision):
        return Cost(3 * gemm, 3 * gemm)
    sizes = {
        "input": tokens * in_features,
        "weight": in_features * out_features,
        "grad_output": tokens * out_features,
    }
    planned = 0.0
    for part in (precision.fprop, precision.dgrad, precision.wgrad):
        if part == BF16:
            planned += gemm
            continue
        along = min(spec.tile[1] for spec in part.operands)
        planned += flops / rates.mx_flops[along] + rates.launch
        planned += sum(sizes[name] for name in type(part).model_fields) / rates.quantized
    return Cost(3 * gemm, planned)
