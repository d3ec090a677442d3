"""Plans over several hosts: proved as written, and again after lowering to messages."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans
from support.over_hosts import FUSED, PLAIN, groupings

import weft._native as _native
from weft.engines.engine import Engine
from weft.engines.reference import run
from weft.errors import PlanError
from weft.plan import Buffer, Copy, Notify, Plan, Region, Signal, Term, Wait
from weft.plan.binding import bind
from weft.plan.messages import batches, incoming, is_channel, lower_to_messages, target
from weft.plan.proof import problems, verify
from weft.schedules.all_gather_matmul import all_gather_matmul
from weft.schedules.barrier import barrier
from weft.schedules.lanes import tidy
from weft.schedules.levels import nested
from weft.schedules.peers import members, one_rank_per_host
from weft.schedules.workload import Request
from weft_tools.laboratory.mutants import deleted, edited, places

EXCHANGES = ("all_to_all", "all_to_all of few")
FRUGAL = [
    name
    for name in [*FUSED, *PLAIN]
    if "gather" in name or not name.endswith(("ring", "adjacent ranks", "all_reduce of few"))
] + ["broadcast ring"]


@settings(max_examples=80)
@given(groupings(), st.sampled_from([*FUSED, *PLAIN]), st.integers(1, 3))
def test_every_plan_is_proved_and_so_are_its_messages(hosts, name, pieces):
    plan = (FUSED | PLAIN)[name](hosts, pieces)
    verify(plan)
    verify(lower_to_messages(plan, hosts))


@settings(max_examples=30)
@given(
    st.data(),
    groupings(),
    st.sampled_from([*FUSED, *EXCHANGES]),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_messages_compute_the_operator_in_any_order(data, hosts, name, pieces, seed):
    plan = lower_to_messages(
        plans.bound((FUSED | PLAIN)[name](hosts, pieces), data.draw(plans.row_counts(len(hosts)))),
        hosts,
    )
    verify(plan)
    calls = [plans.call(plan, seed + i) for i in range(2)]
    for call, outputs in zip(calls, run(*calls, order=random.Random(seed)), strict=True):
        assert plans.equal(outputs, plans.expected(call))


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1), (0, 1, 0), (0, 0, 1, 1)], ids=str)
def test_no_signal_is_redundant(hosts):
    for name, planner in (FUSED | PLAIN).items():
        plan = planner(hosts, 2)
        for change, changed in random.Random(0).sample(
            found := [*deleted(plan)], min(len(found), 12)
        ):
            assert problems(changed) or problems(lower_to_messages(changed, hosts)), (
                f"{name}: {change}"
            )


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1), (0, 1, 2)], ids=str)
def test_no_ready_signal_is_sent_to_a_rank_that_waits_for_a_later_one(hosts):
    """Rows wait at the receive gate of the rank that is not ready: only messages with rows are sent."""
    planners = [
        *(PLAIN[name] for name in EXCHANGES),
        *([PLAIN["all_gather push"]] if one_rank_per_host(hosts) else []),
    ]
    for planner in planners:
        assert all(
            message.copy for message in first_messages(lower_to_messages(planner(hosts, 1), hosts))
        )


def test_a_ready_signal_is_sent_to_a_rank_that_waits_for_no_other():
    """The source of a broadcast waits for no other signal of the receivers."""
    assert not all(
        message.copy
        for message in first_messages(lower_to_messages(PLAIN["broadcast push"]((0, 1), 1), (0, 1)))
    )


def first_messages(plan):
    """The messages of the first batch of each channel."""
    ends = [(*end, rank) for rank in range(plan.ranks) for end in incoming(plan, rank)]
    return [message for end in ends for message in batches(plan, *end)[0][1]]


@pytest.mark.parametrize("name", EXCHANGES)
def test_no_receive_gate_opens_before_its_rank_has_begun(name):
    plan = lower_to_messages(PLAIN[name]((0, 1, 1), 1), (0, 1, 1))
    for place, instruction in places(plan):
        if isinstance(instruction, Notify | Wait) and instruction.signal.name == "compute taken":
            assert problems(edited(plan, place)), (place, instruction)


@pytest.mark.parametrize("name", ["all_gather push", "all_gather_matmul push", "broadcast push"])
def test_no_receive_gate_opens_before_all_notified_ranks_have_begun(name):
    """Another rank of the host may still count arrivals of an earlier call, through another
    channel.
    """
    hosts = (0, 0, 1, 1)
    plan = lower_to_messages((FUSED | PLAIN)[name](hosts, 1), hosts)
    waits = [place for place, i in places(plan) if for_another(place[1], i)]
    found = [problem for place in waits for problem in problems(edited(plan, place))]
    assert found
    assert all("may still wait for one of an earlier call" in problem for problem in found)


def test_late_messages_count_for_their_own_call():
    """Without waits for other ranks, some order makes a rank read rows before their arrival: it is
    notified of a later call before all rows of an earlier one are there.
    """
    hosts = (0, 0, 1, 1)
    planners = (PLAIN["all_to_all of few"], PLAIN["all_gather push"])
    made = [
        lower_to_messages(plans.bound(planner(hosts, 1), [2] * 4), hosts) for planner in planners
    ]

    def right(several, seed):
        calls = [plans.call(plan, seed + i) for i, plan in enumerate(several)]
        found = run(*calls, order=random.Random(seed))
        return all(
            plans.equal(outputs, plans.expected(call))
            for call, outputs in zip(calls, found, strict=True)
        )

    assert all(right(made, seed) for seed in range(200))
    hasty = [*map(without_waits_for_others, made)]
    assert not all(right(hasty, seed) for seed in range(3000))


def without_waits_for_others(plan):
    """The plan in which only the receiver of a message has a receive gate."""
    kept = [
        {name: tuple(i for i in lane if not for_another(name, i)) for name, lane in own.items()}
        for own in plan.lanes
    ]
    return replace(plan, lanes=tuple(kept))


def for_another(lane, instruction):
    """Whether an instruction of a lane is a wait for the receive gate of a rank that is notified of
    a message to another rank.
    """
    taken = isinstance(instruction, Wait) and instruction.signal.name.endswith(" taken")
    return taken and instruction.signal.source != target(lane)[1]


def test_sent_rows_may_not_have_arrived():
    """Rank 0 has sent rows to rank 1 and notifies rank 2, of the same host, over another
    connection.
    """
    mine, put, taken = (Region(rank, "out", 0, 1) for rank in range(3))
    twice = [Notify(0, Signal("open", 1))] * 2
    sent = [
        Copy(mine, put),
        Notify(1, Signal("arrived", 0)),
        Wait(Signal("open", 1), 2),
        Notify(2, Signal("arrived", 0)),
    ]
    lanes = (
        [Copy(Region(0, "a", 0, 1), mine), Wait(Signal("open", 1), 1), *sent],
        [*twice, Wait(Signal("arrived", 0), 1), Wait(Signal("read", 2), 1)],
        [Wait(Signal("arrived", 0), 1), Copy(put, taken), Notify(1, Signal("read", 2))],
    )
    buffers = {"a": Buffer.of("input", [[0], [], []]), "out": Buffer.of("output", [[0]] * 3)}
    plan = Plan(
        "notify",
        "early",
        buffers,
        tuple({"compute": tidy(lane)} for lane in lanes),
        {out: (Term(0, "a", 0),) for out in (mine, put, taken)},
        (1,),
    )
    verify(plan)
    assert any(
        problem.startswith("race on out@1")
        for problem in problems(lower_to_messages(plan, (0, 1, 1)))
    )


def test_a_peer_is_told_that_its_input_was_read_only_when_it_was_sent():
    """Rank 0 sends the input of rank 1, whose caller may write to it after the notify."""
    a, out = Region(1, "a", 0, 1), Region(2, "out", 0, 1)
    lanes = (
        [
            Wait(Signal("ready", 1), 1),
            Wait(Signal("ready", 2), 1),
            Copy(a, out),
            Notify(2, Signal("arrived", 0)),
            Notify(1, Signal("read", 0)),
        ],
        [Notify(0, Signal("ready", 1)), Wait(Signal("read", 0), 1)],
        [Notify(0, Signal("ready", 2)), Wait(Signal("arrived", 0), 1)],
    )
    plan = Plan(
        "send",
        "for a peer",
        {"a": Buffer("input", (0, 1, 0)), "out": Buffer("output", (0, 0, 1))},
        tuple({"compute": tuple(lane)} for lane in lanes),
        {out: (Term(1, "a", 0),)},
    )
    verify(plan)
    verify(lower_to_messages(plan, (0, 0, 1)))


def crossings(plan, hosts):
    """Rows sent to each host, by the copies of a plan."""
    rows = {}
    for lanes in plan.lanes:
        for instruction in (i for lane in lanes.values() for i in lane):
            if (
                isinstance(instruction, Copy)
                and hosts[instruction.src.rank] != hosts[instruction.dst.rank]
            ):
                to = hosts[instruction.dst.rank]
                rows[to] = rows.get(to, 0) + instruction.src.rows
    return rows


@settings(max_examples=30)
@given(st.data(), groupings(), st.sampled_from(FRUGAL), st.integers(1, 3))
def test_rows_cross_to_each_host_once(data, hosts, name, pieces):
    """The least number of rows: gathered rows go once to each other host, and the sums of a host's
    ranks to the owners of the rows.
    """
    blocks, ranks = (FUSED | PLAIN)[name](hosts, pieces), range(len(hosts))
    rows = data.draw(
        st.lists(st.integers(0, 7), min_size=len(blocks.pieces), max_size=len(blocks.pieces))
    )
    plan = bind(blocks, rows)
    for host in set(hosts):
        here = members(host, hosts)
        scattered = (len(set(hosts)) - 1) * sum(rows[rank] for rank in here if rank < len(rows))
        gathered = sum(rows[rank] for rank in ranks if hosts[rank] != host and rank < len(rows))
        least = {
            "gather": gathered,
            "scatter": scattered,
            "all_reduce": scattered + gathered,
            "broadcast": rows[0] if host != hosts[pieces % len(hosts)] else 0,
            "all_to_all": sum(
                rows[r * len(hosts) + p] for r in ranks if hosts[r] != host for p in here
            )
            if "to" in name
            else 0,
        }
        [operation] = [operation for operation in least if operation in name]
        assert crossings(plan, hosts).get(host, 0) == least[operation]


def test_algorithms_that_read_remote_memory_are_refused():
    with pytest.raises(
        PlanError,
        match=r"rank 0 compute: matmul .* can only be sent rows, by a copy; choose push or ring",
    ):
        lower_to_messages(all_gather_matmul(Request(2, 1, "direct")), (0, 1))


def test_both_ends_of_a_connection_agree():
    plan = lower_to_messages(all_gather_matmul(Request(3, 2, "push", hosts=(0, 0, 1))), (0, 0, 1))
    assert sorted(incoming(plan, 2)) == [(0, "comm"), (0, "compute"), (1, "comm"), (1, "compute")]
    for sender, lanes in enumerate(plan.lanes):
        for lane, to in (target(name) for name in lanes if is_channel(name)):
            messages = [
                message for _, several, _ in batches(plan, sender, lane, to) for message in several
            ]
            signals = [signal for message in messages for signal in message.signals]
            notified = [
                i
                for i in plan.lanes[sender][f"{lane}>{to}"]
                if isinstance(i, Notify) and i.rank != sender
            ]
            assert signals == notified


@pytest.mark.parametrize("planner", [*FUSED, *PLAIN])
def test_more_ranks_need_no_more_names(planner):
    """A world has a few hundred signal names at most, and a counter for each rank under every name."""
    few, more = (
        lower_to_messages(
            (FUSED | PLAIN)[planner](tuple(rank // 2 for rank in range(ranks)), 1),
            [rank // 2 for rank in range(ranks)],
        )
        for ranks in (6, 16)
    )
    assert few.signal_names() == more.signal_names()
    assert len(more.signal_names()) < 16


def test_the_counters_of_a_thousand_ranks():
    """Each signal of a rank has a counter of its own, within the native core's number of counters."""
    hosts = tuple(rank // 16 for rank in range(1024))
    plan = lower_to_messages(barrier(nested(1024, (hosts,)), "barrier"), hosts)
    names = {name: number for number, name in enumerate(plan.signal_names())}
    engine = SimpleNamespace(names=names, world=SimpleNamespace(ranks=1024))
    for rank in (0, 17, 1023):
        lanes = [*plan.lanes[rank].values()]
        own = {
            i.signal
            for lane in lanes
            for i in lane
            if isinstance(i, Wait) or (isinstance(i, Notify) and i.rank == rank)
        }
        places = {Engine.index(engine, signal) for signal in own}
        assert len(places) == len(own) > 8
        assert max(places) < _native.Executor.max_names * 1024
