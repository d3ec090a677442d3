"""All-to-all as an operator: each rank sends a part of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from weft.checks import integers
from weft.ops import arguments, collective, dims, granularity
from weft.ops.all_gather import check as check_all_gather
from weft.ops.collective import CollectiveCall, Plans, as_matrix, planned
from weft.ops.deferred import DeferredHandle
from weft.ops.handle import Handle
from weft.ops.operator import CollectiveOperator
from weft.schedules import all_to_all as schedule
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import PIECES, pieces
from weft.world import World, current


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
    times. The parts are equal, or have the sizes `input_split_sizes` and `output_split_sizes`. All
    ranks must pass both or neither; the sizes are exchanged first, and a difference between ranks
    is a `ValueError` on all ranks.

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_to_all(torch.tensor([1, 2]) + 10 * weft.init().rank))
        [tensor([ 1, 11]), tensor([ 2, 12])]
    """
    sent = None if input_split_sizes is None else arguments.as_key(input_split_sizes)
    received = None if output_split_sizes is None else arguments.as_key(output_split_sizes)
    return collective.run(_check, a, out, (sent, received), world, timeout)


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
    sent = None if input_split_sizes is None else arguments.as_key(input_split_sizes)
    received = None if output_split_sizes is None else arguments.as_key(output_split_sizes)
    if sent is None and received is None:
        return collective.start(_check, a, out, (None, None), world, timeout)
    world = current(world)
    ins, outs, result = _operands(world, a, out, sent, received)
    exchange = collective.start(_check_sizes, _sizes(ins, outs), None, (), world, timeout)

    def prepare(every: Tensor) -> CollectiveCall:
        return _AllToAll(world, a, result, _agreed(every, world, "rows"), True)

    description = collective.describe("all_to_all", a, _check, (sent, received))
    return DeferredHandle(world, exchange, prepare, description, result, timeout)


def _check(
    world: World,
    a: Tensor,
    out: Tensor | None,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
) -> CollectiveCall:
    return check(world, a, out, input_split_sizes, output_split_sizes, "rows")


def check(
    world: World,
    a: Tensor,
    out: Tensor | None,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
    unit: str,
) -> CollectiveCall:
    """The checked call, of which another operator may be made, too; `unit` is the name of a's rows
    in errors.
    """
    sent, received, result = _operands(world, a, out, input_split_sizes, output_split_sizes)
    if input_split_sizes is None and output_split_sizes is None:
        return _AllToAll(world, a, result, (sent,) * world.ranks, False)
    sizes = collective.run(_check_sizes, _sizes(sent, received), None, (), world, None)
    return _AllToAll(world, a, result, _agreed(sizes, world, unit), True)


def _operands(
    world: World,
    a: Tensor,
    out: Tensor | None,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """The numbers of rows that this rank sends to each rank and receives from each, and the
    result.
    """
    collective.check_input(a, world)
    dims.normal(0, a.dim())
    sent, received = _splits(world, a.shape[0], input_split_sizes, output_split_sizes)
    result = arguments.result(out, (sum(received), *a.shape[1:]), a.dtype, [a], world)
    return sent, received, result


class _AllToAll(CollectiveCall):
    """Rank r sends ``counts[r][p]`` rows to rank p."""

    def __init__(
        self,
        world: World,
        a: Tensor,
        result: Tensor,
        counts: Sequence[Sequence[int]],
        sizes_exchanged: bool,
    ) -> None:
        self.sizes_exchanged = sizes_exchanged
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
        eager = partial(schedule.eager, world.levels)
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


def _splits(
    world: World, rows: int, sent: Sequence[int] | None, received: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of its `rows` that this rank sends to each rank, and receives from each."""
    if sent is None and received is None:
        if rows % world.ranks:
            raise ValueError(
                f"{rows} rows do not divide evenly over {world.ranks} ranks: give the split sizes"
            )
        return ((rows // world.ranks,) * world.ranks,) * 2
    ins = tuple(integers(() if sent is None else sent, "input_split_sizes"))
    outs = tuple(integers(() if received is None else received, "output_split_sizes"))
    if not len(ins) == len(outs) == world.ranks or min(ins + outs) < 0 or sum(ins) != rows:
        raise ValueError(
            f"input_split_sizes and output_split_sizes must be {world.ranks} sizes each, none "
            f"negative, and input_split_sizes must add up to {rows} rows; got {[*ins]} and "
            f"{[*outs]}"
        )
    return ins, outs


def _check_sizes(world: World, a: Tensor, out: Tensor | None) -> CollectiveCall:
    """The all-gather of split sizes, under a name of its own."""
    call = check_all_gather(world, a, out, 0, None, "auto", None, None)
    call.name = "sizes of all_to_all"
    return call


def _sizes(sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """A rank's split sizes as they are gathered."""
    return torch.tensor([sent, received], device="cpu").view(1, -1)


def _agreed(every: Tensor, world: World, unit: str) -> tuple[tuple[int, ...], ...]:
    """The number of rows that every rank sends to every rank, of all ranks' split sizes. A
    difference between sender and receiver raises `ValueError`, so on all ranks.
    """
    sizes = every.view(world.ranks, 2, world.ranks)
    sent, expected = sizes[:, 0], sizes[:, 1].t()
    if not torch.equal(sent, expected):
        sender, receiver = [int(i) for i in (sent != expected).nonzero()[0]]
        raise ValueError(
            f"rank {sender} sends rank {receiver} {sent[sender, receiver]} {unit}, but rank "
            f"{receiver} expects {expected[sender, receiver]} {unit} from it"
        )
    return tuple(tuple(row) for row in sent.tolist())


OPERATOR = CollectiveOperator(schedule.COLLECTIVE, _check)
