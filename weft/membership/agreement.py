"""The protocol of `weft.membership` as one rank, or a joiner, executes it."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable, Sequence
from uuid import uuid4

import weft._native as _native
from weft.bootstrap.endpoint import Endpoint, Handle
from weft.bootstrap.listener import PROVING
from weft.bootstrap.opening import poll
from weft.bootstrap.threads import started
from weft.errors import Excluded, MismatchError, PeerLost, PeerTimeout, WeftError
from weft.membership.decision import Decision
from weft.membership.requests import Client, Requester, Requesters
from weft.membership.view import Answer, Ended, Request, View, is_dead, joining
from weft.outside import printable_lines
from weft.version import __version__

_LOOK = 0.05  # seconds between looks at time limits
_FOREVER = 1e6
_UNKNOWN = 0.05  # seconds without an answer after which others are asked about a rank
_SHARED = (PeerTimeout, PeerLost, Excluded, MismatchError, WeftError)
"""The errors that end an attempt on all ranks."""


class _Calls:
    """Calls of this process to the endpoints of `handles`, by rank."""

    def __init__(self, handles: Sequence[Handle], own: Handle) -> None:
        self.handles, self.own = handles, own
        self.addresses = [each.address_from(own.info.host) for each in handles]
        self.users = [each.info.user for each in handles]
        self.open: dict[int, Client] = {}
        self._again: dict[int, float] = {}  # when a rank whose call has ended may be called again

    def call(self, ranks: Iterable[int], request: Request) -> None:
        """Connect, with this request, to every reachable rank of these; close other connections."""
        ranks = {*ranks}
        for rank in {*self.open} - ranks:
            self.open.pop(rank).close()
        for rank in sorted(ranks):
            address = self.addresses[rank]
            if address is None or self._again.get(rank, 0.0) > time.monotonic():
                continue
            if rank not in self.open:
                # this process may have given up that user since
                self.open[rank] = Client(address, self.users[rank])
            call = self.open[rank]
            if call.advance():
                call.send(request)

    def ask_again(self, request: Request) -> None:
        for call in self.open.values():
            if call.connected:
                call.send(request)

    def news(self) -> list[tuple[int, Answer | Ended]]:
        """The answers that have arrived, and the ends of calls, which are dropped, by rank."""
        found = list[tuple[int, Answer | Ended]]()
        for rank, call in [*self.open.items()]:
            found += [(rank, each) for each in call.answers()]
            if call.ended:
                found.append((rank, Ended(call.refused)))
                self._again[rank] = call.again
                self.open.pop(rank).close()
        return found

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
    """One rank's part in the agreement on the next world: `view` is what it knows."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.calls = _Calls(view.membership.handles, view.own)
        self.requesters = Requesters(
            view.membership.endpoint.listeners, len(view.membership.handles)
        )
        self.joining: tuple[Handle, ...] = ()
        self.patience = _native.Deadline(view.timeout)
        self.unanswered = _native.Deadline(_UNKNOWN)
        self._shared: Request | None = None

    def run(self) -> Decision:
        """The decision, which includes this rank.

        Raises `PeerTimeout` if too few take part to continue, or joiners are missing, on all ranks
        that take part; `Excluded` if others have decided without this rank; `MismatchError` if
        ranks expect other numbers of joiners.
        """
        try:
            while True:
                decision = self._answered() or self._step()
                if decision is not None:
                    self._answer_all(Answer(decision))
                    if decision.rank_of(self.view.own) is None:
                        raise left_out(self.view.rank, decision)
                    return decision
                self._wait()
        except WeftError as error:
            self._answer_all(Answer(None, type(error).__name__, str(error)))
            raise
        finally:
            self.calls.close()
            self.requesters.close()

    def _requests(self) -> list[Request]:
        return [requester.request for requester in self.requesters.all if requester.request]

    def _step(self) -> Decision | None:
        """Call the ranks that are due; the decision, if this rank leads and can make it."""
        requests = self.view.taking_part(self._requests())
        view = self.view.waiting(requests, self.unanswered.passed)
        if view.leader != self.view.leader:
            self.patience = _native.Deadline(view.timeout)
            self.unanswered = _native.Deadline(_UNKNOWN)
        self.view = view
        self.calls.call(view.called, view.request(self.joining))
        passed = self.patience.passed
        if view.leader == view.rank:
            return view.decision(requests, self.joining, not passed, uuid4().hex)
        if passed:
            self.view = view.impatient()
            self.patience = _native.Deadline(view.timeout)
        return None

    def _answered(self) -> Decision | None:
        """The decision in an answer that has arrived, if any. Raises the error in it."""
        for rank, news in self.calls.news():
            if isinstance(news, Ended):
                self.view = self.view.after_end(rank, news)
            elif (found := outcome(news)) is not None:
                return found
            else:
                self.view = self.view.after_answer(rank, news)
        return None

    def _wait(self) -> None:
        """Wait until something arrives, for a moment, and process requests."""
        poll([*self.requesters.polled(), *self.calls.polled()], self.calls.patience)
        for requester in self.requesters.requested():
            assert requester.request is not None
            self._process(requester, requester.request)
        self._share()

    def _process(self, requester: Requester, request: Request) -> None:
        if request.version != __version__:
            requester.send(
                Answer(
                    None,
                    "WeftError",
                    f"the others run weft {__version__}, this process "
                    f"{request.version}: install one version for all ranks",
                )
            )
            requester.ended = True
            return
        if not self.view.accepts(request):
            requester.request = None
            return
        self.view = self.view.after_request(request)
        requester.send(self.view.answer())

    def _share(self) -> None:
        """Send all connected ranks what this one has learned."""
        self.joining = joining(self._requests())
        request = self.view.request(self.joining)
        if request != self._shared:
            self._shared = request
            self.calls.ask_again(request)
            self._answer_all(self.view.answer())

    def _answer_all(self, answer: Answer) -> None:
        """Answer all who have asked this rank."""
        for requester in self.requesters.all:
            if requester.request and not requester.ended:
                requester.send(answer)


def outcome(answer: Answer) -> Decision | None:
    """The decision in an answer, if any. Raises the error that ends the attempt."""
    if answer.error:
        kind = next((each for each in _SHARED if each.__name__ == answer.error), WeftError)
        raise kind(printable_lines(answer.text))
    found: Decision | None = answer.decision
    return found


def left_out(rank: int, decision: Decision) -> Excluded:
    """The error of a rank that is alive and not in a decision."""
    return Excluded(
        f"the other ranks continued without rank {rank}, which did not answer in time: ranks "
        f"{[each for each in decision.previous if each >= 0]} of this world are in the next one; a "
        "process that is left out may join it, by weft.join"
    )


def join(handles: Sequence[Handle], own: Handle, timeout: float) -> Decision:
    """The decision that includes this process, which asks the ranks with these handles to join.

    Raises `PeerTimeout` if it is not let in, `PeerLost` if no rank is left, `WeftError` if no
    endpoint can be reached from this host.
    """
    deadline = _native.Deadline(timeout)
    while not deadline.passed:
        with contextlib.closing(_Calls(handles, own)) as calls:
            further = _further(calls, deadline)
        if further is None:
            break
        if further.rank_of(own) is not None:
            return further
        handles = further.handles  # the others continued, and may let it in next
    raise PeerTimeout(
        f"this process waited {timeout:g} s to join: the ranks of the world have not called grow "
        "(give a larger timeout=), or none of those on other hosts is left (take a new "
        "invitation), or a firewall refuses connections to them"
    )


def _further(calls: _Calls, deadline: _native.Deadline) -> Decision | None:
    """The first decision that a rank answers; None if there is none in time."""
    left = {rank for rank, address in enumerate(calls.addresses) if address is not None}
    if not left:
        raise WeftError(
            "no rank of the invitation can be reached from this host: make it on a rank there, or "
            "on one that has an address for other hosts"
        )
    request = Request(__version__, -1, b"", calls.own)
    while not deadline.passed:
        for rank, news in calls.news():
            if isinstance(news, Ended):
                left -= {rank} if is_dead(news, calls.handles[rank], calls.own) else set()
            elif (found := outcome(news)) is not None:
                return found
        if not left:
            raise PeerLost(
                "no rank of the invitation is left: they have ended, or continued in another "
                "world; take an invitation of that one"
            )
        calls.call(left, request)
        poll(calls.polled(), calls.patience)
    return None


class LateResponder:
    """An endpoint at which a thread answers late callers with the `decision` that their ranks
    have made.
    """

    def __init__(self, endpoint: Endpoint, decision: Decision) -> None:
        self.endpoint = endpoint
        self.decision = decision
        self._over = os.eventfd(0)
        self._thread = started(lambda error: None, self._serve)

    def close(self) -> None:
        """Close the endpoint."""
        os.eventfd_write(self._over, 1)
        self._thread.join()
        self.disown()

    def disown(self) -> None:
        """In a forked child: close its copies of the sockets."""
        os.close(self._over)
        self.endpoint.close()

    def _serve(self) -> None:
        requesters = Requesters(self.endpoint.listeners)
        with contextlib.closing(requesters):
            over = self._over, select.POLLIN
            while self._over not in poll([over, *requesters.polled()], PROVING):
                with contextlib.suppress(WeftError):  # no free file: the caller calls again
                    for requester in requesters.requested():
                        requester.send(Answer(self.decision))
                        requester.ended = True
