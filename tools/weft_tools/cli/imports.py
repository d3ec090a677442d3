"""The command ``weft plan import``: plans of other systems, proved, shown, executed, predicted and
changed as weft's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.options import reject
from weft.cli.tables import table
from weft.measure.progress import progress
from weft.outside import read_json
from weft.plan.language import show as show_plan
from weft.plan.proof import problems, runs
from weft.schedules.workload import Rows
from weft_tools.cli import shared
from weft_tools.formats.mscclpp.reader import Imported, read
from weft_tools.formats.ordinary import ordinary
from weft_tools.predict.simulator import seconds

_SHOWN = 20  # problems


app = typer.Typer(add_completion=False)


@app.command()
def import_plan(
    file: Annotated[
        Path, typer.Argument(help="An execution plan of MSCCL++, as JSON.", dir_okay=False)
    ],
    collective: Annotated[
        str | None,
        typer.Option(help="What the plan promises. Default: what the file says."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the plan.")] = False,
    execute: Annotated[
        bool,
        typer.Option(
            "--execute",
            help="Execute it: in adversarial orders, and by a thread for each thread block.",
        ),
    ] = False,
    mutants: Annotated[
        bool,
        typer.Option(
            "--mutants", help="Count the mutants that the proof rejects, and that counting finds."
        ),
    ] = False,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Predict its time on this machine.")
    ] = None,
    chunk_bytes: Annotated[
        int | None, typer.Option(min=4, help="Bytes of a chunk, for --machine; default 65536.")
    ] = None,
) -> None:
    """Prove a plan of another system: no race, no deadlock, and what its collective promises.

    Problems name ranks, thread blocks and operations of the file. Exit status 1 if there are some
    or if a result differs, 2 for a file that weft has no words for.
    """
    if chunk_bytes is not None and machine is None:
        reject("--chunk-bytes", "has an effect with --machine only")
    plan = _read(file, collective)
    made = plan.plan
    typer.echo(
        f"{made.algorithm}: {made.operator} on {made.ranks} ranks, at most {plan.thread_blocks} "
        f"thread blocks each, {plan.size} operations"
    )
    if show:
        typer.echo(show_plan(made) + "\n")
    with progress("proof", runs(made) * made.ranks) as advance:
        found = [*plan.defects, *problems(made, ended=advance, where=plan.where)]
    if found:
        more = [f"… and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        text = "\n  ".join([f"NOT VERIFIED: {len(found)} problem(s)", *found[:_SHOWN], *more])
        typer.echo(text, err=True)
        raise typer.Exit(1)
    typer.echo(
        "verified: no race, no deadlock, every promised row correct, for all sizes of a chunk"
    )
    if plan.shared:
        typer.echo(
            "its scratch is shared with other plans (reuse_resources), against which nothing in it "
            "guards: this is a proof of executions of this plan alone"
        )
    if execute:
        _execute(plan)
    if machine is not None:
        _predict(plan, machine, chunk_bytes or 1 << 16)
    if mutants:
        _mutants(plan)


def _read(file: Path, collective: str | None) -> Imported:
    with options.rejecting(str(file)):
        return read(read_json(file), collective)


def _execute(plan: Imported) -> None:
    from weft_tools.laboratory.imported import differs_in_orders, differs_on_threads

    made = ordinary(plan.plan)
    for how, differs in (
        ("in adversarial orders", differs_in_orders),
        ("by a thread for each lane", differs_on_threads),
    ):
        if wrong := differs(made):
            typer.echo(f"executed {how}: DIFFERS: {wrong}", err=True)
            raise typer.Exit(1)
        typer.echo(f"executed {how}: the bits that it promises")


def _predict(plan: Imported, machine: str, chunk_bytes: int) -> None:
    made = ordinary(plan.plan)
    columns = max(1, chunk_bytes // 4 // plan.rows_per_chunk)
    rows = dict.fromkeys(made.buffers, Rows(columns, "float32"))
    with options.rejecting("--machine"):
        time = seconds(made, shared.load_machine(machine), rows)
    typer.echo(f"predicted on {machine}, chunks of {chunk_bytes} bytes: {time * 1e6:.1f} us")


def _mutants(plan: Imported) -> None:
    from weft_tools.laboratory.counting import Found, found

    scores = found(plan.plan)
    made = table(("instruction", "mutants", "rejected", "counting finds"), left=("instruction",))
    total = sum(scores.values(), Found())
    for name, each in [*scores.items(), ("total", total)]:
        made.add_row(name, *map(str, (each.mutants, each.rejected, each.counted)))
    Console().print(made)
    typer.echo(
        f"counting signals and waits finds {total.counted} of the {total.rejected} mutants that "
        f"the proof rejects: {_percent(total.counted, total.rejected)}"
    )


def _percent(part: int, whole: int) -> Any:
    return f"{100 * part / whole:.0f} %" if whole else "none"
