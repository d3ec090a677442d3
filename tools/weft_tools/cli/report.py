"""``weft report``: saved results of ``weft bench`` as one page, to read in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.cli import options

_FILES = typer.Argument(metavar="RESULT.json", help="Results of weft bench --json.")
_TRACE = typer.Option(
    metavar="TRACE.json", help="What weft bench --trace wrote together with one of them."
)
_OUTPUT = typer.Option("--output", "-o", metavar="FILE.html", help="The page.")


app = typer.Typer(add_completion=False)


@app.command()
def report(
    files: Annotated[list[Path], _FILES],
    trace: Annotated[Path | None, _TRACE] = None,
    output: Annotated[Path, _OUTPUT] = Path("report.html"),
) -> None:
    """Make a page of saved results of weft bench, to read in a browser.

    It has figures, timeline, tables, the machine, and the commands that measure them again, in one
    file that needs no network.

    For example: weft report link.json float32.json --trace trace.json
    """
    if output.resolve() in (file.resolve() for file in (*files, trace) if file):
        options.reject("--output", f"{output} is an input: name another file")
    options.check_writable(output, "--output")
    from weft_tools.bench import page, saved
    from weft_tools.bench.pictures.page import html

    with options.failing("weft report"):
        results = [saved.load(file) for file in files]
        traces = saved.load_traces(trace) if trace else []
        traced = page.traced(traces, results) if trace else None
        if trace and traced is None:
            raise ValueError(f"{trace} was not written together with any of these results")
        sections = []
        for number, (file, result) in enumerate(zip(files, results, strict=True)):
            with saved.reading(file):
                of_result = traces if number == traced else []
                sections.append(page.section(result, file.name, of_result))
        output.write_text(html(sections, weft.__version__), encoding="utf-8")
    typer.echo(f"Open {output} in a browser.")
