"""Numbers that ranks exchange to agree on how they execute calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from torch import Tensor

from weft.engines import engine
from weft.plan import Plan
from weft.schedules import all_gather, broadcast
from weft.schedules.barrier import barrier
from weft.schedules.levels import Levels
from weft.world import World


def synchronize(world: World, call: str, timeout: float | None = None) -> None:
    """Wait until all ranks make a call; collective. `call` describes it: the first line for errors,
    the second with the values that must be equal on all ranks, as in `Engine.execute_as`.
    """
    with _unrecorded(world):
        engine(world).execute_as(call, barrier(world.levels, "begin"), {}, timeout=timeout)


def from_rank_0(world: World, call: str, numbers: Tensor, timeout: float | None = None) -> None:
    """Overwrite `numbers`, a column of equal size on all ranks, with those of rank 0; collective.

    `call` describes the call of which this is a part, as in `synchronize`.
    """
    source, none = world.rank == 0, numbers[:0]
    tensors = {"a": numbers if source else none, "out": none if source else numbers}
    plan = _from_rank_0(world.levels, world.topology)
    with _unrecorded(world):
        engine(world).execute_as(call, plan, tensors, (len(numbers),), timeout)


def of_all_ranks(
    world: World, operator: str, call: str, numbers: Tensor, timeout: float | None = None
) -> Tensor:
    """The `numbers` of all ranks, a row of equal size from each; collective. `operator` and `call`
    name the call of which this is a part.
    """
    own = numbers.view(1, -1)
    every = own.new_empty(world.ranks, own.shape[1])
    plan = _to_all(operator, world.levels, world.topology)
    tensors = {"a": own, "gathered": every}
    with _unrecorded(world):
        engine(world).execute_as(call, plan, tensors, (1,) * world.ranks, timeout)
    return every


@cache
def _from_rank_0(levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    plan = broadcast.push(0, hosts) if hosts else broadcast.eager(0, levels)
    return replace(plan, operator="auto")


@cache
def _to_all(operator: str, levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    ranks = len(levels[-1])
    plan = (
        all_gather.all_gather(ranks, 1, "push", hosts=hosts) if hosts else all_gather.eager(levels)
    )
    return replace(plan, operator=operator)


@contextmanager
def _unrecorded(world: World) -> Iterator[None]:
    """Do not record the calls in this context, which are parts of another call."""
    recorder, world.recorder = world.recorder, None
    try:
        yield
    finally:
        world.recorder = recorder
