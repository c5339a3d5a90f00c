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
    poisoned = [torch.full((x.shape[0] + 3, x.shape[1] + 16), 255, dtype=torch.uint8) for x in (a, sa, b, sb)]
    for wide, x in zip(poisoned, (a, sa, b, sb)):
        wide[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
    inside = [wide[: x.shape[0], : x.shape[1]].view(x.dtype) for wide, x in zip(poisoned, (a, sa, b, sb))]
    assert torch.equal(portable.gemm(*inside), portable.gemm(a, sa, b, sb))  # nothing beside the operands is read
    ragged = portable.gemm(a[:, :80], sa[:, :3], b[:, :80], sb[:, :3])
    expected = reference.gemm(a[:, :80], sa[:, :3], b[:, :80], sb[:, :3])
    assert torch.allclose(ragged, expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    sa = sa.view(torch.uint8).clone()
    sa[3, 1] = 255
    nan = portable.gemm(a, sa, b, sb).isnan()
    assert bool(nan[3].all())
    assert not bool(nan[4].any())


main()
