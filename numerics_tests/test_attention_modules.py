"""Modules whose attention is MXFP8: callers of `F.scaled_dot_product_attention`, multi-head layers, encoders."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.config import LinearPrecision
from mxfp8_recipe.functional import mxfp8_attention
from mxfp8_recipe.modules import is_swapped, restore, swap_class
from mxfp8_recipe.modules.attention import (
    MXFP8MultiheadAttention,
    SDPAOwner,
    disable_fast_paths,
    is_slow_encoder,
    multihead_problem,
)
from mxfp8_recipe.modules.linear import MXFP8Linear
from numerics_tests.attention_oracle import HIGH, config, precision, sqnr_db
from numerics_tests.helpers import gradients, same_bits

MX = AttentionConfig.of(precision(projections=LinearPrecision()), layer="attn")
PLAIN = config(**HIGH, projections="bf16")
SIZE, HEADS, LENGTH = 64, 2, 37


class SelfAttention(nn.Module):
    """Packed projection, attention written out in the forward, output projection."""

    def __init__(self, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout_p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, key=k, value=v, dropout_p=p, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(-2)) + x


class Counting(TorchDispatchMode):
    """Counts calls of our ops by name; one with a fused epilogue or prologue counts as the plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mxfp8_recipe":
            name = {"gemm_heads": "gemm", "quantize_merged": "quantize"}.get(func._opname, func._opname)
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def owners(model: nn.Module, chosen: AttentionConfig = MX) -> nn.Module:
    for module in model.modules():
        if type(module) is SelfAttention:
            swap_class(module, SDPAOwner, chosen)
    return model


def all_equal(a: tuple[Tensor, Tensor, dict[str, Tensor]], b: tuple[Tensor, Tensor, dict[str, Tensor]]) -> bool:
    names = [name.removeprefix("_orig_mod.") for name in a[2]] == [name.removeprefix("_orig_mod.") for name in b[2]]
    return names and all(map(same_bits, (*a[:2], *a[2].values()), (*b[:2], *b[2].values())))


def seeded(module: Any, x: Tensor, model: nn.Module | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    return gradients(module, x)


def test_a_caller_runs_its_attention_in_mxfp8_and_nothing_else() -> None:
    plain = SelfAttention()
    module = owners(copy.deepcopy(plain))
    assert isinstance(module, SelfAttention)
    assert type(module).__name__ == "MXFP8SelfAttention"
    assert "qk=1x32 @ 1x32" in repr(module)
    x = torch.randn(2, LENGTH, SIZE)
    with Counting() as counting:
        out = module(x)
    assert counting.calls == {"quantize_heads": 3, "attention_forward": 1}
    q, k, v = plain.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    mixed = mxfp8_attention(q, k, v, is_causal=True, config=MX).transpose(1, 2).flatten(-2)
    assert same_bits(out, plain.out(mixed) + x)
    assert not torch.equal(out, plain(x))
    restore(module)
    assert type(module) is SelfAttention
    assert same_bits(module(x), plain(x))


def test_callers_compile_copy_pickle_and_checkpoint() -> None:
    torch.compiler.reset()
    model = owners(nn.Sequential(SelfAttention(0.1), SelfAttention(0.1)))
    x = torch.randn(2, LENGTH, SIZE)
    expected = seeded(model, x)
    assert all_equal(seeded(copy.deepcopy(model), x), expected)
    assert all_equal(seeded(pickle.loads(pickle.dumps(model)), x), expected)
    assert all_equal(seeded(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected)
    recomputed = nn.Sequential(Checkpointed(model[0]), Checkpointed(model[1]))
    out, grad, grads = seeded(recomputed, x)
    assert same_bits(out, expected[0])
    assert same_bits(grad, expected[1])
    assert all(map(same_bits, grads.values(), expected[2].values()))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_caller_exports() -> None:
    module = owners(SelfAttention()).eval()
    x = torch.randn(2, LENGTH, SIZE)
    exported = torch.export.export(module, (x,))
    assert any("attention_forward" in str(node.target) for node in exported.graph.nodes)
    assert same_bits(exported.module()(x), module(x))


class Outer(nn.Module):
    """Attention of its own, and a module inside that has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_caller_inside_a_caller_keeps_its_own_precision(compiled: bool) -> None:
    torch.compiler.reset()
    outer, plain = Outer(), Outer()
    plain.load_state_dict(outer.state_dict())
    swap_class(outer, SDPAOwner, MX)
    swap_class(outer.inner, SDPAOwner, PLAIN)
    x = torch.randn(2, LENGTH, SIZE)
    expected = plain.inner(x) + mxfp8_attention(x, x, x, config=MX)
    run = torch.compile(outer, fullgraph=True, backend="aot_eager") if compiled else outer
    assert same_bits(run(x), expected)


PADDING = torch.arange(LENGTH)[None] > torch.tensor([[20], [LENGTH]])


def masks(keys: int, queries: int = LENGTH, batch: int = 2) -> dict[str, dict[str, Any]]:
    """Keyword arguments of a multi-head layer; True hides."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.rand(batch * HEADS, queries, keys, generator=random) > 0.7
    hidden[..., 0] = False
    padding = torch.arange(keys)[None] > torch.tensor([[20], [keys]])
    bias = torch.randn(queries, keys, generator=random)
    found = {
        "none": {},
        "2-D": {"attn_mask": hidden[0]},
        "3-D": {"attn_mask": hidden},
        "float": {"attn_mask": bias},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "float and padding": {
            "attn_mask": bias,
            "key_padding_mask": torch.zeros(padding.shape).masked_fill(padding, -torch.inf),
        },
    }
    if keys == queries:
        found["causal"] = {"attn_mask": torch.ones(keys, keys, dtype=torch.bool).triu(1), "is_causal": True}
    return found


def outputs(module: nn.Module, inputs: tuple[Tensor, ...], **kwargs: Any) -> list[Tensor]:
    """Output, weights if any, and the gradient of every parameter."""
    module.zero_grad()
    out, weights = module(*inputs, **kwargs)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    loss = (out * direction).sum() + (0 if weights is None else weights.square().sum())
    loss.backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [out.detach(), *([] if weights is None else [weights.detach()]), *grads]


def pair(chosen: AttentionConfig, **kwargs: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """torch's layer and ours with the same weights."""
    plain = nn.MultiheadAttention(SIZE, HEADS, **kwargs)
    if plain.in_proj_bias is not None:
        nn.init.normal_(plain.in_proj_bias)
        nn.init.normal_(plain.out_proj.bias)
    ours = copy.deepcopy(plain)
    swap_class(ours, MXFP8MultiheadAttention, chosen)
    return plain, ours


def inputs_of(kind: str, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value: one tensor ("self"), key is value ("cross"), or three of different sizes ("separate")."""
    q = torch.randn(2, LENGTH, SIZE)
    k = q if kind == "self" else torch.randn(2, 45, 96 if kind == "separate" else SIZE)
    v = torch.randn(2, 45, 32) if kind == "separate" else k
    if not batch_first:
        moved = {id(x): x.transpose(0, 1).contiguous() for x in (q, k, v)}
        q, k, v = (moved[id(x)] for x in (q, k, v))
    return q, k, v


@pytest.mark.parametrize("weights", ["none", "average", "each head"])
@pytest.mark.parametrize(("kind", "batch_first", "bias"), [
    ("self", True, True), ("self", False, False), ("cross", True, False), ("cross", False, True),
    ("separate", True, True), ("separate", False, False),
])  # fmt: skip
def test_multihead_equals_torch_when_all_is_bf16(kind: str, batch_first: bool, bias: bool, weights: str) -> None:
    """In fp32, to fp32 rounding: measured 125 dB or more. In MXFP8, quantization noise: 14 dB or more."""
    sizes = {"kdim": 96, "vdim": 32} if kind == "separate" else {}
    kwargs = {"need_weights": weights != "none", "average_attn_weights": weights != "each head"}
    inputs = inputs_of(kind, batch_first)
    plain, same = pair(PLAIN, batch_first=batch_first, bias=bias, **sizes)
    quantized = copy.deepcopy(plain)
    swap_class(quantized, MXFP8MultiheadAttention, MX)
    for name, mask in masks(LENGTH if kind == "self" else 45).items():
        expected = outputs(plain, inputs, **mask, **kwargs)
        for ours, floor in ((same, 110), (quantized, 12)):
            actual = outputs(ours, inputs, **mask, **kwargs)
            assert [x.shape for x in actual] == [x.shape for x in expected], name
            noise = [sqnr_db(a, e) for a, e in zip(actual, expected)]
            assert min(noise) > floor, (name, noise)
            assert floor == 110 or noise[0] < 40, "nothing was quantized"


@pytest.mark.parametrize("need_weights", [False, True])
def test_unbatched_inputs(need_weights: bool) -> None:
    plain, ours = pair(PLAIN)
    x = torch.randn(LENGTH, SIZE)
    for name, mask in masks(LENGTH).items():
        single = {key: value[0] if key == "key_padding_mask" else value for key, value in mask.items()}
        if single.get("attn_mask", x).dim() == 3:
            single["attn_mask"] = single["attn_mask"][:HEADS]
        expected, actual = (outputs(m, (x, x, x), **single, need_weights=need_weights) for m in (plain, ours))
        for a, e in zip(actual, expected):
            assert a.shape == e.shape, name
            assert sqnr_db(a, e) > 110, name


def test_a_shared_input_is_quantized_once() -> None:
    _, ours = pair(MX, batch_first=True)
    x = torch.randn(2, LENGTH, SIZE)
    with Counting() as counting, torch.no_grad():
        ours(x, x, x, need_weights=False)
    one = counting.calls["quantize"]
    with Counting() as counting, torch.no_grad():
        ours(x, x.clone(), x.clone(), need_weights=False)
    assert (one, counting.calls["quantize"]) == (4, 8)  # input and weight, of the projections and of out_proj
    assert counting.calls["attention_forward"] == 1
    assert counting.calls["gemm"] == 4


def test_multihead_dropout_autocast_and_copies() -> None:
    torch.compiler.reset()
    plain, ours = pair(MX, batch_first=True, dropout=0.2)
    keys = list(plain.state_dict())
    assert list(ours.state_dict()) == keys
    assert "projections: fprop=1x32 @ 1x32" in repr(ours)
    x = torch.randn(2, LENGTH, SIZE)

    def run(module: Any, **kwargs: Any) -> Tensor:
        torch.manual_seed(4)
        return module(x, x, x, **kwargs)[0]

    expected = run(ours, need_weights=False)
    assert same_bits(run(ours, need_weights=True), expected)
    assert same_bits(run(copy.deepcopy(ours), need_weights=False), expected)
    assert same_bits(run(pickle.loads(pickle.dumps(ours)), need_weights=False), expected)
    assert same_bits(run(torch.compile(ours, fullgraph=True, backend="aot_eager"), need_weights=False), expected)
    assert not torch.equal(ours(x, x, x)[0], expected)
    ours.eval()
    assert same_bits(ours(x, x, x)[0], ours(x, x, x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = ours(x, x, x)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16)
    half = copy.deepcopy(ours).half()
    assert half(x.half(), x.half(), x.half())[0].dtype is torch.float16


def test_projections_and_attention_switch_apart() -> None:
    x = torch.randn(2, LENGTH, SIZE)
    for chosen, ops in (
        (config(projections="bf16"), {"quantize_heads": 3, "attention_forward": 1}),
        (config(**HIGH, projections=LinearPrecision()), {"quantize": 4, "gemm": 2}),
    ):
        _, ours = pair(chosen, batch_first=True)
        with Counting() as counting, torch.no_grad():
            ours(x, x, x, need_weights=False)
        assert counting.calls == ops


def test_what_a_multihead_layer_cannot_be_converted_for() -> None:
    assert multihead_problem(nn.MultiheadAttention(64, 2)) == ""
    reasons = {
        "add_bias_kv": nn.MultiheadAttention(64, 2, add_bias_kv=True),
        "add_zero_attn": nn.MultiheadAttention(64, 2, add_zero_attn=True),
        "head_dim=16 is not a multiple of 32": nn.MultiheadAttention(64, 4),
        "embed_dim=40": nn.MultiheadAttention(40, 2),
        "kdim=33": nn.MultiheadAttention(64, 2, kdim=33),
        "vdim=33": nn.MultiheadAttention(64, 2, vdim=33),
    }
    for reason, layer in reasons.items():
        assert reason in multihead_problem(layer)


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_square_tiles_under_a_mask_that_example_inputs_show(mask: str) -> None:
    """The attention stays BF16, its projections do not, and the plan says why; without a mask nothing changes."""
    given = {"attn_mask": torch.ones(40, 40).triu(1).bool(), "key_padding_mask": torch.zeros(2, 40).bool()}
    keyword = {"attn_mask": "src_mask", "key_padding_mask": "src_key_padding_mask"}[mask]
    inputs = {"src": torch.randn(2, 40, 64), keyword: given[mask]}

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)

    model = layer()
    report = apply_recipe(model, "gem", example_inputs=inputs)
    row = next(la for la in report.layers if la.fqn == "self_attn")
    assert "tokens that its mask hides: its attention stays BF16" in row.reason
    assert not row.mixes_tokens
    assert set(row.gemms.values()) > {"bf16"}
    assert model(**inputs).isfinite().all()
    unmasked = apply_recipe(layer(), "gem", example_inputs={"src": inputs["src"]})
    free = next(la for la in unmasked.layers if not la.reason)
    assert (free.fqn, free.mixes_tokens) == ("self_attn", True)
    allowed = apply_recipe(layer(), "gem", overrides={"self_attn": {"mix_masked": True}}, example_inputs=inputs)
    assert next(la for la in allowed.layers if la.fqn == "self_attn").mixes_tokens
    late = layer()
    apply_recipe(late, "gem")
    with pytest.raises(ValueError, match=r"self_attn: .* example_inputs .* overrides=\{'self_attn': 'bf16'\}"):
        late(**inputs)


def test_multihead_errors() -> None:
    _, ours = pair(MX, batch_first=True)
    x = torch.randn(2, LENGTH, SIZE)
    with pytest.raises(ValueError, match="expected the causal mask itself"):
        ours(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([x[0], x[1, :5]])
    with pytest.raises(ValueError, match="attn: got nested tensors; pad the batch"):
        ours(nested, nested, nested)


def encoder(layers: int = 2, **kwargs: Any) -> tuple[nn.TransformerEncoder, nn.TransformerEncoder]:
    """torch's encoder, and one whose attention and linears are MXFP8."""
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 96, dropout=0.1, batch_first=True, **kwargs)
    plain = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not layer.norm_first)
    ours = copy.deepcopy(plain)
    for module in list(ours.modules()):
        if isinstance(module, nn.MultiheadAttention):
            swap_class(module, MXFP8MultiheadAttention, MX)
        elif type(module) is nn.Linear:
            swap_class(module, MXFP8Linear, MX.projections)
    return plain, ours


@pytest.mark.parametrize("only_linears", [False, True])
def test_evaluation_does_not_take_the_inference_fast_path(only_linears: bool) -> None:
    """Without gradients an encoder in eval gives what it gives with them: bit for bit, padded or not."""
    plain, ours = encoder()
    if only_linears:
        for layer in ours.layers:
            restore(layer.self_attn)
    assert disable_fast_paths(ours) == 3
    assert disable_fast_paths(ours) == 0
    assert sum(map(is_slow_encoder, ours.modules())) == 3
    x = torch.randn(2, LENGTH, SIZE)
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.eval(), plain.eval()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for kwargs in ({}, {"src_key_padding_mask": PADDING}, {"mask": causal}, {"mask": causal, "is_causal": True}):
        with Counting() as counting, torch.no_grad():
            inference = ours(x, **kwargs)
        assert counting.calls["gemm"] == (4 if only_linears else 8)
        seen = ~PADDING if "src_key_padding_mask" in kwargs else torch.ones_like(PADDING)
        with_grad = ours(x, **kwargs)
        if only_linears:  # torch's own multi-head layer has a fast path, too, and takes it
            torch.testing.assert_close(inference[seen], with_grad[seen], rtol=0.0, atol=0.2)
        else:
            assert same_bits(inference[seen], with_grad[seen])
        assert not torch.equal(inference[seen], plain(x, **kwargs)[seen])


def test_revert_gives_the_fast_path_back() -> None:
    plain, ours = encoder()
    disable_fast_paths(ours)
    for twin in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert (twin.use_nested_tensor, twin.layers[0].activation_relu_or_gelu) == (False, 0)
        for module in twin.modules():
            if is_swapped(module):
                restore(module)
        assert (twin.use_nested_tensor, twin.layers[0].activation_relu_or_gelu) == (True, 1)
        x = torch.randn(2, LENGTH, SIZE)
        twin.eval(), plain.eval()
        with torch.no_grad():
            assert same_bits(twin(x), plain(x))


class OwnLayer(nn.TransformerEncoderLayer):
    """A subclass without a forward of its own."""


def test_a_subclass_of_an_encoder_layer() -> None:
    layer = OwnLayer(SIZE, HEADS, 96, batch_first=True).eval()
    swap_class(layer.linear1, MXFP8Linear, MX.projections)
    assert disable_fast_paths(layer) == 1
    assert isinstance(layer, OwnLayer)
    x = torch.randn(2, LENGTH, SIZE)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with Counting() as counting, torch.no_grad():
            twin(x)
        assert counting.calls["gemm"] == 1
    untouched = OwnLayer(SIZE, HEADS, 96, batch_first=True)
    assert disable_fast_paths(untouched) == 0


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_trains_and_compiles(norm_first: bool, activation: str) -> None:
    torch.compiler.reset()
    plain, ours = encoder(1, norm_first=norm_first, activation=activation)
    disable_fast_paths(ours)
    x = torch.randn(2, LENGTH, SIZE)
    eager = seeded(ours, x)
    assert all_equal(seeded(torch.compile(ours, fullgraph=True, backend="aot_eager"), x), eager)
    ours.eval(), plain.eval()
    assert 15 < sqnr_db(ours(x), plain(x)) < 40
