"""Whether offsets say what the ops believe of them, found out without waiting for a GPU.

    offsets[0] = 0,   offsets[b] <= offsets[b + 1],   offsets[-1] = rows of the values,   no sample longer than declared

On a CPU every call looks. On a GPU a tensor seen for the first time (at this version, with these numbers) is copied to
pinned memory behind the kernels already queued, 4 or 8 bytes a sample; whichever later call finds the copy arrived
looks at it, and raises the error in the name of the op that was given the tensor. Nothing waits, so the op that got bad
offsets has run by then and its output means nothing. `check_offsets` waits, for a data pipeline under test; a caller
that has the offsets on the CPU as well hands them to the op and is told at once.

A graph under capture cannot be asked: a tensor first seen there is checked by the first call outside. Offsets that
change behind torch's back (a replayed graph writes them) keep the answer of their first check.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Claim:
    """What an op was told of an offsets tensor.

    Attributes:
        op, name: the op and its argument, for messages. total: rows of the values. longest: the declared maximum.
    """

    op: str
    name: str
    total: int
    longest: int

    def raise_for(self, offsets: Tensor, when: str = "") -> None:
        """Raise a ValueError that says what is wrong with offsets on the CPU; nothing where nothing is."""
        problem = self._problem(offsets.long())
        if problem:
            raise ValueError(f"{self.op}: {self.name}: {problem}{when}")

    def _problem(self, offsets: Tensor) -> str:
        lengths = offsets.diff()
        if int(offsets[0]) != 0:
            return f"got {int(offsets[0])} first, expected 0; offsets of lengths are 0 and their cumulative sums"
        if bool((lengths < 0).any()):
            at = int((lengths < 0).nonzero()[0])
            return f"got {int(offsets[at])} before {int(offsets[at + 1])} at {at}, expected offsets that never decrease"
        if int(offsets[-1]) != self.total:
            return f"got {int(offsets[-1])} last, expected {self.total}, the rows of the values they divide"
        if len(lengths) and int(lengths.max()) > self.longest:
            at = int(lengths.argmax())
            return f"sample {at} has length {int(lengths[at])}, more than the declared maximum {self.longest}; raise it"
        return ""


@dataclass(frozen=True)
class _Pending:
    """Offsets on their way to the CPU."""

    claim: Claim
    copy: Tensor
    arrived: Any


class OffsetsWatch:
    """Checks offsets as the module says; one for the process."""

    def __init__(self) -> None:
        self._seen = WeakIdKeyDictionary()
        self._pending: deque[_Pending] = deque()

    def check(self, offsets: Tensor, claim: Claim) -> None:
        """Check now on a CPU, soon on a GPU, and raise for what an earlier call is found to have been given."""
        if offsets.device.type != "cuda":
            claim.raise_for(offsets.cpu())
            return
        if torch.cuda.is_current_stream_capturing():
            return
        self.poll()
        if self._is_new(offsets, claim):
            copy = torch.empty(offsets.shape, dtype=offsets.dtype, pin_memory=True)
            copy.copy_(offsets.detach(), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._pending.append(_Pending(claim, copy, arrived))

    def trust(self, offsets: Tensor, copy: Tensor, claim: Claim) -> None:
        """Check a CPU copy of `offsets` at once, and `offsets` no more."""
        claim.raise_for(copy)
        self._is_new(offsets, claim)

    def poll(self) -> None:
        """Raise for the first bad offsets among those that have arrived."""
        while self._pending and self._pending[0].arrived.query():
            found = self._pending.popleft()
            found.claim.raise_for(found.copy, "; an earlier call got them, and its output means nothing")

    def _is_new(self, offsets: Tensor, claim: Claim) -> bool:
        version = 0 if offsets.is_inference() else offsets._version
        key = (version, claim.total, claim.longest)
        if self._seen.get(offsets) == key:
            return False
        self._seen[offsets] = key
        return True


WATCH = OffsetsWatch()


def check_offsets(offsets: Tensor, total: int, longest: int) -> None:
    """Raise a ValueError, for their dtype a TypeError, for offsets that no jagged op may get; waits for a GPU.

    Args:
        offsets: (B + 1,) int32 or int64, any device. total: rows of the values. longest: the declared maximum length.
    """
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.shape[0] < 1:
        shape = tuple(offsets.shape) if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"check_offsets: got {shape}, expected a tensor of shape (B + 1,) for B samples")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"check_offsets: got {offsets.dtype}, expected torch.int32 or torch.int64")
    Claim("check_offsets", "offsets", total, longest).raise_for(offsets.cpu())
