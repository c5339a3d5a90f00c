"""`mxfp8 compare A B`: a verdict from two runs' prediction files.

Exit codes as for `mxfp8 ab`: 0 pass, 1 fail, 3 inconclusive, 2 a mistake in what was asked or files that cannot be
compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxfp8_recipe.ab.command import EXIT_CODES, fail
from mxfp8_recipe.ab.compare import Options, compare
from mxfp8_recipe.ab.compare_files import COLUMNS, CompareError, PredictionFile
from mxfp8_recipe.ab.compare_rows import align
from mxfp8_recipe.ab.html import render_comparison, write_html
from mxfp8_recipe.ab.report import write_json
from mxfp8_recipe.ab.terminal import print_comparison, wide_console

DEFAULT_OUT = Path("compare_report")


def compare_command(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="The reference's predictions, such as BF16's: .parquet, .csv or .csv.gz."),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The candidate's predictions of the same rows.")],
    placebo: Annotated[
        list[Path] | None,
        typer.Option(help="Predictions of a harmless change, such as FP32's; can be given several times."),
    ] = None,
    same_weights: Annotated[
        bool,
        typer.Option(
            "--same-weights",
            help="A and B are one set of weights in two precisions: gates on the logits apply, one seed is enough.",
        ),
    ] = False,
    ne_budget: Annotated[float, typer.Option(help="Relative NE gap that would matter: 0.001 is 0.1 %.")] = 0.001,
    negative_sampling_rate: Annotated[
        float, typer.Option(help="Share of the negatives that the files hold; metrics are corrected to all rows.")
    ] = 1.0,
    column: Annotated[
        list[str] | None,
        typer.Option(help="A column under another name: label=clicked. Columns: " + ", ".join(COLUMNS) + "."),
    ] = None,
    task: Annotated[str, typer.Option(help="What the label is, for the report.")] = "label",
    looks: Annotated[
        str, typer.Option(help="Numbers of seeds at which these runs were compared before, such as 3,5.")
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Rows that only one file has are an error, not a note.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Directory for report.json and report.html.")] = DEFAULT_OUT,
) -> None:
    """Say whether B predicts as well as A, from files with the columns label, prediction and optionally weight, time,
    segment, seed, id. Rows are matched by seed and id where there is an id column, else by position.

    Predictions are probabilities. A seed is one training; without --same-weights a verdict takes two or more.

    Exit codes: 0 pass, 1 fail, 3 inconclusive, 2 a mistake in what was asked.
    """
    console = wide_console()
    try:
        options = _options(task, ne_budget, same_weights, negative_sampling_rate, looks)
        if same_weights and placebo:
            raise CompareError(
                "--placebo: with --same-weights there is no training noise to hold it against; leave it out"
            )
        _check_out(out)
        names = _names(column or [])
        rows = align(PredictionFile(a, names), [PredictionFile(path, names) for path in (b, *(placebo or []))])
        if strict and rows.notes:
            raise CompareError(f"--strict: {'; '.join(rows.notes)}")
        decision, report = compare(rows, options)
        out.mkdir(parents=True, exist_ok=True)
        write_json(report, out / "report.json")
        write_html(report, out / "report.html", render_comparison)
    except (CompareError, OSError) as error:
        fail(error, "compare")
    print_comparison(report, console)
    console.print(f"\nReport: {out / 'report.html'}", highlight=False, markup=False, emoji=False, soft_wrap=True)
    raise typer.Exit(EXIT_CODES[decision.outcome])


def _options(task: str, budget: float, same_weights: bool, rate: float, looks: str) -> Options:
    """Every bad option at once."""
    problems = []
    if not 0 < budget < 1:
        problems.append(f"--ne-budget: got {budget}, expected inside (0, 1)")
    if not 0 < rate <= 1:
        problems.append(f"--negative-sampling-rate: got {rate}, expected inside (0, 1]")
    parts = [part.strip() for part in looks.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        problems.append(f"--looks: got {looks!r}, expected numbers of seeds such as 3,5")
        parts = []
    if problems:
        raise CompareError("; ".join(problems))
    return Options(
        task=task,
        budget=budget,
        same_weights=same_weights,
        negative_sampling_rate=rate,
        looks=tuple(int(part) for part in parts),
    )


def _check_out(out: Path) -> None:
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise CompareError(f"--out: got {folder}, which is a file, expected a directory; name another")


def _names(pairs: list[str]) -> dict[str, str]:
    names = {}
    for pair in pairs:
        column, equals, name = pair.partition("=")
        if not equals or not name or column not in COLUMNS:
            raise CompareError(f"--column: got {pair!r}, expected COLUMN=NAME with one of {', '.join(COLUMNS)}")
        names[column] = name
    if names.get("label", "label") == names.get("prediction", "prediction"):
        raise CompareError(f"--column: got {names.get('label', 'label')!r} for both label and prediction; name another")
    return names
