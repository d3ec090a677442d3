"""The command line: ``weft bench``, ``plan``, ``predict``, ``calibrate``, ``tune``, ``run``, ``doctor``. Loads torch at need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weft import plan_commands
from weft.bench import collective_commands, commands, machine_commands, p2p_commands, predict_commands

app = typer.Typer(
    help="Hides communication behind compute in tensor-parallel programs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands.app.add_typer(collective_commands.app)
commands.app.add_typer(p2p_commands.app)
app.add_typer(commands.app, name="bench")
app.add_typer(plan_commands.app, name="plan")
for command in (predict_commands.predict, machine_commands.calibrate, machine_commands.tune):
    app.command()(command)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script that calls weft.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many to start on this host.")] = 2,
) -> None:
    """Run a script on local ranks."""
    from weft.world.launcher import run as run_ranks

    raise typer.Exit(run_ranks(ranks, str(script), arguments or []))


@app.command()
def doctor() -> None:
    """Say what the ranks of a job see of each other and of their machines, and what is wrong; start it as the job is started."""
    from rich.console import Console

    from weft.doctor import diagnose

    raise typer.Exit(0 if diagnose(Console(width=None if os.isatty(1) else 160)) else 1)


def main() -> None:
    """The ``weft`` command."""
    app(prog_name="weft")
