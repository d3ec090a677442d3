"""The command ``weft plan mutants``: how many wrong plans the proof rejects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weft.cli import options
from weft.cli.common import Json
from weft.cli.plan import Name
from weft.cli.tables import table
from weft.errors import PlanError
from weft.measure.progress import progress

app = typer.Typer(add_completion=False)


@app.command()
def mutants(
    operator: Annotated[
        Name | None, typer.Option(help="Change plans of this operator only; default: of all.")
    ] = None,
    ranks: Annotated[
        str, typer.Option(metavar="N0,N1,…", help="Numbers of ranks of the plans.")
    ] = "2,3",
    seed: Annotated[
        int, typer.Option(help="Determines sizes, contents and orders of the runs.")
    ] = 0,
    json_file: Json = None,
) -> None:
    """Test the proof: change every plan in one place at a time, and count what is rejected.

    Each instruction is changed, deleted, repeated, moved in its lane, or aimed elsewhere. Of these
    mutants those that the proof accepts are executed in adversarial orders: they are equivalent if
    they give the bits of the plan in every run, else the proof missed them. Exit status 1 if it
    missed one, or rejects a plan without a change.
    """
    counts = _counts(ranks)
    options.check_files(json_file, None)
    from weft_tools.laboratory.mutation import MUTATIONS, SUBJECTS, Score, plans, score

    names = [operator.name] if operator else [*SUBJECTS]
    every = [(name, plan) for name in names for many in counts for plan in plans(name, many)]
    scores = {name: dict.fromkeys(MUTATIONS, Score()) for name in names}
    alarms = []
    with progress("plans", len(every)) as advance:
        for name, plan in every:
            try:
                for mutation, more in score(plan, seed).items():
                    scores[name][mutation] += more
            except PlanError as alarm:
                alarms.append(str(alarm))
            advance()
    total = sum((each for found in scores.values() for each in found.values()), Score())
    console = Console(stderr=json_file == "-")
    console.print(_table(scores, total))
    for found in (
        *(f"false alarm: {each}" for each in alarms),
        *map("missed: {}".format, total.missed),
    ):
        console.print(found, markup=False, soft_wrap=True)
    on = " and ".join(map(str, counts))
    console.print(
        f"{total.mutants} mutants of {len(every)} plans on {on} ranks: {total.rejected} rejected, "
        f"{total.equivalent} equivalent (they differ in no run), {len(total.missed)} missed; "
        f"{len(every) - len(alarms)} of {len(every)} plans accepted without a change",
        soft_wrap=True,
    )
    result = {
        "ranks": counts,
        "seed": seed,
        "plans": len(every),
        "false_alarms": alarms,
        "operators": _json(scores),
    }
    options.write_json(result, json_file)
    if total.missed or alarms:
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 1 for part in parts):
        options.reject("--ranks", f"expected numbers of 2 or more ranks, such as 2,3; got {text!r}")
    return sorted({int(part) for part in parts})


def _table(scores: Mapping[str, Mapping[str, Any]], total: Any) -> Table:
    words = "operator", "instruction"
    made = table((*words, "mutants", "rejected", "equivalent", "missed"), left=words)
    rows = [
        (name.replace("_", "-"), mutation, score)
        for name, found in scores.items()
        for mutation, score in found.items()
    ]
    for name, mutation, score in [*rows, ("total", "", total)]:
        numbers = score.mutants, score.rejected, score.equivalent, len(score.missed)
        made.add_row(name, mutation, *map(str, numbers))
    return made


def _json(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {
            mutation: {**asdict(score), "equivalent": score.equivalent}
            for mutation, score in found.items()
        }
        for name, found in scores.items()
    }
