"""``weft doctor``: reports of a job's hosts, of vLLM here, of a GPU, and of a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.installation import tool


def doctor(
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Report whether vLLM here runs on weft, and if not, why.")
    ] = False,
    flight: Annotated[
        bool,
        typer.Option("--flight", help="Explain a failure from the files of the flight recorder."),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Ask the first GPU whether it meets the engine's assumptions."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show each rank, core and link too, thresholds and stored choices."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --gpu: only this question, or group of questions; may be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --gpu: write all answers as JSON, after each question."
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="With --flight: files, or folders with them; default: the newest failure in the "
            "recorder's folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what is wrong with ranks, cores, hosts and connections; or explain a failure.

    Start it with the same launcher as the job, or alone: weft run -n 4 -m weft doctor

    With --vllm, --gpu or --flight start it once: weft doctor --flight
    """
    from rich.console import Console

    # a terminal's lines are broken between words; in a file a sentence is a line
    free = not os.isatty(1) and "COLUMNS" not in os.environ
    console = Console(width=160 if free else None, soft_wrap=free, highlight=False)
    if verbose and (vllm or flight or gpu):
        options.reject("--verbose", "it has no effect with --flight, --gpu or --vllm")
    for option, given in (("--only", only), ("--json", json)):
        if given and not gpu:
            options.reject(option, "it belongs to --gpu")
    if flight:
        from weft.doctor import flight as recorder

        with options.rejecting("--flight"):
            recorder.diagnose(files or [], console)
        return
    if files:
        options.reject("FILES", "they belong to --flight")

    if gpu:
        with options.rejecting("--gpu", ModuleNotFoundError):
            ask = tool("gpu", "weft doctor --gpu")
        fine = ask(console, only or [], json)
    elif vllm:
        from weft.doctor import vllm as client

        fine = client.diagnose(console)
    else:
        from weft.doctor import checks

        fine = checks.diagnose(console, verbose)
    raise typer.Exit(0 if fine else 1)
