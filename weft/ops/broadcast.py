"""Broadcast as an operator: one rank's tensor on every rank."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.checks import check_rank
from weft.ops import arguments, collective, granularity
from weft.ops.collective import ANY, CollectiveCall, Plans, planned
from weft.ops.handle import Handle
from weft.ops.operator import CollectiveOperator
from weft.schedules import broadcast as schedule
from weft.schedules.workload import pieces
from weft.uncompiled import untraced
from weft.world import World

SHARED_BYTES = 256 << 10
"""The minimum size at which the source also copies a part of the rows to its peers: one core alone
does not fill the memory's bandwidth.
"""
SHORT_PIECE_BYTES = 64 << 10
"""The bytes of a shorter piece, which is measured, too. Measured on a 2-core Zen 5: ordinary
tensors of 1 MiB take a third less time than in pieces of 256 KiB.
"""


def piece_bytes(size: int) -> int:
    """The bytes that the source stages at a time, of `size`, while its peers fetch the previous
    piece.

    Measured on a 2-core Zen 4: 32 KiB in two pieces take 0.88 times as long as at once, 2 MiB in
    pieces of 256 KiB 0.75 times as long as of 64 KiB.
    """
    return min(max(size // 4, 16 << 10), 256 << 10)


@untraced
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
    return collective.run(check, tensor, tensor, (source, algorithm), world, timeout)


@untraced
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
    return collective.start(check, tensor, tensor, (source, algorithm), world, timeout)


def check(world: World, tensor: Tensor, out: Tensor, source: int, algorithm: str) -> CollectiveCall:
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
    return _Broadcast(world, tensor, source, algorithm)


class _Broadcast(CollectiveCall):
    """The source's tensor in place of all others."""

    def __init__(self, world: World, tensor: Tensor, source: int, algorithm: str) -> None:
        rows = tensor.view(-1, 1)
        none, sends = rows[:0], world.rank == source
        tensors = {"a": rows if sends else none, "out": none if sends else rows}
        self.matrix, self.source = rows, source
        super().__init__(
            world,
            "broadcast",
            (len(rows),),
            tensors,
            tensor,
            size=tensor.nbytes,
            algorithm=algorithm,
        )

    def choose(self) -> Plans:
        world, source, algorithm, size = self.world, self.source, self.algorithm, self.size
        (most,), hosts = self.rows, world.hosts.if_several
        symmetric = world.is_symmetric(self.matrix)
        staged = hosts is None and not symmetric
        planner = partial(planned, schedule.broadcast, world.ranks, source=source)

        def cut_into(piece: int) -> int:
            return pieces(most, granularity.slot_rows(self.matrix, most, 1, world, piece))

        slots = cut_into(piece_bytes(size))
        if algorithm in ("auto", "pull"):
            eager = partial(schedule.eager, source, world.placement.levels)
            if not symmetric and granularity.measurable(world, size):
                return granularity.plans(
                    world,
                    size,
                    eager=eager,
                    slots=partial(planner, slots),
                    short=partial(planner, cut_into(SHORT_PIECE_BYTES)),
                    read=partial(planner, 1, symmetric_a=True),
                )
            if granularity.moved_eagerly(world, size, symmetric):
                return {"eager": eager}
        sends = hosts or range(world.ranks)
        if algorithm == "ring":
            cut = pieces(most, granularity.sent_rows(self.matrix, most))
            return {"ring": partial(planned, schedule.ring, cut, source, sends, staged=staged)}
        if hosts is not None or algorithm == "push":
            return {"push": partial(planned, schedule.push, source, sends, staged=staged)}
        shared = size >= SHARED_BYTES
        cut = slots if staged else world.ranks if shared else 1
        return {"pull": partial(planner, cut, symmetric_a=not staged, shared=shared)}


OPERATOR = CollectiveOperator(schedule.COLLECTIVE, check)
