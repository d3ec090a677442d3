"""The command line: ``weft bench``, ``plan``, ``predict``, ``calibrate``, ``tune``, ``run``,
``doctor``. Loads torch at need.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.cli import bench, machine, options, plan, predict

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
for command in (
    options.taking(predict.Question, predict.predict),
    machine.calibrate,
    options.taking(machine.Tune, machine.tune),
):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weft {weft.__version__}")
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
    """Hides communication behind compute in tensor-parallel programs."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="A Python script that calls weft.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=1, help="How many to start on this host.")
    ] = 2,
    module: Annotated[
        bool,
        typer.Option(
            "--module", "-m", help="Run a module, as python -m does: weft run -m weft doctor."
        ),
    ] = False,
    bind: Annotated[bool, typer.Option(help="Bind each rank to cores of its own.")] = True,
) -> None:
    """Run a script, or a module, on local ranks.

    The exit status is that of the rank that failed first; 128 and the number of the signal if one
    ended it.
    """
    if not module and not Path(script).is_file():
        options.refuse("SCRIPT", f"there is no file {script}")
    from weft.world.launcher import run as run_ranks

    raise typer.Exit(run_ranks(ranks, script, arguments or [], bind, module))


@app.command("doctor")
def diagnose() -> None:
    """Say what the ranks of a job see of each other and of their machines, and what is wrong; start
    it as the job is started.
    """
    from rich.console import Console

    from weft.doctor import checks

    raise typer.Exit(0 if checks.diagnose(Console(width=None if os.isatty(1) else 160)) else 1)
