"""Sums have the promised bits: for every algorithm, dtype and grouping of ranks by host."""

from __future__ import annotations

import pytest
import torch
from support import sums

from weft.checks import name
from weft.engines.reference import Call, run
from weft.plan import accesses
from weft.plan.binding import bind, split
from weft.schedules import all_reduce, matmul_all_reduce, matmul_reduce_scatter, reduce_scatter
from weft.schedules.matmul_reduce_scatter import product_buffer, sum_buffers
from weft.schedules.peers import one_rank_per_host
from weft.schedules.workload import Request, Workload

HOSTS = (
    (0, 0),
    (0, 0, 0),
    (0, 0, 0, 0),
    (0, 1),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 1, 2),
    (0, 0, 1),
    (0, 1, 1),
    (0, 0, 1, 2, 2),
)
ROWS = 23
COLUMNS = 8


def one_host(hosts):
    return len(set(hosts)) == 1


def planned(schedule, hosts, kept):
    """The plans of all algorithms for these hosts."""
    several, reads_peers = None if one_host(hosts) else hosts, ("direct", "put", "one_shot")
    for algorithm in schedule.ALGORITHMS:
        if several is None or algorithm not in reads_peers:
            planner = getattr(schedule, schedule.__name__.rsplit(".", 1)[-1])
            for remote_reads in (True, False) if several is None else (False,):
                yield bind(
                    planner(
                        Request(len(hosts), 3, algorithm, hosts=several, remote_reads=remote_reads)
                    ),
                    kept,
                )


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize(
    "schedule", [matmul_reduce_scatter, matmul_all_reduce], ids=["scatter", "all"]
)
def test_fused_sums_are_rounded_once_by_every_algorithm(schedule, hosts):
    ranks = range(len(hosts))
    kept = split(ROWS, len(hosts))
    if schedule is matmul_reduce_scatter:
        kept[0], kept[-1] = 0, kept[-1] + kept[0]
    rank_order = range(len(hosts)) if one_host(hosts) else hosts
    for dtype, out_dtype in sums.FUSED:
        a = [sums.numbers(rank, ROWS, 1, dtype=dtype) for rank in ranks]
        b = [sums.numbers(rank + 50, 1, COLUMNS, dtype=dtype) for rank in ranks]
        products = [sums.products(*pair, out_dtype) for pair in zip(a, b, strict=True)]
        wanted = sums.blocks(sums.once, products, rank_order, kept, out_dtype)
        if schedule is matmul_all_reduce:
            wanted = [torch.cat(wanted)] * len(hosts)
        held = sum_buffers(Workload("sums", tuple(kept), 1, COLUMNS, name(dtype), name(out_dtype)))
        dtypes = {buffer: getattr(torch, rows.dtype) for buffer, rows in held.items()}
        for plan in planned(schedule, hosts, kept):
            used = {
                region.buffer
                for lanes in plan.lanes
                for lane in lanes.values()
                for i in lane
                for region in accesses(i)
            }
            assert used <= {*dtypes}, "no dtype is left to guesses"
            weights = [
                {product_buffer(plan.algorithm, len(hosts)): weight.to(products[0].dtype)}
                for weight in b
            ]
            (found,) = run(Call(plan, [{"a": rows} for rows in a], weights, dtypes))
            for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
                assert one["out"].dtype == out_dtype
                assert torch.equal(one["out"], other), (plan.algorithm, dtype, out_dtype, rank)


def collectives(hosts, kept):
    """Plans of collectives, each with its order of summation, and whether all ranks have all sums."""
    ranks, even = len(hosts), split(ROWS, len(hosts))
    several = range(ranks) if one_host(hosts) else hosts
    for algorithm, how in (("push", sums.once), ("ring", sums.at_every_host)):
        yield bind(reduce_scatter.put(3, several, algorithm), kept), several, how, False
    if one_host(hosts):
        for symmetric in (False, True):
            yield (
                bind(reduce_scatter.reduce_scatter(ranks, 3, symmetric_a=symmetric), kept),
                several,
                sums.once,
                False,
            )
            for algorithm, how in (
                ("one_shot", sums.once),
                ("two_shot", sums.once),
                ("ring", sums.around),
            ):
                plan = all_reduce.all_reduce(
                    ranks, 3, algorithm, symmetric_a=symmetric, symmetric_out=symmetric
                )
                yield bind(plan, even), several, how, True
    else:
        for algorithm, how in (("two_shot", sums.once), ("ring", sums.at_every_host)):
            yield bind(all_reduce.put(3, hosts, algorithm), even), hosts, how, True
    if one_rank_per_host(hosts):
        yield bind(all_reduce.all_reduce(ranks, 1, "ring"), even), hosts, sums.around, True


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_sums_of_collectives_are_rounded_as_documented(hosts):
    ranks, even = range(len(hosts)), split(ROWS, len(hosts))
    uneven = [*even[1:], even[0]]
    uneven[0], uneven[1] = 0, uneven[1] + uneven[0]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        parts = [sums.numbers(rank, ROWS, COLUMNS, dtype=dtype) for rank in ranks]
        for plan, order, how, everywhere in collectives(hosts, uneven):
            wanted = sums.blocks(how, parts, order, even if everywhere else uneven, dtype)
            (found,) = run(Call(plan, [{"a": part} for part in parts]))
            for rank in ranks:
                whole = torch.cat(wanted) if everywhere else wanted[rank]
                assert torch.equal(found[rank]["out"], whole), (
                    plan.operator,
                    plan.algorithm,
                    dtype,
                    rank,
                )
