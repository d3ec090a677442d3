"""The agreement of `weft.world.membership`, carried out by one rank, and the part of a joiner."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from uuid import uuid4

import weft._native as _native
import weft.errors as errors
from weft.errors import Excluded, MismatchError, PeerLost, PeerTimeout, WeftError
from weft.version import __version__
from weft.world.door import Door, Handle
from weft.world.lanes import started
from weft.world.listener import poll
from weft.world.membership import Decision, Membership
from weft.world.talk import Answer, Call, Request, Visitor, accept

_LOOK = 0.05  # seconds between looks at time limits
_RETRY = 0.005  # seconds until a rank whose connection has ended is called again
_FOREVER = 1e6
_HEARD = 1.0  # seconds in which a visitor of a kept door must say what it wants


class _Calls:
    """Calls of this process to the doors of `handles`, by rank: `gone` are those whose doors refuse
    them.
    """

    def __init__(self, handles: Sequence[Handle], own: Handle) -> None:
        self.addresses = [each.address_from(own.info.host) for each in handles]
        self.open: dict[int, Call] = {}
        self.gone: set[int] = set()

    def call(self, ranks: Sequence[int], request: Request) -> None:
        """Have open calls, with this request, to these ranks, as far as there are doors that can be
        reached from here, and to no others.
        """
        for rank in {*self.open} - {*ranks}:
            self.open.pop(rank).close()
        for rank in ranks:
            address = self.addresses[rank]
            if address is None:
                continue
            call = self.open.get(rank) or Call(address)
            self.open[rank] = call
            if call.advance():
                call.request(request)

    def ask_again(self, request: Request) -> None:
        for call in self.open.values():
            if call.connected:
                call.request(request)

    def answers(self) -> list[tuple[int, Answer]]:
        """The answers that have arrived, by rank. Calls that have ended are dropped, and doors that
        refuse are noted.
        """
        found = []
        for rank, call in [*self.open.items()]:
            if call.connected:
                found += [(rank, each) for each in call.answers()]
            if call.gone:
                self.gone.add(rank)
            if call.ended:
                self.open.pop(rank).close()
        return found

    @property
    def to_retry(self) -> bool:
        """Whether a call has ended, so that its rank is to be called again."""
        return any(call.ended for call in self.open.values())

    def polled(self) -> list[tuple[int, int]]:
        return [
            (call.connection.fileno(), select.POLLIN if call.connected else select.POLLOUT)
            for call in self.open.values()
            if not call.ended
        ]

    def close(self) -> None:
        for call in self.open.values():
            call.close()
        self.open.clear()


class Agreement:
    """One rank's part in the agreement on the world after `membership`.

    `own` is its handle in the next world, `joiners` the number of processes that join, `timeout`
    the seconds for which it waits for a rank that is silent.
    """

    def __init__(self, membership: Membership, own: Handle, joiners: int, timeout: float) -> None:
        self.membership = membership
        self.rank = membership.rank
        self.own = own
        self.joiners = joiners
        self.timeout = timeout
        self.calls = _Calls(membership.handles, own)
        self.visitors: list[Visitor] = []
        self.joining: list[Handle] = []
        self.silent: set[int] = set()
        self.leader = -1
        self.patience = _native.Deadline(timeout)

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
            for visitor in self.visitors:
                visitor.close()

    def _others(self) -> list[int]:
        """All other ranks that are not gone."""
        ranks = range(len(self.membership.handles))
        return [rank for rank in ranks if rank != self.rank and rank not in self.calls.gone]

    def _request(self) -> Request:
        return Request(__version__, self.rank, self.own, self.joiners, self.joining)

    def _step(self) -> Decision | None:
        """Call whom there is to call; the decision, if this rank leads and can make it."""
        lower = [rank for rank in self._others() if rank < self.rank]
        heard = [rank for rank in lower if rank not in self.silent]
        leader = min(heard, default=self.rank)
        if leader != self.leader:
            self.leader = leader
            self.patience = _native.Deadline(self.timeout)
        if leader != self.rank:
            # after a silent one all at once, so that the time limit passes once for all of them
            self.calls.call(lower if self.silent else [leader], self._request())
            if self.patience.passed:
                self._end_patience(heard)
            return None
        taking_part = {
            visitor.request.rank: visitor.request
            for visitor in self.visitors
            if visitor.request and visitor.request.rank >= 0
        }
        missing = [rank for rank in self._others() if rank not in taking_part]
        self.calls.call(missing, self._request())
        return self._lead(taking_part, missing)

    def _end_patience(self, heard: Sequence[int]) -> None:
        """Take the leader for silent; if it was alive when it was called, it has had its own time
        limit since, and this rank waits no longer than for another that is silent.
        """
        call = self.calls.open.get(self.leader)
        if call is not None and call.answered:
            call.answered = False
            self.patience = _native.Deadline(self.timeout)
        elif self.silent:
            self.silent.update(
                rank
                for rank in heard
                if not ((call := self.calls.open.get(rank)) and call.answered)
            )
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
            if answer.error:
                raise getattr(errors, answer.error, WeftError)(answer.text)
            if answer.decision is not None:
                found: Decision = answer.decision
                return found
        return None

    def _wait(self) -> None:
        """Wait until something arrives, for a moment, and hear visitors."""
        door = self.membership.door
        sockets = [
            *(listener.socket for listener in door.listeners),
            *(visitor.connection for visitor in self.visitors),
        ]
        waits = [(each.fileno(), select.POLLIN) for each in sockets]
        poll([*waits, *self.calls.polled()], _RETRY if self.calls.to_retry else _LOOK)
        for listener in door.listeners:
            self.visitors += accept(listener)
        for visitor in self.visitors:
            if visitor.hear() and visitor.request:
                self._heard(visitor, visitor.request)
        for visitor in [each for each in self.visitors if each.ended]:
            visitor.close()
            self.visitors.remove(visitor)
        self._note_joining()

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
        if request.rank >= len(self.membership.handles):
            visitor.ended = True
            return
        self.silent.discard(request.rank)
        visitor.send(Answer())

    def _note_joining(self) -> None:
        """Collect those who join, who have called this rank or one that has told it of them."""
        joining = {}
        for request in [visitor.request for visitor in self.visitors if visitor.request]:
            for handle in [request.handle] if request.rank < 0 else request.joining:
                joining[handle.info.address.secret] = handle
        if {*joining} != {each.info.address.secret for each in self.joining}:
            self.joining = [*joining.values()]
            self.calls.ask_again(self._request())

    def _tell(self, answer: Answer) -> None:
        """Answer all who have called this rank."""
        for visitor in self.visitors:
            if not visitor.ended:
                visitor.send(answer)


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
    request = Request(__version__, -1, own, 0, [])
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
                "called grow; give a larger timeout="
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
            if answer.error:
                raise getattr(errors, answer.error, WeftError)(answer.text)
            if answer.decision is not None:
                found: Decision = answer.decision
                return found
        left = reachable - calls.gone
        if not left:
            raise PeerLost(
                "no rank of the invitation is left: they have ended, or went on in another world; "
                "take an invitation of that one"
            )
        calls.call(sorted(left), request)
        poll(calls.polled(), _RETRY if calls.to_retry else _LOOK)
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
        sockets = [self._over, *(each.socket.fileno() for each in self.door.listeners)]
        while self._over not in poll([(each, select.POLLIN) for each in sockets], _FOREVER):
            for visitor in (each for listener in self.door.listeners for each in accept(listener)):
                with contextlib.closing(visitor):
                    self._answer(visitor)

    def _answer(self, visitor: Visitor) -> None:
        deadline = _native.Deadline(_HEARD)
        while not (visitor.hear() or visitor.ended or deadline.passed):
            poll([(visitor.connection.fileno(), select.POLLIN)], _LOOK)
        if visitor.request:
            visitor.send(Answer(self.decision))
