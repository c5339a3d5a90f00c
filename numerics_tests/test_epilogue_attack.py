"""Paths that no plan saw, through GEMMs with an epilogue: the bits of the unfused model, or an error, no lost gradient.

Each model is planned on one path and then takes another, as when a flag, a hook, an adapter or a checkpoint comes
later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, backends
from mxfp8_recipe.backends.table import LAYOUTS, Layout
from mxfp8_recipe.fused import reference_ops
from mxfp8_recipe.fused.gemm.dact import Dact
from mxfp8_recipe.fused.spec import QuantSpec
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.epilogue_models import assert_same, pair, step, warnings_allowed

Path = Callable[[Any, Tensor], Any]


class Block(nn.Module):
    """Layers whose data flow is what `path` says at the time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.norm, self.act = nn.RMSNorm(WIDTH, eps=1e-6), nn.SiLU()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.path = path

    def forward(self, x: Tensor) -> Any:
        return self.path(self, x)


def mlp(m: Any, x: Tensor) -> Any:
    return m.down(m.act(m.up(m.norm(x))))


def plain(m: Any, x: Tensor) -> Any:
    return x + mlp(m, x)


def gated(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + m.down(F.silu(m.gate(h)) * m.up(h))


def by_module(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + m.down(m.act(m.gate(h)) * m.up(h))


def planned(path: Path, change: Callable[[nn.Module], Any] | None = None) -> tuple[Any, Any, Tensor]:
    """A model with epilogues on this path, changed afterwards, the same unfused, and an input."""
    x = torch.randn(2, 5, WIDTH).bfloat16()
    model, apart, report = pair(Block(path).bfloat16(), x)
    assert {epilogue.gemm for epilogue in report.plan.epilogues} == {"fprop", "dgrad"}
    for each in (model, apart):
        if change is not None:
            torch.manual_seed(1)
            change(each)
    return model, apart, x


def assert_same_on(path: Path, model: Any, apart: Any, x: Tensor, steps: int = 2) -> list[str]:
    """Every step on this path has the unfused bits; what the fused model warned of.

    In the step that ends a norm's edge its gradient is the sum of two, each rounded: 0.003 apart, measured.
    """
    model.path = apart.path = path
    said: list[str] = []
    for _ in range(steps):
        with warnings_allowed() as caught:
            found = step(model, x)
        ended = [str(w.message) for w in caught if "its quantized output was read by" in str(w.message)]
        with warnings_allowed():
            expected = step(apart, x)
        if any(message.startswith("norm:") for message in ended):
            assert_same(found[:1], expected[:1])
            assert_close(found, expected, 0.01)
        else:
            assert_same(found, expected)
        said += ended
    assert len(said) == len(set(said))
    return said


def assert_close(found: list[Tensor | None], expected: list[Tensor | None], share: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.float() - theirs.float()).norm() < share * theirs.float().norm()


def functional_product(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + m.down(F.silu(m.up(h)) * m.gate(h))


def module_product(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + m.down(m.act(m.up(h)) * m.gate(h))


def gate_alone(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    g = m.gate(h)
    return x + m.down(F.silu(g) * m.up(h)) + m.down(g)


def no_product(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    m.gate(h)
    return x + m.down(m.up(h))


def written(m: Any, x: Tensor) -> Any:
    a = m.act(m.up(m.norm(x)))
    y = m.down(a)
    a.mul_(2)
    return x + y


def no_grad_layers(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = mlp(m, x)
    return (x + y) * m.norm(x)


PATHS: dict[str, tuple[Path, Path]] = {
    "a function for the module, and a product": (plain, functional_product),
    "a module for the function": (gated, by_module),
    "halves swapped": (gated, functional_product),
    "halves swapped, by a module": (gated, module_product),
    "halves swapped, both by a module": (by_module, module_product),
    "a function for the gating module": (by_module, gated),
    "the gate read alone": (gated, gate_alone),
    "no product": (gated, no_product),
    "the input written to before the sum": (plain, written),
    "layers without grad, the sum with": (plain, no_grad_layers),
    "another shape": (plain, lambda m, x: x[:1] + mlp(m, x)),
    "another dtype": (plain, lambda m, x: x.float() + mlp(m, x)),
    "added in place": (plain, lambda m, x: (x * 1).add_(mlp(m, x.clone()))),
    "the sum of a subclass": (plain, lambda m, x: x.as_subclass(Named) + mlp(m, x)),
}


class Named(Tensor):
    """A subclass whose sums are plain tensors' to the caller."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if isinstance(result, Named) else result


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_no_plan_saw_has_the_unfused_bits(name: str) -> None:
    before, after = PATHS[name]
    assert_same_on(after, *planned(before))


def test_two_sums_of_one_output_end_the_edge() -> None:
    """The first GEMM has added its residual already, so that in this step two gradients reach the layer one by one."""

    def twice(m: Any, x: Tensor) -> Any:
        y = mlp(m, x)
        return (x + y) * (x * 2 + y)

    model, apart, x = planned(plain)
    model.path = apart.path = twice
    with pytest.warns(UserWarning, match=r"down: its quantized output was read by a second sum"):
        first = step(model, x)
    expected = step(apart, x)
    assert_same(first[:1], expected[:1])
    assert_close(first, expected, 0.1)  # each rounded to MXFP8 alone: 0.05 measured
    assert assert_same_on(twice, model, apart, x) == []


@pytest.mark.parametrize("what", ["weight", "bias", "an ordinary input", "a layer's output"])
def test_what_a_layer_still_needs_may_not_be_written_to(what: str) -> None:
    def path(m: Any, x: Tensor) -> Any:
        h = m.norm(x)
        h = h.clone() if what == "an ordinary input" else m.up(h) if what == "a layer's output" else h
        y = m.gate(h) if h.shape[-1] == WIDTH else m.down(h)
        with torch.no_grad():
            {"weight": m.gate.weight, "bias": m.gate.bias}.get(what, h).mul_(2)
        return x + y if y.shape == x.shape else F.silu(y) * m.up(m.norm(x))

    model, _, x = planned(plain if what == "a layer's output" else gated)
    model.path = path
    with warnings_allowed(), pytest.raises(RuntimeError, match="overwritten in place before the output was read"):
        step(model, x)


class Adapted(nn.Module):
    """A frozen layer and a low-rank update, added before or after, or in place."""

    def __init__(self, base: Any, order: str) -> None:
        super().__init__()
        self.base, self.order = base.requires_grad_(False), order
        self.a = nn.Linear(base.in_features, 8, bias=False).to(base.weight.dtype)
        self.b = nn.Linear(8, base.out_features, bias=False).to(base.weight.dtype)

    def forward(self, x: Any) -> Any:
        if self.order == "before":
            return self.b(self.a(x)) + self.base(x)
        out = self.base(x)
        if self.order == "in place":
            out += self.b(self.a(x))
            return out
        return out + self.b(self.a(x)) * 2


@pytest.mark.parametrize("order", ["before", "after", "in place"])
@pytest.mark.parametrize("layer", ["up", "gate", "down"])
def test_adapters_put_around_a_layer_later(layer: str, order: str) -> None:
    for path in (gated, plain):
        change = lambda m: setattr(m, layer, Adapted(getattr(m, layer), order))  # noqa: E731
        assert_same_on(path, *planned(path, change))


@pytest.mark.parametrize("layer", ["norm", "gate", "up", "act", "down"])
def test_layers_replaced_later(layer: str) -> None:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    new = {"norm": lambda: nn.LayerNorm(WIDTH), "act": nn.ReLU}.get(layer, lambda: nn.Linear(*shapes[layer]))
    assert_same_on(by_module, *planned(by_module, lambda m: setattr(m, layer, new().bfloat16())))


class Outer(nn.Module):
    """Adds what a module of its own gives."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.inner = Block(path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "backward, seen": lambda m, seen: m.register_full_backward_hook(lambda m, i, o: seen.append((i[0], o[0]))),
    "backward, changed": lambda m, seen: m.register_full_backward_hook(lambda m, i, o: tuple(3 * g for g in i)),
    "backward pre": lambda m, seen: m.register_full_backward_pre_hook(lambda m, o: seen.append((o[0],))),
    "forward": lambda m, seen: m.register_forward_hook(lambda m, i, o: seen.append((o.detach() * 1,))),
    "forward, changed": lambda m, seen: m.register_forward_hook(lambda m, i, o: o * 2),
    "tensor": lambda m, seen: m.register_forward_hook(lambda m, i, o: (o.register_hook(lambda g: g * 2), None)[1]),
    "of every module": lambda m, seen: nn.modules.module.register_module_full_backward_hook(
        lambda m, i, o: seen.append(tuple(g for g in o if g is not None))
    ),
}


@pytest.mark.parametrize("place", ["inner", "inner.gate", "inner.up", "inner.act", "inner.down"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_registered_later_fire_and_what_they_change_arrives(hook: str, place: str) -> None:
    """Also on a module that a value only leaves, whose hooks torch calls for tensors alone."""
    x = torch.randn(2, 5, WIDTH).bfloat16()
    path: Path = mlp if place != "inner.gate" else lambda m, x: m.down(m.act(m.gate(h := m.norm(x))) * m.up(h))
    model, apart, report = pair(Outer(path).bfloat16(), x)
    assert any(epilogue.text == "a residual" for epilogue in report.plan.epilogues)
    seen: list[list[Any]] = []
    results = []
    for each in (model, apart):
        seen.append([])
        handle = HOOKS[hook](each.get_submodule(place), seen[-1])
        with warnings_allowed():
            results.append([step(each, x) for _ in range(2)])
        handle.remove()
    for found, expected in zip(*results):
        assert_same(found, expected)
    assert len(seen[0]) == len(seen[1])
    for found, expected in zip(*seen):
        assert_same(list(found), list(expected))


def _into(m: Any, x: Tensor) -> Any:
    return x + checkpoint(lambda y: y.sin(), mlp(m, x), use_reentrant=True)


def _out(m: Any, x: Tensor) -> Any:
    return x + checkpoint(lambda x: mlp(m, x), x, use_reentrant=True).view(x.shape)


def _pair_into(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + m.down(checkpoint(lambda g, u: F.silu(g) * u, m.gate(h), m.up(h), use_reentrant=True))


def _pair_out(m: Any, x: Tensor) -> Any:
    return x + m.down(checkpoint(lambda h: F.silu(m.gate(h)) * m.up(h), m.norm(x).clone(), use_reentrant=True))


def _norm_out(m: Any, x: Tensor) -> Any:
    return x + m.down(m.act(m.up(checkpoint(m.norm, x, use_reentrant=True))))


@pytest.mark.parametrize(
    ("before", "after"),
    [(plain, _into), (plain, _out), (gated, _pair_into), (gated, _pair_out), (plain, _norm_out)],
    ids=["in", "out", "a pair in", "a product out", "a norm's out"],
)
def test_a_reentrant_checkpoint_loses_no_gradient(before: Path, after: Path) -> None:
    """One error for each edge that crosses its border; then tensors do."""
    model, apart, x = planned(before)
    model.path = apart.path = after
    errors = [_errors(model, x), _errors(apart, x)]
    assert errors[0], "no error at first"
    assert all(
        "was given to or by the autograd Function CheckpointFunction, which" in e for each in errors for e in each
    )
    assert assert_same_on(after, model, apart, x) == []


def _errors(model: nn.Module, x: Tensor) -> list[str]:
    """Those until it runs, three at most."""
    errors: list[str] = []
    while len(errors) < 3:
        try:
            with warnings_allowed():
                step(model, x)
            return errors
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def _sum_inside(m: Any, x: Tensor) -> Any:
    return checkpoint(torch.add, x, mlp(m, x), use_reentrant=False)


def _pair_inside(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + m.down(checkpoint(lambda g, u: F.silu(g) * u, m.gate(h), m.up(h), use_reentrant=False))


def _read_inside(m: Any, x: Tensor) -> Any:
    return x + checkpoint(lambda y: y.sin(), mlp(m, x), use_reentrant=False)


def _down_inside(m: Any, x: Tensor) -> Any:
    h = m.norm(x)
    return x + checkpoint(m.down, F.silu(m.gate(h)) * m.up(h), use_reentrant=False)


@pytest.mark.parametrize(
    ("before", "after"),
    [(plain, _sum_inside), (plain, _read_inside), (gated, _pair_inside), (gated, _down_inside)],
    ids=["a sum", "a reader", "a pair", "the next layer"],
)
def test_a_checkpoint_takes_values_that_are_not_computed_yet(before: Path, after: Path) -> None:
    assert_same_on(after, *planned(before))


@pytest.mark.parametrize("tied", ["gate and up", "a block called twice"])
def test_shared_weights(tied: str) -> None:
    x = torch.randn(2, 5, WIDTH).bfloat16()
    block = Block(gated if tied == "gate and up" else by_module)
    if tied == "gate and up":
        block.up.weight = block.gate.weight
    model, apart, _ = pair((block if tied == "gate and up" else nn.Sequential(block, block)).bfloat16(), x)
    for _ in range(2):
        assert_same(step(model, x), step(apart, x))


def test_a_layer_without_grad_is_compiled_as_it_runs() -> None:
    """Compiled code computes the sum in the grad mode of the sum, and the layer in that of the layer."""
    model, apart, x = planned(plain)
    model.path = apart.path = no_grad_layers
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with warnings_allowed():
        assert_same(step(model, x, compiled), step(apart, x))


def test_rows_of_transposed_derivatives_start_where_the_layout_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op gives the part of the padded rows that holds tokens, with their strides; its fake says so too."""
    rows, cols, spec = 37, 64, QuantSpec()
    monkeypatch.setitem(LAYOUTS, "reference", Layout(row_bytes=16))
    genuine = backends.resolve("gemm_dact", "reference", torch.device("cpu"))
    monkeypatch.setattr(
        "mxfp8_recipe.backends.epilogues.resolve",
        lambda *unused: lambda *args, **kwargs: genuine(*args, **kwargs, pad_tokens=16),
    )
    a, b = (reference_ops.quantize_both(torch.randn(n, 96).bfloat16(), spec, None) for n in (rows, cols))
    z, text = torch.randn(rows, cols).bfloat16(), spec.encode()
    steps = Dact(activation="silu", rowwise=spec, colwise=spec, act_colwise=spec, emit_high=False).encode()
    args = (a[0], a[1], text, b[0], b[1], text, z, None, steps, torch.bfloat16, torch.bfloat16, "reference")
    out = backends.gemm_dact(*args)
    for t in (out[6], out[12]):
        assert (t.shape, t.stride()) == ((cols, rows), (48, 1))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in args]
        for fake, real in zip(backends.gemm_dact(*fakes), out):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_the_recipe_can_be_applied_again_after_all_that() -> None:
    """What ended belongs to the carried-out plan, not to the layers."""
    from mxfp8_recipe import revert

    model, apart, x = planned(gated)
    assert_same_on(functional_product, model, apart, x, steps=1)
    revert(model)
    model.path = gated
    report = apply_recipe(model, example_inputs=x)
    revert(apart)
    apart.path = gated
    apply_recipe(apart, blocks.unfused("mxfp8"), example_inputs=x)
    assert_same(step(model, x), step(apart, x))
    assert report.unfused == {}
