"""The command line: ``weft run``, ``doctor``, ``predict``, ``calibrate``, ``tune``, ``plan``; the
distribution of benchmarks adds ``bench``, ``show`` and ``report``. Commands import torch only if
they need it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from weft import variables
from weft.cli import doctor, exports, fuzz, imports, machine, mutants, options, plan, predict, run
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
for command in (
    options.command_from(predict.Question, predict.predict),
    machine.calibrate,
    options.command_from(machine.Tune, machine.tune),
):
    app.command()(command)
app.add_typer(plan.app, name="plan")
plan.app.command()(mutants.mutants)
plan.app.command()(fuzz.fuzz)
plan.app.command("import")(imports.import_plan)
plan.app.command()(exports.export)


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
    with options.refusing("environment variable"):
        variables.check()
