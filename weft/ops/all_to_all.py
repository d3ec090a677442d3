"""All-to-all as an operator: each rank gives a part of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from weft.ops import arguments, collective, dims, granularity
from weft.ops.all_gather import all_gather
from weft.ops.collective import CollectiveCall, Handle, as_matrix, planned
from weft.schedules import all_to_all as schedule
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import pieces
from weft.world import World


def all_to_all(
    a: Tensor,
    *,
    out: Tensor | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Part p of a's first dimension goes to rank p; the result has the parts for this rank in rank
    order. Any dtype of `ANY`.

    Every row goes straight to its rank, also where hosts are several: round a ring it would be sent
    several times. The parts are even, or as large as `input_split_sizes` and `output_split_sizes`
    say (all ranks give both or none; the sizes are exchanged first, and sizes that do not fit
    together are a `ValueError` on all ranks).

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.
    """
    given = None if input_split_sizes is None else tuple(input_split_sizes)
    taken = None if output_split_sizes is None else tuple(output_split_sizes)
    return collective.run(_check, a, out, (given, taken), world, timeout)


def all_to_all_async(
    a: Tensor,
    *,
    out: Tensor | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `all_to_all`, with the same arguments, and return at once."""
    given = None if input_split_sizes is None else tuple(input_split_sizes)
    taken = None if output_split_sizes is None else tuple(output_split_sizes)
    return collective.start(_check, a, out, (given, taken), world, timeout)


def _check(
    world: World,
    a: Tensor,
    out: Tensor | None,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
) -> CollectiveCall:
    collective.check_input(a, world)
    dims.normal(0, a.dim())
    even = input_split_sizes is None and output_split_sizes is None
    given, taken = _splits(world, a.shape[0], input_split_sizes, output_split_sizes)
    result = arguments.result(out, (sum(taken), *a.shape[1:]), a.dtype, [a], world)
    counts = (given,) * world.ranks if even else _exchange_splits(world, given, taken)
    matrix, hosts = as_matrix(a), world.topology
    symmetric = world.is_symmetric(matrix)
    rows, tensors = [*chain(*counts)], {"a": matrix, "out": as_matrix(result)}
    row = matrix.shape[1] * matrix.itemsize
    most, handed = (
        row * max(map(sum, counts)),
        row * max(sum(given) - given[rank] for rank, given in enumerate(counts)),
    )
    if granularity.moved_eagerly(world, handed, symmetric):
        return CollectiveCall(
            schedule.eager(world.levels), rows, tensors, result, sizes_exchanged=not even
        )
    symmetric = symmetric or granularity.read_in_place(world, most)
    cut = (
        1
        if symmetric or hosts
        else pieces(max(rows), granularity.exchanged_rows(matrix, max(rows), world))
    )
    few = hosts is not None and not symmetric and most <= EAGER_BUFFER_BYTES
    plan = planned(
        schedule.all_to_all, world.ranks, cut, symmetric_a=symmetric, hosts=hosts, few=few
    )
    return CollectiveCall(plan, rows, tensors, result, sizes_exchanged=not even)


def _splits(
    world: World, rows: int, given: Sequence[int] | None, taken: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many of its `rows` this rank gives to each rank, and takes from each."""
    if given is None and taken is None:
        if rows % world.ranks:
            raise ValueError(
                f"{rows} rows do not divide evenly over {world.ranks} ranks: give the split sizes"
            )
        return ((rows // world.ranks,) * world.ranks,) * 2
    given, taken = tuple(() if given is None else given), tuple(() if taken is None else taken)
    if not len(given) == len(taken) == world.ranks or min(given + taken) < 0 or sum(given) != rows:
        raise ValueError(
            f"input_split_sizes and output_split_sizes must be {world.ranks} counts each, none "
            f"negative, the former of {rows} "
            f"rows in all; got {[*given]} and {[*taken]}"
        )
    return given, taken


def _exchange_splits(
    world: World, given: tuple[int, ...], taken: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """The rows that every rank gives to every other, exchanged between ranks; sizes that do not fit
    are an error on all ranks.
    """
    everyone = all_gather(torch.tensor([given, taken]).view(1, -1), world=world).view(
        world.ranks, 2, world.ranks
    )
    sent, expected = everyone[:, 0], everyone[:, 1].t()
    if not torch.equal(sent, expected):
        giver, taker = [int(i) for i in (sent != expected).nonzero()[0]]
        raise ValueError(
            f"rank {giver} gives rank {taker} {sent[giver, taker]} rows, but rank {taker} expects "
            f"{expected[giver, taker]} from it"
        )
    return tuple(tuple(row) for row in sent.tolist())
