"""Plans over several hosts: proved as they are written, and again as the messages that are really sent."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans
from support.mutants import deleted

from weft.engines.reference import run
from weft.errors import PlanError
from weft.plan import Copy, Notify, Plan
from weft.plan.messages import batches, incoming, is_channel, lower_to_messages, target
from weft.plan.proof import problems, verify
from weft.schedules import all_reduce, all_to_all, broadcast, reduce_scatter
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import all_gather_matmul
from weft.schedules.common import members, split
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.matmul_reduce_scatter import matmul_reduce_scatter

Planner = Callable[[tuple[int, ...], tuple[int, ...], int], Plan]

FUSED: dict[str, Planner] = {
    **{
        f"{schedule.__name__} {algorithm}": lambda rows, hosts, chunk, schedule=schedule, algorithm=algorithm: schedule(
            rows, algorithm, chunk_rows=chunk, hosts=hosts, **({} if schedule in GATHERS else {"remote_reads": False})
        )
        for schedule, algorithms in {
            all_gather: ("push", "ring"),
            all_gather_matmul: ("push", "ring", "sequential"),
            matmul_reduce_scatter: ("push", "ring", "sequential"),
            matmul_all_reduce: ("two_shot", "ring", "sequential"),
        }.items()
        for algorithm in algorithms
    }
}
GATHERS = (all_gather, all_gather_matmul)
PLAIN: dict[str, Planner] = {
    **{
        f"{schedule.__name__.split('.')[-1]} {algorithm}": lambda rows, hosts, chunk, schedule=schedule, algorithm=algorithm: (
            schedule.put(rows, algorithm, chunk_rows=chunk, hosts=hosts)
            if schedule is reduce_scatter
            else schedule.put(sum(rows), len(rows), algorithm, chunk_rows=chunk, hosts=hosts)
        )
        for schedule, algorithms in {reduce_scatter: ("push", "ring"), all_reduce: ("two_shot", "ring")}.items()
        for algorithm in algorithms
    },
    "all_reduce of neighbours": lambda rows, hosts, chunk: all_reduce.all_reduce(sum(rows) + len(rows), len(rows), "ring"),
    "broadcast push": lambda rows, hosts, chunk: broadcast.push(sum(rows), chunk % len(rows), hosts),
    "broadcast ring": lambda rows, hosts, chunk: broadcast.ring(sum(rows), chunk % len(rows), hosts, chunk_rows=chunk),
    "broadcast staged push": lambda rows, hosts, chunk: broadcast.push(sum(rows), chunk % len(rows), hosts, staged=True),
    "broadcast staged ring": lambda rows, hosts, chunk: broadcast.ring(
        sum(rows), chunk % len(rows), hosts, chunk_rows=chunk, staged=True
    ),
    "all_to_all": lambda rows, hosts, chunk: all_to_all.all_to_all([[(a * b) % 3 for b in rows] for a in rows], hosts=hosts),
}
FRUGAL = [name for name in [*FUSED, *PLAIN] if "gather" in name or not name.endswith(("ring", "neighbours"))] + ["broadcast ring"]


@st.composite
def groupings(draw):
    """Rows of each rank, and ranks on at least two hosts in any order."""
    ranks = draw(st.integers(2, 5))
    rows = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    on = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks).filter(lambda on: len(set(on)) > 1))
    order = [*dict.fromkeys(on)]
    return tuple(rows), tuple(order.index(host) for host in on)


@settings(max_examples=150, deadline=None)
@given(groupings(), st.sampled_from([*FUSED, *PLAIN]), st.integers(1, 3))
def test_every_plan_is_proved_and_so_are_its_messages(grouping, name, chunk):
    rows, hosts = grouping
    plan = (FUSED | PLAIN)[name](rows, hosts, chunk)
    verify(plan)
    verify(lower_to_messages(plan, hosts))


@settings(max_examples=60, deadline=None)
@given(groupings(), st.sampled_from([*FUSED]), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_messages_compute_the_operator_in_any_order(grouping, name, chunk, seed):
    rows, hosts = grouping
    plan = lower_to_messages(FUSED[name](rows, hosts, chunk), hosts)
    calls = [plans.call(plan, seed + i) for i in range(2)]
    for call, outputs in zip(calls, run(*calls, order=random.Random(seed)), strict=True):
        assert plans.equal(outputs, plans.expected(call))


@pytest.mark.parametrize(("rows", "hosts"), [((2, 3), (0, 1)), ((1, 2, 2, 1), (0, 0, 1, 1)), ((2, 1, 0), (0, 0, 1))], ids=str)
def test_no_signal_is_too_many(rows, hosts):
    for name, planner in (FUSED | PLAIN).items():
        plan = planner(rows, hosts, 2)
        for change, changed in random.Random(0).sample(found := [*deleted(plan)], min(len(found), 12)):
            assert problems(changed) or problems(lower_to_messages(changed, hosts)), f"{name}: {change}"


def crossings(plan, hosts):
    """Rows that cross to each host, by the copies of a plan."""
    rows = {}
    for lanes in plan.lanes:
        for instruction in (i for lane in lanes.values() for i in lane):
            if isinstance(instruction, Copy) and hosts[instruction.src.rank] != hosts[instruction.dst.rank]:
                to = hosts[instruction.dst.rank]
                rows[to] = rows.get(to, 0) + instruction.src.rows
    return rows


@settings(max_examples=60, deadline=None)
@given(groupings(), st.sampled_from(FRUGAL), st.integers(1, 3))
def test_rows_cross_to_each_host_once(grouping, name, chunk):
    """The least that can do: gathered rows go to each host that has them not, and the sums of a host's ranks to who keeps them."""
    rows, hosts = grouping
    plan, ranks, total = (FUSED | PLAIN)[name](rows, hosts, chunk), range(len(rows)), sum(rows)
    kept = split(total, len(rows)) if name.startswith("all_reduce") else rows
    for host in set(hosts):
        scattered = (len(set(hosts)) - 1) * sum(kept[rank] for rank in members(host, hosts))
        gathered = sum(kept[rank] for rank in ranks if hosts[rank] != host)
        least = {
            "gather": gathered,
            "scatter": scattered,
            "all_reduce": scattered + gathered,
            "broadcast": total if host != hosts[chunk % len(rows)] else 0,
            "all_to_all": sum((a * rows[b]) % 3 for r, a in enumerate(rows) if hosts[r] != host for b in members(host, hosts)),
        }
        [what] = [what for what in least if what in name]
        assert crossings(plan, hosts).get(host, 0) == least[what]


def test_what_hosts_cannot_do_is_refused():
    with pytest.raises(PlanError, match=r"rank 0 compute: matmul .* can only be sent rows, by a copy; choose push or ring"):
        lower_to_messages(all_gather_matmul((2, 2), "direct", chunk_rows=2), (0, 1))


def test_both_ends_of_a_wire_agree():
    plan = lower_to_messages(all_gather_matmul((2, 3, 1), "push", chunk_rows=1, hosts=(0, 0, 1)), (0, 0, 1))
    assert sorted(incoming(plan, 2)) == [(0, "comm"), (0, "compute"), (1, "comm"), (1, "compute")]
    for sender, lanes in enumerate(plan.lanes):
        for lane, to in (target(name) for name in lanes if is_channel(name)):
            messages = [message for _, several, _ in batches(plan, sender, lane, to) for message in several]
            signals = [signal for message in messages for signal in message.signals]
            told = [i for i in plan.lanes[sender][f"{lane}>{to}"] if isinstance(i, Notify) and i.rank != sender]
            assert signals == told
