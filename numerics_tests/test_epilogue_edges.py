"""Linears whose GEMM does the activation after them: the bits of layers that do it apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, backends, load_recipe, plan_recipe, revert
from mxfp8_recipe.autograd import activation_steps
from mxfp8_recipe.autograd.epilogue import dact_steps
from mxfp8_recipe.epilogue_table import CHOICES, Choice
from mxfp8_recipe.fused.gemm.dact import Dact
from mxfp8_recipe.fused.gemm.epilogue import Epilogue
from mxfp8_recipe.fused.spec import QuantSpec
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.epilogue_models import (
    DTYPES,
    RECIPES,
    SHAPE,
    Mlp,
    assert_same,
    launched,
    pair,
    step,
)
from numerics_tests.helpers import same_bits

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ReLU": (lambda: Mlp(nn.ReLU()), "relu"),
    "GELU": (lambda: Mlp(nn.GELU()), "gelu"),
    "GELU by tanh": (lambda: Mlp(nn.GELU(approximate="tanh")), "gelu_tanh"),
    "SiLU": (lambda: Mlp(nn.SiLU()), "silu"),
    "squared ReLU": (lambda: Mlp(blocks.SquaredReLU()), "relu2"),
    "F.relu": (lambda: Mlp(code=F.relu), "relu"),
    "F.gelu": (lambda: Mlp(code=F.gelu), "gelu"),
    "F.gelu by tanh": (lambda: Mlp(code=lambda h: F.gelu(h, approximate="tanh")), "gelu_tanh"),
    "F.silu": (lambda: Mlp(code=F.silu), "silu"),
    "relu squared": (lambda: Mlp(code=lambda h: F.relu(h) ** 2), "relu2"),
    "nn.ReLU squared": (lambda: Mlp(nn.Sequential(nn.ReLU(), Square())), "relu2"),
}


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_in_both_epilogues_with_the_bits_of_one_apart(name: str, dtype: torch.dtype) -> None:
    make, kind = ACTIVATIONS[name]
    x = torch.randn(SHAPE).to(dtype)
    model, apart, report = pair(make().to(dtype), x)
    plain = revert_copy(model)
    with launched() as seen:
        found = step(model, x)
    with launched() as unseen:
        expected = step(apart, x)
    assert_same(found, expected)
    assert not unseen
    assert [type(steps) for steps in seen] == [Epilogue, Dact]
    assert all(steps.activation == kind for steps in seen)
    assert not same_bits(found[0], step(plain, x)[0]), "nothing was quantized"  # pyright: ignore[reportArgumentType]
    table = str(report)
    assert "and MXFP8 out in its epilogue" in table
    assert "derivative and MXFP8 out in its dgrad epilogue" in table
    assert report.unfused == {}


def revert_copy(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    revert(plain)
    return plain


@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe: str, rows: int) -> None:
    """Two edges one after the other, three steps of training, gradients that travel."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN, bias=False),
        nn.SiLU(),
        nn.Linear(HIDDEN, 32),
    ]
    model = nn.Sequential(nn.LayerNorm(WIDTH), *layers).bfloat16()
    chosen = load_recipe(recipe).model_copy(update={"rules": {}, "bf16_last_fraction": 0.0})
    model, apart, report = pair(model, torch.randn(8, WIDTH).bfloat16(), chosen)
    emitted = [e.linear for e in report.plan.epilogues if e.gemm == "fprop"]
    assert emitted == ["1", "3"]
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(rows, WIDTH).bfloat16()
        with launched() as seen:
            found = step(model, x)
        assert [type(steps) for steps in seen[:2]] == [Epilogue] * 2
        assert_same(found, step(apart, x))
        for module in (model, apart):
            with torch.no_grad():
                for p in module.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    assert report.unfused == {}


OVERRIDES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "wgrad of down in BF16": ({"down": {"wgrad": "bf16"}}, ["up", "down"]),
    "dgrad of down in BF16": ({"down": {"dgrad": "bf16"}}, ["up"]),
    "fprop of down in BF16": ({"down": {"fprop": "bf16"}}, []),
    "fprop of up in BF16": ({"up": {"fprop": "bf16"}}, ["down"]),
    "up left alone": ({"up": "bf16"}, ["down"]),
    "down rounds at random": ({"down": {"fprop": {"input": {"rounding": "stochastic"}}}}, ["down"]),
    "wgrad of up rounds at random": ({"up": {"wgrad": {"grad_output": {"rounding": "stochastic"}}}}, ["up", "down"]),
    "down rotates for wgrad": (
        {"down": {"wgrad": {"grad_output": {"hadamard": 32}, "input": {"hadamard": 32}}}},
        ["up", "down"],
    ),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_layers_of_another_precision(name: str) -> None:
    overrides, expected = OVERRIDES[name]
    x = torch.randn(SHAPE)
    model, apart, report = pair(Mlp(nn.GELU()), x, overrides=overrides)
    assert [e.linear for e in report.plan.epilogues] == expected
    assert_same(step(model, x), step(apart, x))


@pytest.mark.parametrize("frozen", ["up", "down", "norm", "up.weight", "down.bias"])
def test_frozen_parameters(frozen: str) -> None:
    x = torch.randn(SHAPE).bfloat16()
    model, apart, _ = pair(Mlp(nn.GELU()).bfloat16(), x)
    for module in (model, apart):
        for name, p in module.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
    found = step(model, x)
    assert_same(found, step(apart, x))
    assert sum(g is None for g in found) == sum(not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("how", ["autocast", "checkpoint", "compile", "no_grad", "inference_mode", "eval"])
@pytest.mark.parametrize("name", ["GELU", "F.silu"])
def test_ways_of_running(name: str, how: str) -> None:
    x = torch.randn(SHAPE)
    model, apart, report = pair(ACTIVATIONS[name][0](), x)

    def run(module: nn.Module) -> Any:
        if how == "checkpoint":
            return lambda x: checkpoint(module, x, use_reentrant=False)
        if how == "compile":
            torch._dynamo.reset()
            return torch.compile(module, backend="aot_eager", fullgraph=True)
        return module

    if how in ("no_grad", "inference_mode"):
        with getattr(torch, how)():
            assert same_bits(model(x), apart(x))
        return
    for module in (model, apart):
        module.train(how != "eval")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        if how == "compile":
            found = step(model, x, run(model))
        else:
            with launched() as seen:
                found = step(model, x, run(model))
            assert len(seen) >= 2
        assert_same(found, step(apart, x))
    assert report.unfused == {}


def test_memory_format_of_rows_in_between() -> None:
    """Views that keep the rows keep what the epilogue made."""
    x = torch.randn(SHAPE)
    model, apart, _ = pair(Mlp(code=lambda h: F.gelu(h.view(-1, HIDDEN)).view(SHAPE[0], -1, HIDDEN)), x)
    with launched() as seen:
        found = step(model, x)
    assert len(seen) == 2
    assert_same(found, step(apart, x))


READERS: dict[str, Callable[[Tensor], Any]] = {
    "a sum": lambda z: z.sum(),
    "numpy": lambda z: z.detach().numpy(),
    "a clone": lambda z: z + 0,
    "chunks": lambda z: z.chunk(2, -1)[0] * 2,
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_the_sum_gets_it_exactly(reader: str) -> None:
    """z is stored, so that nothing ends where somebody reads it who was not there when the plan was made."""
    seen: list[Any] = []
    reads = [False]

    def code(h: Tensor) -> Tensor:
        if reads[0]:
            seen.append(READERS[reader](h))
        return F.gelu(h)

    x = torch.randn(SHAPE)
    model, apart, report = pair(Mlp(code=code), x)
    expected = step(apart, x)
    reads[0] = True
    assert_same(step(model, x), expected)
    assert_same(step(apart, x), expected)
    assert len(seen) == 2
    assert all(isinstance(s, Tensor) or reader == "numpy" for s in seen)
    assert torch.equal(*map(torch.as_tensor, seen))
    assert torch.as_tensor(seen[0]).abs().sum() > 0
    assert report.unfused == {}


def test_what_is_written_to_the_sum_is_what_the_activation_sees() -> None:
    writes = [False]

    def code(h: Tensor) -> Tensor:
        if writes[0]:
            with torch.no_grad():
                h.detach().mul_(2)
        return F.gelu(h)

    x = torch.randn(SHAPE)
    model, apart, _ = pair(Mlp(code=code), x)
    before = step(model, x)
    writes[0] = True
    found = step(model, x)
    assert_same(found, step(apart, x))
    assert not same_bits(found[0], before[0])  # pyright: ignore[reportArgumentType]


def test_who_reads_the_activation_ends_the_edge_once() -> None:
    reads: list[Tensor] = []

    def read(module: nn.Module, args: Any, output: Any) -> None:
        reads.append(output.float().sum())

    x = torch.randn(SHAPE)
    model, apart, report = pair(Mlp(nn.GELU()), x)
    for module in (model, apart):
        module.get_submodule("act").register_forward_hook(read)
    with pytest.warns(UserWarning, match="act: its quantized output was read by") as caught:
        first, second, expected = step(model, x), step(model, x), step(apart, x)
    assert_same(first, expected)
    assert_same(second, expected)
    assert len(caught) == 1
    assert set(report.unfused) == {"act"}
    assert torch.equal(reads[0], reads[2])
    with launched() as seen:
        step(model, x)
    assert not seen, "an epilogue of an edge that ended"


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_hook_on_the_linear_gets_a_tensor(kind: str) -> None:
    got: list[Any] = []
    x = torch.randn(SHAPE)
    model, apart, report = pair(Mlp(nn.GELU()), x)
    expected = step(apart, x)
    up = model.get_submodule("up")
    if kind == "forward":
        up.register_forward_hook(lambda module, args, output: got.append(output))
    else:
        up.register_full_backward_hook(lambda module, grad_in, grad_out: got.append(grad_out[0]))
    with pytest.warns(UserWarning, match="un-fused from now on") as caught:
        twice = [step(model, x) for _ in range(2)]
    for found in twice:
        assert_same(found, expected)
    assert len([w for w in caught if str(w.message).startswith("up:")]) == 1
    assert len(got) == 2
    assert all(type(t) is Tensor and t.abs().sum() > 0 for t in got)
    assert "up" in report.unfused


def test_strict_raises_where_an_edge_would_end() -> None:
    model, x = Mlp(nn.GELU()), torch.randn(SHAPE)
    apply_recipe(model, example_inputs=x, strict=True)
    model.up.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(RuntimeError, match="up: its quantized output was read by a forward hook of up"):
        model(x)


class TwoReaders(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return self.down(F.gelu(h)) + h.mean()


def hooked() -> nn.Module:
    model = Mlp(nn.GELU())
    model.up.register_forward_hook(lambda module, args, output: None)
    return model


def test_what_is_not_planned() -> None:
    """Another reader of the sum, an activation that overwrites it, a hook on it, two activations for one linear."""
    x = torch.randn(SHAPE)
    for made, dgrads in ((TwoReaders(), []), (Mlp(nn.ReLU(inplace=True)), ["down"]), (hooked(), ["down"])):
        model, apart, report = pair(made, x)
        assert [e.linear for e in report.plan.epilogues if e.gemm == "fprop"] == []
        assert [e.linear for e in report.plan.epilogues if e.gemm == "dgrad"] == dgrads
        assert_same(step(model, x), step(apart, x))


def test_a_linear_called_twice_has_an_epilogue_only_if_both_calls_go_on_alike() -> None:
    class Twice(Mlp):
        alike = True

        def forward(self, x: Tensor) -> Tensor:
            other = F.gelu if self.alike else F.silu
            return self.down(F.gelu(self.up(x))) + self.down(other(self.up(2 * x)))

    x = torch.randn(SHAPE)
    for alike in (True, False):
        made = Twice()
        made.__dict__["alike"] = alike
        model, apart, report = pair(made, x)
        assert [e.linear for e in report.plan.epilogues] == (["up", "down"] if alike else ["down"])
        assert_same(step(model, x), step(apart, x))


def test_state_and_fingerprint_are_those_of_a_model_without() -> None:
    x = torch.randn(SHAPE)
    model, apart, report = pair(Mlp(nn.GELU()), x)
    original = dict(model.named_parameters())
    assert report.plan.fingerprint == plan_recipe(Mlp(nn.GELU())).fingerprint
    apart.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with launched() as seen:
            found = step(other, x)
        assert len(seen) == 2
        assert_same(found, step(apart, x))
    revert(model)
    assert "mxfp8_edge" not in model.up.__dict__
    assert all(original[name] is p for name, p in model.named_parameters())
    assert_same(step(model, x), step(copy.deepcopy(model), x))


def test_found_by_the_first_forward_where_it_changes_no_bits() -> None:
    model, x = Mlp(nn.GELU()), torch.randn(SHAPE)
    apart = copy.deepcopy(model)
    report = apply_recipe(model)
    apply_recipe(apart, blocks.unfused())
    assert_same(step(model, x), step(apart, x))
    assert [e.linear for e in report.plan.epilogues] == ["up", "down"]
    with launched() as seen:
        found = step(model, x)
    assert len(seen) == 2
    assert_same(found, step(apart, x))


@pytest.mark.parametrize("backend", sorted(CHOICES))
def test_the_table_decides_and_says_why(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxfp8_recipe.planner.epilogue_choice", lambda name: CHOICES[backend])
    model, apart, report = pair(Mlp(nn.GELU()), torch.randn(SHAPE))
    planned = {e.gemm for e in report.plan.epilogues}
    choice = CHOICES[backend]
    assert planned == {{"activation": "fprop", "dact": "dgrad"}[s] for s in choice.steps & {"activation", "dact"}}
    said = f"plans no epilogue: {choice.why}; 2 GEMMs could have steps in theirs."
    assert (said in str(report)) == (not choice.steps)
    assert choice.why
    x = torch.randn(SHAPE)
    assert_same(step(model, x), step(apart, x))


def test_another_order_of_sums_is_planned_before_the_first_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(steps=frozenset({"activation"}), why="made up", is_gemm=False, rows_alone=True)
    monkeypatch.setattr("mxfp8_recipe.planner.epilogue_choice", lambda name: choice)
    model, x = Mlp(nn.GELU()), torch.randn(SHAPE)
    report = apply_recipe(model)
    step(model, x)
    assert report.plan.epilogues == ()
    assert "planned only from example_inputs, before the first step" in str(report)
    revert(model)
    report = apply_recipe(model, example_inputs=x)
    assert [e.linear for e in report.plan.epilogues] == ["up"]
    assert model.up.mxfp8_config.fprop_steps  # pyright: ignore[reportAttributeAccessIssue]
    revert(model)
    report = apply_recipe(model, "mxfp8_square_activations", example_inputs=x)
    assert report.plan.epilogues == (), "its tiles span rows"


def test_demoting_a_layer_ends_what_it_is_part_of() -> None:
    from mxfp8_recipe.swap import demote

    x = torch.randn(SHAPE)
    model, _, report = pair(Mlp(nn.GELU()), x)
    demote(model, "down", "an alarm")
    assert report.plan.epilogues == ()
    with launched() as seen:
        step(model, x)
    assert not seen


def test_texts_are_those_of_the_steps() -> None:
    spec = QuantSpec()
    row = spec.encode()
    assert Epilogue.decode(activation_steps("gelu", row)) == Epilogue(
        activation="gelu", rowwise=spec, emit_high=False, emit_sum=True
    )
    assert Dact.decode(dact_steps("silu", row, "", row, False, True)) == Dact(
        activation="silu", rowwise=spec, act_colwise=spec, emit_high=False, emit_bias=True
    )
    assert Dact.decode(dact_steps("silu", "", "", "", True, False)) == Dact(activation="silu")


def test_ops_and_their_fakes() -> None:
    row = QuantSpec().encode()
    x, w = torch.randn(70, WIDTH), torch.randn(HIDDEN, WIDTH)
    w_q, w_s = backends.quantize(w, row, "", None, 0, "auto")[:2]
    operands = (*backends.quantize(x, row, "", None, 0, "auto")[:2], row, w_q, w_s, row)
    bias, z, ops = torch.randn(HIDDEN), torch.randn(70, HIDDEN), torch.ops.mxfp8_recipe
    gate = [w_q.clone(), w_s.clone(), bias.clone()]
    tables = [torch.randn(70, 16), torch.randn(70, 16)]
    for steps, added, second, rotation in (
        (f"gelu sum row={row} col={row}", z, [], []),
        (f"swiglu high sum row={row}", None, gate, []),
        ("none rope=32:halves:0 high", None, [], tables),
    ):
        arguments = (*operands, bias, second, added, rotation, steps, torch.float32, "auto")
        torch.library.opcheck(ops.gemm_epilogue.default, arguments, test_utils=("test_schema", "test_faketensor"))
    for steps, other in ((f"gelu row={row} col={row} act={row} bias", None), (f"swiglu high row={row}", z.clone())):
        arguments = (*operands, z, other, steps, torch.float32, torch.float32, "auto")
        torch.library.opcheck(ops.gemm_dact.default, arguments, test_utils=("test_schema", "test_faketensor"))
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        ops.gemm_epilogue(*operands, None, [], None, [], backends.PLAIN, torch.float32, "auto")
        ops.gemm_dact(*operands, z, None, "gelu high", torch.float32, torch.float32, "auto")
    assert counter.get_total_flops() == 2 * 2 * 70 * WIDTH * HIDDEN
