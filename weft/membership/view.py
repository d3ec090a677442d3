"""A rank's state while ranks agree (`weft.membership`), and its transitions. All are pure
functions: `tests/support/explorer.py` runs them in every order of events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from weft.bootstrap.endpoint import Handle
from weft.errors import MismatchError, PeerTimeout
from weft.membership.decision import Decision, Membership
from weft.version import __version__

_NONE = frozenset[int]()


class Request(NamedTuple):
    """Request to take part in the next world: the rank (-1 for a joiner) and its world (by its
    endpoints), its handle in the next one, the number of joiners it expects, those that have called
    it, the ranks it knows to be dead, and those it waits for in vain.
    """

    version: str
    rank: int
    world: bytes
    handle: Handle
    joiners: int = 0
    joining: tuple[Handle, ...] = ()
    dead: frozenset[int] = _NONE
    unknown: frozenset[int] = _NONE


class Answer(NamedTuple):
    """The answer to a request: a `decision`, or the `error` that ends the attempt, by the name of
    its class and its text; with neither, that the rank is alive, and which ranks it knows to be
    `dead` or `unknown`, as in a `Request`.
    """

    decision: Any = None
    error: str = ""
    text: str = ""
    dead: frozenset[int] = _NONE
    unknown: frozenset[int] = _NONE


class Ended(NamedTuple):
    """The end of a call; `refused` if nothing listens there, or the process has ended."""

    refused: bool


def is_dead(ended: Ended, called: Handle, own: Handle) -> bool:
    """Whether a process is certainly dead, which only the kernel of a shared host can tell: a
    refused connection to another host proves nothing.
    """
    return ended.refused and called.info.host == own.info.host


def joining(requests: Iterable[Request]) -> tuple[Handle, ...]:
    """The joiners, by their own request or named in that of a rank."""
    found = {}
    for request in requests:
        for handle in [request.handle] if request.rank < 0 else request.joining:
            found[handle.info.address.secret] = handle
    return tuple(found.values())


class View(NamedTuple):
    """What a rank knows of the other ranks of `membership`: which are `dead` or `unresponsive`, its
    coordinator (`leader`), the ranks it has `called`, those of them that have `answered`, those
    whose latest call has ended (`hung_up`), those on other hosts that it waits for in vain
    (`unknown`), and those of its host that others wait for in vain (`asked`). `own` is its handle
    in the next world, `joiners` the number of processes that join, `timeout` the seconds it waits
    for an unresponsive rank.
    """

    membership: Membership
    own: Handle
    joiners: int
    timeout: float
    dead: frozenset[int] = _NONE
    leader: int = -1
    unresponsive: frozenset[int] = _NONE
    called: frozenset[int] = _NONE
    answered: frozenset[int] = _NONE
    hung_up: frozenset[int] = _NONE
    unknown: frozenset[int] = _NONE
    asked: frozenset[int] = _NONE

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def others(self) -> list[int]:
        """All other ranks that are not dead."""
        ranks = range(len(self.membership.handles))
        return [rank for rank in ranks if rank != self.rank and rank not in self.dead]

    @property
    def lower(self) -> frozenset[int]:
        return frozenset(rank for rank in self.others if rank < self.rank)

    def on(self, hosts: Collection[str]) -> frozenset[int]:
        """The other ranks on these hosts."""
        each = enumerate(self.membership.handles)
        return frozenset(rank for rank, handle in each if handle.info.host in hosts) - {self.rank}

    def accepts(self, request: Request) -> bool:
        """Whether a request is from a joiner or from another rank of its world."""
        known = request.rank < len(self.membership.handles) and request.rank != self.rank
        return request.rank < 0 or (known and request.world == self.membership.endpoints)

    def request(self, joining: tuple[Handle, ...]) -> Request:
        known = self.joiners, joining, self.dead, self.unknown
        return Request(__version__, self.rank, self.membership.endpoints, self.own, *known)

    def answer(self) -> Answer:
        return Answer(dead=self.dead, unknown=self.unknown)

    def after_request(self, request: Request) -> View:
        unresponsive, dead = self.unresponsive - {request.rank}, self.dead - {request.rank}
        return self._replace(unresponsive=unresponsive, dead=dead)._after(request)

    def after_answer(self, rank: int, answer: Answer) -> View:
        unresponsive, hung_up = self.unresponsive - {rank}, self.hung_up - {rank}
        view = self._replace(
            unresponsive=unresponsive, hung_up=hung_up, answered=self.answered | {rank}
        )
        return view._after(answer)

    def after_end(self, rank: int, ended: Ended) -> View:
        """The view after the call to a rank has ended."""
        dead = {rank} if is_dead(ended, self.membership.handles[rank], self.own) else _NONE
        hung_up, answered = self.hung_up | {rank}, self.answered - {rank}
        return self._replace(dead=self.dead | dead, hung_up=hung_up, answered=answered)

    def _after(self, message: Request | Answer) -> View:
        """The view after a message with ranks that are dead, or that its sender waits for in
        vain.
        """
        dead = message.dead & {*range(len(self.membership.handles))} - {self.rank}
        asked = message.unknown & self.on({self.own.info.host})
        return self._replace(dead=self.dead | dead, asked=self.asked | asked)

    def taking_part(self, requests: Iterable[Request]) -> dict[int, Request]:
        """The requests of ranks that have not died since."""
        return {each.rank: each for each in requests if each.rank in self.others}

    def missing(self, requests: Mapping[int, Request]) -> list[int]:
        return [rank for rank in self.others if rank not in requests]

    def waiting(self, requests: Mapping[int, Request], unanswered: bool) -> View:
        """The view with its coordinator and the ranks to call: those it waits for, and, for those
        on other hosts that do not answer (`unanswered`: for a while), ranks on their hosts, which
        can tell whether they are dead; likewise for ranks that others ask about.
        """
        leader = min(self.lower - self.unresponsive, default=self.rank)
        if leader == self.rank:
            awaited = frozenset(self.missing(requests))
        else:  # after an unresponsive one all at once, so that the time limit passes once for all
            awaited = self.lower if self.unresponsive else frozenset({leader})
        in_vain = awaited if unanswered and leader == self.leader else self.hung_up & awaited
        unknown = in_vain - self.answered - self.on({self.own.info.host})
        beside = self.on({self.membership.handles[rank].info.host for rank in unknown})
        called = (awaited | beside | self.asked) - self.dead
        answered = self.answered & called
        return self._replace(leader=leader, unknown=unknown, called=called, answered=answered)

    def impatient(self) -> View:
        """The view after the time limit: its coordinator is unresponsive. A coordinator that was
        alive when called has reached its own time limit by then, so this rank waits no longer for
        it.
        """
        if self.leader in self.answered:
            return self._replace(answered=self.answered - {self.leader})
        unresponsive = self.lower - self.answered if self.unresponsive else {self.leader}
        return self._replace(unresponsive=self.unresponsive | unresponsive)

    def decision(
        self, requests: Mapping[int, Request], joining: tuple[Handle, ...], patient: bool, name: str
    ) -> Decision | None:
        """The decision, if this rank, the coordinator, can make it. Raises as `Agreement.run`."""
        members = {self.rank: self.own} | {rank: each.handle for rank, each in requests.items()}
        made = self.membership.made
        for rank, request in requests.items():
            if made[rank] >= 0 and made[self.rank] >= 0 and request.joiners != self.joiners:
                raise MismatchError(
                    f"the ranks do not make the same call: rank {self.rank} expects "
                    f"{self.joiners} joiners, rank {rank} expects {request.joiners}"
                )
        missing = self.missing(requests)
        expected = self.joiners - sum(made[rank] < 0 for rank in members)
        if patient and ({*missing} - self.unresponsive or len(joining) < expected):
            return None
        in_doubt = missing or self.membership.doubtful
        if in_doubt and not self.membership.may_continue(sorted(members)):
            raise PeerTimeout(self._too_few(sorted(members), missing))
        if len(joining) < expected:
            raise PeerTimeout(
                f"rank {self.rank} waited {self.timeout:g} s for {expected} to join, of which "
                f"{len(joining)} did: start them with weft.join(world.invitation()), or give "
                "a larger timeout="
            )
        return self.membership.next(
            name, members, joining[: max(0, expected)], self.joiners, bool(missing)
        )

    def _too_few(self, members: list[int], missing: list[int]) -> str:
        why = f"ranks {missing} do not answer" if missing else "a rank was unresponsive before"
        return (
            f"rank {self.rank} waited {self.timeout:g} s for all ranks to continue: {why}, and may "
            f"be alive, while ranks {members} are not more than half of the "
            f"{self.membership.made_ranks} ranks of the world, so they do not continue without them"
        )
