"""What a mask hides changes no bit: not of an output, not of a gradient, not across samples or heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.functional import mxfp8_attention
from mxfp8_recipe.fused.attention.gemms import full_blocks
from numerics_tests.attention_oracle import HIGH, SQUARE, config, heads, only, precision, sqnr_db, visible_blocks
from numerics_tests.helpers import same_bits

MX = config()
WIDE_TILE = {"tile": "1x128"}
WIDE = config(
    pv={"value": WIDE_TILE},
    dv={"grad_output": WIDE_TILE},
    dq={"grad_scores": WIDE_TILE, "key": WIDE_TILE},
    dk={"grad_scores": WIDE_TILE, "query": WIDE_TILE},
)
LEAKY = config(mix_masked=True)
LENGTH = 150
LOUD = 2.0**12


def louder(x: Tensor, *positions: int) -> Tensor:
    """These tokens times 2**12: enough to move any scale they take part in."""
    changed = x.detach().clone()
    changed[..., list(positions), :] *= LOUD
    return changed.requires_grad_()


def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, chosen: AttentionConfig, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    out = mxfp8_attention(q, k, v, *args, config=chosen, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), g)]


def leaks(chosen: AttentionConfig, token: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a louder key and value at `token` changes a bit of an earlier output or query gradient."""
    q, k, v, g = heads(1, 2, LENGTH, 64, dtype=dtype)
    before = run(q, k, v, g, chosen, is_causal=True)
    after = run(louder(q, token), louder(k, token), louder(v, token), g, chosen, is_causal=True)
    assert not torch.equal(before[0][..., token, :], after[0][..., token, :])
    return not all(same_bits(a[..., :token, :], b[..., :token, :]) for a, b in zip(before[:2], after[:2]))


@pytest.mark.parametrize("token", [1, 17, 31, 32, 33, 95, 128, LENGTH - 1])
@pytest.mark.parametrize("chosen", [MX, WIDE], ids=["1x32", "1x128"])
def test_the_future_does_not_leak_under_a_causal_mask(chosen: AttentionConfig, token: int) -> None:
    assert not leaks(chosen, token)


def test_the_future_does_not_leak_in_bf16() -> None:
    assert not any(leaks(MX, token, torch.bfloat16) for token in (17, 64))


@pytest.mark.parametrize("token", [17, 33])
def test_negative_controls_leak(token: int) -> None:
    """Blocks of V along keys that span the diagonal, and square tiles of Q and K: the same test sees both."""
    assert leaks(LEAKY, token)
    assert leaks(config(**{**HIGH, "qk": SQUARE["qk"]}, mix_masked=True), token)
    assert leaks(config(**SQUARE, mix_masked=True), token)


def test_a_hidden_pair_moves_no_gradient_either() -> None:
    """Louder queries and output gradients before token 40 leave the gradients of keys from 40 on alone."""
    q, k, v, g = heads(1, 2, LENGTH, 64)
    early = list(range(40))
    for chosen, same in ((MX, True), (WIDE, True), (LEAKY, False)):
        before = run(q, k, v, g, chosen, is_causal=True)
        after = run(louder(q, *early), k, v, louder(g, *early).detach(), chosen, is_causal=True)
        assert not torch.equal(before[2][..., 20, :], after[2][..., 20, :])
        assert all(same_bits(a[..., 40:, :], b[..., 40:, :]) for a, b in zip(before[2:], after[2:])) == same


def test_causal_attention_is_quantized_below_the_diagonal() -> None:
    """pv alone: the first 32 rows see a diagonal block only; later ones also see full blocks, in MXFP8."""
    q, k, v, _ = heads(1, 2, LENGTH, 64)
    plain = mxfp8_attention(q, k, v, is_causal=True, config=config(**HIGH), need_weights=True)[0]
    quantized = mxfp8_attention(q, k, v, is_causal=True, config=AttentionConfig.of(only("pv")))
    assert same_bits(plain[..., :32, :], quantized[..., :32, :])
    assert 20 < sqnr_db(quantized[..., 64:, :], plain[..., 64:, :]) < 45


MASKS = {
    "scattered": torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.01,
    "padding": (torch.arange(LENGTH) < 77).expand(LENGTH, LENGTH),
    "documents": torch.arange(LENGTH)[:, None] // 45 == torch.arange(LENGTH) // 45,
    "window": (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 70,
}


@pytest.mark.parametrize("form", ["bool", "-inf", "finfo.min", "-1e9"])
@pytest.mark.parametrize("name", MASKS)
def test_a_hidden_key_changes_no_row_that_does_not_see_it(name: str, form: str) -> None:
    visible = MASKS[name]
    lowest = {"-inf": -torch.inf, "finfo.min": torch.finfo(torch.float32).min, "-1e9": -1e9}.get(form, 0.0)
    mask = visible if form == "bool" else torch.zeros(visible.shape).masked_fill(~visible, lowest)
    q, k, v, g = heads(2, 2, LENGTH, 32)
    key = 77
    before, after = run(q, k, v, g, MX, mask), run(q, louder(k, key), louder(v, key), g, MX, mask)
    blind = ~visible[:, key]
    assert blind.any()
    assert all(same_bits(a[..., blind, :], b[..., blind, :]) for a, b in zip(before[:2], after[:2]))
    if visible[:, key].any():
        assert not torch.equal(before[0][..., ~blind, :], after[0][..., ~blind, :])
    leaky = [run(*x, g, LEAKY, mask)[0] for x in ((q, k, v), (q, louder(k, key), louder(v, key)))]
    assert not same_bits(leaky[0][..., blind, :], leaky[1][..., blind, :])


@pytest.mark.parametrize("chosen", [MX, config(**SQUARE)], ids=["1x32", "32x32"])
def test_samples_and_heads_do_not_touch(chosen: AttentionConfig) -> None:
    inputs = heads(2, 3, 45, 32)
    before = run(*inputs, chosen)
    loud = [x.detach().clone() for x in inputs]
    for x in loud:
        x[1] *= LOUD
        x[0, 2] *= LOUD
    *qkv, g = loud
    after = run(*(x.requires_grad_() for x in qkv), g, chosen)
    for a, b in zip(before, after):
        assert same_bits(a[0, :2], b[0, :2])
        assert not torch.equal(a[1], b[1])
    for i, alone in enumerate(
        run(*(x[:1, :1].detach().requires_grad_() for x in inputs[:3]), inputs[3][:1, :1], chosen)
    ):
        torch.testing.assert_close(alone, before[i][:1, :1], rtol=1e-5, atol=1e-5)


def test_padding_isolates_samples_of_one_row() -> None:
    """A padded batch gives each sample what it gets alone, to fp32 rounding where its blocks agree."""
    q, k, v, _ = heads(1, 2, 64, 32)
    visible = (torch.arange(64) < 32)[None, None, None]
    padded = mxfp8_attention(q, k, v, visible, config=MX)[..., :32, :]
    alone = mxfp8_attention(*(x[..., :32, :] for x in (q, k, v)), config=MX)
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-6)


def test_square_tiles_under_a_mask_are_refused_by_name() -> None:
    q, k, v, _ = heads(1, 2, 40, 32)
    square = precision(**{**HIGH, "qk": SQUARE["qk"]})
    assert square.mixes_tokens
    named = AttentionConfig.of(square, layer="encoder.0")
    for kwargs in ({"is_causal": True}, {"attn_mask": torch.ones(40, 40, dtype=torch.bool)}):
        with pytest.raises(ValueError, match=r"encoder.0: a tile of several tokens under .*mix_masked"):
            mxfp8_attention(q, k, v, **kwargs, config=named)
    assert mxfp8_attention(q, k, v, config=named).isfinite().all()
    allowed = AttentionConfig.of(square.model_copy(update={"mix_masked": True}))
    assert mxfp8_attention(q, k, v, is_causal=True, config=allowed).isfinite().all()


def test_causal_aligns_at_the_top_left() -> None:
    for lq, lk in ((70, 40), (40, 70), (1, 33)):
        q, k, v, g = (torch.randn(1, 2, length, 32) for length in (lq, lk, lk, lq))
        visible = torch.ones(lq, lk, dtype=torch.bool).tril()
        qkv = [x.requires_grad_() for x in (q, k, v)]
        ours, masked = run(*qkv, g, MX, is_causal=True), run(*qkv, g, MX, visible)
        assert all(map(same_bits, ours, masked))
        expected = F.scaled_dot_product_attention(*qkv, is_causal=True)
        assert sqnr_db(ours[0], expected) > 20


def test_a_mask_and_causality_both_apply() -> None:
    q, k, v, g = heads(1, 2, 70, 32)
    mask = torch.rand(70, 70) > 0.2
    mask[:, 0] = True
    both = run(q, k, v, g, MX, mask, is_causal=True)
    assert all(map(same_bits, both, run(q, k, v, g, MX, mask.tril())))


def test_a_query_that_sees_nothing_gets_zero_as_in_torch() -> None:
    q, k, v, g = heads(2, 2, 40, 32)
    mask = torch.ones(40, 40, dtype=torch.bool)
    mask[3:5] = False
    for given in (mask, torch.zeros(40, 40).masked_fill(~mask, -torch.inf)):
        out, dq, dk, dv = run(q, k, v, g, MX, given)
        assert not out[..., 3:5, :].any()
        assert not dq[..., 3:5, :].any()
        assert all(x.isfinite().all() for x in (out, dq, dk, dv))
        assert not F.scaled_dot_product_attention(q, k, v, given)[..., 3:5, :].any()


@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (32, 128), (128, 32)])
def test_full_blocks_by_looking_at_each(rows: int, cols: int) -> None:
    for lq, lk in ((1, 1), (31, 33), (70, 130), (0, 5)):
        for hidden in (0.0, 0.001, 0.5):
            visible = torch.rand(2, 1, lq, lk) >= hidden
            assert torch.equal(full_blocks(visible, rows, cols), visible_blocks(visible, rows, cols))


def test_masks_of_every_broadcast_shape() -> None:
    q, k, v, g = heads(2, 3, 40, 32)
    full = torch.rand(2, 3, 40, 40) > 0.1
    for shape in ((40, 40), (1, 40), (3, 40, 40), (2, 1, 1, 40), (2, 1, 40, 40), (1, 3, 1, 40), (2, 3, 40, 40)):
        mask = full[tuple(slice(n) for n in (1,) * (4 - len(shape)) + shape)].reshape(shape)
        expected = run(q, k, v, g, MX, mask.expand(2, 3, 40, 40).contiguous())
        assert all(map(same_bits, run(q, k, v, g, MX, mask), expected))
