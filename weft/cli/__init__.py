"""The command line: ``weft run``, ``doctor``, ``tune``, ``plan``; the distribution of tools adds
others. Commands import torch only if they need it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from weft import variables
from weft.cli import doctor, options, plan, run, tune
from weft.cli.group import Commands
from weft.version import __version__

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(doctor.doctor)
app.command()(options.command_from(tune.Tune, tune.tune))
app.add_typer(plan.app, name="plan")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Hides communication behind compute in tensor-parallel programs.

    Start a program on 2 ranks: weft run -n 2 train.py

    See what overlap gains: weft bench all-gather-matmul --link-gbps auto

    Find out what is wrong: weft doctor
    """
    with options.rejecting("environment variable"):
        variables.check()
