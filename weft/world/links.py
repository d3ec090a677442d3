"""Connections for rows to ranks on other hosts, made when a call first has messages between them.

Of two ranks the higher one invites the lower, which connects: it listens at an address of its own,
tells it by control, and closes it once all that it has invited are connected. A lower rank that is
the first to need a connection asks for an invitation. Nothing here waits: the relay's thread calls
what is ready, and calls that need the connection wait with their own time limit.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from weft.errors import SymmetricMemoryError, WeftError
from weft.world.listener import Address, Inbound, Listener, Outbound
from weft.world.wire import decode, encode

_WISH = b"w"  # for an invitation
_INVITATION = b"i"  # and the address
Ready = dict[int, tuple[int, Callable[[], None]]]
"""For each descriptor that is to be polled the events, and what to call then."""
KINDS = frozenset((_WISH, _INVITATION))


class Links:
    """The connections that `rank` is making to peers, ranks on other hosts. `here` has the address
    of this host for each of them, `send` sends a message to one, `made` takes the descriptor of its
    connection, `failed` the error if there is none, and the rank that caused it. `surplus`
    connections are closed once their peers have done so: a peer that has not accepted all yet would
    take this rank for lost.
    """

    def __init__(
        self,
        rank: int,
        here: Mapping[int, str],
        surplus: dict[int, socket.socket],
        send: Callable[[int, bytes], None],
        made: Callable[[int, int], None],
        failed: Callable[[int, WeftError], None],
    ) -> None:
        self._rank = rank
        self._here = here
        self._surplus = surplus
        self._send = send
        self._made = made
        self._failed = failed
        self._begun = set[int]()  # peers to which there is a connection, or will be
        self._invited = dict[str, tuple[Listener, Inbound]]()  # by the address of this host
        self._connecting = dict[int, Outbound]()
        self.pids: list[int] = []

    def need(self, peer: int) -> None:
        """Let a connection to a peer be made, unless it is."""
        if peer < self._rank:
            self._invite(peer)
        elif peer not in self._begun:
            self._send(peer, _WISH)

    def process(self, peer: int, message: bytes) -> None:
        """Process a message of a peer. Raises `WeftError` if it is not valid."""
        try:
            lower = peer < self._rank
            if message == _WISH and lower:
                self._invite(peer)
            elif message[:1] == _INVITATION and not lower and peer not in self._begun:
                self._connect(peer, decode(message[1:], Address))
            else:
                raise ValueError(f"{message[:20]!r}")
        except ValueError as error:
            raise WeftError(f"an invitation that is not valid: {error}") from None

    def _invite(self, peer: int) -> None:
        if peer in self._begun:
            return
        self._begun.add(peer)
        host = self._here[peer]
        with self._naming(peer):
            if host not in self._invited:
                listener = Listener(host)
                self._invited[host] = listener, Inbound(self._rank, listener, set())
            listener, inbound = self._invited[host]
            inbound.peers.add(peer)
            self._send(peer, _INVITATION + encode(listener.address))

    def _connect(self, peer: int, address: Address) -> None:
        self._begun.add(peer)
        with self._naming(peer):
            self._connecting[peer] = Outbound(self._rank, peer, self.pids[peer], address)
            self._advance(peer)

    @contextlib.contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """Report an error as one of the connection to a peer."""
        try:
            yield
        except OSError as error:  # this rank's
            self._failed(
                self._rank,
                SymmetricMemoryError(
                    f"rank {self._rank} cannot connect to rank {peer} on another host: {error}"
                ),
            )
        except WeftError as error:
            self._connecting.pop(peer).socket.close()
            self._failed(peer, error)

    def _advance(self, peer: int) -> None:
        """Go on with a connection that this rank opens."""
        outbound = self._connecting[peer]
        outbound.advance()
        if outbound.connected:
            del self._connecting[peer]
            self._made(peer, outbound.socket.detach())

    def _accept(self, host: str) -> None:
        """Go on with connections that others open."""
        if host not in self._invited:  # closed since it was ready
            return
        listener, inbound = self._invited[host]
        with self._naming(min(inbound.peers)):
            inbound.accept()
        for peer, connection in inbound.identified.items():
            inbound.peers.discard(peer)
            self._made(peer, connection.detach())
        inbound.identified.clear()
        if not inbound.peers:
            inbound.drop_unidentified()
            listener.close()
            del self._invited[host]

    def ready(self) -> Ready:
        """What is to be polled now."""
        found: Ready = {}
        for host, (_, inbound) in self._invited.items():
            for descriptor, events in inbound.polled():
                found[descriptor] = events, partial(self._accept, host)
        for peer, outbound in self._connecting.items():
            descriptor, events = outbound.polled()
            found[descriptor] = events, partial(self._go_on, peer)
        for peer, connection in self._surplus.items():
            found[connection.fileno()] = select.POLLIN, partial(self._drop, peer)
        return found

    def _drop(self, peer: int) -> None:
        self._surplus.pop(peer).close()

    def _go_on(self, peer: int) -> None:
        if peer in self._connecting:
            with self._naming(peer):
                self._advance(peer)

    def close(self) -> None:
        """Close what is not connected yet."""
        for listener, inbound in self._invited.values():
            inbound.drop_unidentified()
            listener.close()
        for connection in (
            *self._surplus.values(),
            *(each.socket for each in self._connecting.values()),
        ):
            connection.close()
        self._invited.clear()
        self._connecting.clear()
        self._surplus.clear()
