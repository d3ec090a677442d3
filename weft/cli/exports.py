"""The command ``weft plan export``: plans of collectives in the formats of other systems."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.cli.options import algorithms, refuse, refusing
from weft.errors import PlanError
from weft.formats.mscclpp.foreign import foreign
from weft.formats.mscclpp.writer import crossed, write
from weft.plan.binding import bind
from weft.plan.proof import verify
from weft.predict.planners import PLANNERS
from weft.schedules.operators import COLLECTIVES
from weft.schedules.workload import Request

Name = Enum("Name", {name: name.replace("_", "-") for name in COLLECTIVES}, type=str)  # type: ignore[misc]


def export(
    operator: Annotated[Name, typer.Argument(help="The collective to plan.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=2, help="Number of ranks.")] = 2,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Default: the first that ranks on several hosts can use.",
            autocompletion=algorithms,
        ),
    ] = None,
    pieces: Annotated[int, typer.Option(min=1, help="Chunks of a rank's rows.")] = 1,
    format: Annotated[
        Literal["mscclpp"], typer.Option(help="mscclpp: an execution plan of MSCCL++, as JSON.")
    ] = "mscclpp",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file; default: stdout.")
    ] = None,
) -> None:
    """Write a plan of a collective as a file for the executor of another system.

    It is proved as it is written, and refused, by name, if that system has no words or no room for
    it.
    """
    planner = PLANNERS[operator.name]
    chosen = algorithm or planner.first
    if chosen not in planner.algorithms:
        names = f"{operator.value} is planned with {', '.join(planner.algorithms)}"
        refuse("--algorithm", f"{names}; got {chosen!r}")
    plan = planner.plan(Request(ranks, pieces, chosen))
    with refusing("--algorithm"):
        made = foreign(bind(plan, plan.pieces))
        file = write(made)
        if made.operator == "custom":
            raise ValueError(f"{format} has no {operator.value}")
        if found := [*crossed(file)]:
            raise ValueError(
                f"{chosen} gets rows from another offset ({found[0]}), which MSCCL++'s executor "
                "does not: choose an algorithm that puts them, as push and ring do"
            )
        try:
            verify(made)
        except PlanError as error:
            raise ValueError(str(error)) from None
    text = json.dumps(file, indent=2)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n")
