"""Which layers a recipe can convert: told by what they compute, not by their name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mxfp8_recipe import plan_recipe
from mxfp8_recipe.modules import MXFP8Linear, MXFP8LinearTransposed
from mxfp8_recipe.recognize import Candidate, recognize
from numerics_tests.helpers import Conv1D


def ask(module: nn.Module, parent: nn.Module | None = None) -> Candidate | None:
    return recognize(module, parent, {})


class Own(nn.Module):
    """A leaf with a weight and a bias, whose forward the subclasses give."""

    def __init__(self, rows: int = 64, cols: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, cols))
        self.bias = nn.Parameter(torch.randn(cols))


class TransposedByAnotherName(Own):
    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight + self.bias


class Scaled(Own):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x @ self.weight) + self.bias


class WithActivation(Own):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight + self.bias)


class NeedsTwoInputs(Own):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ self.weight + self.bias) * mask


class Lookup(Own):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class WithState(Own):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.dropout(x, 0.0, True) @ self.weight + self.bias + 0 * torch.rand(1)


class WithBuffer(Own):
    """Its buffer may be part of what it computes, or updated by it: not probed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x @ self.weight + self.bias


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [lambda: Conv1D(32, 64), TransposedByAnotherName])
def test_transposed_linears_are_found(make, dtype: torch.dtype, device: str) -> None:
    found = ask(make().to(device, dtype))
    assert found is not None
    assert (found.kind, found.in_features, found.out_features) == ("linear", 64, 32)
    assert found.implementation is MXFP8LinearTransposed


@pytest.mark.parametrize("cls", [Scaled, WithActivation, NeedsTwoInputs, Lookup, WithBuffer])
def test_look_alikes_are_not(cls: type[Own]) -> None:
    assert ask(cls()) is None


def test_probing_leaves_the_module_as_it_was() -> None:
    """No attribute, gradient or global random state changes, whatever its forward does."""
    module = WithState()
    state = torch.get_rng_state()
    assert ask(module) is not None
    assert module.calls == 0
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(64, 32),
        nn.EmbeddingBag(64, 32),
        nn.Conv1d(32, 32, 1),
        nn.Bilinear(32, 32, 32),
        nn.ReLU(),
        nn.PReLU(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_layers_are_no_linear(module: nn.Module) -> None:
    found = ask(module)
    assert found is None or found.kind != "linear"


def test_linears_and_the_reasons_against_them() -> None:
    plain = ask(nn.Linear(64, 32))
    assert plain is not None
    assert (plain.kind, plain.in_features, plain.out_features, plain.reason) == ("linear", 64, 32, "")
    assert plain.implementation is MXFP8Linear
    cases = {
        "in_features=100 is not a multiple of 32": nn.Linear(100, 32),
        "out_features=16 is not a multiple of 32": nn.Linear(32, 16),
        "out_features=1 is not a multiple of 32": nn.Linear(32, 1),
        "weight dtype torch.float64": nn.Linear(32, 32, dtype=torch.float64),
        "not initialized yet; run one batch": nn.LazyLinear(32),
    }
    for reason, module in cases.items():
        found = ask(module)
        assert found is not None
        assert found.implementation is None
        assert reason in found.reason
    misaligned = ask(Conv1D(20, 64))
    assert misaligned is not None
    assert "out_features=20" in misaligned.reason


def test_a_weight_that_is_only_read_is_left_to_its_reader() -> None:
    attention = nn.MultiheadAttention(64, 2)
    found = ask(attention.out_proj, attention)
    assert found is None or (found.implementation is None and "MultiheadAttention reads its weight" in found.reason)


def test_reasons_name_the_layer_and_the_remedy() -> None:
    """Stated in the plan, silenced by an override that records the choice."""
    model = nn.Sequential(nn.Linear(100, 32), nn.Linear(32, 32))
    (row,) = (layer for layer in plan_recipe(model).layers if layer.fqn == "0")
    assert row.reason == (
        "in_features=100 is not a multiple of 32; it stays BF16 (say overrides={'0': 'bf16'} to record the choice)"
    )
    (row,) = (layer for layer in plan_recipe(model, overrides={"0": "bf16"}).layers if layer.fqn == "0")
    assert "record the choice" not in row.reason
    assert row.new_type is None
