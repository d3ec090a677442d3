"""What a plan comes to where ranks are on several hosts: puts across hosts become messages, sent by lanes of their own.

`lower_to_messages` moves every `Copy` and `Notify` that crosses to another host into a **channel**: lane ``"comm>3"`` has what
``comm`` has for rank 3. The lane goes on at once; it waits until things are sent before it lets anyone write over them. The result
is a plan as any other, so `weft.verify` proves the order that messages really have: within a channel they arrive one after the
other, between channels in any order.

A notify without rows of its own travels with the rows before it where these go to the same host: rows that one rank of a host
receives may be told to all its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.errors import PlanError
from weft.plan.language import Copy, Instruction, Notify, Plan, Region, Signal, Wait, accesses, writes

Lanes = dict[str, list[Instruction]]


def lower_to_messages(plan: Plan, hosts: Sequence[int]) -> Plan:
    """`plan` with its traffic between hosts on channels; `hosts[rank]` is the host of a rank.

    Raises `PlanError` for a plan that reads rows of another host, or writes to them otherwise than by a copy: messages only put.
    """
    lanes = []
    for rank, before in enumerate(plan.lanes):
        after: Lanes = {}
        for name, lane in before.items():
            after |= _Lowering(plan, hosts, rank, name).run(lane)
        lanes.append({name: tuple(lane) for name, lane in after.items()})
    return replace(plan, lanes=tuple(lanes))


def channel(lane: str, to: int) -> str:
    """The name of the lane that sends what `lane` has for rank `to`."""
    return f"{lane}>{to}"


def is_channel(lane: str) -> bool:
    """Whether a lane of a lowered plan sends messages."""
    return ">" in lane


def target(lane: str) -> tuple[str, int]:
    """Whose messages a channel sends, and to which rank."""
    name, _, to = lane.partition(">")
    return name, int(to)


class _Lowering:
    """One lane on its way from instructions to messages."""

    def __init__(self, plan: Plan, hosts: Sequence[int], rank: int, name: str) -> None:
        self.plan, self.hosts, self.rank, self.name = plan, hosts, rank, name
        self.lane: list[Instruction] = []
        self.channels: dict[int, list[Instruction]] = {}
        self.to: int | None = None  # where the batch that is being posted goes
        self.posts = 0
        self.batches: dict[int, int] = {}
        self.unsent: dict[int, list[Region]] = {}  # rows that may not be written to before their batch is sent

    def run(self, lane: Sequence[Instruction]) -> Lanes:
        for instruction in lane:
            self.step(instruction)
        self.close()
        for to in [*self.unsent]:
            self.settle(to)
        return {self.name: self.lane} | {channel(self.name, to): sent for to, sent in self.channels.items()}

    def step(self, instruction: Instruction) -> None:
        here = self.hosts[self.rank]
        match instruction:
            case Copy(src, dst) if self.hosts[src.rank] == here != self.hosts[dst.rank]:
                self.post(instruction, dst.rank)
                self.unsent.setdefault(dst.rank, []).append(src)
            case Notify(peer, _) if self.hosts[peer] != here:
                together = self.to is not None and self.hosts[self.to] == self.hosts[peer]
                to = self.to if together and self.to is not None else peer
                for other in [other for other in self.unsent if other != to]:
                    self.settle_reused(other)
                self.post(instruction, to)
                self.unsent.setdefault(to, [])
            case _:
                if any(self.hosts[region.rank] != here for region in accesses(instruction)):
                    raise PlanError(
                        f"{self.plan.operator}/{self.plan.algorithm}: rank {self.rank} {self.name}: {instruction}: ranks of other "
                        "hosts can only be sent rows, by a copy; choose push or ring"
                    )
                self.close()
                for to in [*self.unsent]:
                    if isinstance(instruction, Notify):
                        self.settle_reused(to)
                    elif any(_overlap(dst, src) for dst in writes(instruction) for src in self.unsent[to]):
                        self.settle(to)
                self.lane.append(instruction)

    def post(self, instruction: Instruction, to: int) -> None:
        """Append to the batch for `to`, a new one if the one before went elsewhere."""
        if self.to != to:
            self.close()
            self.posts += 1
            ready = Signal(f"{self.name} posted", self.rank)
            self.lane.append(Notify(self.rank, ready))
            self.channels.setdefault(to, []).append(Wait(ready, self.posts))
            self.to = to
        self.channels[to].append(instruction)

    def close(self) -> None:
        """End the current batch, if any."""
        if self.to is not None:
            self.channels[self.to].append(Notify(self.rank, self.sent(self.to)))
            self.batches[self.to] = self.batches.get(self.to, 0) + 1
            self.to = None

    def settle_reused(self, to: int) -> None:
        """Before anyone is told something: wait until rows are sent that another may write to then; inputs only the caller does."""
        if any(self.plan.buffers[src.buffer].role != "input" for src in self.unsent[to]):
            self.settle(to)

    def settle(self, to: int) -> None:
        """Wait until all that was posted for `to` is sent."""
        if self.to == to:
            self.close()
        self.lane.append(Wait(self.sent(to), self.batches[to]))
        del self.unsent[to]

    def sent(self, to: int) -> Signal:
        return Signal(f"{self.name} sent to {to}", self.rank)


def _overlap(one: Region, other: Region) -> bool:
    return one[:2] == other[:2] and one.start < other.stop and other.start < one.stop


def incoming(plan: Plan, rank: int) -> list[tuple[int, str]]:
    """The channels of a lowered plan that end at `rank`, as (the sender, the lane it sends for)."""
    return [
        (sender, target(name)[0])
        for sender, lanes in enumerate(plan.lanes)
        for name in lanes
        if is_channel(name) and target(name)[1] == rank
    ]


class Message:
    """Rows that travel, or a token where there are none, and the signals that their arrival raises."""

    def __init__(self, index: int, copy: Copy | None = None) -> None:
        self.index, self.copy = index, copy  # where it stands in its channel
        self.signals: list[Notify] = []


def batches(plan: Plan, sender: int, lane: str, to: int) -> list[tuple[Wait, list[Message], Notify]]:
    """What a channel sends: when each batch may begin, its messages, and what to raise when they are sent."""
    found: list[tuple[Wait, list[Message], Notify]] = []
    begun: Wait | None = None
    messages: list[Message] = []
    for index, instruction in enumerate(plan.lanes[sender][channel(lane, to)]):
        match instruction:
            case Wait():
                begun, messages = instruction, []
            case Copy():
                messages.append(Message(index, instruction))
            case Notify(peer, _) if peer == sender:
                assert begun is not None
                found.append((begun, messages, instruction))
            case Notify():
                if not messages:
                    messages.append(Message(index))
                messages[-1].signals.append(instruction)
    return found
