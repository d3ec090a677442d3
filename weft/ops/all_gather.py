"""All-gather as an operator: the tensors of all ranks, joined along a dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from weft.ops import arguments, collective, dims, granularity
from weft.ops.collective import CollectiveCall, Handle, as_matrix, planned, same_place
from weft.schedules import all_gather as schedule
from weft.schedules.workload import PIECES, pieces
from weft.world import World


def all_gather(
    a: Tensor,
    *,
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The tensors `a` of all ranks joined along `dim`, in rank order; any dtype of `ANY`.

    `shard_rows` are the sizes of that dimension on all ranks if they differ (zero is allowed).
    `algorithm` is ``pull`` (every rank reads its peers' rows), ``push`` (every rank writes to its
    peers) or ``ring``; push and ring make transfers of `chunk_rows`. Auto pushes if `out` is
    symmetric, unless `a` is symmetric, too, and small. `a` may be this rank's own part of `out`; if
    `out` is symmetric a push then makes no copies but to peers.

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.
    """
    shards = None if shard_rows is None else tuple(shard_rows)
    return collective.run(_check, a, out, (dim, shards, algorithm, chunk_rows), world, timeout)


def all_gather_async(
    a: Tensor,
    *,
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `all_gather`, with the same arguments, and return at once."""
    shards = None if shard_rows is None else tuple(shard_rows)
    return collective.start(_check, a, out, (dim, shards, algorithm, chunk_rows), world, timeout)


def _check(
    world: World,
    a: Tensor,
    out: Tensor | None,
    dim: int,
    shard_rows: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
) -> CollectiveCall:
    collective.check_input(a, world)
    dim = dims.normal(dim, a.dim())
    arguments.check_algorithm(algorithm, schedule.COLLECTIVE, world)
    arguments.check_chunk_rows(chunk_rows)
    sizes = arguments.check_shard_rows(a.shape[dim], shard_rows, world)
    lead = math.prod(a.shape[:dim])
    rows, start = tuple(lead * size for size in sizes), sum(sizes[: world.rank])

    def is_part(out: Tensor) -> bool:
        return lead == 1 and same_place(a, out.narrow(dim, start, a.shape[dim]))

    result = arguments.result(
        out, dims.resized(a.shape, dim, sum(sizes)), a.dtype, [a], world, is_part
    )
    in_place = out is not None and is_part(out)
    matrix, gathered = as_matrix(a, dim), as_matrix(result, dim)
    # If lead is not 1 the rows of a rank are not contiguous in the result.
    target = gathered if lead == 1 else torch.empty_like(gathered)
    # In place the rows of each rank begin at another offset: they are not one symmetric tensor.
    symmetric = world.is_symmetric(matrix) and not in_place
    symmetric_out = world.is_symmetric(target)
    hosts = world.topology
    copied = collective.parts(result, target, dim, sizes) if lead != 1 else ()
    tensors = {"a": matrix, "gathered": target}
    most = max(rows)
    size = most * matrix.shape[1] * matrix.itemsize
    planner = partial(planned, schedule.all_gather, world.ranks, hosts=hosts)
    reached = symmetric or symmetric_out
    if algorithm in ("auto", "pull") and chunk_rows is None:
        if not reached and granularity.measurable(world, size):
            plans = granularity.plans(
                world,
                size,
                eager=partial(schedule.eager, world.levels),
                slots=partial(planner, pieces(most, _chunk(world, matrix, most)), "pull"),
                short=partial(planner, PIECES, "pull"),
                read=partial(planner, 1, "pull", symmetric_a=True),
            )
            first = next(iter(plans.values()))()
            return CollectiveCall(first, rows, tensors, result, copied, plans=plans, size=size)
        if granularity.moved_eagerly(world, size, reached):
            return CollectiveCall(schedule.eager(world.levels), rows, tensors, result, copied)
    if algorithm == "auto":
        pushed = symmetric_out and (not symmetric or size >= world.thresholds.pushed_bytes)
        algorithm = "push" if hosts or pushed else "pull"
    if chunk_rows is not None:
        chunk = lead * chunk_rows
    elif algorithm == "pull" and not symmetric:
        chunk = _chunk(world, matrix, most)
    elif algorithm == "push" and symmetric_out and hosts is None:
        chunk = max(1, most)
    else:
        chunk = granularity.sent_rows(matrix, most)
    symmetries = {"symmetric_a": symmetric, "symmetric_gathered": symmetric_out}
    plan = planner(pieces(most, chunk), algorithm, **symmetries)
    return CollectiveCall(plan, rows, tensors, result, copied)


def _chunk(world: World, matrix: Tensor, most: int) -> int:
    """The rows, of `most` of a rank, that are staged at a time."""
    if world.ranks == 2:
        return granularity.exchanged_rows(matrix, most, world)
    return granularity.slot_rows(matrix, most, 1, world)
