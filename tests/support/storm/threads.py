"""Several threads of a rank: on one world, each on its own, and making and destroying groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

import weft
from support.storm.rank import Part
from weft.world.world import init_by_store

_ROUNDS = 20


def sharing(part: Part) -> None:
    """Threads that use one world at a time: each call gives what it should, or an error."""
    threads, size = part.draw.choice((2, 4)), part.draw.choice((4, 5000))
    with part.world() as world:
        part.say("world")
        part.fault()
        for turn in range(1, _ROUNDS + 1):
            _together(threads, lambda _, turn=turn: _summed(weft.all_reduce, world, turn, size))


def sharing_a_group(part: Part) -> None:
    """Threads that use one process group at a time: torch promises that calls are made one after
    the other.
    """
    threads, size, background = (
        part.draw.choice((2, 4)),
        part.draw.choice((4, 5000)),
        part.draw.random() < 0.5,
    )

    def reduce(given: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(given, async_op=background)
        if background:
            work.wait()
        return given

    with part.world() as world:
        part.say("world")
        for turn in range(1, _ROUNDS + 1):
            _together(threads, lambda _, turn=turn: _summed(reduce, world, turn, size))


def each_its_own(part: Part) -> None:
    """Threads with a world each, which all call at the same time."""
    threads = part.draw.choice((2, 4))
    stores = [part.store(f"thread {number}") for number in range(threads)]
    worlds = [
        init_by_store(store, part.rank, part.trial.ranks, part.trial.limit) for store in stores
    ]
    part.say("world")

    def call(number: int) -> None:
        with worlds[number] as world:
            for turn in range(1, _ROUNDS + 1):
                _summed(
                    lambda given: weft.all_reduce(given, world=world), world, turn * 10 + number, 70
                )
                gathered = weft.all_gather(torch.full((3,), float(world.rank)), world=world)
                assert gathered.tolist() == [
                    float(rank) for rank in range(world.ranks) for _ in range(3)
                ]

    _together(threads, call)


def coming_and_going(part: Part) -> None:
    """Threads that make a world each, use it and leave it, again and again; or a group each, made
    in one order.
    """
    threads, groups, turns = part.draw.choice((2, 3)), part.draw.random() < 0.5, 4
    stores = [
        [part.store(f"thread {number} {turn}") for turn in range(turns)]
        for number in range(threads)
    ]
    part.say("world")

    def worlds(number: int) -> None:
        for turn, store in enumerate(stores[number]):
            with init_by_store(store, part.rank, part.trial.ranks, part.trial.limit) as world:
                _summed(lambda given: weft.all_reduce(given, world=world), world, turn, 7)

    if not groups:
        _together(threads, worlds)
        return
    limit = timedelta(seconds=part.trial.limit)
    made = [
        [dist.new_group(backend="weft", timeout=limit) for _ in range(threads)]
        for _ in range(turns)
    ]

    def use_and_destroy(number: int) -> None:
        for turn in made:
            given = torch.full((7,), float(part.rank + 1))
            dist.all_reduce(given, group=turn[number])
            assert torch.equal(given, torch.full((7,), float(sum(range(1, part.trial.ranks + 1)))))
            dist.destroy_process_group(turn[number])

    _together(threads, use_and_destroy)


def _summed(
    reduce: Callable[[torch.Tensor], torch.Tensor], world: weft.World, turn: int, size: int
) -> None:
    """Sum what every rank gives in this turn, whatever thread it is that does."""
    found = reduce(torch.full((size,), float(turn * (world.rank + 1))))
    wanted = float(turn * sum(range(1, world.ranks + 1)))
    assert torch.equal(found, torch.full((size,), wanted)), (
        f"the sum is {found[:6].tolist()}…, where {wanted} is right"
    )


def _together(threads: int, call: Callable[[int], None]) -> None:
    """Let threads make a call each at one moment, and raise what they raise: what is no error of
    weft's first.
    """
    ready = threading.Barrier(threads)

    def begin(number: int) -> None:
        ready.wait(10)
        call(number)

    with ThreadPoolExecutor(threads) as pool:
        errors = [
            future.exception()
            for future in [pool.submit(begin, number) for number in range(threads)]
        ]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, weft.WeftError)):
        raise error
