"""MXFP8 softmax attention against an fp64 oracle, and against torch's own where nothing is quantized."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.functional import mxfp8_attention
from mxfp8_recipe.fused.attention.softmax import dropout_keep
from mxfp8_recipe.fused.attention.spec import GEMMS, AttentionSpec
from mxfp8_recipe.recipe_files import load_recipe
from mxfp8_recipe.rules import apply_override
from numerics_tests.attention_oracle import HIGH, SQUARE, config, heads, only, oracle, precision, sqnr_db
from numerics_tests.helpers import same_bits

MX, PLAIN = config(), config(**HIGH)
FEEDS = {"qk": "oqkv", "pv": "o", "dv": "v", "dp": "qk", "dq": "q", "dk": "k"}
"""Which of output, dQ, dK and dV each GEMM reaches."""


def forward_backward(inputs: list[Tensor], chosen: AttentionConfig, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Output, and the gradients of query, key, value and of a mask that wants one."""
    *qkv, g = inputs
    out = mxfp8_attention(*qkv, *args, config=chosen, need_weights=chosen.is_high, **kwargs)
    out = out[0] if chosen.is_high else out  # asked for weights, it does not call torch's own
    wanted = [x for x in (*qkv, *args[:1]) if isinstance(x, Tensor) and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, g)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gemms", [*[(g,) for g in GEMMS], GEMMS], ids="-".join)
def test_matches_the_oracle(gemms: tuple[str, ...], causal: bool) -> None:
    """Measured: 87 dB or more, where an element of P in fp32 rounds the other way; 26 to 49 without quantizing."""
    inputs = heads(2, 2, 70, 64)
    visible = torch.ones(70, 70, dtype=torch.bool).tril() if causal else torch.ones(70, 70, dtype=torch.bool)
    expected = oracle(*inputs, only(*gemms), visible)
    actual = forward_backward(inputs, AttentionConfig.of(only(*gemms)), None, 0.0, causal)
    for name, ours, theirs in zip("oqkv", actual, expected):
        assert sqnr_db(ours, theirs) > 60, (name, sqnr_db(ours, theirs))
    unquantized = oracle(*inputs, only(), visible)
    reached = {name for gemm in gemms for name in FEEDS[gemm]}
    for name, ours, theirs in zip("oqkv", actual, unquantized):
        assert (sqnr_db(ours, theirs) < 55) == (name in reached), (name, sqnr_db(ours, theirs))


@pytest.mark.parametrize("gemm", GEMMS)
def test_each_gemm_reaches_only_what_it_feeds(gemm: str) -> None:
    inputs = heads(1, 2, 40, 32)
    plain, one = forward_backward(inputs, PLAIN), forward_backward(inputs, AttentionConfig.of(only(gemm)))
    changed = {name for name, a, b in zip("oqkv", plain, one) if not same_bits(a, b)}
    assert changed == set(FEEDS[gemm])


@pytest.mark.parametrize(("tile", "head_dim"), [("1x128", 64), ("1x128", 256), ("32x32", 64), ("32x128", 128)])
def test_wide_tiles_match_the_oracle(tile: str, head_dim: int) -> None:
    operands = {gemm: type(getattr(precision(), gemm)).model_fields for gemm in GEMMS}
    chosen = precision(**{gemm: {name: {"tile": tile} for name in names} for gemm, names in operands.items()})
    inputs = heads(1, 2, 200, head_dim)
    expected = oracle(*inputs, chosen, torch.ones(200, 200, dtype=torch.bool))
    for ours, theirs in zip(forward_backward(inputs, AttentionConfig.of(chosen)), expected):
        assert sqnr_db(ours, theirs) > 60


def test_the_softmax_gradient_survives_cancellation() -> None:
    """Keys and values with a common part, which cancels in dQ only where each row of dS sums to zero.

    Measured: 13 dB for dQ, 17 for dK. With a row sum of dO * O in place of P * dP, which quantization makes another
    number: -10 and 15.
    """
    q, k, v, g = heads(1, 2, 64, 32)
    inputs = (q, *((2.0 + 0.5 * x).detach().requires_grad_() for x in (k, v)), g)
    for ours, plain in zip(forward_backward(inputs, MX)[1:3], forward_backward(inputs, PLAIN)[1:3]):
        assert sqnr_db(ours, plain) > 10, sqnr_db(ours, plain)


CASES: list[tuple[dict[str, Any], tuple[int, int], int]] = [
    ({}, (37, 37), 2), ({}, (1, 1), 2), ({}, (31, 33), 1), ({}, (33, 31), 2), ({}, (0, 5), 2), ({}, (5, 0), 2),
    ({"is_causal": True}, (37, 37), 2), ({"is_causal": True}, (20, 40), 2), ({"is_causal": True}, (40, 20), 1),
    ({"scale": 0.3}, (20, 20), 2),
    ({"attn_mask": "bool"}, (37, 40), 1), ({"attn_mask": "float"}, (37, 40), 2), ({"attn_mask": "row"}, (7, 40), 2),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "lengths", "kv_heads"), CASES)
def test_equals_torch_when_every_gemm_is_bf16(kwargs: dict[str, Any], lengths: tuple[int, int], kv_heads: int) -> None:
    """In fp32, to fp32 rounding (measured 125 dB or more). `need_weights` keeps it from calling torch's own."""
    lq, lk = lengths
    q, g = torch.randn(3, 2, lq, 32, requires_grad=True), torch.randn(3, 2, lq, 64)
    k = torch.randn(3, kv_heads, lk, 32, requires_grad=True)
    v = torch.randn(3, kv_heads, lk, 64, requires_grad=True)
    masks = {
        "bool": torch.rand(3, 1, lq, lk) > 0.4,
        "float": torch.randn(2, lq, lk, requires_grad=True),
        "row": torch.rand(3, 1, 1, lk) > 0.4,
    }
    kwargs = {**kwargs, "enable_gqa": kv_heads == 1}
    if "attn_mask" in kwargs:
        kwargs["attn_mask"] = masks[kwargs["attn_mask"]]
    wanted = [q, k, v] + [m for m in [kwargs.get("attn_mask")] if m is not None and m.requires_grad]
    expected = F.scaled_dot_product_attention(q, k, v, **kwargs)
    actual, weights = mxfp8_attention(q, k, v, **kwargs, config=PLAIN, need_weights=True)
    assert weights.shape == (3, 2, lq, lk)
    grads = zip(torch.autograd.grad(actual, wanted, g), torch.autograd.grad(expected, wanted, g))
    for ours, theirs in [(actual, expected), *grads]:
        assert ours.shape == theirs.shape
        assert ours.numel() == 0 or sqnr_db(ours, theirs) > 110 or not theirs.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 31, 33, 130])
def test_quantization_noise(dtype: torch.dtype, length: int) -> None:
    """SQNR against torch's attention in fp64: measured 25.8 dB or more of the output, 22.7 of the gradients."""
    inputs = heads(2, 2, length, 64, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*exact[:3])
    expected = [out, *torch.autograd.grad(out, exact[:3], exact[3])]
    for name, ours, theirs in zip("oqkv", forward_backward(inputs, MX), expected):
        assert ours.dtype is dtype
        if length > 1 or name in "ov":  # the scores of a single key have no gradient
            assert (24.5 if name == "o" else 21.0) < sqnr_db(ours, theirs) < 45, (name, sqnr_db(ours, theirs))


def test_every_subset_of_gradients() -> None:
    """Computed alone or with others, a gradient has the same bits; one not asked for is not there."""
    *qkv, g = heads(1, 2, 40, 32)
    mask = torch.randn(40, 40)
    for chosen in (MX, PLAIN, config(**SQUARE, mix_masked=True)):
        full: list[Tensor] = []
        for subset in list(itertools.product([True, False], repeat=4))[:-1]:
            tensors = [x.detach().clone().requires_grad_(on) for x, on in zip([*qkv, mask], subset)]
            out = mxfp8_attention(*tensors, config=chosen, need_weights=True)[0]
            out.backward(g)
            full = full or [x.grad for x in tensors]  # pyright: ignore[reportAssignmentType]
            for x, on, expected in zip(tensors, subset, full):
                assert (x.grad is not None) == on
                assert x.grad is None or same_bits(x.grad, expected)


def test_grouped_heads_equal_repeated_ones() -> None:
    q, k, v, g = heads(2, 4, 40, 32, kv=2)
    out, *grads = forward_backward([q, k, v, g], MX, enable_gqa=True)
    repeated = [x.detach().repeat_interleave(2, 1).requires_grad_() for x in (k, v)]
    expected, dq, dk, dv = forward_backward([q, *repeated, g], MX)
    assert same_bits(out, expected)
    assert same_bits(grads[0], dq)
    for ours, theirs in zip(grads[1:], (dk, dv)):
        torch.testing.assert_close(ours, theirs.unflatten(1, (2, 2)).sum(2), rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused() -> None:
    q, k, v, _ = heads(1, 1, 40, 32)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(mxfp8_attention(q, k, v, config=MX).sum(), q, create_graph=True)


def test_leading_dims_and_strides() -> None:
    q, k, v, _ = heads(2, 3, 40, 32)
    out = mxfp8_attention(q, k, v, config=MX)
    assert same_bits(mxfp8_attention(q[0, 1], k[0, 1], v[0, 1], config=MX), out[0, 1])
    assert same_bits(mxfp8_attention(q[0], k[0], v[0], config=MX), out[0])
    five = [x.expand(4, *x.shape) for x in (q, k, v)]
    assert same_bits(mxfp8_attention(*five, config=MX)[3], out)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert same_bits(mxfp8_attention(*strided, config=MX), out)
    assert same_bits(mxfp8_attention(q, k[:1], v[:1], config=MX)[0], out[0])
    mask = torch.rand(4, 2, 1, 40, 40) > 0.3
    masked = mxfp8_attention(*five, mask, config=MX)
    assert same_bits(masked[2], mxfp8_attention(q, k, v, mask[2], config=MX))


def test_dropout_is_drawn_from_torch_and_redrawn_by_checkpoint() -> None:
    inputs = heads(2, 2, 40, 32)
    torch.manual_seed(5)
    first = forward_backward(inputs, MX, None, 0.25)
    torch.manual_seed(5)
    assert all(map(same_bits, first, forward_backward(inputs, MX, None, 0.25)))
    assert not torch.equal(first[0], mxfp8_attention(*inputs[:3], None, 0.25, config=MX))
    torch.manual_seed(5)
    out = checkpoint(lambda *x: mxfp8_attention(*x, None, 0.25, config=MX), *inputs[:3], use_reentrant=False)
    assert isinstance(out, Tensor)
    again = [out, *torch.autograd.grad(out, inputs[:3], inputs[3])]
    assert all(map(same_bits, first, again))


def test_dropout_drops_the_share_it_says_and_keeps_the_mean() -> None:
    q, k, v, g = heads(2, 2, 64, 32)
    torch.manual_seed(5)
    seed = torch.randint(2**62, ())
    keep = dropout_keep((2, 2, 64, 64), seed, 0.25)
    assert abs(keep.float().mean() - 0.75) < 0.01
    torch.manual_seed(5)
    out, weights = mxfp8_attention(q, k, v, None, 0.25, config=PLAIN, need_weights=True)
    exact = torch.softmax(q @ k.transpose(-1, -2) * 32**-0.5, -1) * keep / 0.75
    torch.testing.assert_close(weights, exact, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(exact @ v, (q, k, v), g)
    for ours, theirs in zip(torch.autograd.grad(out, (q, k, v), g), expected):
        assert sqnr_db(ours, theirs) > 110
    assert not mxfp8_attention(q, k, v, None, 1.0, config=MX).any()


def test_weights_and_their_gradient() -> None:
    q, k, v, g = heads(2, 2, 20, 32)
    out, weights = mxfp8_attention(q, k, v, config=PLAIN, need_weights=True)
    exact = torch.softmax(q @ k.transpose(-1, -2) * 32**-0.5, -1)
    direction = torch.randn_like(weights)
    expected = torch.autograd.grad((exact * direction).sum() + (exact @ v * g).sum(), (q, k))
    actual = torch.autograd.grad((weights * direction).sum() + (out * g).sum(), (q, k))
    assert min(map(sqnr_db, actual, expected)) > 110
    quantized = mxfp8_attention(q, k, v, config=MX, need_weights=True)[1]
    assert 20 < sqnr_db(quantized, exact) < 45


def test_square_tiles_are_quantized_once() -> None:
    """Sharing one quantization between two GEMMs saves memory and changes no bit."""
    shared = config(**SQUARE)
    assert shared.share == (True,) * 4
    apart = replace(shared, share=(False,) * 4)
    inputs = heads(2, 2, 70, 64)
    assert all(map(same_bits, forward_backward(inputs, shared), forward_backward(inputs, apart)))
    assert saved_bytes(inputs, shared) < saved_bytes(inputs, apart) < saved_bytes(inputs, PLAIN)


def saved_bytes(inputs: list[Tensor], chosen: AttentionConfig, **kwargs: Any) -> int:
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mxfp8_attention(*inputs[:3], config=chosen, need_weights=True, **kwargs)
    return sum(sizes)


def test_saved_bytes_are_as_documented() -> None:
    batch, length, dim = 2, 96, 64
    inputs = heads(batch, 1, length, dim, dtype=torch.bfloat16)
    elements = batch * length * dim
    saved = 4 * batch * length + 5 * elements + 5 * elements // 32
    stand_ins = 3 * 2
    assert saved_bytes(inputs, MX) == saved + stand_ins
    assert saved_bytes(inputs, MX, is_causal=True) == saved + 2 * 2 * elements + stand_ins - 2 * 2


def test_rotating_the_head_dim_and_rounding_stochastically() -> None:
    rotated = {"hadamard": 32}
    chosen = config(qk={"query": rotated, "key": rotated}, dp={"grad_output": rotated, "value": rotated})
    inputs = heads(1, 2, 40, 64)
    plain = forward_backward(inputs, PLAIN)
    assert all(20 < sqnr_db(a, b) < 45 for a, b in zip(forward_backward(inputs, chosen), plain))
    stochastic = {"rounding": "stochastic"}
    noisy = config(pv={"probs": stochastic, "value": stochastic}, dk={"grad_scores": stochastic, "query": stochastic})
    torch.manual_seed(1)
    first = forward_backward(inputs, noisy)
    torch.manual_seed(1)
    assert all(map(same_bits, first, forward_backward(inputs, noisy)))
    assert not torch.equal(first[0], forward_backward(inputs, noisy)[0])
    mean = torch.stack([mxfp8_attention(*inputs[:3], config=noisy) for _ in range(64)]).mean(0)
    assert sqnr_db(mean, forward_backward(inputs, AttentionConfig.of(only("qk")))[0]) > 35  # 64 draws: 18 dB more


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "dropout", "square"])
def test_compiles_into_one_graph_with_the_same_bits(case: str) -> None:
    torch.compiler.reset()
    chosen = config(**SQUARE) if case == "square" else MX
    kwargs: dict[str, Any] = {"causal": {"is_causal": True}, "dropout": {"dropout_p": 0.2}}.get(case, {})
    mask = torch.randn(40, 40, requires_grad=True) if case == "mask" else None
    q, k, v, g = heads(2, 4, 40, 32, kv=2)
    inputs = [x for x in (q, k, v, mask) if x is not None]

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return mxfp8_attention(q, k, v, mask, config=chosen, enable_gqa=True, **kwargs)

    def both(function: Any) -> list[Tensor]:
        torch.manual_seed(2)
        out = function(q, k, v, mask)
        return [out.detach(), *torch.autograd.grad(out, inputs, g)]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert all(map(same_bits, both(run), both(compiled)))


def test_ops_describe_their_outputs() -> None:
    """Shapes, dtypes, strides and aliasing of the fakes, by torch's own checker."""
    q, k, v, g = (x.detach() for x in heads(2, 2, 40, 32))
    spec = precision().spec.encode()
    ops = torch.ops.mxfp8_recipe
    first = "e4m3:1x32:rceil:nearest:0"
    q8, k8, v8, g8 = (ops.quantize_heads(x, first, first, None, 0, "auto") for x in (q, k, v, g))
    forward = (q, k, v, [*q8[:2], *k8[:2], *v8[2:]], None, None, spec, 0.2, True, 0.0, True, "auto")
    _, lse, probs = ops.attention_forward(*forward)
    operands = [*q8[:2], *k8[:2], *v8[:2], *g8[:2], *g8[2:], *k8[2:], *q8[2:]]
    mask = torch.zeros(40, 40)
    backward = (g, probs, q, k, v, lse, operands, mask, None, spec, 0.2, True, 0.0, "qkvm", "auto")
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.quantize_heads, (q, first, first, None, 0, "auto"), test_utils=tests)
    torch.library.opcheck(ops.attention_forward, forward, test_utils=tests)
    torch.library.opcheck(ops.attention_backward, backward, test_utils=tests)


def test_flops_are_counted() -> None:
    *qkv, g = heads(2, 3, 40, 32)
    with FlopCounterMode(display=False) as counter:
        mxfp8_attention(*qkv, config=MX).backward(g)
    assert counter.get_total_flops() == 2 * (2 * 3) * 40 * 40 * 32 * (2 + 5)


def test_compute_dtype_is_autocasts() -> None:
    *qkv, g = heads(1, 2, 40, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = mxfp8_attention(*qkv, config=MX)
    assert out.dtype is torch.bfloat16
    assert same_bits(out, mxfp8_attention(*(x.bfloat16() for x in qkv), config=MX))
    assert all(x.dtype is torch.float32 for x in torch.autograd.grad(out, qkv, g.bfloat16()))


def test_what_blocks_do_not_divide_runs_in_high_precision_and_says_so() -> None:
    named = replace(MX, layer="blocks.3.attn")
    q, k, v, _ = heads(1, 2, 10, 24)
    with pytest.warns(UserWarning, match=r"blocks.3.attn: head dim 24 is not a multiple of 32; it runs in high"):
        out = mxfp8_attention(q, k, v, config=named)
    assert same_bits(out, F.scaled_dot_product_attention(q, k, v))
    torch.compiler.reset()
    compiled = torch.compile(mxfp8_attention, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(q, k, v, config=named), out)
    with pytest.warns(UserWarning, match="compute dtype torch.float64"):
        mxfp8_attention(*(x.double() for x in heads(1, 2, 10, 32)[:3]), config=named)


def test_errors_say_what_to_do() -> None:
    q, k, v, _ = (x.detach() for x in heads(1, 2, 10, 32))
    with pytest.raises(ValueError, match=r"expected .*Lq, D"):
        mxfp8_attention(q, k[..., :9, :], v, config=MX)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        mxfp8_attention(torch.cat((q, q), 1), k, v, config=MX)
    with pytest.raises(TypeError, match="expected one dtype"):
        mxfp8_attention(q, k.bfloat16(), v, config=MX)
    with pytest.raises(TypeError, match="expected bool or a float"):
        mxfp8_attention(q, k, v, torch.ones(10, 10, dtype=torch.long), config=MX)
    with pytest.raises(ValueError, match="probability"):
        mxfp8_attention(q, k, v, None, 1.5, config=MX)
    with pytest.raises(ValueError, match="rotate qk and dp"):
        precision(dk={"grad_scores": {"hadamard": 32}, "query": {"hadamard": 32}})


def test_specs_and_recipes_round_trip() -> None:
    for name in ("mxfp8", "gem", "mxfp8_floor", "mxfp8_hopper"):
        chosen = load_recipe(name).precision("attention")
        assert AttentionSpec.decode(chosen.spec.encode()) == chosen.spec
        assert precision(**chosen.model_dump(mode="json")) == chosen
        assert chosen.projections == load_recipe(name).linear
    assert load_recipe("bf16").precision("attention") == "bf16"
    assert load_recipe("gem").precision("attention").mixes_tokens
    assert not load_recipe("mxfp8").precision("attention").mixes_tokens
    assert AttentionSpec.decode(precision(**HIGH, mix_masked=True).spec.encode()) == AttentionSpec(mix_masked=True)


def test_overrides_over_recipes_that_leave_attention_alone() -> None:
    one = apply_override("bf16", {"qk": {}}, "attention", "overrides")
    assert one.spec == only("qk").spec
    assert one.projections == "bf16"
    fewer = apply_override(load_recipe("mxfp8").precision("attention"), {"pv": "bf16"}, "attention", "overrides")
    assert (fewer.spec.pv, fewer.spec.qk is None) == (None, False)
    partial = {"projections": {"wgrad": "bf16"}}
    assert apply_override(load_recipe("mxfp8").precision("attention"), partial, "attention", "x").projections.fprop
