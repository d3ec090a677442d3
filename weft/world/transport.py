"""The interface of a wire between hosts: a `Transport` moves rows and knows nothing of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | memoryview


class Tag(NamedTuple):
    """The label of a message: the sender's lane, the number of the call and its digest."""

    lane: int
    call: int
    digest: int


class Transport(Protocol):
    """Connections that carry rows between this rank and ranks on other hosts.

    Messages of one rank to another arrive complete and in the order in which they were sent. One
    thread at a time sends to a rank, and one receives from it. A method raises `OSError` once the
    connection is broken or `abort` was called.
    """

    def begin(self, rank: int, tag: Tag, messages: Sequence[memoryview]) -> Sequence[Buffer]:
        """Send messages to a rank as far as that does not block; returns the rest, to `finish`."""

    def finish(self, rank: int, rest: Sequence[Buffer]) -> None:
        """Send the rest of messages and return when they may be overwritten. May block until the
        rank receives.
        """

    def poll(self, rank: int) -> tuple[Tag, int] | None:
        """Wait for the next message of a rank; its tag and size in bytes, or None if the rank has
        ended or has closed the connection.
        """

    def receive(self, rank: int, rows: memoryview) -> None:
        """Fill `rows` with the message that `poll` returned last; may be called for consecutive
        parts of it.
        """

    def end(self, rank: int) -> None:
        """Send nothing more to a rank: its `poll` returns None after the messages under way."""

    def abort(self) -> None:
        """End all waits in `finish`, `poll` and `receive`, of other threads too."""

    def close(self) -> None:
        """Release the connections of this process. No thread uses them any more."""
