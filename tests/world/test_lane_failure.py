"""A lane that fails ends the waits of its rank's other lanes at once, with its own error, on every
engine.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.plans import execute_unproved
from support.ranks import start, stream_world, world

import weft
from weft.kernels import products
from weft.plan import Buffer, Copy, Notify, Plan, Region, Signal, Wait


def passed_on():
    """Rank 0's comm lane waits for a row of rank 2, its compute lane only for its comm lane; rank 1
    takes no part.
    """
    ready, pulled, row = Signal("ready", 2), Signal("pulled", 0), Region(2, "a", 0, 1)
    comm = (Wait(ready, 1), Copy(row, Region(0, "out", 0, 1)), Notify(0, pulled))
    buffers = {"a": Buffer("input", (1, 1, 1)), "out": Buffer("output", (1, 1, 1))}
    return Plan(
        "hand_on",
        "x",
        buffers,
        ({"compute": (Wait(pulled, 1),), "comm": comm}, {}, {"compute": (Notify(0, ready),)}),
    )


def leaves(world):
    a, out, signals = world.empty(1, 4), torch.empty(1, 4), world.signals(1)
    weft.all_reduce(torch.ones(3))  # creates the engine on all ranks
    if world.rank == 1:
        weft.wait(signals, 0, ">=", 1)
    if world.rank == 0:
        execute_unproved(world, passed_on(), {"a": a, "out": out})


@pytest.mark.parametrize("context", [world, stream_world])
def test_the_error_is_that_of_the_lane_that_stopped(context):
    first, second, _ = start(leaves, 3, context=context)
    for outcome in (first, second):
        assert isinstance(outcome.error, weft.PeerLost), outcome
        assert str(outcome.error).startswith("rank 2 (pid "), outcome.error
    assert "closed its world while rank 0 waited for rows 0:1 of hand_on call" in str(first.error)
    assert '(signal "ready" from rank 2: 0 of 1)' in str(first.error)


def raises(world):
    a, b = torch.ones(4, 3), torch.ones(3, 2)
    weft.matmul_reduce_scatter(a, b, algorithm="push")
    failing = KeyError("lost my keys") if world.rank == 0 else None
    with mock.patch.object(products, "prepare", wraps=products.prepare, side_effect=failing):
        weft.matmul_reduce_scatter(a, b, algorithm="push")


def test_a_lane_that_raises():
    first, second = start(raises, 2, context=stream_world)
    assert isinstance(first.error, KeyError), first.trace
    assert isinstance(second.error, weft.PeerLost), second.trace
    assert "rank 0" in str(second.error)
    assert "failed with KeyError: 'lost my keys', while rank 1 waited" in str(second.error)
