"""How the six GEMMs of attention are quantized: a frozen value with a short text form.

As for `QuantSpec`, the text is what crosses the custom-op boundary; `AttentionSpec.decode` is its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from ..spec import BLOCK, QuantSpec, Rounding

GEMMS = ("qk", "pv", "dv", "dp", "dq", "dk")
ALONG_SEQUENCE = ("pv", "dv", "dq", "dk")
"""GEMMs that contract over keys or queries, so that their blocks lie along the sequence."""

Pair = tuple[QuantSpec, QuantSpec] | None
"""Specs of a GEMM's two operands, or None for a GEMM in high precision."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Quantization of each GEMM of attention; None leaves a GEMM in high precision.

    Attributes:
        qk: (query, key), contraction head dim.     pv: (probs, value), contraction keys.
        dv: (probs, grad_output), queries.          dp: (grad_output, value), head dim.
        dq: (grad_scores, key), keys.               dk: (grad_scores, query), queries.
        mix_masked: let blocks and tiles span positions that a mask hides from each other.
    """

    qk: Pair = None
    pv: Pair = None
    dv: Pair = None
    dp: Pair = None
    dq: Pair = None
    dk: Pair = None
    mix_masked: bool = False

    @property
    def mixes_rows(self) -> bool:
        """Some tile spans several queries or keys that its GEMM does not sum over."""
        by_head = [spec for pair in (self.qk, self.dp) if pair for spec in pair]
        scores = [pair[0] for pair in (self.dq, self.dk) if pair]
        return any(spec.tile[0] > 1 for spec in (*by_head, *scores))

    @property
    def mixes_weights(self) -> bool:
        """Some tile of what `pv` and `dv` multiply spans several rows: it counts where those weights have an amax."""
        return any(pair[0].tile[0] > 1 for pair in (self.pv, self.dv) if pair)

    @property
    def stochastic(self) -> bool:
        pairs = (getattr(self, name) for name in GEMMS)
        return any(spec.rounding is Rounding.STOCHASTIC for pair in pairs if pair for spec in pair)

    @property
    def is_high(self) -> bool:
        """Every GEMM runs in high precision."""
        return all(getattr(self, name) is None for name in GEMMS)

    def block(self, gemm: str) -> int:
        """Elements along the contraction that share a scale in either operand of `gemm`."""
        pair = getattr(self, gemm)
        return max(spec.tile[1] for spec in pair) if pair else BLOCK

    def encode(self) -> str:
        parts = []
        for name in GEMMS:
            pair = getattr(self, name)
            parts.append("" if pair is None else ",".join(spec.encode() for spec in pair))
        return ";".join([*parts, "mix" if self.mix_masked else ""])

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> AttentionSpec:
        *parts, mix = text.split(";")
        pairs = {name: _pair(part) for name, part in zip(GEMMS, parts)}
        return AttentionSpec(**pairs, mix_masked=mix == "mix")  # pyright: ignore[reportArgumentType]


def _pair(text: str) -> Pair:
    if not text:
        return None
    first, second = text.split(",")
    return QuantSpec.decode(first), QuantSpec.decode(second)


assert tuple(f.name for f in fields(AttentionSpec))[:-1] == GEMMS
