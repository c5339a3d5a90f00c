"""The report in a terminal.

A table that fits stands as one; where it does not, each of its rows is a list of names and values, since a figure that
is broken over lines reads as another one.
"""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxfp8_recipe.ab import tables

_LEAST_TEXT = 24
"""Columns that the last column of a table needs for its text, which may go on below."""

_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "soft_wrap": True}
_COLORS = {"pass": "green", "fail": "red", "inconclusive": "yellow"}


def wide_console() -> Console:
    """As wide as the terminal; 160 columns in a file or a pipe, unless COLUMNS says otherwise."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=160)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Verdict last, where a terminal leaves the eye."""
    console.print(_table("MXFP8 minus BF16, served in BF16, held-out rows", tables.delta(report), console))
    for task in report["data"]["tasks"]:
        console.print(_table(f"task {task}", tables.arms(report, task), console))
        if report["data"]["optimal_ne"].get(task) is not None:
            optimal = tables.number(report["data"]["optimal_ne"][task])
            console.print(f"Known truth: the Bayes-optimal NE of the held-out rows is {optimal}.", **_PLAIN)
    _print_segments(report, console)
    if report["gates"]:
        console.print(_table("same weights, same rows", tables.gates(report), console))
    if report["shift_sources"]:
        console.print(_table("where the mean logit error comes from", tables.shift_sources(report, most=3), console))
    if tables.worst_layers(report).rows:
        console.print(_table("worst layers", tables.worst_layers(report), console))
    _print_verdict(report, console)


def print_comparison(report: dict[str, Any], console: Console) -> None:
    """The same for `mxfp8 compare`."""
    console.print(_table("B minus A", tables.comparison(report), console))
    console.print(_table("metrics", tables.both(report), console))
    _print_segments(report, console)
    if report["gates"]:
        console.print(_table("same weights, same rows", tables.gates(report), console))
    for line in report["mismatches"]:
        console.print(f"mismatch: {line}", style="yellow", **_PLAIN)
    _print_verdict(report, console)


def _print_segments(report: dict[str, Any], console: Console) -> None:
    if report["segments"]:
        console.print(_table("segments, each on its own", tables.segments(report["segments"]), console))


def _print_verdict(report: dict[str, Any], console: Console) -> None:
    console.print()
    for title, lines in (("decided", report["decided"]), ("not decided", report["undecided"])):
        for line in lines:
            console.print(f"{title}: {line}", **_PLAIN)
    console.print(tables.power_sentence(report), **_PLAIN)
    console.print()
    color = _COLORS[report["verdict"]]
    console.print(f"{report['verdict'].upper()}", style=f"bold {color}", end="  ")
    console.print(report["headline"].partition(": ")[2], **_PLAIN)
    for reason in report["reasons"]:
        console.print(f"  - {reason}", **_PLAIN)


def _table(title: str, cells: tables.Cells, console: Console) -> Table:
    values = [max(map(len, column), default=0) for column in zip(*cells.rows)] or [0] * len(cells.columns)
    if cells.columns[-1][1] == "text":
        values[-1] = min(values[-1], _LEAST_TEXT)
    headings = (max(map(len, name.split()), default=0) for name, _ in cells.columns)
    fits = sum(map(max, values, headings)) + 3 * len(values) + 1 <= console.width
    return _grid(title, cells, values) if fits else _list(title, cells)


def _grid(title: str, cells: tables.Cells, widths: list[int]) -> Table:
    table = Table(title=Text(title), title_justify="left", expand=False)
    for (name, kind), width in zip(cells.columns, widths):
        table.add_column(Text(name), justify="left" if kind == "text" else "right", overflow="fold", min_width=width)
    for row in cells.rows:
        table.add_row(*map(Text, row))
    return table


def _list(title: str, cells: tables.Cells) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in cells.rows:
        for (name, _), value in zip(cells.columns, row):
            table.add_row(Text(name), Text(value))
        table.add_section()
    return table
