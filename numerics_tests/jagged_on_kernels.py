"""Run the ops of jagged attention on kernels in Triton's interpreter, which is chosen before triton is imported."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
from torch import Tensor

from mxfp8_recipe import backends
from mxfp8_recipe.functional import JaggedBias, block_attention, generalized_attention, jagged_attention
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


def run(family: str) -> list[Tensor]:
    """Output and gradients."""
    t = tensors(CASE, dtype=torch.bfloat16)
    table = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wanted = [x.requires_grad_() for x in (t.q, t.k, t.v)] + ([table] if family in ("jagged", "generalized") else [])
    out = FAMILIES[family](t, table)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def on_kernels(family: str) -> tuple[list[Tensor], list[str]]:
    """The same on backend `triton`, and the ops that ran there."""
    reached: list[str] = []
    resolve, select = backends.table.resolve, backends.table.select

    def to_kernels(op: str, backend: str, device: torch.device) -> Any:
        reached.append(op)
        return resolve(op, "triton", device)

    backends.jagged.resolve, backends.jagged.select = to_kernels, lambda device: "triton"
    try:
        return run(family), reached
    finally:
        backends.jagged.resolve, backends.jagged.select = resolve, select


def main() -> None:
    """What both backends give differs by bf16 rounding: measured 52 dB or more."""
    for family in sys.argv[1:]:
        expected, (actual, reached) = run(family), on_kernels(family)
        assert any(op.endswith("forward") for op in reached)
        assert any(op.endswith("backward") for op in reached)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert sqnr_db(ours, theirs) > 40, (family, sqnr_db(ours, theirs))


main()
