"""All-to-all as an operator: each rank sends a part of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.ops import arguments, collective, dims, granularity, split_sizes
from weft.ops.all_gather import check as check_all_gather
from weft.ops.collective import CollectiveCall, Plans, as_matrix, planned
from weft.ops.deferred import DeferredHandle
from weft.ops.handle import Handle
from weft.ops.operator import CollectiveOperator
from weft.ops.rejections import report
from weft.schedules import all_to_all as schedule
from weft.schedules.exchanges import Counts, Direction
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import PIECES, pieces
from weft.uncompiled import untraced
from weft.world import World, current


@untraced
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
    order.

    `a` is float16, bfloat16, float32, float64, int8 to int64, uint8 or bool.

    Every row is sent directly to its rank, also between hosts: in a ring it would be sent several
    times. The parts are equal, or have the sizes `input_split_sizes`, which all ranks pass, or
    none. Ranks exchange these sizes in the call, so the receiver need not know them: the result has
    the rows that arrive. A rank that does passes `output_split_sizes`, too; a difference between
    ranks is a `ValueError` on all ranks.

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_to_all(torch.tensor([1, 2]) + 10 * weft.init().rank))
        [tensor([ 1, 11]), tensor([ 2, 12])]
    """
    try:
        if input_split_sizes is None and output_split_sizes is None:
            return collective.run(_check, a, out, (), world, timeout)
        world = current(world)
        check_timeout(timeout)
        ins, outs = _sizes(world, a, input_split_sizes, output_split_sizes)
        if out is not None and outs is not None:
            _result(a, out, outs, world)
        found = split_sizes.exchange(
            world, "all_to_all", Direction.plain(world.ranks), ins, outs, "rows", timeout
        )
        run = collective.run if found.again else collective.run_once
        return run(_check_uneven, a, out, (found.counts,), world, timeout)
    except Exception as error:
        report(error, world)
        raise


@untraced
def all_to_all_async(
    a: Tensor,
    *,
    out: Tensor | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `all_to_all`, with the same arguments, and return at once.

    Split sizes are exchanged in the background. Rows begin to move only after that: when `done` or
    `wait` of the handle is called, or before this rank's next collective call, which first waits
    until all ranks have made this one. To overlap the rows with a computation, call `done` from
    time to time. A difference between the sizes is a `ValueError` of `wait`.

    Examples:
        >>> def overlapped():
        ...     handle = weft.all_to_all_async(torch.tensor([1, 2]) + 10 * weft.init().rank)
        ...     busy = torch.randn(64, 64) @ torch.randn(64, 64)  # meanwhile
        ...     return handle.wait()
        >>> with weft.local_world(2) as local:
        ...     local.run(overlapped)
        [tensor([ 1, 11]), tensor([ 2, 12])]
    """
    try:
        if input_split_sizes is None and output_split_sizes is None:
            return collective.start(_check, a, out, (), world, timeout)
        world = current(world)
        ins, outs = _sizes(world, a, input_split_sizes, output_split_sizes)
        if outs is None:
            raise ValueError(
                "the result of all_to_all_async is allocated before ranks exchange sizes: give "
                "output_split_sizes, or call all_to_all"
            )
        result = _result(a, out, outs, world)
        both = torch.tensor([ins, outs], device="cpu").view(1, -1)
        exchange = collective.start(_check_sizes, both, None, (), world, timeout)

        def prepare(every: Tensor) -> CollectiveCall:
            rows = every.view(world.ranks, -1).tolist()
            counts, _ = split_sizes.agreed(rows, world.rank, Direction.plain(world.ranks))
            return _AllToAll(world, a, result, counts)

        description = collective.describe("all_to_all", a, _check, ())
        return DeferredHandle(world, exchange, prepare, description, result, timeout)
    except Exception as error:
        report(error, world)
        raise


def _check(world: World, a: Tensor, out: Tensor | None) -> CollectiveCall:
    return check(world, a, out, None)


def _check_uneven(world: World, a: Tensor, out: Tensor | None, counts: Counts) -> CollectiveCall:
    return check(world, a, out, counts)


def check(world: World, a: Tensor, out: Tensor | None, counts: Counts | None) -> CollectiveCall:
    """The checked call, from which other operators can be built: of equal parts, or of parts whose
    `counts` ranks have exchanged.
    """
    collective.check_input(a, world)
    dims.normal(0, a.dim())
    if counts is None:
        if a.shape[0] % world.ranks:
            raise ValueError(
                f"{a.shape[0]} rows do not divide evenly over {world.ranks} ranks: give the split "
                "sizes"
            )
        counts = ((a.shape[0] // world.ranks,) * world.ranks,) * world.ranks
    received = [row[world.rank] for row in counts]
    return _AllToAll(world, a, _result(a, out, received, world), counts)


def _sizes(
    world: World,
    a: Tensor,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The numbers of rows of `a` that this rank sends to each rank, and those that it expects."""
    collective.check_input(a, world)
    dims.normal(0, a.dim())
    parts = world.ranks, world.ranks
    return split_sizes.check(a.shape[0], input_split_sizes, output_split_sizes, parts)


def _result(a: Tensor, out: Tensor | None, parts: Sequence[int], world: World) -> Tensor:
    """The tensor for the parts that a rank receives."""
    return arguments.result(out, (sum(parts), *a.shape[1:]), a.dtype, [a], world)


class _AllToAll(CollectiveCall):
    """Rank r sends ``counts[r][p]`` rows to rank p."""

    def __init__(self, world: World, a: Tensor, result: Tensor, counts: Counts) -> None:
        matrix = as_matrix(a)
        row = matrix.shape[1] * matrix.itemsize
        self.largest = row * max(map(sum, counts))
        to_peers = row * max(sum(sizes) - sizes[rank] for rank, sizes in enumerate(counts))
        tensors = {"a": matrix, "out": as_matrix(result)}
        super().__init__(world, "all_to_all", [*chain(*counts)], tensors, result, size=to_peers)

    def choose(self) -> Plans:
        world, size, hosts = self.world, self.size, self.world.hosts.if_several
        matrix, most = self.tensors["a"], max(self.rows)
        symmetric = world.is_symmetric(matrix)
        planner = partial(planned, schedule.all_to_all, world.ranks)
        slots = pieces(most, granularity.exchanged_rows(matrix, most, world))
        eager = partial(schedule.eager, world.placement.levels)
        if not symmetric and granularity.measurable(world, size):
            return granularity.plans(
                world,
                size,
                eager=eager,
                slots=partial(planner, slots),
                short=partial(planner, PIECES),
                read=partial(planner, 1, symmetric_a=True),
            )
        if granularity.moved_eagerly(world, size, symmetric):
            return {"eager": eager}
        cut = 1 if symmetric or hosts else slots
        few = hosts is not None and not symmetric and self.largest <= EAGER_BUFFER_BYTES
        return {"pull": partial(planner, cut, symmetric_a=symmetric, hosts=hosts, few=few)}


def _check_sizes(world: World, a: Tensor, out: Tensor | None) -> CollectiveCall:
    """The all-gather of split sizes, under a separate name."""
    call = check_all_gather(world, a, out, 0, None, "auto", None, None)
    call.name = "sizes of all_to_all"
    return call


OPERATOR = CollectiveOperator(schedule.COLLECTIVE, _check)
