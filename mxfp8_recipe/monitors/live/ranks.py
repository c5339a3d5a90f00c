"""What several ranks saw, as one: sums added up, maxima compared, and everything read from the device at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model together; a single process is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, model: nn.Module, group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of `group`, else of the model's DDP, else all there are."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        if group is None:
            wrapped = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
            found = next(wrapped, None)
            group = found.process_group if found is not None else dist.group.WORLD
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def read(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> dict[str, Tensor]:
        """Reduce and read named fp64 tensors of one device, with one reduction of each kind and one transfer.

        Every rank has to give the same names and shapes. The result lies on the CPU.
        """
        added, largest = _flat(sums), _flat(maxima)
        if self.size > 1:
            dist.all_reduce(added, dist.ReduceOp.SUM, group=self.group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        values = torch.cat([added, largest]).cpu()
        found, start = {}, 0
        for name, tensor in {**sums, **maxima}.items():
            found[name] = values[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
        return found

    def agree(self, error: Exception | None, shapes: dict[str, int], device: torch.device) -> None:
        """Return where every rank can go on to `read`: none has an `error`, and all have the same `shapes`.

        Raises:
            ValueError: on every other rank, with the words of those that cannot. A rank's own error is left to it.
        """
        if self.size == 1:
            return
        sizes = list(shapes.values()) or [-1, -1]
        mine = torch.tensor(
            [float(error is not None), *sizes, *(-n for n in sizes)], dtype=torch.float64, device=device
        )
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group)
        failed, *most = mine.tolist()
        half = len(most) // 2
        if not failed and all(a == -b for a, b in zip(most[:half], most[half:])):
            return
        words = ", ".join(f"{size} {name}" for name, size in shapes.items())
        told_of_this = (error is not None, f"{type(error).__name__}: {error}" if error else words)
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, told_of_this, group=self.group)
        if error is None:
            shown = (f"rank {rank}: {text}" for rank, (fails, text) in enumerate(told) if fails or not failed)
            raise ValueError(f"monitor.step: expected the same tasks on every rank, got {'; '.join(shown)}")

    def any(self, flags: list[bool], device: torch.device) -> list[bool]:
        """For each flag, whether some rank has set it."""
        if self.size == 1 or not flags:
            return flags
        raised = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(raised, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in raised.tolist()]


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])
