"""Layers for jagged batches: what they compute, the forms they take, and what a recipe makes of them."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, backends, load_recipe, plan_recipe, revert
from mxfp8_recipe.functional.listening import listening
from mxfp8_recipe.fused.attention.spec import GEMMS
from mxfp8_recipe.fused.reference import dequantize, quantize
from mxfp8_recipe.modules import (
    CrossAttention,
    HSTUAttention,
    JaggedAttention,
    JaggedMultiheadAttention,
    MXFP8JaggedAttention,
    PooledAttention,
)
from mxfp8_recipe.monitors.live.collector import Collector
from mxfp8_recipe.monitors.live.layer_report import pack, sites, unpack
from numerics_tests.attention_oracle import sqnr_db
from numerics_tests.helpers import same_bits
from numerics_tests.jagged_cases import offsets_of

LENGTHS = (5, 0, 33, 1, 40)
OFFSETS = offsets_of(LENGTHS)
TOTAL = sum(LENGTHS)


def events() -> Tensor:
    return torch.randn(TOTAL, 64, generator=torch.Generator().manual_seed(1))


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS)


def test_self_attention_is_torchs_on_a_padded_batch() -> None:
    """Its weights in `nn.MultiheadAttention`, in fp64; samples without tokens have none there."""
    layer = JaggedMultiheadAttention(64, 2).double()
    torchs = nn.MultiheadAttention(64, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        torchs.in_proj_weight.copy_(layer.qkv.weight)
        torchs.in_proj_bias.copy_(layer.qkv.bias)
        torchs.out_proj.load_state_dict(layer.out.state_dict())
        x = events().double()
        rows = torch.arange(40) < torch.tensor(LENGTHS)[:, None]
        padded = x.new_zeros(5, 40, 64)
        padded[rows] = x
        expected = torchs(padded, padded, padded, key_padding_mask=~rows, need_weights=False)[0][rows]
        q, k, v = layer.qkv(x).double().split(64, dim=-1)
        found = layer.out(reference_softmax(q, k, v))
    assert (found - expected).abs().max() < 1e-12
    assert sqnr_db(layer.float()(events(), OFFSETS), expected) > 110


def reference_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, 2 * 32) each, sample by sample."""
    outputs = []
    for parts in zip(*(x.unflatten(1, (2, 32)).transpose(0, 1).split(LENGTHS, dim=1) for x in (q, k, v))):
        outputs.append(F.scaled_dot_product_attention(*parts).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def test_hstu_attention_is_a_plain_hstu() -> None:
    """In fp32 against fp64 from the definition, with both biases. Measured: 130 dB."""
    layer = HSTUAttention(64, 2, max_length=40, time_buckets=20)
    x, times = events(), torch.randint(0, 10**6, (TOTAL,))
    out = layer(x, OFFSETS, times=times)
    exact = copy.deepcopy(layer).double()
    u, v, q, k = F.silu(exact.uvqk(exact.norm(x.double()))).split(64, dim=-1)
    attended = []
    for parts in zip(*(part.split(LENGTHS) for part in (u, v, q, k)), times.split(LENGTHS)):
        length, (_, v_i, q_i, k_i) = len(parts[0]), (part.unflatten(1, (2, 32)) for part in parts[:4])
        apart = torch.arange(length)[:, None] - torch.arange(length)
        bucket = ((parts[4][:, None] - parts[4]).abs().clamp(min=1).double().log() / 0.301).floor().long().clamp(max=19)
        bias = exact.core.position[apart + 39] + exact.core.time[bucket]
        scores = torch.einsum("ihd,jhd->hij", q_i, k_i) * 32**-0.5 + bias.permute(2, 0, 1)
        weights = F.silu(scores) / 40 * (apart >= 0)
        attended.append(torch.einsum("hij,jhe->ihe", weights, v_i).flatten(1))
    expected = exact.out(exact.core_norm(torch.cat(attended)) * u)
    assert sqnr_db(out, expected) > 105


@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_pooling_is_cross_attention_of_the_same_queries_everywhere(activation: str) -> None:
    pool = PooledAttention(64, 2, 3, activation=activation)
    cross = CrossAttention(64, 2, activation=activation)
    cross.load_state_dict({name: p for name, p in pool.state_dict().items() if name != "seeds"})
    x = events()
    out = pool(x, OFFSETS)
    assert out.shape == (5, 3, 64)
    expected = cross(pool.seeds.expand(5, 3, 64), x, context_offsets=OFFSETS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1], pool.out.bias.expand(3, 64))  # a sample without tokens


def layers() -> dict[str, tuple[nn.Module, Any]]:
    """Each layer, and how it is called on a batch in any form."""
    candidates = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(2))
    return {
        "self": (JaggedMultiheadAttention(64, 2, kv_heads=1, causal=True), lambda m, x, *o: m(x, *o)),
        "hstu": (HSTUAttention(64, 2, max_length=40), lambda m, x, *o: m(x, *o)),
        "pool": (PooledAttention(64, 2, 3), lambda m, x, *o: m(x, *o)),
        "cross": (CrossAttention(64, 2), lambda m, x, *o: m(candidates, x, None, *o)),
    }


@pytest.mark.parametrize("name", layers())
def test_every_form_of_a_batch_gives_the_same_bits(name: str) -> None:
    layer, call = layers()[name]
    x = events().requires_grad_()
    out = call(layer, x, OFFSETS)
    found = call(layer, nested(x), *([] if name != "self" else [None, 40]))
    if name in ("self", "hstu"):
        assert found.is_nested
        assert (found + nested(x)).is_nested  # the same ragged size
        found = found.values()
    assert same_bits(out, found)
    assert all(map(same_bits, *(torch.autograd.grad(y.square().sum(), x) for y in (out, found))))
    if name != "cross":
        dense, equal = events()[:60].unflatten(0, (5, 12)), torch.arange(6) * 12
        torch.testing.assert_close(
            call(layer, dense).reshape(-1, 64), call(layer, dense.flatten(0, 1), equal).reshape(-1, 64)
        )


@pytest.mark.parametrize("name", layers())
def test_a_recipe_converts_layers_and_revert_restores_them(name: str) -> None:
    layer, call = layers()[name]
    x = events()
    plain, keys = call(layer, x, OFFSETS), set(layer.state_dict())
    report = apply_recipe(layer)
    assert {la.fqn: la.new_type for la in report.layers}["core"] == "MXFP8JaggedAttention"
    assert isinstance(layer.core, MXFP8JaggedAttention)
    assert "qk=1x32 @ 1x32" in repr(layer.core)
    assert "projections" not in str(report), "they are layers of their own, with rows of their own"
    quantized = call(layer, x, OFFSETS)
    assert 15 < sqnr_db(quantized, plain) < 45
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same_bits(call(twin, x, OFFSETS), quantized)
    assert set(layer.state_dict()) == keys
    revert(layer)
    assert type(layer.core) is JaggedAttention
    assert same_bits(call(layer, x, OFFSETS), plain)


@pytest.mark.parametrize("name", layers())
def test_each_gemm_of_the_attention_is_switched_by_name(name: str) -> None:
    layer, call = layers()[name]
    x, results = events(), {}
    for on in (None, *GEMMS):
        twin = copy.deepcopy(layer)
        override = {gemm: "bf16" for gemm in GEMMS if gemm != on}
        report = apply_recipe(twin, "mxfp8", overrides={"core": override if on else "bf16", "kind:linear": "bf16"})
        row = next(la for la in report.layers if la.fqn == "core")
        assert (row.new_type is None) == (on is None)
        assert on or "says bf16" in row.reason
        out = call(twin, x, OFFSETS)
        out.square().sum().backward()
        weights = ("qkv", "uvqk", "key_value")
        weight = next(getattr(twin, w).weight for w in weights if hasattr(twin, w))
        results[on] = (out.detach(), weight.grad)
    for gemm in GEMMS:
        forward = gemm in ("qk", "pv")
        assert same_bits(results[gemm][0], results[None][0]) == (not forward)
        assert same_bits(results[gemm][1], results[None][1]) == (gemm == "dq" and name in ("pool", "cross"))


def test_an_override_of_projections_the_layer_does_not_own_is_an_error() -> None:
    """Named exactly it must have meant something; a pattern or a kind may reach layers that own theirs."""
    model = nn.ModuleDict({"core": JaggedAttention(2, 32)})
    with pytest.raises(ValueError, match=r"'core': got projections, .*override those by name"):
        plan_recipe(model, "mxfp8", overrides={"core": {"projections": "bf16"}})
    layers = plan_recipe(model, "mxfp8", overrides={"kind:attention": {"projections": "bf16"}}).layers
    assert [la.fqn for la in layers if la.new_type] == ["core"]


def test_tiles_of_several_tokens_under_a_mask_stay_bf16_and_are_said() -> None:
    model = nn.ModuleDict(
        {
            "causal": JaggedAttention(2, 32, causal=True),
            "full": JaggedAttention(2, 32),
            "window": JaggedAttention(2, 32, window=4, activation="silu"),
            "narrow": JaggedAttention(2, 16),
        }
    )
    rows = {la.fqn: la for la in plan_recipe(model, load_recipe("gem").model_copy(update={"rules": {}})).layers}
    assert rows["full"].new_type
    assert rows["full"].mixes_tokens
    for name in ("causal", "window"):
        assert rows[name].new_type is None
        assert "its tiles span several tokens, which its mask hides from each other" in rows[name].reason
    assert "head_dim=16 is not a multiple of 32" in rows["narrow"].reason
    probs = {"pv": {"probs": {"tile": "32x32"}}}
    rows = {la.fqn: la for la in plan_recipe(model, "mxfp8", overrides={"causal": probs, "window": probs}).layers}
    assert rows["causal"].new_type
    assert "its tiles span several tokens" in rows["window"].reason


def test_where_no_kernel_multiplies_mxfp8_attention_stays_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "select", lambda device: "hopper")
    rows = {la.fqn: la for la in plan_recipe(JaggedMultiheadAttention(256, 2), "mxfp8").layers}
    assert rows["core"].new_type is None
    assert rows["core"].reason == "backend hopper has no MXFP8 kernel of jagged attention: it stays BF16"
    assert rows["qkv"].new_type == "MXFP8Linear"


def test_norms_hand_mxfp8_to_the_projections() -> None:
    layer, x = HSTUAttention(64, 2, max_length=40), events()
    report = apply_recipe(layer, example_inputs=(x, OFFSETS))
    assert [edge.consumers for edge in report.plan.edges if edge.fused] == [("uvqk",)]
    assert layer(x, OFFSETS).isfinite().all()
    assert report.unfused == {}


def test_nested_batches_compile_to_one_graph() -> None:
    layer = JaggedMultiheadAttention(64, 2, max_length=40)

    def residual(x: Tensor) -> Tensor:
        return x + layer(x)

    compiled = torch.compile(residual, backend="eager", fullgraph=True)
    for lengths in (LENGTHS, (3, 40, 7)):
        x = torch.nested.nested_tensor_from_jagged(torch.randn(sum(lengths), 64), offsets_of(lengths))
        assert same_bits(compiled(x).values(), residual(x).values())


BAD: list[tuple[str, Any, str]] = [
    ("no offsets", lambda m: m(events()), r"got \(79, 64\) without offsets, expected \(T, width\) with offsets"),
    ("both", lambda m: m(nested(events()), OFFSETS), "got offsets beside a nested tensor"),
    ("strided", lambda m: m(torch.nested.nested_tensor([events(), events()])), "expected layout=torch.jagged"),
    ("holes", lambda m: m(torch.nested.narrow(events().unflatten(0, (1, 79)), 1, torch.tensor([3]), torch.tensor([9]),
                                              layout=torch.jagged)), "without holes between samples"),
    ("4-D", lambda m: m(events()[None, None]), r"got \(1, 1, 79, 64\) without offsets"),
    ("too long", lambda m: m(events(), OFFSETS, 39), "sample 4 has length 40, more than the declared maximum 39"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), [x[1:] for x in BAD], ids=[x[0] for x in BAD])
def test_forms_that_are_none(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(JaggedMultiheadAttention(64, 2))


def test_arguments_that_make_no_layer() -> None:
    with pytest.raises(ValueError, match=r"activation: got 'sliu' \(did you mean 'silu'"):
        JaggedAttention(2, 32, activation="sliu")
    with pytest.raises(ValueError, match=r"post_scale: got 0\.5 for softmax attention"):
        JaggedAttention(2, 32, post_scale=0.5)
    with pytest.raises(ValueError, match="heads: got 3 for width 64"):
        JaggedMultiheadAttention(64, 3)
    with pytest.raises(ValueError, match="JaggedAttention: got no times"):
        HSTUAttention(64, 2, max_length=40, time_buckets=8)(events(), OFFSETS)


def test_a_monitor_sees_probabilities_and_their_gradient() -> None:
    """Of a causal layer with a bias, in samples of different lengths, against the definitions."""
    core = JaggedAttention(2, 32, causal=True, positions=9)
    apply_recipe(core)
    lengths = (33, 20)
    offsets = offsets_of(lengths)
    q, grad = torch.randn(53, 2, 32).requires_grad_(), torch.randn(53, 2, 32)
    names: dict[nn.Module, str] = {core: "core"}
    collector = Collector(names, 1024)
    with listening(collector):
        core(q, q, q, offsets, offsets, 33, 33).backward(grad)
    assert collector.problems == {}
    found = sites(names)
    layer = unpack(pack(collector, found, torch.device("cpu")), found)[0]
    noise = {"probs": [0.0, 0.0], "grad_scores": [0.0, 0.0]}
    assert core.position is not None
    for rows in (slice(0, 33), slice(33, 53)):
        hat, g = (dequantize(*quantize(x.detach()[rows].transpose(0, 1))).double() for x in (q, grad))
        length = hat.shape[1]
        apart = torch.arange(length)[:, None] - torch.arange(length)
        bias = core.position.detach().double()[(apart + 4).clamp(0, 8)].permute(2, 0, 1)
        scores = (hat @ hat.mT * 32**-0.5 + bias).masked_fill(apart < 0, -torch.inf)
        probs = torch.exp(scores - scores.amax(-1, keepdim=True))
        levels = (probs * 256).float().to(torch.float8_e4m3fn).double() / 256
        soft, dprobs = scores.softmax(-1), g @ hat.mT
        dscores = soft * (dprobs - (soft * dprobs).sum(-1, keepdim=True))
        for name, exact, seen in (
            ("probs", probs, levels),
            ("grad_scores", dscores, dequantize(*quantize(dscores.float())).double()),
        ):
            noise[name][0] += float(exact.square().sum())
            noise[name][1] += float((exact - seen).square().sum())
    for name, (signal, error) in noise.items():
        expected = 10 * torch.tensor(signal / error).log10().item()
        assert layer.tensors[name].sqnr_db == pytest.approx(expected, abs=0.01)


DOCS = (Path(__file__).parent.parent / "docs" / "jagged.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL), ids=["layers", "functions"])
def test_the_page_s_examples_run(block: str) -> None:
    exec(compile(block, "docs/jagged.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["self", "cross"])
def test_on_a_gpu_projections_are_mxfp8_and_attention_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    """Unconverted against the CPU in fp32, then converted: attention stays in BF16 and training moves every weight."""
    layer, call = layers()[name]
    expected = call(layer, events(), OFFSETS)
    layer, offsets = layer.to("cuda", dtype), OFFSETS.cuda()
    candidates = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(2)).to("cuda", dtype)

    def run() -> Tensor:
        x = events().to("cuda", dtype)
        return layer(x, offsets, 40) if name == "self" else layer(candidates, x, None, offsets, None, 40)

    assert sqnr_db(run().cpu(), expected) > (35 if dtype is torch.bfloat16 else 60)
    report = apply_recipe(layer, load_recipe("mxfp8").model_copy(update={"gpu_min_features": 0}))
    rows = {la.fqn: la for la in report.layers}
    assert "no MXFP8 kernel of jagged attention" in rows["core"].reason
    assert rows["out"].new_type == "MXFP8Linear"
    run().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in layer.parameters())
