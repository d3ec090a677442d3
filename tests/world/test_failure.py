"""Ranks that die, fail, are late or disagree: every survivor raises an error at once, and nothing
is left behind.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import (
    die,
    meet,
    named_memory,
    none_left,
    on_ranks,
    shared_store,
    sockets,
    start,
)

import weft
import weft._native as _native
from weft.engines import engine
from weft.engines.host import HostProgram
from weft.plan import Wait
from weft.schedules.all_gather_matmul import ALGORITHMS, all_gather_matmul
from weft.schedules.workload import Request
from weft.world import init_by_store

RANKS, VICTIM = 3, 1
SOON = (
    10.0  # seconds, half the time limit: survivors take milliseconds, but the machine may be busy
)


def plan_of(algorithm):
    return all_gather_matmul(Request(RANKS, 2, algorithm))


def cuts(algorithm):
    """Every point in the victim's lanes, as (lane, instructions executed)."""
    lanes = plan_of(algorithm).lanes[VICTIM]
    return [(name, done) for name, lane in lanes.items() for done in range(len(lane) + 1)]


def die_at(world, algorithm, lane, done):
    """The victim executes its lanes up to a point and dies; the other ranks call until they notice."""
    plan = plan_of(algorithm)
    tensors = {"a": torch.ones(2, 4), "out": torch.empty(6, 4)}
    death = world.empty(1, dtype=torch.float64)
    death.zero_()
    whole = HostProgram(engine(world), plan, tensors, {})
    if world.rank == VICTIM:
        own = {
            name: instructions if name == "comm" and lane == "compute" else ()
            for name, instructions in plan.lanes[VICTIM].items()
        }
        own[lane] = plan.lanes[VICTIM][lane][:done]
        lanes = [own if rank == VICTIM else other for rank, other in enumerate(plan.lanes)]
        call = whole.bind(tensors, plan.pieces).call
        part = HostProgram(
            engine(world), dataclasses.replace(plan, lanes=tuple(lanes)), tensors, {}
        )
        part.compiled.set_call_text(call)
        part.run(tensors, plan.pieces, {"out": torch.eye(4)})
        for rank in range(world.ranks):
            world.peer(death, rank)[0] = time.monotonic()
        die()
    try:
        for _ in range(3):
            whole.run(tensors, plan.pieces, {"out": torch.eye(4)})
    except weft.PeerLost as error:
        return str(error), time.monotonic() - death.item()
    return "no error", 0.0


def die_at_every_cut(made, algorithm):
    """Ranks 0 and 1 survive one victim after the other, each with a cut and a world of its own."""
    (store, rank), found = made, []
    for number, (lane, done) in enumerate(cuts(algorithm)):
        in_world = {0: 0, 1: 2, 2 + number: VICTIM}.get(rank)
        if in_world is None:
            continue
        if in_world == 0:
            store.set(f"begin {number}", "")
        store.wait([f"begin {number}"], timedelta(seconds=60))
        own = dist.PrefixStore(f"cut {number}", store)
        with init_by_store(own, in_world, RANKS, timeout=20) as world:
            found.append(die_at(world, algorithm, lane, done))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_dies_anywhere_is_named_by_all_others(algorithm):
    places = cuts(algorithm)
    outcomes = start(die_at_every_cut, 2 + len(places), algorithm, context=shared_store)
    assert outcomes[2:] == [None] * len(places)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        for place, (message, late) in zip(places, outcome.result, strict=True):
            assert message.startswith("rank 1 (pid "), f"{place}: {message}"
            assert "of all_gather_matmul call" in message
            assert late < SOON


def reads_after_the_end(world):
    """Rank 0 multiplies rows of rank 1, which has given up and closed its world meanwhile."""

    def product(rows, out):
        if slow and world.rank == 0 and rows[0, 0] == 1:
            while not world.mesh.failure()[0]:
                time.sleep(0.001)
        torch.mm(rows, b, out=out)

    slow, b = False, torch.eye(8)
    weight = weft.weight(product, (8, 8), torch.float32)
    a = world.empty(4, 8)
    a.fill_(world.rank)
    weft.all_gather_matmul(a, weight, algorithm="direct")
    slow = True
    with pytest.raises(weft.PeerTimeout):
        weft.all_gather_matmul(a, weight, algorithm="direct", timeout=20.0 - 19.5 * world.rank)


def test_rows_of_a_peer_that_gave_up_during_a_product_do_not_count():
    for outcome in start(reads_after_the_end, 2):
        assert outcome.error is None, outcome.trace


def late_or_dead(world, how):
    a, b, through = torch.ones(512, 8), torch.ones(8, 8), world.signals(1)
    weft.all_gather_matmul(a, b, algorithm="direct")
    start_time = time.monotonic()
    if world.rank != 2:
        weft.notify(through, 0, 2)
    else:
        # otherwise a rank may still be in that call, and lose this rank there
        weft.wait(through, 0, ">=", 2)
        if how == "die":
            die()
        if how == "raise":
            raise KeyError("lost my keys")
        if how == "close":
            world.close()
            return None
        if how == "hang":
            time.sleep(3)
            return None
    with pytest.raises(weft.WeftError) as caught:
        weft.all_gather_matmul(a, b, algorithm="direct", timeout=0.5)
    return caught.type.__name__, str(caught.value), time.monotonic() - start_time


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (
            "die",
            "PeerLost",
            ["rank 2 (pid", "died while rank", "of all_gather_matmul call", '(signal "'],
        ),
        (
            "raise",
            "PeerLost",
            ["rank 2 (pid", "failed with KeyError: 'lost my keys', while rank", '(signal "'],
        ),
        ("close", "PeerLost", ["rank 2 (pid", "closed its world while rank"]),
        (
            "hang",
            "PeerTimeout",
            [
                "waited 0.5 s for rows 1024:1536 of all_gather_matmul call",
                'signal "ready" from rank 2: 0 of 1): rank 2 (pid ',
                ") has not made the call; py-spy dump --pid ",
                "shows where it is; if it needs longer, give a larger timeout=",
            ],
        ),
    ],
)
def test_each_failure_has_its_own_error(how, kind, words):
    outcomes = start(late_or_dead, 3, how)
    for rank in (0, 1):
        assert outcomes[rank].error is None, outcomes[rank].error
        name, message, late = outcomes[rank].result
        assert name == kind
        # among waiting ranks, the error of the first to give up is that of all
        if rank == 0 or how != "hang":
            assert all(word in message for word in words), message
        assert late < SOON


def disagree(world, how):
    a, b = torch.ones(64, 8), torch.ones(8, 8)
    if how == "cached":
        weft.all_gather_matmul(a, b)
        weft.all_gather_matmul(a[:8], b)
    if how == "again":  # calls that ranks take for equal although their texts differ
        for _ in range(33):
            weft.all_reduce(torch.ones(4))
    symmetric = world.empty(200_000)
    odd = world.rank == 2
    wide = torch.float64 if odd else torch.float32
    calls = {
        "rows": lambda: weft.all_gather_matmul(a[: 60 if odd else 64], b),
        "dtype": lambda: weft.all_gather_matmul(a.double() if odd else a, b.double() if odd else b),
        "algorithm": lambda: weft.all_gather_matmul(a, b, algorithm="push" if odd else "ring"),
        "pieces": lambda: weft.all_gather_matmul(
            a, b, algorithm="push", chunk_rows=8 if odd else 16
        ),
        "columns": lambda: weft.all_gather_matmul(a[:, :4] if odd else a, b[:4] if odd else b),
        "other": lambda: world.empty(7) if odd else weft.all_gather_matmul(a, b),
        "cached": lambda: weft.all_gather_matmul(a[: 8 if odd else 64], b),
        "shard_rows": lambda: weft.all_gather_matmul(
            a, b, shard_rows=[64, 60, 64] if odd else [64] * 3
        ),
        "again": lambda: weft.barrier() if odd else weft.all_reduce(torch.ones(2, 2)),
        "collective": lambda: weft.all_reduce(torch.ones(5 if odd else 4)),
        "asynchronous": lambda: weft.all_reduce_async(torch.ones(2, 2, dtype=wide)).wait(),
        "op": lambda: weft.all_reduce(torch.ones(4), op="max" if odd else "sum"),
        "source": lambda: (weft.broadcast(torch.ones(4), int(odd)), weft.barrier()),
        "part": lambda: weft.reduce_scatter(
            torch.ones(9, 2, dtype=wide), op="max" if odd else "sum"
        ),
        "place": lambda: weft.all_reduce(symmetric if odd else torch.ones(200_000)),
    }
    log_text, log = io.StringIO(), logging.getLogger("weft")
    log.addHandler(logging.StreamHandler(log_text))
    log.setLevel(logging.DEBUG)
    with pytest.raises(weft.MismatchError) as caught:
        calls[how]()
    with pytest.raises(weft.WeftError, match="closed: MismatchError"):
        weft.all_gather_matmul(a, b)
    return str(caught.value), log_text.getvalue()


@pytest.mark.parametrize(
    ("how", "one", "other"),
    [
        ("rows", "all_gather_matmul(a=(64, 8) float32)", "all_gather_matmul(a=(60, 8) float32)"),
        (
            "shard_rows",
            "all_gather_matmul(a=(64, 8) float32)",
            "all_gather_matmul(a=[64, 60, 64] rows x 8 float32)",
        ),
        ("dtype", "all_gather_matmul(a=(64, 8) float32)", "all_gather_matmul(a=(64, 8) float64)"),
        (
            "algorithm",
            "all_gather_matmul(a=(64, 8) float32) by ring",
            "all_gather_matmul(a=(64, 8) float32) by push",
        ),
        ("columns", "all_gather_matmul(a=(64, 8) float32)", "all_gather_matmul(a=(64, 4) float32)"),
        ("other", "all_gather_matmul(a=(64, 8) float32)", "empty((7,), float32)"),
        ("cached", "all_gather_matmul(a=(64, 8) float32)", "all_gather_matmul(a=(8, 8) float32)"),
        ("again", "all_reduce((2, 2) float32, op=sum)", "barrier()"),
        ("collective", "all_reduce((4,) float32, op=sum)", "all_reduce((5,) float32, op=sum)"),
        (
            "asynchronous",
            "all_reduce((2, 2) float32, op=sum)",
            "all_reduce((2, 2) float64, op=sum)",
        ),
        ("op", "all_reduce((4,) float32, op=sum)", "all_reduce((4,) float32, op=max)"),
        ("source", "broadcast((4,) float32, source=0)", "broadcast((4,) float32, source=1)"),
        (
            "part",
            "reduce_scatter((9, 2) float32, op=sum, dim=0)",
            "reduce_scatter((9, 2) float64, op=max, dim=0)",
        ),
        (
            "pieces",
            "all_gather_matmul(a=[64, 64, 64] rows x 8 float32, inbox=",
            "all_gather_matmul(a=[64, 64, 64] rows x 8 float32, inbox=",
        ),
        (
            "place",
            "all_reduce(a=[200000, 200000, 200000] rows x 1 float32, staged=",
            "all_reduce(a=[200000, 200000, 200000] rows x 1 float32 in sym",
        ),
    ],
)
def test_ranks_that_make_different_calls_are_shown_both(how, one, other):
    differs = {
        **dict.fromkeys(["rows", "shard_rows", "columns", "cached", "collective"], "shapes differ"),
        **dict.fromkeys(["dtype", "asynchronous"], "dtypes differ"),
        **dict.fromkeys(["other", "again"], "operators differ"),
        "op": "op differs",
        "source": "source differs",
        "part": "dtypes and op differ",
        "algorithm": "algorithms differ (pass one algorithm= on all ranks, or give all hosts the same "
        "results of weft tune)",
        **dict.fromkeys(["pieces", "place"], "plans differ"),
    }
    branch = "look for a branch, or a loop of another length, that depends on the rank"
    one_shape = "pass tensors of one shape on all ranks, such as batches of one length"
    to_float32 = r"convert one of them, as by \.to\(torch\.float32\) on rank 2"
    shards = "pass the rows of every rank as shard_rows= on all ranks, here 64 on rank [01] and {} on rank 2"
    cures = {
        "rows": shards.format(60),
        "cached": shards.format(8),
        **dict.fromkeys(["other", "again"], branch),
        **dict.fromkeys(["dtype", "asynchronous", "part"], to_float32),
        "collective": one_shape,
        "columns": "pass rows of one K, the columns of a and the rows of b, on all ranks",
        "op": "pass one op= on all ranks",
        "pieces": "pass one chunk_rows= and one order= on all ranks, and b packed, or requiring "
        "gradients, on all or on none",
        "source": "pass one source= on all ranks",
    }
    for rank, outcome in enumerate(start(disagree, 3, how)):
        assert outcome.error is None, outcome.error
        message, logged = outcome.result
        first, *lines, recorded = message.splitlines()
        assert first == f"the ranks do not make the same call: {differs[how]}"
        assert recorded.startswith("  weft doctor --flight ")
        assert re.fullmatch(cures.get(how, ""), "".join(lines[2:]).strip()), lines
        shown = [line[:8] for line in lines[:2]]
        assert shown in (["  rank 0", "  rank 2"], ["  rank 1", "  rank 2"]), lines
        if f"  rank {rank}" in shown:  # where both make the call
            assert all(re.search(r", at .*test_failure\.py:\d+$", line) for line in lines[:2])
        assert lines[0][10:].startswith(one), lines
        assert lines[1][10:].startswith(other), lines
        if rank != 2 and "of this world" in logged:
            assert re.search(r"call \d+ of this world, internal calls included: \{\d", logged)


def late_everywhere(world, algorithm):
    """One rank after the other is late, before it notifies (a late call) and before it waits (its
    comm lane is ahead).
    """
    generator = torch.Generator().manual_seed(1)
    b = torch.eye(6)
    for call in range(12):
        everyone = torch.randn(world.ranks, 5, 6, generator=generator)
        if call % world.ranks == world.rank:
            time.sleep(0.02)
        assert torch.equal(
            weft.all_gather_matmul(everyone[world.rank], b, algorithm=algorithm),
            everyone.view(-1, 6),
        )


@pytest.mark.data
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stragglers(algorithm):
    for outcome in start(late_everywhere, 3, algorithm):
        assert outcome.error is None, outcome.error


def interrupted(world):
    a, b = torch.ones(64, 2), torch.ones(2, 2)
    weft.all_gather_matmul(a, b)  # of a later call nothing but the wait takes long
    if world.rank == 1:
        world.mesh.receive(0, 30.0)  # until the other has failed
        return None
    made = world.executor.calls

    def interrupt_the_next_call():
        while world.executor.calls == made:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt_the_next_call).start()
    start_time = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        weft.all_gather_matmul(a, b)
    with pytest.raises(weft.WeftError, match="closed: KeyboardInterrupt"):
        world.empty(1)
    return time.monotonic() - start_time


def test_a_wait_can_be_interrupted():
    outcomes = start(interrupted, 2)
    assert outcomes[0].error is None, outcomes[0].error
    assert outcomes[0].result < SOON


def survivors_start_over(world):
    if world.rank == 0:
        die()
    with pytest.raises(weft.PeerLost):
        for _ in range(3):
            weft.all_gather_matmul(torch.ones(64, 2), torch.eye(2))
    with open("/proc/self/fd/0"):
        pass
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )


def test_nothing_is_left_behind_when_a_rank_dies():
    before, open_sockets = named_memory(), sockets()
    outcomes = start(survivors_start_over, 3)
    assert [outcome and outcome.result for outcome in outcomes] == [None, 0, 0]
    assert named_memory() <= before
    assert none_left(open_sockets)


def too_many_names(world):
    from weft.plan import Buffer, Notify, Plan, Signal

    for n in range(_native.Executor.max_names):  # one name is in use already
        lane = (
            Notify(1 - world.rank, Signal(f"s{n}", world.rank)),
            Wait(Signal(f"s{n}", 1 - world.rank), 1),
        )
        other = (
            Notify(world.rank, Signal(f"s{n}", 1 - world.rank)),
            Wait(Signal(f"s{n}", world.rank), 1),
        )
        lanes = (
            ({"compute": lane}, {"compute": other})
            if world.rank == 0
            else ({"compute": other}, {"compute": lane})
        )
        engine(world).execute(
            Plan("hello", "x", {"a": Buffer("input", (0, 0))}, lanes), {"a": torch.empty(0, 1)}
        )


def raised_later(world):
    if world.rank == 0:
        world.failure.fail(
            weft.MismatchError("rank 0 calls this, but rank 1 calls that"), 1, in_background=True
        )
    while not world.mesh.failure()[0]:
        time.sleep(0.001)
    with pytest.raises(weft.MismatchError, match="rank 1 calls that"):
        weft.all_reduce_async(torch.ones(2)).wait()
    with pytest.raises(weft.WeftError, match="this world is closed: MismatchError"):
        weft.barrier()


def test_errors_of_background_threads_are_raised_by_the_next_call():
    """The network's thread may find a mismatch of calls while no call waits."""
    on_ranks(raised_later, 2)


def test_too_many_signal_names_are_refused():
    for outcome in start(too_many_names, 2):
        assert isinstance(outcome.error, weft.PlanError)
        assert f"{_native.Executor.max_names} signal names" in str(outcome.error)


def world_is_usable_after_bad_arguments(world):
    with pytest.raises(ValueError, match="inner dimensions"):
        weft.all_gather_matmul(torch.ones(2, 3), torch.ones(2, 3))
    meet()
    return weft.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 1)).sum().item()


@pytest.mark.data
def test_bad_arguments_leave_the_world_usable():
    assert [outcome.result for outcome in start(world_is_usable_after_bad_arguments, 2)] == [
        12.0,
        12.0,
    ]


def suspended(world):
    """A scheduler stops all ranks for longer than their limit, while rank 0 waits for rank 1, and lets
    them continue.
    """
    weft.all_reduce(torch.ones(3))
    if world.rank == 0 and not os.fork():
        time.sleep(0.2)
        for stop in (signal.SIGSTOP, signal.SIGCONT):
            for pid in world.pids:
                os.kill(pid, stop)
            time.sleep(1.5)
        os._exit(0)
    if world.rank == 1:
        time.sleep(0.6)  # of which nothing is left when it continues: rank 0 waits for all of it
    weft.all_reduce(torch.ones(3), timeout=1.2)
    if world.rank == 0:
        os.wait()
    return True


def test_a_suspended_job_continues():
    assert on_ranks(suspended, 2) == [True, True]


def says(world, text):
    """Rank 1 fails with a text that a terminal would obey."""
    if world.rank == 1:
        raise ValueError(text)
    weft.barrier(world)


def test_the_text_of_a_peer_is_printed_as_one():
    text = "lost\x1b[2K\rverified: 100 %"
    first, _ = start(says, 2, text)
    assert isinstance(first.error, weft.PeerLost), first.trace
    assert "lost\\x1b[2K\\rverified" in str(first.error)
    assert "\x1b" not in str(first.error)
