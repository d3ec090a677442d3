"""Errors. Bad arguments are `ValueError` or `TypeError`, raised before anything is sent."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping

from weft.differences import difference

_LOG = logging.getLogger("weft")


class _Error(RuntimeError):
    """The base of `WeftError` until `set_base` replaces it: plans do not need torch."""


class WeftError(_Error):
    """Base of all errors below; raised itself for the use of a closed world.

    Where torch is loaded it is a `torch.distributed.DistBackendError`, so that handlers of torch's
    errors catch weft's. `record` is the file that ``weft doctor --flight`` reads, or "". `reporter`
    is the rank of the job that reports in full an error that several ranks raise, -1 if all do, and
    `detailed` tells whether the message has lines on the ranks' places.

    Examples:
        >>> local = weft.local_world(2)
        >>> local.close()
        >>> local.run(weft.barrier)
        Traceback (most recent call last):
            ...
        weft.errors.WeftError: this local world is closed; make a new one with weft.local_world(...)
    """

    record = ""
    reporter = -1
    detailed = False

    def add(self, line: str) -> None:
        """Add a line to the message."""
        self.args = (f"{self}\n  {line}",)

    def name_record(self, file: str) -> None:
        """Add the file of the flight recorder to the message."""
        if not self.record:
            self.record = file
            self.add(f"weft doctor --flight {file} shows the calls of all ranks")


def in_use(thread: int) -> WeftError:
    """The error of a call on a world while `thread`, an identifier, is in another call on it."""
    if thread == threading.get_ident():
        return WeftError(
            "this thread is in a call on this world: a signal handler that interrupts it cannot "
            "make another"
        )
    name = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
    return WeftError(
        f"thread {name!r} is in a call on this world, which is used by one thread at a time: make "
        "all calls from one thread, or make a world for each by weft.init(group)"
    )


def set_base(base: type[RuntimeError]) -> None:
    """Make `base` the base class of `WeftError`."""
    WeftError.__bases__ = (base,)


class PeerLost(WeftError):
    """A peer died, closed its world or failed with an exception while this rank needed it.

    `how` is the phrase for it in the message, `pid` its process if that is on this host, else 0.

    Examples:
        >>> def rank_1_leaves():
        ...     world = weft.init()
        ...     world.close() if world.rank == 1 else weft.barrier()
        >>> with weft.local_world(2) as local:
        ...     local.run(rank_1_leaves)
        Traceback (most recent call last):
            ...
        weft.errors.PeerLost: rank 1 (pid ...) closed its world while rank 0 waited ...
    """

    def __init__(self, message: str, how: str = "died", pid: int = 0) -> None:
        super().__init__(message)
        self.how = how
        self.pid = pid


class PeerTimeout(WeftError, TimeoutError):
    """A wait reached its time limit.

    Examples:
        >>> def rank_1_is_late():
        ...     if weft.init().rank == 0:
        ...         weft.barrier(timeout=0.1)
        >>> with weft.local_world(2) as local:
        ...     local.run(rank_1_is_late)
        Traceback (most recent call last):
            ...
        weft.errors.PeerTimeout: rank 0 waited 0.1 s ...: rank 1 (pid ...) has not made ...
    """


class Excluded(WeftError):
    """The other ranks continued in the next world without this rank, which is alive but did not
    answer in time; see `World.shrink`.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with weft.init() as world, ThreadPoolExecutor() as pool:  # as from another process
        ...     joined = pool.submit(weft.join, world.invitation())
        ...     first, second = world.grow(1), joined.result()
        >>> first.shrink(timeout=0.1)  # rank 1 does not call it
        World(rank=0, ranks=1)
        >>> second.shrink()
        Traceback (most recent call last):
            ...
        weft.errors.Excluded: the other ranks continued without rank 1, which ...
    """


class MismatchError(WeftError):
    """The ranks did not make the same call; the message shows the difference and both calls, or the
    error by which a rank rejects it.

    Algorithms and plans are logged at level DEBUG of the logger ``weft``, and shown in the message
    if nothing else differs. `calls` are the calls shown, by rank.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_reduce(torch.ones(4 + weft.init().rank)))
        Traceback (most recent call last):
            ...
        weft.errors.MismatchError: the ranks do not make the same call: shapes differ
          rank 0: all_reduce((4,) float32, op=sum), at ...
          rank 1: all_reduce((5,) float32, op=sum), at ...
          pass tensors of one shape on all ranks, such as batches of one length
          weft doctor --flight ... shows the calls of all ranks
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.calls = {int(rank): call for rank, call in _CALL.findall(message)}

    def locate(self, places: Mapping[int, str]) -> None:
        """Add to each call the place at which its rank makes it, such as ``train.py:12``."""

        def located(found: re.Match[str]) -> str:
            place = places.get(int(found[1]))
            return f"{found[0]}, at {place}" if place else found[0]

        self.args = (_CALL.sub(located, str(self)),)

    @classmethod
    def between(cls, number: int, rank: int, call: str, peer: int, theirs: str) -> MismatchError:
        """The error of a rank that makes another call than a peer.

        The first line of a call is the user's call, the second its algorithm or plan.
        """
        both = dict(sorted({rank: call, peer: theirs}.items()))
        _LOG.debug("call %d of this world, internal calls included: %s", number, both)
        (one, plan), (other, plan_of_other) = [text.partition("\n")[::2] for text in both.values()]
        plans = (plan, plan_of_other)
        if one != other:
            why = difference(one, other)
            shown = [one, other]
        elif _algorithm(plan) != _algorithm(plan_of_other):
            why = (
                "algorithms differ (pass one algorithm= on all ranks, or give all hosts the same "
                "results of weft tune)"
            )
            shown = [f"{one} by {_algorithm(each)}" for each in plans]
        else:
            why = "plans differ"
            shown = [*plans]
        lines = [f"\n  rank {number}: {each}" for number, each in zip(both, shown, strict=True)]
        return cls(f"the ranks do not make the same call: {why}{''.join(lines)}")

    @classmethod
    def rejected(cls, rank: int, call: str, peer: int, why: str) -> MismatchError:
        """The error of a rank whose call a peer rejects, with the error `why`."""
        own, _, _ = call.partition("\n")
        lines = {rank: f"rank {rank}: {own}", peer: f"rank {peer} raised {why}"}
        shown = "".join(f"\n  {line}" for _, line in sorted(lines.items()))
        return cls(f"the ranks do not make the same call: rank {peer} rejects it{shown}")


_CALL = re.compile(r"\n  rank (\d+): (.*)")
"""A line with the call of a rank."""


def _algorithm(plan: str) -> str:
    """The algorithm in the second line of a call."""
    return "".join(re.findall(r"algorithm=(\w+)", plan)[:1])


class PlanError(WeftError, ValueError):
    """A plan that cannot be proved right; the message lists the defects.

    Examples:
        >>> from dataclasses import replace
        >>> from weft.schedules.all_gather import all_gather
        >>> plan = all_gather(ranks=2, pieces=1)
        >>> weft.verify(replace(plan, lanes=[{}, {}]))  # no rank does anything
        Traceback (most recent call last):
            ...
        weft.errors.PlanError: all_gather/pull on 2 ranks: ...
    """


class SymmetricMemoryError(WeftError, MemoryError):
    """A rank lacks memory for a symmetric tensor, or files for a connection to another host.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.init().empty(1 << 45))
        Traceback (most recent call last):
            ...
        weft.errors.SymmetricMemoryError: empty((35184372088832,), float32): rank 0: ...
    """
