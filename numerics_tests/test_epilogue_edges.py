"""Layers whose GEMM does in its epilogue what the next layers would: the bits of layers that do it apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, backends, load_recipe, plan_recipe, recipe_names, revert
from mxfp8_recipe.autograd import activation_steps
from mxfp8_recipe.autograd.epilogue import dact_steps
from mxfp8_recipe.epilogue_table import CHOICES, Choice
from mxfp8_recipe.fused.gemm.dact import Dact
from mxfp8_recipe.fused.gemm.epilogue import Epilogue
from mxfp8_recipe.fused.spec import QuantSpec
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, WIDTH
from numerics_tests.helpers import same_bits

RECIPES = [name for name in recipe_names() if name != "bf16"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = (2, 21, WIDTH)


class Mlp(nn.Module):
    """norm, up, activation, down; the activation a module or code."""

    def __init__(self, act: nn.Module | None = None, code: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.code = act, code

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return self.down(self.act(h) if self.act is not None else self.code(h))  # pyright: ignore[reportOptionalCall]


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


@contextmanager
def launched() -> Iterator[list[Epilogue | Dact]]:
    """The steps of every GEMM with an epilogue that has some."""
    seen: list[Epilogue | Dact] = []

    def spy(kind: Any, run: Any, at: int) -> Any:
        def call(*args: Any) -> Any:
            if args[at] != backends.PLAIN:
                seen.append(kind.decode(args[at]))
            return run(*args)

        return call

    with (
        mock.patch.object(backends, "gemm_epilogue", spy(Epilogue, backends.gemm_epilogue, 10)),
        mock.patch.object(backends, "gemm_dact", spy(Dact, backends.gemm_dact, 8)),
    ):
        yield seen


def step(model: nn.Module, x: Tensor, run: Callable[..., Any] | None = None) -> list[Tensor | None]:
    """Output, gradient of x and of every parameter."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    out = (model if run is None else run)(x)
    (out.float().square().sum() * 1e-2).backward()
    assert type(out) is Tensor
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert same_bits(ours, theirs)
    assert found[0] is not None
    assert found[0].isfinite().all()


def pair(model: nn.Module, x: Any, recipe: Any = "mxfp8", **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The model, a copy that stores every value, and the report of the first."""
    apart = copy.deepcopy(model)
    report = apply_recipe(model, recipe, example_inputs=x, **options)
    apply_recipe(apart, blocks.unfused(recipe), example_inputs=x, **options)
    return model, apart, report


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
            module.mlp.down.requires_grad_(False)
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


@contextmanager
def warnings_allowed() -> Iterator[list[Any]]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


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
