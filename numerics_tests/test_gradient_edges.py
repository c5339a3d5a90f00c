"""Gradients that travel in MXFP8 between backwards: the bits of a gradient that does not, and high precision for
whoever else reads one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.autograd import MXGradient, activation
from mxfp8_recipe.functional import linear as functional_linear
from mxfp8_recipe.fused.gemm.dact import Dact


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def chain(act: nn.Module, bias: bool = True) -> nn.Module:
    """Two activation edges one after the other."""
    widths = (64, 96, 128, 32)
    layers: list[nn.Module] = [nn.RMSNorm(64)]
    for i in range(3):
        layers += [nn.Linear(widths[i], widths[i + 1], bias=bias), copy.deepcopy(act)]
    return nn.Sequential(*layers[:-1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: chain(nn.ReLU()),
    "gelu": lambda: chain(nn.GELU()),
    "silu without bias": lambda: chain(nn.SiLU(), bias=False),
    "gated": lambda: Gated(64, 96, True),
    "gated without bias": lambda: Gated(64, 96, False),
}


@contextmanager
def counted() -> Iterator[list[MXGradient]]:
    """Every gradient that sets out in MXFP8."""
    made: list[MXGradient] = []

    def make(*args: Any) -> MXGradient:
        made.append(MXGradient(*args))
        return made[-1]

    with mock.patch.object(activation, "MXGradient", make):
        yield made


@contextmanager
def grounded() -> Iterator[None]:
    """No gradient travels."""
    with mock.patch.object(functional_linear, "gradient_spec", return_value=None):
        yield


def built(name: str, recipe: str = "mxfp8_hopper", dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    apply_recipe(model, recipe, example_inputs=torch.randn(8, 64, dtype=dtype), **options)
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    (out.float().square().sum() * 1e-2).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert type(a) is Tensor
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hopper", "mxfp8_square"])
@pytest.mark.parametrize("shape", [(70, 64), (3, 7, 64), (1, 64), (0, 64)])
def test_travels_with_the_bits_of_one_that_does_not(name: str, recipe: str, shape: tuple[int, ...]) -> None:
    model = built(name, recipe)
    x = torch.randn(shape, dtype=torch.bfloat16)
    with counted() as made:
        found = gradients(model, x)
    assert len(made) == 2
    with grounded():
        expected = gradients(model, x)
    assert_same(found, expected)
    assert any(g is not None and g.abs().sum() > 0 for g in found) == (0 not in shape)


def test_is_not_written_in_high_precision() -> None:
    model, steps = built("gelu"), []
    run = activation.backends.gemm_dact

    def spy(*args: Any) -> Any:
        steps.append(Dact.decode(args[8]))
        return run(*args)

    with mock.patch.object(activation.backends, "gemm_dact", spy):
        gradients(model, torch.randn(40, 64, dtype=torch.bfloat16))
    assert [(dact.emit_high, dact.emit_bias) for dact in steps] == [(False, True)] * 2
    assert all(dact.rowwise and dact.colwise and dact.act_colwise for dact in steps)


@pytest.mark.parametrize("frozen", ["weight", "bias", "all of it"])
def test_frozen_parameters(frozen: str) -> None:
    model = built("gelu")
    linear = model.get_submodule("1")
    assert isinstance(linear, nn.Linear)
    for name, parameter in linear.named_parameters():
        parameter.requires_grad_(frozen not in (name, "all of it"))
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    with counted() as made:
        found = gradients(model, x)
    assert len(made) == 2
    with grounded():
        assert_same(found, gradients(model, x))


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_a_gemm_in_high_precision_gets_the_gradient_itself(gemm: str) -> None:
    model = built("relu", overrides={"1": {gemm: "bf16"}})
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    with counted() as made:
        found = gradients(model, x)
    assert len(made) == 1
    with grounded():
        assert_same(found, gradients(model, x))


@pytest.mark.parametrize("reader", ["hook", "retain_grad", "second consumer", "anomaly", "grad of it"])
def test_another_reader_gets_high_precision(reader: str) -> None:
    model = built("gelu")
    up, x = model.get_submodule("1"), torch.randn(40, 64, dtype=torch.bfloat16)
    seen: list[Tensor] = []
    total: list[Tensor] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if reader == "retain_grad":
            output.retain_grad()
            seen.append(output)
        if reader == "second consumer":
            total.append(output.float().sum())
        if reader == "grad of it":
            seen.append(output)

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    def late(module: nn.Module, args: Any, output: Tensor) -> None:
        if reader == "hook":  # after the activation took its input
            seen[0].register_hook(lambda g: g * 2)

    up.register_forward_hook(watch)
    if reader == "hook":
        up.register_forward_hook(remember)
        model.get_submodule("3").register_forward_hook(late)

    def run() -> list[Tensor | None]:
        seen.clear()
        total.clear()
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        out = model(leaf).float().square().sum() * 1e-2 + sum(total, torch.zeros(()))
        if reader == "grad of it":
            (of_it,) = torch.autograd.grad(out, seen[0])
            return [of_it + 0]
        with torch.autograd.set_detect_anomaly(reader == "anomaly"):
            out.backward()
        extra = [seen[0].grad + 0] if reader == "retain_grad" and seen[0].grad is not None else []
        return [leaf.grad, *(p.grad for p in model.parameters()), *extra]

    found = run()
    with grounded():
        expected = run()
    assert_same(found, expected)


def test_backward_twice_and_checkpoint() -> None:
    model, x = built("gelu"), torch.randn(40, 64, dtype=torch.bfloat16)
    expected = gradients(model, x)
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    loss = model(leaf).float().square().sum() * 1e-2
    loss.backward(retain_graph=True)
    leaf.grad = None
    model.zero_grad()
    loss.backward()
    assert_same([leaf.grad, *(p.grad for p in model.parameters())], expected)
    leaf.grad = None
    model.zero_grad()
    out = checkpoint(model, leaf, use_reentrant=False)
    assert isinstance(out, Tensor)
    (out.float().square().sum() * 1e-2).backward()
    assert_same([leaf.grad, *(p.grad for p in model.parameters())], expected)


def test_a_view_of_it_travels_and_a_slice_does_not() -> None:
    spec = activation.GradientSpec("", "", False)
    empty = torch.empty(0)
    parcel = activation.Parcel((empty, empty, empty, empty), None, spec, lambda: torch.arange(24.0).view(6, 4))
    gradient = MXGradient((2, 3, 4), torch.float32, torch.device("cpu"), parcel)
    assert isinstance(gradient.view(6, 4), MXGradient)
    assert isinstance(gradient.reshape(-1, 4), MXGradient)
    assert isinstance(gradient.detach(), MXGradient)
    assert not isinstance(gradient.view(24), MXGradient)
    assert torch.equal(gradient[1], torch.arange(24.0).view(2, 3, 4)[1])
    assert torch.equal(torch.zeros(2, 3, 4).add_(gradient), torch.arange(24.0).view(2, 3, 4))
