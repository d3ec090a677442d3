"""All-reduce as an operator: the element-wise reduction of all ranks' tensors on every rank."""

from __future__ import annotations

from functools import lru_cache, partial

from torch import Tensor

from weft.ops import arguments
from weft.ops.collective import (
    Handle,
    Work,
    call_later,
    call_now,
    check_reduction,
    exchanged_rows,
    reduced_at_once,
    same_place,
    sent_rows,
)
from weft.plan import Plan
from weft.plan.binding import split
from weft.schedules import all_reduce as schedule
from weft.schedules.common import Hosts, apart
from weft.schedules.workload import pieces
from weft.world import World


def all_reduce(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The element-wise reduction of all ranks' `a`, with equal bits on all ranks; a dtype of `NUMBERS`.

    `op` as in `reduce_scatter`. `algorithm` is ``one_shot`` (every rank reduces everything; auto's choice for few bytes),
    ``two_shot`` (every rank reduces a part and copies the others') or ``ring`` (from neighbour to neighbour, rounded to a's dtype
    at every hop; on one host, and with one rank on each, the sum of part p begins at rank p + 1 and ends at rank p). `out` may be
    `a` itself.
    """
    return call_now(_prepare, a, out, (op, algorithm), world, timeout)


def all_reduce_async(
    a: Tensor,
    *,
    op: str = "sum",
    out: Tensor | None = None,
    algorithm: str = "auto",
    world: World | None = None,
    timeout: float | None = None,
) -> Handle:
    """Begin `all_reduce`, with the same arguments, and return at once."""
    return call_later(_prepare, a, out, (op, algorithm), world, timeout)


def _prepare(world: World, a: Tensor, out: Tensor | None, op: str, algorithm: str) -> Work:
    check_reduction(a, op, world)
    arguments.check_algorithm(algorithm, schedule.ALGORITHMS, world)
    result = arguments.result(out, a.shape, a.dtype, [a], world, partial(same_place, a))
    in_place = out is not None and same_place(a, out)
    flat, rows, size = a.reshape(-1, 1).contiguous(), split(a.numel(), world.ranks), a.numel() * a.itemsize
    reached = world.is_symmetric(flat) or world.is_symmetric(result)
    if algorithm in ("auto", "one_shot") and reduced_at_once(world, size, reached):
        return Work(schedule.eager(world.levels, op), rows, {"a": flat, "out": result.view(-1, 1)}, result)
    if algorithm == "auto":
        algorithm = "one_shot" if size <= world.thresholds.eager_bytes else "two_shot"
    # Where every rank reads all of a there is no moment at which its own rank may overwrite it.
    symmetric = world.is_symmetric(flat) and not (in_place and algorithm == "one_shot")
    places = symmetric, world.is_symmetric(result)
    put = world.topology is not None and not (algorithm == "ring" and apart(world.topology))
    slot = sent_rows(flat, rows[0]) if put else exchanged_rows(flat, rows[0], world)
    cut = 1 if algorithm == "one_shot" and not put else pieces(rows[0], slot)
    plan = _plan(world.ranks, cut, algorithm, op, *places, world.topology if put else None)
    return Work(plan, rows, {"a": flat, "out": result.view(-1, 1)}, result)


@lru_cache(1024)
def _plan(ranks: int, cut: int, algorithm: str, op: str, symmetric: bool, symmetric_out: bool, hosts: Hosts | None) -> Plan:
    if hosts is not None:
        return schedule.put(cut, hosts, "ring" if algorithm == "ring" else "two_shot", op)
    return schedule.all_reduce(ranks, cut, algorithm, op, symmetric_a=symmetric, symmetric_out=symmetric_out)
