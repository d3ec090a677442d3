"""All-reduce as an operator: the element-wise reduction of all ranks' tensors on every rank."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.ops import arguments, collective, granularity
from weft.ops.collective import CollectiveCall, Plans, planned, same_place
from weft.ops.handle import Handle
from weft.ops.operator import CollectiveOperator
from weft.plan.binding import split
from weft.schedules import all_reduce as schedule
from weft.schedules.peers import one_rank_per_host
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import pieces
from weft.uncompiled import untraced
from weft.world import World


@untraced
def all_reduce(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The element-wise reduction of all ranks' `a`, with equal bits on all ranks.

    `a` is float16, bfloat16, float32, float64, int8 to int64 or uint8; averages are of floating
    dtypes.

    `op` as in `reduce_scatter`. `algorithm` is ``one_shot`` (every rank reduces everything; auto's
    choice for few bytes), ``two_shot`` (every rank reduces a part and copies the others') or
    ``ring`` (from rank to rank, rounded to a's dtype at every step; on one host, and with
    one rank on each, the sum of part p begins at rank p + 1 and ends at rank p). `out` may be `a`
    itself.

    There is no gradient: an `a` that requires one is a `ValueError` outside ``torch.no_grad()``.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_reduce(torch.tensor([1, weft.init().rank])))
        [tensor([2, 1]), tensor([2, 1])]
    """
    return collective.run(check, a, out, (op, algorithm), world, timeout)


@untraced
def all_reduce_async(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `all_reduce`, with the same arguments, and return at once.

    Examples:
        >>> def overlapped():
        ...     handle = weft.all_reduce_async(torch.tensor([1, weft.init().rank]))
        ...     busy = torch.randn(64, 64) @ torch.randn(64, 64)  # meanwhile
        ...     return handle.wait()
        >>> with weft.local_world(2) as local:
        ...     local.run(overlapped)
        [tensor([2, 1]), tensor([2, 1])]
    """
    return collective.start(check, a, out, (op, algorithm), world, timeout)


def check(world: World, a: Tensor, out: Tensor | None, op: str, algorithm: str) -> CollectiveCall:
    collective.check_reduction(a, op, world)
    arguments.check_algorithm(algorithm, schedule.COLLECTIVE, world)
    result = arguments.result(out, a.shape, a.dtype, [a], world, partial(same_place, a))
    return _AllReduce(world, a, result, op, algorithm, out is not None and same_place(a, out))


class _AllReduce(CollectiveCall):
    """The reduction of all ranks' tensors; `in_place` of this rank's."""

    def __init__(
        self, world: World, a: Tensor, result: Tensor, op: str, algorithm: str, in_place: bool
    ) -> None:
        tensors = {"a": a.reshape(-1, 1).contiguous(), "out": result.view(-1, 1)}
        rows = split(a.numel(), world.ranks)
        self.op, self.in_place = op, in_place
        super().__init__(
            world, "all_reduce", rows, tensors, result, size=a.nbytes, algorithm=algorithm
        )

    def choose(self) -> Plans:
        world, op, algorithm, size = self.world, self.op, self.algorithm, self.size
        flat, most, hosts = self.tensors["a"], self.rows[0], world.hosts.if_several
        symmetric, symmetric_out = map(world.is_symmetric, self.tensors.values())
        if algorithm in ("auto", "one_shot") and granularity.reduced_eagerly(
            world, size, symmetric or symmetric_out
        ):
            return {"eager": partial(schedule.eager, world.placement.levels, op)}
        if algorithm == "auto":
            algorithm = "one_shot" if size <= world.thresholds.eager_bytes else "two_shot"
        few = algorithm == "one_shot" and size * world.ranks <= EAGER_BUFFER_BYTES
        if few and hosts is not None and one_rank_per_host(hosts):
            return {"eager": partial(schedule.eager_over_hosts, tuple(hosts), op)}
        if hosts is not None and not (algorithm == "ring" and one_rank_per_host(hosts)):
            cut = pieces(most, granularity.sent_rows(flat, most))
            algorithm = "ring" if algorithm == "ring" else "two_shot"
            return {algorithm: partial(planned, schedule.put, cut, hosts, algorithm, op)}
        one_shot = algorithm == "one_shot"
        cut = 1 if one_shot else pieces(most, granularity.exchanged_rows(flat, most, world))
        # In one_shot every rank reads all of a: its own may not overwrite it before all have.
        symmetric = symmetric and not (self.in_place and one_shot)
        symmetries = {"symmetric_a": symmetric, "symmetric_out": symmetric_out}
        plan = partial(planned, schedule.all_reduce, world.ranks, cut, algorithm, op, **symmetries)
        return {algorithm: plan}


OPERATOR = CollectiveOperator(schedule.COLLECTIVE, check)
