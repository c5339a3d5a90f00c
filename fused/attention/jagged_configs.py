"""Which launch a pass of jagged attention gets: a function of dtype, width, features, GPU and mean length alone.

The mean length is tokens over samples, which the host knows; nothing waits for the device and nothing is autotuned.
Rates below are useful TFLOP/s on an H200, 4 heads of 128 in bf16, lengths uniform in 1..L, of short bursts taken to
choose; `benchmarks/results` holds what the choice gives, and `h200_variants.jsonl` there the latest runs in which
variants were held against the kernels before, of 18bb3c4.
"""

from __future__ import annotations

import torch

from .jagged_hopper import fits, fits_backward
from .jagged_launch import Config, Problem

FP32_CONFIG = Config(rows=32, block=32, warps=4, stages=1)
"""Products of fp32 take three of tf32 and their operands' halves live in registers: small tiles, no speed meant."""

ALL_REGISTERS = (("maxnreg", 255),)
"""Unless told so, the assembler for Blackwell would rather spill a few words than take more than half."""

BEHIND_DQ = (("launch_pdl", True),)
"""Programs begin when all of the launch before have begun, and wait for its end before they read what it wrote."""

THREE_PROGRAMS = (("maxnreg", 168),)
"""Registers a thread that let three programs of a warpgroup share a multiprocessor."""

SHORT = 384
"""Keys a sample on average, below which half-empty last blocks cost more than half as many steps save."""

LONG = 960
"""Keys that a query sees on average, from which on copies under the end of a unit save less than they keep track of."""


def heads_in_turn(problem: Problem) -> int:
    """Heads of a tile that a program of `jagged_hopper` takes one after the other."""
    seen = problem.mean_keys if problem.window is None else min(problem.mean_keys, 2 * problem.window + 1)
    return 4 if seen < LONG else 1


def forward_config(problem: Problem) -> Config:
    """Of `jagged.forward`.

    Programs of one warpgroup with 64 queries, two or three of which share a multiprocessor: one's first loads and last
    stores run while the others multiply. The kernel for Hopper at L 512, 1024, 2048 and 4096, four heads a program:
    390, 477, 543, 583; one: 371, 477, 550, 602; the portable one 309, 411, 479, 521. With a window of 128 at L 2048
    four take 0.416 ms, one 0.428, the portable one 0.488; in another run 0.405 with all bounds compared in a block that
    is hidden in part, 0.397 with those of the side it is hidden on; in others 0.404 without a part of Q in registers,
    0.399 with, and 0.361 since tiles of a sample follow each other. Another block of K on its way leaves room for two
    programs a multiprocessor, not three: 346, 465, 455, 459 against 401, 488, 507, 589 of the same run, four heads.

    Half of Q in registers, and barriers made ready while the schedule is read, at L 512 and 1024, and at 1024 with
    lengths of 1 to 614: 401, 501, 432; none: 396, 493, 426; three quarters: 402, 503, 433, and slower than none once
    the GPU is hot; all, which spills: 341, 427, 366. In a later run, whole tiles stored by TMA: 1.8, 1.5 and 2.0 %
    faster than that; with masks that compare constants, and waits without a condition, besides: 2.4, 2.2 and 2.3 %, of
    256 samples at 1024 3.0 %, at L 4096 0.1 %. The next head's first S begun beside a head's last P V, and O stored
    under it: 0.5 % slower, 0.6 % faster at L 4096.
    Slower, of the last two, in other runs: all of Q in registers and two programs, 5 %; exponentials under P V, since
    V's copies then begin later, 3 %; with half last blocks besides, 7 %; both tiles of an entry in turn, 5 to 8 %; the
    next head's rows prefetched to the L2 cache, 1 to 3 %, the next program's too, 6 to 11 %. Two blocks of K and one of
    V are 1 % faster, and 6 % slower with one head.

    The portable one at L 512: 319 in blocks of 32 keys, 305 in blocks of 64, 302 with 128 queries. L 1024: 394, 412,
    388. L 4096: 412, 482, 454.
    """
    if problem.q.x.dtype == torch.float32:
        return FP32_CONFIG
    if problem.has_bias:
        return Config(rows=64, block=32, warps=4, stages=2)
    if fits(problem):
        heads = heads_in_turn(problem)
        return Config(rows=64, block=64, warps=4, stages=1, gluon=True, heads=heads, options=THREE_PROGRAMS)
    if problem.width > 128:
        return Config(rows=128, block=64, warps=8, stages=2)
    if problem.masked or problem.mean_keys < SHORT:
        return Config(rows=64, block=32, warps=4, stages=3)
    return Config(rows=64, block=64, warps=4, stages=3)


def dq_config(problem: Problem) -> Config:
    """Of dQ.

    The kernel for Hopper at L 512, 1024 and 4096, and at L 1024 with lengths up to 614, four heads a program but at
    L 4096: 462, 600, 750, 503. With Q and dO in shared memory and a block of keys ahead, not two, in another run: 404,
    546, 704, 445, against 447, 590, 737, 490. Whole tiles stored by TMA, and the schedule's entry read before the
    barriers are made ready: 0.8 % faster where heads come in turn. A head's dQ stored under the next one's first S and
    dP, for which it must be waited for before they are begun: 0.9 to 1.3 % slower; the half block first, so that its
    dS K runs into the next step as others do: 0.7 to 1 % slower.

    In other runs, three such programs a multiprocessor, in which K and V change places: 387, 535, 691, 427. Both
    tiles of an entry by one program lose 4 %, delta summed under the first S and dP 3 %. Older runs, of Q and dO in
    shared memory: four heads a program 392, 516, 665, one 378, 517, 692; half a last block where no more is new
    407, 554, 718, all of it 396, 540, 713. The portable one: 304, 416, 543, and in blocks of 32 keys 314, 425, 525.
    """
    if problem.q.x.dtype == torch.float32:
        return FP32_CONFIG
    if problem.has_bias:  # a second stage would also keep what is looked up by time in flight, in registers
        return Config(rows=64, block=32, warps=8, stages=1, options=ALL_REGISTERS)
    if fits_backward(problem):
        return Config(rows=64, block=64, warps=4, stages=2, gluon=True, heads=heads_in_turn(problem))
    if problem.width > 128:
        return Config(rows=64, block=32, warps=4, stages=2)
    if problem.masked or problem.mean_keys >= SHORT:
        return Config(rows=64, block=64, warps=4, stages=2)
    return Config(rows=64, block=32, warps=4, stages=3)


def dkdv_config(problem: Problem) -> Config:
    """Of dK and dV.

    The kernel for Hopper at L 512, 1024 and 4096, and at L 1024 with lengths up to 614, before what follows: 485, 614,
    742, 527. In another run, with the schedule's entry read before the barriers are made ready, and kept, and dV stored
    under the last product, it was 1.2, 1.0, 0.5 and 1.2 % faster than that; with tiles mixed besides, 3.7, 1.5, 0.3 and
    2.9 %, though the longest first to the end is 0.3 % better at L 4096. Launched under dQ, both together take 0.1 to
    0.5 % less.

    With lse and delta by TMA: 476, 604, 728, 518, and so with the K and V of a later program brought into the L2 cache:
    462, 594, 721, 509. Four heads in turn, each one's first loads under the end of the one before: 480, 605, 711, 518.
    In other runs, with lse and delta by TMA, 476, 605, 736, 517; with S and dP back to back besides, one barrier a
    block, and both sums stored after the last product: 448, 582, 712, 492, of which the order of products is three
    quarters, stores by TMA one. Two warpgroups that take tiles in turns, loaded for by warps of their own, have 240
    registers, too few for a product in flight from a step to the next: 468, 573, 665, 502. Blocks of 32 queries, not
    64: 407, 509, 563 against 431, 555, 686; all of a last block, not the half that is new: 436, 584, 725 against 453,
    599, 732; a launch of no more programs than there are tiles saves 0.5 %. The portable ones: 353, 467, 580. What
    masks and heads that share keys keep track of leaves room for 32 queries a step.
    """
    if problem.q.x.dtype == torch.float32:
        return FP32_CONFIG
    if problem.has_bias:
        return Config(rows=64, block=32, warps=8, stages=2, options=ALL_REGISTERS)
    if problem.width > 128:
        return Config(rows=64, block=32, warps=8, stages=2)
    if fits_backward(problem):
        return Config(rows=64, block=64, warps=4, stages=2, gluon=True, options=BEHIND_DQ)
    plain = not problem.masked and problem.groups == 1
    return Config(rows=64, block=64 if plain else 32, warps=4, stages=2)
