"""``weft doctor``: reports of a job's hosts, of vLLM here, and of a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options


def doctor(
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
    """Report ranks, cores, hosts, connections and problems; or explain a failure.

    Start it with the same launcher as the job, or alone: weft run -n 4 -m weft doctor

    With --vllm or --flight start it once: weft doctor --flight
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
