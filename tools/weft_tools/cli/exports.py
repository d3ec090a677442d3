"""The command ``weft plan export``: weft's plans in the formats of other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.cli.options import algorithms, reject, rejecting
from weft.cli.plan import Name, chosen_algorithm
from weft.cli.values import Shape, product
from weft.errors import PlanError
from weft.plan import Plan
from weft.plan.binding import bind
from weft.plan.proof import verify
from weft.schedules.operators import COLLECTIVES, PLANNERS
from weft.schedules.workload import Request
from weft_tools.formats.mscclpp.exported import exported
from weft_tools.formats.mscclpp.writer import crossed
from weft_tools.formats.mscclpp.writer import write as write_execution_plan
from weft_tools.formats.pto.cores import by_cores
from weft_tools.formats.pto.data import drawn, saved
from weft_tools.formats.pto.writer import OPERATORS, Sizes
from weft_tools.formats.pto.writer import write as write_program

_DEFAULT = Shape(256, 256, 128)


app = typer.Typer(add_completion=False)


@app.command()
def export(
    operator: Annotated[Name, typer.Argument(help="The operator to plan.")],
    output: Annotated[
        Path | None,
        typer.Argument(help="The file of mscclpp, by default stdout; the folder of pto."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=2, help="Number of ranks.")] = 2,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Default: the first that ranks on several hosts can use.",
            autocompletion=algorithms,
        ),
    ] = None,
    pieces: Annotated[int, typer.Option(min=1, help="Pieces of a rank's rows.")] = 1,
    format: Annotated[
        Literal["mscclpp", "pto"],
        typer.Option(
            help="mscclpp: a collective as an execution plan of MSCCL++, JSON; pto: an operator "
            "as a program of Ascend's tile instructions."
        ),
    ] = "mscclpp",
    shape: Annotated[
        Shape | None, product(f"M, K and N of pto: M rows on all ranks. Default: {_DEFAULT}.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The data of pto, of weft bench --save-data; default: random."
        ),
    ] = None,
) -> None:
    """Write a plan as a file or a program of another system.

    What is written is proved, and rejected by name if that system has no words or no room for it.
    """
    chosen = chosen_algorithm(operator, algorithm)
    plan = PLANNERS[operator.name].plan(Request(ranks, pieces, chosen))
    if format == "pto":
        if operator.name not in OPERATORS:
            reject("--format", f"pto is for {', '.join(OPERATORS).replace('_', '-')}")
        _program(plan, output, shape or _DEFAULT, data)
        return
    for option, given in (("--shape", shape), ("--data", data)):
        if given is not None:
            reject(option, "has an effect with --format pto only")
    if operator.name not in COLLECTIVES:
        reject("--format", f"mscclpp is for collectives; {operator.value} also computes")
    text = json.dumps(_execution_plan(plan, operator.value, chosen), indent=2)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n")


def _execution_plan(plan: Plan, operator: str, algorithm: str) -> dict[str, object]:
    with rejecting("--algorithm"):
        made = exported(bind(plan, plan.pieces))
        file = write_execution_plan(made)
        if made.operator == "custom":
            raise ValueError(f"mscclpp has no {operator}")
        if found := [*crossed(file)]:
            raise ValueError(
                f"{algorithm} gets rows from another offset ({found[0]}), which MSCCL++'s executor "
                "does not: choose an algorithm that puts them, as push and ring do"
            )
        try:
            verify(made)
        except PlanError as error:
            raise ValueError(str(error)) from None
    return file


def _program(plan: Plan, folder: Path | None, shape: Shape, directory: Path | None) -> None:
    if folder is None:
        raise typer.BadParameter("name a folder for the program", param_hint="output")
    shard, rest = divmod(shape.m, plan.ranks)
    if rest:
        reject("--shape", f"{shape.m} rows do not divide among {plan.ranks} ranks")
    bound = bind(plan, [shard] * plan.ranks)
    sizes = Sizes(bound.buffers["a"].rows[0], shape.k, shape.n if "matmul" in plan.operator else 0)
    verify(by_cores(bound))
    with rejecting("--algorithm" if directory is None else "--data"):
        files = write_program(bound, sizes)
        arrays = (
            drawn(plan.ranks, sizes) if directory is None else saved(directory, plan.ranks, sizes)
        )
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "run.sh").chmod(0o755)
    for name, array in arrays.items():
        array.tofile(folder / "data" / f"{name}.bin")
