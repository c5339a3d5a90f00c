"""Run the portable GEMM in Triton's interpreter, which must be chosen before triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from mxfp8_recipe.fused import reference
from mxfp8_recipe.fused.gemm import portable


def main() -> None:
    torch.manual_seed(0)
    for m, n, k in ((5, 32, 32), (130, 96, 160), (64, 64, 256)):
        a, sa = reference.quantize(torch.randn(m, k) * 100)
        b, sb = reference.quantize(torch.randn(n, k))
        bias = torch.randn(n)
        expected = reference.gemm(a, sa, b, sb, bias)
        out = portable.gemm(a, sa, b, sb, bias)
        assert torch.allclose(out, expected, rtol=0, atol=1e-6 * expected.abs().max().item()), (m, n, k)
        rounded = portable.gemm(a, sa, b, sb, bias, out_dtype=torch.bfloat16)
        assert rounded.dtype == torch.bfloat16
        total = expected.clone()
        assert portable.gemm(a, sa, b, sb, accumulate_into=total) is total
        assert torch.allclose(total, 2 * expected - bias, rtol=0, atol=1e-5 * expected.abs().max().item())
    sa = sa.view(torch.uint8).clone()
    sa[3, 1] = 255
    nan = portable.gemm(a, sa, b, sb).isnan()
    assert bool(nan[3].all())
    assert not bool(nan[4].any())


main()
