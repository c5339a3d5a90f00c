"""A weight changed by any means is the weight of the next forward, in both orientations, without a version counter."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from numerics_tests.helpers import MLP, gradients, same_bits

X = torch.linspace(-3, 3, 40 * 64).sin().view(40, 64)


def swapped(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MLP()
    apply_recipe(model)
    return model


def check_fresh(model: nn.Module) -> None:
    """Forward and gradients equal those of a model built now from the same weights."""
    fresh = MLP()
    fresh.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    apply_recipe(fresh)
    out, grad_input, grads = gradients(model, X)
    fresh_out, fresh_grad_input, fresh_grads = gradients(fresh, X)
    assert same_bits(out, fresh_out)
    assert same_bits(grad_input, fresh_grad_input)
    assert all(same_bits(grads[name], fresh_grads[name]) for name in fresh_grads)


def data_step(model: nn.Module) -> Callable[[], None]:
    """An optimizer that writes through `.data`, which leaves the version counter where it was."""

    def step() -> None:
        for p in model.parameters():
            version = p._version
            p.data.copy_(p.data - 0.05 * p.grad.sign())
            assert p._version == version

    return step


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9).step,
    "adam default": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05).step,
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True).step,
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True).step,
    "by hand through .data": data_step,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_every_optimizer_step(name: str) -> None:
    model = swapped()
    step = OPTIMIZERS[name](model)
    outputs = [model(X).detach()]
    for _ in range(3):
        model.zero_grad()
        model(X).square().mean().backward()
        step()
        check_fresh(model)
        outputs.append(model(X).detach())
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(outputs))


def test_in_the_middle_of_gradient_accumulation() -> None:
    """Micro-batches see one weight; the sum of their gradients is each one's, added."""
    model, twin = swapped(), swapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    parts = X.chunk(4)
    for _ in range(2):
        optimizer.zero_grad()
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        expected: dict[str, Tensor] = {}
        for part in parts:
            model(part).square().mean().backward()
            twin.zero_grad()
            twin(part).square().mean().backward()
            for name, p in twin.named_parameters():
                assert p.grad is not None
                expected[name] = expected[name] + p.grad if name in expected else p.grad.clone()
        assert all(same_bits(p.grad, expected[name]) for name, p in model.named_parameters() if p.grad is not None)
        optimizer.step()
        check_fresh(model)


def test_swapping_in_an_exponential_moving_average_and_back() -> None:
    model = swapped()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    trained = model(X).detach()
    check_fresh(average.module)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p, q in zip(model.parameters(), average.module.parameters()):
        p.data, q.data = q.data, p.data
    check_fresh(model)
    assert not torch.equal(model(X), trained)
    for name, p in model.named_parameters():
        p.data = kept[name]
    assert same_bits(model(X).detach(), trained)


@pytest.mark.parametrize("assign", [False, True])
def test_after_load_state_dict(assign: bool) -> None:
    model, other = swapped(0), swapped(1)
    before = model(X).detach()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    check_fresh(model)
    assert same_bits(model(X), other(X))
    assert not torch.equal(model(X), before)


def test_weights_changed_between_forward_and_backward() -> None:
    """Backward uses the weight its forward saw, which is what the saved quantization holds."""
    model = swapped()
    _, expected, _ = gradients(model, X)
    x = X.clone().requires_grad_()
    out = model(x)
    with torch.no_grad():
        for p in (model.up.weight, model.down.weight):
            p.data.mul_(-2.0)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert same_bits(x.grad, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(2.0),
        lambda w: w.detach().zero_(),
        lambda w: w.data.__setitem__((0, 0), 100.0),
        lambda w: setattr(w, "data", torch.ones_like(w)),
        lambda w: w.detach().numpy().__setitem__((0, 0), 100.0),
    ],
    ids=["data in place", "detached", "one element", "data replaced", "numpy alias"],
)
def test_after_a_write_by_hand(write: Callable[[Tensor], object]) -> None:
    model = swapped()
    before = model(X).detach()
    write(model.up.weight)
    check_fresh(model)
    assert not torch.equal(model(X), before)
