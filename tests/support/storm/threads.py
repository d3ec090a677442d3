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
from weft.world.start import init_by_store

_ROUNDS = 20


def sharing(part: Part) -> None:
    """Threads that share one world concurrently: each call gives the right sum, or an error."""
    threads, size = part.draw.choice((2, 4)), part.draw.choice((4, 5000))
    with part.world() as world:
        part.report("world")
        part.fault()
        for value in range(1, _ROUNDS + 1):
            _concurrently(
                threads, lambda _, value=value: _summed(weft.all_reduce, world, value, size)
            )


def sharing_a_group(part: Part) -> None:
    """Threads that share one process group concurrently: torch promises that their calls are
    serialized.
    """
    threads, size, background = (
        part.draw.choice((2, 4)),
        part.draw.choice((4, 5000)),
        part.draw.random() < 0.5,
    )

    def reduce(x: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(x, async_op=background)
        if background:
            work.wait()
        return x

    with part.world() as world:
        part.report("world")
        for value in range(1, _ROUNDS + 1):
            _concurrently(threads, lambda _, value=value: _summed(reduce, world, value, size))


def each_its_own(part: Part) -> None:
    """Threads with one world each, all calling at the same time."""
    threads = part.draw.choice((2, 4))
    stores = [part.store(f"thread {number}") for number in range(threads)]
    worlds = [
        init_by_store(store, part.rank, part.trial.ranks, part.trial.limit) for store in stores
    ]
    part.report("world")

    def call(number: int) -> None:
        with worlds[number] as world:
            for value in range(1, _ROUNDS + 1):
                _summed(lambda x: weft.all_reduce(x, world=world), world, value * 10 + number, 70)
                gathered = weft.all_gather(torch.full((3,), float(world.rank)), world=world)
                assert gathered.tolist() == [
                    float(rank) for rank in range(world.ranks) for _ in range(3)
                ]

    _concurrently(threads, call)


def coming_and_going(part: Part) -> None:
    """Threads that repeatedly make, use and close one world each; or that use and destroy groups
    made in one order.
    """
    threads, groups, rounds = part.draw.choice((2, 3)), part.draw.random() < 0.5, 4
    stores = [
        [part.store(f"thread {number} {index}") for index in range(rounds)]
        for number in range(threads)
    ]
    part.report("world")

    def worlds(number: int) -> None:
        for index, store in enumerate(stores[number]):
            with init_by_store(store, part.rank, part.trial.ranks, part.trial.limit) as world:
                _summed(lambda x: weft.all_reduce(x, world=world), world, index, 7)

    if not groups:
        _concurrently(threads, worlds)
        return
    limit = timedelta(seconds=part.trial.limit)
    made = [
        [dist.new_group(backend="weft", timeout=limit) for _ in range(threads)]
        for _ in range(rounds)
    ]

    def use_and_destroy(number: int) -> None:
        for groups_of_round in made:
            x = torch.full((7,), float(part.rank + 1))
            dist.all_reduce(x, group=groups_of_round[number])
            assert torch.equal(x, torch.full((7,), float(sum(range(1, part.trial.ranks + 1)))))
            dist.destroy_process_group(groups_of_round[number])

    _concurrently(threads, use_and_destroy)


def _summed(
    reduce: Callable[[torch.Tensor], torch.Tensor], world: weft.World, value: int, size: int
) -> None:
    """Sum `value` times rank + 1 over the ranks, and check the sum."""
    found = reduce(torch.full((size,), float(value * (world.rank + 1))))
    wanted = float(value * sum(range(1, world.ranks + 1)))
    assert torch.equal(found, torch.full((size,), wanted)), (
        f"the sum is {found[:6].tolist()}…, where {wanted} is right"
    )


def _concurrently(threads: int, call: Callable[[int], None]) -> None:
    """Let the threads make one call each at the same moment, and raise their errors, other errors
    than weft's first.
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
