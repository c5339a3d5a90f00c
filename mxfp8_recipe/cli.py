"""The command line: `mxfp8 ab | compare | plan | doctor | bench`.

Each command imports what it needs when it runs, so that `mxfp8 doctor` works on a machine where nothing else does.
Exit codes: 0 done (for `ab` and `compare`: pass), 1 these say fail, 3 these say inconclusive, 2 a mistake in what
was asked, 70 an error of ours, so that no crash is mistaken for a verdict.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

USAGE_ERROR = 2
INTERNAL_ERROR = 70

app = typer.Typer(
    name="mxfp8",
    help="MXFP8 training for any torch model, and the checks that decide whether it may ship.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("mxfp8-recipe"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """MXFP8 training for any torch model, and the checks that decide whether it may ship."""


class UsageError(Exception):
    """A mistake in what was asked, told in one line; `trace` is the traceback of a user's own function."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="mxfp8")
    except UsageError as error:
        console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
        console.print(f"mxfp8: {error}", style="red")
        console.print(error.trace, end="")
        sys.exit(USAGE_ERROR)
    except Exception as error:
        print(f"mxfp8: an error of its own: {type(error).__name__}: {error}; please report it", file=sys.stderr)
        traceback.print_exc()
        sys.exit(INTERNAL_ERROR)


# These commands bring their own options: everything after the name, `--help` included, goes to them.
_OWN_OPTIONS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}


@app.command("ab", **_OWN_OPTIONS)
def ab(context: typer.Context) -> None:
    """Train in BF16 and MXFP8 from the same weights: did normalized entropy or calibration move?"""
    _hand_over("ab", "the A/B check", "mxfp8_recipe.ab.command", context)


@app.command("compare", **_OWN_OPTIONS)
def compare(context: typer.Context) -> None:
    """Say from two runs' prediction files whether the second predicts as well as the first."""
    _hand_over("compare", "the comparison", "mxfp8_recipe.ab.compare_command", context)


def _hand_over(name: str, what: str, module: str, context: typer.Context) -> None:
    """Run `<name>_command` of a module that needs the extra `ab`."""
    try:
        command = getattr(importlib.import_module(module), f"{name}_command")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mxfp8_recipe"):
            raise
        raise UsageError(
            f"{what} needs {error.name}, which is not installed: pip install 'mxfp8-recipe[ab]'"
        ) from error
    own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    own.command(name)(command)
    own(args=context.args, prog_name=f"mxfp8 {name}")


@app.command("plan")
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns a model, or (model, example_inputs). "
            "Modules are found from the current directory too.",
        ),
    ],
    recipe: Annotated[str, typer.Option(help="A named recipe, or the path of a YAML file.")] = "mxfp8",
    overrides: Annotated[Path | None, typer.Option(help="A YAML file of per-layer overrides.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Show what a recipe would do to each layer of a model, and why; changes nothing."""
    built, example_inputs = _build(model)
    from mxfp8_recipe.api import plan_recipe

    try:
        planned = plan_recipe(built, recipe, overrides=overrides, example_inputs=example_inputs)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(planned.to_dict(), indent=2))
    else:
        typer.echo(str(planned))


@app.command("doctor")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Check every kernel against the reference here; exit code 1 on failure.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes of the self-test; one a core without it.")] = None,
    only: Annotated[str, typer.Option(help="Part of the names of the self-test's checks.")] = "",
) -> None:
    """Show what this machine runs natively, what it emulates, and why."""
    from mxfp8_recipe import doctor as checks

    if selftest:
        raise typer.Exit(_selftest(as_json, jobs, only))
    findings = checks.diagnose()
    if as_json:
        typer.echo(json.dumps(checks.as_dicts(findings), indent=2))
    else:
        checks.print_findings(findings, Console())


def _selftest(as_json: bool, jobs: int | None, only: str) -> int:
    from mxfp8_recipe import selftest

    place = selftest.here()
    try:
        outcomes = selftest.run(place, jobs, only)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(selftest.as_dicts(outcomes), indent=2))
    else:
        selftest.print_outcomes(outcomes, place, Console())
    return 0 if all(outcome.passed for outcome in outcomes) else 1


@app.command("bench")
def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[BENCH]",
            help="quantize, norm_quantize, activation_quantize, gemm, linear, norm_linear or block; all without it.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Append the results here, a JSON object a line.")] = Path("bench.jsonl"),
    commit: Annotated[str | None, typer.Option(help="Commit to record, where git is missing.")] = None,
) -> None:
    """Time the kernels, the GEMMs and the layers made of them on this GPU, beside BF16 and the copy bandwidth."""
    from mxfp8_recipe.bench import run_benchmarks

    try:
        code = run_benchmarks(name, out, commit)
    except ValueError as error:
        raise UsageError(str(error)) from error
    raise typer.Exit(code)


def _build(target: str) -> tuple[Any, Any]:
    """Call `module:function` and split what it returns into a model and its example inputs."""
    from torch import nn

    function = _resolve(target)
    try:
        built = function()
    except (Exception, SystemExit) as error:
        raise _raised(target, error) from error
    model, example_inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target}: got {type(model).__name__}, expected a torch.nn.Module or (model, example_inputs)")
    return model, example_inputs


def _raised(target: str, error: BaseException) -> UsageError:
    """What a user's module or function raised, with its traceback below our frame."""
    below = error.__traceback__.tb_next if error.__traceback__ else None
    frames = [f for f in traceback.extract_tb(below) if "importlib" not in f.filename]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    message = " ".join(f"{target}: raised {type(error).__name__}: {error}".split())
    return UsageError(message, "Traceback (most recent call last):\n" + "".join(lines))


def _resolve(target: str) -> Any:
    """Import the function that `module:function` names."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"{target}: expected module:function, such as my_project.models:build")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{target}: no module named {error.name} (searched from {Path.cwd()} as well)") from error
    except (Exception, SystemExit) as error:
        raise _raised(target, error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"{target}: {module_name} has no function {function_name}")
    return function


if __name__ == "__main__":
    main()
