"""The report in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from mxfp8_recipe.ab import tables

_COLORS = {"pass": "green", "fail": "red", "inconclusive": "yellow"}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Verdict last, where a terminal leaves the eye."""
    console.print(_table("MXFP8 minus BF16, served in BF16, held-out rows", tables.delta(report)))
    for task in report["data"]["tasks"]:
        console.print(_table(f"task {task}", tables.arms(report, task)))
        if report["data"]["optimal_ne"].get(task) is not None:
            optimal = tables.number(report["data"]["optimal_ne"][task])
            console.print(f"Known truth: the Bayes-optimal NE of the held-out rows is {optimal}.", highlight=False)
    _print_segments(report, console)
    if report["gates"]:
        console.print(_table("same weights, same rows", tables.gates(report)))
    if report["shift_sources"]:
        console.print(_table("where the mean logit error comes from", tables.shift_sources(report, most=3)))
    if tables.worst_layers(report).rows:
        console.print(_table("worst layers", tables.worst_layers(report)))
    _print_verdict(report, console)


def print_comparison(report: dict[str, Any], console: Console) -> None:
    """The same for `mxfp8 compare`."""
    console.print(_table("B minus A", tables.comparison(report)))
    console.print(_table("metrics", tables.both(report)))
    _print_segments(report, console)
    if report["gates"]:
        console.print(_table("same weights, same rows", tables.gates(report)))
    for line in report["mismatches"]:
        console.print(f"mismatch: {line}", style="yellow", markup=False, highlight=False)
    _print_verdict(report, console)


def _print_segments(report: dict[str, Any], console: Console) -> None:
    if report["segments"]:
        console.print(_table("segments, each on its own", tables.segments(report["segments"])))


def _print_verdict(report: dict[str, Any], console: Console) -> None:
    console.print()
    for title, lines in (("decided", report["decided"]), ("not decided", report["undecided"])):
        for line in lines:
            console.print(f"{title}: {line}", markup=False, highlight=False)
    console.print(tables.power_sentence(report), markup=False, highlight=False)
    console.print()
    color = _COLORS[report["verdict"]]
    console.print(f"{report['verdict'].upper()}", style=f"bold {color}", end="  ")
    console.print(report["headline"].partition(": ")[2], markup=False, highlight=False)
    for reason in report["reasons"]:
        console.print(f"  - {reason}", markup=False, highlight=False)


def _table(title: str, cells: tables.Cells) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for name, kind in cells.columns:
        table.add_column(name, justify="left" if kind == "text" else "right", overflow="fold")
    for row in cells.rows:
        table.add_row(*row)
    return table
