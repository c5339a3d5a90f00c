"""Two processes under DistributedDataParallel over gloo: one report of both, alarms and demotions agreed.

Run as a script with a rank and a directory, this file is one of the two processes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.monitors import JSONLSink, MonitorReport, NumericsMonitor
from mxfp8_recipe.monitors.entropy import EntropySums
from numerics_tests.helpers import run_ranks
from numerics_tests.monitor_models import Ranker, loss_of, rows, same_state

ROOT = Path(__file__).resolve().parent.parent
RANKS, STEPS, SECONDS = 2, 8, 120


class Normed(Ranker):
    """With BatchNorm statistics, which DDP broadcasts, and dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.batch_norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


def shard(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return rows(100 * step + rank, 64)


def train(rank: int, directory: Path, monitored: bool, **options: Any) -> tuple[dict[str, Any], list[MonitorReport]]:
    torch.manual_seed(0)
    model = Normed()
    apply_recipe(model, example_inputs=shard(0, 0)[0])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    sinks = [JSONLSink(directory / f"reports{rank}.jsonl")] if options.pop("write", False) else []
    monitor = NumericsMonitor(wrapped, every=2, sinks=sinks, dump_dir=directory / "dumps", **options)
    reports = []
    torch.manual_seed(rank)
    for step in range(STEPS):
        if step == 0 and monitored:
            monitor.start()
        x, y = shard(step, rank)
        optimizer.zero_grad()
        logits = wrapped(x)
        loss_of(logits, y).backward()
        optimizer.step()
        if monitored and (report := monitor.step(logits, y)) is not None:
            reports.append(report)
    monitor.close()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    left = {"weights": model.state_dict(), "gradients": gradients, "optimizer": optimizer.state_dict()}
    return left | {"rng": torch.get_rng_state()}, reports


def demote_on_one_rank(rank: int, directory: Path) -> dict[str, Any]:
    """Rank 1 alone meets an infinite input."""
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, example_inputs=shard(0, 0)[0])
    model.plants[1].change = lambda x, step: torch.where(x == x.max(), torch.inf, x) if rank == 1 and step == 2 else x
    wrapped = DistributedDataParallel(model)
    told, dumps = [], directory / "dumps"
    with NumericsMonitor(wrapped, every=1, action="demote", dump_dir=dumps) as monitor:
        for step in range(4):
            for plant in model.plants:
                plant.step = step  # pyright: ignore[reportAttributeAccessIssue]
            x, y = shard(step, rank)
            logits = wrapped(x)
            loss_of(logits, y).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                told.append(monitor.step(logits, y))
                assert bool([w for w in caught if "second: input" in str(w.message)]) == (step == 2 and rank == 0)
    return {
        "demoted": monitor.demoted,
        "type": type(model.second).__name__,
        "alarms": told[2].alarms[0].model_dump_json(),
    }


def refused_on_one_rank(rank: int) -> list[str]:
    """What each rank is told where rank 1 alone gives what cannot be compared; a good step still works after it."""
    torch.manual_seed(0)
    model = Ranker()
    apply_recipe(model, example_inputs=shard(0, 0)[0])
    wrapped, told = DistributedDataParallel(model), []
    x, y = shard(0, rank)
    wrong: list[Any] = [y[:3], [0.0] * len(y), None, torch.stack([y, y], -1), y]
    with NumericsMonitor(wrapped, every=1) as monitor:
        for labels in wrong:
            logits = wrapped(x)
            loss_of(logits, y).backward()
            try:
                report = monitor.step(logits, labels if rank == 1 else y)
                told.append(f"{report.predictions[0].rows} rows" if report else "")
            except (ValueError, TypeError) as error:
                told.append(str(error))
    return told


def worker(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    without, _ = train(rank, directory, False)
    within, reports = train(rank, directory, True, write=True, backward=True)
    shown = [report.model_copy(update={"seconds": 0.0}).model_dump_json() for report in reports]
    demoted = demote_on_one_rank(rank, directory)
    found = {"differs": same_state(within, without), "reports": shown, "refused": refused_on_one_rank(rank)}
    torch.save({**found, **demoted}, directory / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What each of two ranks saw, and the directory they wrote to."""
    directory = tmp_path_factory.mktemp("monitor_ddp")
    run_ranks(Path(__file__).resolve(), directory, RANKS, SECONDS)
    return directory, [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_training_is_bitwise_the_same(outcomes: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [found["differs"] for found in outcomes[1]] == [[], []]


def test_every_rank_has_the_same_report_of_all_rows(outcomes: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, (first, second) = outcomes
    assert first["reports"] == second["reports"]
    report = MonitorReport.model_validate_json(first["reports"][0])
    (task,) = report.predictions
    assert task.rows == RANKS * 64
    labels = torch.cat([shard(0, rank)[1] for rank in range(RANKS)]).double()
    rate = EntropySums.of(labels.mean().expand(len(labels)), labels)
    assert task.mxfp8.log_loss is not None
    assert task.mxfp8.normalized_entropy == pytest.approx(task.mxfp8.log_loss / float(rate.log_loss), rel=1e-9)
    tensors = report.layers[0].tensors
    assert tensors["input"].blocks == RANKS * 64 * 2
    assert tensors["grad_output"].blocks == RANKS * 64 * 2
    assert all(0.9 < cosine <= 1 for cosine in report.gradient_cosine.values())
    assert len((directory / "reports0.jsonl").read_text().splitlines()) == STEPS // 2
    assert not (directory / "reports1.jsonl").exists()


def test_one_ranks_error_is_raised_on_all(outcomes: tuple[Path, list[dict[str, Any]]]) -> None:
    """None waits for sums that never come."""
    first, second = (rank["refused"] for rank in outcomes[1])
    assert "got logits (64,)" in second[0] or "labels" in second[0]
    for told, own in zip(first[:2], second[:2]):
        assert told.startswith("monitor.step: expected the same tasks on every rank, got rank 1: ")
        assert own in told
    assert "rank 0: 1 tasks, 0 classes; rank 1: 0 tasks, 0 classes" in first[2]
    assert first[2] == second[2]
    assert first[3].startswith("monitor.step: expected")
    assert first[4] == second[4] == "128 rows"


def test_one_ranks_alarm_demotes_on_all(outcomes: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, found = outcomes
    assert [rank["type"] for rank in found] == ["Linear", "Linear"]
    assert found[0]["demoted"] == found[1]["demoted"]
    assert found[0]["demoted"].keys() == {"second"}
    assert found[0]["alarms"] == found[1]["alarms"]
    (dump,) = (directory / "dumps").iterdir()
    assert dump.name == "step2_second_input_rank1.pt"
    saved = torch.load(dump, weights_only=True)
    assert not saved["operands"]["input"][0]["rows"].isfinite().all()


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
