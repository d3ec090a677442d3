"""Broadcast as an operator: one rank's tensor on every rank."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.checks import check_rank
from weft.ops import arguments, collective, granularity
from weft.ops.collective import ANY, CollectiveCall, Handle, planned
from weft.schedules import broadcast as schedule
from weft.schedules.workload import pieces
from weft.world import World

SHARED_BYTES = 256 << 10
"""The minimum size at which the source also copies a part of the rows to its peers."""
PIECE_BYTES = 64 << 10
"""The bytes that the source stages at a time while its peers fetch the previous piece."""


def broadcast(
    tensor: Tensor,
    source: int,
    *,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Overwrite `tensor`, which must be contiguous, with the tensor of rank `source`, and return
    it.

    `tensor` is float16, bfloat16, float32, float64, int8 to int64, uint8 or bool.

    `algorithm` is ``pull`` (ranks read from the source; auto's choice on one host), ``push`` (the
    source puts its rows to each other host, or on one host to each other rank; auto's choice on
    several hosts) or ``ring`` (each rank or host sends the rows to the next, so the source sends
    them once).

    There is no gradient: a parameter, or another leaf, is overwritten as under
    ``torch.no_grad()``; any other tensor that requires a gradient is a `ValueError` outside
    ``torch.no_grad()``.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.broadcast(torch.tensor([weft.init().rank]), 1))
        [tensor([1]), tensor([1])]
    """
    return collective.run(_check, tensor, tensor, (source, algorithm), world, timeout)


def broadcast_async(
    tensor: Tensor,
    source: int,
    *,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `broadcast`, with the same arguments, and return at once.

    Examples:
        >>> def overlapped():
        ...     handle = weft.broadcast_async(torch.tensor([weft.init().rank]), 1)
        ...     busy = torch.randn(64, 64) @ torch.randn(64, 64)  # meanwhile
        ...     return handle.wait()
        >>> with weft.local_world(2) as local:
        ...     local.run(overlapped)
        [tensor([1]), tensor([1])]
    """
    return collective.start(_check, tensor, tensor, (source, algorithm), world, timeout)


def _check(
    world: World, tensor: Tensor, out: Tensor, source: int, algorithm: str
) -> CollectiveCall:
    arguments.check_input(tensor, "tensor", world, ANY)
    arguments.check_algorithm(algorithm, schedule.COLLECTIVE, world)
    source = check_rank(source, "source", world.ranks)
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor must be contiguous, since it is received in place; got strides "
            f"{tensor.stride()}"
        )
    if not tensor.is_leaf:
        collective.check_not_recorded(tensor, "tensor")
    rows, hosts = tensor.view(-1, 1), world.topology
    most, size = len(rows), tensor.nbytes
    none, sends = rows[:0], world.rank == source
    tensors = {"a": rows if sends else none, "out": none if sends else rows}
    symmetric = world.is_symmetric(rows)
    if algorithm in ("auto", "pull") and not symmetric and granularity.measurable(world, size):
        planner = partial(planned, schedule.broadcast, world.ranks, source=source)
        cut = pieces(most, granularity.slot_rows(rows, most, 1, world, PIECE_BYTES))
        plans = granularity.plans(
            world,
            size,
            eager=partial(schedule.eager, source, world.levels),
            slots=partial(planner, cut),
            short=None,
            read=partial(planner, 1, symmetric_a=True),
        )
        first = next(iter(plans.values()))()
        return CollectiveCall(first, (most,), tensors, tensor, plans=plans, size=size)
    if algorithm in ("auto", "pull") and granularity.moved_eagerly(world, size, symmetric):
        return CollectiveCall(schedule.eager(source, world.levels), (most,), tensors, tensor)
    host_of, staged = hosts or range(world.ranks), hosts is None and not symmetric
    if algorithm == "ring":
        plan = planned(
            schedule.ring,
            pieces(most, granularity.sent_rows(rows, most)),
            source,
            host_of,
            staged=staged,
        )
    elif hosts is not None or algorithm == "push":
        plan = planned(schedule.push, source, host_of, staged=staged)
    else:
        shared = size >= SHARED_BYTES
        cut = world.ranks if shared else 1
        if staged:
            cut = pieces(most, granularity.slot_rows(rows, most, 1, world, PIECE_BYTES))
        plan = planned(
            schedule.broadcast, world.ranks, cut, source, symmetric_a=not staged, shared=shared
        )
    return CollectiveCall(plan, (most,), tensors, tensor)
