"""Reduce-scatter as an operator: this rank's part of the element-wise reduction of all ranks'
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from weft.ops import arguments, collective, dims, granularity
from weft.ops.collective import CollectiveCall, Plans, as_matrix, planned, same_place
from weft.ops.handle import Handle
from weft.ops.operator import CollectiveOperator
from weft.schedules import reduce_scatter as schedule
from weft.schedules.workload import pieces
from weft.uncompiled import untraced
from weft.world import World


@untraced
def reduce_scatter(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """This rank's part along `dim` of the element-wise reduction of all ranks' `a`.

    `a` is float16, bfloat16, float32, float64, int8 to int64 or uint8; averages are of floating
    dtypes.

    `op` is ``sum``, ``avg``, ``max`` or ``min``; sums are accumulated in rank order in float32
    (float64 in float64, integers exactly) and rounded once. Several hosts are summed in the order
    of their first ranks; a host of several ranks, other than the owner's, first sums its ranks'
    rows, and rounds the sum to a's dtype.

    Without `shard_rows`, the sizes of the parts, the dimension must divide evenly. `out` may be
    this rank's own part of `a`.

    `algorithm` is ``direct`` (every rank reads its peers' rows; auto's choice on one host),
    ``push`` (rows are put to their owner, one sum per host; auto's choice on several hosts) or
    ``ring`` (sums pass from host to host, or on one host from rank to rank, in the same order, but
    rounded to a's dtype at every step).

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.reduce_scatter(torch.tensor([1, 2])))
        [tensor([2]), tensor([4])]
    """
    shards = None if shard_rows is None else arguments.as_key(shard_rows)
    return collective.run(check, a, out, (op, dim, shards, algorithm), world, timeout)


@untraced
def reduce_scatter_async(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `reduce_scatter`, with the same arguments, and return at once.

    Examples:
        >>> def overlapped():
        ...     handle = weft.reduce_scatter_async(torch.tensor([1, 2]))
        ...     busy = torch.randn(64, 64) @ torch.randn(64, 64)  # meanwhile
        ...     return handle.wait()
        >>> with weft.local_world(2) as local:
        ...     local.run(overlapped)
        [tensor([2]), tensor([4])]
    """
    shards = None if shard_rows is None else arguments.as_key(shard_rows)
    return collective.start(check, a, out, (op, dim, shards, algorithm), world, timeout)


def check(
    world: World,
    a: Tensor,
    out: Tensor | None,
    op: str,
    dim: int,
    shard_rows: Sequence[int] | None,
    algorithm: str,
) -> CollectiveCall:
    """The checked call, of which another operator may be made, too."""
    collective.check_reduction(a, op, world)
    arguments.check_algorithm(algorithm, schedule.COLLECTIVE, world)
    dim = dims.normal(dim, a.dim())
    sizes = arguments.check_parts(a.shape[dim], shard_rows, world)
    lead = math.prod(a.shape[:dim])
    rows, start = tuple(lead * size for size in sizes), sum(sizes[: world.rank])

    def is_part(out: Tensor) -> bool:
        return lead == 1 and same_place(out, a.narrow(dim, start, sizes[world.rank]))

    result = arguments.result(
        out, dims.resized(a.shape, dim, sizes[world.rank]), a.dtype, [a], world, is_part
    )
    if lead == 1:
        matrix = as_matrix(a, dim)
    else:
        matrix = a.new_empty(sum(rows), math.prod(a.shape[dim + 1 :]))
        for part, block in collective.parts(a.detach(), matrix, dim, sizes):
            block.copy_(part)
    tensors = {"a": matrix, "out": as_matrix(result, dim)}
    return _ReduceScatter(world, rows, tensors, result, op, algorithm)


class _ReduceScatter(CollectiveCall):
    """This rank's part of the reduction of all ranks' tensors."""

    def __init__(
        self,
        world: World,
        rows: Sequence[int],
        tensors: dict[str, Tensor],
        result: Tensor,
        op: str,
        algorithm: str,
    ) -> None:
        self.op, matrix = op, tensors["a"]
        to_peers = (sum(rows) - min(rows)) * matrix.shape[1] * matrix.itemsize
        super().__init__(
            world, "reduce_scatter", rows, tensors, result, size=to_peers, algorithm=algorithm
        )

    def choose(self) -> Plans:
        world, op, algorithm = self.world, self.op, self.algorithm
        matrix, most, hosts = self.tensors["a"], max(self.rows), world.hosts.if_several
        symmetric = world.is_symmetric(matrix)
        if algorithm in ("auto", "direct") and granularity.reduced_eagerly(
            world, self.size, symmetric
        ):
            return {"eager": partial(schedule.eager, world.placement.levels, op)}
        if hosts is not None or algorithm in ("push", "ring"):
            cut = pieces(most, granularity.sent_rows(matrix, most))
            algorithm = "ring" if algorithm == "ring" else "push"
            sends = hosts or range(world.ranks)
            return {algorithm: partial(planned, schedule.put, cut, sends, algorithm, op)}
        cut = pieces(most, granularity.exchanged_rows(matrix, most, world))
        plan = partial(
            planned, schedule.reduce_scatter, world.ranks, cut, op, symmetric_a=symmetric
        )
        return {"direct": plan}


OPERATOR = CollectiveOperator(schedule.COLLECTIVE, check)
