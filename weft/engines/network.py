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
from weft.engines.host import Binding, HostEngine, HostProgram, Place
from weft.plan import Instruction, Notify, Plan, Region, Wait
from weft.plan.messages import Message, batches, channel, incoming, is_channel, lower_to_messages, target
from weft.schedules.barrier import barrier
from weft.schedules.operators import SHARED_MEMORY_ONLY
from weft.world import World
from weft.world.relay import FOREVER

OUTSTANDING = 8  # messages that are being sent on a channel: enough that the link never waits for Python


class NetworkEngine(HostEngine):
    """Executes plans for one rank of a world on several hosts."""

    refused = SHARED_MEMORY_ONLY
    whole_plans = True
    remembers = False  # a call is more than a native one

    def __init__(self, world: World) -> None:
        super().__init__(world)
        assert world.relay is not None
        self.relay = world.relay

    @property
    def program_class(self) -> type[HostProgram]:
        return NetworkProgram

    def agree(self, call: str) -> None:
        program = self.compile(barrier(self.world.ranks, "agree"), {}, (), {}, call)
        program.execute(program.bind({}, ()))


class _Sent(NamedTuple):
    """A batch to send: to whom, and for each message its place in its channel and where its rows are; a token has none."""

    to: int
    indices: Sequence[int]
    places: Sequence[Place | None]


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
        self.sends: list[tuple[str, list[_Sent]]] = []
        self.receives: list[tuple[int, str, list[Place | None]]] = []
        self._compile_channels()
        self.made: dict[Place, Tensor] = {}  # the tensors over rows, while their sizes and places are the same
        self.spans: list[tuple[str, int, int, int]] = []

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        return {name: lane for name, lane in self.plan.lanes[self.world.rank].items() if not is_channel(name)}

    def apply(self, binding: Binding) -> None:
        if self.bound is not binding:
            self.made = {}
        super().apply(binding)

    def begin(self, seconds: float) -> None:
        """Publish the call, post what will come and let what is to go wait for its turn."""
        super().begin(seconds)
        relay, call, digest = self.engine.relay, self.native.call, self.native.digest
        assert self.bound is not None
        relay.announce(call, digest, self.bound.native.call)
        self.spans = []
        for number, (sender, lane, places) in enumerate(self.receives, len(LANES) + len(self.sends)):
            coming = _Receiving(self, number, sender, _tag(call, digest, lane), places)
            relay.work((sender, lane), call, coming.run)
        for number, (lane, sent) in enumerate(self.sends, len(LANES)):
            going = _Sending(self, number, lane, _tag(call, digest, lane), sent, self.spans)
            relay.work(lane, call, going.run)

    def execute(self, binding: Binding, timeout: float | None = None) -> None:
        world, seconds = self.world, timeout or self.world.timeout
        if self.engine.pending:
            self.engine.settle()
        self.apply(binding)
        with world.guard:
            self.begin(seconds)
            if world.native.run(self.native, 0, 0) < 0:
                raise self._stopped(0, seconds)
        self._record()

    def tensor(self, place: Place | None) -> Tensor:
        """The rows there as bytes, in this call; a token where there are none."""
        if place is None:
            return torch.zeros(1, dtype=torch.uint8)
        made = self.made.get(place)
        if made is None:
            made = self.made[place] = self._bytes(place)
        return made

    def _bytes(self, place: Place) -> Tensor:
        assert self.bound is not None
        native = self.bound.native
        rows, stride, row = native.rows(place), native.stride(place), native.row_bytes(place)
        if not rows * row:
            return torch.zeros(1, dtype=torch.uint8)
        memory = (ctypes.c_uint8 * ((rows - 1) * stride + row)).from_address(native.address(place))
        return torch.frombuffer(memory, dtype=torch.uint8).as_strided((rows, row), (stride, 1))

    def _spans(self) -> list[tuple[str, int, int, int]]:
        return super()._spans() + self.spans

    def regions(self) -> list[Region]:
        sent = (message for batches in self.outgoing.values() for _, (_, messages, _) in batches for message in messages)
        received = (message for _, _, messages in self.incoming for message in messages)
        found = [*(m.copy.src for m in sent if m.copy), *(m.copy.dst for m in received if m.copy)]
        return [*super().regions(), *found]

    def _compile_channels(self) -> None:
        native = self.native
        for number, (lane, sent) in enumerate(self.outgoing.items(), len(LANES)):
            several = sorted(sent, key=lambda one: one[1][0].count)  # as the lane comes to them
            for _, (begin, _, end) in several:
                self._compile(number, 0, begin)
                native.pause(number)
                self._compile(number, 0, end)
            self.sends.append(
                (
                    lane,
                    [
                        _Sent(to, [m.index for m in messages], [self.place(m.copy.src) if m.copy else None for m in messages])
                        for to, (_, messages, _) in several
                    ],
                )
            )
        for number, (sender, lane, messages) in enumerate(self.incoming, len(LANES) + len(self.outgoing)):
            for message in messages:
                native.pause(number)
                for notify in message.signals:
                    self._compile(number, 0, notify)
            self.receives.append((sender, lane, [self.place(m.copy.dst) if m.copy else None for m in messages]))


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
        self.tensors = [[program.tensor(place) for place in batch.places] for batch in batches]

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

    def __init__(self, program: NetworkProgram, number: int, sender: int, tag: int, messages: Sequence[Place | None]) -> None:
        self.program, self.number, self.sender, self.tag = program, number, sender, tag
        self.tensors = [program.tensor(place) for place in messages]

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
