"""Edges that must not fuse: refused when the plan is made, with the reason, and the bits of the unfused model."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, plan_recipe
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH, Pair, fused_producers, reason_of
from numerics_tests.helpers import gradients, same_bits

SHAPE = (2, 17, WIDTH)


def assert_refused(model: nn.Module, x: Any, producer: str, reason: str) -> Any:
    """The plan says why; the model runs without a warning and with the unfused model's bits."""
    stored, plain = copy.deepcopy(model), copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(stored, blocks.unfused(), example_inputs=x)
    assert reason_of(report, producer) == reason
    assert producer not in fused_producers(report)
    assert "unfused: " + reason[:20] in str(report).replace("\n", " ")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*un-fused.*")
        ours, theirs = gradients(model, x), gradients(stored, x)
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    assert all(same_bits(ours[2][name], g) for name, g in theirs[2].items())
    assert not torch.equal(ours[0], plain(x))
    assert report.unfused == {}
    return report


class Nested(nn.Module):
    """The norm is in one container and the linear in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.Linear(WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("where", ["first.0", "second.0", "first", "second"])
def test_backward_hooks_on_an_end_or_on_a_container_crossed(where: str, register: str) -> None:
    calls: list[int] = []
    model = Nested()
    getattr(model.get_submodule(where), register)(lambda *args: calls.append(1))
    assert_refused(model, torch.randn(SHAPE), "first.0", f"{where} has backward hooks, which need the value itself")
    assert len(calls) >= 2


@pytest.mark.parametrize("where", ["", "other"])
def test_backward_hooks_elsewhere_do_not_matter(where: str) -> None:
    """On a module that holds both ends, or neither."""
    model = Nested()
    model.other = nn.Linear(WIDTH, WIDTH)
    model.get_submodule(where).register_full_backward_hook(lambda *args: None)
    x = torch.randn(SHAPE)
    stored = copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(stored, blocks.unfused(), example_inputs=x)
    assert fused_producers(report) == ["first.0"]
    x = torch.randn(SHAPE, requires_grad=True)
    assert same_bits(model(x), stored(x))


class CheckpointedTail(nn.Module):
    """The norm runs outside of the checkpoint, the linear inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.reentrant = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, self.norm(x), use_reentrant=self.reentrant)  # pyright: ignore[reportReturnType]


def test_a_reentrant_checkpoint_between_them() -> None:
    """It runs its inside without gradients and detaches what enters, which only a tensor can be."""
    reason = "grad mode changes on the way (a reentrant checkpoint or no_grad region)"
    assert_refused(CheckpointedTail(reentrant=True), torch.randn(SHAPE, requires_grad=True), "norm", reason)


def test_a_non_reentrant_checkpoint_between_them_fuses() -> None:
    model, x = CheckpointedTail(reentrant=False), torch.randn(SHAPE)
    stored = copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(stored, blocks.unfused(), example_inputs=x)
    assert fused_producers(report) == ["norm"]
    ours, theirs = gradients(model, x), gradients(stored, x)
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert all(same_bits(ours[2][name], g) for name, g in theirs[2].items())


def test_no_grad_around_the_producer() -> None:
    class Frozen(Pair):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.norm(x)
            return self.linear(h)

    model, x = Frozen(), torch.randn(SHAPE)
    report = apply_recipe(model, example_inputs=x)
    assert reason_of(report, "norm").startswith("grad mode changes on the way")
    model(x).sum().backward()
    assert model.norm.weight.grad is None
    assert model.linear.weight.grad is not None


class TwoReaders(nn.Module):
    """One norm called twice: its outputs go to different linears."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.norm(x))
        return (self.a if self.same else self.b)(self.norm(h))


def test_a_norm_called_twice_with_different_readers() -> None:
    assert_refused(TwoReaders(same=False), torch.randn(SHAPE), "norm", "its calls have different readers")


def test_a_norm_called_twice_with_one_reader_fuses() -> None:
    model, x = TwoReaders(same=True), torch.randn(SHAPE)
    stored = copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(stored, blocks.unfused(), example_inputs=x)
    assert fused_producers(report) == ["norm"]
    ours, theirs = gradients(model, x), gradients(stored, x)
    assert same_bits(ours[0], theirs[0])
    assert all(same_bits(ours[2][name], g) for name, g in theirs[2].items())


def test_an_activation_called_twice_with_different_readers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.act(self.b(self.act(self.a(x)))))

    assert_refused(Shared(), torch.randn(SHAPE), "act", "its calls have different readers")


WRITES = {
    "operator": lambda h: h.__iadd__(1.0),
    "method": lambda h: h.mul_(2.0),
    "index": lambda h: h.__setitem__((slice(None), 0), 0.0),
    "function": lambda h: F.relu(h, inplace=True),
    "positional": lambda h: F.relu(h, True),
    "out": lambda h: torch.add(h.detach(), 1.0, out=h.detach()),
    "module": nn.ReLU(inplace=True),
    "through a view": lambda h: h.view(-1)[:5].zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_output_overwritten_in_place(name: str) -> None:
    class Overwrites(Pair):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            WRITES[name](h)
            return self.linear(h)

    assert_refused(Overwrites(), torch.randn(SHAPE), "norm", "its output is overwritten in place")


def test_a_linears_output_overwritten_before_its_activation() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x), inplace=True))

    model, x = Overwrites(), torch.randn(SHAPE)
    plain, stored = copy.deepcopy(model), copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=x)
    apply_recipe(stored, blocks.unfused(), example_inputs=x)
    assert fused_producers(report) == []
    ours, theirs, original = (gradients(m, x) for m in (model, stored, plain))
    assert same_bits(ours[0], theirs[0])
    assert all(same_bits(ours[2][n], g) for n, g in theirs[2].items())
    assert (ours[0] - original[0]).norm() <= 0.1 * original[0].norm()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, x: (m.linear(x), m.norm(x)), "read by the model's output, not by an MXFP8 layer"),
        (lambda m, x: m.linear(m.norm(x).softmax(-1)), "read by softmax, not by an MXFP8 layer"),
        (lambda m, x: m.linear(x), "the recorded forward does not reach it"),
        (lambda m, x: m.head(m.norm(x)), "read by head, not by an MXFP8 layer"),
        (lambda m, x: F.linear(m.norm(x), m.linear.weight), "read by linear, not by an MXFP8 layer"),
        (lambda m, x: m.linear(m.norm(x).double().float()), "read by double, not by an MXFP8 layer"),
        (lambda m, x: m.linear(m.norm(x).view(-1, 2 * WIDTH)[:, :WIDTH]), "read by view, not by an MXFP8 layer"),
    ],
    ids=["output", "function", "not reached", "BF16 layer", "function linear", "cast", "view of other rows"],
)
def test_reasons_say_who_reads_it(forward, reason: str) -> None:
    class Own(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    plan = plan_recipe(Own(), example_inputs=torch.randn(2, 4, WIDTH))
    (edge,) = [edge for edge in plan.edges if edge.producer == "norm"]
    assert (edge.fused, edge.reason) == (False, reason)


class CastingState:
    """What a module wrapped by FSDP2 answers with: its mixed-precision policy."""

    def __init__(self, cast: bool) -> None:
        self._mp_policy = SimpleNamespace(cast_forward_inputs=cast, param_dtype=torch.bfloat16)


@pytest.mark.parametrize("cast", [True, False])
def test_a_casting_wrapper_by_its_state(cast: bool) -> None:
    """The state alone: input casting across the edge refuses it, a policy without it does not."""
    model, x = Nested(), torch.randn(SHAPE)
    model.second.__dict__["_get_fsdp_state"] = lambda: CastingState(cast)
    plan = plan_recipe(model, example_inputs=x)
    (edge,) = plan.edges
    assert edge.fused != cast
    assert edge.reason == ("second is wrapped by FSDP with input casting" if cast else "")


FSDP = """
    import copy, os, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from mxfp8_recipe import apply_recipe, plan_recipe

    os.environ.update(MASTER_ADDR="localhost", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, None):
        model = nn.Sequential(nn.Sequential(nn.LayerNorm(64)), nn.Sequential(nn.Linear(64, 96)))
        fully_shard(model[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        fully_shard(model, mesh=mesh)
        plan = plan_recipe(model.to(torch.bfloat16), example_inputs=torch.randn(5, 64).bfloat16())
        for edge in plan.edges:
            print(edge.producer, edge.fused, edge.reason)
    dist.destroy_process_group()
"""


def test_a_real_casting_wrapper() -> None:
    """fully_shard with a mixed-precision policy on one CPU process, where this torch does that."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FSDP)], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        pytest.skip(f"fully_shard does not run on the CPU here: {done.stderr.strip().splitlines()[-1]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("0.0 ")]
    assert lines == ["0.0 False 1 is wrapped by FSDP with input casting", "0.0 True "]
