"""Jagged attention in plain torch: against torch's own per sample, a plain HSTU, and numerical derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe.fused.attention import jagged_reference as reference
from mxfp8_recipe.fused.attention.activations import ACTIVATIONS, GELU_POLY_ERROR, GELU_POLY_REACH, act, act_grad
from mxfp8_recipe.fused.attention.bias import JaggedBias, log_time_bounds, time_buckets
from numerics_tests.helpers import same_bits
from numerics_tests.jagged_cases import (
    CANCELLATION_PEAKS,
    CASES,
    CROSS_CASES,
    MASKS,
    SELF_CASES,
    JaggedCase,
    JaggedTensors,
    cancellation,
    offsets_of,
    tensors,
)

TINY = JaggedCase(name="tiny", q_lengths=(2, 0, 3, 1), k_lengths=(3, 2, 2, 0), heads=2, groups=1, dim=4, value_dim=3)
FP64 = 5e-13
"""Largest difference between two orders of the same fp64 sums, gradients of tables included: measured 7e-14."""


def relative_positions(lq: int, lk: int) -> Tensor:
    return torch.arange(lq)[:, None] + (lk - lq) - torch.arange(lk)


def visible_pairs(lq: int, lk: int, causal: bool = False, window: int | None = None) -> Tensor:
    """(Lq, Lk) bool, pair by pair."""
    seen = torch.ones(lq, lk, dtype=torch.bool)
    for i in range(lq):
        for j in range(lk):
            apart = i + lk - lq - j
            if (causal and apart < 0) or (window is not None and abs(apart) > window):
                seen[i, j] = False
    return seen


def make_bias(t: JaggedTensors, positions: int = 9, times: int = 6, dtype: torch.dtype = torch.float64) -> JaggedBias:
    """Both tables; times a few seconds to a few months apart."""
    generator = torch.Generator().manual_seed(3)
    heads = t.q.shape[1]
    return JaggedBias(
        position=torch.randn(positions, heads, generator=generator, dtype=torch.float64).to(dtype),
        time=torch.randn(times, heads, generator=generator, dtype=torch.float64).to(dtype),
        q_times=torch.randint(0, 10**7, (len(t.q),), generator=generator),
        k_times=torch.randint(0, 10**7, (len(t.k),), generator=generator),
        time_bounds=log_time_bounds(times, width=3.0),
    )


def sample_bias(bias: JaggedBias, rows: slice, cols: slice) -> Tensor:
    """(H, Lq, Lk) of one sample, as HSTU writes it: a logarithm, rounded down."""
    assert bias.position is not None
    assert bias.time is not None
    assert bias.q_times is not None
    assert bias.k_times is not None
    lq, lk, size = rows.stop - rows.start, cols.stop - cols.start, len(bias.position)
    place = (relative_positions(lq, lk) + size // 2).clamp(0, size - 1)
    apart = (bias.q_times[rows][:, None] - bias.k_times[cols]).abs().clamp(min=1).double()
    bucket = (apart.log() / 3.0).floor().long().clamp(max=len(bias.time) - 1)
    return (bias.position.double()[place] + bias.time.double()[bucket]).permute(2, 0, 1)


def per_sample(t: JaggedTensors, attend: Any) -> Tensor:
    """`attend(q (H, Lq, D), k (H, Lk, D), v (H, Lk, E), rows, cols)` of each sample, packed."""
    groups = t.q.shape[1] // t.k.shape[1]
    outputs = [t.q[:0, :, :1].expand(-1, -1, t.v.shape[2])]
    for index in range(len(t.q_offsets) - 1):
        rows, cols = t.sample(index)
        q, k, v = (x.transpose(0, 1) for x in (t.q[rows], t.k[cols], t.v[cols]))
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        outputs.append(attend(q, k, v, rows, cols).transpose(0, 1))
    return torch.cat(outputs)


def with_gradients(out: Tensor, t: JaggedTensors, bias: JaggedBias | None) -> list[Tensor]:
    wanted = [t.q, t.k, t.v, *([] if bias is None else [bias.position, bias.time])]
    grads = torch.autograd.grad(out, wanted, t.grad_out, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads))]


def leaves(t: JaggedTensors, bias: JaggedBias | None) -> None:
    for x in (t.q, t.k, t.v, *(() if bias is None else (bias.position, bias.time))):
        if x is not None:
            x.requires_grad_()


def close(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv", "dposition", "dtime"), actual, expected):
        assert ours.shape == theirs.shape, name
        assert (ours.double() - theirs).abs().max().item() < FP64 if ours.numel() else True, name


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_softmax_attention_is_sdpa_of_each_sample(case: JaggedCase, mask: str, biased: bool) -> None:
    t = tensors(case, dtype=torch.float64)
    bias = make_bias(t) if biased else None
    leaves(t, bias)

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, cols: slice) -> Tensor:
        seen = visible_pairs(q.shape[1], k.shape[1], **MASKS[mask])
        added = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        added = added if bias is None else added + sample_bias(bias, rows, cols)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.3)
        return torch.where(seen.any(-1)[:, None], out, 0.0)

    expected = with_gradients(per_sample(t, attend), t, bias)
    with torch.no_grad():
        options: dict[str, Any] = {"scale": 0.3, **MASKS[mask]}
        out, lse = reference.jagged_forward(t.q, t.k, t.v, *t.layout, bias, **options)
        grads = reference.jagged_backward(t.grad_out, t.q, t.k, t.v, out, lse, *t.layout, bias, **options)
    close([out, *grads][: len(expected)], expected)
    sees = torch.cat(
        [torch.ones(0, dtype=torch.bool)]
        + [visible_pairs(lq, lk, **MASKS[mask]).any(-1) for lq, lk in zip(case.q_lengths, case.k_lengths)]
    )
    assert torch.equal(lse.isposinf(), ~sees[:, None].expand(-1, case.heads))
    assert not out[~sees].any()


def plain_hstu(x: Tensor, times: Tensor, module: dict[str, Any]) -> Tensor:
    """One sample (L, H, D) through `silu(QK^T + bias) V / N`, written from the definition."""
    q, k, v = x
    scores = torch.einsum("ihd,jhd->hij", q, k) * module["pre_scale"]
    lq = len(q)
    place = (relative_positions(lq, lq) + len(module["position"]) // 2).clamp(0, len(module["position"]) - 1)
    bucket = (times[:, None] - times).abs().clamp(min=1).double().log().div(3.0).floor().long()
    bucket = bucket.clamp(max=len(module["time"]) - 1)
    scores = scores + module["position"][place].permute(2, 0, 1) + module["time"][bucket].permute(2, 0, 1)
    weights = F.silu(scores) / module["longest"]
    weights = weights * torch.ones(lq, lq, dtype=scores.dtype).tril()
    return torch.einsum("hij,jhe->ihe", weights, v)


def test_silu_attention_is_a_plain_hstu() -> None:
    t = tensors(SELF_CASES[0], dtype=torch.float64)
    bias = make_bias(t)
    bias = JaggedBias(
        position=bias.position, time=bias.time, q_times=bias.q_times, k_times=bias.q_times, time_bounds=bias.time_bounds
    )
    leaves(t, bias)
    module = {"pre_scale": 0.2, "longest": 65, "position": bias.position, "time": bias.time}
    rows = [t.sample(i)[0] for i in range(len(t.q_offsets) - 1)]
    assert bias.q_times is not None
    outputs = [plain_hstu((t.q[r], t.k[r], t.v[r]), bias.q_times[r], module) for r in rows]
    expected = with_gradients(torch.cat(outputs), t, bias)
    options: dict[str, Any] = {"activation": "silu", "pre_scale": 0.2, "post_scale": 1 / 65, "causal": True}
    with torch.no_grad():
        out = reference.generalized_forward(t.q, t.k, t.v, *t.layout, bias, **options)
        grads = reference.generalized_backward(t.grad_out, t.q, t.k, t.v, *t.layout, bias, **options)
    close([out, *grads], expected)


@pytest.mark.parametrize("mask", ["full", "causal-window"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "identity"])
@pytest.mark.parametrize("case", [SELF_CASES[1], *CROSS_CASES[:3]], ids=str)
def test_generalized_attention_is_torchs_activation_between_two_matmuls(
    case: JaggedCase, activation: str, mask: str
) -> None:
    functions = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "identity": lambda x: x}
    t = tensors(case, dtype=torch.float64)
    leaves(t, None)

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, cols: slice) -> Tensor:
        weights = (functions.get(activation) or getattr(F, activation))(0.2 * q @ k.transpose(1, 2))
        return weights * visible_pairs(*weights.shape[1:], **MASKS[mask]) @ v * 0.7

    expected = with_gradients(per_sample(t, attend), t, None)
    options: dict[str, Any] = {"activation": activation, "pre_scale": 0.2, "post_scale": 0.7, **MASKS[mask]}
    with torch.no_grad():
        out = reference.generalized_forward(t.q, t.k, t.v, *t.layout, None, **options)
        grads = reference.generalized_backward(t.grad_out, t.q, t.k, t.v, *t.layout, None, **options)
    close([out, *grads[:3]], expected)


def test_one_query_set_for_every_sample_equals_repeating_it() -> None:
    """The gradients of the copies sum to that of the set."""
    t = tensors(JaggedCase(name="", q_lengths=(5,) * 4, k_lengths=(3, 0, 33, 7), heads=4), dtype=torch.float64)
    seeds = t.q[:5]
    options: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.2, "post_scale": 0.7}
    repeated = seeds.repeat(4, 1, 1)
    layout = (None, t.k_offsets, 0, t.max_k)
    out = reference.generalized_forward(seeds, t.k, t.v, *layout, None, **options, broadcast_q=True)
    dq, dk, dv, *_ = reference.generalized_backward(
        t.grad_out, seeds, t.k, t.v, *layout, None, **options, broadcast_q=True
    )
    assert same_bits(out, reference.generalized_forward(repeated, t.k, t.v, *t.layout, None, **options))
    grads = reference.generalized_backward(t.grad_out, repeated, t.k, t.v, *t.layout, None, **options)
    close([out, dq, dk, dv], [out, grads[0].unflatten(0, (4, 5)).sum(0), grads[1], grads[2]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", SELF_CASES, ids=str)
def test_block_attention_is_sdpa_under_a_block_mask(case: JaggedCase, causal: bool) -> None:
    t = tensors(case, dtype=torch.float64)
    leaves(t, None)

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, cols: slice) -> Tensor:
        place = torch.arange(q.shape[1])
        same = place[:, None] // 32 == place // 32
        seen = same & (place[:, None] >= place) if causal else same
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3)

    expected = with_gradients(per_sample(t, attend), t, None)
    options: dict[str, Any] = {"scale": 0.3, "block": 32, "causal": causal}
    with torch.no_grad():
        out = reference.block_forward(t.q, t.k, t.v, t.q_offsets, t.max_q, **options)
        grads = reference.block_backward(t.grad_out, t.q, t.k, t.v, t.q_offsets, t.max_q, **options)
    close([out, *grads], expected)


def test_multihead_attention_of_torch_under_padding() -> None:
    """Between its own projections, on a batch padded to the longest sample."""
    lengths = (5, 1, 9)
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    real = torch.arange(9) < torch.tensor(lengths)[:, None]
    expected = layer(x, x, x, key_padding_mask=~real, need_weights=False)[0][real]
    qkv = F.linear(x[real], layer.in_proj_weight, layer.in_proj_bias).unflatten(-1, (3, 2, 8)).unbind(1)
    offsets = offsets_of(lengths)
    with torch.no_grad():
        out, _ = reference.jagged_forward(*qkv, offsets, offsets, 9, 9, None, scale=8**-0.5)
    assert (layer.out_proj(out.flatten(1)) - expected).abs().max() < FP64


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, position: Tensor, time: Tensor, t: Any, options: Any) -> Any:
        bias = rebuilt(t[1], position, time)
        out, lse = reference.jagged_forward(q, k, v, *t[0].layout, bias, **options)
        ctx.save_for_backward(q, k, v, out, lse, position, time)
        ctx.rest = (t, options)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, position, time = ctx.saved_tensors
        t, options = ctx.rest
        bias = rebuilt(t[1], position, time)
        return *reference.jagged_backward(grads[0], q, k, v, out, lse, *t[0].layout, bias, **options), None, None


class _Generalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, position: Tensor, time: Tensor, t: Any, options: Any) -> Any:
        ctx.save_for_backward(q, k, v, position, time)
        ctx.rest = (t, options)
        return reference.generalized_forward(q, k, v, *t[0].layout, rebuilt(t[1], position, time), **options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, position, time = ctx.saved_tensors
        t, options = ctx.rest
        bias = rebuilt(t[1], position, time)
        return *reference.generalized_backward(grads[0], q, k, v, *t[0].layout, bias, **options), None, None


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Any, options: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.rest = (layout, options)
        return reference.block_forward(q, k, v, *layout, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layout, options = ctx.rest
        return *reference.block_backward(grads[0], *ctx.saved_tensors, *layout, **options), None, None


def rebuilt(bias: JaggedBias, position: Tensor, time: Tensor) -> JaggedBias:
    return JaggedBias(
        position=position, time=time, q_times=bias.q_times, k_times=bias.k_times, time_bounds=bias.time_bounds
    )


@pytest.mark.parametrize("mask", ["full", "causal-window"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradcheck_with_both_bias_tables(activation: str | None, mask: str) -> None:
    t = tensors(TINY, dtype=torch.float64)
    bias = make_bias(t, positions=4, times=3)
    leaves(t, bias)
    named: dict[str, Any] = {"scale": 0.6}
    if activation is not None:
        named = {"activation": activation, "pre_scale": 0.6, "post_scale": 0.8}
    function = _Softmax if activation is None else _Generalized
    inputs = (t.q, t.k, t.v, bias.position, bias.time, (t, bias), named | MASKS[mask])
    assert torch.autograd.gradcheck(function.apply, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_of_block_attention(causal: bool) -> None:
    case = JaggedCase(name="", q_lengths=(5, 0, 3, 1), k_lengths=(5, 0, 3, 1), heads=2, groups=1, dim=3, value_dim=2)
    t = tensors(case, dtype=torch.float64)
    leaves(t, None)
    options = {"scale": 0.6, "block": 2, "causal": causal}
    assert torch.autograd.gradcheck(_Block.apply, (t.q, t.k, t.v, (t.q_offsets, t.max_q), options))


FAMILIES: dict[str, Any] = {
    "softmax": (
        lambda t, bias, o: reference.jagged_forward(t.q, t.k, t.v, *t.layout, bias, scale=0.2, **o),
        lambda t, bias, f, o: reference.jagged_backward(t.grad_out, t.q, t.k, t.v, *f, *t.layout, bias, scale=0.2, **o),
    ),
    "gelu": (
        lambda t, bias, o: (
            reference.generalized_forward(
                t.q, t.k, t.v, *t.layout, bias, activation="gelu", pre_scale=0.2, post_scale=1.0, **o
            ),
        ),
        lambda t, bias, f, o: reference.generalized_backward(
            t.grad_out, t.q, t.k, t.v, *t.layout, bias, activation="gelu", pre_scale=0.2, post_scale=1.0, **o
        ),
    ),
}


@pytest.mark.parametrize("mask", ["full", "causal-window"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sample_reaches_another(family: str, mask: str) -> None:
    """A sample full of NaN, and one of another length, change no bit of the others'; dtypes stay."""
    forward, backward = FAMILIES[family]
    options, kept = MASKS[mask], (0, 1, 3, 4)

    def run(lengths: tuple[int, ...], poison: float | None = None) -> list[list[Tensor]]:
        case = JaggedCase(name="", q_lengths=lengths, k_lengths=lengths)
        parts = [tensors(JaggedCase(name="", q_lengths=(n,), k_lengths=(n,)), seed=i) for i, n in enumerate(lengths)]
        t = tensors(case)
        for name in ("q", "k", "v", "grad_out"):
            getattr(t, name).copy_(torch.cat([getattr(part, name) for part in parts]))
        rows = t.sample(2)[0]
        if poison is not None:
            for x in (t.q, t.k, t.v, t.grad_out):
                x[rows] = poison
        t = JaggedTensors(t.q, t.k, t.v, t.grad_out, t.q_offsets, t.k_offsets, 40, 40)
        found = forward(t, None, options)
        results = [*found, *backward(t, None, found, options)[:3]]
        return [[x[t.sample(i)[0]] for i in kept] for x in results]

    expected = run((31, 0, 33, 40, 5))
    for changed in (run((31, 0, 33, 40, 5), float("nan")), run((31, 0, 1, 40, 5)), run((31, 0, 0, 40, 5))):
        for ours, theirs in zip(changed, expected, strict=True):
            assert all(same_bits(a, b) and bool(a.isfinite().all()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("peak", CANCELLATION_PEAKS)
def test_a_row_maximum_far_below_zero(peak: float) -> None:
    """fp32 against fp64; the score of a padded key, 0, is far above any true one. Measured: 95 dB or more."""
    t, exact = (cancellation(peak=peak, dtype=dtype) for dtype in (torch.float32, torch.float64))
    found = []
    for x in (t, exact):
        out, lse = reference.jagged_forward(x.q, x.k, x.v, *x.layout, None, scale=32**-0.5)
        found.append(
            [out, *reference.jagged_backward(x.grad_out, x.q, x.k, x.v, out, lse, *x.layout, None, scale=32**-0.5)]
        )
    for ours, theirs in zip(*found):
        if theirs.numel():
            noise = (ours.double() - theirs).square().sum() / theirs.square().sum()
            assert -10 * noise.log10().item() > 80


def test_log_buckets_are_hstus() -> None:
    """Every interval up to 5000, and around every bound that int64 holds, to the bit of exact arithmetic."""
    bounds = log_time_bounds(64)
    assert bool((bounds.diff() >= 0).all())
    interval = torch.arange(5000)
    by_logarithm = (interval.clamp(min=1).double().log() / 0.301).floor().long()
    assert torch.equal(time_buckets(-interval, bounds), by_logarithm)
    assert int(time_buckets(torch.tensor(2**62), bounds)) == 63
    assert torch.equal(log_time_bounds(200)[-1], torch.tensor(2**63 - 1))


def test_polynomial_gelu_stays_within_its_error_and_no_further() -> None:
    x = torch.linspace(-GELU_POLY_REACH, GELU_POLY_REACH, 20001, dtype=torch.float64)
    error = (act(x, "gelu_poly") - act(x, "gelu")).abs().max().item()
    assert 0.9 * GELU_POLY_ERROR < error <= GELU_POLY_ERROR
    assert (act_grad(x, "gelu_poly") - act_grad(x, "gelu")).abs().max().item() < 5.2e-4
    two = torch.tensor(2.0, dtype=torch.float64)
    assert abs((act(two, "gelu_poly") - act(two, "gelu")).item()) > 0.1


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_gradients_that_are_not_wanted(dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    t = tensors(CASES[0], dtype=dtype, offsets_dtype=offsets_dtype)
    bias = make_bias(t, dtype=torch.float32)
    for family, (forward, backward) in FAMILIES.items():
        found = forward(t, bias, {})
        assert found[0].dtype is dtype
        assert len(found) == 1 or found[1].dtype is torch.float32
        full = backward(t, bias, found, {})
        assert [g.dtype for g in full] == [dtype] * 3 + [torch.float32] * 2, family
        for wanted in ("q", "k", "v", "b", "qv", "kb", ""):
            some = backward(t, bias, found, {"wanted": wanted})
            for name, got, one in zip("qkvbb", some, full, strict=True):
                assert same_bits(got, one) if name in wanted else got.shape == (0,)
