"""Plans that accumulate, by which the proof and the engines are tested: a kernel that needs all
rows of a source, and computes its result from what its destination held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.plan import (
    Buffer,
    Compute,
    Instruction,
    Kernel,
    Notify,
    Plan,
    Region,
    Signal,
    Term,
    Value,
    Wait,
    whole,
)

_PRIME = 65521  # small enough for sums of products with row numbers to be exact


class Fold(Kernel):
    """``3 dst + x + 5 (1 y[0] + 2 y[1] + …)`` modulo a prime, for a row of `x`, all rows of `y`,
    and the row that the destination held, if it is the third source.

    It is exact for integers in float64, and another number for any other rows, order of the rows of
    `y`, or order of accumulations.
    """

    name = "fold"
    whole = (1,)
    accumulates = True

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        x, y, *before = sources
        numbers = torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device)
        total = x + 5 * (y.remainder(_PRIME) * numbers[:, None]).sum(0)
        for held in before:
            total = total + 3 * held
        return total.remainder(_PRIME)


FOLD = Fold()


def gathered(ranks: int, pieces: int) -> Plan:
    """Every rank folds the rows `y` of all ranks, read from their memory, into its result for each
    of its rows `x`, in the order of the ranks from its own on.
    """
    own = [range(rank * pieces, (rank + 1) * pieces) for rank in range(ranks)]
    others = [range(at.start + ranks * pieces, at.stop + ranks * pieces) for at in own]
    orders = [[(rank + step) % ranks for step in range(ranks)] for rank in range(ranks)]

    def lane(rank: int) -> Iterator[Instruction]:
        peers = orders[rank][1:]
        yield from (Notify(peer, Signal("ready", rank)) for peer in peers)
        for peer in orders[rank]:
            if peer != rank:
                yield Wait(Signal("ready", peer), 1)
            for piece in range(pieces):
                x, out = (Region(rank, name, piece, piece + 1) for name in ("x", "out"))
                yield _fold(x, Region(peer, "y", 0, pieces), out, again=peer != rank)
            if peer != rank:
                yield Notify(peer, Signal("read", rank))
        yield from (Wait(Signal("read", peer), 1) for peer in peers)

    def result(rank: int) -> Value:
        every = [whole([(others[peer], (Term(peer, "y", 0),))]) for peer in orders[rank]]
        return _folded(((Term(rank, "x", 0),), y) for y in every)

    return Plan(
        "accumulation",
        "gathered",
        {
            "x": Buffer.of("input", own),
            "y": Buffer.of("input", others),
            "out": Buffer.of("output", own),
        },
        tuple({"compute": tuple(lane(rank))} for rank in range(ranks)),
        {Region(rank, "out", 0, pieces): result(rank) for rank in range(ranks)},
        (pieces,) * (2 * ranks),
    )


def in_turn(ranks: int, pieces: int) -> Plan:
    """Each rank folds its rows `y` into the result of rank 0, for each of its rows `x`, in the
    memory of rank 0 and in the order of the ranks.
    """
    own = [range((1 + rank) * pieces, (2 + rank) * pieces) for rank in range(ranks)]

    def lane(rank: int) -> Iterator[Instruction]:
        for piece in range(pieces):
            if rank:
                yield Wait(Signal("turn", rank - 1), piece + 1)
            rows, to = Region(rank, "x", piece, piece + 1), Region(0, "out", piece, piece + 1)
            yield _fold(rows, Region(rank, "y", 0, pieces), to, again=rank > 0)
            yield Notify((rank + 1) % ranks, Signal("turn", rank))
        if not rank:
            yield Wait(Signal("turn", ranks - 1), pieces)

    every = [((Term(r, "x", 0),), whole([(own[r], (Term(r, "y", 0),))])) for r in range(ranks)]
    return Plan(
        "accumulation",
        "in turn",
        {
            "x": Buffer.of("input", [range(pieces)] * ranks),
            "y": Buffer.of("input", own),
            "out": Buffer.of(
                "output", [range(pieces if rank == 0 else 0) for rank in range(ranks)]
            ),
        },
        tuple({"compute": tuple(lane(rank))} for rank in range(ranks)),
        {Region(0, "out", 0, pieces): _folded(every)},
        (pieces,) * (1 + ranks),
    )


def _fold(x: Region, y: Region, out: Region, again: bool) -> Compute:
    """Fold the rows `y` into `out`, for the first time or `again`."""
    return Compute(FOLD, (x, y, out) if again else (x, y), out)


def _folded(steps: Iterable[tuple[Value, Value]]) -> Value:
    """The value of a row into which all rows of each step were folded: of `x` and all of `y`."""
    value: Value = ()
    for x, y in steps:
        value = FOLD.value((x, y, value) if value else (x, y), None)
    return value
