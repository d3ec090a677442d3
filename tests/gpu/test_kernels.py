"""Triton's kernels under its interpreter, between real processes: the memory and the counters of
peers are real.

Functions that run on a rank import the kernels only after they have selected the interpreter.
"""

import threading

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
        box, counters, timeout_record, *tables, rank, following, previous, 1 << 20, BLOCK=32
    )
    symmetric.check(timeout_record, "a test")
    assert torch.equal(box[1], data(previous, 100))
    assert torch.equal(box[2], data(previous, 100))

    with pytest.raises(ValueError, match="not a symmetric tensor"):
        symmetric.bases(world, torch.zeros(3))
    weft.barrier(world=world)
    if rank == 0:
        late(world, kernels, symmetric)
        never(world, kernels, symmetric)


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
    kernels.consume[(1,)](source, result, counters, timeout_record, 2, 1 << 30, ROWS=4, COLUMNS=64)
    producer.join()
    symmetric.check(timeout_record, "a test")
    assert torch.equal(result, torch.stack([data(index, 64) for index in range(4)]))


def never(world: World, kernels, symmetric) -> None:
    """Counter 1 is never raised: the kernel ends, and reports the wait; a later wait returns at
    once.
    """
    counters = torch.zeros(5, symmetric.COUNTER, dtype=torch.int64)
    counters[0, 0], counters[1, 0] = 2, 1
    source, timeout_record = torch.zeros(4, 64), symmetric.timeout_record(torch.device("cpu"))
    kernels.consume[(1,)](
        source, torch.empty(4, 64), counters, timeout_record, 2, 50, ROWS=4, COLUMNS=64
    )
    with pytest.raises(PeerTimeout, match=r"a test waited too long for counter 1: 1 of 2"):
        symmetric.check(timeout_record, "a test")


def test_primitives_between_processes() -> None:
    on_ranks(primitives, 3)
