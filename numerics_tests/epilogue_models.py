"""What the tests of epilogues share: a small MLP, a step of training, and which steps the GEMMs took."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, backends, recipe_names
from mxfp8_recipe.fused.gemm.dact import Dact
from mxfp8_recipe.fused.gemm.epilogue import Epilogue
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.helpers import same_bits

RECIPES = [name for name in recipe_names() if name != "bf16"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = (2, 21, WIDTH)


class Mlp(nn.Module):
    """norm, up, activation, down; the activation a module or code."""

    def __init__(self, act: nn.Module | None = None, code: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.code = act, code

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return self.down(self.act(h) if self.act is not None else self.code(h))  # pyright: ignore[reportOptionalCall]


@contextmanager
def launched() -> Iterator[list[Epilogue | Dact]]:
    """The steps of every GEMM with an epilogue that has some."""
    seen: list[Epilogue | Dact] = []

    def spy(kind: Any, run: Any, at: int) -> Any:
        def call(*args: Any) -> Any:
            if args[at] != backends.PLAIN:
                seen.append(kind.decode(args[at]))
            return run(*args)

        return call

    with (
        mock.patch.object(backends, "gemm_epilogue", spy(Epilogue, backends.gemm_epilogue, 10)),
        mock.patch.object(backends, "gemm_dact", spy(Dact, backends.gemm_dact, 8)),
    ):
        yield seen


def step(model: nn.Module, x: Tensor, run: Callable[..., Any] | None = None) -> list[Tensor | None]:
    """Output, gradient of x and of every parameter."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    out = (model if run is None else run)(x)
    (out.float().square().sum() * 1e-2).backward()
    assert type(out) is Tensor
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert same_bits(ours, theirs)
    assert found[0] is not None
    assert found[0].isfinite().all()


def pair(model: nn.Module, x: Any, recipe: Any = "mxfp8", **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The model, a copy that stores every value, and the report of the first."""
    apart = copy.deepcopy(model)
    report = apply_recipe(model, recipe, example_inputs=x, **options)
    apply_recipe(apart, blocks.unfused(recipe), example_inputs=x, **options)
    return model, apart, report


@contextmanager
def warnings_allowed() -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
