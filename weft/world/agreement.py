"""The agreement of `weft.world.membership`, carried out by one rank, and the part of a joiner."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection, Iterable, Sequence
from uuid import uuid4

import weft._native as _native
from weft.errors import Excluded, MismatchError, PeerLost, PeerTimeout, WeftError
from weft.outside import printable_lines
from weft.version import __version__
from weft.world.door import Door, Handle
from weft.world.lanes import started
from weft.world.listener import PROVING, poll
from weft.world.membership import Decision, Membership
from weft.world.talk import Answer, Call, Request, Visitor, Visitors

_LOOK = 0.05  # seconds between looks at time limits
_FOREVER = 1e6
_UNKNOWN = 0.05  # seconds without an answer after which others are asked about a rank
_TOLD = (PeerTimeout, PeerLost, Excluded, MismatchError, WeftError)
"""The errors that end an attempt on all ranks."""


class _Calls:
    """Calls of this process to the doors of `handles`, by rank: `gone` are those of this host that
    have ended, or have closed their doors, `hung_up` those whose latest call has ended.
    """

    def __init__(self, handles: Sequence[Handle], own: Handle) -> None:
        self.addresses = [each.address_from(own.info.host) for each in handles]
        self.users = [each.info.user for each in handles]
        self.open: dict[int, Call] = {}
        self.gone: set[int] = set()
        self.hung_up: set[int] = set()
        self._again: dict[int, float] = {}  # when a rank whose call has ended may be called again

    def call(self, ranks: Iterable[int], request: Request) -> None:
        """Have open calls, with this request, to these ranks, as far as there are doors that can be
        reached from here, and to no others.
        """
        ranks = {*ranks}
        for rank in {*self.open} - ranks:
            self.open.pop(rank).close()
        for rank in sorted(ranks):
            address = self.addresses[rank]
            if address is None or self._again.get(rank, 0.0) > time.monotonic():
                continue
            if rank not in self.open:
                # this process may have given up that user since
                self.open[rank] = Call(address, self.users[rank])
            call = self.open[rank]
            if call.advance():
                call.send(request)

    def ask_again(self, request: Request) -> None:
        for call in self.open.values():
            if call.connected:
                call.send(request)

    def answers(self) -> list[tuple[int, Answer]]:
        """The answers that have arrived, by rank. Calls that have ended are dropped, and ranks that
        are gone are noted.
        """
        found = []
        for rank, call in [*self.open.items()]:
            found += [(rank, each) for each in call.answers()]
            if call.gone:
                self.gone.add(rank)
            if call.answered:
                self.hung_up.discard(rank)
            if call.ended:
                self.hung_up.add(rank)
                self._again[rank] = call.again
                self.open.pop(rank).close()
        return found

    def answered(self, rank: int) -> bool:
        call = self.open.get(rank)
        return call is not None and call.answered

    @property
    def patience(self) -> float:
        """The seconds until a rank may be called again, or at most until the next look."""
        if any(call.ended for call in self.open.values()):
            return 0.0
        soonest = min(self._again.values(), default=_FOREVER) - time.monotonic()
        for rank in [rank for rank, at in self._again.items() if at <= time.monotonic()]:
            del self._again[rank]
        return min(_LOOK, max(0.001, soonest))

    def polled(self) -> list[tuple[int, int]]:
        return [each for call in self.open.values() for each in call.polled()]

    def close(self) -> None:
        for call in self.open.values():
            call.close()
        self.open.clear()


class Agreement:
    """One rank's part in the agreement on the world after `membership`.

    `own` is its handle in the next world, `joiners` the number of processes that join, `timeout`
    the seconds for which it waits for a rank that is silent, `left` the ranks that have said that
    they leave for good.
    """

    def __init__(
        self,
        membership: Membership,
        own: Handle,
        joiners: int,
        timeout: float,
        left: Collection[int] = (),
    ) -> None:
        self.membership = membership
        self.rank = membership.rank
        self.own = own
        self.joiners = joiners
        self.timeout = timeout
        self.hosts = [each.info.host for each in membership.handles]
        self.calls = _Calls(membership.handles, own)
        self.gone = {*left}
        self.visitors = Visitors(membership.door.listeners, len(membership.handles))
        self.joining: list[Handle] = []
        self.silent: set[int] = set()
        self.unknown: set[int] = set()  # ranks elsewhere that this one waits for in vain
        self.asked: set[int] = set()  # ranks of this host that others wait for in vain
        self.leader = -1
        self.patience = _native.Deadline(timeout)
        self.unanswered = _native.Deadline(_UNKNOWN)
        self._shared: object = ([], [], [])

    def run(self) -> Decision:
        """The decision, which includes this rank.

        Raises `PeerTimeout` if too few take part to go on, or joiners are missing, on all ranks
        that take part; `Excluded` if others have decided without this rank; `MismatchError` if
        ranks expect other numbers of joiners.
        """
        try:
            while True:
                decision = self._answered() or self._step()
                if decision is not None:
                    self._tell(Answer(decision))
                    if decision.rank_of(self.own) is None:
                        raise left_out(self.rank, decision)
                    return decision
                self._wait()
        except WeftError as error:
            self._tell(Answer(None, type(error).__name__, str(error)))
            raise
        finally:
            self.calls.close()
            self.visitors.close()

    def _others(self) -> list[int]:
        """All other ranks that are not gone."""
        ranks = range(len(self.hosts))
        return [rank for rank in ranks if rank != self.rank and rank not in self.gone]

    def _request(self) -> Request:
        return Request(
            __version__,
            self.rank,
            self.own,
            self.joiners,
            self.joining,
            sorted(self.gone),
            sorted(self.unknown),
        )

    def _answer(self) -> Answer:
        return Answer(gone=tuple(sorted(self.gone)), unknown=tuple(sorted(self.unknown)))

    def _step(self) -> Decision | None:
        """Call whom there is to call; the decision, if this rank leads and can make it."""
        lower = [rank for rank in self._others() if rank < self.rank]
        heard = [rank for rank in lower if rank not in self.silent]
        leader = min(heard, default=self.rank)
        if leader != self.leader:
            self.leader = leader
            self.patience = _native.Deadline(self.timeout)
            self.unanswered = _native.Deadline(_UNKNOWN)
        if leader != self.rank:
            # after a silent one all at once, so that the time limit passes once for all of them
            self._call(lower if self.silent else [leader])
            if self.patience.passed:
                self._end_patience(heard)
            return None
        taking_part = {
            visitor.request.rank: visitor.request
            for visitor in self.visitors.all
            if visitor.request and visitor.request.rank >= 0
        }
        missing = [rank for rank in self._others() if rank not in taking_part]
        self._call(missing)
        return self._lead(taking_part, missing)

    def _call(self, awaited: list[int]) -> None:
        """Call the ranks that this one waits for. Of those of other hosts that do not answer, ask
        ranks beside them, which find out whether they are gone; do so for others.
        """
        here = self.hosts[self.rank]
        awaited_in_vain = {*awaited} if self.unanswered.passed else self.calls.hung_up & {*awaited}
        self.unknown = {
            rank
            for rank in awaited_in_vain
            if self.hosts[rank] != here and not self.calls.answered(rank)
        }
        beside = {self.hosts[rank] for rank in self.unknown}
        others = [rank for rank in self._others() if self.hosts[rank] in beside]
        self.calls.call({*awaited, *others, *(self.asked - self.gone)}, self._request())

    def _end_patience(self, heard: Sequence[int]) -> None:
        """Take the leader for silent; if it was alive when it was called, it has had its own time
        limit since, and this rank waits no longer than for another that is silent.
        """
        if self.calls.answered(self.leader):
            self.calls.open[self.leader].answered = False
            self.patience = _native.Deadline(self.timeout)
        elif self.silent:
            self.silent.update(rank for rank in heard if not self.calls.answered(rank))
        else:
            self.silent.add(self.leader)

    def _lead(self, taking_part: dict[int, Request], missing: list[int]) -> Decision | None:
        members = {self.rank: self.own} | {
            rank: request.handle for rank, request in taking_part.items()
        }
        made = self.membership.made
        for rank, request in taking_part.items():
            if made[rank] >= 0 and made[self.rank] >= 0 and request.joiners != self.joiners:
                raise MismatchError(
                    f"the ranks do not make the same call: rank {self.rank} expects "
                    f"{self.joiners} joiners, rank {rank} expects {request.joiners}"
                )
        expected = self.joiners - sum(made[rank] < 0 for rank in members)
        awaited = [rank for rank in missing if rank not in self.silent]
        if (awaited or len(self.joining) < expected) and not self.patience.passed:
            return None
        may_go_on = not (missing or self.membership.doubtful) or self.membership.may_go_on(
            sorted(members)
        )
        if not may_go_on:
            raise PeerTimeout(self._too_few(sorted(members), missing))
        if len(self.joining) < expected:
            raise PeerTimeout(
                f"rank {self.rank} waited {self.timeout:g} s for {expected} to join, of which "
                f"{len(self.joining)} did: start them with weft.join(world.invitation()), or give "
                "a larger timeout="
            )
        return self.membership.next(
            uuid4().hex, members, self.joining[: max(0, expected)], self.joiners, bool(missing)
        )

    def _too_few(self, members: list[int], missing: list[int]) -> str:
        silent = f"ranks {missing} do not answer" if missing else "a rank was silent before"
        return (
            f"rank {self.rank} waited {self.timeout:g} s for all ranks to go on: {silent}, and may "
            f"be alive, while ranks {members} are not more than half of the "
            f"{self.membership.made_ranks} ranks of the world, so they do not go on without them"
        )

    def _answered(self) -> Decision | None:
        """The decision in an answer that has arrived. Raises the error that it has."""
        for rank, answer in self.calls.answers():
            self.silent.discard(rank)
            if (found := outcome(answer)) is not None:
                return found
            self._learn(answer.gone, answer.unknown)
        self._learn(self.calls.gone, ())
        return None

    def _learn(self, gone: Iterable[int], unknown: Iterable[int]) -> None:
        """Note ranks that others know to be gone, or that they wait for in vain."""
        known = range(len(self.hosts))
        self.gone.update(rank for rank in gone if rank in known and rank != self.rank)
        here = self.hosts[self.rank]
        self.asked.update(
            rank
            for rank in unknown
            if rank in known and rank != self.rank and self.hosts[rank] == here
        )

    def _wait(self) -> None:
        """Wait until something arrives, for a moment, and hear visitors."""
        poll([*self.visitors.polled(), *self.calls.polled()], self.calls.patience)
        for visitor in self.visitors.hear():
            assert visitor.request is not None
            self._heard(visitor, visitor.request)
        self._share()

    def _heard(self, visitor: Visitor, request: Request) -> None:
        if request.version != __version__:
            visitor.send(
                Answer(
                    None,
                    "WeftError",
                    f"the others run weft {__version__}, this process "
                    f"{request.version}: install one version for all ranks",
                )
            )
            visitor.ended = True
            return
        if request.rank >= len(self.hosts) or request.rank == self.rank:
            visitor.ended = True
            return
        self.silent.discard(request.rank)
        self.gone.discard(request.rank)
        self._learn(request.gone, request.unknown)
        visitor.send(self._answer())

    def _share(self) -> None:
        """Tell those with whom this rank is connected what it has learned: who joins, by calling
        this rank or one that has told it of them, and who is gone.
        """
        joining = {}
        for request in [visitor.request for visitor in self.visitors.all if visitor.request]:
            for handle in [request.handle] if request.rank < 0 else request.joining:
                joining[handle.info.address.secret] = handle
        self.joining = [*joining.values()]
        known = sorted(joining), sorted(self.gone), sorted(self.unknown)
        if known != self._shared:
            self._shared = known
            self.calls.ask_again(self._request())
            self._tell(self._answer())

    def _tell(self, answer: Answer) -> None:
        """Answer all who have called this rank."""
        for visitor in self.visitors.all:
            if not visitor.ended:
                visitor.send(answer)


def outcome(answer: Answer) -> Decision | None:
    """The decision of an answer, if it has one. Raises the error that ends the attempt."""
    if answer.error:
        kind = next((each for each in _TOLD if each.__name__ == answer.error), WeftError)
        raise kind(printable_lines(answer.text))
    found: Decision | None = answer.decision
    return found


def left_out(rank: int, decision: Decision) -> Excluded:
    """The error of a rank that is alive and not in a decision."""
    return Excluded(
        f"the other ranks went on without rank {rank}, which did not answer in time: ranks "
        f"{[each for each in decision.previous if each >= 0]} of this world are in the next one; a "
        "process that is left out may join it, by weft.join"
    )


def join(handles: Sequence[Handle], own: Handle, timeout: float) -> Decision:
    """The decision that includes this process, which asks the ranks with these handles to join.

    Raises `PeerTimeout` if it is not let in, `PeerLost` if no rank is left, `WeftError` if no door
    can be reached from this host.
    """
    deadline = _native.Deadline(timeout)
    request = Request(__version__, -1, own, 0, [], [], [])
    while True:
        calls = _Calls(handles, own)
        reachable = {rank for rank, address in enumerate(calls.addresses) if address is not None}
        if not reachable:
            raise WeftError(
                "no rank of the invitation can be reached from this host: make it on a rank there, "
                "or on one that has an address for other hosts"
            )
        with contextlib.closing(calls):
            further = _further(calls, reachable, request, deadline)
        if further is None:
            raise PeerTimeout(
                f"this process waited {timeout:g} s to join: the ranks of the world have not "
                "called grow (give a larger timeout=), or none of those on other hosts is left "
                "(take a new invitation), or a firewall refuses connections to them"
            )
        if further.rank_of(own) is not None:
            return further
        handles = further.handles  # the others went on, and may let it in next


def _further(
    calls: _Calls, reachable: set[int], request: Request, deadline: _native.Deadline
) -> Decision | None:
    """The first decision that a rank answers; None if there is none in time."""
    while not deadline.passed:
        for _, answer in calls.answers():
            if (found := outcome(answer)) is not None:
                return found
        left = reachable - calls.gone
        if not left:
            raise PeerLost(
                "no rank of the invitation is left: they have ended, or went on in another world; "
                "take an invitation of that one"
            )
        calls.call(left, request)
        poll(calls.polled(), calls.patience)
    return None


class Kept:
    """A door at which a thread tells late callers of the `decision` that their ranks have made."""

    def __init__(self, door: Door, decision: Decision) -> None:
        self.door = door
        self.decision = decision
        self._over = os.eventfd(0)
        self._thread = started(lambda error: None, self._serve)

    def close(self) -> None:
        """Close the door."""
        os.eventfd_write(self._over, 1)
        self._thread.join()
        self.disown()

    def disown(self) -> None:
        """In a forked child: close its copies of the sockets."""
        os.close(self._over)
        self.door.close()

    def _serve(self) -> None:
        visitors = Visitors(self.door.listeners)
        with contextlib.closing(visitors):
            over = self._over, select.POLLIN
            while self._over not in poll([over, *visitors.polled()], PROVING):
                with contextlib.suppress(WeftError):  # no free file: the caller calls again
                    for visitor in visitors.hear():
                        visitor.send(Answer(self.decision))
                        visitor.ended = True
