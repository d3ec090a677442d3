"""Connections to ranks on other hosts, made when a call first has messages between them.

Of two ranks the higher one invites the lower, which connects: it listens at an address of its own,
tells it by a letter, and closes it once all that it has invited are connected. A lower rank that is
the first to need a connection asks for an invitation. Nothing here waits: the relay's thread calls
what is ready, and calls that need the connection wait with their own time limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from weft.errors import SymmetricMemoryError, WeftError
from weft.world.listener import Address, Inbound, Listener, Outbound
from weft.world.wire import decode, encode

_WISH, _INVITATION = b"w", b"i"
"""The first bytes of messages: of the wish for an invitation, and of an invitation, which the
address follows.
"""
Ready = dict[int, tuple[int, Callable[[int], object]]]
"""For each descriptor that is to be polled the events, and what to call with those that occur."""


class Links:
    """The connections that `rank` is making to peers, ranks on other hosts. `here` is the address
    of this host, `send` sends a message to one, `made` takes the descriptor of its connection,
    `failed` the error if there is none, and the rank that caused it.
    """

    def __init__(
        self,
        rank: int,
        here: str,
        send: Callable[[int, bytes], None],
        made: Callable[[int, int], None],
        failed: Callable[[int, WeftError], None],
    ) -> None:
        self._rank = rank
        self._here = here
        self._send = send
        self._made = made
        self._failed = failed
        self._begun = set[int]()  # peers to which there is a connection, or will be
        self._invited: tuple[Listener, Inbound] | None = None
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

    def takes(self, message: bytes) -> bool:
        """Whether a message is for `process`."""
        return message[:1] in (_WISH, _INVITATION)

    def _invite(self, peer: int) -> None:
        if peer in self._begun:
            return
        self._begun.add(peer)
        with self._naming(peer):
            if self._invited is None:
                listener = Listener(self._here)
                self._invited = listener, Inbound(self._rank, listener, set())
            listener, inbound = self._invited
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
            self._connecting.pop(peer).close()
            self._failed(peer, error)

    def _advance(self, peer: int) -> None:
        """Go on with a connection that this rank opens."""
        outbound = self._connecting[peer]
        outbound.advance()
        if outbound.connected:
            del self._connecting[peer]
            outbound.end_proof()
            self._made(peer, outbound.socket.detach())

    def _accept(self, events: int) -> None:
        """Go on with connections that others open."""
        if self._invited is None:  # closed since it was ready
            return
        _, inbound = self._invited
        with self._naming(min(inbound.peers)):
            inbound.accept()
        for peer, connection in inbound.identified.items():
            inbound.peers.discard(peer)
            self._made(peer, connection.detach())
        inbound.identified.clear()
        if not inbound.peers:
            self._close_invitations()

    def _close_invitations(self) -> None:
        if self._invited is not None:
            listener, inbound = self._invited
            inbound.drop_unidentified()
            listener.close()
            self._invited = None

    def ready(self) -> Ready:
        """What is to be polled now."""
        found: Ready = {}
        if self._invited is not None:
            for descriptor, events in self._invited[1].polled():
                found[descriptor] = events, self._accept
        for peer, outbound in self._connecting.items():
            for descriptor, events in outbound.polled():
                found[descriptor] = events, partial(self._go_on, peer)
        return found

    def _go_on(self, peer: int, events: int) -> None:
        if peer in self._connecting:
            with self._naming(peer):
                self._advance(peer)

    def close(self) -> None:
        """Close what is not connected yet."""
        self._close_invitations()
        for each in self._connecting.values():
            each.close()
        self._connecting.clear()
