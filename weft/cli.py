"""The command line: ``weft bench``, ``weft plan``, ``weft run`` and ``weft doctor``. Loads torch only where a command needs it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from weft.bench import collective_commands, commands, p2p_commands, predict_commands
from weft.errors import PlanError
from weft.plan import Plan
from weft.proof import verify
from weft.schedules import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from weft.schedules.all_gather import all_gather

app = typer.Typer(
    help="Hides communication behind compute in tensor-parallel programs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plans = typer.Typer(help="Look at plans: what every rank does in one execution of an operator.", no_args_is_help=True)
commands.app.add_typer(collective_commands.app)
commands.app.add_typer(p2p_commands.app)
app.add_typer(commands.app, name="bench")
app.add_typer(plans, name="plan")
app.command()(predict_commands.predict)


class Operator(str, Enum):
    """What there are plans for."""

    all_gather = "all-gather"
    all_gather_matmul = "all-gather-matmul"
    matmul_reduce_scatter = "matmul-reduce-scatter"
    matmul_all_reduce = "matmul-all-reduce"


_ALGORITHMS: dict[Operator, tuple[str, ...]] = {
    Operator.all_gather: ("push", "pull", "ring"),
    Operator.all_gather_matmul: ("push", *(name for name in all_gather_matmul.ALGORITHMS if name != "push")),
    Operator.matmul_reduce_scatter: matmul_reduce_scatter.ALGORITHMS,
    Operator.matmul_all_reduce: matmul_all_reduce.ALGORITHMS,
}
"""Of each operator, the one shown by default first."""


@plans.callback()
def plan() -> None:
    """Keep ``show`` a command of its own while it is the only one."""


@plans.command()
def show(
    operator: Annotated[Operator, typer.Argument(help="What to plan.")],
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="How many; as many as --rows, else 2.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="How rows travel; by default push, direct or one_shot.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="R0,R1,…", help="Rows of each rank; 4 each by default.")] = None,
    chunk_rows: Annotated[int, typer.Option(min=1, help="Rows per transfer.")] = 2,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="What is gathered lies in symmetric memory.")] = False,
) -> None:
    """Print a plan, and prove that it has no race and no deadlock and computes what it promises."""
    known = _ALGORITHMS[operator]
    chosen = algorithm or known[0]
    if chosen not in known:
        raise typer.BadParameter(f"{operator.value} is planned with {', '.join(known)}; got {chosen!r}", param_hint="--algorithm")
    made = _make(operator, _rows(rows, ranks), chosen, chunk_rows, symmetric)
    typer.echo(made)
    try:
        verify(made)
    except PlanError as error:
        typer.echo(f"\nNOT VERIFIED: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo("\nverified: no race, no deadlock, every output row as promised")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script that calls weft.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many to start on this host.")] = 2,
) -> None:
    """Run a script on local ranks."""
    from weft.launcher import run as run_ranks

    raise typer.Exit(run_ranks(ranks, str(script), arguments or []))


@app.command()
def doctor() -> None:
    """Say what the ranks of a job see of each other and of their machines, and what is wrong; start it as the job is started."""
    from rich.console import Console

    from weft.doctor import diagnose

    raise typer.Exit(0 if diagnose(Console(width=None if os.isatty(1) else 160)) else 1)


def main() -> None:
    """The ``weft`` command."""
    app(prog_name="weft")


def _make(operator: Operator, rows: list[int], algorithm: str, chunk_rows: int, symmetric: bool) -> Plan:
    match operator:
        case Operator.all_gather:
            return all_gather(rows, algorithm, chunk_rows=chunk_rows, symmetric_a=symmetric, symmetric_gathered=symmetric)
        case Operator.all_gather_matmul:
            return all_gather_matmul.all_gather_matmul(rows, algorithm, chunk_rows=chunk_rows, symmetric_a=symmetric)
        case Operator.matmul_reduce_scatter:
            return matmul_reduce_scatter.matmul_reduce_scatter(rows, algorithm, chunk_rows=chunk_rows)
        case Operator.matmul_all_reduce:
            return matmul_all_reduce.matmul_all_reduce(rows, algorithm, chunk_rows=chunk_rows)


def _rows(text: str | None, ranks: int | None) -> list[int]:
    if text is None:
        return [4] * (ranks or 2)
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"expected the rows of each rank, such as 4,4,3; got {text!r}", param_hint="--rows")
    if ranks not in (None, len(parts)):
        raise typer.BadParameter(f"{text!r} gives the rows of {len(parts)} ranks, not {ranks}", param_hint="--rows")
    return [int(part) for part in parts]
