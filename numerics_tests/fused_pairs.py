"""A model with fused edges beside a copy that stores every value: two models that must have the same bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from mxfp8_recipe import Recipe, apply_recipe
from numerics_tests import blocks
from numerics_tests.helpers import gradients, same_bits


def fused_and_stored(
    model: nn.Module, x: Any, recipe: str | Recipe = "mxfp8", **options: Any
) -> tuple[nn.Module, nn.Module, Any]:
    """The model with fused edges, a copy that stores every value, and the report of the first.

    `options` are `apply_recipe`'s; `strict` holds for edges alone, of which the copy has none.
    """
    stored = copy.deepcopy(model)
    report = apply_recipe(model, recipe, example_inputs=x, **options)
    apply_recipe(stored, blocks.unfused(recipe), example_inputs=x, **options)
    return model, stored, report


def assert_same_step(a: nn.Module, b: nn.Module, x: Tensor) -> None:
    """Output and every gradient, bit by bit, under one seed and a gradient that differs from element to element."""
    results = []
    for module in (a, b):
        torch.manual_seed(5)
        results.append(gradients(module, x, slope))
    ours, theirs = results
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    for name, gradient in theirs[2].items():
        assert same_bits(ours[2][name], gradient), name


def slope(output: Tensor) -> Tensor:
    """A gradient of the output, from -1 to 1."""
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
