"""Triton's kernels under its interpreter, between real processes: the memory and the counters of
peers are real.

Functions that run on a rank import the kernels only after they have selected the interpreter.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.interpreter import interpreted
from support.ranks import on_ranks

import weft
from weft.errors import PeerTimeout
from weft.world import World

pytest.importorskip("triton", "3.6")


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32, call: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(100 * call + rank), dtype=torch.float32
    ).to(dtype)


def primitives(world: World) -> None:
    interpreted()
    from support import primitive_kernels as kernels

    from weft.gpu.kernels import symmetric

    rank, ranks = world.rank, world.ranks
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    box = world.empty(3, 100).fill_(float("nan"))
    counters = symmetric.zeroed(world, 4)
    timeout_record = symmetric.timeout_record(box.device)
    tables = symmetric.bases(world, box), symmetric.bases(world, counters)
    box[0] = data(rank, 100)
    # Row 0 is put to the next rank's row 1; after its arrival the previous rank's row 0 is fetched
    # to row 2.
    kernels.put_and_get[(1,)](
        box, counters, timeout_record, *tables, rank, following, previous, 1 << 40, BLOCK=32
    )
    symmetric.check(timeout_record, "a test")
    assert torch.equal(box[1], data(previous, 100))
    assert torch.equal(box[2], data(previous, 100))

    with pytest.raises(ValueError, match="not a symmetric tensor"):
        symmetric.bases(world, torch.zeros(3))
    weft.barrier(world=world)
    if rank == 0:
        late(world, kernels, symmetric)
        by_the_clock(kernels, symmetric)


def late(world: World, kernels, symmetric) -> None:
    """Four producers, released one by one in another order than that of the waits, after the
    consumer has begun to wait.
    """
    counters = torch.zeros(5, symmetric.COUNTER, dtype=torch.int64)
    source, result = torch.full((4, 64), float("nan")), torch.full((4, 64), float("nan"))
    timeout_record = symmetric.timeout_record(source.device)

    def produce() -> None:
        while not counters[4, 0]:  # raised by the kernel
            pass
        for index in (3, 1, 0, 2):
            source[index] = data(index, 64)
            counters[index, 0] += 2

    producer = threading.Thread(target=produce)
    producer.start()
    kernels.consume[(1,)](source, result, counters, timeout_record, 2, 1 << 40, ROWS=4, COLUMNS=64)
    producer.join()
    symmetric.check(timeout_record, "a test")
    assert torch.equal(result, torch.stack([data(index, 64) for index in range(4)]))


def by_the_clock(kernels, symmetric) -> None:
    """Waits end after their limit by the clock, which here advances by a second each time it is
    read; a counter is raised at its tenth second.
    """
    from weft.gpu.kernels import clock, signals

    def waited(wait: Callable[[torch.Tensor, torch.Tensor, int], object], seconds: int) -> Any:
        """The record of a wait with this limit, and how often it has read the clock."""
        counters, reads = torch.zeros(5, symmetric.COUNTER, dtype=torch.int64), 0
        counters[0, 0], counters[1, 0] = 2, 1

        def tick() -> int:
            nonlocal reads
            reads += 1
            if reads == 10:
                counters[1, 0] = 2
            return reads * 10**9

        clock._host = tick
        wait(counters, record, seconds * 10**9)
        return record.tolist(), reads

    def plan(counters: torch.Tensor, record: torch.Tensor, limit: int) -> None:
        kernels.consume[(1,)](rows, rows, counters, record, 2, limit, ROWS=2, COLUMNS=64)

    def one_sided(counters: torch.Tensor, record: torch.Tensor, limit: int) -> None:
        equal = signals.COMPARISONS["=="]
        signals.compare_kernel[(1,)](counters, 0, 2, 1, equal, 2, record, 0, limit)

    rows, host = torch.zeros(2, 64), clock._host
    for wait in (plan, one_sided):
        record = torch.zeros(4, dtype=torch.int64)
        found, reads = waited(wait, 100)
        assert found[0] == 0
        assert reads >= 10
        for seconds in (3, 0):
            record = torch.zeros(4, dtype=torch.int64)
            found, reads = waited(wait, seconds)
            assert found[:3] == [1 + 1, 2, 1], "counter 1 was to be 2, and was 1"
            assert seconds <= reads - 2 <= seconds + 2
        assert waited(wait, 100) == (found, 2), "a later wait ends at once"
    clock._host = host
    with pytest.raises(PeerTimeout, match=r"a test waited too long for counter 1: 1 of 2"):
        symmetric.check(record[:3], "a test")


def test_primitives_between_processes() -> None:
    on_ranks(primitives, 3)
