"""``weft show``: a saved result of ``weft bench``, or a profiler's trace of a GPU, as tables, as a
picture, or as CSV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.common import Plot

_FILES = typer.Argument(
    metavar="FILE...",
    help="A result of weft bench, or several of one collective; or profiler's traces.",
)


app = typer.Typer(add_completion=False)


@app.command()
def show(
    files: Annotated[list[Path], _FILES],
    plot: Plot = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a line for each row, for other programs.")
    ] = False,
) -> None:
    """Show a saved result of weft bench again: its tables, a picture, or CSV.

    Several results of one collective are shown as one, such as those of NCCL with 4, 8 and 16
    channels.

    Of GPUs' traces, by torch's profiler or Nsight Systems, one of each rank, it shows the time of
    each kind of work and the part of copying that is hidden.

    For example: weft show result.json --plot result.png
    """
    options.check_files(None, None, plot)
    from weft_tools.bench import device_traces, saved
    from weft_tools.bench.benchmarks import shown

    with options.failing("weft show"):
        traces = [trace for file in files if (trace := device_traces.read(file)) is not None]
    if traces:
        if len(traces) < len(files):
            options.reject("FILE...", "some are traces and some are results: show them apart")
        if as_csv:
            options.reject("--csv", "it is of results, and this file is a trace")
        with options.failing("weft show"):
            for trace in traces:
                device_traces.show(trace, Console())
            if plot:
                from weft_tools.bench.pictures import timeline

                timeline.draw(traces, plot, ", ".join(trace.title for trace in traces))
        return
    with options.failing("weft show"):
        result = saved.load_together(files)
        kind = shown(result)
        with saved.reading(files[0]):
            if as_csv:
                typer.echo(saved.to_csv(result), nl=False)
            else:
                kind.print(result, Console())
            if plot:
                kind.draw(result, plot)
