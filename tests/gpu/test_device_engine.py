"""The device engine with threads as lanes: the checks of the host engine, and errors that name lost
and late peers.
"""

import pytest
import torch
from support.checks import (
    all_gather_matmul,
    autograd,
    collectives,
    float8,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from support.ranks import die, on_ranks, start, stream_world

import weft
from weft.engines import engine
from weft.gpu.engine import DeviceEngine
from weft.plan import Signal


def on_lanes(world, *checks):
    """Run the checks of the host engine on this one."""
    assert isinstance(engine(world), DeviceEngine)
    for check, *args in checks:
        torch.manual_seed(world.rank)
        check(world, *args)


def test_two_ranks():
    on_ranks(
        on_lanes,
        2,
        (all_gather_matmul.shapes_and_options,),
        (all_gather_matmul.bad_arguments,),
        (matmul_reduce_scatter.shapes_and_options,),
        (matmul_all_reduce.shapes_and_options,),
        (float8.products, True),
        (autograd.every_algorithm_has_gradients,),
        (collectives.moving, False),
        (collectives.reducing, True, [torch.float16, torch.float64, torch.int8, torch.int64]),
        (collectives.in_the_background,),
        (collectives.late_in_the_background,),
        (collectives.the_same_tensors_again,),
        (collectives.mixed_back_to_back,),
        (matmul_reduce_scatter.different_calls,),
        limit=100,
        context=stream_world,
    )


@pytest.mark.slow
def test_three_ranks():
    rows = [5, 0, 9]
    on_ranks(
        on_lanes,
        3,
        (all_gather_matmul.every_algorithm, rows, 19, 11, True),
        (all_gather_matmul.every_dimension,),
        (all_gather_matmul.back_to_back, "mixed", False),
        (all_gather_matmul.back_to_back, "direct", True),
        (matmul_reduce_scatter.every_algorithm, rows, 19, 11),
        (matmul_reduce_scatter.back_to_back, "ring"),
        (matmul_all_reduce.every_algorithm, 7),
        (autograd.exact,),
        (collectives.uneven,),
        limit=100,
        context=stream_world,
    )


def lost(world):
    a, b = torch.ones(4, 3), torch.ones(3, 2)
    weft.all_gather_matmul(a, b, algorithm="push", chunk_rows=2)
    if world.rank == 1:  # rank 0 is in its next call, and has sent all notifies of this one
        own = engine(world)
        weft.wait(own.counters.signals, own.index(Signal("arrived", 0)), ">=", 4)
        die()
    with pytest.raises(
        weft.PeerLost,
        match=r"rank 1 \(pid \d+\) died while rank 0 waited for .* of all_gather_matmul call",
    ):
        for _ in range(3):
            weft.all_gather_matmul(a, b, algorithm="push", chunk_rows=2)


def late(world):
    signals = world.signals(1)
    weft.all_reduce(torch.ones(3))
    if world.rank == 0:
        with pytest.raises(
            weft.PeerTimeout,
            match=r'rank 0 waited 0.5 s for .* of all_reduce call \d+ \(signal "ready" from rank 1: 0 of 1\)',
        ):
            weft.all_reduce(torch.ones(3), timeout=0.5)
    else:
        with pytest.raises(weft.PeerTimeout, match="rank 0 waited"):
            weft.wait(signals, 0, ">=", 1)


def test_lost_and_late_peers():
    assert start(lost, 2, context=stream_world)[0].error is None
    on_ranks(late, 2, context=stream_world)
