"""What ranks exchange to agree on how they execute calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

import weft._native as _native
from weft.engines import engine
from weft.plan import Plan
from weft.schedules import all_gather
from weft.schedules.barrier import barrier
from weft.schedules.levels import Levels
from weft.world import World, memory

_LONGEST = 4 << 10
"""Bytes of a text: peers must know how many are sent."""


def synchronize(world: World, call: str, timeout: float | None = None) -> None:
    """Wait until all ranks make a call; collective. `call` describes it: the first line for errors,
    the second with the values that must be equal on all ranks, as in `Engine.execute_as`.
    """
    with _unrecorded(world):
        engine(world).execute_as(call, _begin(_operator(call), world.levels), {}, timeout=timeout)


def exchange(world: World, call: str, text: str, timeout: float | None = None) -> list[str]:
    """The texts of all ranks, of up to 4 KiB each; collective. `call` describes the call of which
    this is a part, as in `synchronize`.
    """
    if world.stream_ordered:  # by their hosts: the caller does not wait for the lanes
        return _by_notes(world, call, text, timeout)
    padded = bytearray(text.encode().ljust(_LONGEST, b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8).view(1, -1)
    every = own.new_empty(world.ranks, _LONGEST)
    plan = _to_all(_operator(call), world.levels, world.hosts.if_several)
    with _unrecorded(world):
        tensors = {"a": own, "gathered": every}
        engine(world).execute_as(call, plan, tensors, (1,) * world.ranks, timeout)
    return [row.numpy().tobytes().rstrip(b"\0").decode() for row in every]


def _by_notes(world: World, call: str, text: str, timeout: float | None) -> list[str]:
    compiled, texts = _native.Compiled(call, 0, [], world.ranks), [text] * world.ranks
    with world.exclusive, world.fail_on_error:
        world.executor.begin(compiled, timeout or world.timeout)
        for peer, theirs, _ in memory.exchange(world, compiled, call, text):
            texts[peer] = theirs
    return texts


def _operator(call: str) -> str:
    """The name of what belongs to the choice for a call, in errors of waits and in profiles."""
    return f"choice of {call.partition('(')[0]}"


@cache
def _begin(operator: str, levels: Levels) -> Plan:
    return replace(barrier(levels, "begin"), operator=operator)


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
