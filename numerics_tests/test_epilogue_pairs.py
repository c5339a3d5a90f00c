"""Gated pairs of linears that run as one GEMM: the bits of two layers and a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import load_recipe
from mxfp8_recipe.fused.gemm.dact import Dact
from mxfp8_recipe.fused.gemm.epilogue import Epilogue
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.epilogue_models import (
    DTYPES,
    RECIPES,
    SHAPE,
    assert_same,
    launched,
    pair,
    step,
    warnings_allowed,
)
from numerics_tests.helpers import same_bits


class Gated(nn.Module):
    """norm, then `form(model, h)` of a gate and an up projection, then down; the activation may be a module."""

    def __init__(self, form: Callable[[Any, Tensor], Tensor], act: nn.Module | None = None, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(2))
        self.other = nn.Linear(WIDTH, HIDDEN, bias=not bias)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.form, self.act = form, act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.form(self, self.norm(x)))


def _up_first(m: Any, h: Tensor) -> Tensor:
    up = m.up(h)
    return F.silu(m.gate(h)) * up


def _gate_then_up_then_act(m: Any, h: Tensor) -> Tensor:
    gate, up = m.gate(h), m.up(h)
    return up * F.gelu(gate)


PAIRS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "silu(gate) * up": (lambda: Gated(lambda m, h: F.silu(m.gate(h)) * m.up(h)), "swiglu"),
    "up * silu(gate)": (lambda: Gated(lambda m, h: m.up(h) * F.silu(m.gate(h))), "swiglu"),
    "up first": (lambda: Gated(_up_first), "swiglu"),
    "both, then the activation": (lambda: Gated(_gate_then_up_then_act), "geglu"),
    "gelu by tanh": (lambda: Gated(lambda m, h: F.gelu(m.gate(h), approximate="tanh") * m.up(h)), "geglu_tanh"),
    "without bias": (lambda: Gated(lambda m, h: F.relu(m.gate(h)) * m.up(h), bias=False), "reglu"),
    "a module": (lambda: Gated(lambda m, h: m.act(m.gate(h)) * m.up(h), nn.SiLU()), "swiglu"),
    "a module and up first": (lambda: Gated(lambda m, h: m.up(h) * m.act(m.gate(h)), nn.GELU()), "geglu"),
    "without a norm": (lambda: WithoutNorm(lambda m, h: F.silu(m.gate(h)) * m.up(h)), "swiglu"),
}


class WithoutNorm(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.form(self, x * 2))


def pairs_of(report: Any) -> set[tuple[str, str]]:
    return {(e.linear, e.pair) for e in report.plan.epilogues if e.pair}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_a_gated_pair_is_one_gemm_with_the_bits_of_two(name: str, dtype: torch.dtype) -> None:
    make, kind = PAIRS[name]
    x = torch.randn(SHAPE).to(dtype)
    model, apart, report = pair(make().to(dtype), x)
    assert {linear for linear, _ in pairs_of(report)} == {"gate", "up"}
    with launched() as seen:
        found = step(model, x)
    with launched() as unseen:
        expected = step(apart, x)
    assert_same(found, expected)
    assert not unseen
    assert [(type(s), s.activation) for s in seen] == [(Epilogue, kind), (Dact, kind)]
    assert "times up and MXFP8 out in its epilogue" in " ".join(str(report).split())
    assert report.unfused == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_gated_pairs_of_every_recipe(recipe: str) -> None:
    chosen = load_recipe(recipe).model_copy(update={"rules": {}, "bf16_last_fraction": 0.0})
    model, apart, report = pair(PAIRS["silu(gate) * up"][0]().bfloat16(), torch.randn(SHAPE).bfloat16(), chosen)
    assert bool(pairs_of(report)) == (not model.up.mxfp8_config.stochastic)  # pyright: ignore[reportAttributeAccessIssue]
    for rows in (0, 1, 70):
        x = torch.randn(rows, WIDTH).bfloat16()
        assert_same(step(model, x), step(apart, x))
    assert report.unfused == {}


@pytest.mark.parametrize("how", ["autocast", "checkpoint", "compile", "no_grad", "inference_mode"])
@pytest.mark.parametrize("name", ["silu(gate) * up", "a module and up first", "without a norm"])
def test_ways_of_running_a_pair(name: str, how: str) -> None:
    x = torch.randn(SHAPE)
    model, apart, report = pair(PAIRS[name][0](), x)
    if how in ("no_grad", "inference_mode"):
        with getattr(torch, how)():
            assert same_bits(model(x), apart(x))
        return
    run = None
    if how == "checkpoint":
        run = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    elif how == "compile":
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        assert_same(step(model, x, run), step(apart, x))
    assert report.unfused == {}


@pytest.mark.parametrize(
    "frozen", ["gate", "up", "gate.weight", "up.bias", "norm", "gate.bias up.bias", "gate up", "norm gate up"]
)
def test_frozen_halves(frozen: str) -> None:
    x = torch.randn(SHAPE).bfloat16()
    model, apart, report = pair(PAIRS["silu(gate) * up"][0]().bfloat16(), x)
    for module in (model, apart):
        for name, p in module.named_parameters():
            p.requires_grad_(not name.startswith(tuple(frozen.split())))
    assert_same(step(model, x), step(apart, x))
    assert report.unfused == {}


def _other_in_between(m: Any, h: Tensor) -> Tensor:
    gate, other, up = m.gate(h), m.other(h), m.up(h)
    return F.silu(gate) * up + other


def _read_too(m: Any, h: Tensor) -> Tensor:
    up = m.up(h)
    return F.silu(m.gate(h)) * up + up


NOT_PAIRS: dict[str, Callable[[], nn.Module]] = {
    "something in between": lambda: Gated(_other_in_between),
    "up is read again": lambda: Gated(_read_too),
    "a bias on one": lambda: Gated(lambda m, h: F.silu(m.gate(h)) * m.other(h)),
    "two inputs": lambda: Gated(lambda m, h: F.silu(m.gate(h)) * m.up(h * 1.0)),
    "itself": lambda: Gated(lambda m, h: F.silu(m.gate(h)) * m.gate(h)),
    "half in a checkpoint": lambda: Gated(
        lambda m, h: checkpoint(lambda t: F.silu(m.gate(t)), h, use_reentrant=False) * m.up(h)  # pyright: ignore[reportOperatorIssue]
    ),
    "no linear": lambda: Gated(lambda m, h: F.silu(m.gate(h)) * h.repeat(1, 1, 2)[..., :HIDDEN]),
}


@pytest.mark.parametrize("name", NOT_PAIRS)
def test_which_products_are_no_pair(name: str) -> None:
    x = torch.randn(SHAPE)
    model, apart, report = pair(NOT_PAIRS[name](), x)
    assert pairs_of(report) == set()
    assert_same(step(model, x), step(apart, x))


OTHER_WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "up is read": lambda m, h: (lambda up: F.silu(m.gate(h)) * up + up.mean())(m.up(h)),
    "gate is read": lambda m, h: (lambda gate: F.silu(gate) * m.up(h) + gate.mean())(m.gate(h)),
    "the activation is read": lambda m, h: (lambda y: y * m.up(h) + y.mean())(F.silu(m.gate(h))),
    "another activation": lambda m, h: F.gelu(m.gate(h)) * m.up(h),
    "no activation": lambda m, h: m.gate(h) * m.up(h),
    "another input": lambda m, h: F.silu(m.gate(h)) * m.up(2 * torch.as_tensor(h + 0)),
    "gate alone": lambda m, h: m.gate(h) + 0,
    "no product": lambda m, h: F.silu(m.gate(h)),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_a_path_that_was_not_planned_gets_exact_tensors(way: str) -> None:
    """The model takes another way than the recorded one, and then that again, with the bits of an unfused model."""
    x = torch.randn(SHAPE)
    model, apart, _ = pair(PAIRS["silu(gate) * up"][0](), x)
    planned, expected = model.form, step(apart, x)
    with warnings_allowed() as caught:
        for module in (model, apart):
            module.__dict__["form"] = OTHER_WAYS[way]
        outputs = [module(x) for module in (model, apart)]
        assert same_bits(*outputs)
        for module in (model, apart):
            module.__dict__["form"] = planned
        assert_same(step(model, x), expected)
        assert_same(step(model, x), step(apart, x))
    messages = [str(w.message) for w in caught]
    assert len(messages) == len(set(messages)), "an edge ended twice"


def test_a_hook_on_half_of_a_pair_gets_a_tensor() -> None:
    got: list[Any] = []
    x = torch.randn(SHAPE)
    for name in ("gate", "up"):
        model, apart, _ = pair(PAIRS["a module"][0](), x)
        expected = step(apart, x)
        model.get_submodule(name).register_forward_hook(lambda module, args, output: got.append(output))
        with pytest.warns(UserWarning, match=f"{name}: its quantized output was read by a forward hook"):
            found = step(model, x)
        assert_same(found, expected)
    assert [type(t) for t in got] == [Tensor, Tensor]


def test_a_monitor_hears_both_halves() -> None:
    from mxfp8_recipe.functional.listening import listening

    class Heard(list[Any]):
        def linear(self, call: Any) -> None:
            self.append(call)

    x, results = torch.randn(SHAPE), []
    for module in pair(PAIRS["silu(gate) * up"][0](), x)[:2]:
        heard = Heard()
        with listening(heard):  # pyright: ignore[reportArgumentType]
            out = module(x)
        grads = torch.autograd.grad(out.square().sum(), [call.output for call in heard])
        results.append(([next(n for n, m in module.named_modules() if m is c.owner) for c in heard], grads))
    (ours, ours_grads), (theirs, theirs_grads) = results
    assert ours == theirs == ["gate", "up", "down"]
    assert all(map(same_bits, ours_grads, theirs_grads))
