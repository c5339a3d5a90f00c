"""The evidence behind docs/numerics.md: every shipped recipe, two data sets, three models, several seeds.

    python benchmarks/evidence.py --out runs/evidence --jobs 16
    python benchmarks/evidence.py --out runs/evidence --jobs 6 --cells synthetic --device cuda
    python benchmarks/evidence_page.py runs/evidence

BF16, its two placebos and one MXFP8 arm a recipe are trained for each seed; recipes share the BF16 and placebo arms.
Every arm is one item of work, and so is every recipe's comparison with the weights that BF16 trained, which wait in
`OUT/<data>-<model>-<seed>.pt`. Items append to `OUT/<data>-<model>.jsonl` as they finish and are not run again, so a
run that was cut short continues where it stopped; `--limit-s` stops it in time. `ml-100k` is read out of the wheel
`recbole-1.2.1-py3-none-any.whl` in `~/.cache/mxfp8_recipe`, fetched there through pip if it is missing.

On a GPU the recipes get `gpu_min_features: 0`, since these models are smaller than what pays there; a backend without
an attention kernel leaves attention in BF16, as the plan recorded beside the results says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxfp8_recipe.ab.arms import ARMS, CANDIDATE, REFERENCE, REFERENCE_ARM, Arm
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.environment import describe
from mxfp8_recipe.ab.measure import Measurer
from mxfp8_recipe.recipe_files import recipe_names

MODELS = ("gem-small", "dlrm", "dcnv2")
DATA: dict[str, dict[str, Any]] = {
    "ml-100k": {"rows": None, "batch_size": 256},
    "synthetic": {"rows": 2_000_000, "batch_size": 1024},
}
CELLS = tuple(f"{data}-{model}" for data in DATA for model in MODELS)
FIRST_RECIPE = "mxfp8"


@dataclass(frozen=True)
class Item:
    """One arm of one seed, `recipe` the candidate's; or, for BF16, the same-weights comparison with a recipe."""

    cell: str
    seed: int
    arm: str
    recipe: str = ""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.cell, self.seed, self.arm, self.recipe

    @property
    def needs(self) -> tuple[str, int, str, str] | None:
        """The key of the item that must be there first."""
        compares = self.arm == REFERENCE and self.recipe
        return (self.cell, self.seed, REFERENCE, "") if compares else None


def items(cells: list[str], seeds: int, recipes: list[str]) -> Iterator[Item]:
    """Cell by cell, since a process holds the rows of one; seed by seed, so that what a cut leaves is whole seeds."""
    for cell in cells:
        for seed in range(seeds):
            yield Item(cell, seed, REFERENCE)
            yield from (Item(cell, seed, CANDIDATE, recipe) for recipe in recipes)
            yield from (Item(cell, seed, arm.name) for arm in ARMS if arm.is_placebo)
            yield from (Item(cell, seed, REFERENCE, recipe) for recipe in recipes)


def config_of(cell: str, device: str, rows: int | None) -> ABConfig:
    data = next(d for d in DATA if cell.startswith(d))
    options: dict[str, Any] = DATA[data] | ({"rows": rows} if rows else {})
    return ABConfig.parse(data=data, model=cell.removeprefix(f"{data}-"), recipe=FIRST_RECIPE, device=device, **options)


class _Process:
    """State of a worker: what it loaded, and how to name a recipe there."""

    measurers: dict[str, Measurer]
    device: str
    rows: int | None
    out: Path
    folder: Path | None


def _start(device: str, rows: int | None, out: Path, folder: Path | None) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    _Process.measurers, _Process.out = {}, out
    _Process.device, _Process.rows, _Process.folder = device, rows, folder


def _named(recipe: str) -> str:
    """A GPU quantizes layers of every size: these models are too small to gain, and this is about numerics."""
    if _Process.folder is None:
        return recipe
    path = _Process.folder / f"{recipe}.yaml"
    if not path.exists():
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(f"name: {recipe}\nextends: {recipe}\ngpu_min_features: 0\n")
        scratch.replace(path)
    return str(path)


def _measurer(cell: str, recipe: str = FIRST_RECIPE) -> Measurer:
    if cell not in _Process.measurers:
        _Process.measurers.clear()
        _Process.measurers[cell] = Measurer(config_of(cell, _Process.device, _Process.rows))
    return _Process.measurers[cell].for_recipe(_named(recipe))


def _run(item: Item) -> dict[str, Any]:
    """The line to append."""
    if item.needs:
        return _compare(item)
    arm: Arm = next(a for a in ARMS if a.name == item.arm)
    model, result = _measurer(item.cell, item.recipe or FIRST_RECIPE).train(item.seed, arm, lambda rows, loss: None)
    if item.arm == REFERENCE:
        assert model is not None  # BF16 that diverges is an error, not a result
        _keep(model, item)
    return {"kind": "arm", "record": result.model_dump(mode="json")}


def _compare(item: Item) -> dict[str, Any]:
    """Weights that BF16 trained, in both precisions on the same rows."""
    began, measurer = time.monotonic(), _measurer(item.cell, item.recipe)
    if _weights(item).is_file():
        model = measurer.started(item.seed, REFERENCE_ARM)
        model.load_state_dict(torch.load(_weights(item), map_location=measurer.device))
    else:  # the line of the arm is there, its weights stayed elsewhere
        trained, _ = measurer.train(item.seed, REFERENCE_ARM, lambda rows, loss: None)
        assert trained is not None
        model = trained
        _keep(model, item)
    same, sources = measurer.compare(model, item.seed)
    plan = {"converted": len(measurer.plan.converted), "candidates": len(measurer.plan.layers),
            "attention": sum(la.kind == "attention" and bool(la.new_type) for la in measurer.plan.layers),
            "backend": measurer.plan.backend}  # fmt: skip
    return {"kind": "same_weights", "record": same.model_dump(mode="json"), "plan": plan,
            "shift_sources": [s.model_dump(mode="json") for s in sources],
            "seconds": time.monotonic() - began}  # fmt: skip


def _weights(item: Item) -> Path:
    return _Process.out / f"{item.cell}-{item.seed}.pt"


def _keep(model: nn.Module, item: Item) -> None:
    """For the comparisons, which other processes may make."""
    scratch = _weights(item).with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), scratch)
    scratch.replace(_weights(item))


def finished(out: Path, cells: list[str]) -> set[tuple[str, int, str, str]]:
    """Keys of the items that are in the files."""
    found = set()
    for cell in cells:
        path = out / f"{cell}.jsonl"
        for line in path.read_text().splitlines() if path.is_file() else ():
            record = json.loads(line)
            if record["kind"] != "header":
                found.add((cell, record["seed"], record["arm"], record["recipe"]))
    return found


def open_cells(out: Path, cells: list[str], header: dict[str, Any]) -> None:
    """Start each file with what it was measured under, or hold it to what it was."""
    out.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        path = out / f"{cell}.jsonl"
        if not path.is_file():
            path.write_text(json.dumps({"kind": "header", "cell": cell, **header}) + "\n")
            continue
        earlier = json.loads(path.open().readline())
        if earlier["fingerprint"] != header["fingerprint"]:
            sys.exit(
                f"{path}: measured under {earlier['fingerprint']}, now {header['fingerprint']}; choose another --out"
            )


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), help="names, or prefixes such as ml-100k")
    parser.add_argument("--recipes", nargs="*", default=recipe_names())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, help="fewer rows, to try the script")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start nothing new after this many seconds")
    options = parser.parse_args()
    cells = [c for c in CELLS if any(c.startswith(p) for p in options.cells)]
    header = {
        "fingerprint": {"rows": options.rows, "device": options.device, "torch": torch.__version__},
        "environment": describe(options.device, 1),
        "commit": commit(),
    }
    open_cells(options.out, cells, header)
    done = finished(options.out, cells)
    work = [item for item in items(cells, options.seeds, options.recipes) if item.key not in done]
    print(f"{len(done)} items there, {len(work)} to do", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        variants = Path(folder) if options.device.startswith("cuda") else None
        start = (options.device, options.rows, options.out, variants)
        run_all(work, done, options.out, options.jobs, options.limit_s, start)


def run_all(work: list[Item], done: set, out: Path, jobs: int, limit_s: float, start: tuple) -> None:
    """At most `jobs` at a time, in order but for what waits; what an item raises is printed and stops no other."""
    began, waiting, pending = time.monotonic(), list(work), {}
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
    with ProcessPoolExecutor(jobs, context, _start, start) as pool:

        def submit() -> None:
            ready = (item for item in waiting if item.needs is None or item.needs in done)
            while len(pending) < jobs and time.monotonic() - began < limit_s and (item := next(ready, None)):
                pending[pool.submit(_run, item)] = item
            waiting[:] = [item for item in waiting if item not in pending.values()]

        submit()
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                item = pending.pop(future)
                if report(item, future, out, time.monotonic() - began):
                    done.add(item.key)
            submit()


def report(item: Item, future: Future, out: Path, seconds: float) -> bool:
    """Append what the item measured, in one write, and whether it did."""
    if future.exception() is not None:
        print(f"{seconds:6.0f} s  {item}: {future.exception()!r}", flush=True)
        return False
    line = {**asdict(item), **future.result()}
    with (out / f"{item.cell}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    took = line["seconds"] if item.needs else line["record"]["seconds"]
    print(f"{seconds:6.0f} s  {item.cell} seed {item.seed} {item.arm} {item.recipe}: {took:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    main()
