"""The exchange of row counts: each call with uneven parts first executes a plan that brings every
rank's counts to every rank (`weft.plan.sized`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.checks import integers
from weft.engines import engine
from weft.ops.records import Exchanged
from weft.schedules.counts import counts
from weft.schedules.exchanges import Counts, Direction, ToAll
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.world import World

_ANY = -1
"""In place of an expected number of rows: any number is accepted."""
_REMEMBERED = 512
"""Matrices of sizes by which it is known that a call is likely to be repeated: only such calls are
kept in the call cache, since where tokens are routed anew every call has other sizes.
"""


def check(
    rows: int, sent: Sequence[int] | None, expected: Sequence[int] | None, parts: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The parts into which a rank's rows are split, and those that it expects, if it says so;
    `parts` are their numbers. Raises `ValueError` or `TypeError` if these are no such sizes.
    """
    ins = tuple(integers(() if sent is None else sent, "input_split_sizes"))
    outs = None if expected is None else tuple(integers(expected, "output_split_sizes"))
    given, taken = parts
    if (
        (len(ins), taken if outs is None else len(outs)) != parts
        or min((*ins, *(outs or ())), default=0) < 0
        or (sum(ins) != rows)
    ):
        sizes = (
            f"input_split_sizes and output_split_sizes must be {given} sizes each"
            if given == taken
            else f"input_split_sizes must be {given} sizes and output_split_sizes {taken}"
        )
        raise ValueError(
            f"{sizes}, none negative, and input_split_sizes must add up to {rows} rows; got "
            f"{[*ins]} and {None if outs is None else [*outs]}"
        )
    return ins, outs


def exchange(
    world: World,
    operator: str,
    direction: Direction | ToAll,
    sent: Sequence[int],
    expected: Sequence[int] | None,
    unit: str = "rows",
    timeout: float | None = None,
) -> Exchanged:
    """The parts that ranks send and receive; collective. The parts can be a part of a call's key.

    Raises `ValueError`, on all ranks, if a rank expects other parts than it receives; `unit` is the
    name of what the sizes count.
    """
    exchanges = engine(world).counts
    if (operator, direction) not in exchanges:
        exchanges[operator, direction] = _Exchange(world, operator, direction)
    one: _Exchange = exchanges[operator, direction]
    rest = one.wide - len(sent)
    numbers = [*sent, *(0,) * rest]
    numbers += (_ANY,) * one.wide if expected is None else expected
    numbers += (0,) * (2 * one.wide - len(numbers))
    counts, received = agreed(one.run(numbers, timeout), world.rank, direction, unit)
    return Exchanged(counts, tuple(received), one.remember(counts))


def agreed(
    every: Counts, rank: int, direction: Direction | ToAll, unit: str = "rows"
) -> tuple[Counts, Sequence[int]]:
    """The parts that every rank sends, and those that this rank receives, of the numbers that ranks
    have exchanged: of each rank those that it sends, then those that it expects, both followed by
    zeros if other ranks have more.
    """
    wide = len(every[0]) // 2
    sent = tuple([tuple(row[: direction.parts(of)[0]]) for of, row in enumerate(every)])
    received = direction.received(sent)
    wrong = [
        (receiver, at)
        for receiver, (row, parts) in enumerate(zip(every, received, strict=True))
        if row[-1] != _ANY and row[wide : wide + len(parts)] != parts
        for at in range(len(parts))
        if row[wide + at] != parts[at]
    ]
    if wrong:
        senders = direction.received([[sender] * wide for sender in range(len(every))])
        sender, receiver, at = min((senders[receiver][at], receiver, at) for receiver, at in wrong)
        raise ValueError(
            f"rank {sender} sends rank {receiver} {received[receiver][at]} {unit}, but rank "
            f"{receiver} expects {every[receiver][wide + at]} {unit} from it"
        )
    return sent, received[rank]


class _Exchange:
    """The plan by which ranks exchange the sizes that they send and those that they expect, `wide`
    numbers of each at most, with the tensors that it uses in each call.
    """

    def __init__(self, world: World, operator: str, direction: Direction | ToAll) -> None:
        self.wide = direction.most
        numbers = 2 * self.wide
        few = not world.stream_ordered and 8 * numbers <= EAGER_BUFFER_BYTES
        self.plan = counts(operator, world.placement.levels, world.hosts.if_several, few)
        self.rows = (1,) * world.ranks
        with torch.inference_mode(False):  # later calls may be outside of it
            own = torch.zeros(1, numbers, dtype=torch.int64, device=world.device)
            every = own.new_empty(world.ranks, numbers)
        self.tensors = {"a": own, "gathered": every}
        # to write a few numbers takes less time than to make a tensor of them
        self.own = own.numpy() if own.device.type == "cpu" else None
        self.remembered = dict[Counts, None]()  # the latest matrices
        self.program = engine(world).program(self.plan, self.tensors, self.rows)
        text = f"{self.plan.operator}{direction.options}\n{numbers} numbers{direction.options}"
        self.program.compiled.set_call_text(text)

    def run(self, numbers: Sequence[int], timeout: float | None) -> list[list[int]]:
        """The numbers of all ranks."""
        own, every = self.tensors.values()
        if self.own is None:
            own.copy_(torch.tensor([numbers], device="cpu"))
        else:
            self.own[:] = numbers
        self.program.run(self.tensors, self.rows, {}, timeout=timeout)
        found: list[list[int]] = every.tolist()
        return found

    def remember(self, counts: Counts) -> bool:
        """Whether a matrix is among the latest ones, as it is from now on."""
        if counts in self.remembered:
            return True
        if len(self.remembered) >= _REMEMBERED:
            del self.remembered[next(iter(self.remembered))]
        self.remembered[counts] = None
        return False
