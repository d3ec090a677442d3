"""A plan is data: the work of every rank in one execution of an operator, in five instructions.

For each rank a plan holds a few **lanes** (``compute``, ``comm``), each a list of instructions that
run in order; lanes run concurrently and synchronize only by signals. Engines interpret plans;
`weft.verify` proves, before a plan runs, that it is free of races and deadlocks and computes the
rows that it promises. Neither torch nor the rest of weft is imported here.

Three rules make plans provable:

1. *One writer per counter.* A `Signal` is a name and the rank that raises it; one lane of that rank
   raises it on a given peer.
2. *Counters only grow.* A `Wait` counts from the start of the execution, so ``Wait(s, 0)`` means
   "all that earlier executions promised", and consecutive executions need no barrier.
3. *Buffers that are reused are released first.* The reader notifies when it has read; the writer
   waits for that before it writes again.

With 1 and 2 a plan is confluent: if one greedy run finishes, every interleaving finishes, with the
same result.

A plan has no sizes. Its regions count *blocks*, the pieces into which the shards of the data are
cut; the number of rows of each block, zero included, is bound when the plan is executed
(`weft.plan.binding.bind`). So a plan is proved once for every size.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple, get_args

from weft.plan.kernel import Kernel
from weft.plan.launch import Launch
from weft.plan.lazy import PerRank
from weft.plan.values import Value

Role = Literal["input", "output", "workspace", "eager", "inout", "private"]

ANY_BLOCK = -1
"""In place of a block's number: a slot for any block, one at a time, with the rows of the largest.
"""

ROW = -2
"""A block of one row, independent of the bound sizes: buffers without `blocks` consist of these."""


class Region(NamedTuple):
    """Blocks ``start:stop`` of a named buffer on a rank; in a plan over rows, rows
    ``start:stop``.
    """

    rank: int
    buffer: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Whether both regions share a block."""
        return self[:2] == other[:2] and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.buffer}@{self.rank}[{self.start}:{self.stop}]"


class Signal(NamedTuple):
    """A counter on the notified rank: a name, and the one rank that raises it.

    A counter that a rank raises for itself may exist once for each `peer`.
    """

    name: str
    source: int
    peer: int | None = None

    @property
    def what(self) -> str:
        """The name, with the peer if there is one."""
        return self.name if self.peer is None else f"{self.name} {self.peer}"

    def __str__(self) -> str:
        return f"{self.what}<{self.source}"


COMPRESSIONS = ("int8",)
"""The compressions of rows between hosts (`weft.plan.compression`)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the rows of `src` to `dst`; a remote `dst` is a put, a remote `src` a get.

    Between hosts rows may travel as `compress` says, one of `COMPRESSIONS`: then `dst` has them
    rounded (`weft.kernels.compression.rounded`). Empty: as they are.
    """

    src: Region
    dst: Region
    compress: str = ""

    def __str__(self) -> str:
        return f"copy   {self.src} -> {self.dst}{self.compress and f' as {self.compress}'}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `kernel` on the rows of `srcs`, with its result in `dst`.

    Sources of which the kernel needs every row (`Kernel.whole`) have any blocks, all others those
    of `dst`. The last source of a kernel that accumulates (`Kernel.accumulates`) may be `dst`.
    `weight` names a constant operand of the executing rank, and the bias that belongs to it.
    """

    kernel: Kernel
    srcs: tuple[Region, ...]
    dst: Region
    weight: str | None = None

    def __str__(self) -> str:
        weight = f" with {self.weight}" if self.weight not in (None, self.dst.buffer) else ""
        sources = (f"{'all ' * (at in self.kernel.whole)}{s}" for at, s in enumerate(self.srcs))
        return f"{self.kernel.name:<6} {', '.join(sources)} -> {self.dst}{weight}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """``dst = srcs[0] + srcs[1] + …`` in this order, accumulated in float32 (float64 in float64,
    integers exactly).

    `op` is ``sum``, ``avg`` (the sum divided by the number of the plan's ranks), ``max`` or
    ``min``. `weft.plan.reduced` makes the value that a plan's result promises for it.
    """

    srcs: tuple[Region, ...]
    dst: Region
    op: str = "sum"

    def __str__(self) -> str:
        return f"reduce {self.op} {' + '.join(map(str, self.srcs))} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Notify:
    """Add 1 to `rank`'s counter `signal`, after everything above it in this lane is visible there
    (release).

    A `relaxed` one implies only that the executing rank has begun this execution: nothing that it
    has done since need be visible.
    """

    rank: int
    signal: Signal
    relaxed: bool = False

    def __str__(self) -> str:
        return f"{'begun ' if self.relaxed else 'notify'} {self.signal} on {self.rank}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold this lane until its rank's counter `signal` has grown by `count` in this execution
    (acquire).
    """

    signal: Signal
    count: int

    def __str__(self) -> str:
        return f"wait   {self.signal} >= {self.count}"


Instruction = Copy | Compute | Reduce | Notify | Wait

LANES = ("compute", "comm")
"""The lanes that every engine runs; engines of streams have one more for each further link,
``comm1``, ``comm2``, ….
"""

Lanes = Mapping[str, tuple[Instruction, ...]]
"""The lanes of a rank by name."""


_THREAD_BLOCK, _PORT = "tb", "port"


def thread_block(number: int) -> str:
    """The name of the lane of a thread block of a rank, in plans of other systems."""
    return f"{_THREAD_BLOCK}{number}"


def port(number: int) -> str:
    """The name of the lane of a rank's port, which puts rows that thread blocks have posted. A rank
    may end a plan before its ports are done.
    """
    return f"{_PORT}{number}"


def _numbered(name: str, prefix: str) -> bool:
    """Whether a lane is one of several with this prefix."""
    return name.startswith(prefix) and name[len(prefix) :].isdigit()


def is_port(name: str) -> bool:
    """Whether a lane is a port."""
    return _numbered(name, _PORT)


def is_engines_lane(name: str) -> bool:
    """Whether some engine runs a lane of this name."""
    return name in LANES or _numbered(name, LANES[1])


def is_lane(name: str) -> bool:
    """Whether a lane may have this name: some engine runs it, or engines run an ordinary plan
    that is made of this one.
    """
    return is_engines_lane(name) or _numbered(name, _THREAD_BLOCK) or is_port(name)


@dataclass(frozen=True)
class Buffer:
    """The blocks of a buffer on each rank, and its role: an input, an output, or workspace shared
    with other plans.

    Eager buffers are two small workspaces: plans that use them alternate between both and
    synchronize (`Plan.synchronizes`), so that a rank need not be notified that one may be written
    again.

    Plans of other systems also have *inout* buffers, outputs that hold the caller's rows at the
    beginning and may be written more than once, and *private* ones: memory of this plan alone, of
    which there are `copies` that its executions use in turn. The rows of a `flagged` private buffer
    have flags: a read of a row waits until this execution has written it, once. Engines execute
    ordinary plans that are made of such ones.

    `rows` has the number of blocks on each rank, and `blocks` their numbers in the plan, or
    `ANY_BLOCK`; without `blocks` each is one row. Raises `ValueError` for another role.
    """

    role: Role
    rows: tuple[int, ...]
    blocks: tuple[Sequence[int], ...] = ()
    copies: int = 1
    flagged: bool = False

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            *most, last = get_args(Role)
            raise ValueError(
                f"the role of a buffer is {', '.join(most)} or {last}; got {self.role!r}"
            )

    @classmethod
    def of(cls, role: Role, blocks: Iterable[Sequence[int]]) -> Buffer:
        """A buffer of these blocks on each rank."""
        blocks = tuple(blocks)
        return cls(role, tuple(map(len, blocks)), blocks)

    @property
    def given(self) -> bool:
        """Whether the caller has it: an input, an output or both."""
        return self.role in ("input", "output", "inout")

    def numbers(self, rank: int) -> Sequence[int]:
        """The number of each block on a rank, or `ANY_BLOCK` or `ROW`."""
        return self.blocks[rank] if self.blocks else (ROW,) * self.rows[rank]


@dataclass(frozen=True)
class Plan:
    """One execution of an operator on every rank.

    `lanes[rank]` maps lane names to instructions. `result` has the values of the outputs at the
    end, by regions that cover all rows of each rank's outputs. `pieces` has the number of blocks
    into which each shard is cut; blocks are numbered over all shards. `synchronizes` promises that
    no rank ends the plan before all have begun it. Blocks have a multiple of `rows_multiple` rows,
    but for the last block of a shard that does not divide. `launch`: a kernel of a GPU executes the
    copies of a rank's rows to all ranks, with the notifies and waits around them, in one launch;
    engines without kernels reject such a plan.

    `lanes` and `result` may be computed when they are read (`weft.plan.lazy`).

    Examples:
        >>> from weft.schedules.all_gather import all_gather
        >>> plan = all_gather(ranks=2, pieces=1)
        >>> plan.operator, plan.algorithm, plan.ranks
        ('all_gather', 'pull', 2)
        >>> print(plan)
        all_gather / pull on 2 ranks
        ...
    """

    operator: str
    algorithm: str
    buffers: Mapping[str, Buffer]
    lanes: Sequence[Lanes]
    result: Mapping[Region, Value] = field(default_factory=dict)
    pieces: tuple[int, ...] = ()
    synchronizes: bool = False
    rows_multiple: int = 1
    launch: Launch | None = None

    @property
    def request(self) -> str:
        """A text that determines the lanes, if there is one; else empty."""
        return self.lanes.request if isinstance(self.lanes, PerRank) else ""

    @property
    def uniform(self) -> bool:
        """Whether all ranks do the same, so that the lanes of one rank have all signal names and
        buffers of the plan.
        """
        return bool(self.request) and not self._examples

    def common(self, ranks: Collection[int]) -> Plan:
        """A part with all signal names and buffers of the plan: what ranks must agree on follows
        from it. In a uniform plan any `ranks` have them.
        """
        if not isinstance(self.lanes, PerRank) or not self.request:
            return self
        every, chosen = self.lanes, self._examples or ranks
        lanes = (every.make(r) if r in chosen else {} for r in range(self.ranks))
        return replace(self, lanes=tuple(lanes), result={})

    @property
    def _examples(self) -> Collection[int]:
        return self.lanes.examples if isinstance(self.lanes, PerRank) else ()

    @property
    def digest(self) -> int:
        """A checksum by which ranks compare their plans."""
        lanes = self.request or repr(self.lanes)
        return zlib.crc32(f"{lanes} {self.rows_multiple} {self.launch}".encode())

    def part(self, ranks: Container[int]) -> Plan:
        """The plan with the lanes of these ranks only, and without a result: it can be executed by
        a rank of a uniform plan, or simulated, but not proved.
        """
        lanes = self.lanes if isinstance(self.lanes, PerRank) else PerRank.of(self.lanes)
        return replace(self, lanes=lanes.only(ranks, {}), result={})

    def with_lanes(
        self, change: Callable[[Lanes], Lanes], request: str | None = None, **fields: Any
    ) -> Plan:
        """The plan with the lanes of each rank changed, and other `fields`; `request` determines
        the changed lanes, if this plan has one.
        """
        lanes = self.lanes if isinstance(self.lanes, PerRank) else PerRank.of(self.lanes)
        named = self.request and (self.request if request is None else request)
        return replace(self, lanes=lanes.changed(change, named), **fields)

    def with_instructions(
        self, change: Callable[[Instruction], Instruction], request: str, **fields: Any
    ) -> Plan:
        """The plan with each instruction changed, as `with_lanes`."""

        def changed(lanes: Lanes) -> Lanes:
            return {name: tuple(map(change, lane)) for name, lane in lanes.items()}

        return self.with_lanes(changed, request, **fields)

    @property
    def ranks(self) -> int:
        return len(self.lanes)

    def instructions(self) -> Iterator[tuple[int, Instruction]]:
        """All instructions, lane after lane, each with the rank that executes it."""
        return (
            (rank, i)
            for rank, lanes in enumerate(self.lanes)
            for lane in lanes.values()
            for i in lane
        )

    def notifies(self) -> list[int]:
        """The number of notifies to other ranks of each rank in one execution: atomic operations on
        memory of peers.
        """
        raised = Counter(
            rank for rank, i in self.instructions() if isinstance(i, Notify) and i.rank != rank
        )
        return [raised[rank] for rank in range(self.ranks)]

    @cached_property
    def notified(self) -> Sequence[Mapping[Signal, int]]:
        """For each rank its counters, each with the number of notifies in one execution."""
        raised: list[dict[Signal, int]] = [{} for _ in range(self.ranks)]
        for _, i in self.instructions():
            if isinstance(i, Notify) and 0 <= i.rank < self.ranks:
                raised[i.rank][i.signal] = raised[i.rank].get(i.signal, 0) + 1
        return raised

    def signal_names(self) -> list[str]:
        """The names of all signals, in alphabetic order."""
        return sorted(
            {i.signal.name for _, i in self.instructions() if isinstance(i, Notify | Wait)}
        )

    def shared_buffers(self, hosts: Sequence[int] | None = None) -> set[str]:
        """The names of the buffers that some rank accesses on another, which must be in symmetric
        memory.

        With `hosts`, the host of each rank, only accesses to ranks of the same host count.
        """
        hosts = hosts or (0,) * self.ranks
        every = ((rank, region) for rank, i in self.instructions() for region in accesses(i))
        return {
            region.buffer
            for rank, region in every
            if region.rank != rank and hosts[region.rank] == hosts[rank]
        }

    def inside(self, region: Region) -> bool:
        """Whether the region exists in this plan."""
        buffer = self.buffers.get(region.buffer)
        return (
            buffer is not None
            and 0 <= region.rank < self.ranks
            and 0 <= region.start <= region.stop <= buffer.rows[region.rank]
        )

    def numbers(self, region: Region) -> Sequence[int]:
        """The numbers of a region's blocks."""
        return self.buffers[region.buffer].numbers(region.rank)[region.start : region.stop]

    def sizing_region(self, instruction: Instruction) -> Region:
        """The region that determines the rows that an instruction writes: the first one of these
        blocks without `ANY_BLOCK`.
        """
        every = aligned(instruction)
        return next((region for region in every if ANY_BLOCK not in self.numbers(region)), every[0])

    def promised(self, rank: int) -> dict[Signal, int]:
        """The counters of `rank`, each with its increase in one execution.

        If a text determines the lanes it follows from the rank's own: a plan waits for all its
        notifies but "free", for which the next plan waits. In a uniform plan a rank that sends
        "free" to a peer gets "free" from that peer; in others the notifies of peers are counted.
        """
        totals = {} if self.uniform else dict(self.notified[rank])
        for instruction in chain(*self.lanes[rank].values()) if self.request else ():
            match instruction:
                case Wait(signal, count) if count > totals.get(signal, 0):
                    totals[signal] = count
                case Notify(peer, Signal("free")) if self.uniform:
                    totals[Signal("free", peer)] = 1
        return totals

    def __str__(self) -> str:
        return show(self)


def reads(instruction: Instruction) -> tuple[Region, ...]:
    """The regions that an instruction reads."""
    match instruction:
        case Copy(src, _):
            return (src,)
        case Compute(_, srcs, _) | Reduce(srcs, _):
            return srcs
        case _:
            return ()


def writes(instruction: Instruction) -> tuple[Region, ...]:
    """The regions that an instruction writes."""
    return () if isinstance(instruction, Notify | Wait) else (instruction.dst,)


def whole_sources(instruction: Instruction) -> Collection[int]:
    """The positions of the sources of which an instruction needs every row, whatever it writes."""
    return instruction.kernel.whole if isinstance(instruction, Compute) else ()


def aligned(instruction: Instruction) -> tuple[Region, ...]:
    """The regions of an instruction that have the same blocks: what it writes, and its sources but
    for `whole_sources`.
    """
    apart = whole_sources(instruction)
    sources = reads(instruction)
    if apart:
        sources = tuple(src for at, src in enumerate(sources) if at not in apart)
    return writes(instruction) + sources


def accumulates(instruction: Instruction) -> bool:
    """Whether an instruction computes its result from what its destination held."""
    return (
        isinstance(instruction, Compute)
        and instruction.kernel.accumulates
        and instruction.dst in instruction.srcs[-1:]
    )


def accesses(instruction: Instruction) -> tuple[Region, ...]:
    """The regions that an instruction reads or writes."""
    return reads(instruction) + writes(instruction)


def show(plan: Plan, ranks: Iterable[int] | None = None) -> str:
    """The plan as text: for each rank, or each of these `ranks`, its lanes side by side."""
    lines = [f"{plan.operator} / {plan.algorithm} on {plan.ranks} ranks"]
    unit = "blocks" if plan.pieces else "rows"
    for name, buffer in plan.buffers.items():
        rows = buffer.rows if len({*buffer.rows}) > 1 or plan.ranks < 8 else (buffer.rows[0], "…")
        lines.append(f"  {buffer.role:<9} {name:<9} {unit} per rank: {', '.join(map(str, rows))}")
    for rank in range(plan.ranks) if ranks is None else ranks:
        lanes = {name: list(map(str, lane)) for name, lane in plan.lanes[rank].items()}
        lines += ["", f"rank {rank}", *_columns(lanes)]
    return "\n".join(lines)


def _columns(lanes: Mapping[str, Sequence[str]]) -> Iterable[str]:
    widths = {name: max(map(len, [name, *cells])) for name, cells in lanes.items()}
    yield "  " + " | ".join(name.ljust(widths[name]) for name in lanes).rstrip()
    yield "  " + "-+-".join("-" * widths[name] for name in lanes)
    for cells in zip_longest(*lanes.values(), fillvalue=""):
        yield (
            "  "
            + " | ".join(
                cell.ljust(width) for cell, width in zip(cells, widths.values(), strict=True)
            ).rstrip()
        )
