"""Fused edges: the bits of the unfused model in training, nothing stored in high precision, one graph when compiled."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import Recipe, apply_recipe, load_recipe, recipe_names, revert
from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.mx_awaited import Awaited
from mxfp8_recipe.mx_tensor import MXTensor, Pending
from numerics_tests import blocks
from numerics_tests.blocks import HIDDEN, QKV, WIDTH, Attention, Block, Pair, SwiGLU, click_batch, fused_producers
from numerics_tests.fused_pairs import assert_same_step, fused_and_stored
from numerics_tests.helpers import gradients, same_bits

RECIPES = [name for name in recipe_names() if name != "bf16"]
SHAPE = (2, 23, WIDTH)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_five_steps_of_training_are_bitwise_those_of_the_unfused_model(recipe: str, precision: str) -> None:
    """Forward, all gradients and the weights after each step, of a block with norms, q/k/v, attention and SwiGLU."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = nn.Sequential(Block(), Block()).to(dtype)
    plain, x = copy.deepcopy(model), torch.randn(SHAPE).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        model, stored, report = fused_and_stored(model, x, recipe)
        assert {"0.attention_norm", "0.mlp_norm", "1.attention_norm"} <= set(fused_producers(report))
        assert len(fused_producers(report)) >= 4
        assert not torch.equal(model(x), plain(x))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, stored)]
        for step in range(5):
            for module, optimizer in zip((model, stored), optimizers):
                torch.manual_seed(step)
                optimizer.zero_grad()
                out = module(torch.randn(SHAPE).to(dtype))
                (out.float() - 1).square().mean().backward()
                optimizer.step()
            for (name, p), q in zip(model.named_parameters(), stored.parameters()):
                assert p.grad is not None
                assert q.grad is not None
                assert same_bits(p.grad, q.grad), (step, name)
                assert same_bits(p, q), (step, name)


OVERRIDES: dict[str, dict[str, Any]] = {
    "wgrad of one consumer in BF16": {"k": {"wgrad": "bf16"}},
    "wgrad of all in BF16": {"kind:linear": {"wgrad": "bf16"}},
    "dgrad in BF16": {"kind:linear": {"dgrad": "bf16"}},
    "one consumer left alone": {"v": "bf16"},
    "fprop of one consumer in BF16": {"v": {"fprop": "bf16"}},
    "weights of another tile": {"q": "mxfp8_square"},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_on_consumers(name: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model, x = QKV().to(dtype), torch.randn(SHAPE).to(dtype)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        model, stored, report = fused_and_stored(model, x, overrides=OVERRIDES[name])
        assert fused_producers(report) == ["norm"]
        assert not torch.equal(model(x), plain(x))
        assert_same_step(model, stored, x)
    assert report.unfused == {}


@pytest.mark.parametrize(
    "override", [{"k": "mxfp8_floor"}, {"k": {"fprop": {"input": {"tile": "1x128"}}}}, {"v": "mxfp8_hopper"}]
)
def test_consumers_that_quantize_differently_do_not_share(override: dict[str, Any]) -> None:
    model, x = QKV(), torch.randn(SHAPE)
    model, stored, report = fused_and_stored(model, x, overrides=override)
    assert fused_producers(report) == []
    assert blocks.reason_of(report, "norm") == "q and k and v quantize their input differently"
    assert_same_step(model, stored, x)


@pytest.mark.parametrize("rounded", [("input",), ("weight",), ("input", "weight")])
def test_stochastic_rounding_of_the_input_keeps_its_bits(rounded: tuple[str, ...]) -> None:
    """Each layer draws its own bits: a producer that quantized for three would draw others."""
    recipe = load_recipe("mxfp8").model_dump(mode="json")
    for operand in rounded:
        recipe["linear"]["fprop"][operand]["rounding"] = "stochastic"
    chosen = Recipe.model_validate(recipe)
    for made in (QKV(), SwiGLU()):
        model, stored, _ = fused_and_stored(made, torch.randn(SHAPE), chosen)
        assert_same_step(model, stored, torch.randn(SHAPE))


@pytest.mark.parametrize("frozen", [("q",), ("q", "k", "v"), ("norm",), ("norm", "q", "k", "v")])
def test_frozen_layers(frozen: tuple[str, ...]) -> None:
    """What is frozen gets no gradient and no transposed quantization where nobody trains; the bits stay."""
    model, x = QKV(), torch.randn(SHAPE)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    model, stored, report = fused_and_stored(model, x)
    assert fused_producers(report) == ["norm"]
    value = model.norm(x)
    assert isinstance(value, MXTensor)
    assert (value.qdata_t.numel() == 0) == ({"q", "k", "v"} <= set(frozen))
    assert_same_step(model, stored, x)


def test_freezing_and_thawing_after_the_plan() -> None:
    """A consumer thawed later reads high precision, with one warning; one frozen later changes nothing."""
    model, x = QKV(), torch.randn(SHAPE)
    for layer in (model.q, model.k, model.v):
        layer.requires_grad_(False)
    model, stored, report = fused_and_stored(model, x)
    for module in (model, stored):
        module.k.requires_grad_(True)
    with pytest.warns(UserWarning, match="norm: its quantized output was read by") as caught:
        output = model(x)
    assert same_bits(output, stored(x))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(
            model, stored, x
        )  # the gradients of the step before, which ended the edge, may round otherwise
    assert "norm" in report.unfused
    model, stored, report = fused_and_stored(QKV(), x)
    for module in (model, stored):
        module.q.requires_grad_(False)
    assert_same_step(model, stored, x)
    assert report.unfused == {}


class LowRank(nn.Module):
    """A frozen projection and a trained addition that read the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.base = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.base(h) + 2.0 * self.b(self.a(h))


def test_a_low_rank_adapter_shares_the_norm() -> None:
    """The base reads MXFP8, the adapter of rank 8, which cannot, the value itself."""
    model, x = LowRank(), torch.randn(SHAPE)
    plain = copy.deepcopy(model)
    model, stored, report = fused_and_stored(model, x)
    (edge,) = [edge for edge in report.plan.edges if edge.fused]
    assert (edge.consumers, edge.emit_high) == (("base",), True)
    assert "and in high precision" in str(edge)
    assert_same_step(model, stored, x)
    assert not torch.equal(model(x), plain(x))
    assert {n for n, p in model.named_parameters() if p.grad is not None} >= {"a.weight", "b.weight", "norm.weight"}
    assert model.base.weight.grad is None


def bf16_edge(module: nn.Module, x: Tensor) -> tuple[list[blocks.Allocation], list[tuple[int, int]]]:
    """What the forward allocates, and the (address, bytes) of every tensor it saves for backward."""
    saved: list[tuple[int, int]] = []

    def pack(t: Tensor) -> Tensor:
        saved.append((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()))
        return t

    with blocks.allocations() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return seen, saved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_fused_norm_allocates_no_high_precision_output(dtype: torch.dtype) -> None:
    """By bytes: no op returns the norm's output, its carrier has one element, and backward keeps MXFP8 of it alone."""
    rows, size = 64, dtype.itemsize
    model, x = Pair().to(dtype), torch.randn(rows, WIDTH).to(dtype)
    model, stored, report = fused_and_stored(model, x)
    assert fused_producers(report) == ["norm"]
    carrier = model.norm(x).carrier
    assert (tuple(carrier.shape), carrier.dtype, carrier.untyped_storage().nbytes()) == ((rows, WIDTH), dtype, size)
    nominal = rows * WIDTH * size
    found = []
    for module in (model, stored):
        seen, saved = bf16_edge(module, x)
        outputs = [a for a in seen if a.shape == (rows, WIDTH) and a.dtype == dtype and a.nbytes >= nominal]
        high = {at for at, nbytes in saved if nbytes == nominal} - {x.data_ptr()}
        found.append((len({a.op for a in outputs if "norm" in a.op}), len(high), sum(dict(saved).values())))
    assert found[0][:2] == (0, 0)
    assert found[1][0] == 1
    # The same set is saved: x, statistics, quantized weight, and the input's transposed MXFP8.
    assert found[0][2] == found[1][2]


def test_a_residual_stream_of_a_fused_block_saves_less_than_bf16() -> None:
    """Bytes kept for backward by norm -> gate, up -> SwiGLU -> down, against the plain BF16 model."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.RMSNorm(WIDTH, eps=1e-6), SwiGLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x))

    rows = 512
    model, x = Mlp().bfloat16(), torch.randn(rows, WIDTH).bfloat16().requires_grad_()
    plain = copy.deepcopy(model)
    model, stored, report = fused_and_stored(model, x)
    assert set(fused_producers(report)) == {"norm", "mlp.gate"}
    sizes = {name: sum(dict(bf16_edge(m, x)[1]).values()) for name, m in (("ours", model), ("plain", plain))}
    # x, 4 bytes of statistics, MXFP8 of the norm, and gate and up themselves; the product is emitted again.
    assert sizes["ours"] <= rows * (2 * WIDTH + 4 + WIDTH * 33 // 32 + 2 * 2 * HIDDEN) + 50_000
    assert sizes["ours"] < sizes["plain"]
    seen, _ = bf16_edge(stored, x)
    assert any(a.shape == (rows, HIDDEN) and "activation" in a.op and a.dtype == torch.bfloat16 for a in seen)
    seen, _ = bf16_edge(model, x)
    assert not any(a.shape == (rows, HIDDEN) and "activation" in a.op and a.dtype == torch.bfloat16 for a in seen)


@pytest.mark.parametrize("make", [QKV, SwiGLU, lambda: nn.Sequential(Pair(), nn.GELU(), nn.Linear(HIDDEN, 32))])
def test_rows_stay_independent(make) -> None:
    """One row another one, 2**12 as large, leaves every other row's output as it was, bit by bit."""
    model, x = make(), torch.randn(40, WIDTH)
    report = apply_recipe(model, example_inputs=x)
    assert fused_producers(report)
    before = model(x)
    for row in (0, 7, 39):
        changed = x.clone()
        changed[row] = 2.0**12 * torch.randn(WIDTH)
        after = model(changed)
        others = [i for i in range(40) if i != row]
        assert same_bits(after[others], before[others])
        assert not torch.equal(after[row], before[row])


def test_square_activation_tiles_do_mix_rows() -> None:
    """The control of the test above: 32x32 tiles share a scale among rows, and the report says so."""
    model, x = QKV(), torch.randn(40, WIDTH)
    report = apply_recipe(model, "mxfp8_square_activations", example_inputs=x)
    changed = x.clone()
    changed[0, :32] = 0.0
    changed[0, 0] = 2.0**6
    assert not torch.equal(model(changed)[1:32], model(x)[1:32])
    assert "mixes tokens" in str(report)


class GradientCheckpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("recipe", ["mxfp8", "gem"])
def test_non_reentrant_checkpointing_of_fused_blocks(recipe: str) -> None:
    """The edges fuse inside the checkpoint, and recomputing gives the bits of not checkpointing."""
    body, x = Block(), torch.randn(SHAPE)
    direct, wrapped = copy.deepcopy(body), GradientCheckpointed(body)
    expected = apply_recipe(direct, recipe, example_inputs=x)
    report = apply_recipe(wrapped, recipe, example_inputs=x)
    assert fused_producers(report) == [f"body.{name}" for name in fused_producers(expected)]
    torch.manual_seed(2)
    ours = gradients(wrapped, x)
    torch.manual_seed(2)
    theirs = gradients(direct, x)
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert all(same_bits(ours[2][f"body.{name}"], g) for name, g in theirs[2].items())


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["mxfp8", "gem"])
def test_a_compiled_block_is_one_graph_with_the_bits_of_eager(recipe: str) -> None:
    model, x = Block(), torch.randn(SHAPE)
    plain = copy.deepcopy(model)
    report = apply_recipe(model, recipe, example_inputs=x)
    assert len(fused_producers(report)) >= 2
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    results = []
    for module in (model, compiled):
        torch.manual_seed(5)
        results.append(gradients(module, x))
    ours, theirs = results
    assert same_bits(ours[0], theirs[0])
    assert same_bits(ours[1], theirs[1])
    assert all(same_bits(g, theirs[2][f"_orig_mod.{name}"]) for name, g in ours[2].items())
    assert not torch.equal(ours[0], plain(x))
    assert report.unfused == {}


def test_gem_small_with_fused_edges_is_bitwise_the_unfused_model() -> None:
    """Jagged histories, an empty one among them; compiled it is tested beside the other click models."""
    spec, batch = click_batch()
    model = build_model("gem-small", spec)
    stored, plain = copy.deepcopy(model), copy.deepcopy(model)
    report = apply_recipe(model, example_inputs=batch)
    apply_recipe(stored, blocks.unfused(), example_inputs=batch)
    assert len(fused_producers(report)) >= 10
    results = []
    for module in (model, stored):
        out = module(batch)
        nn.functional.binary_cross_entropy_with_logits(out, batch.labels).backward()
        results.append((out.detach(), [p.grad for p in module.parameters()]))
    assert same_bits(results[0][0], results[1][0])
    assert all(same_bits(a, b) for a, b in zip(results[0][1], results[1][1]))
    assert not torch.equal(results[0][0], plain(batch))
    assert report.unfused == {}


def test_export_of_a_fused_block() -> None:
    model, x = Block().eval(), torch.randn(SHAPE)
    apply_recipe(model, example_inputs=x)
    exported = torch.export.export(model, (x,))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert {"mxfp8_recipe.norm_quantize.default", "mxfp8_recipe.gemm.default"} <= targets
    assert same_bits(exported.module()(x), model(x))


def test_revert_restores_the_outputs_bitwise_and_copies_carry_their_own_edges() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(SHAPE)
    plain = copy.deepcopy(model)
    expected, keys = plain(x), set(model.state_dict())
    report = apply_recipe(model, example_inputs=x)
    fused = model(x)
    assert len(fused_producers(report)) >= 6
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(twin(x), fused)
        assert isinstance(twin[0].mlp_norm(x), MXTensor)
        assert twin[0].mlp_norm.__dict__["mxfp8_edge"] is not model[0].mlp_norm.__dict__["mxfp8_edge"]
        with pytest.warns(UserWarning, match="read by __add__"):
            twin[0].mlp_norm(x) + 1
        revert(twin)
        assert same_bits(twin(x), expected)
    assert report.unfused == {}
    assert set(model.state_dict()) == keys
    revert(model)
    assert same_bits(model(x), expected)
    assert [vars(a).keys() for a in model.modules()] == [vars(b).keys() for b in plain.modules()]


def test_a_value_keeps_its_place_through_views() -> None:
    """What code does to a batch's shape between a norm and its reader, fused all the same."""

    class Viewed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            b, t, d = h.shape
            assert (h.dim(), h.size(-1), len(h), h.dtype, h.device) == (3, WIDTH, b, x.dtype, x.device)
            h = h.view(b * t, d).unsqueeze(0).squeeze(0).contiguous().to(x.dtype)
            return self.linear(h.reshape(-1, d).flatten(0, 0)).view(b, t, -1)

    model, stored, report = fused_and_stored(Viewed(), torch.randn(SHAPE))
    assert fused_producers(report) == ["norm"]
    assert_same_step(model, stored, torch.randn(SHAPE))
    assert report.unfused == {}


def test_a_slice_that_keeps_everything_keeps_the_edge() -> None:
    """`h[:, -k:, :]` with k = 0 stands before the head of language models; with k > 0 it reads the value."""

    class Sliced(Pair):
        keep = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x)[:, slice(-self.keep, None), :][..., :])

    model, stored, report = fused_and_stored(Sliced(), torch.randn(SHAPE))
    assert fused_producers(report) == ["norm"]
    assert_same_step(model, stored, torch.randn(SHAPE))
    assert report.unfused == {}
    model.keep = stored.keep = 1
    with pytest.warns(UserWarning, match="norm: its quantized output was read by __getitem__"):
        assert_same_step(model, stored, torch.randn(SHAPE))
    permuted = torch.tensor([1, 0])
    model, x = Pair(), torch.randn(SHAPE)
    model.forward = lambda x: model.linear(model.norm(x)[permuted])
    model, stored, report = fused_and_stored(model, x)
    assert blocks.reason_of(report, "norm") == "read by __getitem__, not by an MXFP8 layer"


def test_attention_alone_and_a_gate_share_the_norms_output() -> None:
    """A norm read by attention's projections and by another linear's gate: one quantization for all four."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention, self.gate = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return self.attention(h) * torch.sigmoid(self.gate(h))

    model, stored, report = fused_and_stored(Gated(), torch.randn(SHAPE))
    (edge,) = [edge for edge in report.plan.edges if edge.producer == "norm"]
    assert edge.consumers == ("attention.q", "attention.k", "attention.v", "gate")
    assert_same_step(model, stored, torch.randn(SHAPE))
    with blocks.allocations() as seen:
        model(torch.randn(SHAPE))
    assert sum("norm_quantize" in a.op for a in seen) == 7  # one call, of seven outputs


def test_a_pending_value_is_what_travels() -> None:
    model, x = SwiGLU(), torch.randn(SHAPE)
    apply_recipe(model, example_inputs=x)
    gate = model.gate(x)
    assert isinstance(gate, Awaited)
    assert gate.kind == "identity"
    value = nn.functional.silu(gate) * model.up(x)
    assert isinstance(value, Pending)
    assert (value.kind, value.shape) == ("swiglu", (2, 23, HIDDEN))
