"""The jagged attention kernels: interpreted on small odd batches here, natively on real ones on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from numerics_tests.helpers import environment_of_tests

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ROOT / "numerics_tests" / "jagged_checks.py"
SHARES = {"schedule": 1, "edges": 2, "values": 3}
GPU_SHARES = {"schedule": 1, "edges": 1, "values": 8}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_checks(group: str, device: str, share: int, shares: int, interpret: str) -> None:
    """In a process of its own: Triton decides on import whether it interprets."""
    environment = environment_of_tests(TRITON_INTERPRET=interpret)
    command = [sys.executable, str(CHECKS), group, device, str(share), str(shares)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.startswith("ok"), result.stdout


@pytest.mark.parametrize(("group", "share"), [(g, i) for g, n in SHARES.items() for i in range(n)])
def test_interpreted_kernels_equal_the_reference(group: str, share: int) -> None:
    run_checks(group, "cpu", share, SHARES[group], "1")


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "share"), [(g, i) for g, n in GPU_SHARES.items() for i in range(n)])
def test_native_kernels_equal_the_reference(group: str, share: int) -> None:
    run_checks(group, "cuda", share, GPU_SHARES[group], "0")


def batch(samples: int, longest: int, heads: int = 4, dim: int = 128) -> tuple[Tensor, ...]:
    """q, k, v, grad_out (T, heads, dim) in bf16 and offsets, lengths uniform in 1..longest."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    lengths = torch.randint(1, longest + 1, (samples,), device="cuda", generator=generator)
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    shape = int(offsets[-1]), heads, dim
    drawn = [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(4)]
    return *drawn, offsets


def sqnr_db(value: Tensor, expected: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (value.double() - expected).norm()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "groups", "mask"),
    [(4, 4, {}), (4, 4, {"causal": True}), (4, 2, {}), (4, 4, {"window": 128}), (4, 1, {"causal": True, "window": 50})],
    ids=str,
)
def test_large_batches_are_as_good_as_flash_attention(heads: int, groups: int, mask: dict) -> None:
    """Against float64, the error is no larger than varlen_attn's where it has the mask, else than 44 dB."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    from fused.attention import jagged, jagged_reference

    q, _, _, do, offsets = batch(24, 1024, heads)
    _, k, v, _, _ = batch(24, 1024, groups)
    layout = offsets, offsets, 1024, 1024
    scale = 128**-0.5
    out, lse = jagged.forward(q, k, v, *layout, None, scale=scale, **mask)
    ours = (out, *jagged.backward(do, q, k, v, out, lse, *layout, None, scale=scale, **mask)[:3])
    double = [x.double() for x in (q, k, v)]
    exact_out, exact_lse = jagged_reference.jagged_forward(*double, *layout, None, scale=scale, **mask)
    exact = (
        exact_out,
        *jagged_reference.jagged_backward(
            do.double(), *double, exact_out, exact_lse, *layout, None, scale=scale, **mask
        )[:3],
    )
    least = [44.0] * 4
    if heads == groups and "window" not in mask:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        names = inspect.signature(varlen_attn).parameters
        causal = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
        theirs = varlen_attn(*inputs, offsets, offsets, 1024, 1024, **(causal if mask else {}))
        peers = (theirs, *torch.autograd.grad(theirs, inputs, do))
        least = [sqnr_db(x.detach(), e) - 0.5 for x, e in zip(peers, exact)]
    for name, x, e, bound in zip(("out", "dq", "dk", "dv"), ours, exact, least, strict=True):
        assert sqnr_db(x, e) >= bound, (name, sqnr_db(x, e), bound)


@pytest.mark.gpu
def test_repeats_to_the_bit_in_a_cuda_graph() -> None:
    from fused.attention import jagged
    from fused.attention.bias import JaggedBias

    q, k, v, do, offsets = batch(64, 512)
    layout = offsets, offsets, 512, 512
    bias = JaggedBias(position=torch.randn(300, 4, device="cuda"))

    def step() -> tuple[Tensor, ...]:
        results = []
        for used in (None, bias):
            out, lse = jagged.forward(q, k, v, *layout, used, scale=0.1)
            results += [out, lse, *jagged.backward(do, q, k, v, out, lse, *layout, used, scale=0.1)]
        return tuple(results)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    for e, r in zip(expected, replayed, strict=True):
        assert torch.equal(e, r)


@pytest.mark.gpu
def test_dkdv_waits_for_what_dq_writes() -> None:
    """Its programs begin under the last of dQ's, and lse and delta there are nan until dQ has written them."""
    from fused.attention import jagged, jagged_backward

    q, k, v, do, offsets = batch(300, 512)
    layout = offsets, offsets, 512, 512
    out, lse = jagged.forward(q, k, v, *layout, None, scale=0.1)
    args = do, q, k, v, out, lse, *layout, None
    expected = jagged_backward.backward(*args, scale=0.1)
    made = jagged_backward.Stats.of
    kept: list[jagged_backward.Stats] = []

    def spoilt(*sizes: Any) -> jagged_backward.Stats:
        if not kept:
            kept.append(made(*sizes))
        kept[0].x.fill_(float("nan"))
        return kept[0]

    with mock.patch.object(jagged_backward.Stats, "of", spoilt):
        for _ in range(30):
            for e, a in zip(expected, jagged_backward.backward(*args, scale=0.1), strict=True):
                assert torch.equal(e, a)


@pytest.mark.gpu
def test_a_graph_takes_other_lengths_of_the_same_total() -> None:
    """The schedule is made on the device, so a captured step follows its offsets."""
    from fused.attention import jagged

    q, k, v, _, offsets = batch(64, 512)
    static = offsets.clone()
    graph = torch.cuda.CUDAGraph()
    jagged.forward(q, k, v, static, static, 1024, 1024, None, scale=0.1)
    with torch.cuda.graph(graph):
        out, _ = jagged.forward(q, k, v, static, static, 1024, 1024, None, scale=0.1)
    other = torch.cat((offsets[:1], offsets.diff().flip(0).cumsum(0))).int()
    static.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, jagged.forward(q, k, v, other, other, 1024, 1024, None, scale=0.1)[0])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Addresses past 2**31: the last sample comes out as it does alone."""
    from fused.attention import jagged

    samples, length = 2**15 + 8, 128
    shape = samples * length, 4, 128
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))
    offsets = torch.arange(samples + 1, device="cuda", dtype=torch.int32) * length
    out, lse = jagged.forward(q, k, v, offsets, offsets, length, length, None, scale=0.1)
    last, one = slice(-length, None), offsets[:2].contiguous()
    alone = jagged.forward(q[last].clone(), k[last].clone(), v[last].clone(), one, one, length, length, None, scale=0.1)
    assert torch.equal(out[last], alone[0])
    assert torch.equal(lse[last], alone[1])
    grads = jagged.backward(out, q, k, v, out, lse, offsets, offsets, length, length, None, scale=0.1)
    few = jagged.backward(
        out[last].clone(), q[last].clone(), k[last].clone(), v[last].clone(), *alone, one, one, length, length, None,
        scale=0.1,
    )  # fmt: skip
    for whole, part in zip(grads[:3], few[:3]):
        assert torch.equal(whole[last], part)
