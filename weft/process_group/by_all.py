"""Groups that are made by all of their ranks or by none: if one rank lacks memory or threads, all
ranks raise the same error, so all may take another group alike.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

import weft._native as _native
from weft.bootstrap.stores import arrived, leave_together
from weft.errors import PeerLost, PeerTimeout, SymmetricMemoryError, WeftError
from weft.outside import printable_lines
from weft.world import World

Made = TypeVar("Made")

_SOON = 10.0  # seconds in which peers notice that a rank has failed, and say why they did
_LATE = 0.2  # seconds in which they do so after a whole time limit
_FILES, _FILES_PER_RANK = 16, 2  # that a group of gloo opens, at most
_LACKS, _LOST, _OTHER = "lacks", "lost", "other"  # kinds of errors
_WORDS = ("can't start new thread", "can't allocate memory", "not enough memory")


class NotMade(SymmetricMemoryError):
    """No rank has the group, since one lacks memory or threads for it; raised on all ranks."""


def made_by_all(
    make: Callable[[], Made], store: Store, rank: int, ranks: int, timeout: float
) -> Made:
    """The result of `make`, which succeeds on no rank if it fails on one, as `confirm` sees to.

    Raises `NotMade` on all ranks if some lack memory or threads, and names these. After any other
    error a rank raises its own, and one that was only left alone `PeerLost` with the others'. If a
    rank reports no error each raises its own: within some seconds, on a rank that has waited for
    `timeout` already within `_LATE`, and on one that lacks something after `timeout`, as peers may
    yet come.
    """
    try:
        return make()
    except BaseException as error:
        kind = _kind(error, ranks)
        patience = timeout if kind == _LACKS else min(timeout, _SOON)
        limit = _LATE if isinstance(error, PeerTimeout) else patience
        verdict = why = ""
        with contextlib.suppress(RuntimeError):  #  the store has ended
            votes = _voted(f"{kind} {type(error).__name__}: {error}", store, rank)
            if isinstance(error, Exception):  # no interrupt
                verdict, why = _verdict(votes, ranks, limit)
        text = f"a group of {ranks} ranks cannot be made: {why}"
        if verdict == _LACKS:
            raise NotMade(text) from error
        if kind == _LOST and why:
            raise PeerLost(text) from error
        raise


def confirm(world: World) -> None:
    """Return once all ranks have called this, the last part of making a group. Raises `PeerLost`
    if one fails instead, and closes its world.
    """
    doing = "to make the group"
    world.notes.send_to_all("made", None, doing)
    for peer in world.placement.others:
        world.notes.receive(peer, doing, f"for rank {peer} {doing}", world.timeout)


def _voted(vote: str, store: Store, rank: int) -> Store:
    """The place of all votes on an attempt that has failed, with this rank's."""
    # attempts fail on all ranks, so their numbers are equal
    votes = PrefixStore(f"weft failed {store.add(f'weft failed {rank}', 1)}", store)
    votes.set(str(rank), vote[:1000])
    return votes


def _verdict(votes: Store, ranks: int, limit: float) -> tuple[str, str]:
    """The kind of the error by which an attempt has failed, and which ranks raised it, equal on all
    ranks: the word of the first to count the votes, when all have voted or the limit has passed.
    """
    keys, counted = [str(each) for each in range(ranks)], f"{_OTHER} "
    if arrived(votes, keys, _native.Deadline(limit), lambda: votes.check(["verdict"])):
        counted = _of([vote.decode(errors="replace") for vote in votes.multi_get(keys)])
    counted = votes.compare_set("verdict", "", counted).decode(errors="replace")
    leave_together(votes, ranks, _LATE)
    kind, _, why = counted.partition(" ")
    return kind, printable_lines(why)


def _of(votes: Sequence[str]) -> str:
    """The verdict of the votes of all ranks."""
    said = [vote.partition(" ")[::2] for vote in votes]
    causes = {rank: each for rank, each in enumerate(said) if each[0] != _LOST}
    lacking = causes and all(kind == _LACKS for kind, _ in causes.values())
    text = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in causes.items())
    return f"{_LACKS if lacking else _OTHER} {text}"


def _kind(error: BaseException, ranks: int) -> str:
    """The kind of an error. A rank without descriptors lacks what any other group needs, too."""
    if isinstance(error, PeerLost | PeerTimeout):
        return _LOST
    of_system = isinstance(error, OSError) or any(words in str(error) for words in _WORDS)
    lacks = isinstance(error, SymmetricMemoryError | MemoryError) or (
        of_system and not isinstance(error, WeftError)
    )
    return _LACKS if lacks and _can_open(_FILES + _FILES_PER_RANK * ranks) else _OTHER


def _can_open(files: int) -> bool:
    """Whether this process has so many free descriptors."""
    opened = list[int]()
    try:
        opened += (os.dup(0) for _ in range(files))
        return True
    except OSError:
        return False
    finally:
        for each in opened:
            os.close(each)
