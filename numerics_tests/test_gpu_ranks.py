"""Two GPUs over NCCL, under DistributedDataParallel and FSDP2, train what one GPU trains, bit for bit.

Run as a script with a rank and a directory, this file is one of the two processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mxfp8_recipe import apply_recipe, load_recipe
from mxfp8_recipe.modules import is_swapped
from numerics_tests.helpers import run_ranks

pytestmark = pytest.mark.gpu

RANKS, STEPS, TOKENS, WIDTH, SECONDS = 2, 3, 256, 256, 180
WRAPPERS = ("ddp", "fsdp2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def new_model(device: torch.device) -> nn.Module:
    """Two blocks in BF16, converted; small ones too, which a GPU would leave alone."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device, torch.bfloat16)
    recipe = load_recipe("mxfp8_hopper").model_copy(update={"gpu_min_features": 32})
    apply_recipe(model, recipe)
    assert len([m for m in model.modules() if is_swapped(m)]) >= 4
    return model


def shard(step: int, rank: int, device: torch.device) -> Tensor:
    """(TOKENS, WIDTH) inputs: whole blocks of tokens, so both ways of training quantize the same ones for wgrad."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(device, torch.bfloat16)


def train(model: nn.Module, ranks: list[int], device: torch.device) -> None:
    """Each step one backward for each of `ranks`, which share the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            loss = (model(shard(step, rank, device)).float() - 1).square().mean()
            (loss / len(ranks)).backward()
        optimizer.step()


def whole(parameter: Tensor) -> Tensor:
    """A parameter, or what FSDP2 left of it on every rank put together."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu().clone()


def worker(rank: int, directory: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    for wrapper in WRAPPERS:
        model = new_model(device)
        if wrapper == "ddp":
            train(DistributedDataParallel(model, device_ids=[rank]), [rank], device)
        else:
            for block in model.children():
                fully_shard(block)
            fully_shard(model)
            train(model, [rank], device)
        weights = {name: whole(p) for name, p in model.named_parameters()}
        torch.save(weights, directory / f"{wrapper} {rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what each rank trained under each wrapper."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, finds {torch.cuda.device_count()}")
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).resolve(), directory, RANKS, SECONDS)
    return directory


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_gpus_equal_one(wrapper: str, trained: Path) -> None:
    """Bitwise: the halves of the batch differ by the factor 2 alone, which touches exponents only, and of two
    gradients in BF16 either way gives the sum rounded once.
    """
    device = torch.device("cuda", 0)
    model = new_model(device)
    start = {name: whole(p) for name, p in model.named_parameters()}
    train(model, list(range(RANKS)), device)
    for rank in range(RANKS):
        saved = torch.load(trained / f"{wrapper} {rank}.pt")
        for name, p in model.named_parameters():
            assert torch.equal(saved[name], whole(p)), (rank, name)
    moved = [name for name, p in model.named_parameters() if not torch.equal(start[name], whole(p))]
    assert {"0.up.weight", "0.down.weight", "1.up.weight", "1.down.weight"} <= set(moved)


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
