"""What a plan comes to where ranks are on several hosts: puts across hosts become messages, sent by
lanes of their own.

`lower_to_messages` moves every `Copy` and `Notify` that crosses to another host into a **channel**:
lane ``"comm>3"`` has what ``comm`` has for rank 3. The lane goes on at once; it waits until things
are sent before it lets anyone write over them. The result is a plan as any other, so `weft.verify`
proves the order that messages really have: within a channel they arrive one after the other,
between channels in any order.

A notify without rows of its own travels with the rows before it where these go to the same host:
rows that one rank of a host receives may be told to all its ranks.

Messages are let in once all whom they tell something have begun the call. Before, these may still
count what the sender has for them in an earlier call, and which comes through another channel. So
each has an **inlet**: lane ``"comm<3"`` lets in what ``comm`` of rank 3 has for it. A channel
begins with waits for the inlets of those it tells, which are not sent. Only plans with the lanes of
all ranks have inlets: others are not carried out.

So rows wait where they arrive until a rank makes the call. A rank's ready signal to remote senders
is then redundant if it notifies them later: lowering drops the notify and its wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import takewhile

from weft.errors import PlanError
from weft.plan.language import (
    Copy,
    Instruction,
    Notify,
    Plan,
    Region,
    Signal,
    Wait,
    accesses,
    writes,
)

Lanes = dict[str, list[Instruction]]


def lower_to_messages(plan: Plan, hosts: Sequence[int]) -> Plan:
    """`plan` with its traffic between hosts on channels; `hosts[rank]` is the host of a rank.

    Raises `PlanError` for a plan that reads rows of another host, or writes to them otherwise than
    by a copy: messages only put.
    """
    held, lanes = _held(plan, hosts), list[Lanes]()
    for rank, before in enumerate(plan.lanes):
        after: Lanes = {}
        for name, lane in before.items():
            after |= _Lowering(plan, hosts, rank, name, held).run(lane)
        lanes.append(after)
    if plan.planned is None:
        _add_inlets(lanes)
    return replace(
        plan, lanes=tuple({name: tuple(lane) for name, lane in own.items()} for own in lanes)
    )


def _add_inlets(lanes: Sequence[Lanes]) -> None:
    """Let channels wait for all whom they tell something."""
    for rank, own in enumerate(lanes):
        for name in [*filter(is_channel, own)]:
            lane, to = target(name)
            hear = {i.rank for i in own[name] if isinstance(i, Notify) and at_the_end(rank, i)}
            taken = {told: Signal(f"{lane} taken", told) for told in sorted({to} | hear)}
            own[name] = [*(Wait(signal, 1) for signal in taken.values()), *own[name]]
            for told, signal in taken.items():
                lanes[told][inlet(lane, rank)] = [Notify(rank, signal)]


def channel(lane: str, to: int) -> str:
    """The name of the lane that sends what `lane` has for rank `to`."""
    return f"{lane}>{to}"


def is_channel(lane: str) -> bool:
    """Whether a lane of a lowered plan sends messages."""
    return ">" in lane


def ending(channel: str) -> str:
    """The receiving end of a channel.

    Rows are read, and "sent", at the sending end. At this one they are written and ranks are told,
    later, in an order of its own.
    """
    return f"{channel}, arriving"


def at_the_end(rank: int, instruction: Instruction) -> bool:
    """Whether an instruction of a channel of `rank` is all carried out at the receiving end: what
    others tell, or are told.
    """
    match instruction:
        case Wait(Signal(_, other), _) | Notify(other, _):
            return other != rank
    return False


def inlet(lane: str, sender: int) -> str:
    """The name of the lane that lets in what `lane` of rank `sender` sends."""
    return f"{lane}<{sender}"


def is_inlet(lane: str) -> bool:
    """Whether a lane of a lowered plan lets messages in."""
    return "<" in lane


def target(lane: str) -> tuple[str, int]:
    """Whose messages a channel sends, and to which rank."""
    name, _, to = lane.partition(">")
    return name, int(to)


def _held(plan: Plan, hosts: Sequence[int]) -> dict[tuple[int, Signal], str]:
    """The signals that need not be sent, each with the rank that waits for it, and the lane in
    which that does.

    A rank raises such a signal once and before all else. Who waits for it sends rows there, and
    hears from that rank in another way, too: nobody ends a call that another has yet to make.
    """
    every = [
        (rank, name, lane) for rank, lanes in enumerate(plan.lanes) for name, lane in lanes.items()
    ]
    waits = [
        (rank, i.signal) for rank, _, lane in every for i in lane if isinstance(i, Wait) and i.count
    ]
    raised, waited = (
        Counter((i.rank, i.signal) for *_, lane in every for i in lane if isinstance(i, Notify)),
        Counter(waits),
    )
    first = {
        (i.rank, i.signal)
        for rank, _, lane in every
        for i in takewhile(lambda i: isinstance(i, Notify), lane)
        if isinstance(i, Notify)
        and hosts[i.rank] != hosts[rank]
        and raised[i.rank, i.signal] == waited[i.rank, i.signal] == 1
    }
    heard = {(rank, signal.source) for rank, signal in waits if (rank, signal) not in first}
    found: dict[tuple[int, Signal], str] = {}
    for rank, name, lane in every:
        sent: set[int] = set()
        for i in reversed(lane):
            match i:
                case Copy(_, dst):
                    sent.add(dst.rank)
                case Wait(signal) if (
                    (rank, signal) in first
                    and signal.source in sent
                    and (rank, signal.source) in heard
                ):
                    found[rank, signal] = name
    return found


class _Lowering:
    """One lane on its way from instructions to messages."""

    def __init__(
        self,
        plan: Plan,
        hosts: Sequence[int],
        rank: int,
        name: str,
        held: Container[tuple[int, Signal]],
    ) -> None:
        self.plan, self.hosts, self.rank, self.name, self.held = plan, hosts, rank, name, held
        self.lane: list[Instruction] = []
        self.channels: dict[int, list[Instruction]] = {}
        self.to: int | None = None  # where the batch that is being posted goes
        self.posts = 0
        self.batches = Counter[int]()
        self.unsent: dict[
            int, list[Region]
        ] = {}  # rows that may not be written to before their batch is sent

    def run(self, lane: Sequence[Instruction]) -> Lanes:
        for instruction in lane:
            self.step(instruction)
        self.close()
        for to in [*self.unsent]:
            self.settle(to)
        return {self.name: self.lane} | {
            channel(self.name, to): sent for to, sent in self.channels.items()
        }

    def step(self, instruction: Instruction) -> None:
        here = self.hosts[self.rank]
        match instruction:
            case Copy(src, dst) if self.hosts[src.rank] == here != self.hosts[dst.rank]:
                self.post(instruction, dst.rank)
                self.unsent.setdefault(dst.rank, []).append(src)
            case Notify(peer, signal) if (peer, signal) in self.held:
                pass
            case Wait(signal) if (self.rank, signal) in self.held:
                pass
            case Notify(peer, _) if self.hosts[peer] != here:
                to = (
                    self.to
                    if self.to is not None and self.hosts[self.to] == self.hosts[peer]
                    else peer
                )
                for other in [other for other in self.unsent if other != to]:
                    self.settle_reused(other)
                self.post(instruction, to)
                self.unsent.setdefault(to, [])
            case _:
                if any(self.hosts[region.rank] != here for region in accesses(instruction)):
                    raise PlanError(
                        f"{self.plan.operator}/{self.plan.algorithm}: rank {self.rank} "
                        f"{self.name}: {instruction}: ranks of other "
                        "hosts can only be sent rows, by a copy; choose push or ring"
                    )
                self.close()
                for to in [*self.unsent]:
                    if isinstance(instruction, Notify):
                        self.settle_reused(to)
                    elif any(
                        dst.overlaps(src) for dst in writes(instruction) for src in self.unsent[to]
                    ):
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
            self.batches[self.to] += 1
            self.to = None

    def settle_reused(self, to: int) -> None:
        """Before anyone is told something: wait until rows are sent that another may write to then;
        inputs only the caller does.
        """
        if any(self.plan.buffers[src.buffer].role != "input" for src in self.unsent[to]):
            self.settle(to)

    def settle(self, to: int) -> None:
        """Wait until all that was posted for `to` is sent."""
        if self.to == to:
            self.close()
        self.lane.append(Wait(self.sent(to), self.batches[to]))
        del self.unsent[to]

    def sent(self, to: int) -> Signal:
        return Signal(f"{self.name} sent to", self.rank, to)


def incoming(plan: Plan, rank: int) -> list[tuple[int, str]]:
    """The channels of a lowered plan that end at `rank`, as (the sender, the lane it sends for)."""
    channels = (
        (sender, *target(name))
        for sender, lanes in enumerate(plan.lanes)
        for name in lanes
        if is_channel(name)
    )
    return [(sender, lane) for sender, lane, to in channels if to == rank]


def let_in_by(plan: Plan, sender: int, lane: str, to: int) -> list[int]:
    """The ranks that must have begun a call before what a channel brings is taken."""
    return [
        i.signal.source
        for i in plan.lanes[sender][channel(lane, to)]
        if isinstance(i, Wait) and at_the_end(sender, i)
    ]


class Message:
    """Rows that travel, or a token where there are none, and the signals that their arrival raises."""

    def __init__(self, index: int, copy: Copy | None = None) -> None:
        self.index, self.copy = index, copy  # where it stands in its channel
        self.signals: list[Notify] = []


def batches(
    plan: Plan, sender: int, lane: str, to: int
) -> list[tuple[Wait, list[Message], Notify]]:
    """What a channel sends: when each batch may begin, its messages, and what to raise when they
    are sent.
    """
    found: list[tuple[Wait, list[Message], Notify]] = []
    begun: Wait | None = None
    messages: list[Message] = []
    for index, instruction in enumerate(plan.lanes[sender][channel(lane, to)]):
        match instruction:
            case Wait(signal) if signal.source == sender:
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
