"""``weft run``: a script on several ranks of this host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.installation import hides, in_place

_RANKS = "--ranks", "-n", "--nproc-per-node"
_HELP = "Number of ranks to start on this host, default 2; as torchrun's --nproc-per-node."


def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(help="A Python script that calls weft.init() or init_process_group()."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    ranks: Annotated[int, typer.Option(*_RANKS, min=1, help=_HELP, show_default=False)] = 2,
    module: Annotated[
        bool,
        typer.Option(
            "--module", "-m", help="Run a module, as python -m does: weft run -m weft doctor."
        ),
    ] = False,
    bind: Annotated[bool, typer.Option(help="Bind each rank to separate cores.")] = True,
    replace_gloo: Annotated[
        bool,
        typer.Option(
            "--replace-gloo", help="Process groups that the script asks for as gloo are weft's."
        ),
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Keep other ranks running when one fails, for programs that call world.shrink().",
        ),
    ] = False,
) -> None:
    """Run a script, or a module, on several ranks of this host.

    Options of weft run come before the script: weft run -n 4 train.py --epochs 3

    The exit status is that of the rank that failed first: its own, or 128 plus the number of the
    signal that ended it; with --elastic it is 0 if the rank that ends last does so with 0. On
    several hosts use torchrun.
    """
    if not module:
        _check_script(Path(script))
    folder = Path.cwd() if module else Path(script).resolve().parent
    if hides(folder):
        options.reject(
            "SCRIPT",
            f"in {folder} weft's sources, which have no native core, hide the weft that is "
            f"installed: run {in_place('cli')} once, or start in another folder",
        )
    source = context.get_parameter_source("ranks")
    if source is not None and source.name != "COMMANDLINE":
        for option in _options_of_run(arguments or []):
            text = f"weft run: {option} after {script} is the script's; for weft run: "
            typer.echo(f"{text}weft run {option} {script}", err=True)
    from weft.launchers.launcher import run as run_ranks

    if replace_gloo:
        os.environ["WEFT_REPLACES_GLOO"] = "1"
    raise typer.Exit(run_ranks(ranks, script, arguments or [], bind, module, elastic))


def _check_script(path: Path) -> None:
    """Refuse what Python cannot run."""
    if path.is_dir() and not (path / "__main__.py").is_file():
        example = next((each.name for each in sorted(path.glob("*.py"))), "SCRIPT.py")
        options.reject("SCRIPT", f"{path} is a folder: name a script in it, as {path / example}")
    if not path.exists():
        options.reject("SCRIPT", f"there is no file {path}")


def _options_of_run(arguments: Sequence[str]) -> Iterator[str]:
    """The options among a script's arguments that are for the number of ranks of `run`."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument in _RANKS and following.isdecimal():
            yield f"{argument} {following}"
        elif re.fullmatch(rf"({'|'.join(_RANKS)})=?\d+", argument):
            yield argument
