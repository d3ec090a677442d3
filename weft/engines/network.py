"""The network engine, for ranks on several hosts: the host engine within a host, and messages
between hosts.

It runs this rank's part of `weft.plan.messages.lower_to_messages`. The core interprets the lanes
that compute and copy within the host. A channel is interpreted at both ends. Messages are sent
directly from the rows: those of the compute lane by the thread that runs it, which the core pauses
for that, if they are few and need not wait, and else by a thread of the lane. The receiver, which
has the sender's plan, receives each message directly into the rows and raises its signals, once all
notified ranks have begun the call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import weft._native as _native
from weft.engines.host import HostEngine, HostProgram, Place
from weft.engines.program import Dtypes, Tensors, Timed
from weft.engines.ranges import in_range
from weft.errors import WeftError
from weft.plan import Copy, Instruction, Notify, Plan, Region, Wait
from weft.plan.binding import rows_of
from weft.plan.language import ANY_BLOCK, LANES
from weft.plan.messages import (
    Message,
    batches,
    channel,
    gate_ranks,
    incoming,
    is_channel,
    is_receive_gate,
    message_signals,
    part_of_messages,
    target,
)
from weft.schedules.barrier import barrier
from weft.schedules.peers import examples
from weft.world import World
from weft.world.transport import Tag

_YIELDS = 3
"""Yields of a core before the first product, so that the lane and the thread that sends its rows
start.

Measured on two hosts of 2 busy cores, 1 Gbit/s: the first rows of a call leave after 0.03 ms in the
median, without after 6.3 of 36 ms (`weft bench all-gather-matmul --shape 2048x2048x2048`).
"""
_POLL_SECONDS = 0.1  # between a waiting thread's checks whether the world is open


class NetworkEngine(HostEngine):
    """Executes plans for one rank of a world on several hosts."""

    shared_memory = False  # ranks of other hosts are sent messages
    caches_calls = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        assert world.relay is not None
        self.relay = world.relay

    def compile(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
        options: Any,
    ) -> NetworkProgram:
        return NetworkProgram(self, plan, tensors, dtypes)

    def agree(self, call: str) -> None:
        program = self.program(barrier(self.world.levels, "agree"), {})
        program.compiled.set_call_text(call)
        program.run_locked({}, (), {})


class End(NamedTuple):
    """The rows of a message at this end: their place, and another region that has as many rows, if
    they are in slots, which hold any blocks.
    """

    place: Place
    like: Region | None


Batch = tuple[int, list[tuple[int, End | None]]]
"""A batch to send: the receiver, and for each message its number in its channel and its rows, or
None for a token.
"""


class NetworkProgram(HostProgram):
    """A plan compiled for one rank of several hosts."""

    engine: NetworkEngine

    def __init__(self, engine: NetworkEngine, plan: Plan, tensors: Tensors, dtypes: Dtypes) -> None:
        world, rank = engine.world, engine.world.rank
        common = plan.common(examples(world.hosts))
        plan = part_of_messages(plan, world.hosts, rank)
        # by the lane of the rows
        self.outgoing: dict[str, list[tuple[int, tuple[Wait, list[Message], Notify]]]] = {}
        for name in plan.lanes[rank]:
            if is_channel(name):
                lane, to = target(name)
                self.outgoing.setdefault(lane, []).extend(
                    (to, batch) for batch in batches(plan, rank, lane, to)
                )
        self.incoming = [
            (
                sender,
                lane,
                [
                    message
                    for _, messages, _ in batches(plan, sender, lane, rank)
                    for message in messages
                ],
            )
            for sender, lane in incoming(plan, rank)
        ]
        self.posted = {begin.signal for _, (begin, *_) in self.outgoing.get(LANES[0], ())}
        """The signal by which the compute lane posts batches, if it does."""
        self.more_lanes = len(self.outgoing) + len(self.incoming)
        super().__init__(engine, plan, tensors, dtypes, common)
        self.sends: list[tuple[str, list[Batch]]] = []  # by lane
        self.receives: list[tuple[int, str, list[int], list[End | None]]] = []
        """The sender and its lane, the ranks that must have begun the call first, and the rows of
        each message.
        """
        self._compile_channels()
        self.posts = self._posts()
        """The batches of the compute lane by the instruction that posts them, where it pauses."""
        self.departures = Counter(
            to for _, sent in self.sends for to, messages in sent for _ in messages
        )
        self.spans: list[Timed] = []
        self.over = threading.Event()

    def signal_names(self, common: Plan) -> list[str]:
        lanes = {name for lanes in common.lanes for name in lanes}
        return sorted({*super().signal_names(common), *message_signals(lanes)})

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        return {
            name: lane
            for name, lane in self.plan.lanes[self.world.rank].items()
            if not (is_channel(name) or is_receive_gate(name))
        }

    def execute(
        self,
        binding: _native.Binding,
        timeout: float | None = None,
        compute: Callable[[int], None] | None = None,
    ) -> None:
        """Execute once; the first product lets the threads that send begin first. They do not
        interrupt it, and the link would be idle for some milliseconds of it.
        """
        begun = not self.lanes[LANES.index("comm")]

        def run(at: int) -> None:
            nonlocal begun
            if at in self.posts:
                self._post(at)
                return
            if not begun:
                for _ in range(_YIELDS):
                    os.sched_yield()
                begun = True
            assert compute is not None
            compute(at)

        super().execute(binding, timeout, run)

    def start(
        self, binding: _native.Binding, retained: object = None, timeout: float | None = None
    ) -> None:
        """Begin an execution on a thread of its own, which can send."""
        self.timeout, self.retained = timeout or self.world.timeout, retained
        with self.world.fail_on_error, in_range(f"{self.plan.operator}_async"):
            self.apply(binding)
            self.begin(self.timeout)
            self.over.clear()
            self.engine.relay.lanes.submit("started", self._run)
            self.engine.pending.append(self)

    def prepare(self, at: int, *_: object) -> Any:
        """The post of an instruction of a repeated call."""
        return (lambda *_: self._post(at)), [], 0, None, False

    def _run(self) -> None:
        """Run the compute lane of a started execution."""
        try:
            executor, end = self.world.executor, len(self.lanes[0])
            at = executor.run(self.compiled, 0, 0)
            while 0 <= at < end:
                self._post(at)
                at = executor.run(self.compiled, 0, at + 1)
            if at < 0:
                executor.stop(self.compiled)
        finally:
            self.over.set()

    def ended(self, seconds: float) -> bool:
        with in_range("wait"):
            return self.over.wait(seconds)

    def begin(self, seconds: float) -> None:
        """Publish the call, and queue its receives and sends."""
        super().begin(seconds)
        relay, call, digest = self.engine.relay, self.compiled.call, self.compiled.digest
        assert self.bound is not None
        self.spans = []
        arrivals: dict[int, _Arrivals] = {}
        for number, (sender, lane, notified, ends) in enumerate(
            self.receives, len(LANES) + len(self.sends)
        ):
            expected = arrivals.setdefault(sender, _Arrivals(self, call, digest))
            rows = deque(map(self.rows, ends))
            expected.lanes[LANES.index(lane)] = _Incoming(number, notified, rows)
        relay.begin(call, digest, self.bound.call, arrivals, self.departures)
        for number, (lane, sent) in enumerate(self.sends, len(LANES)):
            if lane != LANES[0]:
                tag = Tag(LANES.index(lane), call, digest)
                relay.lanes.submit(lane, partial(self._send, number, lane, sent, tag, self.spans))

    def rows(self, end: End | None) -> _Rows:
        """The rows of a message in this call; zero rows for a token."""
        assert self.bound is not None
        if end is None:
            return _Rows(0, 0, 0, 0)
        _, rows, _, row, stride, address = self.bound.matrix(end.place)
        if end.like is not None:
            rows = rows_of(self.plan, self.bound.rows, end.like)
        return _Rows(address, rows, row, stride)

    def end(self, copy: Copy | None, sent: bool) -> End | None:
        """The rows of a message at the end where they are sent, or received; None for a token."""
        if copy is None:
            return None
        region = copy.src if sent else copy.dst
        slots = ANY_BLOCK in self.plan.numbers(region)
        return End(self.place(region), self.plan.sizing_region(copy) if slots else None)

    def advance(self, number: int, at: int) -> int:
        """Run a native lane to its next pause; -1 if it fails. Timeouts are ignored: the lane may
        wait for the end of a long computation.
        """
        executor, compiled = self.world.executor, self.compiled
        while True:
            reached = executor.run(compiled, number, at)
            status, stopped, *_ = compiled.wait_failure(number)
            if (
                reached >= 0
                or status != _native.WaitStatus.timeout
                or self.world.closed is not None
            ):
                return reached
            at = stopped

    def _send(
        self, number: int, lane: str, sent: list[Batch], tag: Tag, spans: list[Timed]
    ) -> None:
        """Send a lane's messages to other hosts in one call."""
        relay, at = self.engine.relay, self.advance(number, 0)
        for to, messages in sent:
            if at < 0:
                return
            start = _native.now()
            relay.send(to, tag, [self.rows(end).gathered() for _, end in messages])
            stop = _native.now()
            spans += [(channel(lane, to), index, start, stop) for index, _ in messages]
            at = self.advance(number, at + 1)

    def _post(self, at: int) -> None:
        """Send the messages that an instruction of the compute lane posts."""
        number, after, (to, messages) = self.posts[at]
        compiled, spans, start = self.compiled, self.spans, _native.now()

        def done() -> None:
            stop = _native.now()
            spans.extend((channel(LANES[0], to), index, start, stop) for index, _ in messages)
            self.advance(number, after)

        tag = Tag(0, compiled.call, compiled.digest)
        rows = [self.rows(end).gathered() for _, end in messages]
        self.engine.relay.post(LANES[0], to, tag, rows, done)

    def _spans(self) -> list[Timed]:
        return super()._spans() + self.spans

    def regions(self) -> list[Region]:
        sent = (
            message
            for batches in self.outgoing.values()
            for _, (_, messages, _) in batches
            for message in messages
        )
        received = (message for _, _, messages in self.incoming for message in messages)
        found = [*(m.copy.src for m in sent if m.copy), *(m.copy.dst for m in received if m.copy)]
        return [*super().regions(), *found]

    def _compile_channels(self) -> None:
        compiled = self.compiled
        for number, (lane, outgoing) in enumerate(self.outgoing.items(), len(LANES)):
            sent: list[Batch] = []
            # in the order of the lane
            for to, (begin, messages, end) in sorted(outgoing, key=lambda item: item[1][0].count):
                if lane != LANES[0]:
                    self._compile(number, 0, begin)
                compiled.pause(number)
                self._compile(number, 0, end)
                sent.append((to, [(m.index, self.end(m.copy, sent=True)) for m in messages]))
            self.sends.append((lane, sent))
        for number, (sender, lane, messages) in enumerate(
            self.incoming, len(LANES) + len(self.outgoing)
        ):
            for message in messages:
                compiled.pause(number)
                for notify in message.signals:
                    self._compile(number, 0, notify)
            notified = gate_ranks(self.plan, sender, lane, self.world.rank)
            ends = [self.end(m.copy, sent=False) for m in messages]
            self.receives.append((sender, lane, notified, ends))

    def _compile(self, lane: int, at: int, instruction: Instruction) -> None:
        if lane == 0 and self._is_post(instruction):
            self.compiled.pause(0)
        else:
            super()._compile(lane, at, instruction)

    def _is_post(self, instruction: Instruction) -> bool:
        """Whether an instruction of the compute lane posts a batch of messages."""
        return isinstance(instruction, Notify) and instruction.signal in self.posted

    def _posts(self) -> dict[int, tuple[int, int, Batch]]:
        """The posts of the compute lane by the index of the instruction: the native lane that says
        that the batch was sent, the place there, and the batch.
        """
        for number, (lane, sent) in enumerate(self.sends, len(LANES)):
            if lane == LANES[0]:
                indices = [at for at, each in enumerate(self.lanes[0]) if self._is_post(each)]
                return {
                    at: (number, 2 * i + 1, batch)
                    for i, (at, batch) in enumerate(zip(indices, sent, strict=True))
                }
        return {}


class _Rows(NamedTuple):
    """Rows in memory: their address and number, the bytes of a row, and the stride in bytes."""

    address: int
    rows: int
    row: int
    stride: int

    def gathered(self) -> memoryview:
        """The bytes of the rows, copied if they are not contiguous."""
        return np.ascontiguousarray(self._matrix()).reshape(-1).data

    def fill(self, read: Callable[[memoryview], object]) -> None:
        """Fill the rows by one call of `read`."""
        rows = self._matrix()
        buffer = rows if rows.flags.c_contiguous else np.empty(rows.shape, np.uint8)
        read(buffer.reshape(-1).data)
        if buffer is not rows:
            rows[:] = buffer

    def _matrix(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        if not self.rows * self.row:
            return np.empty((self.rows, self.row), np.uint8)
        memory = _view(self.address, (self.rows - 1) * self.stride + self.row, _WRITABLE)
        return np.ndarray((self.rows, self.row), np.uint8, memory, strides=(self.stride, 1))


class _Arrivals:
    """The rows that one rank sends to this rank in one call."""

    def __init__(self, program: NetworkProgram, call: int, digest: int) -> None:
        self.program, self.call, self.digest = program, call, digest
        self.lanes: dict[int, _Incoming] = {}

    def open_gate(self, lane: int) -> bool:
        if (incoming := self.lanes.get(lane)) is None:
            raise WeftError(
                f"rows for lane {lane}, which receives no more rows in call {self.call}"
            )
        world, status = self.program.world, _native.WaitStatus.timeout
        while incoming.notified and status == _native.WaitStatus.timeout:
            if world.closed is not None:
                return False
            status = world.executor.wait_under_way(self.call, incoming.notified, _POLL_SECONDS)
        incoming.notified = ()  # the gate is open from now on
        return status != _native.WaitStatus.failed

    def receive(self, lane: int, size: int, read: Callable[[memoryview], object]) -> bool:
        incoming = self.lanes[lane]
        rows = incoming.rows.popleft()
        if size != rows.rows * rows.row:
            raise WeftError(f"{size} bytes in place of {rows.rows} rows of {rows.row} bytes")
        rows.fill(read)
        incoming.at = self.program.world.executor.run(
            self.program.compiled, incoming.number, incoming.at + 1
        )
        if not incoming.rows:
            del self.lanes[lane]
        return bool(self.lanes)


@dataclass
class _Incoming:
    """The messages of one lane: the native lane that raises their signals, the ranks that must have
    begun the call first, the rows to receive, and the position in the native lane.
    """

    number: int
    notified: Sequence[int]
    rows: deque[_Rows]
    at: int = 0


_view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE
