"""Compiled code runs the bits of eager code, in one graph, forward and backward."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, revert
from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.ab.types import Batch, FeatureSpec
from numerics_tests.helpers import MLP, gradients, same_bits

NO_COMPILER = None if shutil.which("g++") or shutil.which("clang++") else "inductor needs a C++ compiler, none is here"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def swapped(recipe: str = "mxfp8", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(MLP(), MLP()).to(dtype)
    apply_recipe(model, recipe)
    return model


def seeded(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(11)
    out, grad_input, grads = gradients(module, x, grad)
    return out, grad_input, {name.removeprefix("_orig_mod."): g for name, g in grads.items()}


def assert_same(ours: tuple, theirs: tuple) -> None:
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    assert all(same_bits(ours[2][name], g) for name, g in theirs[2].items())


@pytest.mark.parametrize("eager_first", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hopper", "mxfp8_square_activations", "gem"])
def test_one_graph_bitwise_equal_to_eager(recipe: str, eager_first: bool) -> None:
    """Under aot_eager, stochastic rounding included; whether or not the model ran eagerly before."""
    model = swapped(recipe)
    twin = copy.deepcopy(model)
    x, grad = torch.randn(70, 64), torch.randn(70, 64)
    if eager_first:
        seeded(model, x, grad)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    result = seeded(compiled, x, grad)
    assert_same(result, seeded(twin, x, grad))
    revert(twin)
    assert not torch.equal(result[0], twin(x))


def test_autocast_inside_the_graph() -> None:
    model = swapped()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    x, grad = torch.randn(33, 64), torch.randn(33, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(seeded(compiled, x, grad), seeded(model, x, grad))


def test_other_token_counts_need_no_new_graph_each() -> None:
    """Dynamic shapes: many ragged lengths, at most a static and a dynamic graph, bits as eager."""
    model = swapped()
    graphs: list[object] = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    with torch.no_grad():
        for tokens in (40, 33, 57, 64, 100, 71):
            x = torch.randn(tokens, 64)
            assert same_bits(compiled(x), twin(x))
    assert len(graphs) <= 2


def test_a_compiled_training_step_trains_the_eager_weights() -> None:
    eager = swapped("gem")
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for module, parameters in ((eager, eager.parameters()), (compiled, model.parameters())):
        torch.manual_seed(4)
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (module(torch.randn(40, 64)) - 1).square().mean().backward()
            optimizer.step()
    assert all(same_bits(a, b) for a, b in zip(eager.parameters(), model.parameters()))


@pytest.mark.parametrize("name", ["dcnv2", "gem-small"])
def test_a_swapped_ctr_model_is_one_graph_with_the_bits_of_eager(name: str) -> None:
    """Forward and all gradients of a click model with embeddings and jagged histories."""
    spec = FeatureSpec(num_dense=5, cardinalities=(40, 7), history_field=0, max_history=6, tasks=("ctr", "cvr"))
    model = build_model(name, spec)
    plain = copy.deepcopy(model)
    lengths = torch.tensor([3, 0, 6, 1, 2])
    labels = torch.randint(0, 2, (5, 2)).float()
    batch = Batch(
        dense=torch.randn(5, 5),
        sparse=torch.randint(0, 7, (5, 2)),
        labels=labels,
        weights=torch.ones_like(labels),
        history=torch.randint(1, 40, (12,)),
        history_offsets=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
    )
    apply_recipe(model, example_inputs=(batch,))
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    outputs = []
    for module in (model, compiled):
        outputs.append(module(batch))
        F.binary_cross_entropy_with_logits(outputs[-1], labels).backward()
    assert same_bits(outputs[1], outputs[0])
    assert not torch.equal(plain(batch), outputs[0])
    for (parameter_name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert p.grad is not None
        assert q.grad is not None
        assert same_bits(q.grad, p.grad), parameter_name


def distances(a: tuple, b: tuple) -> dict[str, float]:
    """Relative difference of output, input gradient and each parameter's gradient."""
    pairs = {"output": (a[0], b[0]), "grad_input": (a[1], b[1])} | {name: (a[2][name], b[2][name]) for name in b[2]}
    return {name: float((p.double() - q.double()).norm() / q.double().norm()) for name, (p, q) in pairs.items()}


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_inductor_is_no_further_from_eager_than_bf16s_own() -> None:
    """BF16 code moves under inductor, because fused pointwise code rounds less often; MXFP8 may move no more.

    The farthest gradients are the norm's, 64 numbers that differ by BF16 rounding in both models: measured over three
    seeds 0.0103 to 0.0114 here, 0.0101 to 0.0108 in BF16. Two such draws are within a factor 1.5 of each other.
    """
    ours = MLP().to(torch.bfloat16)
    plain = copy.deepcopy(ours)
    apply_recipe(ours)
    x, grad = torch.randn(70, 64).bfloat16(), torch.randn(70, 64).bfloat16()
    moved = []
    for model in (ours, plain):
        eager = seeded(model, x, grad)
        moved.append(distances(seeded(torch.compile(model, fullgraph=True), x, grad), eager))
    assert not torch.equal(ours(x), plain(x))
    assert max(moved[0].values()) <= 1.5 * max(moved[1].values())
    assert moved[0]["output"] <= moved[1]["output"]
    assert all(moved[0][name] <= max(moved[1][name], 1e-6) for name in moved[0] if name.startswith(("up", "down")))
