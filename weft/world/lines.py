"""Lines between hosts: one TCP connection for every two of them, by which all their ranks exchange
letters: notes, failures, farewells, invitations to connect.

Of each host one rank, the carrier, has the end of a line; ranks of a host share its ends evenly. A
letter goes from its origin to the carrier of its host, over the line, and from the other carrier to
its target, or to all ranks there; between ranks of one host through their mesh. So a rank has few
connections, however many ranks there are.

A carrier that leaves hands its end over to the next rank of its host, as an open file: nothing that
is under way is lost, and the other end does not notice. Which rank is next follows from who has
left, so all ranks of the host know the carrier.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping, Sequence

import weft._native as _native
from weft.errors import WeftError
from weft.world.control import Control, shutdown

ALL = _native.Mesh.all
"""The target of a letter to all ranks of all other hosts."""
_ROUTE = struct.Struct("<ii")  # the origin and the target of a letter
_HOST = struct.Struct("<i")  # of a line that is handed over; what was read of a message follows


def carriers(hosts: Sequence[int], here: int, there: int) -> list[int]:
    """The ranks of host `here` in the order in which they carry its line to host `there`, each once
    those before it have left.
    """
    return _in_turn([rank for rank, host in enumerate(hosts) if host == here], there)


def first_carried(hosts: Sequence[int], rank: int) -> dict[int, int]:
    """The hosts to which a rank carries the line at first, and the rank at the other end."""
    here = hosts[rank]
    ranks: dict[int, list[int]] = {}
    for each, host in enumerate(hosts):
        ranks.setdefault(host, []).append(each)
    return {
        there: _in_turn(theirs, here)[0]
        for there, theirs in ranks.items()
        if there != here and _in_turn(ranks[here], there)[0] == rank
    }


def _in_turn(ranks: list[int], other: int) -> list[int]:
    """The ranks of a host, from another one on for each other host."""
    first = other % len(ranks)
    return ranks[first:] + ranks[:first]


class Lines:
    """The ends of lines that `rank` carries: `connections`, by the host at the other end. The ranks
    of its host are reached by `mesh`; `later` is called when a connection does not take all now.

    Not for two threads at a time.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        mesh: _native.Mesh,
        connections: Mapping[int, socket.socket],
        later: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._hosts = hosts
        self._here = hosts[rank]
        self._orders = dict[tuple[int, int], list[int]]()
        self._mesh = mesh
        self._later = later
        self.connections = {host: Control(each) for host, each in connections.items()}
        # letters to hosts whose line this rank will be handed, and to all, for such a line
        self._held: dict[int, list[tuple[int, int, bytes]]] = {}
        self._for_all: dict[tuple[int, bytes], bytes] = {}

    def send(self, origin: int, target: int, text: bytes) -> None:
        """Send a letter of a rank of this host as far as this rank is concerned: to `ALL` by the
        lines that it carries, to one rank by the line to its host, or to the carrier of that.
        """
        if target == ALL:
            self._for_all.setdefault((origin, text[:1]), text)
            for host in self.connections:
                self._put(host, origin, target, text)
            return
        host = self._hosts[target]
        if host in self.connections:
            self._put(host, origin, target, text)
        elif (carrier := self._carrier(host)) != self._rank:
            self._mesh.pass_on(carrier, origin, target, text)
        elif not self._mesh.left(target):
            self._held.setdefault(host, []).append((origin, target, text))

    def receive(self, host: int) -> bool:
        """Pass on what has arrived from a host; whether there may be more."""
        return self.connections[host].receive(lambda message: self._receive(host, message))

    def holder(self, host: int) -> int | None:
        """The carrier at the other end of a line, None if all ranks of that host have left."""
        order = self._order(host, self._here)
        return next((rank for rank in order if not self._mesh.left(rank)), None)

    def end(self, host: int, expected: bool) -> None:
        """Note that a line has ended, and close it. Unless that is `expected`, since this rank has
        ended its side, all ranks there have left, or the one that carried it has died.
        """
        line = self.connections.pop(host)
        line.ended.set()
        line.connection.close()
        if not expected and (holder := self.holder(host)) is not None:
            self._mesh.disconnected(holder)

    def adopt(self) -> bool:
        """Take the lines that ranks of this host have handed over; whether there are any."""
        adopted = self._mesh.handed_over()
        for text, fd in adopted:
            (host,) = _HOST.unpack_from(text)
            self.connections[host] = Control(socket.socket(fileno=fd), text[_HOST.size :])
            for origin, target, letter in self._held.pop(host, ()):
                self._put(host, origin, target, letter)
            for (origin, _), letter in self._for_all.items():  # once more, if the other knows it
                self._put(host, origin, ALL, letter)
        return bool(adopted)

    def has_heirs(self) -> bool:
        """Whether another rank of this host can carry the lines of this one."""
        return bool(self._heirs(self._here))

    def hand_over(self, deadline: float) -> None:
        """Hand all lines over, and the letters that wait for one, to the ranks that are next."""
        self.adopt()
        for host, line in self.connections.items():
            line.flush(deadline)
            text = _HOST.pack(host) + line.received
            if not self._mesh.hand_over(self._heirs(host), text, line.connection.fileno()):
                shutdown(line.connection, socket.SHUT_RDWR)
        for host, letters in self._held.items():
            for heir in self._heirs(host)[:1]:
                for letter in letters:
                    self._mesh.pass_on(heir, *letter)
        self._held.clear()

    def close(self) -> None:
        """Close this rank's copies of the connections."""
        for line in self.connections.values():
            line.connection.close()

    def _order(self, here: int, there: int) -> list[int]:
        key = here, there
        if key not in self._orders:
            self._orders[key] = carriers(self._hosts, here, there)
        return self._orders[key]

    def _heirs(self, host: int) -> list[int]:
        order = self._order(self._here, host)
        return [rank for rank in order if rank != self._rank and not self._mesh.left(rank)]

    def _carrier(self, host: int) -> int:
        """The rank that carries the line of this host to another, as far as this rank knows."""
        order = self._order(self._here, host)
        return next(rank for rank in order if rank == self._rank or not self._mesh.left(rank))

    def _put(self, host: int, origin: int, target: int, text: bytes) -> None:
        if not self.connections[host].send(_ROUTE.pack(origin, target) + text):
            self._later()

    def _receive(self, host: int, message: bytes) -> None:
        """Pass on a letter. Raises `WeftError` if it is not valid."""
        try:
            origin, target = _ROUTE.unpack_from(message)
        except struct.error:
            raise WeftError(f"a letter of {len(message)} bytes") from None
        text = message[_ROUTE.size :]
        ranks = range(len(self._hosts))
        if (
            origin not in ranks
            or self._hosts[origin] != host
            or not (target == ALL or (target in ranks and self._hosts[target] == self._here))
        ):
            raise WeftError(f"a letter from rank {origin} to rank {target}")
        if target == ALL:
            self._mesh.pass_on(ALL, origin, target, text)
        if target not in (ALL, self._rank):
            self._mesh.pass_on(target, origin, target, text)
        elif not self._mesh.deliver(origin, text):
            raise WeftError(f"unknown message {text[:20]!r}")
