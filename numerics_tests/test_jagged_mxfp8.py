"""MXFP8 in attention on jagged batches: the bits of dense attention where that is defined, else an oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.config import AttentionPrecision
from mxfp8_recipe.functional import block_attention, generalized_attention, jagged_attention, mxfp8_attention
from mxfp8_recipe.fused.attention.gemms import full_blocks
from mxfp8_recipe.fused.attention.jagged_layout import Jagged
from mxfp8_recipe.fused.attention.jagged_quantize import quantize_jagged, scale_rows
from mxfp8_recipe.fused.attention.spec import GEMMS
from mxfp8_recipe.fused.reference import dequantize
from mxfp8_recipe.fused.spec import QuantSpec
from numerics_tests.attention_oracle import HIGH, SQUARE, config, only, precision, sqnr_db
from numerics_tests.helpers import same_bits, seen
from numerics_tests.jagged_cases import CASES, ODD, JaggedCase, JaggedTensors, offsets_of, tensors

FEEDS = {"qk": "oqkv", "pv": "o", "dv": "v", "dp": "qk", "dq": "q", "dk": "k"}
"""Which of output, dQ, dK and dV each GEMM reaches."""
EQUAL = JaggedCase(
    name="equal", q_lengths=(70, 70, 70), k_lengths=(70, 70, 70), heads=4, groups=2, dim=64, value_dim=32
)
WIDE = {gemm: {name: {"tile": "1x128"} for name in type(getattr(precision(), gemm)).model_fields} for gemm in GEMMS}
STOCHASTIC = {
    gemm: {name: {"rounding": "stochastic"} for name in type(getattr(precision(), gemm)).model_fields} for gemm in GEMMS
}
SILU: dict[str, Any] = {"activation": "silu", "pre_scale": 0.2, "post_scale": 0.5}


def jagged(t: JaggedTensors, chosen: AttentionConfig, **kwargs: Any) -> Tensor:
    return jagged_attention(t.q, t.k, t.v, *t.layout, config=chosen, **kwargs)


def silu(t: JaggedTensors, chosen: AttentionConfig, **kwargs: Any) -> Tensor:
    return generalized_attention(t.q, t.k, t.v, *t.layout, config=chosen, **(SILU | kwargs))


def block(t: JaggedTensors, chosen: AttentionConfig, **kwargs: Any) -> Tensor:
    return block_attention(t.q, t.k, t.v, t.q_offsets, t.max_q, config=chosen, **kwargs)


ATTEND: dict[str, Any] = {"jagged": jagged, "silu": silu, "block": block}


def run(t: JaggedTensors, family: str, chosen: AttentionConfig, **kwargs: Any) -> list[Tensor]:
    """Output and the gradients of q, k and v."""
    for x in (t.q, t.k, t.v):
        x.requires_grad_()
    out = ATTEND[family](t, chosen, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, (t.q, t.k, t.v), t.grad_out)]


def dense(x: Tensor, samples: int) -> Tensor:
    """(B * L, H, D) to (B, H, L, D)."""
    return x.unflatten(0, (samples, -1)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("chosen", "causal"),
    [
        (config(), False), (config(), True), (config(**SQUARE), False), (config(**WIDE), True),
        (config(**STOCHASTIC), True),
    ],
    ids=["mxfp8", "mxfp8-causal", "square", "wide-causal", "stochastic-causal"],
)  # fmt: skip
def test_equal_lengths_have_the_bits_of_dense_attention(
    chosen: AttentionConfig, causal: bool, dtype: torch.dtype
) -> None:
    t = tensors(EQUAL, dtype=dtype)
    torch.manual_seed(5)
    ours = run(t, "jagged", chosen, causal=causal)
    q, k, v = (dense(x.detach(), 3).requires_grad_() for x in (t.q, t.k, t.v))
    torch.manual_seed(5)
    out = mxfp8_attention(q, k, v, is_causal=causal, enable_gqa=True, config=chosen)
    theirs = [out, *torch.autograd.grad(out, (q, k, v), dense(t.grad_out, 3))]
    for name, a, b in zip("oqkv", ours, theirs):
        assert same_bits(a, b.transpose(1, 2).flatten(0, 1)), name
    plain = run(t, "jagged", config(**HIGH), causal=causal)
    assert all(not same_bits(a, b) for a, b in zip(ours, plain))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_fill_samples_have_the_bits_of_dense_attention(causal: bool) -> None:
    lengths = (128, 64, 192)
    case = JaggedCase(name="", q_lengths=lengths, k_lengths=lengths, dim=32)
    t = tensors(case)
    ours = run(t, "block", config(), causal=causal)
    q, k, v = (dense(x.detach(), 6).requires_grad_() for x in (t.q, t.k, t.v))
    out = mxfp8_attention(q, k, v, is_causal=causal, config=config())
    theirs = [out, *torch.autograd.grad(out, (q, k, v), dense(t.grad_out, 6))]
    assert all(same_bits(a, b.transpose(1, 2).flatten(0, 1)) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("family", ATTEND)
@pytest.mark.parametrize("chosen", [config(), config(**SQUARE)], ids=["mxfp8", "square"])
def test_a_sample_is_quantized_by_itself(family: str, chosen: AttentionConfig) -> None:
    """Alone in its batch, and beside samples of other lengths and magnitudes, one sample has the same bits."""
    t = tensors(JaggedCase(name="", q_lengths=ODD, k_lengths=ODD))
    for x in (t.q, t.k, t.v, t.grad_out):
        x[t.sample(3)[0]] *= 1e4
    together = run(t, family, chosen)
    for index, length in enumerate(ODD):
        rows = t.sample(index)[0]
        offsets = offsets_of((length,))
        parts = (x.detach()[rows].clone() for x in (t.q, t.k, t.v, t.grad_out))
        alone = JaggedTensors(*parts, offsets, offsets, t.max_q, t.max_k)
        for name, a, b in zip("oqkv", run(alone, family, chosen), together):
            assert same_bits(a, b[rows]), (index, name)


@pytest.mark.parametrize("family", ATTEND)
@pytest.mark.parametrize("gemm", GEMMS)
def test_each_gemm_reaches_only_what_it_feeds(family: str, gemm: str) -> None:
    t = tensors(JaggedCase(name="", q_lengths=(40, 7, 0, 33), k_lengths=(40, 7, 0, 33)))
    plain, one = (run(t, family, chosen) for chosen in (config(**HIGH), AttentionConfig.of(only(gemm))))
    changed = {name for name, a, b in zip("oqkv", plain, one) if not same_bits(a, b)}
    assert changed == set(FEEDS[gemm])


def generalized_oracle(t: JaggedTensors, index: int, chosen: AttentionPrecision, visible: Tensor) -> list[Tensor]:
    """Output and gradients of one sample in fp64 on explicitly quantized operands: A and dS with their amax."""
    rows, cols = t.sample(index)
    q, k, v, g = (x.detach().transpose(0, 1) for x in (t.q[rows], t.k[cols], t.v[cols], t.grad_out[rows]))

    def pair(gemm: str) -> tuple[QuantSpec, QuantSpec] | tuple[None, None]:
        found = getattr(chosen, gemm)
        return (None, None) if found == "bf16" else found.operands

    def by_head(gemm: str, a: Tensor, b: Tensor) -> Tensor:
        first, second = pair(gemm)
        return seen(a, first, -1) @ seen(b, second, -1).transpose(-1, -2)

    def along_sequence(gemm: str, weights: Tensor, values: Tensor, sees: Tensor) -> Tensor:
        first, second = pair(gemm)
        full = full_blocks(sees, 32, 32)
        inside = seen(torch.where(full, weights, 0.0).float(), first, -1)
        return inside @ seen(values, second, -2) + torch.where(full, 0.0, weights) @ values.double()

    scores = (by_head("qk", q, k) * 0.2).requires_grad_()
    weights = F.silu(scores) * visible
    slope = torch.autograd.grad(weights.sum(), scores)[0]
    weights = weights.detach()
    out = along_sequence("pv", weights, v, visible) * 0.5
    dv = along_sequence("dv", weights.transpose(-1, -2), g, visible.T) * 0.5
    dscores = slope * by_head("dp", g, v) * 0.5
    dq = along_sequence("dq", dscores, k, visible) * 0.2
    dk = along_sequence("dk", dscores.transpose(-1, -2), q, visible.T) * 0.2
    return [x.transpose(0, 1) for x in (out, dq, dk, dv)]


@pytest.mark.parametrize("causal", [False, True])
def test_silu_attention_matches_the_oracle(causal: bool) -> None:
    """Measured: 139 dB or more; 24 to 28 without quantizing."""
    case = JaggedCase(name="", q_lengths=(70, 1, 33), k_lengths=(70, 1, 33))
    t = tensors(case)
    ours, plain = (run(t, "silu", chosen, causal=causal) for chosen in (config(), config(**HIGH)))
    for index, length in enumerate(case.q_lengths):
        visible = torch.ones(length, length, dtype=torch.bool)
        expected = generalized_oracle(t, index, precision(), visible.tril() if causal else visible)
        rows = t.sample(index)[0]
        for name, a, b, high in zip("oqkv", ours, expected, plain):
            assert sqnr_db(a[rows], b) > 60, (name, sqnr_db(a[rows], b))
            assert sqnr_db(high[rows], b) < 45, name


def test_pooled_queries_are_quantized_once_for_all_samples() -> None:
    """The bits of repeating them, but for dQ, which is summed before it is rounded."""
    t = tensors(JaggedCase(name="", q_lengths=(5,) * 4, k_lengths=(3, 0, 40, 7)))
    seeds = t.q[:5].detach().requires_grad_()
    repeated = JaggedTensors(seeds.detach().repeat(4, 1, 1), *list(vars(t).values())[1:])
    theirs = run(repeated, "silu", config())
    t.k.requires_grad_()
    t.v.requires_grad_()
    args: dict[str, Any] = {"broadcast_q": True, "config": config(), **SILU}
    out = generalized_attention(seeds, t.k, t.v, None, t.k_offsets, 0, t.max_k, **args)
    dq, dk, dv = torch.autograd.grad(out, (seeds, t.k, t.v), t.grad_out)
    assert all(same_bits(a, b) for a, b in zip((out, dk, dv), (theirs[0], *theirs[2:])))
    assert sqnr_db(dq, theirs[1].unflatten(0, (4, 5)).sum(0)) > 120


@pytest.mark.parametrize("case", [case for case in CASES if case.dim % 32 == 0], ids=str)
@pytest.mark.parametrize("family", ["jagged", "silu"])
def test_quantization_noise_on_odd_shapes(family: str, case: JaggedCase) -> None:
    """SQNR against the compute dtype in fp32: measured 23.1 dB or more."""
    t = tensors(case)
    ours, plain = (run(t, family, chosen, window=40) for chosen in (config(), config(**HIGH)))
    for name, a, b in zip("oqkv", ours, plain):
        assert bool(a.isfinite().all())
        if bool(b.any()):
            assert sqnr_db(a, b) > 20, (name, sqnr_db(a, b))
        else:
            assert not a.any()


@pytest.mark.parametrize("family", ["jagged", "silu"])
def test_hidden_keys_move_no_bit(family: str) -> None:
    """Causal: a change of a sample's last token changes nothing before it."""
    t = tensors(JaggedCase(name="", q_lengths=(70, 45), k_lengths=(70, 45)))
    before = run(t, family, config(), causal=True)[0]
    with torch.no_grad():
        for x in (t.k, t.v):
            x[[69, 114]] *= 100
    after = run(t, family, config(), causal=True)[0]
    last = torch.zeros(115, dtype=torch.bool)
    last[[69, 114]] = True
    assert same_bits(before[~last], after[~last])
    assert not same_bits(before[last], after[last])


def test_square_tiles_are_refused_under_a_mask_unless_allowed() -> None:
    t = tensors(JaggedCase(name="", q_lengths=(40,), k_lengths=(40,)))
    for family in ("jagged", "silu"):
        with pytest.raises(ValueError, match="a tile of several tokens under causality or a window"):
            run(t, family, config(**SQUARE), causal=True)
        run(t, family, config(**SQUARE, mix_masked=True), causal=True)
    probs = {"pv": {"probs": {"tile": "32x32"}}}
    run(t, "jagged", config(**probs), causal=True)  # softmax's P has one scale whatever the tile
    with pytest.raises(ValueError, match="a tile of several tokens"):
        run(t, "silu", config(**probs), causal=True)


@pytest.mark.parametrize("cut", [0, 64])
@pytest.mark.parametrize("tile", ["1x32", "32x32", "1x128"])
def test_quantize_jagged_is_quantizing_each_sample(tile: str, cut: int) -> None:
    """Along both dims, at the positions the module names, zero between; one 32x32 quantization is both."""
    spec = QuantSpec(tile=tile)  # pyright: ignore[reportArgumentType]
    lengths = (33, 0, 1, 65, 130, 64)
    t = tensors(JaggedCase(name="", q_lengths=lengths, k_lengths=lengths, dim=64))
    qdata, scale, qdata_t, scale_t = quantize_jagged(t.q, t.q_offsets, 140, spec, spec, block=cut)
    layout = Jagged.of(t.q_offsets, 140, len(t.q))
    layout = layout.blocks(cut) if cut else layout
    rows = scale_rows(layout)
    values = dequantize(qdata.view(torch.float8_e4m3fn), scale)
    used = torch.zeros(len(scale_t), dtype=torch.bool)
    for start, length, row, blocks in zip(layout.starts, layout.lengths, rows.starts, rows.lengths):
        x = t.q[start : start + length].transpose(0, 1)
        assert torch.equal(values[start : start + length].transpose(0, 1).double(), seen(x, spec, -1))
        scales = scale_t[row : row + blocks].transpose(0, 1)
        found = dequantize(qdata_t[start : start + length].transpose(0, 1).view(torch.float8_e4m3fn), scales, axis=-2)
        assert torch.equal(found.double(), seen(x, spec, -2))
        assert not used[row : row + blocks].any()
        used[row : row + blocks] = True
    assert not scale_t[~used].any()
    assert same_bits(qdata, qdata_t) == (tile == "32x32")
