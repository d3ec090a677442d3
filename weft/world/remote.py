"""One-sided calls between hosts, each by a connection between its two ranks.

A call is cut into requests: to put the bytes that follow it, to get some, to change counters. The
thread of the peer's relay carries out a rank's requests in their order, whatever the peer does
meanwhile, and answers each once it is done. Bytes go from the connection directly to their place if
that is contiguous.

A request names memory by the number of the call that made it, which is equal on all ranks, and a
layout in it. The receiver checks both, so no message reads or writes anything but the symmetric
memory of its world. A rank that has no tensor in it any more says so, and keeps its own part until
all ranks on other hosts have said the same.
"""

from __future__ import annotations

import itertools
import math
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

import weft._native as _native
from weft.errors import WeftError
from weft.world.control import Landing

Array = npt.NDArray[Any]
Send = Callable[[int, bytes, memoryview | None], None]
Tell = Callable[[int, bytes], None]
Answers = SimpleQueue[None]
"""An item for each request of a call that is done."""

PIECE = 1 << 18  # bytes that a request moves, at most: a failure waits for one, 2 ms at 1 Gbit/s
_LARGEST_ITEM = 16  # bytes of an element
_COUNTER = 64  # bytes of a counter
_PUT = b"P"
_GET = b"G"
_ADD = b"A"
_SET = b"S"
_DONE = b"D"
_VALUE = b"V"
DROPPED = b"M"
KINDS = frozenset((_PUT, _GET, _ADD, _SET, _DONE, _VALUE, DROPPED))
_HEADER = struct.Struct("<cQQ")  # the kind, the number of a request, and of the memory or of bytes
_LAYOUT = struct.Struct("<QBB")  # the offset, the bytes of an element and the dimensions; then
_SIZES = "<%dQ"  # the size of each and its stride in bytes
_CHANGE = struct.Struct("<QQQQ")  # the first counter, their number, their step, and the value


class StridedLayout(NamedTuple):
    """Elements in the part that a rank has of symmetric memory; offset and strides are in bytes."""

    memory: int  # the number of the call that made it
    offset: int
    item: int  # bytes of an element
    shape: Sequence[int]
    strides: Sequence[int]


class _Outstanding(NamedTuple):
    """A request without an answer: where that goes, and the place of the bytes of a get."""

    answers: Answers
    place: Array | None


class _Held:
    """The part that `rank` has of symmetric memory, and the `peers` that have a tensor in it."""

    def __init__(
        self, rank: int, segment: _native.Segment, part: _native.Mapping, peers: set[int]
    ) -> None:
        self.peers = peers
        self._made: Callable[[], _native.Segment | None] = weakref.ref(segment)
        self._again: _native.Segment | None = None
        self._make = partial(
            _native.Segment,
            cast(Any, [None] * rank + [part]),
            rank,
            segment.world,
            segment.number,
        )

    def segment(self) -> _native.Segment:
        """The segment, made again if this rank has no tensor in it any more."""
        if (made := self._made() or self._again) is None:
            made = self._again = self._make()
        return made


class Remote:
    """The one-sided calls of `rank` to `peers`, ranks on other hosts, and theirs to it, which
    change counters as a rank of `mesh`. `send` sends a message to a peer and the bytes that follow
    it, `tell` one that needs no connection to it, `wake` lets the relay call `report_dropped`.
    """

    def __init__(
        self,
        rank: int,
        mesh: _native.Mesh,
        peers: Iterable[int],
        send: Send,
        tell: Tell,
        wake: Callable[[], None],
    ) -> None:
        self.rank = rank
        self._mesh = mesh
        self.peers = frozenset(peers)
        self._send = send
        self._tell = tell
        self._wake = wake
        self._held: dict[int, _Held] = {}  # by the number of the call that made it
        self._dropped: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._outstanding: dict[int, _Outstanding] = {}
        self._landings: dict[int, Landing] = {}  # of these, the bytes that are arriving
        self._lock = threading.Lock()

    def hold(self, segment: _native.Segment, part: _native.Mapping) -> None:
        """Let peers use this rank's part of a segment, until they have no tensor in it."""
        self._held[segment.number] = _Held(self.rank, segment, part, {*self.peers})
        weakref.finalize(segment, _drop, weakref.ref(self), segment.number).atexit = False

    def drop(self, number: int) -> None:
        """Note that this rank has no tensor in memory any more, on any thread at any place."""
        self._dropped.append(number)
        self._wake()

    def report_dropped(self) -> None:
        """Tell peers in which memory this rank has no tensor any more."""
        while self._dropped:
            number = self._dropped.popleft()
            for peer in self.peers:
                self._tell(peer, _HEADER.pack(DROPPED, 0, number))

    def forget_peer(self, peer: int) -> None:
        """A peer that has left has no tensors any more."""
        for number in [*self._held]:
            self._release(number, peer)

    def _release(self, number: int, peer: int) -> None:
        if held := self._held.get(number):
            held.peers.discard(peer)
            if not held.peers:
                del self._held[number]

    def put(self, peer: int, target: StridedLayout, source: Array, answers: Answers) -> int:
        """Request that a peer fills `target` with `source`, which must not change before the
        answer; the number of the request.
        """
        return self._request(peer, _PUT, target.memory, _packed(target), answers, source=source)

    def get(self, peer: int, source: StridedLayout, place: Array, answers: Answers) -> int:
        """Request a peer's `source`; when it is answered `place` has it."""
        return self._request(peer, _GET, source.memory, _packed(source), answers, place=place)

    def change(
        self,
        peer: int,
        memory: int,
        op: str,
        selection: tuple[int, int, int],
        value: int,
        answers: Answers,
    ) -> int:
        """Request that a peer adds to counters, or sets them: the first, their number and step."""
        kind = _ADD if op == "add" else _SET
        return self._request(peer, kind, memory, _CHANGE.pack(*selection, value), answers)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the answers to these requests: after it no bytes arrive in their places."""
        with self._lock:
            for number in numbers:
                self._outstanding.pop(number, None)
            landings = [self._landings.pop(number, None) for number in numbers]
        for landing in filter(None, landings):
            landing.abandon()

    def abandon(self) -> None:
        """Forget all requests."""
        self.forget([*self._outstanding])

    def close(self) -> None:
        """Release the memory that was held for peers."""
        self._held.clear()

    def process(self, peer: int, message: bytes) -> Landing | None:
        """Carry out a request or take an answer; the place of the bytes that follow the message, if
        any do. Raises `WeftError` if it is not valid.
        """
        try:
            kind, number, about = _HEADER.unpack_from(message)
            rest = message[_HEADER.size :]
            if kind == _VALUE:
                return self._value(number, about)
            if kind in (_PUT, _GET):
                return self._move(peer, kind, number, _unpacked(about, rest))
            if kind in (_ADD, _SET):
                self._change(kind, about, rest)
                self._answer(peer, number)
            elif kind == _DONE:
                self._end(number)
            else:
                self._release(about, peer)
            return None
        except (struct.error, ValueError, OverflowError) as error:
            raise WeftError(f"a one-sided call that is not valid: {error}") from None

    def _request(
        self,
        peer: int,
        kind: bytes,
        memory: int,
        details: bytes,
        answers: Answers,
        source: Array | None = None,
        place: Array | None = None,
    ) -> int:
        number = next(self._numbers)
        self._outstanding[number] = _Outstanding(answers, place)
        payload = None if source is None else _bytes_of(source)
        self._send(peer, _HEADER.pack(kind, number, memory) + details, payload)
        return number

    def _answer(self, peer: int, number: int) -> None:
        self._send(peer, _HEADER.pack(_DONE, number, 0), None)

    def _end(self, number: int) -> None:
        """Note the answer to a request, unless its call has given up."""
        with self._lock:
            found = self._outstanding.pop(number, None)
            self._landings.pop(number, None)
        if found is not None:
            found.answers.put(None)

    def _value(self, number: int, size: int) -> Landing:
        """The place of the bytes that a peer sends for a get."""
        with self._lock:
            found = self._outstanding.get(number)
            place = None if found is None else found.place
            if not 0 < size <= PIECE or (found and (place is None or place.nbytes != size)):
                raise ValueError(f"{size} bytes for request {number}")
            if place is None:
                return Landing(memoryview(bytearray(size)), lambda: None)  # the call gave up
            self._landings[number] = landing = _landing(place, lambda: self._end(number))
        return landing

    def _segment(self, number: int) -> _native.Segment:
        if number not in self._held:
            raise ValueError(f"there is no memory {number}")
        return self._held[number].segment()

    def _change(self, kind: bytes, memory: int, details: bytes) -> None:
        start, count, step, value = _CHANGE.unpack(details)
        segment = self._segment(memory)
        counters = segment.size // _COUNTER
        if count and not (step > 0 and start + (count - 1) * step < counters):
            raise ValueError(f"{count} counters from {start} on, step {step}, of {counters}")
        array = _native.SignalArray(self._mesh, segment, 0)
        (array.add if kind == _ADD else array.set)(self.rank, start, count, step, value)

    def _move(self, peer: int, kind: bytes, number: int, layout: StridedLayout) -> Landing | None:
        """Carry out a put, as far as its bytes have arrived, or a get."""
        size = math.prod(layout.shape) * layout.item
        if not 0 < size <= PIECE:
            raise ValueError(f"{size} bytes at a time")
        place = _elements(self._segment(layout.memory), self.rank, layout)
        if kind == _PUT:
            return _landing(place, lambda: self._answer(peer, number))
        self._send(peer, _HEADER.pack(_VALUE, number, size), _bytes_of(place))
        return None


def _drop(remote: weakref.ref[Remote], number: int) -> None:
    if (found := remote()) is not None:
        found.drop(number)


def _packed(layout: StridedLayout) -> bytes:
    sizes = (*layout.shape, *layout.strides)
    return _LAYOUT.pack(layout.offset, layout.item, len(layout.shape)) + struct.pack(
        _SIZES % len(sizes), *sizes
    )


def _unpacked(memory: int, details: bytes) -> StridedLayout:
    offset, item, dimensions = _LAYOUT.unpack_from(details)
    sizes = struct.unpack(_SIZES % (2 * dimensions), details[_LAYOUT.size :])
    return StridedLayout(memory, offset, item, sizes[:dimensions], sizes[dimensions:])


def _elements(segment: _native.Segment, rank: int, layout: StridedLayout) -> Array:
    """The elements of a layout in a rank's part of a segment. Raises `ValueError` if they are not
    within it.
    """
    last = sum(
        (size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True)
    )
    end = layout.offset + last + layout.item
    if not 0 < layout.item <= _LARGEST_ITEM or end > segment.size:
        raise ValueError(
            f"elements of {layout.item} bytes up to byte {end} of memory of {segment.size}"
        )
    return np.ndarray(
        tuple(layout.shape),
        f"V{layout.item}",
        segment.bytes(rank).numpy(),
        layout.offset,
        tuple(layout.strides),
    )


def _bytes_of(elements: Array) -> memoryview:
    """The bytes of elements, copied if they are not contiguous."""
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data


def _landing(place: Array, done: Callable[[], object]) -> Landing:
    """Bytes that become the elements of `place`."""
    if place.flags.c_contiguous:
        return Landing(_bytes_of(place), done)
    gathered = np.empty(place.shape, place.dtype)

    def scatter() -> None:
        place[...] = gathered
        done()

    return Landing(_bytes_of(gathered), scatter)
