"""FLOPs of the ops of `jagged`, for `torch.utils.flop_counter`.

    forward   2 (D + E) H sum(Lq * Lk)       4 D H sum(Lq * Lk) where D = E
    backward  2 (3 D + 2 E) H sum(Lq * Lk)   2.5 times that

The sum is over the samples, read from the offsets. Fake tensors hold no lengths: there it is `Tq * Tk / B`, that of
samples of equal length, which for self-attention is the least it can be. Causality and windows are not subtracted, as
in torch's own formulas. Block attention sums the squares of its blocks' lengths.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def pairs(q: Tensor, k: Tensor, q_offsets: Tensor | None, k_offsets: Tensor) -> Any:
    """Pairs of a query and a key of one sample; without q_offsets every row of q is in each sample."""
    if q_offsets is None:
        return q.shape[0] * k.shape[0]
    if _has_no_values(k_offsets):
        return q.shape[0] * k.shape[0] // max(k_offsets.shape[0] - 1, 1)
    return int((q_offsets.long().diff() * k_offsets.long().diff()).sum())


def pairs_in_blocks(q: Tensor, offsets: Tensor, block: int) -> Any:
    """Pairs of two tokens of one block."""
    if _has_no_values(offsets):
        return q.shape[0] * block
    lengths = offsets.long().diff()
    return int((lengths // block * block**2 + (lengths % block) ** 2).sum())


def _has_no_values(offsets: Tensor) -> bool:
    return isinstance(offsets, FakeTensor | FunctionalTensor) or offsets.device.type == "meta"


def _forward(q: Tensor, v: Tensor, count: Any) -> Any:
    return 2 * q.shape[1] * count * (q.shape[2] + v.shape[2])


def _backward(q: Tensor, v: Tensor, count: Any) -> Any:
    return 2 * q.shape[1] * count * (3 * q.shape[2] + 2 * v.shape[2])


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *args: Any, out_val: Any = None
) -> Any:
    """Of `jagged_forward` and `generalized_forward`."""
    return _forward(q, v, pairs(q, k, q_offsets, k_offsets))


def jagged_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    *args: Any, out_val: Any = None,
) -> Any:  # fmt: skip
    """Of `jagged_backward`."""
    return _backward(q, v, pairs(q, k, q_offsets, k_offsets))


def generalized_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    *args: Any, out_val: Any = None,
) -> Any:  # fmt: skip
    """Of `generalized_backward`."""
    return _backward(q, v, pairs(q, k, q_offsets, k_offsets))


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, quantized: Any, seed: Any, spec: str,
    scale: float, block: int, *args: Any, out_val: Any = None,
) -> Any:  # fmt: skip
    """Of `block_forward`."""
    return _forward(q, v, pairs_in_blocks(q, offsets, block))


def block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, quantized: Any, seed: Any,
    spec: str, scale: float, block: int, *args: Any, out_val: Any = None,
) -> Any:  # fmt: skip
    """Of `block_backward`."""
    return _backward(q, v, pairs_in_blocks(q, offsets, block))
