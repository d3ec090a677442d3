"""``weft show``: a saved result of ``weft bench`` as tables, as a picture, or as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.common import Plot

app = typer.Typer(add_completion=False)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A result of weft bench --json.")],
    plot: Plot = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a line for each row, for other programs.")
    ] = False,
) -> None:
    """Show a saved result of weft bench again: its tables, a picture, or CSV.

    For example: weft show result.json --plot result.png
    """
    options.check_files(None, None, plot)
    from weft_bench import saved
    from weft_bench.benchmarks import shown

    with options.failing("weft show"):
        result = saved.load(file)
        kind = shown(result)
        with saved.reading(file):
            if as_csv:
                typer.echo(saved.to_csv(result), nl=False)
            else:
                kind.print(result, Console())
            if plot:
                kind.draw(result, plot)
