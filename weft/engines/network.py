"""The network engine, for ranks on several hosts: the host engine within a host, and messages
between hosts.

It runs this rank's part of `weft.plan.messages.lower_to_messages`. A channel is interpreted at both
ends, by the native core. Where a lane posts messages it sends them itself, directly from the rows,
as far as the connection takes them at once; the network's thread sends the rest. The receiver,
which has the sender's plan, receives each message directly into the rows and raises its signals,
once all notified ranks have begun the call: on the thread that waits for them, if there is one
(`native/hosts/network.hpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import weft._native as _native
from weft.checks import name as dtype_name
from weft.engines.host import HostEngine, HostProgram, Place
from weft.engines.program import Dtypes, Tensors, Timed
from weft.kernels import compression
from weft.plan import Copy, Instruction, Notify, Plan, Region
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

End = tuple[Place, list[int], _native.Dtype | None] | None
"""The rows of a message at one of its ends: their place, if they are in slots, which hold any
blocks, the blocks that they are, and their dtype if they travel packed. A token has none.
"""


class NetworkEngine(HostEngine):
    """Executes plans for one rank of a world on several hosts."""

    shared_memory = False  # ranks of other hosts are sent messages
    caches_calls = True

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
        program = self.program(barrier(self.world.placement.levels, "agree"), {})
        program.compiled.set_call_text(call)
        program.run_locked({}, (), {})


class NetworkProgram(HostProgram):
    """A plan compiled for one rank of several hosts."""

    engine: NetworkEngine

    def __init__(self, engine: NetworkEngine, plan: Plan, tensors: Tensors, dtypes: Dtypes) -> None:
        world, rank = engine.world, engine.world.rank
        common = plan.common(examples(world.hosts))
        plan = part_of_messages(plan, world.hosts, rank)
        self.outgoing: dict[tuple[str, int], tuple[int, list[Message], Notify]] = {}
        """By the lane, and by the number of its post: the receiver of a batch, its messages, and
        the notify that they are sent.
        """
        self.posts: set[tuple[str, Instruction]] = set()
        """The notifies that messages are posted, with their lanes."""
        for name in filter(is_channel, plan.lanes[rank]):
            lane, to = target(name)
            for begin, messages, sent in batches(plan, rank, lane, to):
                self.outgoing[lane, begin.count] = to, messages, sent
                self.posts.add((lane, Notify(rank, begin.signal)))
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
        self.sent: list[tuple[str, int, list[Message]]] = []
        """The batches in the order in which they were compiled: lane, receiver and messages."""
        super().__init__(engine, plan, tensors, dtypes, common)
        for sender, lane, messages in self.incoming:
            self.compiled.receive(
                world.executor,
                sender,
                LANES.index(lane),
                gate_ranks(self.plan, sender, lane, rank),
                [self.end(message.copy, sent=False) for message in messages],
                [[(i.rank, engine.index(i.signal)) for i in m.signals] for m in messages],
            )
        self.compiled.mark_arrivals()

    def signal_names(self, common: Plan) -> list[str]:
        lanes = {name for lanes in common.lanes for name in lanes}
        return sorted({*super().signal_names(common), *message_signals(lanes)})

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        return {
            name: lane
            for name, lane in self.plan.lanes[self.world.rank].items()
            if not (is_channel(name) or is_receive_gate(name))
        }

    def end(self, copy: Copy | None, sent: bool) -> End:
        """The rows of a message at the end where they are sent, or received."""
        if copy is None:
            return None
        region = copy.src if sent else copy.dst
        slots = ANY_BLOCK in self.plan.numbers(region)
        like = self.plan.sizing_region(copy)
        blocks = [*self.plan.numbers(like)] if slots else []
        return self.place(region), blocks, self.packed(copy)

    def packed(self, copy: Copy) -> _native.Dtype | None:
        """The dtype of rows that travel packed; None for others."""
        if not copy.compress:
            return None
        dtype, _ = self.kinds[copy.src.buffer]
        compression.check_dtype(dtype)
        found: _native.Dtype = getattr(_native.Dtype, dtype_name(dtype))
        return found

    def regions(self) -> list[Region]:
        sent = (message for _, messages, _ in self.outgoing.values() for message in messages)
        received = (message for _, _, messages in self.incoming for message in messages)
        found = [*(m.copy.src for m in sent if m.copy), *(m.copy.dst for m in received if m.copy)]
        return [*super().regions(), *found]

    def _compile(self, lane: int, at: int, instruction: Instruction) -> None:
        name = LANES[lane]
        if (name, instruction) not in self.posts:
            super()._compile(lane, at, instruction)
            return
        number = 1 + sum(each == name for each, _, _ in self.sent)
        to, messages, sent = self.outgoing[name, number]
        self.sent.append((name, to, messages))
        self.compiled.send(
            lane,
            self.world.executor,
            self.world.rank,
            to,
            lane,
            [self.end(message.copy, sent=True) for message in messages],
            self.engine.index(sent.signal),
        )

    def _spans(self) -> list[Timed]:
        sent = [
            (channel(lane, to), message.index, begun, ended)
            for number, begun, ended in self.compiled.sent
            for lane, to, messages in [self.sent[number]]
            for message in messages
        ]
        return super()._spans() + sent
