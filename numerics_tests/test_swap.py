"""Applying a recipe to models of every make, and taking it back: objects, parameters and keys stay the user's."""

from __future__ import annotations

import copy
import io
import pickle
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe, plan_recipe, revert
from mxfp8_recipe.config import LinearPrecision
from mxfp8_recipe.modules import MXFP8Linear, is_swapped
from numerics_tests.helpers import MLP, Conv1D, gradients, linear_oracle, same_bits, train


class Renamed(nn.Linear):
    """A subclass that inherits forward."""

    def __init__(self, *args, tag: str = "mine", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.tag = tag


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class LoRALinear(nn.Module):
    """A frozen base layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


class Checkpointed(nn.Module):
    """Recomputes each block in backward."""

    def __init__(self, blocks: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = blocks, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)  # pyright: ignore[reportAssignmentType]
        return x


def is_quantized(model: nn.Module, x: Tensor, plain: nn.Module | None = None) -> bool:
    """Whether `model` computes something else than the same weights in plain precision."""
    reference = copy.deepcopy(model)
    if plain is None:
        revert(reference)
    else:
        reference = plain
    return not torch.equal(model(x), reference(x))


def test_a_root_linear_stays_the_object_it_is() -> None:
    model = nn.Linear(64, 32)
    weight, bias, original = model.weight, model.bias, copy.deepcopy(model)
    report = apply_recipe(model)
    assert (model.weight is weight, model.bias is bias) == (True, True)
    assert type(model) is MXFP8Linear
    assert isinstance(model, nn.Linear)
    assert "fprop=1x32 @ 1x32" in repr(model)
    assert "(root)" in str(report)
    x = torch.randn(40, 64)
    out, grad_input, grads = gradients(model, x)
    expected = linear_oracle(x, weight.detach(), bias.detach(), torch.ones(40, 32), LinearPrecision())
    expected.output.check(out)
    expected.grad_input.check(grad_input)
    expected.grad_weight.check(grads["weight"])
    assert expected.output.far_from(original(x))
    assert revert(model) == 1
    assert type(model) is nn.Linear
    assert model.weight is weight
    assert same_bits(model(x), original(x))
    assert vars(model).keys() == vars(original).keys()


def test_every_parameter_survives_as_the_same_object() -> None:
    model = nn.Sequential(MLP(), nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 32))
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    modules = {name: id(m) for name, m in model.named_modules()}
    x, plain = torch.randn(50, 64), copy.deepcopy(model)
    apply_recipe(model)
    assert {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()} == before
    assert {name: id(m) for name, m in model.named_modules()} == modules
    assert is_quantized(model, x)
    assert revert(model) >= 4
    assert same_bits(model(x), plain(x))
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_bf16_recipe_changes_nothing() -> None:
    model = MLP()
    plain, x = copy.deepcopy(model), torch.randn(9, 64)
    report = apply_recipe(model, "bf16")
    assert len(report.converted) == 0
    assert not any(is_swapped(m) for m in model.modules())
    for ours, theirs in zip(gradients(model, x)[:2], gradients(plain, x)[:2]):
        assert same_bits(ours, theirs)


def test_a_subclass_with_its_own_forward_is_left_alone_and_says_why() -> None:
    model = nn.Sequential(Doubled(32, 32), nn.Linear(32, 32))
    plain, x = copy.deepcopy(model), torch.randn(4, 32)
    report = apply_recipe(model)
    assert type(model[0]) is Doubled
    row = next(layer for layer in report.layers if layer.fqn == "0")
    assert "Doubled has a forward of its own" in row.reason
    assert same_bits(model[0](x), plain[0](x))
    assert is_swapped(model[1])


def test_a_replaced_instance_forward_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].forward = lambda x: x
    report = apply_recipe(model)
    assert "replaced on the instance" in report.layers[0].reason
    assert not is_swapped(model[0])


def test_a_subclass_without_its_own_forward_becomes_a_subclass_of_itself() -> None:
    model = nn.Sequential(Renamed(64, 32, tag="kept"))
    apply_recipe(model)
    layer = model[0]
    assert isinstance(layer, Renamed)
    assert type(layer).__name__ == "MXFP8Renamed"
    x = torch.randn(40, 64)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is type(layer)
        assert twin[0].tag == "kept"
        assert same_bits(twin(x), model(x))
    assert is_quantized(model, x)
    revert(model)
    assert type(layer) is Renamed


@pytest.mark.parametrize("late", [False, True], ids=["before the swap", "after the swap"])
@pytest.mark.parametrize("register", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_linears(register, late: bool) -> None:
    """The quantized weight is the parametrized one; gradients reach what is behind it; revert keeps it."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    if late:
        apply_recipe(model)
        register(model[0])
    else:
        register(model[0])
        apply_recipe(model)
    model.eval()  # spectral_norm iterates in training
    x = torch.randn(40, 64)
    out, _, grads = gradients(model[0], x)
    weight = model[0].weight.detach()
    linear_oracle(x, weight, model[0].bias, torch.ones_like(out), LinearPrecision()).output.check(out)
    assert not torch.equal(out, nn.functional.linear(x, weight, model[0].bias))
    assert all(g.abs().sum() > 0 for name, g in grads.items() if "original" in name)
    assert any("original" in name for name in grads)
    keys = set(model.state_dict())
    revert(model)
    assert parametrize.is_parametrized(model[0])
    assert set(model.state_dict()) == keys
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


def test_conv1d_with_a_transposed_weight() -> None:
    model = nn.Sequential(Conv1D(96, 64), nn.Tanh(), Conv1D(32, 96))
    weight = model[0].weight
    report = apply_recipe(model)
    assert [layer.fqn for layer in report.converted if layer.kind == "linear"] == ["0", "2"]
    x, grad = torch.randn(5, 8, 64), torch.randn(5, 8, 96)
    out, grad_input, grads = gradients(model[0], x, grad)
    flat, bias = grad.reshape(-1, 96), model[0].bias.detach()
    expected = linear_oracle(x.reshape(-1, 64), weight.detach().T, bias, flat, LinearPrecision())
    expected.output.check(out.reshape(-1, 96))
    expected.grad_input.check(grad_input.reshape(-1, 64))
    expected.grad_weight.check(grads["weight"].T)
    assert expected.output.far_from(torch.addmm(bias, x.reshape(-1, 64), weight))
    assert model[0].weight is weight
    assert same_bits(pickle.loads(pickle.dumps(model))(x), model(x))
    revert(model)
    assert type(model[0]) is Conv1D


def test_tied_weights_stay_tied() -> None:
    model = TiedLanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 64, (40,))
    apply_recipe(model)
    assert model.head.weight is model.embedding.weight
    plain = copy.deepcopy(model)
    revert(plain)
    assert plain.head.weight is plain.embedding.weight
    assert not torch.equal(model(ids), plain(ids))
    before = model.embedding.weight.detach().clone()
    train(model, optimizer, [ids])
    assert not torch.equal(model.embedding.weight, before)
    assert same_bits(model.head.weight, model.embedding.weight)
    pair = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    pair[1].weight = pair[0].weight
    apply_recipe(pair)
    assert pair[0].weight is pair[1].weight
    assert len(list(pair.parameters())) == 3


def test_a_module_used_twice_is_swapped_once_and_known_by_both_names() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    report = apply_recipe(model, overrides={"b": {"wgrad": "bf16"}})
    (row,) = report.layers
    assert (row.fqn, row.aliases) == ("a.0", ("b",))
    assert row.gemms["wgrad"] == "bf16"
    assert "also b" in str(report)
    assert model["a"][0] is model["b"]
    assert revert(model) == 1


def test_lora_wrapped_linears() -> None:
    """Wrapped before or after the swap: the frozen base is MXFP8 and gets no gradient, the adapters train."""
    wrapped = LoRALinear(nn.Linear(64, 32))
    report = apply_recipe(wrapped)
    assert [layer.fqn for layer in report.converted] == ["base"]
    assert "out_features=8 is not a multiple of 32; it stays BF16" in str(report).replace("\n", " ").replace("  ", "")
    base = nn.Linear(64, 32)
    apply_recipe(base)
    for model in (wrapped, LoRALinear(base)):
        _, grad_input, grads = gradients(model, torch.randn(40, 64))
        assert set(grads) == {"lora_a.weight", "lora_b.weight"}
        assert grad_input.abs().sum() > 0
        assert is_quantized(model, torch.randn(40, 64))


def test_hooks_fire_as_before() -> None:
    calls: list[str] = []
    model = MLP()
    model.up.register_forward_pre_hook(lambda m, a: calls.append("pre"))
    model.up.register_forward_hook(lambda m, a, o: calls.append("forward"))
    model.up.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    model.up.weight.register_hook(lambda g: calls.append("weight"))
    x = torch.randn(9, 64)
    gradients(model, x)
    plain, calls[:] = list(calls), []
    apply_recipe(model)
    for _ in range(2):
        calls.clear()
        gradients(model, x)
        assert sorted(calls) == sorted(plain)
    model.down.register_forward_hook(lambda m, a, o: o * 0)
    assert torch.equal(model(x), x)


def test_deepcopy_pickle_and_torch_save_of_the_whole_module() -> None:
    model = MLP()
    apply_recipe(model, "mxfp8_hopper", overrides={"up": {"dgrad": "bf16"}})
    x = torch.randn(40, 64)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    expected = gradients(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        out, grad_input, grads = gradients(twin, x)
        assert repr(twin) == repr(model)
        assert same_bits(out, expected[0])
        assert same_bits(grad_input, expected[1])
        assert same_bits(grads["up.weight"], expected[2]["up.weight"])
        assert twin.up.weight is not model.up.weight
        with pytest.raises(ValueError, match="already MXFP8"):
            apply_recipe(twin)
        revert(twin)
    assert is_quantized(model, x)


def test_meta_init_then_materialize_and_load() -> None:
    source = MLP()
    with torch.device("meta"):
        model = nn.Sequential(MLP(), Conv1D(32, 64))
    report = apply_recipe(model)
    assert {"0.up", "0.down", "1"} <= {layer.fqn for layer in report.converted}
    model.to_empty(device="cpu")
    model[0].load_state_dict(source.state_dict(), strict=True)
    apply_recipe(source)
    x = torch.randn(9, 64)
    assert same_bits(model[0](x), source(x))
    assert is_quantized(source, x)


def test_state_dicts_are_interchangeable_both_ways() -> None:
    plain, ours = MLP(), MLP()
    apply_recipe(ours)
    assert list(ours.state_dict()) == list(plain.state_dict())
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    plain.load_state_dict(loaded, strict=True)
    assert all(same_bits(a, b) for a, b in zip(plain.parameters(), ours.parameters()))
    other = MLP()
    ours.load_state_dict(other.state_dict(), strict=True)
    apply_recipe(other)
    x = torch.randn(9, 64)
    assert same_bits(ours(x), other(x))
    ours.load_state_dict(MLP().state_dict(), strict=True, assign=True)
    assert is_quantized(ours, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casting_and_mode_switches_after_the_swap(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    apply_recipe(model)
    assert not model[0].training
    model.to(dtype).train()
    assert model[0].training
    x = torch.randn(9, 64).to(dtype)
    expected = linear_oracle(
        x, model[0].weight.detach(), model[0].bias, torch.ones(9, 32, dtype=dtype), LinearPrecision()
    )
    expected.output.check(model(x))
    assert expected.output.far_from(nn.functional.linear(x, model[0].weight, model[0].bias))


def test_an_optimizer_built_before_the_swap_trains_the_swapped_model() -> None:
    torch.manual_seed(1)
    early, late = MLP(), MLP()
    late.load_state_dict(early.state_dict())
    batches = list(torch.randn(6, 40, 64))
    optimizer = torch.optim.AdamW(early.parameters(), lr=0.01)
    apply_recipe(early)
    apply_recipe(late)
    before = early.up.weight.detach().clone()
    train(early, optimizer, batches)
    train(late, torch.optim.AdamW(late.parameters(), lr=0.01), batches)
    assert not torch.equal(early.up.weight, before)
    assert all(same_bits(a, b) for a, b in zip(early.parameters(), late.parameters()))


def test_reverting_keeps_what_was_trained() -> None:
    model = MLP()
    apply_recipe(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), list(torch.randn(3, 40, 64)))
    weights = copy.deepcopy(model.state_dict())
    revert(model)
    plain = MLP()
    plain.load_state_dict(weights, strict=True)
    x = torch.randn(9, 64)
    assert same_bits(model(x), plain(x))
    apply_recipe(model, "mxfp8_square")
    assert is_quantized(model, x, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "gem"])
def test_activation_checkpointing_of_whole_blocks(recipe: str, reentrant: bool) -> None:
    """Bitwise the gradients without it, stochastic rounding included, before and after edges are recorded."""
    plain = nn.Sequential(MLP(), MLP(), MLP(), MLP())
    model, direct = copy.deepcopy(plain), copy.deepcopy(plain)
    for module in (model, direct):
        apply_recipe(module, recipe)
    wrapped = Checkpointed(model, reentrant)
    x = torch.randn(50, 64)
    for _ in range(2):
        torch.manual_seed(8)
        expected = gradients(direct, x)
        torch.manual_seed(8)
        got = gradients(wrapped, x)
        assert same_bits(got[0], expected[0])
        assert same_bits(got[1], expected[1])
        assert all(same_bits(got[2][f"blocks.{name}"], g) for name, g in expected[2].items())
    assert not torch.equal(expected[2]["0.up.weight"], gradients(plain, x)[2]["0.up.weight"])


def test_misuse_is_one_clear_error_and_changes_nothing() -> None:
    model = nn.Sequential(MLP(), nn.Linear(64, 32))
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"revert: Sequential has no recipe applied; call apply_recipe first"):
        revert(model)
    with pytest.raises(ValueError, match=r"'0\.upp' matches no layer.*did you mean '0\.up'"):
        apply_recipe(model, overrides={"0.upp": "bf16", "1": "bf16"})
    assert [type(m) for m in model.modules()] == kinds
    apply_recipe(model[0])
    with pytest.raises(ValueError, match=r"already MXFP8 .*call revert\(model\) first"):
        apply_recipe(model)
    with pytest.raises(ValueError, match="already MXFP8"):
        plan_recipe(model[0])
    revert(model)
    assert [type(m) for m in model.modules()] == kinds


def test_planning_touches_nothing() -> None:
    model = MLP()
    before = pickle.dumps(model)
    plan = plan_recipe(model)
    assert {"up", "down"} <= {layer.fqn for layer in plan.converted}
    assert pickle.dumps(model) == before


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(64, 64))), "1.0"),
        (lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), "0"),
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), "0"),
        (lambda: nn.Linear(64, 64), "mxfp8_linear"),
        (lambda: nn.TransformerEncoderLayer(64, 2, 64, batch_first=True), r"self_attn\.in_proj"),
    ],
    ids=["linear", "norm", "activation", "root", "attention"],
)
def test_a_model_converted_later_names_the_layer(make, name: str) -> None:
    """`double` after `apply_recipe` has no MXFP8; `float` and `bfloat16` have, where the input goes along."""
    x = torch.randn(2, 32, 64)
    model = make()
    apply_recipe(model, example_inputs=x)
    with pytest.raises(TypeError, match=rf"^{name}: got .*float64, expected float32.*convert the model to one of them"):
        model.double()(x.double())
    assert model.float()(x).isfinite().all()
    with pytest.raises(TypeError, match=r"got input torch.float32 and weight torch.bfloat16.*cast the input") as caught:
        model.bfloat16()(x)
    assert "mxfp8_linear" not in str(caught.value) or name == "mxfp8_linear"
    assert model(x.bfloat16()).isfinite().all()
    revert(model)
    assert model.double()(x.double()).dtype is torch.float64
    assert "mxfp8_name" not in {key for module in model.modules() for key in vars(module)}


def test_ten_thousand_modules_are_planned_in_seconds() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), Conv1D(32, 32), nn.Identity()) for _ in range(2500)))
    assert sum(1 for _ in model.modules()) > 10_000
    start = time.process_time()
    report = plan_recipe(model, "gem", overrides={r"re:1.*\.0": {"wgrad": "bf16"}, "17.1": "mxfp8_square"})
    assert time.process_time() - start < 10
    assert len(report.layers) == 5000


def test_a_builder_that_was_not_called_is_said() -> None:
    with pytest.raises(TypeError, match=r"got function, expected a torch\.nn\.Module"):
        apply_recipe(lambda: nn.Linear(32, 32))  # pyright: ignore[reportArgumentType]
