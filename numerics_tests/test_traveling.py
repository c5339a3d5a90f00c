"""Values on fused edges and readers nobody planned for: right values, one warning, un-fused, or an error if strict."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.mx_tensor import MXTensor, Pending, Traveling
from numerics_tests.blocks import HIDDEN, QKV, WIDTH, Pair, fused_producers, reason_of
from numerics_tests.fused_pairs import assert_same_step, fused_and_stored
from numerics_tests.helpers import gradients, same_bits

SHAPE = (3, 13, WIDTH)


class Square(torch.autograd.Function):
    """Somebody's own function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _write(h: Tensor, x: Tensor) -> Tensor:
    h[:, 0] = 0.0
    return h


def _add_in_place(h: Tensor, x: Tensor) -> Tensor:
    h += x
    return h


def _relu_in_place(h: Tensor, x: Tensor) -> Tensor:
    F.relu(h, inplace=True)
    return h


def _zero_by_method(h: Tensor, x: Tensor) -> Tensor:
    h.mul_(0.5)
    return h


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "residual": lambda h, x: h + x,
    "residual from the right": lambda h, x: x - h,
    "scale": lambda h, x: 2.0 * h,
    "detach": lambda h, x: h.detach() * x + h,
    "index": lambda h, x: h[:, 1:],
    "fancy index": lambda h, x: h[torch.tensor([0, 2])],
    "cat": lambda h, x: torch.cat([h, x], dim=1),
    "stack of a list": lambda h, x: torch.stack([h, h, x]).sum(0),
    "einsum": lambda h, x: torch.einsum("btd,bsd->bts", h, x) @ x,
    "matmul operator": lambda h, x: (h @ x.transpose(1, 2)) @ x,
    "matmul from the right": lambda h, x: (x @ h.transpose(1, 2)) @ x,
    "transpose": lambda h, x: h.transpose(0, 1).transpose(0, 1) * 1.0,
    "attribute": lambda h, x: h.mT.mT * 1.0,
    "cast": lambda h, x: h.to(torch.float64).float(),
    "float": lambda h, x: h.float() * 1.0,
    "softmax": lambda h, x: h.softmax(-1),
    "where": lambda h, x: torch.where(h > 0, h, x),
    "iteration": lambda h, x: torch.stack(list(h)),
    "iteration with the first row": lambda h, x: torch.stack([2.0 * row for row in h]),
    "first of iteration": lambda h, x: next(iter(h)) + x,
    "reshape across features": lambda h, x: h.reshape(3, -1)[:, : WIDTH * 13].view(SHAPE) * 1.0,
    "keyword": lambda h, x: torch.add(input=h, other=x),
    "written to by index": _write,
    "written to by operator": _add_in_place,
    "written to by function": _relu_in_place,
    "written to by method": _zero_by_method,
    "dropout": lambda h, x: F.dropout(h, 1e-9),
    "own function": lambda h, x: Square.apply(h),
}


class Reads(nn.Module):
    """norm -> linear; with `detour`, the linear reads what another reader made of the norm's output."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], detour: bool) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.read, self.detour = read, detour

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.detour:
            h = self.read(h, x.detach())  # one path to x: the order of sums is no matter of edges
        return self.linear(h)


class ReadsTwice(Reads):
    """The linear reads the norm's output, and so does somebody else, before and after."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if not self.detour:
            return self.linear(h)
        first = self.read(h, x.detach()).sum()
        return self.linear(h) + first + self.read(h, x.detach()).mean()


CASES = [(Reads, name) for name in READERS] + [(ReadsTwice, name) for name in READERS if "written" not in name]
"""Code that writes to what a linear has read is refused by autograd in the unfused model, too."""


@pytest.mark.parametrize(("cls", "name"), [case for case in CASES if case[1] != "own function"])
def test_an_unplanned_reader_gets_the_value_itself(cls: type[Reads], name: str) -> None:
    """Bits of the unfused model, gradients too; one warning that names both; the edge ends, and the report says so."""
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(cls(READERS[name], detour=False), x)
    plain = copy.deepcopy(stored)
    assert fused_producers(report) == ["norm"]
    assert isinstance(model.norm(x), MXTensor)
    model.detour = stored.detour = True
    with pytest.warns(UserWarning, match=r"norm: its quantized output was read by .*\(planned: linear\)") as caught:
        assert_same_step(model, stored, x)
    assert len(caught) == 1
    assert list(report.unfused) == ["norm"]
    assert "norm: un-fused, read by" in str(report)
    assert report.to_dict()["unfused"] == report.unfused
    assert not isinstance(model.norm(x), Traveling)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(model, stored, x)
        model.detour = plain.detour = False
        assert_same_step(model, plain, x)


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_a_recorded_reader_is_planned_for(cls: type[Reads], name: str) -> None:
    """The same code in the recording: no warning ever, and the bits of the unfused model."""
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(cls(READERS[name], detour=True), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(model, stored, x)
    assert report.unfused == {}
    if cls is ReadsTwice and fused_producers(report):
        (edge,) = [edge for edge in report.plan.edges if edge.fused]
        assert edge.emit_high


@pytest.mark.parametrize("name", ["residual", "detach", "cat", "written to by index"])
def test_strict_raises_and_names_layer_and_remedy(name: str) -> None:
    x = torch.randn(SHAPE)
    model, _, report = fused_and_stored(Reads(READERS[name], detour=False), x, strict=True)
    expected = model(x)
    model.detour = True
    with pytest.raises(RuntimeError, match=r"norm: its quantized output was read by .* example_inputs .* 'norm'"):
        model(x)
    assert report.unfused == {}
    model.detour = False
    assert same_bits(model(x), expected)


class Residual(nn.Module):
    """Post-norm style: the norm's output is multiplied and added to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return h + self.linear(h)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_a_norm_in_a_residual_travels_in_both_forms(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(SHAPE).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        model, stored, report = fused_and_stored(Residual().to(dtype), x)
        (edge,) = [edge for edge in report.plan.edges if edge.fused]
        assert (edge.producer, edge.emit_high) == ("norm", True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_step(model, stored, x)
    value = model.norm(x)
    if precision != "autocast":
        assert isinstance(value, MXTensor)
        assert value.has_high
        assert same_bits(value + 0, stored.norm(x) + 0)


def test_writing_to_a_value_that_travels_in_both_forms() -> None:
    """Its MXFP8 is stale from then on: the linear reads what was written."""

    class Later(Residual):
        zero = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            if self.zero:
                h[:, 0] = 0.0
            return h + self.linear(h)

    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Later(), x)
    model.zero = stored.zero = True
    with pytest.warns(UserWarning, match="norm: its quantized output was read by __setitem__"):
        assert_same_step(model, stored, x)
    assert list(report.unfused) == ["norm"]
    assert same_bits(model(x)[:, 0], model.linear.bias.expand(3, WIDTH))


def test_hooks_on_a_recorded_output_keep_working() -> None:
    """`retain_grad` and `register_hook` in the recorded code read the value: the carrier is then the value itself."""
    grads: list[Tensor] = []

    class Watched(Pair):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            if h.requires_grad:
                h.register_hook(grads.append)
            return self.linear(h)

    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Watched(), x)
    gradients(model, x)
    gradients(stored, x)
    assert len(grads) == 2
    assert same_bits(*grads)
    assert report.unfused == {}


@pytest.mark.parametrize("on", ["producer", "consumer"])
def test_forward_hooks_see_tensors_or_what_stands_for_them(on: str) -> None:
    """A forward hook added after the plan that reads the value gets it."""
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Pair(), x)
    seen: list[Tensor] = []
    for module in (model, stored):
        if on == "producer":
            module.norm.register_forward_hook(lambda m, a, out: seen.append(out.mean()))
        else:
            module.linear.register_forward_pre_hook(lambda m, a: seen.append(a[0].abs().amax()))
    with pytest.warns(UserWarning, match="norm: its quantized output was read by"):
        assert_same_step(model, stored, x)
    assert same_bits(*seen)
    assert list(report.unfused) == ["norm"]


class Switch(nn.Module):
    """Trains through one head and evaluates through another, which is left in BF16, plus a pooled value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.train_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.eval_head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.train_head(h) if self.training else self.eval_head(h) + h.mean()


@pytest.mark.parametrize("plan_in_training", [True, False])
def test_consumers_that_change_between_training_and_evaluation(plan_in_training: bool) -> None:
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Switch().train(plan_in_training), x)
    assert fused_producers(report) == (["norm"] if plan_in_training else [])
    if plan_in_training:
        assert_same_step(model, stored, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for training in (False, True, False, True):
            model.train(training)
            stored.train(training)
            assert_same_step(model, stored, x)
    assert len([w for w in caught if "norm: its quantized output" in str(w.message)]) == int(plan_in_training)
    assert bool(report.unfused) == plan_in_training


def test_evaluation_without_gradients_uses_the_edge_and_emits_nothing_for_wgrad() -> None:
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(QKV(), x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            value = model.norm(x)
            assert isinstance(value, MXTensor)
            assert value.qdata_t.numel() == 0
            assert same_bits(model(x), stored(x))
    assert report.unfused == {}


def test_metadata_reads_nothing() -> None:
    """What code asks of a tensor's shape and kind is answered from the carrier, without a warning."""
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Pair(), x)
    h, high = model.norm(x), stored.norm(x)
    assert isinstance(h, MXTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_nested", "layout", "is_leaf",
                     "is_sparse", "is_cpu", "itemsize", "is_quantized"):  # fmt: skip
            assert getattr(h, name) == getattr(high, name), name
        for name in ("size", "dim", "numel", "stride", "is_contiguous", "element_size", "is_floating_point",
                     "is_complex", "get_device", "ndimension", "nelement", "__len__"):  # fmt: skip
            assert getattr(h, name)() == getattr(high, name)(), name
        assert (h.size(-1), h.stride(0)) == (WIDTH, high.stride(0))
    assert report.unfused == {}
    with pytest.raises(RuntimeError, match="truth value"):
        bool(h)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        h.nonsense  # noqa: B018


def test_another_autocast_state_than_the_plans() -> None:
    """Quantized from the dtype of this call, whatever the plan was made under."""
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(QKV(), x)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert_same_step(model, stored, x)
    assert_same_step(model, stored, x)
    for module in (model, stored):
        module.bfloat16()
    assert_same_step(model, stored, x.bfloat16())
    assert report.unfused == {}


def test_the_consumer_alone_in_autocast() -> None:
    """The norm quantizes what its own context says; a consumer that multiplies in another dtype reads the value."""

    class Mixed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.linear(h)

    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Mixed(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_step(model, stored, x)
    assert "linear layer of another precision" in str(report.unfused) or not fused_producers(report)


def test_a_changed_override_of_a_consumer_is_noticed() -> None:
    """A consumer swapped by hand for one of another precision reads the value and quantizes it itself."""
    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Pair(), x)
    other = nn.Sequential(nn.Linear(WIDTH, HIDDEN))
    other[0].load_state_dict(model.linear.state_dict())
    apply_recipe(other, "mxfp8_floor")
    for module in (model, stored):
        module.linear = other[0]
    with pytest.warns(UserWarning, match="read by a linear layer of another precision"):
        assert_same_step(model, stored, x)
    assert list(report.unfused) == ["norm"]


@pytest.mark.parametrize("name", ["relu -> other", "gate read twice"])
def test_pending_values_and_unplanned_readers(name: str) -> None:
    class Forked(nn.Module):
        fork = False

        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if name == "relu -> other":
                h = F.relu(self.up(x))
                return self.down(h) + h.sum() if self.fork else self.down(h)
            g = F.silu(self.gate(x))
            h = g * self.up(x)
            return self.down(h) + g.mean() if self.fork else self.down(h)

    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Forked(), x)
    assert len(fused_producers(report)) == 1
    assert_same_step(model, stored, x)
    model.fork = stored.fork = True
    with pytest.warns(UserWarning, match="its quantized output was read by"):
        ours, theirs = gradients(model, x), gradients(stored, x)
    assert same_bits(ours[0], theirs[0])
    assert (ours[1] - theirs[1]).norm() <= 1e-6 * theirs[1].norm()  # two paths meet at x instead of one
    assert len(report.unfused) == 1
    assert_same_step(model, stored, x)


def test_an_own_function_that_was_not_planned_for() -> None:
    """torch takes a value for no input of its own functions, so its gradient would be lost: one error, then a tensor.

    Without a gradient it is read as any other. In a recording such a function shows, and the edge is refused.
    """
    x = torch.randn(SHAPE)
    model, stored, _ = fused_and_stored(Reads(READERS["own function"], detour=False), x)
    model.detour = stored.detour = True
    with pytest.raises(
        RuntimeError, match="norm: its quantized output was given to or by the autograd Function Square"
    ):
        model(x)
    assert same_bits(model(x), stored(x))
    assert_same_step(model, stored, x)
    again, stored, _ = fused_and_stored(Reads(READERS["own function"], detour=False), x)
    again.detour = stored.detour = True
    with torch.no_grad(), pytest.warns(UserWarning, match="norm: its quantized output was read by __mul__"):
        assert same_bits(again(x), stored(x))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_glance_without_gradients_does_not_cut_the_graph(context: Callable[[], Any]) -> None:
    """Logging code under no_grad reads the value first; the linear then reads it with its gradient."""

    class Logged(Pair):
        log = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            if self.log:
                with context():
                    self.seen = float(h.abs().mean())
            return self.linear(h)

    x = torch.randn(SHAPE)
    model, stored, report = fused_and_stored(Logged(), x)
    model.log = stored.log = True
    with pytest.warns(UserWarning, match=r"norm: its quantized output was read by Tensor\.abs"):
        assert_same_step(model, stored, x)
    assert model.seen == stored.seen
    assert list(report.unfused) == ["norm"]


def test_a_late_reader_after_the_norms_input_was_overwritten_is_an_error() -> None:
    """Recomputing would read what `x += ...` left there: refused, as autograd refuses it where gradients are on."""

    class InPlaceResidual(Residual):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            h = self.norm(x)
            y = self.linear(h)
            if self.late:
                x += y
                y = x + h
            return y

    x = torch.randn(SHAPE)
    model, _, _ = fused_and_stored(InPlaceResidual(), x)
    model.late = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="the norm's input was overwritten in place; apply the recipe with"):
            model(x)


def test_reasons_name_the_reader() -> None:
    x = torch.randn(SHAPE)
    for read, reason in (("softmax", "read by softmax"), ("cat", "read by cat"), ("einsum", "read by einsum")):
        _, _, report = fused_and_stored(Reads(READERS[read], detour=True), x)
        assert reason_of(report, "norm") == f"{reason}, not by an MXFP8 layer"


def test_types_of_the_values() -> None:
    x = torch.randn(SHAPE)
    model, _, _ = fused_and_stored(nn.Sequential(Pair(), nn.GELU(), nn.Linear(HIDDEN, 32)), x)
    assert isinstance(model[0].norm(x), MXTensor)
    assert isinstance(model[1](model[0](x)), Pending)
    assert not isinstance(model(x), Traveling)
