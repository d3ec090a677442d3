"""The likely cause of a recorded failure: the first call that ranks have not made alike, and what
became of the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.doctor.recording import FlightRecording, Rank
from weft.world.flight import STOPPED

_OF_PEERS = ("PeerLost", "PeerTimeout", "MismatchError", "WeftError")
"""Errors by which a rank reports the fault of others."""
_FROM_OUTSIDE = ("KeyboardInterrupt", STOPPED)
"""Words in the errors of ranks that a user or a launcher has ended, perhaps since they hung."""

_FAILED = "its own output says why; the other ranks only waited for it"
_DIED = "its own output, its exit status and the kernel's log (dmesg: was memory short?) say why"


class Difference(NamedTuple):
    """The first call that not all ranks have made and ended alike: its `number`, 0 if there is
    none; the ranks that have `made` it, and those that have not.
    """

    number: int
    made: Sequence[Rank]
    missing: Sequence[Rank]

    @property
    def by_call(self) -> dict[tuple[str, str], list[Rank]]:
        """The ranks that have made it by their calls, that of most ranks first."""
        found = dict[tuple[str, str], list[Rank]]()
        for rank in self.made:
            call = rank.calls[self.number]
            found.setdefault((call.call, call.plan), []).append(rank)
        return dict(sorted(found.items(), key=lambda each: -len(each[1])))

    @property
    def mismatch(self) -> bool:
        """Whether ranks have made different calls. Those that have ended it have made the same,
        though each may name its own number of rows.
        """
        ended = all(rank.calls[self.number].ended for rank in self.made)
        return len(self.by_call) > 1 and not ended


def difference(world: FlightRecording) -> Difference:
    """The first difference between the ranks of a world."""
    recorded = [rank for rank in world.ranks if rank.calls]
    first = max((min(rank.calls) for rank in recorded), default=1)
    for number in range(first, max(rank.last for rank in world.ranks) + 1):
        made = [rank for rank in world.ranks if number in rank.calls]
        missing = [rank for rank in world.ranks if rank.last < number]
        found = Difference(number, made, missing)
        if missing or found.mismatch or any(rank.calls[number].ended is False for rank in made):
            return found
    return Difference(0, [], [])


def explanation(world: FlightRecording, found: Difference) -> tuple[str, str]:
    """The likely cause of a failure, and advice."""
    if found.mismatch:
        return _mismatch(found), (
            "compare what these ranks do before this call: a branch, a loop or a shape may depend "
            "on the rank, or on its data"
        )
    if culprit := next(filter(_failed, world.ranks), None):
        died = culprit.lost == "died" and not culprit.error
        return _failure(culprit, found), _DIED if died else _FAILED
    if found.missing:
        return _late(found), (
            f"py-spy dump --pid {found.missing[0].pid} shows where a live process is; look for a "
            "branch without this call, or give a larger timeout= for work that takes longer"
        )
    if found.number:
        slow = [rank for rank in found.made if rank.calls[found.number].ended is False]
        return (
            f"all ranks have made {_call(found)}, and {ranks_of(slow)} did not end it",
            "see the errors above: a rank may have been suspended or short of cores in the call; "
            "weft doctor, started as the job is, finds ranks that share a core",
        )
    return (
        "all ranks have made and ended the same calls of this world: it failed outside of them",
        "see the errors above, and the output of the first rank that failed",
    )


def _failure(rank: Rank, found: Difference) -> str:
    how = f"failed with {rank.error}" if rank.error else rank.lost.rstrip(",")
    when = "before"
    if rank in found.made:
        when = "after" if rank.calls[found.number].ended else "in"
    return f"{_name(rank)} {how} {when} {_call(found)}"


def _late(found: Difference) -> str:
    since = max((waited(rank, found.number) for rank in found.made if rank.written), default=0.0)
    have = "have" if len(found.missing) > 1 else "has"
    return (
        f"{ranks_of(found.missing)} {have} not made {_call(found)}, for which "
        f"{ranks_of(found.made)} waited {since:.1f} s; {_latest(found.missing[0])}"
    )


def _mismatch(found: Difference) -> str:
    calls = [f"{ranks_of(each)} made {_shown(call, found)}" for call, each in found.by_call.items()]
    return f"the ranks made different calls: as call {found.number} {'; '.join(calls)}"


def _shown(call: tuple[str, str], found: Difference) -> str:
    """A call, with its plan if nothing else differs."""
    words, plan = call
    same = len({words for words, _ in found.by_call}) == 1
    return f"{words} by {plan}" if same else words


def _call(found: Difference) -> str:
    """The call of a difference in which all ranks that have made it agree."""
    if not found.number:
        return "its next call"
    words, _ = next(iter(found.by_call))
    return f"call {found.number}, {words}"


def _failed(rank: Rank) -> bool:
    """Whether a rank was lost, or has raised an error that does not blame its peers."""
    if any(word in f"{rank.error} {rank.lost}" for word in _FROM_OUTSIDE):
        return False
    return bool(rank.lost or (rank.error and not rank.error.startswith(_OF_PEERS)))


def _latest(rank: Rank) -> str:
    """The latest call of a late rank."""
    if not rank.calls:
        return "it has made no call"
    last = rank.calls[rank.last]
    ended = {True: " and ended", False: " and has not ended", None: ""}[last.ended]
    return f"its latest, call {last.number}, {last.call}, began at {moment(last.began)}{ended}"


def waited(rank: Rank, number: int) -> float:
    """The seconds from the beginning of a rank's call until the rank wrote its file."""
    return (rank.written - rank.calls[number].began) * 1e-9


def moment(nanoseconds: int) -> str:
    """A date, with milliseconds."""
    seconds, fraction = divmod(nanoseconds // 1_000_000, 1000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}.{fraction:03d}"


def ranks_of(ranks: Iterable[Rank]) -> str:
    """The numbers of ranks, such as "ranks 0, 2-5"."""
    spans = list[list[int]]()
    for number in sorted(rank.number for rank in ranks):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    several = len(spans) > 1 or spans[0][0] < spans[0][1]
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if several else ''} {', '.join(texts)}"


def _name(rank: Rank) -> str:
    of_job = f", rank {rank.global_rank} of the job" if rank.global_rank != rank.number else ""
    return f"rank {rank.number} (pid {rank.pid}{of_job})"
