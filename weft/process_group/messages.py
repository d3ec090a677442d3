"""Messages between two ranks of a host: send and receive, with tags and from any source, over
symmetric memory.

Every rank has a box for each peer, a few slots in which the peer puts its messages piece by piece;
counters say how many pieces have come and how many have been taken, and a bell is rung with each. A
message that finds a receive of its tag goes to its place straight from the box; one that was not
asked for yet is kept, which happens only while this rank receives something else from its sender.
So a send is over once all of it is in the peer's box, which for short messages is at once.

Whoever waits for a message moves all that can be moved, for all threads; where nobody comes soon, a
thread of its own does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.errors import PeerTimeout, WeftError
from weft.process_group.collectives import as_bytes
from weft.process_group.works import Carrier, Work
from weft.world import World
from weft.world.onesided import notify, wait

SLOTS = 4  # of a box
_BOXES = 2 << 20  # bytes of all boxes of a rank, about
_LEAST, _MOST = 4 << 10, 256 << 10  # bytes of a slot
_HEADER = 64  # bytes before the piece in a slot: the message's tag and its bytes in all
_LOOKS = 0.05  # seconds between looks whether peers are there


Bytes = npt.NDArray[np.uint8]


class _Begun(NamedTuple):
    """A send, with its bytes, or a receive, with their place; the peer may be any (None)."""

    work: Work
    peer: int | None
    tag: int
    data: Bytes


class _Coming:
    """A message of which some has come: for a receive that wants it, or to be kept until it is
    asked for.
    """

    def __init__(self, tag: int, size: int, wanted: _Begun | None) -> None:
        self.tag, self.size, self.wanted, self.got = tag, size, wanted, 0
        self.place = (
            wanted.data
            if wanted is not None and size <= len(wanted.data)
            else np.empty(size, np.uint8)
        )

    def add(self, place: Bytes) -> None:
        """Take the piece that lies at the beginning of a slot."""
        piece = place[: self.size - self.got]
        self.place[self.got : self.got + len(piece)] = piece
        self.got += len(piece)

    def deliver(self, wanted: _Begun, source: int) -> None:
        """End the receive that this message is for."""
        wanted.work.source = source
        if self.size > len(wanted.data):
            wanted.work.end(
                ValueError(
                    f"rank {source} has sent {self.size} bytes, and there is room for "
                    f"{len(wanted.data)}"
                )
            )
            return
        if self.place is not wanted.data:
            wanted.data[: self.size] = self.place
        wanted.work.end()


class Messages(Carrier):
    """The messages of a rank of `world`; made collectively."""

    def __init__(self, world: World) -> None:
        super().__init__("weft messages", world)
        slot = (
            max(_LEAST, min(_MOST, _BOXES // (SLOTS * world.ranks) // _HEADER * _HEADER)) + _HEADER
        )
        boxes = world.empty(world.ranks, SLOTS, slot, dtype=torch.uint8)
        self.room = slot - _HEADER
        self.signals = world.signals(2 * world.ranks + 1, "messages")
        self.bell = 2 * world.ranks  # which is rung after the counter of the piece is raised
        peers = world.others
        self.mine = {
            peer: [_slot(part) for part in boxes[peer]] for peer in peers
        }  # what comes from a peer
        self.theirs = {
            peer: [_slot(part) for part in world.peer(boxes, peer)[world.rank]] for peer in peers
        }
        self.put = dict.fromkeys(peers, 0)  # pieces
        self.taken = dict.fromkeys(peers, 0)
        self.sending: dict[int, deque[_Begun]] = {peer: deque() for peer in peers}
        self.sent = dict.fromkeys(peers, 0)  # bytes of the first of these
        self.receiving: deque[_Begun] = deque()
        self.waiting = [self.receiving, *self.sending.values()]
        self.coming: dict[int, _Coming] = {}
        self.kept: dict[int, list[_Coming]] = {
            peer: [] for peer in peers
        }  # come, and not asked for
        self.changed = threading.Condition()  # guards all of this
        self.mover: int | None = None  # the thread that moves messages, if any does
        self.closed = self.pending = False

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send `tensor`, which must stay as it is until the work is over."""
        self.check()
        work = Work([tensor], self)
        with self.changed:
            self.world.check()
            self.sending[peer].append(_Begun(work, peer, tag, as_bytes(tensor).numpy()))
            self._begun()
        return work

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Work:
        """Begin to receive a message of at most as many bytes as `tensor`, a contiguous one, from a
        peer or (None) from any.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"what is received must be contiguous; got strides {tensor.stride()}")
        self.check()
        work = Work([tensor], self)
        wanted = _Begun(work, source, tag, as_bytes(tensor).numpy())
        with self.changed:
            self.world.check()
            for peer in self.mine if source is None else (source,):
                for message in self.kept[peer]:
                    if message.tag == tag:
                        self._go_last(peer)
                        self.kept[peer].remove(message)
                        message.deliver(wanted, peer)
                        return work
            self.receiving.append(wanted)
            self._begun()
        return work

    def close(self) -> None:
        """End the threads; what was begun and is not over fails for those who wait for it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        with contextlib.suppress(WeftError):
            notify(self.signals, self.bell, self.world.rank)
        super().close()

    def _begun(self) -> None:
        """Move what can be moved at once; the rest is for who waits, or the thread."""
        if self.mover is not None:
            notify(self.signals, self.bell, self.world.rank)  # for who moves to look again
        else:
            self._move()
        self._note()

    def help(self, work: Work, seconds: float | None) -> None:
        """Move messages until `work` is over, unless another thread does."""
        self.check()
        limit = self.world.timeout if seconds is None else seconds
        deadline = time.monotonic() + limit
        with self.changed:
            while not work.over and (left := deadline - time.monotonic()) > 0:
                if self.closed:
                    self._end_all(
                        WeftError(
                            f"rank {self.world.rank} left the group before the message was through"
                        )
                    )
                elif self.mover is not None:
                    self.changed.wait(left)
                else:
                    self._move_on(lambda: work.over, left, work)
            if not work.over and seconds is None:
                self._give_up(work, limit)
                self._note()

    def take_over(self) -> None:
        with self.changed:
            if self.mover is not None:
                self.changed.wait()
            elif not self.closed and self.pending:
                self._move_on(lambda: not self._pending(), self.world.timeout)

    def doing(self) -> str:
        own = self.changed._is_owned()  # type: ignore[attr-defined]
        return "send or recv" if own or self.mover == threading.get_ident() else ""

    def _note(self) -> None:
        """Let the thread know whether there is something to move: what was begun, and what has come
        in part, asked for or not.
        """
        if self.pending == self._pending():
            return
        self.pending = not self.pending
        if self.pending:
            self.backlog.issue()
        else:
            self.backlog.begin()

    def _pending(self) -> bool:
        return bool(self.coming) or any(self.waiting)

    def _move_on(
        self, enough: Callable[[], bool], seconds: float, work: Work | None = None
    ) -> None:
        """Move messages until it is `enough`, or for so many seconds; what goes wrong ends all that
        was begun, as it does if `work` is for a peer that has left.
        """
        self.mover = threading.get_ident()
        deadline = time.monotonic() + seconds
        try:
            while True:
                rung = self.signals[self.bell]
                left = {
                    peer for peer in self.mine if self.world.mesh.left(peer)
                }  # what these have sent is there
                if self._move():
                    self.changed.notify_all()
                if self.closed or enough() or (remaining := deadline - time.monotonic()) <= 0:
                    return
                if left and work is not None and not work.over:
                    self._check_there(work, left)
                self.changed.release()
                try:
                    with contextlib.suppress(PeerTimeout):
                        wait(self.signals, self.bell, ">", cast(int, rung), min(remaining, _LOOKS))
                finally:
                    self.changed.acquire()
        except WeftError as error:
            self._end_all(error)
        except (
            BaseException
        ) as error:  # an interrupt of this thread, perhaps in the middle of a message
            self._end_all(self.world.fail(error))
            raise
        finally:
            self.mover = None
            self._note()
            self.changed.notify_all()

    def _move(self) -> bool:
        """Move all that can be moved now; whether anything could."""
        moved = False
        for peer, queue in self.sending.items():
            while queue and self._put_piece(peer, queue):
                moved = True
        while [peer for peer in [*self.mine] if self._take_piece(peer)]:
            moved = True
        return moved

    def _put_piece(self, peer: int, queue: deque[_Begun]) -> bool:
        """Put the next piece of the first message for `peer` into its box, if there is room."""
        (work, _, tag, data), at = queue[0], self.sent[peer]
        if self.put[peer] - cast(int, self.signals[self.world.ranks + peer]) == SLOTS:
            return False
        header, place = self.theirs[peer][self.put[peer] % SLOTS]
        if at == 0:
            header[:] = tag, len(data)
        piece = data[at : at + self.room]
        place[: len(piece)] = piece
        self.put[peer] += 1
        self._tell(peer, self.world.rank)
        self.sent[peer] = at + len(piece)
        if self.sent[peer] == len(data):
            self.sent[peer] = 0
            queue.popleft()
            work.end()
        return True

    def _take_piece(self, peer: int) -> bool:
        """Take the next piece from the box that `peer` fills, if there is one and this rank wants
        something from there.
        """
        message = self.coming.get(peer)
        if message is None and not any(wanted.peer in (peer, None) for wanted in self.receiving):
            return False
        if self.signals[peer] == self.taken[peer]:
            return False
        header, place = self.mine[peer][self.taken[peer] % SLOTS]
        if message is None:
            self._go_last(peer)
            tag, size = header.tolist()
            message = self.coming[peer] = _Coming(tag, size, self._wanted(peer, tag))
        message.add(place)
        self.taken[peer] += 1
        self._tell(peer, self.world.ranks + self.world.rank)
        if message.got == message.size:
            del self.coming[peer]
            message.wanted = message.wanted or self._wanted(
                peer, message.tag
            )  # it may have been asked for meanwhile
            if message.wanted is None:
                self.kept[peer].append(message)
            else:
                message.deliver(message.wanted, peer)
        return True

    def _go_last(self, peer: int) -> None:
        """Let the other peers come first next time, where any may come."""
        self.mine[peer] = self.mine.pop(peer)

    def _tell(self, peer: int, counter: int) -> None:
        """Raise a counter of `peer`, then its bell."""
        notify(self.signals, slice(counter, self.bell + 1, self.bell - counter), peer)

    def _wanted(self, peer: int, tag: int) -> _Begun | None:
        """The first receive that a message of this tag from `peer` is for, which is then no longer
        looked for.
        """
        for wanted in self.receiving:
            if wanted.peer in (peer, None) and wanted.tag == tag:
                self.receiving.remove(wanted)
                return wanted
        return None

    def _give_up(self, work: Work, seconds: float) -> None:
        """End a work that has taken too long; one of which some has been moved takes the world with
        it.
        """
        moved, begun = self._moved(), self._found(work)
        error = PeerTimeout(
            f"rank {self.world.rank} waited {seconds:g} s for {self._words(begun)}; its timeout is "
            "over: see that the peer makes "
            "the call with this tag, or give the group a longer timeout"
        )
        if begun in moved:
            self._end_all(self.world.fail(error))
        else:
            next(queue for queue in self.waiting if begun in queue).remove(begun)
            work.end(error)

    def _check_there(self, work: Work, left: set[int]) -> None:
        """Raise `PeerLost` if a work is for a peer that has left, or for any when all have."""
        begun = self._found(work)
        peer = (
            begun.peer
            if begun.peer is not None
            else min(left)
            if left.issuperset(self.mine)
            else None
        )
        if peer in left:
            raise self.world.lost(peer, "closed its world", f"for {self._words(begun)}")

    def _moved(self) -> list[_Begun]:
        """What is under way of which some has been moved."""
        moved = [queue[0] for peer, queue in self.sending.items() if self.sent[peer]]
        return moved + [message.wanted for message in self.coming.values() if message.wanted]

    def _found(self, work: Work) -> _Begun:
        """What a work that is not over is of."""
        return next(
            each
            for each in (*self._moved(), *(each for queue in self.waiting for each in queue))
            if each.work is work
        )

    def _words(self, begun: _Begun) -> str:
        """What who has begun this waits for."""
        if begun.peer is not None and begun in self.sending[begun.peer]:
            return f"rank {begun.peer} to take a message (tag {begun.tag})"
        return f"a message from {'any rank' if begun.peer is None else f'rank {begun.peer}'} (tag {begun.tag})"

    def _end_all(self, error: BaseException) -> None:
        works = [begun.work for queue in self.waiting for begun in queue]
        works += [message.wanted.work for message in self.coming.values() if message.wanted]
        for work in works:
            work.end(error)
        self.coming.clear()
        for queue in self.waiting:
            queue.clear()


def _slot(part: Tensor) -> tuple[npt.NDArray[np.int64], Bytes]:
    """A slot's header, two numbers, and the place for a piece."""
    return part[:16].view(torch.int64).numpy(), part[_HEADER:].numpy()
