"""Models that try to break a fused model: overwritten values, other threads, recomputation, odd shapes and readers."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, revert
from mxfp8_recipe.swap import _settle
from numerics_tests.blocks import fused_producers, reason_of, unfused
from numerics_tests.helpers import gradients, same_bits

WIDTH = 64
SHAPE = (2, 8, WIDTH)


class Parts(nn.Module):
    """Layers for the forwards below, which differ while `late` is set from the one that was recorded."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.ReLU()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


def made(cls: type[nn.Module], recipe: Any = "mxfp8", example: bool = True) -> tuple[Any, Any, Tensor]:
    """A model with a recipe, its report, and an input; the same weights and input for every recipe."""
    torch.manual_seed(0)
    model = cls()
    x = torch.randn(SHAPE)
    return model, apply_recipe(model, recipe, example_inputs=(x,) if example else None), x


def assert_steps_equal(cls: type[nn.Module], steps: int = 3, example: bool = True) -> Any:
    """Fused and unfused models agree to the bit over some steps; the fused one's report."""
    ours, report, x = made(cls, example=example)
    theirs, _, _ = made(cls, unfused(), example=example)
    for _ in range(steps):
        (out, grad, grads), expected = gradients(ours, x), gradients(theirs, x)
        assert same_bits(out, expected[0])
        assert same_bits(grad, expected[1])
        assert all(same_bits(g, expected[2][name]) for name, g in grads.items())
    return report


class OverwritesWhatAnActivationRead(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        p = self.act(h)
        with torch.no_grad():
            h.add_(1)
        return self.b(p)


class OverwritesWhatAGateMultiplied(Parts):
    def forward(self, x: Tensor) -> Tensor:
        up = self.c(x)
        p = self.act(self.a(x)) * up
        if not up.requires_grad:
            up.zero_()
        return self.b(p)


@pytest.mark.parametrize("cls", [OverwritesWhatAnActivationRead, OverwritesWhatAGateMultiplied])
def test_what_a_pending_value_is_computed_from_may_be_overwritten(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain, x = cls(), torch.randn(SHAPE)
    with torch.no_grad():
        expected = plain(x)
        for recipe in ("mxfp8", unfused()):
            model = cls()
            model.load_state_dict(plain.state_dict())
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            apply_recipe(model, recipe, example_inputs=(x,))
            assert (model(x) - expected).norm() < 0.1 * expected.norm()


def test_relu_lets_its_input_be_overwritten_as_torch_does() -> None:
    assert_steps_equal(OverwritesWhatAnActivationRead)


class LateOverwrite(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        p = self.act(h)
        if self.late:
            h.add_(1)
        return self.b(p)


def test_an_overwrite_nobody_planned_for_is_an_error_not_another_number() -> None:
    model, report, x = made(LateOverwrite)
    assert fused_producers(report) == ["act"]
    model.late = True
    with torch.no_grad(), pytest.raises(RuntimeError, match="act: what its output is computed from was overwritten"):
        model(x)


class WritesThroughData(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h.data.mul_(3)
        return self.b(h) + h


def test_writes_through_data_keep_an_edge_unfused() -> None:
    assert reason_of(assert_steps_equal(WritesThroughData), "norm") == "its output is overwritten in place"


class Returns(Parts):
    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        return {"hidden": h, "out": self.b(h)}


@pytest.mark.parametrize("example", [True, False])
def test_a_model_returns_tensors(example: bool) -> None:
    model, _, x = made(Returns, example=example)
    for _ in range(3):
        assert all(isinstance(value, Tensor) for value in model(x).values())


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda h, up: torch.square(h),
    "pow": lambda h, up: h**2,
    "cube": lambda h, up: F.relu(h) ** 3,
    "relu squared": lambda h, up: F.relu(h).square(),
    "relu squared, gated": lambda h, up: F.relu(h) ** 2 * up,
    "twice": lambda h, up: F.silu(F.relu(h)),
    "scaled": lambda h, up: F.silu(h) * 0.5,
    "broadcast": lambda h, up: F.silu(h) * up[..., :1],
    "gated": lambda h, up: F.silu(h) * up,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pointwise_code_of_every_sort(name: str) -> None:
    class Pointwise(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(FUNCTIONS[name](self.a(x), self.c(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = assert_steps_equal(Pointwise, steps=2)
    assert (fused_producers(report) == ["a"]) == (name in ("relu squared", "gated"))


READERS: dict[str, Callable[[Tensor], Any]] = {
    "power of a tensor": lambda h: h ** torch.full((WIDTH,), 2.0),
    "view as another dtype": lambda h: h.view(torch.int32),
    "product into a buffer": lambda h: torch.mul(h, h, out=torch.empty(SHAPE)),
}


@pytest.mark.parametrize("name", READERS)
def test_unplanned_calls_with_unusual_arguments(name: str) -> None:
    class Late(Parts):
        def forward(self, x: Tensor) -> Any:
            h = self.act(self.a(x))
            return READERS[name](h) if self.late else self.b(h)

    model, _, x = made(Late)
    model.late = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_bits(model(x), READERS[name](F.relu(model.a(x))))


class SplitOnly(nn.Module):
    """As many heads as tokens, so that heads split and heads turned have one shape."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 8 * 32) for _ in range(3))
        self.o = nn.Linear(8 * 32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, 8, 32) for layer in (self.q, self.k, self.v))
        extra = (q * torch.arange(length).view(1, length, 1, 1)).sum() if self.late else 0
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(out.transpose(1, 2).flatten(2)) + extra


def test_heads_know_whether_they_were_turned() -> None:
    outs = []
    for recipe in ("mxfp8", unfused()):
        model, _, x = made(SplitOnly, recipe)
        model.late = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs.append(gradients(model, x))
    assert same_bits(outs[0][0], outs[1][0])


class Checkpointed(Parts):
    def block(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_a_recomputed_first_forward_is_recomputed_as_it_was() -> None:
    report = assert_steps_equal(Checkpointed, example=False)
    assert fused_producers(report) == ["norm", "act"]


def test_several_checkpointed_forwards_before_the_first_backward() -> None:
    model, report, x = made(Checkpointed, example=False)
    (model(x) + model(2 * x)).sum().backward()
    assert fused_producers(report) == []
    model(x).sum().backward()
    assert fused_producers(report) == ["norm", "act"]


def test_second_derivatives_are_refused_by_name() -> None:
    model, _, x = made(Checkpointed)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(model.block(x).square().sum(), x, create_graph=True)


class NormAndLinear(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def test_threads_share_a_first_forward() -> None:
    model, _, x = made(NormAndLinear, example=False)
    outs: list[Tensor] = []

    def work() -> None:
        for _ in range(4):
            outs.append(model(x))
            assert not torch.overrides._get_current_function_mode_stack()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 16
    assert all(same_bits(out, outs[0]) for out in outs)
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert [hook for hook in hooks if hook is not _settle] == []


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: x.reshape(-1, x.shape[-1]).reshape(x.shape),
    lambda x: x[:, 0:, :],
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x: x.flatten(0, 1).view(x.shape),
    lambda x: torch.cat(x.chunk(2, dim=1), dim=1),
    lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
)


class Random(nn.Module):
    """A random chain of norms, linears, activations, gates, attention, views and residuals."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.draw = random.Random(seed)
        self.blocks = nn.ModuleList(self._block() for _ in range(self.draw.randint(1, 3)))
        if self.draw.random() < 0.3:
            self.blocks.append(self.blocks[0])
        self.head = nn.Linear(WIDTH, 32)

    def _block(self) -> nn.Module:
        norm = self.draw.choice([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False), nn.RMSNorm(WIDTH)])
        act = self.draw.choice([nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU("tanh")])
        sizes = {"up": (64, 96), "gate": (64, 96), "down": (96, 64), "packed": (64, 192), "q": (64, 64), "o": (64, 64)}
        layers = {name: nn.Linear(*size, bias=self.draw.random() < 0.7) for name, size in sizes.items()}
        block = nn.ModuleDict({"norm": norm, "act": act, **layers})
        functions = [act, F.relu, F.silu, torch.square, lambda x: F.relu(x) ** 2, torch.tanh, lambda x: x]
        block.kind = self.draw.choice(["mlp", "gated", "packed", "attention", "two readers"])
        block.view = self.draw.choice(VIEWS)
        block.function = self.draw.choice(functions)
        block.residual = self.draw.random() < 0.6
        return block

    def _branch(self, block: Any, n: Tensor) -> Tensor:
        if block.kind == "mlp":
            return block["down"](block.view(block.function(block["up"](n))))
        if block.kind == "gated":
            return block["down"](block.function(block["gate"](n)) * block["up"](n))
        if block.kind == "packed":
            first, second = block["packed"](n).chunk(2, -1)
            return block["down"](block.function(first) * second)
        if block.kind == "two readers":
            return block["down"](block.function(block["up"](n))) + n
        projected = (block["q"](n), block["up"](n)[..., :64], block["o"](n))
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in projected)
        return block["o"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            branch = self._branch(block, block.view(block["norm"](x)))
            x = x + branch if block.residual else branch
        return self.head(x)


@pytest.mark.parametrize("seed", range(24))
def test_random_models_fused_unfused_and_plain(seed: int) -> None:
    x = torch.randn(2, 1 + seed % 5, WIDTH)
    plain = gradients(Random(seed), x)
    recipe = ("mxfp8", "mxfp8_square", "gem")[seed % 3]
    results = []
    for chosen in (recipe, unfused(recipe)):
        model = Random(seed)
        apply_recipe(model, chosen, example_inputs=(x,))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*quantized output.*")
            results.append(gradients(model, x))
    (out, grad, grads), expected = results
    assert same_bits(out, expected[0])
    assert same_bits(grad, expected[1])
    assert all(same_bits(g, expected[2][name]) for name, g in grads.items())
    assert (out - plain[0]).norm() < 0.5 * plain[0].norm()
    first = Random(seed)
    apply_recipe(first, recipe)
    before, after = gradients(first, x), gradients(first, x)
    assert same_bits(before[0], after[0])
    assert same_bits(before[1], after[1])


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("where", range(4))
def test_backward_hooks_registered_after_the_plan(where: int) -> None:
    """A producer's sees its tensors at once, a reader's from the next step on."""
    seen: list[list[Tensor]] = []
    for recipe in ("mxfp8", unfused()):
        model, _, x = made(Chain, recipe)
        grads: list[Tensor] = []
        model[where].register_full_backward_hook(lambda module, into, out, grads=grads: grads.append(into[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                gradients(model, x)
        seen.append(grads)
    for ours, theirs in list(zip(*seen))[1 if where in (1, 3) else 0 :]:
        assert same_bits(ours, theirs)


SAME_VALUE: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as": lambda h: h.view_as(h),
    "reshape by keyword": lambda h: h.reshape(shape=(-1, WIDTH)),
    "view by keyword": lambda h: h.view(size=(-1, WIDTH)),
    "contiguous in a format": lambda h: h.contiguous(memory_format=torch.contiguous_format),
    "copied": lambda h: h.to(torch.float32, copy=True),
    "to a device and dtype": lambda h: h.to("cpu", torch.float32),
    "to by keyword": lambda h: h.to(dtype=torch.float32),
    "to another's": lambda h: h.to(torch.zeros(1)),
    "to another dtype and back": lambda h: h.to(torch.bfloat16).float(),
    "expanded": lambda h: h[:, :1].expand(SHAPE),
    "three chunks": lambda h: torch.cat(h.chunk(3, 1), 1),
    "transposed twice": lambda h: h.mT.mT,
}


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", SAME_VALUE)
def test_a_recorded_view_is_one_that_travels(name: str, example: bool) -> None:
    class Viewed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            n = self.norm(x)
            h = self.act(self.a(n))
            return self.b(SAME_VALUE[name](n)) + self.c(SAME_VALUE[name](h))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*quantized output.*")
        assert_steps_equal(Viewed, steps=2, example=example)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({1: "bf16"}, "got the pattern 1, expected text"),
        ({"": "bf16"}, "the root is a container, say 're:.\\*' for all layers"),
        ({"re:1": "bf16", "1": "mxfp8"}, "'re:1' matches no layer; those it names are spoken of by closer rules"),
        ([("1", "bf16")], "expected a mapping of layer patterns"),
    ],
)
def test_overrides_that_say_nothing_are_explained(overrides: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        apply_recipe(nn.Sequential(*Chain()), overrides=overrides)


class InCheckpoints(Parts):
    """A reentrant checkpoint around each layer: what leaves one has to be a tensor, or its gradient is lost."""

    def forward(self, x: Tensor) -> Tensor:
        n = checkpoint(self.norm, x, use_reentrant=True)
        h = checkpoint(self.act, checkpoint(self.a, n, use_reentrant=True), use_reentrant=True)
        return x + checkpoint(self.b, h, use_reentrant=True)


@pytest.mark.parametrize("example", [True, False])
def test_reentrant_checkpoints_side_by_side(example: bool) -> None:
    report = assert_steps_equal(InCheckpoints, example=example)
    assert fused_producers(report) == []
    model, _, x = made(InCheckpoints, example=example)
    for _ in range(2):
        assert len(gradients(model, x)[2]) == 6  # all but those of the layer nobody calls


class LeavesEarly(Parts):
    """Returns what an edge carries, in a container, on a path that no recording took."""

    def forward(self, x: Tensor) -> Any:
        n = self.norm(x)
        if self.late:
            return {"hidden": [n], "input": x}
        h = self.act(self.a(n))
        return (h, n) if self.late is None else self.b(h)


@pytest.mark.parametrize("late", [True, None])
@pytest.mark.parametrize("example", [True, False])
def test_nothing_leaves_the_model_on_an_edge(late: bool | None, example: bool) -> None:
    outputs = []
    for recipe in ("mxfp8", unfused()):
        model, _, x = made(LeavesEarly, recipe, example)
        model(x.clone().requires_grad_()).sum().backward()
        model.late = late
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model(x)
        leaves = [out["hidden"][0], out["input"]] if late else list(out)
        assert all(type(leaf) is Tensor for leaf in leaves)
        outputs.append(leaves)
    assert all(same_bits(a, b) for a, b in zip(*outputs))


def test_reverting_takes_the_watch_on_outputs_away() -> None:
    model, _, _ = made(LeavesEarly)
    assert model._forward_hooks
    revert(model)
    assert not model._forward_hooks
