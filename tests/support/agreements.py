"""Many courses of the agreement on who goes on: the ranks run `weft.world.agreement` as it is, over a
network, a clock and deaths that a seed decides, in one thread.

Each rank is a greenlet, which goes on with the others wherever it would wait. A message arrives at any later
time, or not before a partition heals; a host's firewall drops or refuses; a rank dies, is suspended for a
while, or comes late. A world that was decided is made if all of its ranks adopt the decision.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

from greenlet import getcurrent, greenlet

from weft.errors import Excluded, PeerTimeout
from weft.world import agreement, talk
from weft.world.agreement import Agreement
from weft.world.door import Handle
from weft.world.listener import Address
from weft.world.membership import Membership
from weft.world.rendezvous import RankInfo

LIMIT = 20.0
"""The time limit of a rank that shrinks, in the seconds of the clock."""


@dataclass
class Door:
    """The door of rank `number`; `decision` is what a kept door answers."""

    number: int
    host: int
    open: bool = True
    waiting: list = field(default_factory=list)  # connections
    decision: object = None

    @property
    def handle(self) -> Handle:
        here = Address(f"door {self.number}", 0, bytes([self.number]) * 16)
        outside = Address(f"door {self.number}", 1, bytes([self.number]) * 16)
        cores = frozenset[int]()
        return Handle(RankInfo(self.number, f"host {self.host}", here, cores, 1), outside)

    @property
    def listeners(self) -> list:
        return [self]


class Connection:
    """A connection between the doors of two processes: what is under way in each direction."""

    def __init__(self, course: Course, caller: int, called: Door) -> None:
        self.course, self.hosts = course, (course.hosts[caller], called.host)
        self.called = called
        self.accepted = False
        self.ended = False
        self.ways: tuple[list, list] = ([], [])  # to the called one, to the caller

    def arrived(self, way: int) -> list:
        """Some of what is under way."""
        if self.course.between(*self.hosts) != "open":
            return []
        messages = self.ways[way]
        at = self.course.random.randint(0, len(messages))
        found, messages[:at] = messages[:at], []
        return found


class Call:
    """As `weft.world.talk.Call`."""

    def __init__(self, address: Address) -> None:
        self.course = getcurrent().course
        self.own = getcurrent().number
        self.door = self.course.doors[int(address.host.split()[1])]
        self.here = not address.port
        self.connected = self.gone = self.answered = self.ended = False
        self.again = 0.0
        self.link: Connection | None = None

    def advance(self) -> bool:
        if self.connected or self.ended:
            return False
        course = self.course
        way = "open" if self.here else course.between(course.hosts[self.own], self.door.host)
        if self.link is None and way == "open" and self.door.open:
            self.link = Connection(course, self.own, self.door)
            self.door.waiting.append(self.link)
        elif self.link is None and (way == "refuses" or (way == "open" and not self.door.open)):
            self.ended = True
            self.gone = self.here or course.believes_refusals
            self.again = course.now + 0.1
        if self.link is not None and self.link.accepted:
            self.connected = True
        self._look()
        return self.connected

    def _look(self) -> None:
        if self.link is not None and (self.link.ended or not self.door.open):
            if self.here and not self.door.open:
                self.gone = self.ended = True
            elif self.link.ended and not self.link.ways[1]:
                self.ended = True

    def send(self, message: object) -> None:
        if self.link is not None:
            self.link.ways[0].append(message)

    def answers(self) -> list:
        found = self.link.arrived(1) if self.link is not None and self.connected else []
        self.answered = self.answered or bool(found)
        self._look()
        return found

    def polled(self) -> list:
        return []

    def close(self) -> None:
        if self.link is not None:
            self.link.ended = True


class Visitor:
    """As `weft.world.talk.Visitor`."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.ended = False
        self.request = None

    def hear(self) -> bool:
        found = self.link.arrived(0)
        if found:
            self.request = found[-1]
        self.ended = self.ended or self.link.ended
        return bool(found) and not self.ended

    def send(self, message: object) -> None:
        self.link.ways[1].append(message)

    def close(self) -> None:
        self.link.ended = True


class Visitors:
    """As `weft.world.talk.Visitors`."""

    def __init__(self, listeners: list, ranks: int = 0) -> None:
        [self.door] = listeners
        self.all: list[Visitor] = []

    def hear(self) -> list[Visitor]:
        for link in self.door.waiting:
            link.accepted = True
            self.all.append(Visitor(link))
        self.door.waiting.clear()
        found = [each for each in self.all if each.hear()]
        self.all = [each for each in self.all if not each.ended]
        return found

    def polled(self) -> list:
        return []

    def close(self) -> None:
        for each in self.all:
            each.close()


class Course:
    """One course of events among ranks on these `hosts`, decided by a seed. `made` has the ranks of each
    world that was made in place of the first, `beside` those of a world that was made while a rank of
    another one lived.
    """

    def __init__(self, hosts: list[int], seed: int, believes_refusals: bool = False) -> None:
        self.random = random.Random(seed)
        self.hosts = hosts
        self.believes_refusals = believes_refusals
        self.now = 0.0
        self.ways: dict[frozenset[int], str] = {}
        self.doors = {rank: Door(rank, host) for rank, host in enumerate(hosts)}
        self.made: list[list[int]] = []
        self.beside: list[list[int]] = []
        self.said: dict[int, object] = {}  # how each rank ended
        self.adopted: dict[int, object] = {}
        self.suspended: dict[int, float] = {}
        handles = [door.handle for door in self.doors.values()]
        self.ranks: dict[int, greenlet] = {}
        for rank in self.doors:
            each = greenlet(self._shrink)
            each.course, each.number = self, rank
            self.ranks[rank] = each
        self.memberships = {
            rank: Membership.of_made("first", rank, handles, door)
            for rank, door in self.doors.items()
        }

    def between(self, one: int, other: int) -> str:
        return "open" if one == other else self.ways.get(frozenset((one, other)), "open")

    def run(self) -> Course:
        """The course, at whose end all ranks have gone on, stopped or died."""
        clock = SimpleNamespace(monotonic=lambda: self.now)
        with (
            mock.patch.multiple(
                agreement,
                Call=Call,
                Visitors=Visitors,
                poll=lambda polled, seconds: getcurrent().parent.switch(),
                time=clock,
            ),
            mock.patch.object(agreement._native, "Deadline", self._deadline),
        ):
            self._begin()
            while True:
                alive = [rank for rank, each in self.ranks.items() if not each.dead]
                if not alive:
                    return self
                self._event(alive)
                awake = [
                    rank
                    for rank in alive
                    if not self.ranks[rank].dead and self.suspended.get(rank, 0) <= self.now
                ]
                if awake:
                    self.ranks[self.random.choice(awake)].switch()
                self.now += self.random.choice((0.001, 0.01, 0.1))

    def _deadline(self, seconds: float) -> object:
        until = self.now + seconds
        course = self

        class Deadline:
            passed = property(lambda self: course.now > until)

        return Deadline()

    def _begin(self) -> None:
        """Losses at the beginning: some ranks have died, come late, or are cut off."""
        for rank in self.doors:
            fate = self.random.random()
            if fate < 0.25:
                self._die(rank)
            elif fate < 0.4:
                self.suspended[rank] = self.now + self.random.choice((1.0, 30.0, 70.0))
        self._change_network(0.5)

    def _event(self, alive: list[int]) -> None:
        chance = self.random.random()
        if chance < 0.0005:
            self._die(self.random.choice(alive))
        elif chance < 0.001:
            self.suspended[self.random.choice(alive)] = self.now + self.random.choice((1.0, 50.0))
        elif chance < 0.002:
            self._change_network(0.3)

    def _change_network(self, chance: float) -> None:
        numbers = sorted({*self.hosts})
        for one in numbers:
            for other in numbers[:one]:
                bad = self.random.random() < chance
                way = self.random.choice(("drops", "refuses")) if bad else "open"
                self.ways[frozenset((one, other))] = way

    def _die(self, rank: int) -> None:
        self.doors[rank].open = False
        self.ranks[rank] = SimpleNamespace(dead=True)
        self.adopted.pop(rank, None)
        self.said[rank] = "died"

    def _shrink(self) -> None:
        number = getcurrent().number
        membership, door = self.memberships[number], self.doors[number]
        try:
            decision = Agreement(membership, door.handle, 0, LIMIT).run()
        except (PeerTimeout, Excluded) as error:
            door.open = False
            self.said[number] = error
            return
        self.said[number] = decision
        self._make(number, decision)

    def _make(self, number: int, decision: object) -> None:
        """Adopt a decision, and answer by it, until all of its ranks have or the time is over."""
        door, until = self.doors[number], self.now + LIMIT
        door.decision = decision
        self.adopted[number] = decision
        kept = Visitors(door.listeners)
        ranks = [each.info.pid for each in decision.handles]
        while self.now < until:
            for visitor in kept.hear():
                visitor.send(talk.Answer(decision))
            if sorted(ranks) in self.made:
                break
            if all(
                self.adopted.get(each) is decision or self._equal(each, decision) for each in ranks
            ) and all(
                self.between(self.hosts[each], self.hosts[number]) == "open" for each in ranks
            ):
                if any(self.said[each] != "died" for made in self.made for each in made):
                    self.beside.append(sorted(ranks))
                self.made.append(sorted(ranks))
            getcurrent().parent.switch()
        if sorted(ranks) not in self.made:
            door.open = False
            return
        if not decision.doubtful:
            door.open = False
            return
        while self.now < until + 200:  # a door that is kept, while others may come back
            for visitor in kept.hear():
                visitor.send(talk.Answer(decision))
            getcurrent().parent.switch()

    def _equal(self, rank: int, decision: object) -> bool:
        theirs = self.adopted.get(rank)
        return theirs is not None and theirs.name == decision.name
