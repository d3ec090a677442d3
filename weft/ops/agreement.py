"""What ranks exchange to agree on how they execute calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

import weft._native as _native
from weft.engines import engine
from weft.plan import Plan
from weft.schedules import all_gather, broadcast
from weft.schedules.barrier import barrier
from weft.schedules.levels import Levels
from weft.world import World, memory

_LONGEST = 4 << 10
"""Bytes of a text that is sent with any number of ranks, as its length is not known before."""


def synchronize(world: World, call: str, timeout: float | None = None) -> None:
    """Wait until all ranks make a call; collective. `call` describes it: the first line for errors,
    the second with the values that must be equal on all ranks, as in `Engine.execute_as`.
    """
    with _unrecorded(world):
        engine(world).execute_as(call, barrier(world.levels, "begin"), {}, timeout=timeout)


def from_rank_0(world: World, call: str, text: str, timeout: float | None = None) -> str:
    """The `text` of rank 0, of up to 4 KiB, on all ranks; collective. `call` describes the call of
    which this is a part, as in `synchronize`.
    """
    if world.stream_ordered:  # by their hosts: the caller does not wait for the lanes
        return _by_notes(world, call, text, timeout)
    sent = torch.zeros(_LONGEST, 1, dtype=torch.uint8, device="cpu")
    source, none = world.rank == 0, sent[:0]
    if source:
        written = text.encode()
        sent[: len(written), 0] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    tensors = {"a": sent if source else none, "out": none if source else sent}
    plan = _from_rank_0(world.levels, world.topology)
    with _unrecorded(world):
        engine(world).execute_as(call, plan, tensors, (len(sent),), timeout)
    return text if source else sent.numpy().tobytes().rstrip(b"\0").decode()


def of_all_ranks(world: World, call: str, numbers: Tensor, timeout: float | None = None) -> Tensor:
    """The `numbers` of all ranks, a row of equal size from each; collective. `call` describes the
    call of which this is a part, as in `synchronize`.
    """
    own = numbers.view(1, -1)
    every = own.new_empty(world.ranks, own.shape[1])
    plan = _to_all(world.levels, world.topology)
    tensors = {"a": own, "gathered": every}
    with _unrecorded(world):
        engine(world).execute_as(call, plan, tensors, (1,) * world.ranks, timeout)
    return every


def _by_notes(world: World, call: str, text: str, timeout: float | None) -> str:
    compiled = _native.Compiled(call, 0, [], world.ranks)
    texts = {world.rank: text}
    with world.exclusive, world.fail_on_error:
        world.executor.begin(compiled, timeout or world.timeout)
        texts |= {peer: theirs for peer, theirs, _ in memory.exchange(world, compiled, call, text)}
    return texts[0]


@cache
def _from_rank_0(levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    plan = broadcast.push(0, hosts) if hosts else broadcast.eager(0, levels)
    return replace(plan, operator="auto")


@cache
def _to_all(levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    ranks = len(levels[-1])
    plan = (
        all_gather.all_gather(ranks, 1, "push", hosts=hosts) if hosts else all_gather.eager(levels)
    )
    return replace(plan, operator="auto")


@contextmanager
def _unrecorded(world: World) -> Iterator[None]:
    """Do not record the calls in this context, which are parts of another call."""
    recorder, world.recorder = world.recorder, None
    try:
        yield
    finally:
        world.recorder = recorder
