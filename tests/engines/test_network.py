"""The network engine: plans of ranks on several hosts, here of one process, with messages over the
loopback in place of memory that hosts do not share.
"""

from __future__ import annotations

import pytest
import torch

import weft
from weft.engines import engine
from weft.engines.network import NetworkEngine
from weft.plan.messages import lower_to_messages
from weft.schedules import all_gather
from weft.schedules.matmul_reduce_scatter import matmul_reduce_scatter
from weft.schedules.workload import Request

PLACES = [(0, 1), (0, 0, 1), (0, 1, 0, 1)]
places = pytest.mark.parametrize("hosts", PLACES, ids=["01", "001", "0101"])


def on(hosts, call):
    with weft.local_world(len(hosts), hosts=hosts, timeout=20) as local:
        return local.run(call)


def gathered(rows, columns=5):
    return torch.cat([torch.full((n, columns), 1.0 + rank) for rank, n in enumerate(rows)])


@places
@pytest.mark.parametrize("algorithm", ["push", "ring"])
def test_a_gather_of_uneven_and_empty_shards(hosts, algorithm):
    ranks = len(hosts)
    plan = all_gather.all_gather(ranks, 2, algorithm, hosts=hosts)
    assert not lower_to_messages(plan, hosts).lanes[0].keys() <= {"compute", "comm"}

    def call():
        world = weft.init()
        own = engine(world)
        assert isinstance(own, NetworkEngine)
        for rows in ([3] * ranks, [0, 4, *[1] * (ranks - 2)], [5, 0, *[2] * (ranks - 2)]):
            out = torch.full((sum(rows), 5), torch.nan)
            a = torch.full((rows[world.rank], 5), 1.0 + world.rank)
            own.execute(plan, {"a": a, "gathered": out}, rows=rows)
            assert torch.equal(out, gathered(rows)), rows
        return [program.original for program in own.programs.values()].count(plan)

    assert on(hosts, call) == [1] * ranks


@places
def test_products_are_sent_while_others_are_computed(hosts):
    """The comm lane of a push, whose messages leave by threads, beside a kernel of the caller's."""
    ranks = len(hosts)
    plan = matmul_reduce_scatter(Request(ranks, 4, "push", hosts=hosts))

    def call():
        world = weft.init()
        a, b = torch.ones(4 * ranks, 8), torch.full((8, 6), 1.0 + world.rank)
        out = torch.empty(4, 6)
        weights = dict.fromkeys(("out", "partial"), b)
        for _ in range(3):
            tensors = {"a": a, "out": out.fill_(7)}
            engine(world).execute(plan, tensors, weights, rows=(4,) * ranks)
            assert torch.equal(out, torch.full((4, 6), 8.0 * sum(range(1, ranks + 1))))

    on(hosts, call)


@places
def test_started_calls_of_several_plans_and_a_call_between_them(hosts):
    ranks = len(hosts)

    def call():
        world = weft.init()
        own = torch.full((2000,), 1.0 + world.rank)
        first, second = weft.all_reduce_async(own), weft.all_gather_async(own[:3])
        third = weft.broadcast(own.clone(), ranks - 1)
        total = sum(range(1, ranks + 1))
        assert torch.equal(first.wait(), torch.full((2000,), float(total)))
        assert torch.equal(second.wait(), gathered([3] * ranks, 1).view(-1))
        assert torch.equal(third, torch.full((2000,), float(ranks)))

    on(hosts, call)


def test_a_repeated_call_is_found_and_sends_the_rows_of_its_own_tensor():
    def call():
        world = weft.init()
        kept = [torch.full((500,), float(i + world.rank)) for i in range(4)]
        found = [weft.all_gather(each) for each in kept]
        assert [(each[0].item(), each[-1].item()) for each in found] == [
            (float(i), float(i + 1)) for i in range(4)
        ]
        return len(engine(world).calls)

    assert on((0, 1), call) == [1, 1]


def test_ranks_that_make_another_call_are_told_by_the_header_of_a_message():
    def call():
        world = weft.init()
        with pytest.raises(weft.MismatchError, match="all_gather"):
            weft.all_gather(torch.ones(4)) if world.rank else weft.all_reduce(torch.ones(4))
        return world.closed is not None

    assert on((0, 1), call) == [True, True]
