"""``weft doctor --flight``: the calls of all ranks of a world that has failed, side by side where
they first differ, and the likely cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.doctor.causes import Difference, difference, explanation, moment, ranks_of, waited
from weft.doctor.recording import FlightRecording, Rank, RecordedCall, read
from weft.doctor.tables import table

_BEFORE, _AFTER = 3, 2
"""Calls that are shown before and after the first difference."""
_LATE = 0.1
"""Seconds after the first rank from which on it is shown that a rank began a call later."""
_SHOWN = 8
"""The most errors that are listed."""


def diagnose(paths: Sequence[Path], console: Console) -> None:
    """Print the worlds that are recorded in files; `paths` and errors are those of `read`."""
    for world in read(paths):
        found = difference(world)
        group = f", process group {world.group}" if world.group else ""
        console.print(
            f"World {world.name} of {len(world.ranks)} ranks{group}, failed at "
            f"{moment(world.failed)}",
            highlight=False,
            markup=False,
        )
        console.print(_table(world, found))
        for text in _errors(world):
            console.print(text, highlight=False, markup=False)
        cause, advice = explanation(world, found)
        console.print(f"[bold]Likely cause:[/] {escape(cause)}", highlight=False)
        console.print(f"[bold]What to do:[/] {escape(advice)}\n", highlight=False)


def _table(world: FlightRecording, found: Difference) -> Table:
    """The calls around the first difference, with a column for all ranks that are alike."""
    last = max(rank.last for rank in world.ranks)
    around = found.number or last
    numbers = range(max(1, around - _BEFORE), min(last, around + _AFTER) + 1)
    columns = dict[tuple[str, ...], list[Rank]]()
    for rank in world.ranks:
        cells = tuple(_cell(world, found, rank, number) for number in numbers)
        columns.setdefault(cells, []).append(rank)
    shown = table("call", "", "began", *(ranks_of(ranks) for ranks in columns.values()))
    for at, number in enumerate(numbers):
        made = _made(world, number)
        same = made[0].call if made else ""
        if _differ(made):
            same = "different calls"
        began = moment(min(call.began for call in made))[11:] if made else ""
        style = "bold" if number == found.number else None
        shown.add_row(
            str(number), escape(same), began, *[escape(cells[at]) for cells in columns], style=style
        )
    return shown


def _made(world: FlightRecording, number: int) -> list[RecordedCall]:
    """The calls of all ranks with a number."""
    return [rank.calls[number] for rank in world.ranks if number in rank.calls]


def _differ(made: Sequence[RecordedCall]) -> bool:
    """Whether ranks have made different calls: then not all of them have ended theirs."""
    return len({call.call for call in made}) > 1 and not all(call.ended for call in made)


def _cell(world: FlightRecording, found: Difference, rank: Rank, number: int) -> str:
    """The state of a rank's call; the call itself where ranks differ."""
    call = rank.calls.get(number)
    made = _made(world, number)
    if call is None:
        return "" if rank.last > number else "not made"
    if _differ(made):
        return call.call
    late = (call.began - min(each.began for each in made)) * 1e-9
    delay = f", began {late:.1f} s later" if late > _LATE else ""
    return f"{_state(found, rank, call)}{delay}"


def _state(found: Difference, rank: Rank, call: RecordedCall) -> str:
    if call.ended:
        return "ended"
    if rank.lost or not rank.written:
        return rank.lost or ("made" if call.ended is None else "not ended")
    whom = (
        f" for {ranks_of(found.missing)}" if call.number == found.number and found.missing else ""
    )
    return f"waited {waited(rank, call.number):.1f} s{whom}"


def _errors(world: FlightRecording) -> Iterator[str]:
    """The error of each rank; equal ones once."""
    by_error = dict[str, list[Rank]]()
    for rank in world.ranks:
        by_error.setdefault(rank.error or "wrote no file", []).append(rank)
    for error, ranks in [*by_error.items()][:_SHOWN]:
        yield f"{ranks_of(ranks)}: {error}"
    if len(by_error) > _SHOWN:
        yield f"and {len(by_error) - _SHOWN} more errors"
