"""Whether a world is open, and the errors that close it."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

import weft._native as _native
import weft.errors as errors
from weft.errors import MismatchError, PeerLost, PeerTimeout, SymmetricMemoryError, WeftError
from weft.outside import printable, printable_lines
from weft.world import details, flight, places
from weft.world.network import Network
from weft.world.placement import Placement

_log = logging.getLogger("weft")
_REPORTED = "_reported"
"""The attribute of an error that peers have been sent."""


class OnError:
    """Context that passes an exception to `handle`, but for a `SymmetricMemoryError`, which all
    ranks raise together.
    """

    def __init__(self, handle: Callable[[BaseException], object]) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SymmetricMemoryError):
            self.handle(error)


class Failure:
    """Whether a rank's world is open; it is closed by its first error, or without one. Peers are
    notified of an error, and methods that return one have closed the world.

    Attributes: `closed` (the reason, or None), `failed_at` (the time of the error that closed it,
    by the monotonic clock), `unreported` (whether a background thread closed it and no call has
    raised the error yet), `followed` (the method that returned the world in place of this one, or
    ""), `forked` (whether this process is a forked child of the one that made it), `recorded` (the
    file of its flight recorder), `places` (of ranks in the user's program, after a mismatch),
    `identity` (the world's name in files, equal on all ranks), `group_name` (of the process group
    of torch.distributed whose world it is, or ""), `maker` (the call that makes another such world,
    for errors), `before` (called with an error before it closes the world and peers are notified;
    raises nothing), `returned` (the ranks of a local world that have returned from its `run`),
    `executor` (None while the world is made), `keeps` (the world: one that the program drops is
    there until it is closed or with a garbage collection, as its memory or its threads may need
    it).

    `fail_on_error` is the context of a part of a call that all ranks must complete,
    `report_rejection` that of the part before the first signal of a call.
    """

    def __init__(
        self, identity: str, placement: Placement, mesh: _native.Mesh, network: Network | None
    ) -> None:
        self.identity = identity
        self.placement = placement
        self.mesh = mesh
        self.network = network
        self.executor: _native.Executor | None = None
        self.keeps: object = None
        self.closed: str | None = None
        self.failed_at = math.inf
        self.unreported = False
        self.followed = ""
        self.forked = False
        self.recorded: Path | None = None
        self.places = dict[int, str]()
        self.group_name = ""
        self.maker = "weft.init()"
        self.before: Callable[[BaseException], object] = lambda error: None
        self.returned: Collection[int] = ()
        self.fail_on_error: AbstractContextManager[None] = OnError(self.fail)
        self.report_rejection: AbstractContextManager[None] = OnError(self.reject)

    def check(self) -> None:
        """Raise `WeftError` if the world is closed; first the error that closed it, if no call has
        raised it yet.
        """
        if self.closed is None:
            return
        self.check_process()
        if self.followed:
            raise WeftError(
                f"this world is over: {self.followed}() has returned the one that follows it; use "
                "that one"
            )
        if self.unreported:
            raise self.reported("to make the call")
        raise WeftError(f"this world is closed: {self.closed}; make a new one with {self.maker}")

    def check_process(self) -> None:
        """Raise `WeftError` in a forked child, which inherits the memory of its parent's worlds
        without their threads.
        """
        if self.forked:
            raise WeftError(
                f"this world {self._of_parent()}: a forked child makes its own world, or none; "
                "call from the parent, or start children by spawn, as "
                'DataLoader(multiprocessing_context="spawn") does'
            )

    def disown(self) -> None:
        """Close the world in a forked child."""
        self.forked = True
        self.closed = f"it {self._of_parent()}"

    def _of_parent(self) -> str:
        return f"belongs to process {self.placement.pids[self.placement.rank]}"

    def fail(
        self,
        error: BaseException,
        culprit: int | None = None,
        in_background: bool = False,
        for_good: bool = False,
    ) -> WeftError:
        """Close the world because of `error`, notify all peers, and return it; from a thread
        `in_background` the next call raises it. A rank that leaves `for_good` says so.
        """
        first = self.closed is None and not self.forked
        if first:
            self.before(error)
            text = error.how if isinstance(error, PeerLost) else str(error)
            text = text.encode(errors="replace")[:8000].decode(errors="ignore")
            rank = self.placement.rank if culprit is None else culprit
            self.mesh.abort(type(error).__name__, rank, text)
            if for_good:
                self.mesh.leave(for_good)
            self.unreported = in_background
            self.closed = f"{type(error).__name__}: {error}"
            self.failed_at = time.monotonic()
        if self.network is not None and not self.forked:
            # no message may arrive in memory that is returned to the caller, by which the thread
            # that fails first may not have closed the network yet
            self.network.close()
        if first:
            self.recorded = flight.write(self, error, culprit)
            _log.info("world %s has failed: %s", self.identity, self.closed)
        if not (in_background or self.forked):
            details.add(self, error, culprit)
        if self.recorded is not None and isinstance(error, WeftError):
            error.name_record(str(self.recorded))
        return error  # type: ignore[return-value]

    def reject(self, error: BaseException) -> None:
        """Inform peers, once, that this rank rejects its next call because of `error`, before
        anything was sent. Peers that make the call raise `MismatchError` with the error's text,
        unless this rank makes it after all within a second.
        """
        alike = isinstance(error, SymmetricMemoryError)  # all ranks raise it together
        if self.closed is not None or alike or not isinstance(error, Exception):
            return
        if getattr(error, _REPORTED, False):
            return
        setattr(error, _REPORTED, True)
        place = places.here()
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if place:
            why += f", at {place}"
        assert self.executor is not None
        call = self.executor.refuse(why)
        if self.network is not None:
            times = self.executor.times_refused(self.placement.rank, call)
            self.network.announce_refusal(call, times, why)

    def reported(self, doing: str) -> WeftError:
        """The error for a failure that a peer caused or reported while this rank waited `doing`, a
        phrase, or "" if it did not wait.
        """
        self.unreported = False
        kind, culprit, text = self.mesh.failure()
        rank = self.placement.rank
        kind, text = printable(kind), printable_lines(text)
        if kind in ("MismatchError", "PeerTimeout"):
            return self.fail(getattr(errors, kind)(text), culprit)
        if culprit == rank and kind == "SymmetricMemoryError":
            return self.fail(SymmetricMemoryError(f"{text}, and waited {doing}"))
        if culprit == rank:  # another of its threads, or a signal handler
            if kind == "PeerLost":  # to a peer, which noticed first that this rank closes its world
                text = f"rank {rank} {text.rstrip(',')}"
            elif kind != "WeftError":
                text = f"{kind}: {text}"
            return self.fail(WeftError(f"{text}, and waited {doing}"))
        how = f"failed with {kind}: {text},"
        if kind == "PeerLost":
            how = text or "died"
        elif kind == "SystemExit":
            how = f"was ended by sys.exit({text}),"
        return self.lost(culprit, how, doing)

    def lost(self, peer: int, how: str, doing: str) -> WeftError:
        """The error for a lost peer that this rank waited for, `doing` as in `reported`."""
        of = self.placement
        waited = f"waited {doing}" if doing else "was not waiting"
        message = (
            f"{of.name_of(peer)} {how} while rank {of.rank} {waited}"
            f"{self._also('Connection closed by peer')}"
        )
        return self.fail(PeerLost(message, how, of.pids[peer] * of.hosts.here(peer)), peer)

    def timed_out(self, doing: str, late: int, why: str, seconds: float) -> WeftError:
        """The error for a wait of so many `seconds` because rank `late` has not done something, the
        phrase `why`.
        """
        of = self.placement
        longer = "if it needs longer, give a larger timeout="
        if late in self.returned:
            advice = "it has returned from local.run, in which all ranks must make the same calls"
        elif of.pids[late] == of.pids[of.rank]:
            advice = f"it is a thread of this process; {longer}"
        else:
            advice = f"py-spy dump --pid {of.pids[late]} shows where it is; {longer}"
            if self.network is not None and late in self.network.addresses:
                address = self.network.addresses[late]
                advice = f"is its host, {address}, or the network down? There {advice}"
        return self.fail(
            PeerTimeout(
                f"rank {of.rank} waited {seconds:g} s {doing}: {of.name_of(late)} {why}; "
                f"{advice}{self.also_timed_out(seconds)}"
            )
        )

    def also_timed_out(self, seconds: float) -> str:
        """As `_also`, of a time limit; torch's own tests look for `timeout` as a word."""
        return self._also(f"timed out after a timeout of {seconds:g} s")

    def _also(self, words: str) -> str:
        """The end of a message of a process group of torch.distributed: `words` of gloo's, by which
        frameworks recognise an error that another group survives.
        """
        return f" ({words})" if self.group_name else ""

    def mismatch(self, number: int, call: str, peer: int, theirs: str) -> WeftError:
        """The error for a `call` of this rank, its call of that `number`, where a peer makes
        another.
        """
        assert self.executor is not None
        rank = self.placement.rank
        # the rejection that a peer has noticed explains more than the call that this rank made
        # after it
        if self.executor.times_refused(rank, number) and self.mesh.failure()[0]:
            return self.reported("to make it")
        return self.fail(MismatchError.between(number, rank, call, peer, printable_lines(theirs)))

    def rejected(self, call: str, peer: int) -> WeftError:
        """The error for a `call` of this rank that a peer rejects."""
        assert self.executor is not None
        theirs = printable(self.executor.reason_of_refusal(peer))
        return self.fail(MismatchError.rejected(self.placement.rank, call, peer, theirs), peer)

    def keep_place(self, peer: int, note: str) -> bool:
        """Whether a note has the place of a peer in the user's program, which is kept then."""
        if not note.startswith(details.PLACE):
            return False
        self.places[peer] = printable(note.removeprefix(details.PLACE))
        return True

    def dissolve(self) -> None:
        """Break reference cycles, so that the world's threads, files and memory are freed with the
        program's last reference, not by a later garbage collection.
        """
        self.keeps = None
        self.fail_on_error = self.report_rejection = contextlib.nullcontext()
        if self.network is not None:
            self.network.fail = lambda error, culprit: None
