"""Two processes under DistributedDataParallel over gloo train the weights one process trains, bit for bit.

Run as a script with a rank and a directory, this file is one of the two processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.modules import is_swapped
from numerics_tests.helpers import MLP, run_ranks

ROOT = Path(__file__).resolve().parent.parent
RANKS, STEPS, TOKENS, SECONDS = 2, 3, 64, 120


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def shard(step: int, rank: int) -> Tensor:
    """(TOKENS, 64) inputs; a multiple of 32 tokens, so both ways of training quantize the same blocks for wgrad."""
    return torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def worker(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    for order in ("swap, wrap", "wrap, swap"):
        model = new_model()
        if order == "swap, wrap":
            apply_recipe(model)
            wrapped = DistributedDataParallel(model)
        else:
            wrapped = DistributedDataParallel(model)
            apply_recipe(wrapped)
        optimizer = optimizer_of(wrapped)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, shard(step, rank)).backward()
            if step == 0:
                gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        assert is_swapped(model.up)
        torch.save({"weights": dict(model.named_parameters()), "gradient": gradient}, directory / f"{order} {rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what each rank trained, in both orders of swapping and wrapping."""
    directory = tmp_path_factory.mktemp("ddp")
    run_ranks(Path(__file__).resolve(), directory, RANKS, SECONDS)
    return directory


@pytest.fixture
def alone() -> tuple[dict[str, Tensor], nn.Module]:
    """First gradient and trained model of one process that accumulates the two shards."""
    model = new_model()
    apply_recipe(model)
    optimizer = optimizer_of(model)
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(model, shard(step, rank)) / RANKS).backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return first, model


@pytest.mark.parametrize("order", ["swap, wrap", "wrap, swap"])
def test_two_processes_equal_one(order: str, trained: Path, alone: tuple[dict[str, Tensor], nn.Module]) -> None:
    """Bitwise: the halves of the batch differ by the factor 2 alone, which touches exponents only."""
    gradient, model = alone
    for rank in range(RANKS):
        saved = torch.load(trained / f"{order} {rank}.pt")
        for name, p in model.named_parameters():
            assert torch.equal(saved["gradient"][name], gradient[name]), name
            assert torch.equal(saved["weights"][name], p), name
    start = dict(new_model().named_parameters())
    assert all(not torch.equal(start[name], p) for name, p in model.named_parameters())


def test_two_shards_equal_the_whole_batch(alone: tuple[dict[str, Tensor], nn.Module]) -> None:
    """One forward of all tokens sees the same quantized blocks; only the order of the sums over tokens differs.

    That is fp32 accumulation of 128 products, whose error relative to the largest gradient stays under
    128 * 2**-24 times the ratio of the sum of magnitudes to it, here allowed 64; quantization errs by 2**-5.
    """
    gradient, _ = alone
    model, plain = new_model(), new_model()
    apply_recipe(model)
    batch = torch.cat([shard(0, rank) for rank in range(RANKS)])
    loss_of(model, batch).backward()
    loss_of(plain, batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert p.grad is not None
        assert q.grad is not None
        limit = 64 * 128 * 2.0**-24 * p.grad.abs().max()
        assert (p.grad - gradient[name]).abs().max() <= limit
        assert name.endswith("bias") or (q.grad - gradient[name]).abs().max() > limit


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
