"""The command ``python -m weft_tools.bench.vllm``, in an environment that has vLLM for CPUs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.cli.options import check_files, failing, write_json
from weft.cli.values import option
from weft_tools.bench.vllm import picture, tables
from weft_tools.bench.vllm.measure import MODES, SHORT, Settings, measure
from weft_tools.bench.vllm.models import MODELS
from weft_tools.bench.vllm.variants import COMMUNICATOR, VARIANTS, WEFT, plugged_in

_NEIGHBOURS = "Time tokens of the first model beside so many busy processes, too."
_LOGS = "Write here what the engines print; default: a temporary folder."


def some(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The function that parses names separated by commas, and rejects unknown ones."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"there is no {unknown[0]!r}: use some of {','.join(known)}")
        return names

    return parse


def counts(text: str) -> tuple[int, ...]:
    """Numbers such as ``0,1,2``."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise ValueError(f"expected numbers such as 0,1,2; got {text!r}")
    return tuple(map(int, text.split(",")))


def names(known: Collection[str], what: str) -> Any:
    """An option that takes names."""
    return option(some(known), "NAME,…", f"{what}: some of {', '.join(known)}.", keep=False)


def main(
    short: Annotated[bool, typer.Option("--short", help="The smallest matrix, for tests.")] = False,
    models: Annotated[Any, names(MODELS, "Models")] = None,
    modes: Annotated[Any, names(MODES, "Modes of vLLM")] = None,
    variants: Annotated[Any, names(VARIANTS, "Variants")] = None,
    neighbours: Annotated[Any, option(counts, "N,…", _NEIGHBOURS, keep=False)] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each engine.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw the result.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help=_LOGS)] = None,
) -> None:
    """Serve small models by vLLM: in one process, and on two ranks through gloo, vLLM's shared
    memory, and weft.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines end, too
    check_files(json_file, None, plot)
    given = {
        "models": models,
        "modes": modes,
        "variants": variants,
        "neighbours": neighbours,
        "rounds": rounds,
    }
    settings = SHORT if short else Settings()
    settings = replace(settings, **{name: value for name, value in given.items() if value})
    if not plugged_in():
        others = [name for name in settings.variants if name not in (COMMUNICATOR, WEFT)]
        settings = replace(settings, variants=others)
        typer.echo("weft is no plug-in of vLLM here: it is not measured. Run make vllm.", err=True)
    folder = logs or Path(mkdtemp(prefix="weft-vllm-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    with failing("weft_tools.bench.vllm", json_file):
        result = measure(settings, folder)
    write_json(result, json_file)
    for kind, error in result["failed"].items():
        typer.echo(f"{kind}: {error}", err=True)
    if result["rows"]:
        tables.print_tables(result, Console(stderr=json_file == "-"))
    if plot and not result["failed"]:
        picture.draw(result, plot)
    if not result["verified"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
