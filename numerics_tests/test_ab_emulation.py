"""BF16 products emulated on the CPU: rounded operands, FP32 sums, rounded results, forward and backward."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxfp8_recipe.ab import emulation
from mxfp8_recipe.ab.emulation import emulate_bf16
from mxfp8_recipe.modules import MXFP8Linear


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def test_emulated_linear_is_rounded_operands_fp32_product_rounded_result():
    torch.manual_seed(0)
    x = torch.randn(33, 64, requires_grad=True)
    linear = nn.Linear(64, 48)
    with torch.autocast("cpu", torch.bfloat16), emulate_bf16():
        y = linear(x)
    grad = torch.randn(33, 48)
    y.backward(grad.bfloat16())
    g, w = rounded(grad), rounded(linear.weight.detach())
    assert y.dtype == torch.bfloat16
    expected = F.linear(rounded(x.detach()), w, rounded(linear.bias.detach())).bfloat16()
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, (g @ w).bfloat16().float())
    assert torch.equal(linear.weight.grad, (g.t() @ rounded(x.detach())).bfloat16().float())


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        torch.matmul,
        torch.bmm,
        lambda a, b: a.bmm(b),
        lambda a, b: torch.baddbmm(a.new_ones(4, 5, 7), a, b),
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        lambda a, b: torch.addmm(a.new_ones(5, 7), a[0], b[0]),
        lambda a, b: torch.mm(a[0], b[0]),
        lambda a, b: F.linear(a, b[0].t()),
    ],
)
def test_every_product_is_the_rounded_exact_product_of_rounded_operands(product):
    torch.manual_seed(0)
    a, b = torch.randn(4, 5, 6), torch.randn(4, 6, 7)
    with torch.autocast("cpu", torch.bfloat16), emulate_bf16():
        emulated = product(a, b)
    assert emulated.dtype == torch.bfloat16
    assert torch.equal(emulated, product(rounded(a).double(), rounded(b).double()).float().bfloat16())
    assert not torch.equal(emulated, product(a, b).bfloat16())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()},
        {"attn_mask": torch.randn(9, 9, generator=torch.Generator().manual_seed(1))},
    ],
)
def test_emulated_attention_agrees_with_fp32_to_bf16_precision(options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16), emulate_bf16():
        y = F.scaled_dot_product_attention(q, k, v, **options)
    exact = F.scaled_dot_product_attention(*(rounded(x) for x in (q, k, v)), **options)
    assert y.dtype == torch.bfloat16
    # Inputs are exact; P and the result are rounded once each, to 2^-9 relative.
    torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=2**-7)
    y.float().square().sum().backward()
    assert all(x.grad.isfinite().all() and torch.equal(x.grad, rounded(x.grad)) for x in (q, k, v))


@pytest.mark.parametrize("need_weights", [True, False])
def test_products_inside_multi_head_attention_are_seen(monkeypatch, need_weights):
    seen = []
    product, attention = emulation._rounded, emulation._attention
    monkeypatch.setattr(emulation, "_rounded", lambda f, a, k: seen.append(f.__name__) or product(f, a, k))
    monkeypatch.setattr(emulation, "_attention", lambda *a, **k: seen.append("attention") or attention(*a, **k))
    module = nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 5, 32)
    with torch.autocast("cpu", torch.bfloat16), emulate_bf16():
        module(x, x, x, need_weights=need_weights)
    assert seen == (["linear", "bmm", "bmm", "linear"] if need_weights else ["linear", "attention", "linear"])


def test_emulation_leaves_alone_what_autocast_would_and_mxfp8_ops():
    a = torch.randn(3, 4, dtype=torch.float64)
    linear = nn.Linear(64, 32)
    x = torch.randn(8, 64)
    with emulate_bf16():
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert (a @ a.t()).dtype == torch.float64
    twin = MXFP8Linear.from_float(linear)
    results = []
    for emulate in (True, False):
        linear.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            with emulate_bf16() if emulate else contextlib.nullcontext():
                y = twin(x)
        y.float().square().sum().backward()
        results.append((y.detach(), linear.weight.grad.clone()))
    assert all(torch.equal(p, q) for p, q in zip(*results))
