"""Epilogues on a GPU, whatever its table says of their speed: fused, unfused and not planned have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, backends, planner
from mxfp8_recipe.epilogue_table import STEPS, Choice, epilogue_choice
from numerics_tests.test_gpu import HIDDEN, WIDTH, data, model, recipe, step

pytestmark = pytest.mark.gpu

RECIPES = ("mxfp8", "mxfp8_hopper", "mxfp8_square", "mxfp8_square_activations", "mxfp8_floor")


def everything() -> Choice:
    """All steps that the GPU's backend has an op for; on Hopper they have the bits of its GEMM without."""
    backend = backends.select(torch.device("cuda"))
    steps = frozenset(STEPS) - (frozenset() if backends.has("gemm_dact", backend) else {"dact"})
    return Choice(steps=steps, why="all of them, to be tested", is_gemm=epilogue_choice(backend).is_gemm)


@pytest.fixture(autouse=True)
def planned() -> Iterator[None]:
    if not backends.has("gemm_epilogue", backends.select(torch.device("cuda"))):
        pytest.skip("this device's backend has no kernel with an epilogue")
    with mock.patch.object(planner, "epilogue_choice", return_value=everything()):
        yield


class WithModule(nn.Module):
    """The activation as a module, and a bias on every layer."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), act
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def built(kind: str) -> nn.Module:
    if kind in ("function", "gated"):
        return model(kind == "gated")
    torch.manual_seed(0)
    acts: dict[str, Any] = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}
    return nn.Sequential(*(WithModule(acts[kind]()) for _ in range(2))).cuda().bfloat16()


@pytest.mark.parametrize("tokens", [1, 70, 1000])
@pytest.mark.parametrize("kind", ["function", "gated", "relu", "silu", "gelu"])
@pytest.mark.parametrize("name", RECIPES)
def test_fused_equals_unfused_and_unplanned_bitwise(name: str, kind: str, tokens: int) -> None:
    fused, unfused, without = built(kind), built(kind), built(kind)
    report = apply_recipe(fused, recipe(name), example_inputs=data(), strict=True)
    apply_recipe(unfused, recipe(name, fuse=False), example_inputs=data())
    assert len([e for e in report.plan.epilogues if e.gemm == "fprop"]) >= 4
    found = step(fused, data(tokens))
    for a, b in zip(found, step(unfused, data(tokens))):
        assert torch.equal(a, b)
    if everything().is_gemm:
        with mock.patch.object(planner, "epilogue_choice", return_value=Choice(why="none")):
            apply_recipe(without, recipe(name), example_inputs=data())
        for a, b in zip(found, step(without, data(tokens))):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["gelu", "gated"])
def test_compiled_equals_eager_bitwise(kind: str) -> None:
    torch._dynamo.reset()
    net = built(kind)
    apply_recipe(net, recipe("mxfp8_hopper"), example_inputs=data())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(net, data()), step(compiled, data())):  # pyright: ignore[reportArgumentType]
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    """The steps run apart where a kernel knows BF16 alone."""
    nets = [built("gated").to(dtype) for _ in range(2)]
    for net, fuse in zip(nets, (True, False)):
        apply_recipe(net, recipe("mxfp8", fuse=fuse), example_inputs=data(dtype=dtype))
    for enabled in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            for a, b in zip(*(step(net, data(dtype=dtype)) for net in nets)):
                assert torch.equal(a, b)
