"""The arms of the check: one model, one stream of batches, four precisions.

Every arm holds plain FP32 master weights, starts from the same ones, and sees the same batches in the same order:

    bf16              autocast to BF16: what is in production, and what every other arm is measured against
    mxfp8             the same with the recipe applied
    fp32              placebo: no autocast. Whatever it changes, nobody calls it harm
    bf16_init_noise   placebo: bf16 from initial weights scaled by 1 + 1e-4 noise, far below BF16's own rounding
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mxfp8_recipe.ab.emulation import emulate_bf16

REFERENCE, CANDIDATE = "bf16", "mxfp8"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How an arm differs from `bf16`."""

    name: str
    autocast: bool = True
    quantized: bool = False
    init_noise: float = 0.0

    @property
    def is_placebo(self) -> bool:
        return self.name not in (REFERENCE, CANDIDATE)


ARMS = (
    Arm(name=REFERENCE),
    Arm(name=CANDIDATE, quantized=True),
    Arm(name="fp32", autocast=False),
    Arm(name="bf16_init_noise", init_noise=1e-4),
)
REFERENCE_ARM = ARMS[0]
PLACEBOS = tuple(arm.name for arm in ARMS if arm.is_placebo)


def initial_copy(model: nn.Module, arm: Arm, seed: int) -> nn.Module:
    """A copy of the seed's initial model, as the arm starts from it; the recipe is not applied yet."""
    start = copy.deepcopy(model)
    if arm.init_noise:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in start.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_((1 + arm.init_noise * noise).to(parameter))
    return start


@contextmanager
def precision(device: torch.device, *, autocast: bool) -> Iterator[None]:
    """The context an arm's forward runs in; a CPU emulates BF16 products (see `emulation`)."""
    if not autocast:
        yield
        return
    with torch.autocast(device.type, torch.bfloat16):
        if device.type == "cpu":
            with emulate_bf16():
                yield
        else:
            yield
