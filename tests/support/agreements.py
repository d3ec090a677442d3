"""Many courses of worlds that follow each other: processes run `weft.membership.renewal` and `.agreement` as
they are, over a network, a clock and deaths that a seed decides, in one thread.

Each process is a greenlet, which continues with the others wherever it would wait. A message arrives at any
later time, or not before a partition heals; firewalls drop or refuse; a process dies, is suspended for a
while, or comes late. A rank has made a world once all of its ranks have come to make it, as far as this
one can see then: so it may be made for some, and not for others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

from greenlet import getcurrent, greenlet

from weft.bootstrap.endpoint import Handle
from weft.bootstrap.listener import Address
from weft.bootstrap.rendezvous import RankInfo
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.membership import agreement, renewal, requests
from weft.membership.decision import Membership

LIMIT = 20.0
"""The time limit of ranks, in the seconds of the clock."""
_EVENTS = 120.0  # seconds in which there are any
_END = 1500.0
_NOTHING = frozenset[int]()


class Endpoint:
    """The endpoint of the process that runs now; `decision` is what it answers once it is kept."""

    def __init__(self, backend: object = None, process: greenlet | None = None) -> None:
        self.process = getcurrent() if process is None else process
        self.course = self.process.course
        self.number = next(self.course.numbers)
        self.course.endpoints[self.number] = self
        self.open = True
        self.waiting: list[Connection] = []
        self.kept: Requesters | None = None
        self.decision: object = None
        secret = self.number.to_bytes(16, "little")
        here, outside = (Address(f"endpoint {self.number}", port, secret) for port in (0, 1))
        info = RankInfo(self.process.number, f"host {self.process.host}", here, _NOTHING, 1)
        self.handle = Handle(info, outside)

    @property
    def listeners(self) -> list[Endpoint]:
        return [self]

    def open_if_possible(self, rank: int) -> None:
        """Processes are on hosts that reach each other."""

    def close(self) -> None:
        self.open = False

    def serve(self) -> None:
        """Answer those who come to a kept endpoint."""
        if self.kept is not None and self.open and self.process.awake:
            for requester in self.kept.requested():
                requester.send(requests.Answer(self.decision))


class LateResponder:
    """As `weft.membership.agreement.LateResponder`; `Course` is its thread."""

    def __init__(self, endpoint: Endpoint, decision: object) -> None:
        self.endpoint = endpoint
        endpoint.kept, endpoint.decision = Requesters([endpoint]), decision

    def close(self) -> None:
        self.endpoint.close()


class Connection:
    """A connection of a process to an endpoint: what is under way in each direction."""

    def __init__(self, caller: greenlet, endpoint: Endpoint) -> None:
        self.course, self.hosts = endpoint.course, (caller.host, endpoint.process.host)
        self.accepted = self.ended = False
        self.ways: tuple[list, list] = ([], [])  # to the endpoint, from it

    def arrived(self, way: int) -> list:
        """Some of what is under way."""
        if self.course.between(*self.hosts) != "open":
            return []
        messages = self.ways[way]
        at = self.course.random.randint(0, len(messages))
        found, messages[:at] = messages[:at], []
        return found


class Client:
    """As `weft.membership.requests.Client`."""

    def __init__(self, address: Address, user: int) -> None:
        self.process = getcurrent()
        self.course = self.process.course
        self.endpoint = self.course.endpoints[int(address.host.split()[1])]
        self.connected = self.refused = self.ended = False
        self.again = 0.0
        self.link: Connection | None = None

    def advance(self) -> bool:
        if self.connected or self.ended:
            return False
        way = self.course.between(self.process.host, self.endpoint.process.host)
        if self.link is None and way == "open" and self.endpoint.open:
            self.link = Connection(self.process, self.endpoint)
            self.endpoint.waiting.append(self.link)
        elif self.link is None and (way == "refuses" or (way == "open" and not self.endpoint.open)):
            self._end(refused=True)
        elif self.link is not None and self.link.accepted:
            self.connected = True
        self._look()
        return self.connected

    def _look(self) -> None:
        here = self.process.host == self.endpoint.process.host
        if self.link is not None and here and not self.endpoint.open:
            self._end(refused=True)
        elif self.link is not None and self.link.ended and not self.link.ways[1]:
            self._end(refused=False)

    def _end(self, refused: bool) -> None:
        self.ended = True
        self.refused = self.refused or refused
        self.again = self.course.now + 0.1

    def send(self, message: object) -> None:
        if self.link is not None:
            self.link.ways[0].append(message)

    def answers(self) -> list:
        found = self.link.arrived(1) if self.link is not None and self.connected else []
        self._look()
        return found

    def polled(self) -> list:
        return []

    def close(self) -> None:
        if self.link is not None:
            self.link.ended = True


class Requester:
    """As `weft.membership.requests.Requester`."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.ended = False
        self.request = None

    def update(self) -> bool:
        found = self.link.arrived(0)
        if found:
            self.request = found[-1]
        self.ended = self.ended or self.link.ended
        return bool(found) and not self.ended

    def send(self, message: object) -> None:
        self.link.ways[1].append(message)

    def close(self) -> None:
        self.link.ended = True


class Requesters:
    """As `weft.membership.requests.Requesters`."""

    def __init__(self, listeners: list[Endpoint], ranks: int = 0) -> None:
        [self.endpoint] = listeners
        self.all: list[Requester] = []

    def requested(self) -> list[Requester]:
        for link in self.endpoint.waiting:
            link.accepted = True
            self.all.append(Requester(link))
        self.endpoint.waiting.clear()
        found = [each for each in self.all if each.update()]
        self.all = [each for each in self.all if not each.ended]
        return found

    def polled(self) -> list:
        return []

    def close(self) -> None:
        for each in self.all:
            each.close()


class World:
    """A world as one of its processes sees it; `key` are the endpoints of all, by which it is the same."""

    def __init__(self, rank: int, handles: list[Handle], endpoint: Endpoint) -> None:
        self.rank, self.handles, self.endpoint = rank, handles, endpoint
        self.key = tuple(int(each.info.address.host.split()[1]) for each in handles)


class Process(greenlet):
    """A process of a course: it makes calls in its world, until it has lost a rank of it."""

    def __init__(self, course: Course, number: int, host: int) -> None:
        super().__init__(self.live)
        self.course, self.number, self.host = course, number, host
        self.suspended = 0.0  # until then
        self.died = False
        self.said = ""
        self.world: World | None = None
        self.membership: Membership | None = None
        self.joins = False

    @property
    def awake(self) -> bool:
        return not self.died and self.suspended <= self.course.now

    @property
    def runs(self) -> bool:
        return self.awake and not self.dead

    def live(self) -> None:
        try:
            if self.joins:
                self.made(
                    *renewal.join(self.course.invitation(), LIMIT, LIMIT, None, self.make)[:1]
                )
            while True:
                if self.world is not None:
                    self.use()
                assert self.membership is not None
                joiners = self.course.joiners if self.world is None else 0
                self.world = None
                world, _ = renewal.renew(
                    self.membership, joiners, LIMIT, None, self.make, self.adopt, ()
                )
                self.made(world)
        except WeftError as error:
            self.said = f"{type(error).__name__}: {error}"
            self.world = None
            for endpoint in self.course.endpoints.values():
                if endpoint.process is self and not endpoint.kept:
                    endpoint.close()

    def adopt(self, membership: Membership) -> None:
        self.membership = membership

    def made(self, world: World) -> None:
        self.world = world
        self.membership = Membership.of_made(
            str(world.key), world.rank, world.handles, world.endpoint
        )

    def use(self) -> None:
        """Return once a rank of the world is lost to this one."""
        assert self.world is not None
        while all(self.course.reaches(self, endpoint) for endpoint in self.world.key):
            getcurrent().parent.switch()
        until = self.course.now + self.course.random.uniform(0, LIMIT)
        while self.course.now < until:
            getcurrent().parent.switch()

    def make(self, known: renewal.Known, endpoint: Endpoint, global_ranks: Sequence[int]) -> World:
        """Make a world of ranks with these handles, or raise."""
        course, world = self.course, World(known.rank, known.handles, endpoint)
        come = course.making.setdefault(world.key, {})
        come[endpoint.number] = "has come"
        until = course.now + LIMIT
        try:
            while True:
                if all(
                    come.get(each) in ("has come", "has made")
                    and course.between(self.host, course.endpoints[each].process.host) == "open"
                    for each in world.key
                ):
                    come[endpoint.number] = "has made"
                    course.change_network(0.2)  # the worst moment: others have not made it
                    return world
                if any(come.get(each) == "failed" for each in world.key):
                    raise PeerLost("it gave up")
                if course.now > until:
                    raise PeerTimeout("some have not come")
                getcurrent().parent.switch()
        finally:
            if come[endpoint.number] != "has made":
                come[endpoint.number] = "failed"


class Course:
    """One course of events among ranks on these `hosts`, and as many `joiners`, decided by a seed.

    `worlds` are those of which all ranks were in it at some time, by their endpoints, `beside` two of them at
    one time.
    """

    def __init__(self, hosts: list[int], seed: int, joiners: int = 0) -> None:
        self.random = random.Random(seed)
        self.joiners = joiners
        self.now = 0.0
        self.numbers = itertools.count()
        self.ways: dict[frozenset[int], str] = {}
        self.endpoints: dict[int, Endpoint] = {}
        self.making: dict[tuple[int, ...], dict[int, str]] = {}
        self.worlds: set[tuple[int, ...]] = set()
        self.beside: list[object] = []
        self.hosts = sorted({*hosts})
        self.processes = [Process(self, number, host) for number, host in enumerate(hosts)]
        endpoints = [Endpoint(process=each) for each in self.processes]
        self.first = [endpoint.handle for endpoint in endpoints]
        for rank, (process, endpoint) in enumerate(zip(self.processes, endpoints, strict=True)):
            process.membership = Membership.of_made("first", rank, self.first, endpoint)
        for number in range(joiners + bool(joiners)):  # one is too many, and comes late
            process = Process(self, len(hosts) + number, self.random.choice(self.hosts))
            process.joins = True
            process.suspended = 10.0 * (number == joiners)
            self.processes.append(process)

    def invitation(self) -> list[Handle]:
        return self.first

    def between(self, one: int, other: int) -> str:
        return "open" if one == other else self.ways.get(frozenset((one, other)), "open")

    def reaches(self, process: Process, endpoint: int) -> bool:
        """Whether a process reaches another one in its world, or one that is making it still."""
        other = self.endpoints[endpoint].process
        assert process.world is not None
        makes = self.making[process.world.key].get(endpoint) == "has come"
        in_it = other.world is not None and other.world.key == process.world.key
        return (
            not other.died and (makes or in_it) and self.between(process.host, other.host) == "open"
        )

    def run(self) -> Course:
        """The course, until nothing changes any more."""
        with (
            mock.patch.multiple(
                agreement,
                Client=Client,
                Requesters=Requesters,
                poll=lambda polled, seconds: getcurrent().parent.switch(),
                time=SimpleNamespace(monotonic=lambda: self.now),
            ),
            mock.patch.multiple(renewal, Endpoint=Endpoint, LateResponder=LateResponder),
            mock.patch.object(agreement._native, "Deadline", self._deadline),
        ):
            self._begin()
            while self.now < _END and not self.beside:
                left = [each for each in self.processes if not (each.dead or each.died)]
                if not left or (self.now > _EVENTS and self._settled(left)):
                    break
                if self.now < _EVENTS:
                    self._event(left)
                if awake := [each for each in left if each.runs]:
                    self.random.choice(awake).switch()
                    self._look()
                for endpoint in self.endpoints.values():
                    endpoint.serve()
                self.now += self.random.choice((0.001, 0.01, 0.1, 0.1))
        return self

    def _settled(self, left: list[Process]) -> bool:
        return all(
            each.world is not None
            and all(self.reaches(each, endpoint) for endpoint in each.world.key)
            for each in left
        )

    def _look(self) -> None:
        """Note the worlds of which all ranks are in it now."""
        held = {each.world.key for each in self.processes if each.world and not each.died}
        whole = [
            key
            for key in held
            if all(
                (process := self.endpoints[endpoint].process).world is not None
                and process.world.key == key
                and not process.died
                for endpoint in key
            )
        ]
        self.worlds.update(whole)
        if len(whole) > 1:
            self.beside = whole

    def _deadline(self, seconds: float) -> object:
        until, course = self.now + seconds, self

        class Deadline:
            passed = property(lambda self: course.now > until)

        return Deadline()

    def _begin(self) -> None:
        """Losses at the beginning: some ranks have died, come late, or are cut off."""
        for each in self.processes:
            fate = self.random.random()
            if fate < 0.12:
                self._die(each)
            elif fate < 0.24 and not each.suspended:
                each.suspended = self.random.choice((1.0, 30.0, 70.0))
        self.change_network(0.25)

    def _event(self, left: list[Process]) -> None:
        chance = self.random.random()
        if chance < 0.0005:
            self._die(self.random.choice(left))
        elif chance < 0.001:
            process = self.random.choice(left)
            process.suspended = self.now + self.random.choice((1.0, 50.0))
        elif chance < 0.003:
            self.change_network(0.3)

    def change_network(self, chance: float) -> None:
        for one, other in itertools.combinations(self.hosts, 2):
            bad = self.random.random() < chance
            way = self.random.choice(("drops", "refuses")) if bad else "open"
            self.ways[frozenset((one, other))] = way

    def _die(self, process: Process) -> None:
        process.died = True
        for endpoint in self.endpoints.values():
            if endpoint.process is process:
                endpoint.close()
