"""Ranks in different calls: signals of one call do not count for another, and the error shows both."""

from __future__ import annotations

import pytest
import torch
from support.ranks import on_ranks

import weft


def behind(world):
    """The source of a broadcast waits for nobody, so that it is in the next call when rank 1, who
    left one out, makes that.
    """
    world.oversubscribed = True  # as where ranks share cores
    weft.barrier()
    signals = world.signals(1)
    if world.rank == 0:
        weft.broadcast(torch.ones(2), 0)
        weft.notify(signals, 0, 1)
    else:
        weft.wait(signals, 0, ">=", 1)
    with pytest.raises(
        weft.MismatchError,
        match=r"operators differ\n  rank 0: all_gather.*\n  rank 1: broadcast|operators differ\n  rank 0: broadcast.*\n  rank 1: all_gather",
    ):
        weft.all_gather(torch.full((4,), float(world.rank)))


def test_signals_of_another_call_count_for_nothing():
    on_ranks(behind, 2)
