"""Projections whose GEMM adds the residual: the bits of a sum after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, backends, load_recipe, revert
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.epilogue_models import (
    DTYPES,
    RECIPES,
    SHAPE,
    Mlp,
    assert_same,
    pair,
    step,
)
from numerics_tests.helpers import same_bits


class Residual(nn.Module):
    """`form(x, down(act(up(norm(x)))))`"""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.mlp = form, Mlp(nn.GELU())
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.drop(self.mlp(x)))


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + y": lambda x, y: x + y,
    "y + x": lambda x, y: y + x,
    "torch.add": torch.add,
    "x.add": lambda x, y: x.add(y),
    "a view of it": lambda x, y: (x.flatten(0, 1) + y.view(-1, WIDTH)).view(x.shape),
    "read again after": lambda x, y: (x + y) * 2 + x,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", SUMS)
def test_a_residual_is_added_in_the_epilogue_with_the_bits_of_a_sum(form: str, dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE).to(dtype)
    model, apart, report = pair(Residual(SUMS[form]).to(dtype), x)
    assert [(e.linear, e.gemm) for e in report.plan.epilogues if e.text == "a residual"] == [("mlp.down", "fprop")]
    assert "a residual in its epilogue" in str(report)
    with mock.patch.object(backends, "gemm_epilogue", wraps=backends.gemm_epilogue) as spy:
        found = step(model, x)
    assert [call.args[8] is not None for call in spy.call_args_list] == [False, True]
    assert_same(found, step(apart, x))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(step(model, strided), step(apart, strided))
    assert report.unfused == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_residuals_of_every_recipe_in_a_block(recipe: str) -> None:
    """Attention's output projection and a gated MLP's, twice; the second block reads the first's sum."""
    chosen = load_recipe(recipe).model_copy(update={"rules": {}, "bf16_last_fraction": 0.0})
    x = torch.randn(SHAPE).bfloat16()
    model, apart, report = pair(nn.Sequential(blocks.Block(), blocks.Block()).bfloat16(), x, chosen)
    added = [e.linear for e in report.plan.epilogues if e.text == "a residual"]
    assert added == [f"{i}.{name}" for i in range(2) for name in ("attention.out", "mlp.down")]
    for _ in range(2):
        assert_same(step(model, x), step(apart, x))
        x = torch.randn(1, 5, WIDTH).bfloat16()


@pytest.mark.parametrize("how", ["autocast", "checkpoint", "compile", "no_grad", "inference_mode", "frozen"])
def test_ways_of_running_a_residual(how: str) -> None:
    """Under autocast x is fp32 and z BF16: the sum is promoted, in a step of its own."""
    x = torch.randn(SHAPE)
    model, apart, report = pair(Residual(torch.add), x)
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
    elif how == "frozen":
        for module in (model, apart):
            module.get_submodule("mlp.down").requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        assert_same(step(model, x, run), step(apart, x))
    assert report.unfused == {}


def test_the_sum_is_computed_in_the_modes_of_the_layer() -> None:
    """A residual added outside of the layer's autocast and of its grad mode."""
    x = torch.randn(SHAPE)
    plan_like, x16 = Residual(torch.add), x.bfloat16()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.mlp(x)  # pyright: ignore[reportCallIssue]
        with torch.no_grad():
            grad_free = x16 + y
        return grad_free

    model, apart, _ = pair(plan_like, x)
    assert same_bits(run(model, x), run(apart, x))


def test_who_reads_the_addend_gets_it_exactly_and_ends_the_edge_once() -> None:
    seen: list[Tensor] = []
    reads = [False]

    def form(x: Tensor, y: Tensor) -> Tensor:
        if reads[0]:
            seen.append(y.float().sum())
        return x + y

    x = torch.randn(SHAPE)
    model, apart, report = pair(Residual(form), x)
    reads[0] = True
    with pytest.warns(UserWarning, match=r"mlp\.down: its quantized output was read by") as caught:
        first, second, expected = step(model, x), step(model, x), step(apart, x)
    assert len(caught) == 1
    assert_same(first, expected)
    assert_same(second, expected)
    assert torch.equal(seen[0], seen[2])
    assert set(report.unfused) == {"mlp.down"}


@pytest.mark.parametrize("hook", ["forward", "backward"])
def test_hooks_on_the_layer_before_a_residual(hook: str) -> None:
    got: list[Any] = []
    x = torch.randn(SHAPE)
    model, apart, _ = pair(Residual(torch.add), x)
    down = model.get_submodule("mlp.down")
    if hook == "forward":
        down.register_forward_hook(lambda module, args, output: got.append(output))
    else:
        down.register_full_backward_hook(lambda module, grad_in, grad_out: got.append(grad_out[0]))
    with pytest.warns(UserWarning, match=r"mlp\.down: its quantized output was read by a \w+ hook"):
        found = step(model, x)
    assert_same(found, step(apart, x))
    assert all(type(t) is Tensor for t in got)
    assert len(got) == 1


def test_an_input_written_to_before_the_sum_is_an_error_and_never_garbage() -> None:
    class Writes(nn.Module):
        write = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            y = self.linear(h)
            if self.write:
                h.zero_()
            return x + y

    model, x = Writes(), torch.randn(SHAPE)
    report = apply_recipe(model, example_inputs=x)
    assert [e.linear for e in report.plan.epilogues] == ["linear"]
    model.__dict__["write"] = True
    with pytest.raises(RuntimeError, match="linear: what its output is computed from was overwritten in place"):
        model(x)
    revert(model)
    report = apply_recipe(model, example_inputs=x)
    assert report.plan.epilogues == ()


class Forms(nn.Module):
    """Sums that are no residual's: which linears are planned."""

    def __init__(self, form: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.a, self.b = form, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def _in_place(m: Any, x: Tensor) -> Tensor:
    h = x * 1
    h += m.a(x)
    return h


def _read_twice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return x + y + y.mean()


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(m.a, x * 1, use_reentrant=False)
    assert isinstance(y, Tensor)
    return x + y


NOT_SUMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "two linears": (lambda m, x: m.a(x) + m.b(x), ["b"]),
    "its own input": (lambda m, x: x + m.a(x), []),
    "two linears and x": (lambda m, x: x + m.a(x) + m.b(x), ["b"]),
    "three linears": (lambda m, x: m.b(m.a(x) + m.b(x)) * m.a(x) + x, []),
    "made later": (lambda m, x: (lambda y: 2 * x + y)(m.a(x)), []),
    "in place": (_in_place, []),
    "scaled": (lambda m, x: torch.add(x, m.a(x), alpha=2), []),
    "a constant": (lambda m, x: m.a(x) + 1.0, []),
    "itself": (lambda m, x: (lambda y: y + y)(m.a(x)), []),
    "broadcast": (lambda m, x: x[:, :1] + m.a(x), ["a"]),
    "broadcast the other way": (lambda m, x: m.a(x[:, :1]) + x, []),
    "read twice": (_read_twice, []),
    "dropped": (lambda m, x: x + F.dropout(m.a(x), 0.5), []),
    "returned": (lambda m, x: m.a(x), []),
    "out of a checkpoint": (_checkpointed, []),
    "in a checkpoint": (lambda m, x: checkpoint(lambda h: h + m.a(2 * h), x, use_reentrant=False), ["a"]),  # pyright: ignore[reportReturnType]
}


@pytest.mark.parametrize("name", NOT_SUMS)
def test_which_sums_are_planned(name: str) -> None:
    form, expected = NOT_SUMS[name]
    x = torch.randn(SHAPE)
    model, apart, report = pair(Forms(form), x)
    assert [e.linear for e in report.plan.epilogues] == expected
    assert_same(step(model, x), step(apart, x))
    assert report.unfused == {}


def test_a_monitor_hears_a_layer_whose_output_comes_with_the_sum() -> None:
    from mxfp8_recipe.functional.listening import LinearCall, listening

    class Heard:
        def __init__(self) -> None:
            self.calls: list[LinearCall] = []

        def linear(self, call: LinearCall) -> None:
            self.calls.append(call)

        def attention(self, call: Any) -> None:
            raise AssertionError

    x, results = torch.randn(SHAPE), []
    for module in pair(Residual(torch.add), x)[:2]:
        heard = Heard()
        with listening(heard):
            out = module(x)
        grads = torch.autograd.grad(out.square().sum(), [call.output for call in heard.calls])
        results.append((heard.calls, grads))
    (ours, ours_grads), (theirs, theirs_grads) = results
    assert [c.weight.shape for c in ours] == [c.weight.shape for c in theirs]
    assert all(map(same_bits, ours_grads, theirs_grads))


def test_a_transformer_s_layers_add_their_residuals_in_epilogues() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
    model, apart, report = pair(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(SHAPE))
    assert {(e.linear, e.gemm) for e in report.plan.epilogues} == {
        (f"layers.{i}.{name}", gemm)
        for i in range(2)
        for name, gemm in (("linear1", "fprop"), ("linear2", "dgrad"), ("linear2", "fprop"))
    }
    x = torch.randn(SHAPE)
    assert_same(step(model, x), step(apart, x))
