"""The command ``weft plan``: the plan of an operator, and its proof. ``show`` does not import
torch.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from weft.cli.group import PlanCommands
from weft.cli.options import algorithms, reject
from weft.errors import PlanError
from weft.measure.progress import progress
from weft.plan import Plan
from weft.plan.language import show as show_plan
from weft.plan.proof import runs, verify
from weft.schedules.operators import PLANNERS
from weft.schedules.workload import ORDERS, Order, Request, pieces

PROVED = 64
"""The most ranks whose plan is proved: the time grows with their cube, and is seconds for these."""

app = typer.Typer(
    cls=PlanCommands,
    help="Show and prove plans: what each rank copies, computes and waits for.",
    no_args_is_help=True,
)
Name = Enum("Name", {name: name.replace("_", "-") for name in PLANNERS}, type=str)  # type: ignore[misc]


def chosen_algorithm(operator: Name, algorithm: str | None) -> str:
    """An operator's algorithm of this name, or its first; another name is rejected."""
    planner = PLANNERS[operator.name]
    chosen = algorithm or planner.first
    if chosen not in planner.algorithms:
        names = f"{operator.value} is planned with {', '.join(planner.algorithms)}"
        reject("--algorithm", f"{names}; got {chosen!r}")
    return chosen


@app.command()
def show(
    operator: Annotated[Name, typer.Argument(help="The operator to plan.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Number of ranks.")] = 2,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Default: the first that ranks on several hosts can use.",
            autocompletion=algorithms,
        ),
    ] = None,
    chunk_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows per transfer, of 4 rows; default 2."),
    ] = None,
    order: Annotated[
        Order | None, typer.Option(help="The pieces that a push sends first; default peer.")
    ] = None,
    links: Annotated[
        int | None, typer.Option(min=2, help="Links over which a push sends at once.")
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="The caller's tensors are in symmetric memory.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Show this rank only. Default: all, or rank 0 of more than {PROVED}."
        ),
    ] = None,
) -> None:
    """Print a plan, and prove that it has no race and no deadlock and computes its result.

    The proof is for any number of rows. Of many ranks one is shown, whose lanes are planned in a
    moment, and nothing is proved: the time of a proof grows with the cube of the ranks.
    """
    planner, chosen = PLANNERS[operator.name], chosen_algorithm(operator, algorithm)
    cut = pieces(4, chunk_rows or 2)
    if rank is not None and rank >= ranks:
        reject("--rank", f"the ranks are 0 to {ranks - 1}; got {rank}")
    ranks_shown = range(ranks) if rank is None and ranks <= PROVED else [rank or 0]

    def text(made: Plan) -> str:
        return show_plan(made, ranks_shown)

    request = Request(
        ranks,
        cut,
        chosen,
        symmetric,
        order or ORDERS[0],
        links=links or 1,
        symmetric_out=symmetric,
    )
    made = planner.plan(request)
    shown = text(made)
    (other_order,) = {*ORDERS} - {request.order}
    for option, given, other in (
        ("--chunk-rows", chunk_rows, {"pieces": 2 * cut}),
        ("--order", order, {"order": other_order}),
        ("--links", links, {"links": 1}),
        ("--symmetric", symmetric, {"symmetric": False, "symmetric_out": False}),
    ):
        if given and text(planner.plan(request._replace(**other))) == shown:
            reject(option, f"changes nothing in {chosen} on {ranks} rank(s): omit it")
    typer.echo(shown)
    if ranks > PROVED:
        typer.echo(f"\nnot verified: proofs are of at most {PROVED} ranks")
        return
    try:
        with progress("proof", runs(made) * ranks) as advance:
            verify(made, ended=advance)
    except PlanError as error:
        typer.echo(f"\nNOT VERIFIED: {error}", err=True)
        raise typer.Exit(1) from None
    notifies = made.notifies()
    typer.echo(f"\nnotifies of other ranks: at most {max(notifies)} by one, {sum(notifies)} in all")
    typer.echo("verified: no race, no deadlock, every output row correct, for all sizes")
