"""What MXFP8 does to many models: apply the recipe, train one step, take it back.

    python -m examples.zoo [--only llama gem] [--recipe mxfp8] [--markdown docs/zoo.md]

Every model is built from random weights, so nothing is downloaded; `pip install 'mxfp8-recipe[zoo]'` brings the
libraries whose models are in it, and a model whose library is missing is left out with a word about it. For each the
script checks that the step's loss and gradients are finite and the loss near the original's, that a deep copy computes
the same bits, and that `revert` restores the original's. It prints what became MXFP8, which edges fuse and what stayed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from examples.zoo_models import ZOO, Entry, Inputs
from mxfp8_recipe import Report, apply_recipe, revert
from mxfp8_recipe.config import BF16
from mxfp8_recipe.record import tensors_in

LIMIT = 0.1
"""The loss of a random model may move by this share of itself. Measured: see docs/zoo.md."""
PACKAGES = ("torch", "transformers", "timm", "peft")


@dataclass(frozen=True)
class Result:
    """What one model showed; `problems` is empty when every check held."""

    name: str
    share: float
    attention: str
    fused: int
    edges: int
    stayed: tuple[str, ...]
    unfused: tuple[str, ...]
    moved: float
    problems: tuple[str, ...]


def outputs(value: Any) -> Iterator[Tensor]:
    """The floating tensors a model returned."""
    if isinstance(value, dict):  # the result classes of some libraries are both a mapping and a dataclass
        value = dict(value)
    return (t for t in tensors_in(value) if t.is_floating_point())


def call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """One forward, from a fixed seed."""
    torch.manual_seed(1)
    return list(outputs(model(**inputs) if isinstance(inputs, dict) else model(*inputs)))


def step(model: nn.Module, inputs: Inputs) -> tuple[float, bool]:
    """Loss of one forward and backward towards a fixed random target, and whether all gradients are finite."""
    model.zero_grad(set_to_none=True)
    out = call(model, inputs)[0]
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    loss = (out.float() - target).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), bool(gradients) and all(bool(g.isfinite().all()) for g in gradients)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two forwards gave equal tensors, NaN included."""
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b))


def visit(entry: Entry, recipe: str = "mxfp8") -> Result:
    """Apply `recipe` to one model of the zoo and check it."""
    torch.manual_seed(0)
    model, inputs = entry.build()
    for parameter in model.train().parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)  # a head of zeros would hide everything before it
    plain = copy.deepcopy(model)
    expected, _ = step(plain, inputs)
    problems = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = apply_recipe(model, recipe, example_inputs=inputs)
        loss, finite = step(model, inputs)
    problems += [f"warned: {w.message}" for w in caught if "mxfp8" in str(w.filename) or "un-fused" in str(w.message)]
    moved = abs(loss - expected) / abs(expected)
    if not finite or not moved <= LIMIT:
        problems.append(f"loss {loss:.6g}, originally {expected:.6g}; gradients finite: {finite}")
    first = call(model, inputs)
    twin = copy.deepcopy(model)
    if report.converted and same(first, call(plain, inputs)):
        problems.append("nothing was quantized: the outputs are the original's")
    if not same(first, call(twin, inputs)):
        problems.append("a deep copy computes something else")
    for changed in (twin, model):
        revert(changed)
        if not same(call(changed, inputs), call(plain, inputs)):
            problems.append("revert does not restore the outputs")
    return result(entry, report, report.plan, moved, problems)


def result(entry: Entry, report: Report, plan: Any, moved: float, problems: list[str]) -> Result:
    """The row of a model."""
    layers = plan.layers
    attention = [layer for layer in layers if layer.kind == "attention"]
    converted = sum(layer.new_type is not None for layer in attention)
    edges = [edge for edge in plan.edges if edge.fused]
    return Result(
        name=entry.name,
        share=plan.linear_share(),
        attention=f"{converted} of {len(attention)}" if attention else "-",
        fused=len(edges),
        edges=len(plan.edges),
        stayed=_counted([f"{la.kind}: {la.reason.split('; it stays')[0]}" for la in layers if la.precision == BF16]),
        unfused=_counted([f"{e.kind} edge: {e.reason}" for e in plan.edges if not e.fused]),
        moved=moved,
        problems=tuple(problems),
    )


def _counted(reasons: list[str]) -> tuple[str, ...]:
    """Each reason once, layer numbers left out, the commonest first, with how often it holds."""
    return tuple(f"{count}x {reason}" for reason, count in Counter(reasons).most_common())


def missing(entry: Entry) -> str:
    """The package a model needs and this environment lacks, or nothing."""
    return entry.package if entry.package and importlib.util.find_spec(entry.package) is None else ""


def versions() -> str:
    """The versions the table was made with."""
    found = [p for p in PACKAGES if importlib.util.find_spec(p) is not None]
    return ", ".join(f"{p} {importlib.metadata.version(p)}" for p in found)


COLUMNS = ("model", "linear FLOPs in MXFP8", "attention", "fused edges", "loss moved", "what stayed, and why")


def cells(row: Result) -> list[str]:
    """A row's texts, the last one a line for each reason."""
    reasons = "\n".join((*row.stayed, *row.unfused)) or "nothing"
    return [row.name, f"{row.share:.1%}", row.attention, f"{row.fused} of {row.edges}", f"{row.moved:.2%}", reasons]


def markdown(rows: list[Result], recipe: str) -> str:
    """The page docs/zoo.md."""
    lines = [
        "# The zoo: what the recipe does to models it was not written for",
        "",
        "Tiny models from random weights, one recorded forward each (`example_inputs`), one training step, on the CPU",
        "reference backend. *Linear FLOPs* counts the layers a recipe sees as linears, at the recorded numbers of",
        "tokens: not recurrent layers, nor experts that are slices of one parameter. *Attention* counts attention",
        "layers and modules that call attention, those in MXFP8 first. *Loss moved* is the first step's loss against",
        "the original's. Made by:",
        "",
        f"    python -m examples.zoo --recipe {recipe} --markdown docs/zoo.md",
        "",
        f"with {versions()}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(c.replace("|", "\\|").replace("\n", "<br>") for c in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    rows = []
    for entry in ZOO:
        if not any(part.lower() in entry.name.lower() for part in options.only):
            continue
        if missing(entry):
            print(f"{entry.name}: left out, needs {entry.package} (pip install 'mxfp8-recipe[zoo]')")
            continue
        rows.append(visit(entry, options.recipe))
        for problem in rows[-1].problems:
            print(f"{entry.name}: {problem}")
    table = Table(title=f"recipe {options.recipe}, {versions()}")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*cells(row), end_section=True)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    if options.markdown:
        options.markdown.write_text(markdown(rows, options.recipe))
    sys.exit(any(row.problems for row in rows))


if __name__ == "__main__":
    main()
