"""Calls captured in CUDA graphs, whose replays are timed without the time of Python."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.measure.timing import largest
from weft.world import World

Call = Callable[[], object]


def captured(world: World, call: Call) -> Call:
    """A replay of a call that was made before, since a first one loads kernels; collective.

    Ranks capture one after the other, and meanwhile nothing else is done on the device: of ranks
    that are threads, the begin of a capture would break another.
    """
    replay = call
    for rank in range(world.ranks):
        _meet(world)
        if rank == world.rank:
            replay = capture(call)
    _meet(world)
    return replay


def capture(call: Call) -> Call:
    """A replay of a call, which returns what the call has returned."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    own = None if stream == torch.cuda.default_stream() else stream
    with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
        result = call()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def _meet(world: World) -> None:
    """Wait for the hosts of all ranks."""
    largest(world, [0.0])
