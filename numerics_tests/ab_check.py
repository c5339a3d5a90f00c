"""The A/B check as a script: `python numerics_tests/ab_check.py --data synthetic`, the same as `mxfp8 ab`."""

import typer

from mxfp8_recipe.ab.command import ab_command

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(ab_command)
    app()
