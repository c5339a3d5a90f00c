"""Jagged batches that attention must get right: odd lengths, empty samples, and row sums that cancel.

One case is the lengths of queries and keys of every sample and the widths of heads; `tensors` draws its operands.
Everything is drawn on the CPU from a fixed seed and moved, so that every device sees the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class JaggedCase:
    """Lengths and widths of one batch.

    Attributes:
        name: the test id.
        q_lengths, k_lengths: of each sample, of equal number; for `block_forward` the same.
        heads, groups: of q, and of k and v; groups divides heads.
        dim, value_dim: of q and k, and of v.
    """

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    heads: int = 2
    groups: int = 2
    dim: int = 32
    value_dim: int = 32

    def __str__(self) -> str:
        return self.name

    @property
    def max_q(self) -> int:
        return max(self.q_lengths, default=0)

    @property
    def max_k(self) -> int:
        return max(self.k_lengths, default=0)


@dataclass(frozen=True)
class JaggedTensors:
    """Operands of one call: q (Tq, H, D), k (Tk, G, D), v (Tk, G, E), grad_out (Tq, H, E), offsets (B + 1,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    max_q: int
    max_k: int

    @property
    def layout(self) -> tuple[Tensor, Tensor, int, int]:
        """`q_offsets, k_offsets, max_q, max_k`, as every function takes them after q, k, v."""
        return self.q_offsets, self.k_offsets, self.max_q, self.max_k

    def sample(self, index: int) -> tuple[slice, slice]:
        """Where a sample's queries and its keys lie."""
        (q0, q1), (k0, k1) = (o[index : index + 2].tolist() for o in (self.q_offsets, self.k_offsets))
        return slice(q0, q1), slice(k0, k1)


ODD = (0, 1, 31, 33, 64, 65)
"""Lengths on both sides of a block of 32 and of a tile of 64, with an empty and a single-token sample."""

SELF_CASES = (
    JaggedCase(name="odd", q_lengths=ODD, k_lengths=ODD),
    JaggedCase(name="odd-gqa", q_lengths=(65, 0, 33, 1), k_lengths=(65, 0, 33, 1), heads=4, groups=2),
    JaggedCase(name="single-sample", q_lengths=(97,), k_lengths=(97,)),
    JaggedCase(name="single-token", q_lengths=(1,), k_lengths=(1,)),
    JaggedCase(name="all-empty", q_lengths=(0, 0, 0), k_lengths=(0, 0, 0)),
    JaggedCase(name="no-sample", q_lengths=(), k_lengths=()),
    JaggedCase(name="ends-empty", q_lengths=(0, 0, 40, 0), k_lengths=(0, 0, 40, 0)),
    JaggedCase(name="wide-values", q_lengths=(33, 64), k_lengths=(33, 64), dim=16, value_dim=64),
)
"""Self-attention: the queries of a sample are its keys."""

CROSS_CASES = (
    JaggedCase(name="odd-cross", q_lengths=ODD, k_lengths=ODD[::-1]),
    JaggedCase(name="odd-cross-gqa", q_lengths=(33, 0, 65, 1), k_lengths=(1, 31, 64, 0), heads=4, groups=1),
    JaggedCase(name="many-queries", q_lengths=(193, 130, 0), k_lengths=(3, 1, 5)),
    JaggedCase(name="many-keys", q_lengths=(2, 1, 0, 3), k_lengths=(193, 130, 7, 64)),
    JaggedCase(name="no-keys", q_lengths=(5, 33), k_lengths=(0, 0)),
    JaggedCase(name="no-queries", q_lengths=(0, 0), k_lengths=(5, 33)),
)
"""Lq != Lk: queries without keys (their output is 0), keys without queries (their gradient is 0)."""

CASES = SELF_CASES + CROSS_CASES

LONG_CASES = (
    JaggedCase(name="long", q_lengths=(200, 1, 63, 64, 65, 129, 0, 300), k_lengths=(200, 1, 63, 64, 65, 129, 5, 300)),
    JaggedCase(
        name="long-cross", q_lengths=(200, 1, 63, 300, 65, 129, 0, 70), k_lengths=(100, 500, 64, 63, 1, 129, 5, 0)
    ),
    JaggedCase(
        name="long-gqa", q_lengths=(200, 1, 40, 64, 0, 300), k_lengths=(210, 3, 63, 64, 5, 290), heads=4, groups=2
    ),
)
"""Several blocks of 64 a sample, and samples on both sides of one: for kernels that run on a GPU alone."""

MASKS: dict[str, dict[str, bool | int]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 7},
    "causal-window": {"causal": True, "window": 40},
    "itself": {"window": 0},
}
"""Keyword arguments `causal` and `window`, by name."""


def offsets_of(
    lengths: tuple[int, ...], device: str | torch.device = "cpu", dtype: torch.dtype = torch.int32
) -> Tensor:
    """(B + 1,) offsets, the first 0, of the samples' lengths."""
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(device=device, dtype=dtype)


def tensors(
    case: JaggedCase,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    offsets_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> JaggedTensors:
    """Operands of `case`, standard normal."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    total_q, total_k = sum(case.q_lengths), sum(case.k_lengths)
    return JaggedTensors(
        q=draw(total_q, case.heads, case.dim),
        k=draw(total_k, case.groups, case.dim),
        v=draw(total_k, case.groups, case.value_dim),
        grad_out=draw(total_q, case.heads, case.value_dim),
        q_offsets=offsets_of(case.q_lengths, device, offsets_dtype),
        k_offsets=offsets_of(case.k_lengths, device, offsets_dtype),
        max_q=case.max_q,
        max_k=case.max_k,
    )


def cancellation(
    *,
    peak: float,
    lengths: tuple[int, ...] = (1, 33, 65),
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> JaggedTensors:
    """Self-attention in which every visible score lies within about 2 of `peak`, at scale `dim ** -0.5`.

    With `peak` far below 0 a kernel that lets zero-filled keys take part (their score is 0) and subtracts their
    exponentials from the row sum loses every bit: the row maximum it sees is 0, the true exponentials `e^peak` vanish
    beside the padding's. Every length leaves some of a tile of 32, 64 or 128 keys to padding. The result does not
    depend on `peak` but for rounding: softmax is invariant to a shift.
    """
    case = JaggedCase(name="cancellation", q_lengths=lengths, k_lengths=lengths, dim=dim, value_dim=dim)
    drawn = tensors(case, dtype=torch.float64, seed=seed)
    # q = (size, noise), k = (+-size, noise): q . k * dim^-0.5 = peak + noise
    size = (abs(peak) * dim**0.5) ** 0.5
    q, k = drawn.q.clamp(-1.0, 1.0), drawn.k.clamp(-1.0, 1.0)
    q[..., 0], k[..., 0] = size, size if peak > 0 else -size
    moved = {
        name: x.to(device=device, dtype=dtype)
        for name, x in {"q": q, "k": k, "v": drawn.v, "grad_out": drawn.grad_out}.items()
    }
    return replace(drawn, q_offsets=drawn.q_offsets.to(device), k_offsets=drawn.k_offsets.to(device), **moved)


CANCELLATION_PEAKS = (-80.0, -30.0, 0.0, 30.0)
"""True row maxima: at -80, e^peak is a denormal of fp32; at -30 it is below the last bit of 1; 0 and 30 are safe."""
