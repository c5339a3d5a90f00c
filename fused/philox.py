"""Counter-based random bits (Philox4x32-10, Salmon et al., SC 2011), identical in torch and in Triton.

A draw depends on the seed, the stream and the logical element index alone: not on the tile a kernel
happens to use, not on the order of evaluation. Recomputation and resumption therefore repeat it.
Element `i` takes word `i % 4` of the counter `(i // 4 low, i // 4 high, stream, 0)` under the key
`(seed low, seed high)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _mul_hi_lo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    product = a * b  # wraps modulo 2**64, which leaves all 64 bits of a 32 x 32 product right
    return (product >> 32) & _MASK, product & _MASK


def random_bits(count: int, seed: Tensor, stream: int = 0) -> Tensor:
    """Random 32-bit words for elements `0 .. count - 1`.

    Args:
        count: number of words.
        seed: int64 scalar tensor (any shape with one element), on the device of the result.
        stream: separates draws of different tensors under one seed, 0 <= stream < 2**32.

    Returns:
        (count,) int64, each in `[0, 2**32)`.
    """
    index = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    counter = [index & _MASK, index >> 32, torch.full_like(index, stream), torch.zeros_like(index)]
    key = [seed.reshape(()) & _MASK, (seed.reshape(()) >> 32) & _MASK]
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(counter[0], _MULTIPLIERS[0])
        hi1, lo1 = _mul_hi_lo(counter[2], _MULTIPLIERS[1])
        counter = [hi1 ^ counter[1] ^ key[0], lo1, hi0 ^ counter[3] ^ key[1], lo0]
        key = [(key[0] + _WEYL[0]) & _MASK, (key[1] + _WEYL[1]) & _MASK]
    return torch.stack(counter, dim=-1).reshape(-1)[:count]
