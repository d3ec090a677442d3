"""All-gather as an operator: the tensors of all ranks, joined along a dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.engines import engine
from weft.ops import arguments, collective, dims, granularity
from weft.ops.collective import (
    CollectiveCall,
    Plans,
    as_matrix,
    as_rows,
    planned,
    same_place,
)
from weft.ops.handle import Handle
from weft.ops.operator import CollectiveOperator
from weft.plan.launch import Launch
from weft.schedules import all_gather as schedule
from weft.schedules.workload import PIECES, pieces
from weft.uncompiled import untraced
from weft.world import World


@untraced
def all_gather(
    a: Tensor,
    *,
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    launch: Launch | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The tensors `a` of all ranks joined along `dim`, in rank order.

    `a` is float16, bfloat16, float32, float64, int8 to int64, uint8 or bool.

    `shard_rows` are the sizes of that dimension on all ranks if they differ (zero is allowed).
    `algorithm` is ``pull`` (every rank reads its peers' rows), ``push`` (every rank writes to its
    peers) or ``ring``; push and ring make transfers of `chunk_rows`. Auto pushes if `out` is
    symmetric, unless `a` is symmetric, too, and small. `a` may be this rank's own part of `out`; if
    `out` is symmetric a push then makes no copies but to peers.

    On a GPU ``kernel`` is a push by one kernel, where the others use copy engines; `launch`, equal
    on all ranks, is by default ``weft.Launch()``. Rows of dimension 0 may then have any size, and
    in `a` and a symmetric `out` any distance from one to the next: they are read and written in
    place, in accesses of 16 bytes where all addresses and distances are multiples of 16, else in
    narrower ones. If `out` is not symmetric, as a new result, rows go to a workspace and are copied
    from there. On a CPU the kernel runs under TRITON_INTERPRET=1 in worlds of
    ``products="triton"``, without Gluon; elsewhere it is rejected.

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_gather(torch.tensor([weft.init().rank])))
        [tensor([0, 1]), tensor([0, 1])]
    """
    shards = None if shard_rows is None else arguments.as_key(shard_rows)
    options = dim, shards, algorithm, chunk_rows, launch
    return collective.run(check, a, out, options, world, timeout)


@untraced
def all_gather_async(
    a: Tensor,
    *,
    out: Tensor | None = None,
    dim: int = 0,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    launch: Launch | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `all_gather`, with the same arguments, and return at once.

    Examples:
        >>> def overlapped():
        ...     handle = weft.all_gather_async(torch.tensor([weft.init().rank]))
        ...     busy = torch.randn(64, 64) @ torch.randn(64, 64)  # meanwhile
        ...     return handle.wait()
        >>> with weft.local_world(2) as local:
        ...     local.run(overlapped)
        [tensor([0, 1]), tensor([0, 1])]
    """
    shards = None if shard_rows is None else arguments.as_key(shard_rows)
    options = dim, shards, algorithm, chunk_rows, launch
    return collective.start(check, a, out, options, world, timeout)


def check(
    world: World,
    a: Tensor,
    out: Tensor | None,
    dim: int,
    shard_rows: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
    launch: Launch | None,
) -> CollectiveCall:
    """The checked call, from which other operators can be built."""
    collective.check_input(a, world)
    dim = dims.normal(dim, a.dim())
    arguments.check_algorithm(algorithm, schedule.COLLECTIVE, world)
    arguments.check_chunk_rows(chunk_rows)
    launch = _launch(world, algorithm, chunk_rows, launch)
    strided = launch is not None and dim == 0
    sizes = arguments.check_shard_rows(a.shape[dim], shard_rows, world)
    lead = math.prod(a.shape[:dim])
    rows, start = tuple(lead * size for size in sizes), sum(sizes[: world.rank])

    def is_part(out: Tensor) -> bool:
        return lead == 1 and same_place(a, out.narrow(dim, start, a.shape[dim]))

    result = arguments.result(
        out, dims.resized(a.shape, dim, sum(sizes)), a.dtype, [a], world, is_part, strided=strided
    )
    in_place = out is not None and is_part(out)
    rows_of = as_rows if strided else partial(as_matrix, dim=dim)
    matrix, gathered = rows_of(a), rows_of(result)
    # If lead is not 1 the rows of a rank are not contiguous in the result.
    target = gathered if lead == 1 else torch.empty_like(gathered)
    # In place the rows of each rank begin at another offset: they are not one symmetric tensor.
    symmetric = world.is_symmetric(matrix) and not in_place
    copied = collective.parts(result, target, dim, sizes) if lead != 1 else ()
    return _AllGather(
        world,
        rows,
        {"a": matrix, "gathered": target},
        result,
        copied=copied,
        algorithm=algorithm,
        limit=None if chunk_rows is None else max(1, lead * chunk_rows),
        launch=launch,
        symmetries={"symmetric_a": symmetric, "symmetric_gathered": world.is_symmetric(target)},
    )


class _AllGather(CollectiveCall):
    """The rows of all ranks; `limit` is the caller's limit of the rows of a transfer, `launch` that
    of a kernel, and `symmetries` are the planner's.
    """

    def __init__(
        self,
        world: World,
        rows: Sequence[int],
        tensors: dict[str, Tensor],
        result: Tensor,
        *,
        copied: Sequence[tuple[Tensor, Tensor]],
        algorithm: str,
        limit: int | None,
        launch: Launch | None,
        symmetries: Mapping[str, bool],
    ) -> None:
        self.copied, self.limit = copied, limit
        self.launch, self.symmetries = launch, symmetries
        matrix = tensors["a"]
        size = max(rows) * matrix.shape[1] * matrix.itemsize
        super().__init__(world, "all_gather", rows, tensors, result, size=size, algorithm=algorithm)

    def choose(self) -> Plans:
        world, algorithm, size, limit = self.world, self.algorithm, self.size, self.limit
        matrix, most, hosts = self.tensors["a"], max(self.rows), world.hosts.if_several
        symmetric, symmetric_out = self.symmetries.values()
        planner = partial(planned, schedule.all_gather, world.ranks, hosts=hosts)
        if self.launch is not None:
            launched = {"symmetric_gathered": symmetric_out, "launch": self.launch}
            return {algorithm: partial(planner, 1, algorithm, **launched)}
        reached = symmetric or symmetric_out
        if algorithm in ("auto", "pull") and limit is None:
            eager = partial(schedule.eager, world.placement.levels)
            if not reached and granularity.measurable(world, size):
                return granularity.plans(
                    world,
                    size,
                    eager=eager,
                    slots=partial(planner, pieces(most, _slot_rows(world, matrix, most)), "pull"),
                    short=partial(planner, PIECES, "pull"),
                    read=partial(planner, 1, "pull", symmetric_a=True),
                )
            if granularity.moved_eagerly(world, size, reached):
                return {"eager": eager}
        if algorithm == "auto":
            pushed = symmetric_out and (not symmetric or size >= world.thresholds.pushed_bytes)
            algorithm = "push" if hosts or pushed else "pull"
        if limit is not None:
            chunk = limit
        elif algorithm == "pull" and not symmetric:
            chunk = _slot_rows(world, matrix, most)
        elif algorithm == "push" and symmetric_out and hosts is None:
            chunk = max(1, most)
        else:
            chunk = granularity.sent_rows(matrix, most)
        plan = partial(planner, pieces(most, chunk), algorithm, **self.symmetries)
        return {algorithm: plan}


def _launch(
    world: World, algorithm: str, chunk_rows: int | None, launch: Launch | None
) -> Launch | None:
    """The launch of the kernel; None if another algorithm is called."""
    if algorithm not in schedule.COLLECTIVE.launched:
        if launch is not None:
            raise ValueError(
                f"launch has no effect with algorithm={algorithm!r}, which no kernel executes: "
                'pass algorithm="kernel" too, or no launch'
            )
        return None
    if chunk_rows is not None:
        raise ValueError(
            "chunk_rows has no effect with algorithm='kernel', which puts tiles: pass "
            "launch=weft.Launch(tile_bytes=…)"
        )
    launch = Launch() if launch is None else launch
    if not isinstance(launch, Launch):
        raise TypeError(f"launch must be a weft.Launch; got {type(launch).__name__}")
    engine(world).check_launch(launch)
    return launch


def _slot_rows(world: World, matrix: Tensor, most: int) -> int:
    """The rows, of at most `most` per rank, that are staged at a time."""
    if world.ranks == 2:
        return granularity.exchanged_rows(matrix, most, world)
    return granularity.slot_rows(matrix, most, 1, world)


OPERATOR = CollectiveOperator(schedule.COLLECTIVE, check)
