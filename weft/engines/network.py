"""The network engine: ranks on several hosts. What stays on a host is the host engine's; what crosses goes as messages.

It runs what `weft.plan.messages.lower_to_messages` makes of a plan. The lanes that compute and copy within the host are
interpreted by the native core as ever. A channel is interpreted at both of its ends: the sender posts an ``isend`` for each
message, straight from the rows; the receiver, which knows the sender's plan, has posted the ``irecv``, straight into the rows, and
raises the signals that come with it when it is over. Messages of a call have tags of their own: rows never reach a rank that calls
something else.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft import _native
from weft.engines.engine import LANES
from weft.engines.host import HostEngine, HostProgram
from weft.plan import Instruction, Notify, Plan, Region, Wait
from weft.plan.messages import Message, batches, channel, incoming, is_channel, lower_to_messages, target
from weft.schedules.barrier import barrier
from weft.schedules.operators import SHARED_MEMORY_ONLY
from weft.world import World
from weft.world.relay import FOREVER

OUTSTANDING = 8  # messages that are being sent on a channel: enough that the link never waits for Python

_NONE = _native.WaitStatus.none


class NetworkEngine(HostEngine):
    """Executes plans for one rank of a world on several hosts."""

    refused = SHARED_MEMORY_ONLY
    remembers = False  # a call is more than a native one

    def __init__(self, world: World) -> None:
        super().__init__(world)
        assert world.relay is not None
        self.relay = world.relay

    def compile(
        self, plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], call: str | None = None
    ) -> HostProgram:
        return NetworkProgram(self, plan, tensors, dtypes, call)

    def agree(self, call: str) -> None:
        self.compile(barrier(self.world.ranks, "agree"), {}, {}, call).execute(())


class _Rows(NamedTuple):
    """Rows in one of the program's slots; none stand for a token."""

    slot: int
    offset: int
    stride: int
    rows: int
    row_bytes: int

    def tensor(self, base: int) -> Tensor:
        """The rows as bytes in memory, where their buffer begins at `base`; strided where they are."""
        if not self.rows * self.row_bytes:
            return torch.zeros(1, dtype=torch.uint8)
        span = (self.rows - 1) * self.stride + self.row_bytes
        memory = (ctypes.c_uint8 * span).from_address(base + self.offset)
        return torch.frombuffer(memory, dtype=torch.uint8).as_strided((self.rows, self.row_bytes), (self.stride, 1))


_TOKEN = _Rows(0, 0, 0, 0, 0)


class _Sent(NamedTuple):
    """A batch to send: to whom, and for each message its place in its channel and its rows."""

    to: int
    indices: Sequence[int]
    rows: Sequence[_Rows]


class NetworkProgram(HostProgram):
    """A plan compiled for one rank of several hosts."""

    engine: NetworkEngine

    def __init__(
        self,
        engine: NetworkEngine,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        call: str | None = None,
    ) -> None:
        world, rank = engine.world, engine.world.rank
        self.original = plan  # alive as long as this: compiled plans are found by the identity of what was written
        plan = lower_to_messages(plan, world.hosts)
        self.outgoing: dict[str, list[tuple[int, tuple[Wait, list[Message], Notify]]]] = {}  # by the lane that is sent for
        for name in plan.lanes[rank]:
            if is_channel(name):
                lane, to = target(name)
                self.outgoing.setdefault(lane, []).extend((to, batch) for batch in batches(plan, rank, lane, to))
        self.incoming = [
            (sender, lane, [message for _, messages, _ in batches(plan, sender, lane, rank) for message in messages])
            for sender, lane in incoming(plan, rank)
        ]
        self.more_lanes = len(self.outgoing) + len(self.incoming)
        super().__init__(engine, plan, tensors, dtypes, call)
        self.bases = [self._address(slot) for slot in self.slots]
        self.sends: list[tuple[str, list[_Sent]]] = []
        self.receives: list[tuple[int, str, list[_Rows]]] = []
        self._compile_channels()
        self.made: dict[_Rows, Tensor] = {}  # the tensors over rows, while their buffers stay where they are
        self.spans: list[tuple[str, int, int, int]] = []

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        return {name: lane for name, lane in self.plan.lanes[self.world.rank].items() if not is_channel(name)}

    def bind(self, addresses: tuple[tuple[int, int], ...]) -> None:
        if self.bound is not addresses:
            for slot, address in addresses:
                self.bases[slot] = address
            self.made = {}
        super().bind(addresses)

    def begin(self, seconds: float) -> None:
        """Publish the call, post what will come and let what is to go wait for its turn."""
        super().begin(seconds)
        relay, call, digest = self.engine.relay, self.native.call, self.native.digest
        relay.announce(call, digest, self.call)
        self.spans = []
        for number, (sender, lane, rows) in enumerate(self.receives, len(LANES) + len(self.sends)):
            coming = _Receiving(self, number, sender, _tag(call, digest, lane), rows)
            relay.work((sender, lane), call, coming.run)
        for number, (lane, sent) in enumerate(self.sends, len(LANES)):
            going = _Sending(self, number, lane, _tag(call, digest, lane), sent, self.spans)
            relay.work(lane, call, going.run)

    def execute(self, addresses: tuple[tuple[int, int], ...], timeout: float | None = None) -> None:
        world, seconds = self.world, timeout or self.world.timeout
        if self.engine.pending:
            self.engine.settle()
        self.bind(addresses)
        with world.guard:
            self.begin(seconds)
            if world.native.run(self.native, 0, 0) < 0:
                raise self._stopped(0, seconds)
        if world.recorder is not None:
            world.recorder.add(self.plan, self._spans())

    def tensor(self, rows: _Rows) -> Tensor:
        """The memory of these rows in this call."""
        made = self.made.get(rows)
        if made is None:
            made = self.made[rows] = rows.tensor(self.bases[rows.slot] if self.bases else 0)
        return made

    def _spans(self) -> list[tuple[str, int, int, int]]:
        return super()._spans() + self.spans

    def _find_slots(self) -> list[tuple[int, str]]:
        super()._find_slots()
        for region in [
            *(
                message.copy.src
                for sent in self.outgoing.values()
                for _, (_, messages, _) in sent
                for message in messages
                if message.copy
            ),
            *(message.copy.dst for _, _, messages in self.incoming for message in messages if message.copy),
        ]:
            self.slots.setdefault((region.rank, region.buffer), len(self.slots))
        return list(self.slots)

    def _compile_channels(self) -> None:
        native = self.native
        for number, (lane, sent) in enumerate(self.outgoing.items(), len(LANES)):
            several = sorted(sent, key=lambda one: one[1][0].count)  # as the lane comes to them
            for _, (begin, _, end) in several:
                self._compile(number, begin)
                native.pause(number)
                self._compile(number, end)
            self.sends.append(
                (
                    lane,
                    [
                        _Sent(to, [m.index for m in messages], [self._message(m.copy.src if m.copy else None) for m in messages])
                        for to, (_, messages, _) in several
                    ],
                )
            )
        for number, (sender, lane, messages) in enumerate(self.incoming, len(LANES) + len(self.outgoing)):
            for message in messages:
                native.pause(number)
                for notify in message.signals:
                    self._compile(number, notify)
            self.receives.append((sender, lane, [self._message(m.copy.dst if m.copy else None) for m in messages]))

    def _message(self, region: Region | None) -> _Rows:
        if region is None:
            return _TOKEN
        geometry = self.geometry[region.buffer]
        return _Rows(*self._operand(region), region.rows, geometry.columns * geometry.dtype.itemsize)


class _Sending:
    """The sending of what one lane of one call has for other hosts."""

    def __init__(
        self,
        program: NetworkProgram,
        number: int,
        lane: str,
        tag: int,
        batches: list[_Sent],
        spans: list[tuple[str, int, int, int]],
    ) -> None:
        self.program, self.number, self.lane, self.tag, self.batches, self.spans = program, number, lane, tag, batches, spans
        self.tensors = [[program.tensor(rows) for rows in batch.rows] for batch in batches]

    def run(self) -> None:
        at = self.advance(0)
        for batch, tensors in zip(self.batches, self.tensors, strict=True):
            if at < 0:
                return
            with self.program.engine.relay.hung_up(batch.to):  # who has wants nothing more, and the relay tells who misses it
                self.send(batch, tensors)
            at = self.advance(at + 1)

    def send(self, batch: _Sent, tensors: Sequence[Tensor]) -> None:
        relay, name = self.program.engine.relay, channel(self.lane, batch.to)
        under_way: deque[tuple[dist.Work, Tensor, int, int]] = deque()

        def finish() -> None:
            work, _, index, begun = under_way.popleft()
            work.wait(FOREVER)
            self.spans.append((name, index, begun, _native.now()))

        for index, tensor in zip(batch.indices, tensors, strict=True):
            rows, begun = tensor.contiguous(), _native.now()
            under_way.append((relay.send(rows, batch.to, self.tag), rows, index, begun))
            if len(under_way) == OUTSTANDING:
                finish()
        while under_way:
            finish()

    def advance(self, at: int) -> int:
        """Wait for the next batch's turn; -1 if there will be none. That the lane is still computing is no reason to give up."""
        native, compiled = self.program.world.native, self.program.native
        while True:
            reached = native.run(compiled, self.number, at)
            status, stopped, *_ = compiled.wait_failure(self.number)
            if reached >= 0 or status != _native.WaitStatus.timeout or self.program.world.closed is not None:
                return reached
            at = stopped


class _Receiving:
    """The receiving of what one lane of one rank has for this rank in one call.

    All is asked for at once: gloo sends nothing before it was, and a later request would wait behind the rows going the other way.
    """

    def __init__(self, program: NetworkProgram, number: int, sender: int, tag: int, messages: Sequence[_Rows]) -> None:
        self.program, self.number, self.sender, self.tag = program, number, sender, tag
        self.tensors = [program.tensor(rows) for rows in messages]

    def run(self) -> None:
        relay, program = self.program.engine.relay, self.program
        coming: list[tuple[dist.Work, Tensor, Tensor]] = []
        with relay.hung_up(self.sender):  # the relay notices too, and tells the world
            at = program.world.native.run(program.native, self.number, 0)
            for tensor in self.tensors:
                rows = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
                coming.append((relay.receive(rows, self.sender, self.tag), rows, tensor))
            for work, rows, tensor in coming:
                work.wait(FOREVER)
                if rows is not tensor:
                    tensor.copy_(rows)
                at = program.world.native.run(program.native, self.number, at + 1)


def _tag(call: int, digest: int, lane: str) -> int:
    """The tag of a lane's messages in a call, alike on ranks that make the same call; 0 and 2**31 - 1 are the relay's."""
    return 1 + zlib.crc32(f"{call} {digest} {lane}".encode()) % 0x7FFFFFFD
