"""Point-to-point messages between ranks of a host: send and receive, with tags and from any source,
over symmetric memory.

Every rank has a mailbox for each peer: a ring of slots in which the peer puts its messages piece by
piece. Two counters for each mailbox hold the pieces put and the pieces taken, and a doorbell
counter is raised with either. A message with a waiting receive of its tag is copied from the
mailbox to its destination; an unexpected one is buffered, which happens only while this rank
receives something else from its sender. So a send is done once all of it is in the peer's mailbox,
which is at once for short messages.

A thread that waits for a message moves all messages of the rank, for all threads; the progress
thread does if none waits soon.

On two bound ranks messages are 1.2 to 30 times as fast as gloo's, 8 bytes there and back in 55 us,
1 MiB in 0.34 ms (``python benchmarks/messages.py``; figures are in docs/performance.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import weft._native as _native
from weft.errors import PeerTimeout, WeftError
from weft.process_group.collectives import as_bytes
from weft.process_group.work_queue import Progress, Work
from weft.world import World

SLOTS = 4
"""Slots of a mailbox, so that pieces are put while earlier ones are taken.

Measured on a 2-core Zen 4: with two, messages of 64 KiB to 16 MiB take 1.1 to 1.7 times as long,
with eight 1.2 to 3.1 times.
"""
_MAILBOX_BYTES = 2 << 20  # of all mailboxes of a rank, about: a bound of memory
_MIN_SLOT = 4 << 10  # bytes, a page: of many ranks, each needs one at least
_MAX_SLOT = 256 << 10
"""Bytes of the largest slot.

Measured on a 2-core Zen 4: of 64 KiB, messages of 64 KiB to 16 MiB take 1.7 to 2.9 times as long,
of 512 KiB 1.04 to 1.2 times.
"""
_HEADER = 64  # bytes of a slot before its piece: the message's tag and size
_LIVENESS = 0.05  # seconds between checks whether peers are alive


Bytes = npt.NDArray[np.uint8]


class _Operation(NamedTuple):
    """A send with its bytes, or a receive with its destination; its peer may be any (None)."""

    work: Work
    peer: int | None
    tag: int
    data: Bytes


class _Incoming:
    """A message that has arrived in part: for a `receive`, or buffered until there is one."""

    def __init__(self, tag: int, size: int, receive: _Operation | None) -> None:
        self.tag = tag
        self.size = size
        self.receive = receive
        self.arrived = 0
        self.data = (
            receive.data
            if receive is not None and size <= len(receive.data)
            else np.empty(size, np.uint8)
        )

    def add(self, slot: Bytes) -> None:
        """Copy the next piece, which is at the beginning of a slot."""
        piece = slot[: self.size - self.arrived]
        self.data[self.arrived : self.arrived + len(piece)] = piece
        self.arrived += len(piece)

    def deliver(self, receive: _Operation, source: int) -> None:
        """End the receive of this message."""
        receive.work.source = source
        if self.size > len(receive.data):
            receive.work.end(
                ValueError(
                    f"rank {source} sent {self.size} bytes, but the tensor to receive into has "
                    f"{len(receive.data)}"
                )
            )
            return
        if self.data is not receive.data:
            receive.data[: self.size] = self.data
        receive.work.end()


class Messages(Progress):
    """The messages of a rank of `world`; made collectively."""

    def __init__(self, world: World) -> None:
        super().__init__("weft messages", world)
        size = _MAILBOX_BYTES // (SLOTS * world.ranks) // _HEADER * _HEADER
        self.piece = max(_MIN_SLOT, min(_MAX_SLOT, size))  # bytes
        mailboxes = world.empty(world.ranks, SLOTS, self.piece + _HEADER, dtype=torch.uint8)
        # called directly: by `weft.ops.onesided` a short message takes a quarter longer
        self.counters = world.signals(2 * world.ranks + 1, "messages").array
        self.doorbell = 2 * world.ranks  # raised after the counter of a piece
        peers = world.others
        self.inbox = {peer: [_slot(part) for part in mailboxes[peer]] for peer in peers}
        self.outbox = {
            peer: [_slot(part) for part in world.peer(mailboxes, peer)[world.rank]]
            for peer in peers
        }
        self.put = dict.fromkeys(peers, 0)  # pieces
        self.taken = dict.fromkeys(peers, 0)
        self.sending: dict[int, deque[_Operation]] = {peer: deque() for peer in peers}
        self.sent = dict.fromkeys(peers, 0)  # bytes of the first operation of these
        self.receiving: deque[_Operation] = deque()
        self.outstanding = [self.receiving, *self.sending.values()]
        self.incoming: dict[int, _Incoming] = {}
        self.unexpected: dict[int, list[_Incoming]] = {peer: [] for peer in peers}  # complete
        self.changed = threading.Condition()  # guards all state
        self.mover: int | None = None  # the thread that moves messages
        self.awaited: list[Work] = []  # by threads
        self.closed = self.pending = False

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send `tensor`, which must not change until the work is done."""
        self.check()
        work = Work([tensor], self)
        with self.changed:
            self.world.check()
            self.sending[peer].append(_Operation(work, peer, tag, as_bytes(tensor).numpy()))
            self._start_moving()
        return work

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Work:
        """Begin to receive a message of at most the bytes of `tensor`, a contiguous one, from a
        peer or from any (None).
        """
        if not tensor.is_contiguous():
            raise ValueError(
                f"the tensor to receive into must be contiguous; got strides {tensor.stride()}"
            )
        self.check()
        work = Work([tensor], self)
        receive = _Operation(work, source, tag, as_bytes(tensor).numpy())
        with self.changed:
            self.world.check()
            for peer in self.inbox if source is None else (source,):
                for message in self.unexpected[peer]:
                    if message.tag == tag:
                        self._move_to_end(peer)
                        self.unexpected[peer].remove(message)
                        message.deliver(receive, peer)
                        return work
            self.receiving.append(receive)
            self._start_moving()
        return work

    def close(self) -> None:
        """End the threads; outstanding works fail when a thread waits for them."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._wake_mover()
        super().close()

    def _start_moving(self) -> None:
        """Move messages as far as possible without waiting."""
        if self.mover is not None:
            self._wake_mover()
        else:
            self._move()
        self._update_pending()

    def advance(self, work: Work, seconds: float | None) -> None:
        """Move messages until `work` is done, unless another thread does."""
        self.check()
        limit = self.world.timeout if seconds is None else seconds
        deadline = _native.Deadline(limit)
        with self.changed:
            self.awaited.append(work)
            try:
                while not work.done and (left := deadline.left) > 0:
                    if self.closed:
                        self._end_all(
                            WeftError(
                                f"rank {self.world.rank} left the group before the message was "
                                "complete"
                            )
                        )
                    elif self.mover is not None:
                        self.changed.wait(min(left, _LIVENESS))
                    else:
                        self._move_until(lambda: work.done, deadline)
            finally:
                self.awaited.remove(work)
            if not work.done and seconds is None:
                self._time_out(work, limit)
                self._update_pending()

    def run_pending(self) -> None:
        with self.changed:
            if self.mover is not None:
                self.changed.wait()
            elif not self.closed and self.pending:
                self._move_until(
                    lambda: not self._is_pending(), _native.Deadline(self.world.timeout)
                )

    def current_call(self) -> str:
        own = self.changed._is_owned()  # type: ignore[attr-defined]
        return "send or recv" if own or self.mover == threading.get_ident() else ""

    def _update_pending(self) -> None:
        """Inform the progress thread whether there are messages to move."""
        if self.pending == self._is_pending():
            return
        self.pending = not self.pending
        if self.pending:
            self.deferred.issue()
        else:
            self.deferred.begin()

    def _is_pending(self) -> bool:
        return bool(self.incoming) or any(self.outstanding)

    def _move_until(self, enough: Callable[[], bool], deadline: _native.Deadline) -> None:
        """Move messages until `enough` is true, or the deadline has passed. An error ends all
        works; so does an awaited work for a peer that has left.
        """
        self.mover = threading.get_ident()
        status = _native.WaitStatus.none
        try:
            while True:
                rung = self._counter(self.doorbell)
                # read before moving: a peer puts its messages before it leaves
                left = {peer for peer in self.inbox if self.world.mesh.left(peer)}
                if self._move():
                    self.changed.notify_all()
                if enough():
                    return
                # after a move: messages that arrived before a failure are complete
                if status == _native.WaitStatus.failed:
                    raise self.world.failure(f"for {next(self._events())[-1]}")
                if self.closed or (remaining := deadline.left) <= 0:
                    return
                if left:
                    self._check_peers(left)
                self.world.check()
                self.changed.release()
                try:
                    limit = min(remaining, _LIVENESS)
                    status, _, _ = self.counters.wait(
                        self.doorbell, 1, 1, _native.Compare.greater, rung, limit
                    )
                finally:
                    self.changed.acquire()
        except WeftError as error:
            self._end_all(error)
        except BaseException as error:  # an interrupt, perhaps in the middle of a message
            self._end_all(self.world.fail(error))
            raise
        finally:
            self.mover = None
            self._update_pending()
            self.changed.notify_all()

    def _move(self) -> bool:
        """Move all pieces that can be moved now; whether there was one."""
        moved = False
        for peer, queue in self.sending.items():
            while queue and self._put_piece(peer, queue):
                moved = True
        while [peer for peer in [*self.inbox] if self._take_piece(peer)]:
            moved = True
        return moved

    def _put_piece(self, peer: int, queue: deque[_Operation]) -> bool:
        """Put the next piece of the first message for `peer` into its mailbox, unless that is
        full.
        """
        work, _, tag, data = queue[0]
        offset = self.sent[peer]
        if self.put[peer] - self._counter(self.world.ranks + peer) == SLOTS:
            return False
        header, slot = self.outbox[peer][self.put[peer] % SLOTS]
        if offset == 0:
            header[:] = tag, len(data)
        piece = data[offset : offset + self.piece]
        slot[: len(piece)] = piece
        if not self._raise_counter(peer, self.world.rank):
            return False
        self.put[peer] += 1
        self.sent[peer] = offset + len(piece)
        if self.sent[peer] == len(data):
            self.sent[peer] = 0
            queue.popleft()
            work.end()
        return True

    def _take_piece(self, peer: int) -> bool:
        """Take the next piece from `peer`'s mailbox, if there is one and a receive may need it."""
        message = self.incoming.get(peer)
        if message is None and not any(each.peer in (peer, None) for each in self.receiving):
            return False
        if self._counter(peer) == self.taken[peer]:
            return False
        header, slot = self.inbox[peer][self.taken[peer] % SLOTS]
        if message is None:
            self._move_to_end(peer)
            tag, size = header.tolist()
            message = self.incoming[peer] = _Incoming(tag, size, self._match(peer, tag))
        message.add(slot)
        self.taken[peer] += 1
        # no error if it fails: a message that arrived before a failure is delivered
        self._raise_counter(peer, self.world.ranks + self.world.rank)
        if message.arrived == message.size:
            del self.incoming[peer]
            # a receive may have been posted after the first piece
            message.receive = message.receive or self._match(peer, message.tag)
            if message.receive is None:
                self.unexpected[peer].append(message)
            else:
                message.deliver(message.receive, peer)
        return True

    def _move_to_end(self, peer: int) -> None:
        """Give the other peers priority in the next receive from any source."""
        self.inbox[peer] = self.inbox.pop(peer)

    def _counter(self, index: int) -> int:
        """The value of a counter of this rank."""
        return self.counters.values(index, 1, 1)[0]

    def _raise_counter(self, peer: int, counter: int) -> bool:
        """Raise a counter of `peer`, then its doorbell; false if the world has failed."""
        return self.counters.add(peer, counter, 2, self.doorbell - counter, 1)

    def _wake_mover(self) -> None:
        """Wake the moving thread. It detects a failure of the world itself."""
        self.counters.add(self.world.rank, self.doorbell, 1, 1, 1)

    def _match(self, peer: int, tag: int) -> _Operation | None:
        """Remove and return the first receive that matches a message of this tag from `peer`."""
        for receive in self.receiving:
            if receive.peer in (peer, None) and receive.tag == tag:
                self.receiving.remove(receive)
                return receive
        return None

    def _time_out(self, work: Work, seconds: float) -> None:
        """End a work after its time limit; a message that was moved in part closes the world."""
        moved = self._moved()
        operation = self._operation(work)
        error = PeerTimeout(
            f"rank {self.world.rank} waited {seconds:g} s for {self._describe(operation)}; check "
            "that the peer makes the call with this tag, or give the group a longer timeout"
            f"{self.world.also_timed_out(seconds)}"
        )
        if operation in moved:
            self._end_all(self.world.fail(error))
        else:
            next(queue for queue in self.outstanding if operation in queue).remove(operation)
            work.end(error)

    def _check_peers(self, left: set[int]) -> None:
        """Raise `PeerLost` if the peer of an awaited work has left, or all peers have."""
        all_left = left.issuperset(self.inbox)
        for awaited, peer, event in self._events():
            if peer is None and all_left:
                peer = min(left)
            if peer in left and (awaited or all_left):
                raise self.world.lost(peer, "closed its world", f"for {event}")

    def _moved(self) -> list[_Operation]:
        """The operations of messages that were moved in part."""
        moved = [queue[0] for peer, queue in self.sending.items() if self.sent[peer]]
        return moved + [message.receive for message in self.incoming.values() if message.receive]

    def _operation(self, work: Work) -> _Operation:
        """The operation of a work that is not done."""
        return next(
            each
            for each in (*self._moved(), *(each for queue in self.outstanding for each in queue))
            if each.work is work
        )

    def _describe(self, operation: _Operation) -> str:
        """A phrase for the event that an operation waits for."""
        peer, tag = operation.peer, operation.tag
        if peer is not None and operation in self.sending[peer]:
            return f"rank {peer} to take a message (tag {tag})"
        return f"a message from {'any rank' if peer is None else f'rank {peer}'} (tag {tag})"

    def _events(self) -> Iterator[tuple[bool, int | None, str]]:
        """The events that this rank waits for: whether a thread waits, the peer, and a phrase."""
        awaited = [self._operation(work) for work in self.awaited if not work.done]
        others = (*self._moved(), *(each for queue in self.outstanding for each in queue))
        for operation in (*awaited, *others):
            yield operation.work in self.awaited, operation.peer, self._describe(operation)
        for peer, message in self.incoming.items():
            yield False, peer, f"the rest of a message from rank {peer} (tag {message.tag})"

    def _end_all(self, error: BaseException) -> None:
        works = [operation.work for queue in self.outstanding for operation in queue]
        works += [message.receive.work for message in self.incoming.values() if message.receive]
        for work in works:
            work.end(error)
        self.incoming.clear()
        for queue in self.outstanding:
            queue.clear()


def _slot(part: Tensor) -> tuple[npt.NDArray[np.int64], Bytes]:
    """A slot's header, two numbers, and its memory for a piece."""
    return part[:16].view(torch.int64).numpy(), part[_HEADER:].numpy()
