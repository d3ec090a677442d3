"""A product whose rows lie partly in another memory: they are fetched in pieces while others are multiplied.

The plan of one rank. With a GPU's own rows in ``a`` and the rest in the host's memory in ``away``, it is an all-gather + matmul
whose peers are behind the bus.
"""

from __future__ import annotations

from weft.plan import Buffer, Copy, Instruction, Matmul, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.all_gather import Arrival
from weft.schedules.all_gather_matmul import join
from weft.schedules.common import chunks


def matmul_from_host(own: int, away: int, *, chunk_rows: int) -> Plan:
    """``out = (a, then away) @ B`` for `own` and `away` rows; those are fetched `chunk_rows` at a time, and joined for products."""
    arrived = Signal("arrived", 0)
    compute: list[Instruction] = [Matmul(Region(0, "a", 0, own), Region(0, "out", 0, own))] if own else []
    comm: list[Instruction] = []
    arrivals: list[Arrival] = []
    for count, (low, high) in enumerate(chunks(away, chunk_rows), 1):
        here = Region(0, "inbox", low, high)
        comm += [Copy(Region(0, "away", low, high), here), Notify(0, arrived)]
        arrivals.append(Arrival(Wait(arrived, count), here, own + low))
    for wait, rows, start in join(arrivals):
        compute += [wait, Matmul(rows, Region(0, "out", start, start + rows.rows))]
    buffers = {
        "a": Buffer.of("input", [range(own)]),
        "away": Buffer.of("input", [range(own, own + away)]),
        "inbox": Buffer.of("workspace", [range(own, own + away)]),
        "out": Buffer.of("output", [range(own + away)]),
    }
    pieces = [("a", 0, own, 0), ("away", own, own + away, -own)]
    result = {
        Region(0, "out", start, stop): (Term(0, name, shift, weights=(0, "out")),)
        for name, start, stop, shift in pieces
        if start < stop
    }
    return Plan("matmul_from_host", "pull", buffers, ({"compute": tuple(compute), "comm": tuple(comm)},), result, (own, away))
