"""Which steps a backend's GEMMs take into their epilogue, and on what evidence.

A step moves into an epilogue where that was measured to pay, or where the backend has no other use for the kernel that
could do it; a backend without a line in here that says so computes every step in a kernel of its own, with the same
bits. The plan and the report say which it is and why. `benchmarks/bench_gemm.py` measures the kernels and
`benchmarks/bench_linear.py` whole blocks with steps planned and not; a row in `benchmarks/results` comes before a step
in here.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = ("activation", "dact", "residual", "gated")
"""An activation and MXFP8 out; its derivative after a dgrad; a residual added to a projection; a gated pair."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a backend does.

    Attributes:
        steps: of `STEPS`, those it takes into an epilogue.
        why: the evidence, or what is missing.
        is_gemm: the kernel with an epilogue sums as the one without does. Where it does not, moving a layer from one to
            the other changes its bits, so only a recording made before the first step may plan it.
        rows_alone: its MXFP8 out is in tiles of one row.
        pair_along: features under one scale, at most, in the MXFP8 out of a gated pair.
        missing: why the other steps are kernels of their own.
    """

    steps: frozenset[str] = frozenset()
    why: str
    is_gemm: bool = True
    rows_alone: bool = False
    pair_along: int = 128
    missing: str = ""


_DOT_SCALED = Choice(
    steps=frozenset({"activation", "residual", "gated"}),
    why="predicted, never measured: each saves a pass over memory (docs/blackwell.md)",
    is_gemm=False,
    rows_alone=True,
    pair_along=32,
    missing="it has no kernel for the derivative of an activation, for tiles of several rows, and for gated pairs in "
    "tiles of 128",
)
CHOICES = {
    "reference": Choice(steps=frozenset(STEPS), why="plain torch: an epilogue is its steps one by one, at no gain"),
    # Blocks on an H200 with an epilogue, forward and backward, took 0.98 (GELU) and 1.00 (SwiGLU) of the speed without.
    # Why: `fused/gemm/_hopper_epilogue_kernel.py`.
    "hopper": Choice(why="measured: an epilogue takes the GEMM about the time it saves, so kernels of their own stay"),
    "blackwell": _DOT_SCALED,
    "triton": _DOT_SCALED,
}


def epilogue_choice(backend: str) -> Choice:
    """What `backend` does."""
    return CHOICES.get(backend, Choice(why=f"backend {backend} has no kernel with an epilogue"))
