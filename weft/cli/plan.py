"""``weft plan``: look at what every rank does in one execution of an operator, and have it proved. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Annotated, NamedTuple

import typer

from weft.errors import PlanError
from weft.plan import Plan
from weft.plan.proof import verify
from weft.schedules import all_gather, all_reduce, broadcast, reduce_scatter
from weft.schedules.all_to_all import all_to_all
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Operator, Place, Variant, Workload

app = typer.Typer(help="Look at plans: what every rank does in one execution of an operator.", no_args_is_help=True)


class Request(NamedTuple):
    """What a planner is asked for."""

    rows: list[int]
    algorithm: str
    chunk_rows: int
    symmetric: bool


def _gather(r: Request) -> Plan:
    return all_gather.all_gather(
        r.rows, r.algorithm, chunk_rows=r.chunk_rows, symmetric_a=r.symmetric, symmetric_gathered=r.symmetric
    )


def _fused(operator: Operator, r: Request) -> Plan:
    workload = Workload(operator.name, tuple(r.rows), 1, 1, "float32", "float32", symmetric=r.symmetric)
    return operator.plan(workload, Variant(r.algorithm, r.chunk_rows), Place())


def _reduce(r: Request) -> Plan:
    return all_reduce.all_reduce(sum(r.rows), len(r.rows), r.algorithm, symmetric_a=r.symmetric, symmetric_out=r.symmetric)


def _scatter(r: Request) -> Plan:
    if r.algorithm == "direct":
        return reduce_scatter.reduce_scatter(r.rows, symmetric_a=r.symmetric)
    return reduce_scatter.put(r.rows, r.algorithm, chunk_rows=r.chunk_rows, hosts=range(len(r.rows)))


def _broadcast(r: Request) -> Plan:
    rows, ranks = sum(r.rows), len(r.rows)
    if r.algorithm == "pull":
        return broadcast.broadcast(rows, ranks, 0, symmetric_a=r.symmetric)
    if r.algorithm == "push":
        return broadcast.push(rows, 0, range(ranks))
    return broadcast.ring(rows, 0, range(ranks), chunk_rows=r.chunk_rows)


PLANNERS: Mapping[str, tuple[tuple[str, ...], Callable[[Request], Plan]]] = {
    **{name: (operator.algorithms, partial(_fused, operator)) for name, operator in OPERATORS.items()},
    "all_gather": (all_gather.ALGORITHMS, _gather),
    "reduce_scatter": (reduce_scatter.ALGORITHMS, _scatter),
    "all_reduce": (all_reduce.ALGORITHMS, _reduce),
    "broadcast": (broadcast.ALGORITHMS, _broadcast),
    "all_to_all": (("pull",), lambda r: all_to_all([r.rows] * len(r.rows), symmetric_a=r.symmetric)),
}
"""Of each operator its algorithms and its planner."""

Name = Enum("Name", {name: name.replace("_", "-") for name in PLANNERS}, type=str)  # type: ignore[misc]
"""What there are plans for."""


@app.callback()
def plan() -> None:
    """Keep ``show`` a command of its own while it is the only one."""


@app.command()
def show(
    operator: Annotated[Name, typer.Argument(help="What to plan.")],
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="How many; as many as --rows, else 2.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="How rows travel; by default push, or the first that there is.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="R0,R1,…", help="Rows of each rank's part; 4 each by default.")] = None,
    chunk_rows: Annotated[int, typer.Option(min=1, help="Rows per transfer.")] = 2,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="The caller's tensors lie in symmetric memory.")] = False,
) -> None:
    """Print a plan, and prove that it has no race and no deadlock and computes what it promises."""
    known, planner = PLANNERS[operator.name]
    chosen = algorithm or ("push" if "push" in known else known[0])
    if chosen not in known:
        raise typer.BadParameter(f"{operator.value} is planned with {', '.join(known)}; got {chosen!r}", param_hint="--algorithm")
    made = planner(Request(_rows(rows, ranks), chosen, chunk_rows, symmetric))
    typer.echo(made)
    try:
        verify(made)
    except PlanError as error:
        typer.echo(f"\nNOT VERIFIED: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo("\nverified: no race, no deadlock, every output row as promised")


def _rows(text: str | None, ranks: int | None) -> list[int]:
    if text is None:
        return [4] * (ranks or 2)
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"expected the rows of each rank, such as 4,4,3; got {text!r}", param_hint="--rows")
    if ranks not in (None, len(parts)):
        raise typer.BadParameter(f"{text!r} gives the rows of {len(parts)} ranks, not {ranks}", param_hint="--rows")
    return [int(part) for part in parts]
