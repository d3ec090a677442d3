"""Instructions and lanes that planners share: signals, the use of workspaces, lanes of
transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Term,
    Wait,
)
from weft.plan.lazy import Deferred, PerRank
from weft.schedules.peers import Layout, after, before, examples, rail_peer

Lanes = Mapping[str, Sequence[Instruction]]
"""The lanes of a rank by name."""


def notify_all(rank: int, name: str, peers: Iterable[int]) -> list[Instruction]:
    """Raise the signal `name` of this rank on peers."""
    return [Notify(peer, Signal(name, rank)) for peer in peers]


def wait_all(name: str, peers: Iterable[int], count: int = 1) -> list[Instruction]:
    """Wait until each of these peers has raised its signal `name` `count` times."""
    return [Wait(Signal(name, peer), count) for peer in peers]


def enter(rank: int, ranks: int | Layout) -> list[Instruction]:
    """Wait until no rank uses a workspace for an earlier plan; every plan that uses workspaces
    begins with it. `ranks` is their number, or their layout over hosts.
    """
    return wait_all("free", after(rank, ranks), 0)


def leave(rank: int, ranks: int | Layout) -> list[Instruction]:
    """Notify all peers that this rank has ended its use of all workspaces; every plan that uses
    workspaces ends with it.

    Of the ranks of another host the one to which rows go is the first: the others are notified by
    the message to it, and need no connection.
    """
    peers = before(rank, ranks)
    if isinstance(ranks, Layout):
        by_host = [[*of] for _, of in groupby(peers, lambda peer: ranks[peer])]
        rails = {rail_peer(rank, host, ranks) for host in {*ranks}}
        peers = [peer for of in by_host for peer in sorted(of, key=lambda each: each not in rails)]
    return notify_all(rank, "free", peers)


def open_to(
    sources: Sequence[int], into: str, rank: int, ranks: int | Layout
) -> tuple[list[Instruction], list[Instruction]]:
    """The instructions before and after the puts of `sources` into this rank's memory: (first,
    last). Puts go `into` the caller's tensor ``gathered``, or a workspace.
    """
    if into == "gathered":
        return notify_all(rank, "open", sources), []
    return [], leave(rank, ranks)


def enter_at(
    targets: Sequence[int], into: str, rank: int, ranks: int | Layout
) -> list[Instruction]:
    """The instructions before a lane's puts into the memory of `targets`.

    A workspace is free when all ranks have left the previous plan, a caller's tensor when the
    caller has made this call.
    """
    return wait_all("open", targets) if into == "gathered" else enter(rank, ranks)


class Published(NamedTuple):
    """A rank's rows that peers read: the instructions with which a plan begins and ends, and the
    buffer that peers read.
    """

    first: list[Instruction]
    last: list[Instruction]
    buffer: str


def publish(
    rank: int,
    ranks: int | Layout,
    parts: Sequence[tuple[int, int]],
    symmetric: bool,
    readers: Sequence[int],
    sources: Sequence[int],
) -> Published:
    """Let `readers` read `parts` of this rank's ``a``; this rank reads rows that `sources` publish
    likewise.

    Readers wait for "ready". A symmetric input is read in place, and the caller may write to it
    only after every reader has raised "read"; other inputs are staged in a workspace. A rank that
    publishes and reads nothing raises no "free": the waits of its readers already cover its
    accesses.
    """
    ready = notify_all(rank, "ready", readers)
    if symmetric:
        return Published(ready, notify_all(rank, "read", sources) + wait_all("read", readers), "a")
    stage = [
        Copy(Region(rank, "a", *piece), Region(rank, "staged", *piece))
        for piece in parts
        if piece[0] < piece[1]
    ]
    first = [*enter(rank, ranks), *stage, *ready] if readers else []
    return Published(first, leave(rank, ranks) if sources else [], "staged")


def without_products(plan: Plan) -> Plan:
    """A plan that sums products, without its Computes: the products are an input, ``partial``.

    It does not wait until peers have read the input, so the caller must wait before it writes to
    it again.
    """

    def without(instruction: Instruction) -> tuple[Instruction, ...]:
        match instruction:
            case Compute(_, (src,), Region(_, "out") as dst):
                # of a single rank, so the product is the sum
                return (Reduce((src._replace(buffer="partial"),), dst),)
            case Compute(_, (src,), Region(_, "inbox") as dst):  # made on the rank that adds it up
                return (Copy(src._replace(buffer="partial"), dst),)
            case Compute():
                return ()
        return (instruction,)

    buffers = {name: buffer for name, buffer in plan.buffers.items() if name != "a"}
    return plan.with_lanes(
        lambda lanes: {
            name: tuple(each for i in lane for each in without(i)) for name, lane in lanes.items()
        },
        buffers=buffers | {"partial": replace(buffers["partial"], role="input")},
        result={},
    )


def moves_alone(plan: Plan, buffers: Mapping[str, Buffer]) -> Plan:
    """A plan without its Computes and without a result, whose buffers are `buffers`."""
    return plan.with_lanes(
        lambda lanes: {
            name: tuple(i for i in lane if not isinstance(i, Compute))
            for name, lane in lanes.items()
        },
        buffers=buffers,
        result={},
    )


def products_alone(plan: Plan, exchanges: str) -> Plan:
    """The products of a fused operator's plan, cut and ordered as in it, with all rows there from
    the beginning: no rank waits, moves rows or adds them up.

    ``product = x @ weight``, of one weight: the rows of ``out``, ``partial`` or ``made`` for
    operators that exchange their input, else of ``a``.
    """
    gathers = exchanges == "a"
    made = next(name for name in ("partial", "made", "out") if name in plan.buffers)
    rows = plan.buffers[made if gathers else "a"]

    def alone(one: Compute) -> Compute:
        region = one.dst if gathers else one.srcs[0]
        source, product = region._replace(buffer="x"), region._replace(buffer="product")
        return replace(one, srcs=(source,), dst=product, weight="product")

    def products(lanes: Mapping[str, tuple[Instruction, ...]]) -> Mapping[str, tuple[Compute, ...]]:
        return {"compute": tuple(alone(i) for i in lanes["compute"] if isinstance(i, Compute))}

    return plan.with_lanes(
        products,
        f"{plan.request}, products alone",
        buffers={"x": replace(rows, role="input"), "product": replace(rows, role="output")},
        result=Deferred(
            lambda: {
                Region(rank, "product", 0, blocks): (Term(rank, "x", 0, (rank, "product")),)
                for rank, blocks in enumerate(rows.rows)
            }
        ),
    )


def tidy(lane: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The lane without redundant waits: waits implied by an earlier wait for the same signal, and
    waits with only other waits between them and a wait for a higher count of the same signal.
    """
    tidied: list[Instruction] = []
    waited: dict[Signal, int] = {}
    # the index of each wait after which there are only waits
    waits: dict[Signal, int] = {}
    for instruction in lane:
        if isinstance(instruction, Wait):
            if waited.get(instruction.signal, -1) >= instruction.count:
                continue
            waited[instruction.signal] = instruction.count
            if (index := waits.setdefault(instruction.signal, len(tidied))) < len(tidied):
                tidied[index] = instruction
                continue
        else:
            waits.clear()
        tidied.append(instruction)
    return tuple(tidied)


def concurrent(compute: Sequence[Instruction], transfers: Iterable[Sequence[Instruction]]) -> Lanes:
    """The lane ``compute`` and a concurrent lane for each list of transfers that is not empty:
    ``comm``, ``comm1``, …
    """
    return {"compute": compute} | {
        f"comm{number or ''}": lane for number, lane in enumerate(filter(None, transfers))
    }


def by_rank(
    ranks: int,
    lanes: Callable[[int], Lanes],
    request: object = None,
    different: Collection[int] = (),
) -> PerRank[Mapping[str, tuple[Instruction, ...]]]:
    """The lanes of all ranks, tidy. `request` determines them if all ranks do the same, or if
    `different` ranks together do what any rank does; without it ranks may differ.
    """
    return PerRank(
        ranks,
        lambda rank: {name: tidy(lane) for name, lane in lanes(rank).items()},
        repr(request) if request else "",
        different,
    )


def over_hosts(
    hosts: Layout, lanes: Callable[[int, Layout], Lanes], request: object, *different: int
) -> PerRank[Mapping[str, tuple[Instruction, ...]]]:
    """The lanes of all ranks of several hosts, tidy. `request` determines them.

    `lanes` may leave out only the work for ranks that a layout does not address. `different` ranks
    do work that others do not.
    """

    return PerRank(
        len(hosts),
        lambda rank: {name: tidy(lane) for name, lane in lanes(rank, hosts).items()},
        repr(request),
        examples(hosts, *different),
        lambda rank, host: {
            name: tuple(lane) for name, lane in lanes(rank, hosts.toward(host)).items()
        },
    )
