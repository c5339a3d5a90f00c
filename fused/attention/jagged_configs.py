"""Which launch a pass of jagged attention gets: a function of dtype, width, features, GPU and mean length alone.

The mean length is tokens over samples, which the host knows; nothing waits for the device and nothing is autotuned.
Rates below are useful TFLOP/s on an H200, 4 heads of 128 in bf16, lengths uniform in 1..L, of short bursts taken to
choose; `benchmarks/results` holds what the choice gives.
"""

from __future__ import annotations

import torch

from .jagged_hopper import fits
from .jagged_launch import Config, Problem

FP32_CONFIG = Config(rows=32, block=32, warps=4, stages=1)
"""Products of fp32 take three of tf32 and their operands' halves live in registers: small tiles, no speed meant."""

ALL_REGISTERS = (("maxnreg", 255),)
"""Unless told so, the assembler for Blackwell would rather spill a few words than take more than half."""

SHORT = 384
"""Keys a sample on average, below which half-empty last blocks cost more than half as many steps save."""


def forward_config(problem: Problem) -> Config:
    """Of `jagged.forward`.

    Programs of one warpgroup with 64 queries, two or three of which share a multiprocessor: one's first loads and last
    stores run while the others multiply. At L 512, 1024 and 4096 the kernel for Hopper reaches 330, 401, 432 in blocks
    of 32 keys and 325, 424, 511 of 64; the portable one 319, 393, 425 and 306, 410, 477, with 128 queries 302, 388,
    454. With a window of 128 at L 2048: 264 and 260; 253 and 249.
    """
    if problem.q.x.dtype == torch.float32:
        return FP32_CONFIG
    if problem.has_bias:
        return Config(rows=64, block=32, warps=4, stages=2)
    if problem.width > 128:
        return Config(rows=128, block=64, warps=8, stages=2)
    block = 32 if problem.masked or problem.mean_keys < SHORT else 64
    return Config(rows=64, block=block, warps=4, stages=3, gluon=fits(problem))


def dq_config(problem: Problem) -> Config:
    """Of dQ.

    The kernel for Hopper in blocks of 64 keys, at L 512, 1024 and 4096: 373, 510, 694; of 32: 358, 461, 522. The
    portable one: 304, 418, 580, and of 32 keys 314, 425, 525. With a window of 128 at L 2048: 307, 288; 257.
    """
    if problem.q.x.dtype == torch.float32:
        return FP32_CONFIG
    if problem.has_bias:  # a second stage would also keep what is looked up by time in flight, in registers
        return Config(rows=64, block=32, warps=8, stages=1, options=ALL_REGISTERS)
    if fits(problem):
        return Config(rows=64, block=64, warps=4, stages=2, gluon=True)
    if problem.width > 128:
        return Config(rows=64, block=32, warps=4, stages=2)
    if problem.masked or problem.mean_keys >= SHORT:
        return Config(rows=64, block=64, warps=4, stages=2)
    return Config(rows=64, block=32, warps=4, stages=3)


def dkdv_config(problem: Problem) -> Config:
    """Of dK and dV.

    The kernel for Hopper in blocks of 64 queries, at L 512, 1024 and 4096: 433, 563, 702; of 32: 409, 500, 570. The
    portable one: 355, 469, 554. With a window of 128 at L 2048: 316, 324; the portable one 293, 251. What windows and
    heads that share keys keep track of would spill there with 64 queries a step.
    """
    if problem.q.x.dtype == torch.float32:
        return FP32_CONFIG
    if problem.has_bias:
        return Config(rows=64, block=32, warps=8, stages=2, options=ALL_REGISTERS)
    if problem.width > 128:
        return Config(rows=64, block=32, warps=8, stages=2)
    if fits(problem):
        masked = problem.masked
        return Config(rows=64, block=32 if masked else 64, warps=4, stages=3 if masked else 2, gluon=True)
    plain = problem.window is None and problem.groups == 1
    return Config(rows=64, block=64 if plain else 32, warps=4, stages=2)
