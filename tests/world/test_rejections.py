"""Calls that one rank refuses, for its arguments: the others, which wait for it, are told why."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support.loopback import each_rank, two_worlds
from support.public_calls import public_calls
from support.ranks import group, start, stream_world, world

import weft
from weft.engines import engine
from weft.errors import MismatchError
from weft.process_group.worlds import operations_of
from weft.schedules.barrier import barrier

ONES = torch.ones


def wrong_plan(world, wrong):
    plan = barrier(world.placement.levels)
    engine(world).execute(plan, {"a": ONES(2)} if wrong else {})


def layer(world, wrong):
    weft.nn.RowParallelLinear(8, 4)(ONES(2, 3 if wrong else 4))


def call_of(public):
    """A call with one bad argument, which every function has."""

    def make(world, wrong):
        public.call(public.good(world.rank) | ({"timeout": -1} if wrong else {}))

    return make, "ValueError: timeout must be a positive number of seconds; got -1"


CALLS = {
    **{name: call_of(public) for name, public in public_calls().items()},
    "empty": (
        lambda world, wrong: world.empty(-4 if wrong else 4),
        "ValueError: sizes must not be negative; got (-4,)",
    ),
    "signals": (
        lambda world, wrong: world.signals(0 if wrong else 2),
        "ValueError: count must be a positive integer; got 0",
    ),
    "execute": (wrong_plan, "ValueError: "),
    "RowParallelLinear": (layer, "ValueError: RowParallelLinear (style RowwiseParallel): input "),
}


def until_failed(world):
    while not world.mesh.failure()[0]:
        threading.Event().wait(0.01)


def refusing(world, call):
    """Rank 1 refuses a call that rank 0 makes, continues with other work, and then makes its next."""
    make, _ = CALLS[call]
    if world.rank == 0:
        make(world, False)
        return
    with pytest.raises((TypeError, ValueError)):
        make(world, True)
    until_failed(world)
    weft.all_reduce(ONES(3))


def checked(error, why):
    assert isinstance(error, MismatchError), error
    lines = str(error).splitlines()
    assert lines[0] == "the ranks do not make the same call: rank 1 rejects it"
    assert lines[1].startswith("  rank 0: ")
    assert lines[2].startswith(f"  rank 1 raised {why}"), lines
    assert ", at " in lines[2]


def error_on_threads(call):
    """The error that `refusing` raises where ranks are threads."""

    def run():
        refusing(weft.init(), call)

    with weft.local_world(2) as local, pytest.raises(MismatchError) as caught:
        local.run(run)
    return caught.value


def test_a_rank_that_refuses_a_call_tells_the_others_why():
    with ThreadPoolExecutor(len(CALLS)) as pool:  # each waits for a second try
        for error, (_, why) in zip(pool.map(error_on_threads, CALLS), CALLS.values(), strict=True):
            checked(error, why)


@pytest.mark.parametrize("context", [world, stream_world])
def test_ranks_of_processes_and_of_streams_are_told(context):
    for outcome in start(refusing, 2, "all_reduce", context=context):
        checked(outcome.error, CALLS["all_reduce"][1])


def of_a_group(_, asynchronous):
    out, tensor = ONES(8), ONES(4)
    if dist.get_rank():
        with pytest.raises(ValueError, match="must have 2 times"):
            dist.all_gather_into_tensor(ONES(9), tensor, async_op=asynchronous).wait()
        until_failed(operations_of(dist.group.WORLD).world)
        dist.barrier()
    elif asynchronous:
        dist.all_gather_into_tensor(out, tensor, async_op=True).wait()
    else:
        dist.all_gather_into_tensor(out, tensor)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_group_tells_it(asynchronous):
    for outcome in start(of_a_group, 2, asynchronous, context=group):
        checked(outcome.error, "ValueError: the output must have 2 times the 4 elements of the ")


def test_ranks_of_other_hosts_are_told():
    with two_worlds() as worlds:

        def call(rank):
            wrong = ONES(4, dtype=torch.bool)
            with pytest.raises(TypeError if rank else MismatchError) as caught:
                weft.all_reduce(wrong if rank else ONES(4), world=worlds[rank])
            return str(caught.value)

        refused, _ = each_rank(call)
        assert "rank 1 raised TypeError: a has dtype bool; " in refused


def corrected(world):
    """All ranks refuse a call, and rank 1 one more, before they make it."""
    for _ in range(1 + world.rank):
        with pytest.raises(TypeError):
            weft.all_reduce(ONES(4, dtype=torch.bool))
    return weft.all_reduce(ONES(4)).tolist()


def test_a_rank_may_correct_a_call_that_it_refused():
    assert [each.result for each in start(corrected, 2)] == [[2.0] * 4] * 2


def slowly_corrected(world):
    """What all ranks refuse is no call of any, however long they take for the next."""
    with pytest.raises(TypeError):
        weft.all_reduce(ONES(4, dtype=torch.bool))
    if world.rank:
        threading.Event().wait(1.5)  # longer than a rank that refuses alone has for a second try
    return weft.all_reduce(ONES(4)).tolist()


def test_what_all_ranks_refuse_is_no_call():
    assert [each.result for each in start(slowly_corrected, 2)] == [[2.0] * 4] * 2
