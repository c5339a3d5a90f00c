"""Where the tokens of a jagged batch lie, and which pairs of them see each other.

    values (T, H, D)  <->  padded (B, H, length, D), length a Python int no sample exceeds

    t_i = i + Lk - Lq, s_j = j        the end of a sample's queries is aligned with the end of its keys
    causal: s <= t      window w: |t - s| <= w      together: 0 <= t - s <= w

The reference works on the padded form. It pads to the declared maximum rather than to the longest sample, so it needs
no value of the offsets on the host, and neither the values nor the lengths of other samples change a sample's bits.
Padding is written, not multiplied: NaN beside a sample never reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """Samples of a packed tensor.

    Attributes:
        starts, lengths: (B,) int64. length: of the padding. total: tokens of the packed tensor.
    """

    starts: Tensor
    lengths: Tensor
    length: int
    total: int

    @staticmethod
    def of(offsets: Tensor, length: int, total: int) -> Jagged:
        """From offsets (B + 1,) int32 or int64."""
        offsets = offsets.long()
        return Jagged(offsets[:-1], offsets.diff(), length, total)

    @staticmethod
    def repeated(samples: int, length: int, device: torch.device) -> Jagged:
        """`samples` samples of equal length."""
        lengths = torch.full((samples,), length, dtype=torch.int64, device=device)
        return Jagged(torch.arange(samples, device=device) * length, lengths, length, samples * length)

    def blocks(self, size: int) -> Jagged:
        """Each sample cut into blocks of `size` tokens from its start, as samples of their own; some are empty."""
        size = min(size, max(self.length, 1))
        begin = torch.arange(-(-self.length // size), device=self.starts.device) * size
        begin = torch.minimum(begin, self.lengths[:, None])
        lengths = (self.lengths[:, None] - begin).clamp(max=size)
        return Jagged((self.starts[:, None] + begin).flatten(), lengths.flatten(), size, self.total)

    @property
    def valid(self) -> Tensor:
        """(B, length) bool: a token, not padding."""
        return torch.arange(self.length, device=self.lengths.device) < self.lengths[:, None]

    def pad(self, values: Tensor) -> Tensor:
        """(T, ...) to (B, length, ...), 0 where there is no token."""
        shape = (*self.valid.shape, *values.shape[1:])
        if self.total == 0:
            return values.new_zeros(shape)
        index = self.starts[:, None] + torch.arange(self.length, device=values.device)
        found = values.index_select(0, index.clamp(0, self.total - 1).flatten()).view(shape)
        valid = self.valid.view(*self.valid.shape, *[1] * (values.dim() - 1))
        return torch.where(valid, found, found.new_zeros(()))

    def pack(self, padded: Tensor) -> Tensor:
        """(B, length, ...) to (T, ...): the inverse of `pad`; 0 where no sample lies."""
        where = self.starts[:, None] + torch.arange(self.length, device=padded.device)
        packed = padded.new_zeros(self.total + 1, *padded.shape[2:])
        packed[torch.where(self.valid, where, self.total).flatten()] = padded.flatten(
            0, 1
        )  # padding lands past the end
        return packed[:-1]

    def pad_heads(self, values: Tensor) -> Tensor:
        """(T, H, ...) to (B, H, length, ...)."""
        return self.pad(values).transpose(1, 2)

    def pack_heads(self, padded: Tensor) -> Tensor:
        """(B, H, length, ...) to (T, H, ...)."""
        return self.pack(padded.transpose(1, 2))


@dataclass(frozen=True)
class Pairs:
    """Queries and keys of the samples of one call, padded to (B, Lq, Lk)."""

    q: Jagged
    k: Jagged
    causal: bool = False
    window: int | None = None

    @property
    def relative(self) -> Tensor:
        """(B, Lq, Lk) int64: t - s."""
        device = self.q.lengths.device
        shift = (self.k.lengths - self.q.lengths)[:, None, None]
        return torch.arange(self.q.length, device=device)[:, None] - torch.arange(self.k.length, device=device) + shift

    @property
    def exist(self) -> Tensor:
        """(B, Lq, Lk) bool: neither is padding."""
        return self.q.valid[:, :, None] & self.k.valid[:, None, :]

    @property
    def in_reach(self) -> Tensor | None:
        """(B, Lq, Lk) bool: what causality and the window let through; None: everything."""
        if not self.causal and self.window is None:
            return None
        relative = self.relative
        seen = relative >= 0 if self.causal else torch.ones_like(relative, dtype=torch.bool)
        return seen if self.window is None else seen & (relative.abs() <= self.window)

    @property
    def hidden(self) -> Tensor:
        """(B, 1, Lq, Lk) bool: the pairs that do not take part."""
        reach = self.in_reach
        return ~(self.exist if reach is None else self.exist & reach).unsqueeze(1)

    @property
    def visible(self) -> Tensor | None:
        """(B, 1, Lq, Lk) bool for `along_sequence`: a mask hides pairs, padding does not; None: no mask."""
        reach = self.in_reach
        return None if reach is None else (reach | ~self.exist).unsqueeze(1)
