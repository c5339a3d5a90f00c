"""Edges found by the first eager training forward, where no example inputs were given."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, revert
from mxfp8_recipe.mx_tensor import MXTensor, Traveling
from mxfp8_recipe.swap import _settle
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, QKV, WIDTH, Block, Pair, SwiGLU, fused_producers
from numerics_tests.helpers import gradients, same_bits

SHAPE = (2, 19, WIDTH)
NOT_YET = "No edge is fused yet: they are found by the first eager training forward."


def hooks_of(model: nn.Module) -> list[int]:
    """How many hooks of each sort the modules have, beside the one that watches what a fused model returns."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
              "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
    found = [[hook for m in model.modules() for hook in getattr(m, table).values()] for table in tables]
    return [sum(hook is not _settle for hook in hooks) for hooks in found]


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    assert all(same_bits(ours[2][name], g) for name, g in theirs[2].items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_hopper", "gem"])
def test_fused_from_the_second_forward_on_with_identical_bits(recipe: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model, x = nn.Sequential(Block(), Block()).to(dtype), torch.randn(SHAPE).to(dtype)
    plain, before = copy.deepcopy(model), hooks_of(model)
    report = apply_recipe(model, recipe)
    stored = copy.deepcopy(plain)
    apply_recipe(stored, blocks.unfused(recipe))
    assert report.plan.recorded == ""
    assert NOT_YET in str(report)
    steps = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        for module in (model, model, model, stored, stored):
            torch.manual_seed(3)
            steps.append(gradients(module, x))
    for step in steps[1:]:
        assert_same(step, steps[0])
    assert not torch.equal(steps[0][0], plain(x).to(steps[0][0].dtype))
    assert report.plan.recorded == "first forward"
    assert len(fused_producers(report)) >= 3
    assert isinstance(model[0].mlp_norm(x), MXTensor)
    assert "edges are fused (from first forward)" in str(report)
    assert NOT_YET not in str(report)
    assert hooks_of(model) == before


def test_the_first_forward_itself_is_unfused_and_already_quantized() -> None:
    model, x = QKV(), torch.randn(SHAPE)
    plain = copy.deepcopy(model)
    seen: list[type] = []
    model.norm.register_forward_hook(lambda m, a, out: seen.append(type(out)))
    apply_recipe(model)
    assert not torch.equal(model(x), plain(x))
    model(x)
    assert seen == [Tensor, MXTensor]


def test_pointwise_code_stays_as_it_is_and_says_why() -> None:
    """Taking it over would change rounding after the first step: that needs example_inputs."""
    model, x = SwiGLU(), torch.randn(SHAPE)
    report = apply_recipe(model)
    first, second = gradients(model, x), gradients(model, x)
    assert_same(first, second)
    (edge,) = report.plan.edges
    assert (edge.fused, edge.reason) == (False, "pointwise code in a forward fuses only when example_inputs are given")


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval"])
def test_forwards_without_gradients_do_not_record(mode: str) -> None:
    """Neither does validation before training; evaluation in grad mode counts as a forward like any other."""
    model, x = Pair(), torch.randn(SHAPE)
    report = apply_recipe(model)
    waiting = hooks_of(model)
    for _ in range(2):
        with torch.no_grad() if mode != "inference" else torch.inference_mode():
            model.train(mode != "eval")(x)
    assert report.plan.recorded == ""
    assert hooks_of(model) == waiting
    assert isinstance(model.norm(x), Tensor)
    first = gradients(model.train(), x)
    assert fused_producers(report) == ["norm"]
    assert_same(gradients(model, x), first)


class Fails(Pair):
    fail = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.fail:
            raise KeyError("the data was bad")
        return self.linear(h)


def test_an_exception_in_the_first_forward_leaves_nothing_behind() -> None:
    model, x = Fails(), torch.randn(SHAPE)
    before = hooks_of(model)
    report = apply_recipe(model)
    waiting = hooks_of(model)
    for _ in range(2):
        with pytest.raises(KeyError, match="the data was bad"):
            model(x)
        assert hooks_of(model) == waiting
        assert report.plan.recorded == ""
        assert not torch.overrides._get_current_function_mode_stack()
    model.fail = False
    first = gradients(model, x)
    assert fused_producers(report) == ["norm"]
    assert hooks_of(model) == before
    assert_same(gradients(model, x), first)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_under_compile_nothing_fuses_and_the_report_says_so() -> None:
    model, x = Pair(), torch.randn(SHAPE)
    stored = copy.deepcopy(model)
    report = apply_recipe(model)
    apply_recipe(stored, blocks.unfused())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        ours, theirs = gradients(compiled, x), gradients(stored, x)
        assert same_bits(ours[0], theirs[0])
        assert same_bits(ours[1], theirs[1])
    assert report.plan.recorded == ""
    assert fused_producers(report) == []
    text = " ".join(str(report).split())
    assert NOT_YET in text
    assert "Pass example_inputs to fuse from the first step, under torch.compile, and across pointwise code." in text
    assert isinstance(model.norm(x), Tensor)
    gradients(model, x)
    assert fused_producers(report) == ["norm"]


def test_on_the_meta_device_nothing_fuses_and_the_report_says_so() -> None:
    with torch.device("meta"):
        model = Pair()
    report = apply_recipe(model, example_inputs=torch.randn(SHAPE, device="meta"))
    assert "example_inputs cannot run on the meta device: no edge is fused." in str(report)
    assert fused_producers(report) == []
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    first = gradients(model, torch.ones(SHAPE))
    assert fused_producers(report) == ["norm"]
    assert_same(gradients(model, torch.ones(SHAPE)), first)


@pytest.mark.parametrize("after", [False, True], ids=["before the forward", "after it"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_before_and_after(way: str, after: bool) -> None:
    """A copy waits for its own first forward, or carries its own edges; neither touches the other."""
    model, x = Pair(), torch.randn(SHAPE)
    plain = copy.deepcopy(model)
    report = apply_recipe(model)
    if after:
        gradients(model, x)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    expected = gradients(twin, x)
    assert isinstance(twin.norm(x), MXTensor)
    assert isinstance(model.norm(x), MXTensor) == after
    assert_same(gradients(twin, x), expected)
    assert (fused_producers(report) == ["norm"]) == after
    assert_same(gradients(model, x), expected)
    assert hooks_of(twin) == hooks_of(plain)
    for module in (twin, model):
        assert revert(module) == 2
        assert same_bits(module(x), plain(x))
        assert vars(module).keys() == vars(plain).keys()
        assert not isinstance(module.norm(x), Traveling)


def test_revert_before_the_first_forward_removes_the_hooks() -> None:
    model, x = Pair(), torch.randn(SHAPE)
    plain, before = copy.deepcopy(model), hooks_of(model)
    apply_recipe(model)
    assert hooks_of(model) != before
    assert revert(model) == 2
    assert hooks_of(model) == before
    assert_same(gradients(model, x), gradients(plain, x))
    report = apply_recipe(model)
    gradients(model, x)
    assert fused_producers(report) == ["norm"]


def test_inside_a_larger_model_and_in_parts() -> None:
    """The recipe's root need not be the model's: each part records its own first forward."""
    model, x = nn.Sequential(Pair(out=WIDTH), nn.Tanh(), Pair()), torch.randn(SHAPE)
    stored = copy.deepcopy(model)
    reports = [apply_recipe(model[0]), apply_recipe(model[2], "mxfp8_square")]
    apply_recipe(stored[0], blocks.unfused())
    apply_recipe(stored[2], blocks.unfused("mxfp8_square"))
    for _ in range(2):
        assert_same(gradients(model, x), gradients(stored, x))
    assert [fused_producers(report) for report in reports] == [["norm"], ["norm"]]


def test_a_first_forward_of_another_path_than_the_rest() -> None:
    """Warm-up steps that skip a branch leave its edge unfused, not wrong; readers it did not see end the edge."""

    class Warm(Pair):
        steps = 0

        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(WIDTH, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            h = self.norm(x)
            return self.linear(h) + (self.late(h) + h.sum() if self.steps > 2 else 0.0)

    model, x = Warm(), torch.randn(SHAPE)
    stored = copy.deepcopy(model)
    report = apply_recipe(model)
    apply_recipe(stored, blocks.unfused())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            ours, theirs = gradients(model, x), gradients(stored, x)
            assert same_bits(ours[0], theirs[0])
            if step != 2:  # where the edge ends, two paths meet at x
                assert_same(ours, theirs)
    assert len([w for w in caught if "un-fused" in str(w.message)]) == 1
    assert list(report.unfused) == ["norm"]


def test_ddp_wrapped_before_the_first_forward() -> None:
    """The wrapper calls the model; its gradients are those of one process."""
    if not dist.is_available():
        pytest.skip("torch.distributed is not in this build")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = nn.Sequential(Block(), Block()), torch.randn(SHAPE)
        stored = copy.deepcopy(model)
        report = apply_recipe(model)
        apply_recipe(stored, blocks.unfused())
        wrapped = nn.parallel.DistributedDataParallel(model)
        expected = gradients(stored, x)
        for _ in range(3):
            out, grad_input, grads = gradients(wrapped, x)
            assert same_bits(out, expected[0])
            assert same_bits(grad_input, expected[1])
            assert all(same_bits(grads[f"module.{name}"], g) for name, g in expected[2].items())
        assert len(fused_producers(report)) >= 4
    finally:
        dist.destroy_process_group()


def test_recorded_warnings_are_ours_to_avoid() -> None:
    """Recording warns of nothing and keeps random state, modes and grad flags as they are."""
    model, x = nn.Sequential(Block(), nn.Dropout(0.5), Block()), torch.randn(SHAPE)
    twin = copy.deepcopy(model)
    apply_recipe(model)
    apply_recipe(twin, blocks.unfused())
    for _ in range(2):
        results = []
        for module in (model, twin):
            torch.manual_seed(11)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                results.append(gradients(module, x))
            results.append(torch.get_rng_state())
        assert_same(results[0], results[2])
        assert torch.equal(results[1], results[3])
