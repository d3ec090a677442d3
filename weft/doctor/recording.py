"""A world as the files of its flight recorder (`weft.world.flight`) show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.bootstrap.wire import convert
from weft.outside import read_json
from weft.world import flight


class RecordedCall(NamedTuple):
    """A call of a rank: the user's call and its plan, the date of its beginning in nanoseconds, and
    whether it has ended, None if that is unknown.
    """

    number: int
    call: str
    plan: str
    began: int
    ended: bool | None


class Rank(NamedTuple):
    """A rank: its process and its latest calls by number, as its own file or its peers' have them.

    `error` is the one that closed its world and `written` the date of its file, "" and 0 without
    one. `lost` is how it was lost, as a peer has noticed: ``died``, or another phrase, or "".
    """

    number: int
    global_rank: int
    pid: int
    host: str
    calls: Mapping[int, RecordedCall]
    error: str
    written: int
    lost: str

    @property
    def last(self) -> int:
        """The number of its latest call."""
        return max(self.calls, default=0)


class FlightRecording(NamedTuple):
    """A world that has failed: `name` in files, process `group` or "", and its ranks in order."""

    name: str
    group: str
    ranks: Sequence[Rank]

    @property
    def failed(self) -> int:
        """The date of the first file."""
        return min(rank.written for rank in self.ranks if rank.written)

    @property
    def pids(self) -> set[int]:
        """The processes of its ranks."""
        return {rank.pid for rank in self.ranks}


def read(paths: Sequence[Path]) -> list[FlightRecording]:
    """The worlds recorded in files, the first that failed first. A file stands for those of all
    ranks of its world beside it; a folder, by default that of the flight recorder, for the newest
    world in it and others of the same processes.

    Raises `ValueError` for a path that is no such file or folder.
    """
    places = [*paths] or [folder for folder in [flight.folder()] if folder and folder.is_dir()]
    files = dict.fromkeys(file for path in places for file in _files(path))
    if not files:
        where = ", ".join(map(str, paths)) or flight.folder() or "any folder: WEFT_FLIGHT is off"
        raise ValueError(f"no failure is recorded in {where}")
    found = sorted(_worlds(files), key=lambda each: each.failed)
    if any(path.is_dir() for path in places):
        return [each for each in found if each.pids & found[-1].pids]
    return found


def _files(path: Path) -> list[Path]:
    """The files of a folder, or of the world of a file."""
    if path.is_dir():
        return sorted(path.glob(flight.FILES))
    return [path, *sorted(path.parent.glob(f"{flight.world_of(path)}-rank*.json"))]


def _worlds(files: Iterable[Path]) -> Iterator[FlightRecording]:
    by_world = dict[str, dict[int, Any]]()
    for file in files:
        try:
            record = read_json(file)
            by_world.setdefault(record["world"], {})[record["rank"]] = record
        except (LookupError, TypeError):
            raise ValueError(
                f"{file} is no file of the flight recorder: it has no world and rank"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no file of the flight recorder: {error}") from None
    for name, records in by_world.items():
        first = next(iter(records.values()))
        try:
            several = range(len(convert(list[Any], first["ranks"])))
            ranks = [_rank(number, records) for number in several]
            found = FlightRecording(name, convert(str, first["group"]), ranks)
        except (LookupError, TypeError, ValueError) as error:
            missing = "it has no " * isinstance(error, LookupError)
            raise ValueError(
                f"the files of world {name} have another form than those of this version's flight "
                f"recorder: {missing}{error}"
            ) from None
        if not any(rank.written for rank in ranks):
            raise ValueError(f"the files of world {name} are of none of its ranks")
        yield found


def _rank(number: int, records: Mapping[int, Any]) -> Rank:
    """A rank by the `records` of all ranks that have written a file."""
    own = records.get(number)
    views = [record["ranks"][number] for record in ([own] if own else records.values())]
    calls = [_call(call) for view in views for call in view["calls"]]
    lost = (record["lost"] for record in records.values() if record["lost"])
    return Rank(
        number,
        convert(int, views[0]["global_rank"]),
        convert(int, views[0]["pid"]),
        convert(str, own["host"]) if own else "",
        {call.number: call for call in sorted(calls, key=lambda call: call.ended is True)},
        convert(str, own["error"]) if own else "",
        convert(int, own["written"]) if own else 0,
        next((convert(str, each["how"]) for each in lost if each["rank"] == number), ""),
    )


def _call(record: Mapping[str, Any]) -> RecordedCall:
    return RecordedCall(
        convert(int, record["number"]),
        convert(str, record["call"]),
        convert(str, record["plan"]),
        convert(int, record["began"]),
        None if record["ended"] is None else convert(bool, record["ended"]),
    )
