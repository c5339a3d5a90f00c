"""`mxfp8 ab`: the A/B check on the command line.

Exit codes: 0 pass, 1 fail, 3 inconclusive, 2 a mistake in what was asked or a row that cannot be used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console

from mxfp8_recipe.ab.config import DEFAULT_OUT, ABConfig, cpu_count
from mxfp8_recipe.ab.data import DataError
from mxfp8_recipe.ab.html import write_html
from mxfp8_recipe.ab.report import build_report, write_json
from mxfp8_recipe.ab.results import ResumeError
from mxfp8_recipe.ab.runner import Runner
from mxfp8_recipe.ab.terminal import print_report, wide_console
from mxfp8_recipe.ab.training import Diverged
from mxfp8_recipe.ab.user_code import UserCodeError
from mxfp8_recipe.monitors.verdict import Outcome

EXIT_CODES = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 3}
USAGE_ERROR = 2

_DEFAULTS: dict[str, Any] = {name: f.default for name, f in ABConfig.model_fields.items()}


def ab_command(
    data: Annotated[
        str,
        typer.Option(
            help="synthetic, ml-100k, obd, criteo:PATH, avazu:PATH, libsvm:PATH, or module:function: called with a "
            "DataRequest, it returns a Dataset; see mxfp8_recipe.ab.types."
        ),
    ] = _DEFAULTS["data"],
    model: Annotated[
        str,
        typer.Option(
            help="gem-small, dlrm, dcnv2, or module:function: called with the data's FeatureSpec, it returns a module "
            "whose forward(batch) gives logits (rows, tasks); see mxfp8_recipe.ab.types."
        ),
    ] = _DEFAULTS["model"],
    recipe: Annotated[str, typer.Option(help="A named recipe, or the path of a YAML file.")] = _DEFAULTS["recipe"],
    overrides: Annotated[Path | None, typer.Option(help="A YAML file of per-layer overrides.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of initial weights; every seed runs every arm.")] = _DEFAULTS[
        "seeds"
    ],
    rows: Annotated[int | None, typer.Option(help="Use this many rows; by default, the data's own number.")] = None,
    epochs: Annotated[
        int, typer.Option(help="Passes over the training rows; progressive metrics are of the first.")
    ] = _DEFAULTS["epochs"],
    batch_size: Annotated[int, typer.Option(help="Rows a batch.")] = _DEFAULTS["batch_size"],
    learning_rate: Annotated[
        float, typer.Option(help="Adam's; embedding tables take Adagrad at ten times it.")
    ] = _DEFAULTS["learning_rate"],
    ne_budget: Annotated[float, typer.Option(help="Relative NE gap that would matter: 0.001 is 0.1 %.")] = _DEFAULTS[
        "ne_budget"
    ],
    weight_column: Annotated[str | None, typer.Option(help="Column of row weights in the data.")] = None,
    negative_sampling_rate: Annotated[
        float,
        typer.Option(help="Share of the first task's negatives that the data kept; metrics are corrected to all rows."),
    ] = _DEFAULTS["negative_sampling_rate"],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="Directory for report.json, report.html and results.")] = DEFAULT_OUT,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A malformed line of the data is an error, not a note.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Download nothing.")] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Arms measured at a time, each in a process; by default one a CPU, at most 4.")
    ] = None,
) -> None:
    """Train in BF16 and MXFP8 from the same weights on the same batches: did NE or calibration move?"""
    options = dict(locals())
    options["jobs"] = _default_jobs(device) if jobs is None else jobs
    out, resume = options.pop("out"), options.pop("resume")
    console = wide_console()
    outcome = run_check(options, out, resume=resume, console=console)
    raise typer.Exit(EXIT_CODES[outcome])


def _default_jobs(device: str) -> int:
    """A GPU runs one arm at a time; a CPU as many as it has cores, within reason for memory."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return 1 if on_gpu else min(4, cpu_count())


def run_check(options: dict[str, Any], out: Path, *, resume: bool, console: Console) -> Outcome:
    """Run, write the reports, print the table; a user's mistake ends the process with one line."""
    try:
        runner = Runner(ABConfig.parse(**options), out, Console(stderr=True))
    except (ValueError, TypeError, OSError) as error:
        fail(error)
    try:
        run = runner.run(resume=resume)
    except (DataError, ResumeError, Diverged, OSError) as error:
        fail(error)
    report = build_report(run)
    write_json(report, out / "report.json")
    write_html(report, out / "report.html")
    print_report(report, console)
    console.print(f"\nReport: {out / 'report.html'}", highlight=False, markup=False, emoji=False, soft_wrap=True)
    return run.decision.outcome


def fail(error: BaseException, command: str = "ab") -> NoReturn:
    """One line on stderr, a user's own traceback below it, exit code 2."""
    message = " ".join(str(error).split())
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    console.print(f"mxfp8 {command}: {message}", style="red")
    if isinstance(error, UserCodeError):
        console.print(error.trace, end="")
    sys.exit(USAGE_ERROR)
