"""Lowering of a plan to several hosts: puts to other hosts become messages, in separate lanes.

`lower_to_messages` moves every `Copy` and `Notify` to another host into a **channel**: lane
``"comm>3"`` has the messages of ``comm`` to rank 3. The lane itself proceeds at once; it waits
until rows are sent before it permits a write over them. The result is an ordinary plan, so
`weft.verify` proves the order that messages really have: in order within a channel, in any order
between channels.

A notify without rows is sent with the rows before it if both go to the same host: rows that one
rank of a host receives may be announced to all its ranks.

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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

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
from weft.plan.lazy import PerRank

Lanes = dict[str, list[Instruction]]


def message_signals(lanes: Iterable[str]) -> set[str]:
    """The names of the signals of channels of these lanes."""
    return {signal for name in lanes for signal in (_posted(name), _sent(name), _taken(name))}


def lower_to_messages(plan: Plan, hosts: Sequence[int], gates: bool = True) -> Plan:
    """`plan` with its traffic between hosts on channels; `hosts[rank]` is the host of a rank. A
    plan without `gates` can only be simulated.

    Raises `PlanError` for a plan that reads rows of another host, or writes to them in another
    manner than by a copy: messages only put.
    """
    every = dict(enumerate(plan.lanes))
    redundant = _redundant(every, hosts)
    lanes = [_lowered(plan, hosts, rank, before, redundant) for rank, before in every.items()]
    if gates:
        for rank, own in enumerate(lanes):
            for name in [*filter(is_channel, own)]:
                for peer, gate in _add_gates(rank, own, name).items():
                    lanes[peer][receive_gate(target(name)[0], rank)] = [Notify(rank, gate)]
    return replace(plan, lanes=tuple(map(_finished, lanes)))


def part_of_messages(plan: Plan, hosts: Sequence[int], rank: int) -> Plan:
    """The part of `lower_to_messages` that concerns one rank: its lanes, and of its peers' lanes
    what arrives at this rank.

    If a text determines the lanes of `plan`, only parts of them are planned: of a peer's lanes what
    concerns this rank's host.
    """
    if not (isinstance(plan.lanes, PerRank) and plan.request):
        return lower_to_messages(plan, hosts)
    here, every = hosts[rank], plan.lanes
    remote = [peer for peer, host in enumerate(hosts) if host != here]
    sent = {
        peer: {
            name: _concerning(lane, here, hosts) for name, lane in every.toward(peer, here).items()
        }
        for peer in remote
    }
    redundant = _redundant({rank: every[rank], **sent}, hosts)
    # those that travel with an early signal to this rank may be redundant as well
    early = [*_early(sent, hosts)]
    senders = {i.signal for i in early if i.rank == rank and (rank, i.signal) not in redundant}
    if waiting := {i.rank for i in early if i.signal in senders and i.rank != rank}:
        more = {peer: every.make(peer) for peer in waiting}
        redundant = _redundant({rank: every[rank], **more, **sent}, hosts)
    own = _lowered(plan, hosts, rank, every[rank], redundant)
    for name in [*filter(is_channel, own)]:
        _add_gates(rank, own, name)
    found = {rank: own}
    for peer, lanes in sent.items():
        channels = _lowered(plan, hosts, peer, lanes, redundant)
        for name in filter(is_channel, [*channels]):
            gates = _add_gates(peer, channels, name)
            arriving = channels[name]
            if target(name)[1] != rank:
                arriving = [i for i in arriving if isinstance(i, Notify) and i.rank == rank]
            if arriving:
                found.setdefault(peer, {})[name] = arriving
            if rank in gates:
                own[receive_gate(target(name)[0], peer)] = [Notify(peer, gates[rank])]
    for peer in (peer for peer, host in enumerate(hosts) if host == here and peer != rank):
        found[peer] = {
            name: [i for i in lane if i == Notify(rank, Signal("free", peer))]
            for name, lane in every.toward(peer, here).items()
        }
    parts = [_finished(found.get(peer, {})) for peer in range(plan.ranks)]
    return replace(plan, lanes=PerRank.of(parts, plan.request, [rank]), result={})


def _concerning(lane: Sequence[Instruction], host: int, hosts: Sequence[int]) -> list[Instruction]:
    """The instructions that concern ranks of a host, and one of those between two of them, which
    separates messages.
    """
    found: list[Instruction] = []
    separated = False
    for instruction in lane:
        match instruction:
            case Copy(_, Region(peer)) | Notify(peer, _) | Wait(Signal(_, peer), _):
                concerns = hosts[peer] == host
            case _:
                concerns = False
        if concerns or not separated:
            found.append(instruction)
        separated = not concerns
    return found


def _finished(lanes: Lanes) -> Mapping[str, tuple[Instruction, ...]]:
    return {name: tuple(lane) for name, lane in lanes.items()}


def _lowered(
    plan: Plan,
    hosts: Sequence[int],
    rank: int,
    lanes: Mapping[str, Sequence[Instruction]],
    redundant: Container[tuple[int, Signal]],
) -> Lanes:
    """The lanes of a rank with its channels."""
    after: Lanes = {}
    for name, lane in lanes.items():
        after |= _Lowering(plan, hosts, rank, name, redundant).run(lane)
    return after


def _add_gates(rank: int, lanes: Lanes, name: str) -> dict[int, Signal]:
    """Let a rank's channel begin with waits for the gates of all ranks that it notifies, which are
    returned by rank.
    """
    lane, to = target(name)
    notified = {i.rank for i in lanes[name] if isinstance(i, Notify) and at_the_end(rank, i)}
    opened = {peer: Signal(_taken(lane), peer) for peer in sorted({to} | notified)}
    lanes[name] = [*(Wait(signal, 1) for signal in opened.values()), *lanes[name]]
    return opened


def channel(lane: str, to: int) -> str:
    """The name of the lane that sends the messages of `lane` to rank `to`."""
    return f"{lane}>{to}"


def is_channel(lane: str) -> bool:
    """Whether a lane of a lowered plan sends messages."""
    return ">" in lane


def _posted(lane: str) -> str:
    """The name of the signal that messages of a lane may be sent."""
    return f"{lane} posted"


def _sent(lane: str) -> str:
    """The name of the signal that messages of a lane are sent; it counts for each receiver."""
    return f"{lane} sent to"


def _taken(lane: str) -> str:
    """The name of the signal that a receive gate is open for messages of a lane."""
    return f"{lane} taken"


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


def origin(lane: str) -> str:
    """The lane of the plan that a lane of the lowered plan serves, or is."""
    return lane.partition(">")[0].partition("<")[0]


def _redundant(
    lanes: Mapping[int, Mapping[str, Sequence[Instruction]]], hosts: Sequence[int]
) -> dict[tuple[int, Signal], str]:
    """The signals that need not be sent, by the rank that waits and the signal, each with the lane
    that waits.

    A rank raises such a signal once, as its first instruction. The rank that waits for it sends
    rows to that rank, and also waits for another signal of it: so no rank ends a call that another
    has yet to make.
    """
    every = [(rank, name, lane) for rank, own in lanes.items() for name, lane in own.items()]
    early = {(i.rank, i.signal) for i in _early(lanes, hosts)}
    if not early:
        return {}
    raised, waited = Counter[tuple[int, Signal]](), Counter[tuple[int, Signal]]()
    for rank, _, lane in every:
        for i in lane:
            match i:
                case Notify(peer, signal) if (peer, signal) in early:
                    raised[peer, signal] += 1
                case Wait(signal, count) if count:
                    waited[rank, signal] += 1
    first = {each for each in early if raised[each] == waited[each] == 1}
    awaited = {(rank, signal.source) for rank, signal in waited.keys() - first}
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


def _early(
    lanes: Mapping[int, Mapping[str, Sequence[Instruction]]], hosts: Sequence[int]
) -> Iterator[Notify]:
    """The notifies of other hosts with which lanes begin."""
    for rank, own in lanes.items():
        for lane in own.values():
            for i in lane:
                if not isinstance(i, Notify):
                    break
                if hosts[i.rank] != hosts[rank]:
                    yield i


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
        # the receivers of batches for whose end the lane has not waited, each with the rows that
        # may not be written to before: none of its own inputs, to which only its caller writes
        self.unsent: dict[int, list[Region]] = {}
        self.reused: dict[int, list[Region]] = {}  # those with such rows

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
                rows = self.unsent.setdefault(dst.rank, [])
                if self.plan.buffers[src.buffer].role != "input" or src.rank != self.rank:
                    rows.append(src)
                    self.reused[dst.rank] = rows
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
                # the notified rank may write to rows of other batches
                for other in [other for other in self.reused if other != to]:
                    self.drain(other)
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
                for to in [*self.reused]:
                    if isinstance(instruction, Notify) or any(
                        dst.overlaps(src) for dst in writes(instruction) for src in self.reused[to]
                    ):
                        self.drain(to)
                self.lane.append(instruction)

    def post(self, instruction: Instruction, to: int) -> None:
        """Append to the batch for `to`, a new one if the previous one has another receiver."""
        if self.to != to:
            self.close()
            self.posts += 1
            ready = Signal(_posted(self.name), self.rank)
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

    def drain(self, to: int) -> None:
        """Wait until all messages posted for `to` are sent."""
        if self.to == to:
            self.close()
        self.lane.append(Wait(self.sent(to), self.batches[to]))
        del self.unsent[to]
        self.reused.pop(to, None)

    def sent(self, to: int) -> Signal:
        return Signal(_sent(self.name), self.rank, to)


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
