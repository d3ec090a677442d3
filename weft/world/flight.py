"""The flight recorder: the latest calls of each rank, which the native core keeps for its own use,
written to a file when a world fails. ``weft doctor --flight`` reads it.

The folder is that of the variable WEFT_FLIGHT, by default ``flight`` in the cache directory, where
only the files of the newest worlds are kept; with WEFT_FLIGHT=0 nothing is written, and
WEFT_FLIGHT=1 is as without it. Where the
variable names a folder, a rank that SIGTERM ends writes its file, too (`weft.world.stopped`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weft.cache as cache
from weft.errors import PeerLost
from weft.version import __version__

if TYPE_CHECKING:
    from weft.world.failure import Failure

VARIABLE = "WEFT_FLIGHT"
_log = logging.getLogger("weft")
FILES = "*-rank*.json"
"""The pattern of their names."""
STOPPED = "stopped by SIGTERM"
"""The error of a rank that SIGTERM has ended."""
_OFF, _ON = "0", "1"
_PEER_CALLS = 4
"""Calls of each peer in a file: a peer that cannot write one has usually ended within these."""
_WORLDS = 8
"""Worlds whose files are kept in the cache directory."""


def folder() -> Path | None:
    """The folder of the files; None if nothing is to be written."""
    if chosen := _chosen():
        return None if chosen == _OFF else Path(chosen)
    stored = cache.directory()
    return stored and stored / "flight"


def has_own_folder() -> bool:
    """Whether the variable names a folder."""
    return _chosen() not in ("", _OFF)


def _chosen() -> str:
    """The value of the variable, "" for the folder in the cache directory."""
    chosen = os.environ.get(VARIABLE, "")
    return "" if chosen == _ON else chosen


def identity(secret: bytes) -> str:
    """The name of a world, equal on all its ranks, from a secret that they share."""
    return hashlib.sha256(b"flight " + secret).hexdigest()[:8]


def world_of(file: Path) -> str:
    """The name of the world whose rank has written a file."""
    return file.name.partition("-")[0]


def write(failure: Failure, error: BaseException, culprit: int | None) -> Path | None:
    """Write the latest calls of all ranks, as this rank knows them, and return the file; None if
    there were no calls, or no file can be written.

    `error` closed the world, `culprit` is the rank that caused it, if that is another one.
    """
    try:
        into = folder()
        record = _record(failure, error, culprit)
        if into is None or not any(rank["calls"] for rank in record["ranks"]):
            return None
        into.mkdir(parents=True, exist_ok=True)
        file = into / f"{failure.identity}-rank{failure.placement.rank}.json"
        file.write_text(json.dumps(record, indent=1))
        if not _chosen():
            _prune(into)
        return file
    except Exception as reason:  # the error itself matters more
        _log.warning(
            "the flight recorder cannot write the latest calls of world %s: %s",
            failure.identity,
            reason,
        )
        return None


def _record(failure: Failure, error: BaseException, culprit: int | None) -> dict[str, Any]:
    of = failure.placement
    return {
        "weft": __version__,
        "world": failure.identity,
        "group": failure.group_name,
        "rank": of.rank,
        "written": time.time_ns(),
        "host": socket.gethostname(),
        "error": f"{type(error).__name__}: {error}",
        "lost": {"rank": culprit, "how": error.how} if isinstance(error, PeerLost) else None,
        "ranks": [
            {
                "pid": of.pids[rank],
                "host": of.hosts[rank],
                "global_rank": of.global_ranks[rank],
                "calls": [*_calls(failure, rank)],
            }
            for rank in range(of.ranks)
        ],
    }


def _calls(failure: Failure, rank: int) -> Iterator[dict[str, Any]]:
    """The latest calls of a rank, the earliest first. Whether those of a rank on another host have
    ended is unknown.
    """
    if failure.executor is None:  # the world fails while it is made
        return
    here = failure.placement.hosts.here(rank)
    made = failure.executor.made_calls(rank)
    for number, began, ended, text in made[0 if rank == failure.placement.rank else -_PEER_CALLS :]:
        call, _, plan = text.partition("\n")
        yield {
            "number": number,
            "call": call,
            "plan": plan,
            "began": began,
            "ended": ended if here else None,
        }


def _prune(into: Path) -> None:
    """Remove the files of all but the newest worlds."""
    newest = dict[str, float]()
    files = [*into.glob(FILES)]
    for file in files:
        with contextlib.suppress(OSError):  # another rank has removed it
            name = world_of(file)
            newest[name] = max(newest.get(name, 0.0), file.stat().st_mtime)
    kept = sorted(newest, key=newest.__getitem__)[-_WORLDS:]
    for file in files:
        if world_of(file) not in kept:
            file.unlink(missing_ok=True)
