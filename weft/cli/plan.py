"""``weft plan``: look at what every rank does in one execution of an operator, and have it proved.
Does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Annotated, NamedTuple

import typer

from weft.cli.options import refuse
from weft.errors import PlanError
from weft.plan import Plan
from weft.plan.binding import bind, split
from weft.plan.proof import verify
from weft.predict import collectives
from weft.schedules import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from weft.schedules.barrier import barrier
from weft.schedules.levels import Levels, nested
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Operator, Request, pieces

app = typer.Typer(
    help="Look at plans: what every rank does in one execution of an operator.",
    no_args_is_help=True,
)


EAGER = "eager"
"""How few rows are handed out; operators choose it by themselves."""
_HANDED_OUT: Mapping[str, Callable[[Levels], Plan]] = {
    **collectives.HANDED_OUT,
    "reduce_scatter": reduce_scatter.eager,
    "all_to_all": all_to_all.eager,
}


def _fused(operator: Operator, r: Request) -> Plan:
    return operator.plan(r._replace(pieces=1) if r.algorithm in operator.uncut else r)


def _scatter(r: Request) -> Plan:
    if r.algorithm == "direct":
        return reduce_scatter.reduce_scatter(r.ranks, r.pieces, symmetric_a=r.symmetric)
    return reduce_scatter.put(r.pieces, range(r.ranks), r.algorithm)


def _broadcast(r: Request) -> Plan:
    if r.algorithm == "pull":
        return broadcast.broadcast(r.ranks, r.pieces, 0, symmetric_a=r.symmetric)
    return (
        broadcast.push(0, range(r.ranks))
        if r.algorithm == "push"
        else broadcast.ring(r.pieces, 0, range(r.ranks))
    )


class Planner(NamedTuple):
    """An operator's algorithms, who makes its plans, and the rows of their shards where ranks'
    parts have these rows.
    """

    algorithms: tuple[str, ...]
    plan: Callable[[Request], Plan]
    shards: Callable[[list[int]], list[int]] = list


PLANNERS: Mapping[str, Planner] = {
    **{
        name: Planner(operator.algorithms, partial(_fused, operator))
        for name, operator in OPERATORS.items()
    },
    "all_gather": Planner(
        (*all_gather.ALGORITHMS, EAGER),
        lambda r: all_gather.all_gather(
            r.ranks, r.pieces, r.algorithm, symmetric_a=r.symmetric, symmetric_gathered=r.symmetric
        ),
    ),
    "reduce_scatter": Planner((*reduce_scatter.ALGORITHMS, EAGER), _scatter),
    "all_reduce": Planner(
        (*all_reduce.ALGORITHMS, EAGER),
        lambda r: all_reduce.all_reduce(
            r.ranks, r.pieces, r.algorithm, symmetric_a=r.symmetric, symmetric_out=r.symmetric
        ),
        lambda rows: split(sum(rows), len(rows)),
    ),
    "broadcast": Planner((*broadcast.ALGORITHMS, EAGER), _broadcast, lambda rows: [sum(rows)]),
    "barrier": Planner(("levels",), lambda r: barrier(nested(r.ranks)), lambda rows: []),
    "all_to_all": Planner(
        ("pull", EAGER),
        lambda r: all_to_all.all_to_all(r.ranks, r.pieces, symmetric_a=r.symmetric),
        lambda rows: rows * len(rows),
    ),
}
"""Of each operator who makes its plans."""

Name = Enum("Name", {name: name.replace("_", "-") for name in PLANNERS}, type=str)  # type: ignore[misc]
"""What there are plans for."""


@app.callback()
def plan() -> None:
    """Keep ``show`` a command of its own while it is the only one."""


@app.command()
def show(
    operator: Annotated[Name, typer.Argument(help="What to plan.")],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="How many; as many as --rows, else 2."),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="How rows travel; by default push, or the first that there is."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="R0,R1,…", help="Rows of each rank's part; else blocks are shown."),
    ] = None,
    chunk_rows: Annotated[
        int, typer.Option(min=1, help="Rows per transfer, of 4 where none are given.")
    ] = 2,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="The caller's tensors lie in symmetric memory.")
    ] = False,
) -> None:
    """Print a plan, and prove that for any number of rows it has no race and no deadlock and
    computes what it promises.
    """
    planner = PLANNERS[operator.name]
    chosen = algorithm or ("push" if "push" in planner.algorithms else planner.algorithms[0])
    if chosen not in planner.algorithms:
        refuse(
            "--algorithm",
            f"{operator.value} is planned with {', '.join(planner.algorithms)}; got {chosen!r}",
        )
    parts = None if rows is None else _rows(rows, ranks)
    cut = pieces(max(parts) if parts else 4, chunk_rows)
    count = len(parts) if parts else ranks or 2
    request = Request(count, cut, chosen, symmetric)
    made = _HANDED_OUT[operator.name](nested(count)) if chosen == EAGER else planner.plan(request)
    typer.echo(made if parts is None else bind(made, planner.shards(parts)))
    try:
        verify(made)
    except PlanError as error:
        typer.echo(f"\nNOT VERIFIED: {error}", err=True)
        raise typer.Exit(1) from None
    notifies = made.notifies()
    typer.echo(f"\nnotifies of other ranks: at most {max(notifies)} by one, {sum(notifies)} in all")
    typer.echo("verified: no race, no deadlock, every output row as promised, whatever the sizes")


def _rows(text: str, ranks: int | None) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        refuse("--rows", f"expected the rows of each rank, such as 4,4,3; got {text!r}")
    if ranks not in (None, len(parts)):
        refuse("--rows", f"{text!r} gives the rows of {len(parts)} ranks, not {ranks}")
    return [int(part) for part in parts]
