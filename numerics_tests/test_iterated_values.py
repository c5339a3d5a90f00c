"""A value that is iterated over, by code that asks whether it was given a tensor or pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics_tests.blocks import HIDDEN, WIDTH, fused_producers
from numerics_tests.fused_pairs import assert_same_step, fused_and_stored
from numerics_tests.helpers import same_bits

SHAPE = (3, 13, WIDTH)


class Output(dict):
    """Takes a tensor, or pairs of a name and a value, and iterates to tell: so do transformers' output classes."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        if isinstance(first, Tensor):
            self["last_hidden_state"] = first
            return
        for index, element in enumerate(iter(first)):
            if not isinstance(element, list | tuple) or len(element) != 2 or not isinstance(element[0], str):
                assert index == 0
                self["last_hidden_state"] = first
                break
            self[element[0]] = element[1]


class CausalLM(nn.Module):
    """A decoder whose last norm's output passes through an output class to the head of a class around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor, keep: int = 0) -> Tensor:
        hidden = Output(self.norm(x))["last_hidden_state"]
        return self.head(hidden[:, slice(-keep, None), :])


def test_an_output_class_that_iterates_to_tell_pairs_from_a_value_reads_nothing() -> None:
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(CausalLM(), x)
    assert fused_producers(report) == ["norm"]
    assert_same_step(model, stored, x)
    assert report.unfused == {}
    compiled = torch.compile(model, backend="aot_eager")
    assert same_bits(compiled(x), stored(x))
    assert report.unfused == {}


def test_a_row_by_itself_tells_its_shape_and_counts_as_reading_when_read() -> None:
    x = torch.randn(SHAPE)
    model, _, report = fused_and_stored(CausalLM(), x)
    travels = model.norm(x)
    row = next(iter(travels))
    assert (row.shape, row.dtype, len(travels), report.unfused) == ((13, WIDTH), x.dtype, 3, {})
    with pytest.warns(UserWarning, match="norm: its quantized output was read by __iter__"):
        assert same_bits(row + 0.0, F.rms_norm(x, (WIDTH,), model.norm.weight)[0])
    assert list(iter(model.norm(x[:0]))) == []
