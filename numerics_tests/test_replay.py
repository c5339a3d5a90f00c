"""Replayed calls: the same launches with the addresses of the new tensors, and only where that is all there was."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mxfp8_recipe.fused import replay
from mxfp8_recipe.fused.replay import Replayed, launched

LAUNCHES: list[tuple[Any, ...]] = []


class Compiled:
    """What a compiled kernel is to a launch; remembers the arguments in order."""

    function = packed_metadata = None

    def run(self, *args: Any) -> None:
        LAUNCHES.append((args[:3], *args[9:]))


class Block:
    """A descriptor: a tensor and how to cut it."""

    def __init__(self, base: Tensor, rows: int) -> None:
        self.base, self.rows = base, rows


COMPILED = Compiled()


def launch(*args: Any) -> None:
    launched(COMPILED, (2,), args)


def address(value: Any) -> Any:
    if isinstance(value, Block):
        return value.base.data_ptr(), value.rows
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    LAUNCHES.clear()
    with (
        mock.patch.object(replay, "_device", lambda tensors: next(t.device for t in tensors if t is not None)),
        mock.patch.object(replay.torch._C, "_cuda_getCurrentRawStream", return_value=7, create=True),
    ):
        yield


def two_launches(x: Tensor, weight: Tensor | None, size: int) -> tuple[Tensor | None, ...]:
    out = x.new_empty(x.shape, dtype=torch.float32)
    scratch, unused = torch.empty(size, 4), torch.empty(0)
    launch(x[1:], scratch.view(torch.int32), unused, 5, None)
    launch(Block(scratch[1:], 64), weight, Block(out, 32), 2.5)
    return out, None, x


def test_a_replay_launches_the_same_with_new_addresses() -> None:
    call, runs = Replayed(two_launches), SimpleNamespace(count=0)
    plain = call.fn
    call.fn = lambda *args: (setattr(runs, "count", runs.count + 1), plain(*args))[1]
    call((torch.zeros(4, 8), torch.zeros(3)), (16,))
    assert (runs.count, LAUNCHES) == (1, [])
    for _ in range(2):
        x, weight = torch.zeros(4, 8), torch.zeros(3)
        LAUNCHES.clear()
        out, nothing, same = call((x, weight), (16,))
        assert out is not None
        assert (runs.count, nothing, same) == (1, None, x)
        assert (out.shape, out.dtype) == (torch.Size([4, 8]), torch.float32)
        (grid, rows, scratch, unused, five, none), (_, cut, given, into, half) = LAUNCHES
        assert (grid, rows, unused, five, none) == ((2, 1, 1), x[1:].data_ptr(), 0, 5, None)
        assert (address(cut), given) == ((scratch + 16, 64), weight.data_ptr())
        assert (address(into), half) == ((out.data_ptr(), 32), 2.5)


def test_other_shapes_constants_and_alignments_are_recorded_anew() -> None:
    call = Replayed(two_launches)
    x, weight = torch.zeros(4, 8), torch.zeros(3)
    wide = torch.zeros(4, 16)
    for tensors, size in (
        ((x, weight), 16), ((x, weight), 32), ((torch.zeros(5, 8), weight), 16), ((x, None), 16),
        ((x.double(), weight), 16), ((wide[:, :8], weight), 16), ((wide[:, 1:9], weight), 16),
    ):  # fmt: skip
        call(tensors, (size,))
    assert len(call.tapes) == 7
    assert LAUNCHES == []


@pytest.mark.parametrize(
    "body",
    [
        lambda x: (x + 1,),
        lambda x: (torch.zeros(4),),
        lambda x: (x.new_empty(4).fill_(2.0),),
        lambda x: (torch.empty(8, 2)[1:],),
        lambda x: (launch(torch.zeros(1)), x)[1:],
    ],
    ids=["arithmetic", "zeros", "fill", "a view of something", "an unknown tensor"],
)
def test_what_did_anything_else_is_never_replayed(body: Any) -> None:
    call = Replayed(body)
    for _ in range(2):
        x = torch.ones(3)
        (out,) = call((x,), ())
        assert out is not None
        assert out.shape == body(x)[0].shape
    assert list(call.tapes.values()) == [None]
    assert LAUNCHES == []


def test_inputs_that_share_memory_are_not_recorded() -> None:
    call, flat = Replayed(two_launches), torch.zeros(64)
    call((flat[:32].view(4, 8), flat[32:]), (16,))
    assert list(call.tapes.values()) == [None]
