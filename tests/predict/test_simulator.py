"""The simulator follows the plan, shares bandwidth and cores, and simulates equal ranks once."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support import plans
from support.ranks import on_ranks

import weft
from weft import predict
from weft.engines.recording import record
from weft.errors import PlanError
from weft.kernels.matmul import matmul
from weft.plan import Buffer, Copy, Notify, Plan, Reduce, Region, Signal, Wait
from weft.plan.binding import bind
from weft.plan.trace import Trace
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request, Rows, Variant, Workload
from weft_tools.predict.machine import LinkRate, Machine, ProductRate
from weft_tools.predict.simulator import seconds, simulate

# Products take 1 s per row, and 10 s during communication; a link moves a row in 1 s, memory 8
# rows.
SLOW = Machine(
    "slow",
    {"float32": ProductRate(2 * 16 * 16 / 1e12)},
    (LinkRate(64e-9),),
    memory_gbs=8 * 64e-9,
    reduce_gbs=64e-9,
    compute_slowdown=10.0,
    communicate_slowdown=2.0,
)
ROWS = defaultdict(lambda: Rows(16, "float32"))


def assert_follows(trace: Trace, plan: Plan) -> None:
    """Lanes run in order, and no wait ends before enough notifies of its signal have begun."""
    lanes = {
        (rank, name): [span for span in trace.spans if (span.rank, span.lane) == (rank, name)]
        for rank, of_rank in enumerate(plan.lanes)
        for name in of_rank
    }
    notified = defaultdict(list)
    for (rank, name), spans in lanes.items():
        assert [span.text for span in spans] == [str(i) for i in plan.lanes[rank][name]]
        assert all(one.start <= one.stop <= other.start for one, other in pairwise(spans))
        for span, instruction in zip(spans, plan.lanes[rank][name], strict=True):
            if isinstance(instruction, Notify):
                notified[instruction.rank, instruction.signal].append(span.start)
    for (rank, name), spans in lanes.items():
        for span, instruction in zip(spans, plan.lanes[rank][name], strict=True):
            if isinstance(instruction, Wait) and instruction.count:
                assert (
                    span.stop >= sorted(notified[rank, instruction.signal])[instruction.count - 1]
                )


@pytest.mark.parametrize("rows", [(2, 1, 3), (0, 4), (3, 3, 3, 3)], ids=str)
def test_the_order_of_events_follows_every_plan(rows):
    for plan in (plans.bound(plan, rows) for plan in plans.every(len(rows), 2)):
        assert_follows(simulate(plan, replace(SLOW, notify_us=1e5, launch_us=1e5), ROWS), plan)


def recorded(world):
    """The traces of real executions, on rank 0, and their plans."""
    a, weight = world.empty(6, 16), weft.pack(torch.ones(16, 16))
    a.fill_(1)
    with record(world) as recording:
        for algorithm in ("push", "ring"):
            weft.all_gather_matmul(a, weight, algorithm=algorithm, chunk_rows=2)
        weft.matmul_reduce_scatter(a, weight, algorithm="push", chunk_rows=1)
    found = []
    for plan, rows, spans in recording.executions:
        recording.executions = [(plan, rows, spans)]
        found.append((recording.gather("real"), bind(plan, rows)))
    return found


def test_the_check_of_the_order_accepts_real_ranks():
    for (trace, plan), (_, other) in zip(
        *on_ranks(recorded, 2), strict=True
    ):  # each rank has its own lanes
        assert_follows(trace, replace(plan, lanes=(plan.lanes[0], other.lanes[1])))


def test_the_check_of_the_order_detects_violations():
    plan = predict.plan(
        Workload("all_gather_matmul", (2, 2), 16, 16, "float32", "float32"),
        Variant("push", 2),
        SLOW,
    )
    full = replace(plan, lanes=plans.multiplied(2, 2, "push", symmetric=True).lanes)
    trace = simulate(full, SLOW, ROWS)
    early = [
        span._replace(start=0, stop=0) if span.kind == "wait" else span for span in trace.spans
    ]
    with pytest.raises(AssertionError):
        assert_follows(Trace("early", tuple(early)), full)


@pytest.mark.parametrize(
    "links",
    [
        (LinkRate(64e-9),),
        (LinkRate(64e-9, shared=True),),
        (LinkRate(1e-6, reach=2), LinkRate(64e-9, 1e5, shared=True)),
        None,
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_equal_ranks_are_simulated_once(operator, links, monkeypatch):
    machine = replace(SLOW, links=links or SLOW.links, lanes=2, notify_us=1e5)
    if links is None:  # three hosts
        machine = replace(machine, network=LinkRate(32e-9, 1e5, core_gbs=64e-9)).over(
            [rank // 2 for rank in range(6)]
        )
    case = Workload(operator, (4,) * 6, 16, 16, "float32", "float32")
    variants = predict.candidates(case, machine, chunk_rows=2)
    once = [predict.plan(case, variant, machine) for variant in variants]
    forecast = importlib.import_module(
        "weft_tools.predict.forecast"
    )  # of the same name as the function it replaces
    monkeypatch.setattr(forecast, "planned", lambda workload, *_: workload.ranks)
    for variant, first in zip(variants, once, strict=True):
        uniform = OPERATORS[operator].plan(Request(6, 1, variant.algorithm)).uniform
        assert sum(map(bool, first.lanes)) == (machine.group(6) if uniform else 6)
        everything = predict.plan(case, variant, machine)
        assert all(everything.lanes)
        buffers = OPERATORS[operator].buffers(case)
        assert seconds(first, machine, buffers) == pytest.approx(
            seconds(everything, machine, buffers)
        ), variant


def lane(*instructions, other=(), more=None):
    """A plan of two ranks of which the first has this lane."""
    lanes = ({"compute": instructions, **(more or {})}, {"compute": other})
    buffers = {name: Buffer("input", (9, 9)) for name in "abc"}
    return Plan("example", "made up", buffers, lanes)


def rows(rank, count, buffer="a"):
    return Region(rank, buffer, 0, count)


GO = Signal("go", 0)
PUT = Copy(rows(0, 4), rows(1, 4))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        pytest.param(lane(matmul(rows(0, 3), rows(0, 3, "b"))), 3, id="product"),
        pytest.param(lane(Copy(rows(0, 8), rows(0, 8, "b"))), 1, id="local copy"),
        pytest.param(lane(Reduce((rows(0, 2), rows(0, 2, "b")), rows(0, 2, "c"))), 4, id="sum"),
        pytest.param(lane(PUT), 4, id="transfer"),
        pytest.param(lane(PUT, other=[PUT]), 8, id="a link is shared"),
        pytest.param(
            lane(PUT, other=[Copy(rows(1, 4), rows(0, 4))]), 4, id="its directions are not"
        ),
        pytest.param(
            lane(PUT, Notify(1, GO), other=[Wait(GO, 1), matmul(rows(1, 1), rows(1, 1, "b"))]),
            5,
            id="signal",
        ),
        # The transfer takes 8 s during the product, which does 0.8 rows in this time and the rest
        # alone.
        pytest.param(
            lane(matmul(rows(0, 3), rows(0, 3, "b")), more={"comm": [PUT]}),
            8 + 2.2,
            id="interference",
        ),
        pytest.param(lane(matmul(rows(1, 2), rows(0, 2, "b"))), 2, id="product of a peer's rows"),
        pytest.param(
            lane(matmul(rows(0, 2), rows(1, 2, "b")), matmul(rows(0, 1), rows(0, 1, "b"))),
            2 * 10 + 1,
            id="product into a peer's memory",
        ),
    ],
)
def test_times_of_small_plans(plan, expected):
    assert seconds(plan, SLOW, ROWS) == pytest.approx(expected)
    assert simulate(plan, SLOW, ROWS).seconds == pytest.approx(expected)


def test_products_into_a_peers_memory_leave_while_they_are_made():
    into_peer = matmul(rows(0, 4), rows(1, 4, "b"))
    alone = replace(SLOW, compute_slowdown=1.0)
    assert seconds(lane(into_peer), replace(SLOW, in_place=True), ROWS) == pytest.approx(4)
    slow = replace(
        alone, links=(LinkRate(32e-9, latency_us=5e5),)
    )  # 2 s a row, the last 0.5 s later
    assert seconds(lane(into_peer), slow, ROWS) == pytest.approx(8.5)
    # Half of this link is enough for the product. It is demanded 1.5 times while the other rank gets
    # 4 rows, so for 3 s both take 1.5 times as long; then 2 rows remain to be made.
    fast = replace(alone, links=(LinkRate(128e-9),))
    both = lane(into_peer, other=[PUT])
    assert seconds(both, fast, ROWS) == pytest.approx(3 + 2)
    [transfer] = [span for span in simulate(both, fast, ROWS).spans if span.rank == 1]
    assert transfer.stop / 1e9 == pytest.approx(3)


@pytest.mark.parametrize(("lanes", "expected"), [(1, 8), (2, 4), (3, 4)])
def test_rows_of_several_peers_are_read_over_as_many_links_as_there_are_lanes(lanes, expected):
    everywhere = Buffer("input", (9, 9, 9))
    read = Reduce((rows(1, 4), rows(2, 4)), rows(0, 4, "b"))
    plan = Plan(
        "example", "made up", dict.fromkeys("ab", everywhere), ({"compute": (read,)}, {}, {})
    )
    machine = replace(SLOW, reduce_gbs=1.0, lanes=lanes)
    assert seconds(plan, machine, ROWS) == pytest.approx(expected)


def test_transfers_over_an_emulated_link_are_serial_and_leave_the_core_free():
    machine = SLOW.emulating(gbps=8 * 64e-9, latency_us=5e5)
    plan = lane(matmul(rows(0, 9), rows(0, 9, "b")), more={"comm": [PUT, PUT]})
    # Copying 4 rows takes 0.5 s, 1 s during the product; each transfer takes 4.5 s.
    trace = simulate(plan, machine, ROWS)
    assert [span.stop / 1e9 for span in trace.spans if span.lane == "comm"] == pytest.approx(
        [4.5, 9.0]
    )
    assert trace.seconds == pytest.approx(9 + 2 - 0.2)
    late = simulate(
        plan, replace(machine, wake_us=1e5), ROWS
    )  # the second transfer compensates for the oversleep of the first
    assert [span.stop / 1e9 for span in late.spans if span.lane == "comm"] == pytest.approx(
        [4.6, 9.1]
    )


def test_a_comm_lane_waits_for_the_core_during_products():
    machine = replace(SLOW, turn_us=3e6, compute_slowdown=1.0)
    product = matmul(rows(0, 2), rows(0, 2, "b"))
    ends = []
    for products in (
        3,
        1,
        # the signal comes after 2 s; the core is free 3 s later, or after the last product
    ):
        plan = lane(
            product, Notify(0, GO), *[product] * products, more={"comm": [Wait(GO, 1), PUT]}
        )
        spans = [span for span in simulate(plan, machine, ROWS).spans if span.lane == "comm"]
        ends.append(spans[0].stop / 1e9)
    assert ends == pytest.approx([2 + 3, 2 + 2])


def test_launches_and_notifies_cost_time():
    machine = replace(SLOW, launch_us=1e6, notify_us=2e6)
    plan = lane(Notify(1, GO), other=[Wait(GO, 1), matmul(rows(1, 1), rows(1, 1, "b"))])
    assert seconds(plan, machine, ROWS) == pytest.approx(1 + 2 + 1)


def test_a_deadlock_is_an_error():
    with pytest.raises(PlanError, match="rank 1 compute at: wait"):
        simulate(lane(other=[Wait(GO, 1)]), SLOW, ROWS)


@pytest.mark.parametrize(("core_gbs", "rows", "took"), [(4 * 64e-9, 6, 7.0), (64e-9, 2, 7.0)])
def test_a_transfer_between_hosts_takes_its_part_of_both_cores(core_gbs, rows, took):
    """Four rows in 4 s take a quarter of a core, or would take all of it; a signal takes 1 s more."""
    machine = replace(SLOW, network=LinkRate(64e-9, 1e6, core_gbs=core_gbs)).over((0, 1))
    everything, arrived = (8, 8), Signal("arrived", 0)
    buffers = {name: Buffer("workspace", everything) for name in ("a", "out", "inbox")}
    sender = (Copy(Region(0, "a", 0, 4), Region(1, "inbox", 0, 4)), Notify(1, arrived))
    receiver = (matmul(Region(1, "a", 0, rows), Region(1, "out", 0, rows)), Wait(arrived, 1))
    plan = Plan("made up", "once", buffers, ({"comm": sender}, {"compute": receiver}))
    assert seconds(plan, machine, ROWS) == pytest.approx(took)


def test_ranks_of_a_host_share_its_link():
    case = Workload("all_gather_matmul", (4,) * 4, 16, 16, "float32", "float32")
    fast = replace(SLOW, links=(LinkRate(1.0),), memory_gbs=1.0, network=LinkRate(64e-9))
    took = {
        hosts: predict.time(case, Variant("push", 1), fast.over(hosts), communicate=True)
        for hosts in ((0, 0, 1, 1), (0, 1, 1, 1))
    }
    assert took[0, 0, 1, 1] == pytest.approx(8, rel=1e-3)  # the rows of each host, once
    assert took[0, 1, 1, 1] == pytest.approx(12, rel=1e-3)


def test_the_link_between_hosts_of_a_machine():
    with pytest.raises(ValueError, match="slow has no link to other hosts; weft calibrate"):
        SLOW.over((0, 1))
    two = replace(SLOW, network=LinkRate(1e-9, 7.0)).over((0, 0, 1, 1))
    assert (two.link(0, 1).gbs, two.link(1, 2).gbs, two.signal_us(1, 2), two.group(4)) == (
        64e-9,
        1e-9,
        7.0,
        2,
    )
    assert two.with_link(4, gbs=5.0).link(0, 3) == LinkRate(5.0, 7.0)
    assert (
        replace(SLOW, links=(LinkRate(2.0, reach=2), LinkRate(1.0)))
        .over((0, 0, 1, 1))
        .link(0, 2)
        .gbs
        == 1.0
    )
