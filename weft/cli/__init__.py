"""The command line: ``weft bench``, ``show``, ``report``, ``plan``, ``predict``, ``calibrate``,
``tune``, ``run``, ``doctor``. Commands import torch only if they need it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.cli import bench, fuzz, machine, mutants, options, plan, predict, report, show
from weft.installation import hides, in_place

app = typer.Typer(
    cls=options.PlainErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
plan.app.command()(mutants.mutants)
plan.app.command()(fuzz.fuzz)
for command in (
    options.command_from(predict.Question, predict.predict),
    machine.calibrate,
    options.command_from(machine.Tune, machine.tune),
    show.show,
    report.report,
):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=1, help="Number of ranks to start on this host.")
    ] = 2,
    module: Annotated[
        bool,
        typer.Option(
            "--module", "-m", help="Run a module, as python -m does: weft run -m weft doctor."
        ),
    ] = False,
    bind: Annotated[bool, typer.Option(help="Bind each rank to cores of its own.")] = True,
) -> None:
    """Run a script, or a module, on several ranks of this host.

    The exit status is that of the rank that failed first: its own, or 128 plus the number of the
    signal that ended it.
    """
    if not module and not Path(script).is_file():
        options.refuse("SCRIPT", f"there is no file {script}")
    folder = Path.cwd() if module else Path(script).resolve().parent
    if hides(folder):
        options.refuse(
            "SCRIPT",
            f"in {folder} weft's sources, which have no native core, hide the weft that is "
            f"installed: run {in_place('cli')} once, or start in another folder",
        )
    from weft.world.launcher import run as run_ranks

    raise typer.Exit(run_ranks(ranks, script, arguments or [], bind, module))


@app.command("doctor")
def diagnose(
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Report whether vLLM here runs on weft, and if not, why.")
    ] = False,
    flight: Annotated[
        bool,
        typer.Option("--flight", help="Explain a failure from the files of the flight recorder."),
    ] = False,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="With --flight: files, or folders with them; default: the newest failure in the "
            "recorder's folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Report the ranks of a job, their hosts and connections, and problems. Start it with the same
    launcher as the job; with --vllm or --flight start it once.
    """
    from rich.console import Console

    console = Console(width=None if os.isatty(1) else 160)
    if flight:
        from weft.doctor import flight as recorder

        with options.refusing("--flight"):
            recorder.diagnose(files or [], console)
        return
    if files:
        options.refuse("FILES", "they belong to --flight")

    from weft.doctor import checks
    from weft.doctor import vllm as client

    fine = client.diagnose(console) if vllm else checks.diagnose(console)
    raise typer.Exit(0 if fine else 1)
