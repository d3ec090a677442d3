"""Ring attention as a plan: ranks keep their queries, and the keys and values of all ranks travel
round the ring; a kernel accumulates the softmax of all that a rank has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Instruction,
    Kernel,
    Notify,
    Plan,
    Region,
    Role,
    Signal,
    Term,
    Value,
    Wait,
)
from weft.plan.language import ROW
from weft.plan.values import whole
from weft.schedules.lanes import enter, leave

SLOTS = 2  # of each rank, for the keys and values that arrive


@dataclass(frozen=True)
class Attend(Kernel):
    """The attention of rows of queries to all rows of keys and values, before it is divided.

    A row of the result has for each head the values weighted by ``exp(logit - maximum)``, the sum
    of these weights, and the maximum of the logits, in float32. What was seen before, the last
    source, is brought to the new maximum and added.
    """

    heads: int
    scale: float

    name = "attend"
    whole = (1, 2)
    accumulates = True

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        queries, keys, values, *seen = (self.by_head(source) for source in sources)
        logits = queries @ keys.mT * self.scale
        if seen:
            output, total, maximum = seen[0].split([values.shape[2], 1, 1], 2)
        else:
            output = queries.new_zeros(*queries.shape[:2], values.shape[2])
            total = queries.new_zeros(*queries.shape[:2], 1)
            maximum = torch.full_like(total, torch.finfo(torch.float32).min)
        highest = torch.cat([maximum, logits], 2).amax(2, keepdim=True)
        weights, kept = (logits - highest).exp(), (maximum - highest).exp()
        output = output * kept + weights @ values
        total = total * kept + weights.sum(2, keepdim=True)
        return torch.cat([output, total, highest], 2).transpose(0, 1).flatten(1)

    def by_head(self, rows: Tensor) -> Tensor:
        return rows.float().unflatten(1, (self.heads, -1)).transpose(0, 1)


@dataclass(frozen=True)
class Divide(Kernel):
    """The weighted values of `Attend` divided by the sum of their weights."""

    heads: int

    name = "divide"

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        by_head = sources[0].unflatten(1, (self.heads, -1))
        return (by_head[..., :-2] / by_head[..., -2:-1]).flatten(1)


def ring_attention(
    queries: Sequence[int], keys: Sequence[int], attend: Attend, over_blocks: bool = False
) -> Plan:
    """The plan for ranks that have these numbers of rows of queries, and of keys and values; or, if
    it is `over_blocks`, these equal numbers of blocks.

    A rank attends to the rows in one slot while they continue to the next rank, and other rows arrive
    in the other slot.
    """
    ranks, room = len(queries), max(keys)

    def place(rank: int, step: int, name: str) -> Region:
        """The rows that have come `step` ranks far: the rank's own, or those in a slot."""
        rows = keys[(rank - step) % ranks]
        start = step % SLOTS * room if step else 0
        return Region(rank, f"{name} of others" if step else name, start, start + rows)

    def compute(rank: int) -> Iterator[Instruction]:
        own, state, out = (
            Region(rank, name, 0, queries[rank]) for name in ("queries", "state", "out")
        )
        previous = (rank - 1) % ranks
        for step in range(ranks):
            if step:
                yield Wait(Signal("arrived", previous), step)
            every = place(rank, step, "keys"), place(rank, step, "values")
            yield Compute(attend, (own, *every, state) if step else (own, *every), state)
            if 0 < step < ranks - SLOTS:
                yield Notify(previous, Signal("attended", rank))
        yield Compute(Divide(attend.heads), (state,), out)
        yield from leave(rank, ranks)

    def comm(rank: int) -> Iterator[Instruction]:
        previous, following = (rank - 1) % ranks, (rank + 1) % ranks
        yield from enter(rank, ranks)
        for step in range(1, ranks):
            if step > 1:
                yield Wait(Signal("arrived", previous), step - 1)
            if step > SLOTS:
                yield Wait(Signal("attended", following), step - SLOTS)
                yield Wait(Signal("forwarded", following), step - SLOTS)
            for name in ("keys", "values"):
                yield Copy(place(rank, step - 1, name), place(following, step, name))
            yield Notify(following, Signal("arrived", rank))
            if 1 < step <= ranks - SLOTS:
                yield Notify(previous, Signal("forwarded", rank))

    def result(rank: int) -> dict[Region, Value]:
        state: Value = ()
        for owner in ((rank - step) % ranks for step in range(ranks)):
            numbers = key_blocks if over_blocks else (ROW,) * keys[owner]
            every = [whole([(numbers, (Term(owner, name, 0),))]) for name in ("keys", "values")]
            seen = [state] if state else []
            state = attend.value([(Term(rank, "queries", 0),), *every, *seen], None)
        return {
            Region(rank, "state", 0, queries[rank]): state,
            Region(rank, "out", 0, queries[rank]): Divide(attend.heads).value([state], None),
        }

    query_blocks = range(queries[0])
    key_blocks = range(queries[0], queries[0] + keys[0])

    def buffer(role: Role, rows: Sequence[int], blocks: Sequence[int]) -> Buffer:
        return Buffer.of(role, [blocks] * ranks) if over_blocks else Buffer(role, tuple(rows))

    arriving = buffer("workspace", [SLOTS * room] * ranks, [*key_blocks] * SLOTS)
    buffers = {
        "queries": buffer("input", queries, query_blocks),
        "keys": buffer("input", keys, key_blocks),
        "values": buffer("input", keys, key_blocks),
        "keys of others": arriving,
        "values of others": arriving,
        "state": buffer("output", queries, query_blocks),
        "out": buffer("output", queries, query_blocks),
    }
    lanes = [{"compute": tuple(compute(rank)), "comm": tuple(comm(rank))} for rank in range(ranks)]
    promised: dict[Region, Value] = {}
    for rank in range(ranks):
        promised |= result(rank)
    pieces = (len(query_blocks), len(key_blocks)) if over_blocks else ()
    return Plan("attention", "ring", buffers, lanes, promised, pieces)
