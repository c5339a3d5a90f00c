"""Run the ops of jagged attention on kernels in Triton's interpreter, which is chosen before triton is imported."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxfp8_recipe import backends
from mxfp8_recipe.functional import JaggedBias, block_attention, generalized_attention, jagged_attention
from mxfp8_recipe.fused.attention import block as block_kernels
from mxfp8_recipe.fused.attention import gdpa, gdpa_backward, schedule
from numerics_tests.attention_oracle import sqnr_db
from numerics_tests.jagged_cases import JaggedCase, JaggedTensors, tensors

CASE = JaggedCase(name="", q_lengths=(33, 0, 5), k_lengths=(33, 0, 5), heads=2, groups=1)
GELU: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.2, "post_scale": 0.5}


def jagged(t: JaggedTensors, table: Tensor) -> Tensor:
    return jagged_attention(t.q, t.k, t.v, *t.layout, bias=JaggedBias(position=table), causal=True)


def generalized(t: JaggedTensors, table: Tensor) -> Tensor:
    return generalized_attention(t.q, t.k, t.v, *t.layout, bias=JaggedBias(position=table), **GELU)


def pooled(t: JaggedTensors, table: Tensor) -> Tensor:
    seeds = t.q[:3]
    return generalized_attention(seeds, t.k, t.v, None, t.k_offsets, 0, t.max_k, broadcast_q=True, **GELU)


def block(t: JaggedTensors, table: Tensor) -> Tensor:
    return block_attention(t.q, t.k, t.v, t.q_offsets, t.max_q, block=32)


FAMILIES = {"jagged": jagged, "generalized": generalized, "pooled": pooled, "block": block}


def with_gaps(offsets: Tensor) -> Tensor:
    """The same offsets as a view of every other element of a tensor."""
    return torch.stack((offsets, offsets + 1000), 1).flatten()[::2]


def run(family: str, gaps: bool = False) -> list[Tensor]:
    """Output and gradients."""
    t = tensors(CASE, dtype=torch.bfloat16)
    if gaps:
        t = replace(t, q_offsets=with_gaps(t.q_offsets), k_offsets=with_gaps(t.k_offsets))
    table = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wanted = [x.requires_grad_() for x in (t.q, t.k, t.v)] + ([table] if family in ("jagged", "generalized") else [])
    out = FAMILIES[family](t, table)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def on_kernels(family: str) -> tuple[list[Tensor], list[str]]:
    """The same on backend `triton`, of offsets that are a view, and the ops that ran there."""
    reached: list[str] = []
    resolve, select = backends.table.resolve, backends.table.select

    def to_kernels(op: str, backend: str, device: torch.device) -> Any:
        reached.append(op)
        return resolve(op, "triton", device)

    backends.jagged.resolve, backends.jagged.select = to_kernels, lambda device: "triton"
    try:
        return run(family, gaps=True), reached
    finally:
        backends.jagged.resolve, backends.jagged.select = resolve, select


WRONG = ([0, 50, 40, 60, 78], [1, 7, 19, 19, 900], [-5, 7, 19, 19, 83], [0, 83, 0, 83, 0], [900, 901, 2000, 3, -7])
"""Offsets of four samples of 83 rows, each wrong in another way: before anybody knows, kernels run on them."""


def check_wrong_offsets() -> None:
    """Tiles lie within the rows there are, lists within their length, and block attention writes no other row."""
    heads = (100, 1, 32)  # 17 rows beside the batch
    q, k, v = (torch.randn(heads, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    for wrong in WRONG:
        offsets = torch.tensor(wrong, dtype=torch.int32)
        nq, nk = schedule.lengths_of_lists(83, 83, 4)
        lists = schedule._on_device(offsets, offsets, 83, 83, nq, nk, 83, 83, False, None)
        count_q, count_k = lists[0, :2].tolist()
        assert count_q <= nq
        assert count_k <= nk
        for _, q0, lq, k0, lk, *_ in lists[1 : 1 + count_q].tolist() + lists[1 + nq : 1 + nq + count_k].tolist():
            assert 0 <= q0 <= q0 + lq <= 83
            assert 0 <= k0 <= k0 + lk <= 83
        guarded = torch.full((183, 1, 32), 7.0, dtype=torch.bfloat16)
        with mock.patch.object(block_kernels.torch, "empty", return_value=guarded[50:133]):
            block_kernels.forward(q[:83], k[:83], v[:83], offsets, 83, scale=0.2)
        assert bool((guarded[:50] == 7).all())
        assert bool((guarded[133:] == 7).all())


def check_edges_of_numbers() -> None:
    """The widest window hides nothing; no seeds are no queries, whatever maximum is declared."""
    t = tensors(CASE, dtype=torch.bfloat16)
    layout = (t.k_offsets, 200, t.max_k, None)
    options: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.2, "post_scale": 0.5}
    wide, none = (gdpa.forward(t.q, t.k, t.v, t.q_offsets, *layout, window=w, **options) for w in (2**31 - 1, None))
    assert torch.equal(wide, none)
    pooling = {"broadcast_q": True, **options}
    out = gdpa.forward(t.q[:0], t.k, t.v, None, *layout, **pooling)
    dq, dk, dv, *_ = gdpa_backward.backward(out, t.q[:0], t.k, t.v, None, *layout, **pooling)
    assert out.numel() == dq.numel() == 0
    assert not dk.any()
    assert not dv.any()


def main() -> None:
    """What both backends give differs by bf16 rounding: measured 52 dB or more."""
    check_wrong_offsets()
    check_edges_of_numbers()
    for family in sys.argv[1:]:
        expected, (actual, reached) = run(family), on_kernels(family)
        assert any(op.endswith("forward") for op in reached)
        assert any(op.endswith("backward") for op in reached)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert sqnr_db(ours, theirs) > 40, (family, sqnr_db(ours, theirs))


main()
