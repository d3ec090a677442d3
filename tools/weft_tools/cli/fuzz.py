"""The command ``weft plan fuzz``: whether engines compute what the proof accepts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.common import Json
from weft.cli.tables import table
from weft.measure.progress import progress

app = typer.Typer(add_completion=False)


@app.command()
def fuzz(
    plans: Annotated[int, typer.Option(min=1, help="Number of plans.")] = 2000,
    seed: Annotated[
        int, typer.Option(help="Determines the plans, together with their numbers.")
    ] = 0,
    first: Annotated[
        int, typer.Option(min=0, help="Number of the first plan: repeats one, with --plans 1.")
    ] = 0,
    json_file: Json = None,
) -> None:
    """Test the proof and the engines by plans made at random.

    Most of them are changed in one or two places. Those that the proof accepts are executed, and
    all results are compared with those of the reference interpreter.

    Ranks are threads: on one host, on several, and working on streams. Exit status 1 if a result
    differs, or if the proof rejects a plan that is right.
    """
    options.check_files(json_file, None)
    from weft.plan.language import show
    from weft_tools.laboratory.fuzz import SETTINGS, Tally
    from weft_tools.laboratory.fuzz import fuzz as run

    tallies = {setting: Tally() for setting in SETTINGS}
    console = Console(stderr=json_file == "-")
    with progress("plans", plans) as advance:
        for setting, tally in run(seed, range(first, first + plans)):
            tallies[setting] += tally
            for _ in range(tally.plans):
                advance()
    total = sum(tallies.values(), Tally())
    words = ("world",)
    made = table(
        (*words, "plans", "accepted", "changed", "of these accepted", "faults"), left=words
    )
    for name, each in [*tallies.items(), ("total", total)]:
        numbers = each.plans, each.accepted, each.changed, each.changed_accepted, len(each.faults)
        made.add_row(str(name), *map(str, numbers))
    console.print(made)
    for fault in total.faults:
        again = f"weft plan fuzz --seed {seed} --first {fault.case.number} --plans 1"
        console.print(f"{fault}; repeat it by {again}", markup=False, soft_wrap=True)
        console.print(show(fault.case.plan), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{total.plans} plans: {total.accepted} accepted and executed, {len(total.faults)} faults",
        soft_wrap=True,
    )
    result = {
        "seed": seed,
        "first": first,
        "worlds": {str(setting): each.as_json() for setting, each in tallies.items()},
    }
    options.write_json(result, json_file)
    if total.faults:
        raise typer.Exit(1)
