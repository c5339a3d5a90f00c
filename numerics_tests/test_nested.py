"""Converted layers on `torch.nested` tensors: what they give for the packed values, for the same samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, revert
from mxfp8_recipe.modules import JaggedMultiheadAttention

LENGTHS = (3, 0, 7, 40)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        first, second = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(first) * second)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.RMSNorm(64), JaggedMultiheadAttention(64, heads=2), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return self.out(x + self.attention(self.norm(x)))


MODELS = {
    "linear": lambda: nn.Linear(64, 32),
    "mlp": lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
    "in place": lambda: nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 32)),
    "gated": Gated,
}


def nested(values: Tensor) -> Any:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=max(LENGTHS))


@pytest.mark.parametrize("shown", [False, True], ids=["", "example_inputs"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hopper"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_nested_batch_has_the_bits_of_a_packed_one(kind: str, recipe: str, shown: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().bfloat16()
    other = copy.deepcopy(model)
    values = torch.randn(sum(LENGTHS), 64, dtype=torch.bfloat16)
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    apply_recipe(model, recipe, **({"example_inputs": (nested(values),)} if shown else {}))
    apply_recipe(other, recipe)
    found = model(nested(ours))
    expected = other(theirs)
    assert torch.equal(found.values(), expected)
    assert found.offsets().tolist() == [0, 3, 3, 10, 50]
    assert found._maybe_max_seqlen == max(LENGTHS)
    weight = torch.randn_like(expected)
    (found.values() * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_attention_among_other_layers_takes_a_nested_batch() -> None:
    torch.manual_seed(0)
    model = Attends()
    batch = nested(torch.randn(sum(LENGTHS), 64))
    plain = model(batch).values()
    apply_recipe(model)
    converted = model(batch).values()
    assert 1e-4 < (converted - plain).norm() / plain.norm() < 0.1
    revert(model)
    assert torch.equal(model(batch).values(), plain)


def test_other_nested_tensors_are_told() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    apply_recipe(model)
    strided = torch.nested.nested_tensor([torch.randn(n, 64) for n in LENGTHS], layout=torch.strided)
    along_the_last = nested(torch.randn(sum(LENGTHS), 64)).transpose(1, 2)
    for wrong in (strided, along_the_last):
        with pytest.raises(
            TypeError, match=r"^0: got a nested tensor of layout .*expected layout=torch.jagged .*dim 1"
        ):
            model(wrong)
