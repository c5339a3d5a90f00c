"""Edges through attention: projections hand it heads in MXFP8, and it hands its output projection MXFP8."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mxfp8_recipe import apply_recipe, load_recipe, revert
from mxfp8_recipe.autograd import ProjectionFunction
from mxfp8_recipe.mx_heads import AttentionOutput, Heads

WIDTH, HEADS, BATCH, LENGTH = 64, 2, 2, 40
RECIPES = ("mxfp8", "mxfp8_square_activations", "mxfp8_hopper")


class Attention(nn.Module):
    """Self-attention as people write it, options for what may stand in the way of an edge."""

    def __init__(self, *, causal: bool = False, doubled: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.causal, self.doubled = causal, doubled

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], HEADS, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.doubled:
            q = q * 2
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(out.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def encoder(norm_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=norm_first, activation=nn.GELU()
    )


MODELS = {"call": Block, "pre-norm encoder": encoder, "post-norm encoder": lambda: encoder(norm_first=False)}


def data() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, autocast: bool, steps: int = 3) -> list[Tensor]:
    """Outputs of some training steps and of evaluation, then the trained parameters."""
    optimizer, results = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(data())
        out.float().square().mean().backward()
        optimizer.step()
        results.append(out.detach())
    with torch.no_grad():
        results.append(model.eval()(data()))
    return results + [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_fused_equals_unfused_bitwise(name: str, recipe: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    fused, unfused = copy.deepcopy(model), copy.deepcopy(model)
    report = apply_recipe(fused, recipe, example_inputs=data(), strict=True)
    apply_recipe(unfused, load_recipe(recipe).model_copy(update={"fuse": False}), example_inputs=data())
    assert any(edge.fused and edge.kind == "attention" for edge in report.plan.edges)
    before = [p.clone() for p in fused.parameters()]
    for a, b in zip(train(fused, autocast), train(unfused, autocast)):
        assert torch.equal(a, b)
    assert not any(torch.equal(a, b) for a, b in zip(before, fused.parameters()))
    assert not report.unfused


@pytest.mark.parametrize("name", MODELS)
def test_values_travel_as_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = MODELS[name](), {"projected": 0, "merged": 0}
    apply_recipe(model, example_inputs=data(), strict=True)
    forward, after = ProjectionFunction.forward, AttentionOutput.after

    def counted(*args):
        counts["projected"] += 1
        return forward(*args)

    def merged(self, name, args, kwargs):
        counts["merged"] += name in ("reshape", "flatten")
        return after(self, name, args, kwargs)

    monkeypatch.setattr(ProjectionFunction, "forward", staticmethod(counted))
    monkeypatch.setattr(AttentionOutput, "after", merged)
    model(data()).sum().backward()
    assert counts == {"projected": 3 if name == "call" else 1, "merged": 1}


class Allocations(TorchDispatchMode):
    """Counts fresh storages as large as a (tokens, width) activation that are not bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.dtype != torch.uint8:
                size = t.untyped_storage().nbytes()
                if size >= BATCH * LENGTH * WIDTH * t.element_size():
                    self.storages[t.untyped_storage().data_ptr()] = t
        return out


def test_projected_heads_are_never_stored_in_high_precision() -> None:
    """In evaluation: one activation for attention's own output, one for the projection's, one for the residual."""
    counts = {}
    for fuse in (True, False):
        torch.manual_seed(0)
        model = Block()
        apply_recipe(model, load_recipe("mxfp8").model_copy(update={"fuse": fuse}), example_inputs=data())
        with torch.no_grad(), Allocations() as seen:
            model(data())
        counts[fuse] = len(seen.storages)
    # Unfused also stores the norm's output, query, key, value, and the merged heads.
    assert counts[False] - counts[True] >= 5, counts
    assert counts[True] <= 4, counts


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"causal": True}, "mask"), ({"doubled": True}, "query does not come straight from an MXFP8 linear")],
)
def test_what_stands_in_the_way_is_said(options: dict[str, bool], reason: str) -> None:
    model = Block(**options)
    report = apply_recipe(model, example_inputs=data(), strict=True)
    edges = [edge for edge in report.plan.edges if edge.kind == "projection"]
    assert edges
    for edge in edges:
        assert not edge.fused
        assert reason in edge.reason
    out = model(data())
    out.sum().backward()
    assert torch.isfinite(out).all()


def test_an_unplanned_reader_of_heads_gets_the_right_values() -> None:
    model = Block()
    apply_recipe(model, example_inputs=data())
    seen = []
    model.attention.q.register_forward_hook(lambda module, args, out: seen.append(out + 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(data()).sum().backward()
        model(data())
    assert len([w for w in caught if "attention.q" in str(w.message)]) == 1
    plain = copy.deepcopy(model)
    revert(plain)
    expected = plain.attention.q(plain.norm(data()))
    for value in seen:
        assert not isinstance(value, Heads)
        assert (value - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_compiled_equals_eager_bitwise(name: str) -> None:
    torch._dynamo.reset()
    model = MODELS[name]()
    apply_recipe(model, example_inputs=data(), strict=True)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        out = run(data())
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_revert_restores_outputs_bitwise() -> None:
    model = Block()
    expected = model(data())
    apply_recipe(model, example_inputs=data())
    assert not torch.equal(model(data()), expected)
    revert(model)
    assert torch.equal(model(data()), expected)


@pytest.mark.parametrize("pattern", ["0.attention", "kind:attention", r"re:0\.att.*on"])
def test_an_override_may_name_a_call_before_it_was_seen(pattern: str) -> None:
    model = nn.Sequential(Block(), Block())
    report = apply_recipe(model, overrides={pattern: "bf16"})
    assert repr(pattern) in str(report)
    model(data()).sum().backward()
    calls = {layer.fqn: layer.new_type for layer in report.layers if layer.kind == "attention"}
    assert calls["0.attention"] is None
    assert (calls["1.attention"] is None) == (pattern == "kind:attention")


def test_an_override_that_names_no_call_after_all_is_an_error() -> None:
    model = nn.Sequential(Block(), Block())
    apply_recipe(model, overrides={"0": "bf16"})
    with pytest.raises(ValueError, match="'0' matches no layer"):
        model(data())
