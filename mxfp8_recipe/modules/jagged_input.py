"""The forms a batch of sequences comes in, as one: values, offsets and a maximum length.

packed   (T, width) with offsets (B + 1,)      all tokens one after another
nested   (B, j, width), layout torch.jagged    the same inside one tensor
dense    (B, L, width)                         every sample has L tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional.jagged_checks import check_length, check_tensors
from .nested import is_nested


@dataclass(frozen=True)
class Packed:
    """Values (T, width), or what travels in their place, with where samples begin.

    Attributes:
        max_length: no sample is longer. form: `packed`, `nested` or `dense`.
        known: what a nested batch says of its longest sample, if it says it.
    """

    values: Any
    offsets: Tensor
    max_length: int
    form: str
    known: int | None = None

    @property
    def samples(self) -> int:
        return self.offsets.shape[0] - 1

    def like(self, values: Tensor) -> Tensor:
        """Values (T, ...) of the same tokens in the form the batch came in."""
        if self.form == "nested":
            return torch.nested.nested_tensor_from_jagged(values, self.offsets, max_seqlen=self.known)
        return values.unflatten(0, (self.samples, self.max_length)) if self.form == "dense" else values


def packed(x: Any, offsets: Tensor | None, max_length: int | None, width: int, where: str) -> Packed:
    """A batch in any of its forms.

    Args:
        x: as the module says. offsets: of a packed one, else None.
        max_length: no sample is longer. None: what a nested or dense tensor says of itself; of offsets on the CPU,
            their longest sample.
        width: of a token.
        where: the module, and what x is to it, for messages.

    Raises:
        ValueError: another shape, offsets missing or not wanted, a nested tensor with holes, a dense one that is longer
            than the maximum length; that missing where finding it would wait for a GPU.
        TypeError: no tensor, or a maximum length that is no int.
    """
    check_tensors(where, values=x, **({} if offsets is None else {"offsets": offsets}))
    if max_length is not None:
        check_length(where, "the maximum length", max_length)
    batch = _batch(x, offsets, max_length, where)
    if x.shape[-1] != width:
        raise ValueError(f"{where}: got tokens of {x.shape[-1]} features, expected {width}")
    return batch


def _batch(x: Any, offsets: Tensor | None, max_length: int | None, where: str) -> Packed:
    if is_nested(x):
        return _nested(x, offsets, max_length, where)
    if x.dim() == 3 and offsets is None:
        samples, length = x.shape[:2]
        if max_length is not None and length > max_length:
            raise ValueError(f"{where}: got samples of {length} tokens, more than the maximum {max_length}; raise it")
        begins = torch.arange(samples + 1, dtype=torch.int32, device=x.device) * length
        return Packed(x.flatten(0, 1), begins, length, "dense")
    if x.dim() != 2 or offsets is None:
        got = f"{tuple(x.shape)} {'without' if offsets is None else 'with'} offsets"
        raise ValueError(
            f"{where}: got {got}, expected (T, width) with offsets, a jagged nested tensor or (B, L, width)"
        )
    if max_length is None:
        _refuse_to_wait(offsets, where)
        max_length = int(offsets.diff().max()) if offsets.numel() > 1 else 0
    return Packed(x, offsets, max_length, "packed")


def _nested(x: Any, offsets: Tensor | None, max_length: int | None, where: str) -> Packed:
    if offsets is not None:
        raise ValueError(f"{where}: got offsets beside a nested tensor, which has its own")
    if x.layout is not torch.jagged or x.dim() != 3 or x._ragged_idx != 1 or x.lengths() is not None:
        raise ValueError(
            f"{where}: got a nested tensor of {x.dim()} dims, layout {x.layout}, expected layout=torch.jagged, "
            "(B, j, width), without holes between samples"
        )
    known = x._maybe_max_seqlen
    longest = known if max_length is None else max_length
    if longest is None:
        _refuse_to_wait(x.offsets(), where)
        longest = known = x._get_max_seqlen() if x.offsets().shape[0] > 1 else 0
    return Packed(x.values(), x.offsets(), longest, "nested", known)


def _refuse_to_wait(offsets: Tensor, where: str) -> None:
    if offsets.device.type != "cpu":
        raise ValueError(f"{where}: got no maximum length, expected an int; finding it would wait for the GPU")
