"""Profilers of torch show weft's calls: the first and repeated ones, on every engine."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks, stream_world
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import weft

FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def ranges(events):
    """The numbers of weft's ranges, without those of ranks that agree on a choice."""
    names = Counter(event.name for event in events if event.name.startswith("weft:"))
    return {name: names[name] for name in names if not ("::" in name or ":choice of" in name)}


def calls(world):
    """The ranges of three calls of each operator, and of a call with gradients."""
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    recorded = a.clone().requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            for name in FUSED:
                getattr(weft, name)(a, b, algorithm="sequential")
            weft.all_reduce(a)
            weft.barrier()
        forward = weft.all_gather_matmul(recorded, b, algorithm="sequential")
        forward.sum().backward()
        weft.all_reduce_async(a).wait()
    assert recorded.grad is not None
    events = found.events()
    products = [event for event in events if event.name == "weft:matmul_all_reduce"]
    assert all(event.cpu_children for event in products), "the products are inside"
    return ranges(events)


EXPECTED = {
    "weft:all_gather_matmul": 4,  # one with a gradient, which is a reduce-scatter
    "weft:matmul_reduce_scatter": 4,
    "weft:matmul_all_reduce": 3,
    "weft:all_reduce": 3,
    "weft:barrier": 3,
    "weft:all_reduce_async": 1,
    "weft:wait": 1,
}


@pytest.mark.parametrize("context", [None, stream_world], ids=["host", "device"])
def test_every_call_is_shown(context):
    more = {"context": context} if context else {}
    for found in on_ranks(calls, 2, **more):
        assert found == EXPECTED


def one_sided(world):
    here, signals = world.empty(8), world.signals(1)
    peer, there = 1 - world.rank, torch.ones(8)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        weft.put(here, there, peer)
        weft.notify(signals, 0, peer)
        weft.wait(signals, 0, ">=", 1)
        weft.get(there, here, peer)
        weft.put_async(here, there, peer).wait()
        weft.put_notify(here, there, signals, 0, peer)
        weft.wait(signals, 0, ">=", 2)
    return ranges(found.events())


def test_one_sided_calls_are_shown():
    for found in on_ranks(one_sided, 2):
        assert found == {
            "weft:put": 1,
            "weft:get": 1,
            "weft:copy_async": 1,
            "weft:copy": 1,  # of put_notify
            "weft:notify": 2,
            "weft:wait": 3,
        }


def of_a_group(world):
    x = torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.barrier()
    return ranges(found.events())


def test_the_backend_of_torch_distributed_is_shown():
    for found in on_ranks(of_a_group, 2, context=group):
        # a thread of the group may run the asynchronous one, and torch records its own threads
        assert found["weft:all_reduce"] in (2, 3)
        assert found["weft:barrier"] == 1


def fails(world):
    def product(x, weight):
        raise RuntimeError("no product")

    with profile(activities=[ProfilerActivity.CPU]) as found:
        with pytest.raises(RuntimeError, match="no product"):
            weft.all_gather_matmul(torch.ones(2, 2), weft.weight(product, (2, 2), torch.float32))
        torch.ones(3).sum()
    [shown] = [event for event in found.events() if event.name == "weft:all_gather_matmul"]
    return [event.name for event in shown.cpu_children]


def test_the_range_of_a_failed_call_ends():
    [inside] = on_ranks(fails, 1)
    assert "aten::sum" not in inside


def without_a_profiler(world):
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with profile(activities=[ProfilerActivity.CPU]):
        weft.all_gather_matmul(a, b)
    with patch.object(profiler, "record_function", side_effect=AssertionError("a range")):
        for _ in range(2):
            weft.all_gather_matmul(a, b)
            weft.barrier()


def test_there_are_no_ranges_without_a_profiler():
    """Not even after one has ended, nor from the call cache."""
    on_ranks(without_a_profiler, 1)
