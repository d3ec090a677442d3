"""Lowering of a plan to several hosts: puts to other hosts become messages, in lanes of their own.

`lower_to_messages` moves every `Copy` and `Notify` to another host into a **channel**: lane
``"comm>3"`` has the messages of ``comm`` to rank 3. The lane itself proceeds at once; it waits
until rows are sent before it permits a write over them. The result is an ordinary plan, so
`weft.verify` proves the order that messages really have: in order within a channel, in any order
between channels.

A notify without rows of its own travels with the rows before it if both go to the same host: rows
that one rank of a host receives may be announced to all its ranks.

Messages are admitted after all ranks that they notify have begun the call. Earlier, such a rank may
still count signals of the sender for the previous call, which arrive through another channel. So
each of these ranks has a **receive gate**: lane ``"comm<3"`` admits the messages of ``comm`` of
rank 3. A channel begins with waits for the gates of the ranks that it notifies; these waits are not
sent.

So rows stay in the connection until the receiver makes the call. A rank's ready signal to remote
senders is then redundant if it notifies them later: lowering drops the notify and its wait.
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


def lower_to_messages(plan: Plan, hosts: Sequence[int], gates: bool = True) -> Plan:
    """`plan` with its traffic between hosts on channels; `hosts[rank]` is the host of a rank. A
    plan without `gates` can only be simulated.

    Raises `PlanError` for a plan that reads rows of another host, or writes to them in another
    manner than by a copy: messages only put.
    """
    redundant, lanes = _redundant(plan, hosts), list[Lanes]()
    for rank, before in enumerate(plan.lanes):
        after: Lanes = {}
        for name, lane in before.items():
            after |= _Lowering(plan, hosts, rank, name, redundant).run(lane)
        lanes.append(after)
    if gates:
        _add_gates(lanes)
    return replace(
        plan, lanes=tuple({name: tuple(lane) for name, lane in own.items()} for own in lanes)
    )


def _add_gates(lanes: Sequence[Lanes]) -> None:
    """Add receive gates, and the waits of channels for the gates of all ranks that they notify."""
    for rank, own in enumerate(lanes):
        for name in [*filter(is_channel, own)]:
            lane, to = target(name)
            notified = {i.rank for i in own[name] if isinstance(i, Notify) and at_the_end(rank, i)}
            opened = {peer: Signal(f"{lane} taken", peer) for peer in sorted({to} | notified)}
            own[name] = [*(Wait(signal, 1) for signal in opened.values()), *own[name]]
            for peer, signal in opened.items():
                lanes[peer][receive_gate(lane, rank)] = [Notify(rank, signal)]


def channel(lane: str, to: int) -> str:
    """The name of the lane that sends the messages of `lane` to rank `to`."""
    return f"{lane}>{to}"


def is_channel(lane: str) -> bool:
    """Whether a lane of a lowered plan sends messages."""
    return ">" in lane


def ending(channel: str) -> str:
    """The name of the receiving end of a channel.

    Rows are read, and "sent", at the sending end. They are written, and ranks are notified, later
    at the receiving end.
    """
    return f"{channel}, arriving"


def at_the_end(rank: int, instruction: Instruction) -> bool:
    """Whether an instruction of a channel of `rank` is executed at the receiving end: signals to or
    from other ranks.
    """
    match instruction:
        case Wait(Signal(_, other), _) | Notify(other, _):
            return other != rank
    return False


def receive_gate(lane: str, sender: int) -> str:
    """The name of the lane that admits the messages of `lane` of rank `sender`."""
    return f"{lane}<{sender}"


def is_receive_gate(lane: str) -> bool:
    """Whether a lane of a lowered plan admits messages."""
    return "<" in lane


def target(lane: str) -> tuple[str, int]:
    """The lane whose messages a channel sends, and the rank that receives them."""
    name, _, to = lane.partition(">")
    return name, int(to)


def _redundant(plan: Plan, hosts: Sequence[int]) -> dict[tuple[int, Signal], str]:
    """The signals that need not be sent, by the rank that waits and the signal, each with the lane
    that waits.

    A rank raises such a signal once, as its first instruction. The rank that waits for it sends
    rows to that rank, and also waits for another signal of it: so no rank ends a call that another
    has yet to make.
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
    awaited = {(rank, signal.source) for rank, signal in waits if (rank, signal) not in first}
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
                    and (rank, signal.source) in awaited
                ):
                    found[rank, signal] = name
    return found


class _Lowering:
    """The lowering of one lane: its instructions, and the channels that it posts messages to."""

    def __init__(
        self,
        plan: Plan,
        hosts: Sequence[int],
        rank: int,
        name: str,
        redundant: Container[tuple[int, Signal]],
    ) -> None:
        self.plan, self.hosts, self.rank, self.name = plan, hosts, rank, name
        self.redundant = redundant
        self.lane: list[Instruction] = []
        self.channels: dict[int, list[Instruction]] = {}
        self.to: int | None = None  # the receiver of the batch that is being posted
        self.posts = 0
        self.batches = Counter[int]()
        # rows, by the receiver, that may not be written to before their batch is sent
        self.unsent: dict[int, list[Region]] = {}

    def run(self, lane: Sequence[Instruction]) -> Lanes:
        for instruction in lane:
            self.step(instruction)
        self.close()
        for to in [*self.unsent]:
            self.drain(to)
        return {self.name: self.lane} | {
            channel(self.name, to): sent for to, sent in self.channels.items()
        }

    def step(self, instruction: Instruction) -> None:
        here = self.hosts[self.rank]
        match instruction:
            case Copy(src, dst) if self.hosts[src.rank] == here != self.hosts[dst.rank]:
                self.post(instruction, dst.rank)
                self.unsent.setdefault(dst.rank, []).append(src)
            case Notify(peer, signal) if (peer, signal) in self.redundant:
                pass
            case Wait(signal) if (self.rank, signal) in self.redundant:
                pass
            case Notify(peer, _) if self.hosts[peer] != here:
                to = (
                    self.to
                    if self.to is not None and self.hosts[self.to] == self.hosts[peer]
                    else peer
                )
                for other in [other for other in self.unsent if other != to]:
                    self.drain_reused(other)
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
                        self.drain_reused(to)
                    elif any(
                        dst.overlaps(src) for dst in writes(instruction) for src in self.unsent[to]
                    ):
                        self.drain(to)
                self.lane.append(instruction)

    def post(self, instruction: Instruction, to: int) -> None:
        """Append to the batch for `to`, a new one if the previous one has another receiver."""
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

    def drain_reused(self, to: int) -> None:
        """Before a notify, wait until rows are sent that the notified rank may write to; only the
        caller writes to inputs.
        """
        if any(self.plan.buffers[src.buffer].role != "input" for src in self.unsent[to]):
            self.drain(to)

    def drain(self, to: int) -> None:
        """Wait until all messages posted for `to` are sent."""
        if self.to == to:
            self.close()
        self.lane.append(Wait(self.sent(to), self.batches[to]))
        del self.unsent[to]

    def sent(self, to: int) -> Signal:
        return Signal(f"{self.name} sent to", self.rank, to)


def incoming(plan: Plan, rank: int) -> list[tuple[int, str]]:
    """The channels of a lowered plan that end at `rank`, as (the sender, the lane of the
    messages).
    """
    channels = (
        (sender, *target(name))
        for sender, lanes in enumerate(plan.lanes)
        for name in lanes
        if is_channel(name)
    )
    return [(sender, lane) for sender, lane, to in channels if to == rank]


def gate_ranks(plan: Plan, sender: int, lane: str, to: int) -> list[int]:
    """The ranks that must have begun a call before the messages of a channel are admitted."""
    return [
        i.signal.source
        for i in plan.lanes[sender][channel(lane, to)]
        if isinstance(i, Wait) and at_the_end(sender, i)
    ]


class Message:
    """Rows, or a token if there are none, and the signals that their arrival raises."""

    def __init__(self, index: int, copy: Copy | None = None) -> None:
        self.index, self.copy = index, copy  # `index` is its place in the channel
        self.signals: list[Notify] = []


def batches(
    plan: Plan, sender: int, lane: str, to: int
) -> list[tuple[Wait, list[Message], Notify]]:
    """The batches of a channel: the wait before each batch, its messages, and the notify after they
    are sent.
    """
    found: list[tuple[Wait, list[Message], Notify]] = []
    start: Wait | None = None
    messages: list[Message] = []
    for index, instruction in enumerate(plan.lanes[sender][channel(lane, to)]):
        match instruction:
            case Wait(signal) if signal.source == sender:
                start, messages = instruction, []
            case Copy():
                messages.append(Message(index, instruction))
            case Notify(peer, _) if peer == sender:
                assert start is not None
                found.append((start, messages, instruction))
            case Notify():
                if not messages:
                    messages.append(Message(index))
                messages[-1].signals.append(instruction)
    return found
