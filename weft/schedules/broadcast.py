"""Broadcast: every rank gets the rows of one of them, the source."""

from __future__ import annotations

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.common import Hosts, apart, before, carrier, enter, leave, members, neighbours, others, publish


def broadcast(rows: int, ranks: int, source: int, *, symmetric_a: bool = False) -> Plan:
    """All ranks but `source` get its rows where they lie. The source has them as ``a``, the others as ``out``."""
    lanes, result = [], {}
    for r in range(ranks):
        if r == source:
            own = publish(r, ranks, [(0, rows)], symmetric_a, before(r, ranks) if rows else [], [])
            lanes.append({"compute": (*own.first, *own.last)})
            continue
        own = publish(r, ranks, [], symmetric_a, [], [source] if rows else [])
        there, here = Region(source, own.buffer, 0, rows), Region(r, "out", 0, rows)
        fetch: list[Instruction] = [Wait(Signal("ready", source), 1), Copy(there, here)] if rows else []
        lanes.append({"compute": (*fetch, *own.last)})
        if rows:
            result[here] = (Term(source, "a", 0),)
    at_source = tuple(rows if r == source else 0 for r in range(ranks))
    buffers = {
        "a": Buffer("input", at_source),
        "staged": Buffer("workspace", at_source),
        "out": Buffer("output", tuple(rows - there for there in at_source)),
    }
    return Plan("broadcast", "pull", buffers, tuple(lanes), result)


def push(rows: int, source: int, hosts: Hosts) -> Plan:
    """`broadcast` over several hosts: rows are put to one rank of each other host, and its other ranks read them there."""
    ranks, lanes, result = len(hosts), [], {}
    arrived, alone = Signal("arrived", source), apart(hosts)
    for r in range(ranks):
        lane: list[Instruction] = []
        if r == source:
            near, own = neighbours(r, hosts), Region(r, "a", 0, rows)
            lane = [] if alone else [*enter(r, ranks)]
            if near:
                lane += [Copy(own, own._replace(buffer="staged")), *(Notify(peer, arrived) for peer in near)]
            for host in others(r, hosts):
                to = carrier(r, host, hosts)
                lane += [Wait(Signal("open", to), 1)] if alone else []
                lane.append(Copy(own, Region(to, "out" if alone else "staged", 0, rows)))
                lane += [Notify(peer, arrived) for peer in members(host, hosts)]
        elif alone:
            lane = [Notify(source, Signal("open", r)), Wait(arrived, 1)]
        else:
            holder = source if hosts[r] == hosts[source] else carrier(source, hosts[r], hosts)
            lane = [Wait(arrived, 1), Copy(Region(holder, "staged", 0, rows), Region(r, "out", 0, rows)), *leave(r, ranks)]
        lanes.append({"compute": tuple(lane) if rows else ()})
        if rows and r != source:
            result[Region(r, "out", 0, rows)] = (Term(source, "a", 0),)
    at_source = tuple(rows if r == source else 0 for r in range(ranks))
    buffers = {
        "a": Buffer("input", at_source),
        "staged": Buffer("workspace", (rows,) * ranks),
        "out": Buffer("output", tuple(rows - there for there in at_source)),
    }
    return Plan("broadcast", "push", buffers, tuple(lanes), result)
