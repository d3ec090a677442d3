"""Ranks that continue after a loss: who they are, what becomes of the old world, and who joins them."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import signal
import threading
import time
import tracemalloc
import weakref
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.process_resources import leaked, resources
from support.ranks import die, named_memory, none_left, sockets, start

import weft
from weft.bootstrap.listener import Listener
from weft.world import Endpoint, handle_of, init_by_store, reconfigure

LIMIT = 20.0
"""Seconds of every wait."""


@contextlib.contextmanager
def outside():
    """A store that no rank serves: process 0 does, which is no rank and ends last."""
    number = int(os.environ["RANK"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=number == 0,
        wait_for_workers=False,
    )
    try:
        yield store
    finally:
        if number:
            with contextlib.suppress(RuntimeError):  # its process ends once all have said so
                store.add("over", 1)


def stage(store, fn, ranks, *arguments):
    """Processes 1 … are ranks of a world, as many as `ranks`, and the others are given to `fn` without
    one; process 0 waits for those that are to end.
    """
    number = int(os.environ["RANK"])
    if number == 0:
        ended = fn.ends(ranks, *arguments)
        while store.add("over", 0) < ended:
            time.sleep(0.01)
        return None
    if number > ranks:
        return fn(store, None, *arguments)
    world = init_by_store(dist.PrefixStore("first", store), number - 1, ranks, LIMIT)
    return fn(store, world, *arguments)


def ends(count):
    """How many processes of a function end by themselves."""

    def mark(fn):
        fn.ends = count
        return fn

    return mark


def play(fn, ranks, *arguments, more=0, limit=60.0):
    """The outcomes of the ranks, and of `more` processes without a world."""
    return start(stage, ranks + more + 1, fn, ranks, *arguments, limit=limit, context=outside)[1:]


def numbers(world):
    """The sum over ranks of their global rank, by a collective and by a fused operator."""
    own = torch.full((4, 4), float(world.global_ranks[world.rank]))
    total = weft.all_reduce(own, world=world)
    rows = weft.all_gather_matmul(own, torch.eye(4), world=world)
    assert torch.equal(rows.view(world.ranks, 4, 4).sum(0), total)
    return total[0, 0].item()


def until_lost(world, call):
    """Make calls until a peer is lost."""
    with pytest.raises(weft.PeerLost):
        while True:
            call(world)


CALLS = {
    "collective": lambda world: weft.all_reduce(torch.ones(1000), world=world),
    "fused": lambda world: weft.matmul_all_reduce(
        torch.ones(64, 64), torch.ones(64, 64), world=world
    ),
    "outside": lambda world: (time.sleep(0.01), weft.barrier(world=world)),
}


def all_make(store, world, call):
    """Make a call, and wait until all ranks have: else one that dies next ends it for others."""
    call(world)
    store.add(f"made in {world.identity}", 1)
    while store.add(f"made in {world.identity}", 0) < world.ranks:
        time.sleep(0.001)


@ends(lambda ranks, victims, call: ranks - len(victims))
def one_after_the_other(store, world, victims, call):
    found = []
    for victim in victims:
        mine = world.global_ranks[world.rank]
        all_make(store, world, CALLS[call])
        if mine == victim:
            threading.Timer(0.02, die).start()
        until_lost(world, CALLS[call])
        world = world.shrink()
        found.append((world.rank, [*world.global_ranks], numbers(world)))
    return found


@pytest.mark.parametrize(
    ("ranks", "victims", "call"),
    [
        (4, (0, 3, 1), "collective"),
        (4, (0, 3, 1), "fused"),
        (4, (0, 3, 1), "outside"),
        (3, (1, 2), "collective"),
        (3, (1, 2), "fused"),
        (2, (0,), "fused"),
        (2, (0,), "outside"),
    ],
)
def test_the_others_go_on_after_each_loss(ranks, victims, call):
    outcomes = play(one_after_the_other, ranks, victims, call)
    alive = [*range(ranks)]
    for at, victim in enumerate(victims):
        alive.remove(victim)
        for rank in (rank for rank in alive if outcomes[rank]):
            assert outcomes[rank].error is None, outcomes[rank].trace
            assert outcomes[rank].result[at] == (alive.index(rank), alive, sum(alive))
    assert [rank for rank, outcome in enumerate(outcomes) if outcome] == alive


@ends(lambda ranks, victims: ranks - len(victims))
def at_once(store, world, victims):
    all_make(store, world, CALLS["collective"])
    if world.rank in victims:
        store.add("dying", 1)
        store.wait(["dying"])
        while store.add("dying", 0) < len(victims):
            pass
        die()
    until_lost(world, CALLS["collective"])
    world = world.shrink()
    return [*world.global_ranks], numbers(world)


@pytest.mark.parametrize("victims", [(0, 1), (1, 3)])
def test_two_losses_at_once(victims):
    outcomes = play(at_once, 4, victims)
    alive = [rank for rank in range(4) if rank not in victims]
    for rank in alive:
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result == (alive, sum(alive))


@ends(lambda ranks, hosts, victims, limit: len(hosts) - len(victims))
def on_claimed_hosts(store, world, hosts, victims, limit):
    rank = int(os.environ["RANK"]) - 1
    with (
        mock.patch("weft.bootstrap.endpoint.host_identity", return_value=f"host {hosts[rank]}"),
        mock.patch(
            "weft.bootstrap.endpoint.listen_to_hosts", side_effect=lambda _: Listener("127.0.0.1")
        ),
    ):
        world = init_by_store(dist.PrefixStore("hosts", store), rank, len(hosts), LIMIT)
        all_make(store, world, CALLS["collective"])
        if rank in victims:
            die()
        until_lost(world, CALLS["collective"])
        try:
            world = world.shrink(timeout=limit)
        except weft.PeerTimeout as error:
            return str(error)
        return [*world.global_ranks], numbers(world)


FOREVER = 1e5
"""Seconds that no test waits: ranks beside the lost ones tell of them."""


@pytest.mark.parametrize(
    ("hosts", "victims", "limit"),
    [
        ((0, 0, 1, 1), (3,), FOREVER),
        ((0, 0, 1, 1), (0, 3), FOREVER),
        ((0, 1, 1, 0), (0, 1), FOREVER),  # each of the others knows of one
        ((0, 1, 2), (1,), 1.0),
        ((0, 1), (1,), 1.0),
    ],
)
def test_ranks_beside_those_that_are_lost_tell_the_other_hosts(hosts, victims, limit):
    alive = [rank for rank in range(len(hosts)) if rank not in victims]
    outcomes = play(on_claimed_hosts, 0, hosts, victims, limit, more=len(hosts))
    for rank in alive:
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result == (alive, sum(alive))


def test_the_last_of_a_host_is_missed_by_a_minority():
    outcomes = play(on_claimed_hosts, 0, (0, 1), (0,), 1.0, more=2)
    assert "ranks [0] do not answer, and may be alive" in outcomes[1].result


STEPS = [
    "weft.bootstrap.endpoint.Endpoint.__init__",
    "weft.membership.agreement.Agreement._wait",
    "weft.membership.agreement.Agreement._answer_all",
    "weft.membership.requests.Connection.send",
    "weft.membership.agreement.LateResponder.__init__",
    "weft.world.connect.connect",
    "weft.bootstrap.connector.Outbound.advance",
    "weft.bootstrap.connector.Connector._identify",
    "weft.world.connect.Connections",
    "weft._native.create_mapping",
    "weft._native.attach_mapping",
    "weft.membership.agreement.LateResponder.close",
]


@ends(lambda ranks, second, step: ranks - 2)
def during_the_shrink(store, world, second, step):
    all_make(store, world, CALLS["collective"])
    if world.rank == 1:
        die()
    until_lost(world, CALLS["collective"])
    if world.rank == second:

        def dies(*_, **named):
            die()

        with mock.patch(step, dies):
            world.shrink()
        die()
    while True:
        world = world.shrink()
        with contextlib.suppress(weft.PeerLost):
            return [*world.global_ranks], numbers(world)


@pytest.mark.parametrize("second", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", STEPS)
def test_a_loss_while_the_others_shrink(step, second):
    outcomes = play(during_the_shrink, 4, second, step)
    alive = [rank for rank in range(4) if rank not in (1, second)]
    assert outcomes[second] is None, outcomes[second].trace  # it has died at that step
    for rank in alive:
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result == (alive, sum(alive))


@ends(lambda ranks, suspended: ranks)
def suspended_ranks(store, world, suspended):
    CALLS["collective"](world)
    if world.rank in suspended:
        store.set(f"pid {world.rank}", str(os.getpid()))
        store.wait([f"resumed {world.rank}"])  # suspended meanwhile
    else:
        pids = [int(store.get(f"pid {rank}")) for rank in suspended]
        if world.rank == min({*range(world.ranks)} - {*suspended}):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            store.set("suspended", "")
        store.wait(["suspended"])
    before = world
    try:
        world = before.shrink(timeout=0.5).shrink()
        # those that are left out may know of both endpoints
        assert before.rank in suspended or len(world.kept) == 2
        found = [*world.global_ranks], numbers(world)
    except weft.WeftError as error:
        found = type(error).__name__, str(error)
    if before.rank not in suspended and before.rank == min({*range(before.ranks)} - {*suspended}):
        for rank, pid in zip(suspended, pids, strict=True):
            os.kill(pid, signal.SIGCONT)
            store.set(f"resumed {rank}", "")
    # those that continued answer until the others know
    store.add("known", 1)
    while store.add("known", 0) < before.ranks:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("suspended", [(0,), (2, 3), (3,)])
def test_a_suspended_rank_is_left_out_and_learns_of_it(suspended):
    outcomes = play(suspended_ranks, 4, suspended)
    alive = [rank for rank in range(4) if rank not in suspended]
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.trace
        if rank in alive:
            assert outcome.result == (alive, sum(alive))
        else:
            assert outcome.result[0] == "Excluded", outcome
            assert f"the other ranks continued without rank {rank}" in outcome.result[1]


def test_half_of_the_ranks_without_rank_0_do_not_go_on_without_the_others():
    outcomes = play(suspended_ranks, 4, (0, 1))
    for outcome in outcomes[2:]:
        assert outcome.result[0] == "PeerTimeout", outcome
        assert "ranks [0, 1] do not answer, and may be alive" in outcome.result[1]
    # the others have given up, so these are all that is left
    for outcome in outcomes[:2]:
        assert outcome.result == ([0, 1], 1), outcome


@ends(lambda ranks, lost: 4)
def replaced(store, world, lost):
    if world is None:
        store.wait(["invitation"])
        if lost:
            store.wait(["lost"])
        with weft.join(store.get("invitation").decode(), timeout=LIMIT) as joined:
            weft.barrier()  # in the default world
            return joined.rank, [*joined.global_ranks], numbers(joined), joined.ranks
    if world.rank == 0:
        store.set("invitation", world.invitation())
    if lost:
        all_make(store, world, CALLS["collective"])
        if world.rank == 1:
            die()
        until_lost(world, CALLS["collective"])
        store.set("lost", "")
        grown = world.grow(2)
    else:
        CALLS["fused"](world)
        grown = world.grow(1)
        with pytest.raises(weft.WeftError, match=r"grow\(\) has returned the one that follows it"):
            weft.barrier(world=world)
    weft.barrier(world=grown)
    with grown:
        return grown.rank, [*grown.global_ranks], numbers(grown), grown.ranks


def test_ranks_join_an_open_world():
    outcomes = play(replaced, 3, False, more=1)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.trace
        assert outcome.result == (rank, [0, 1, 2, 3], 6, 4)


def test_replacements_take_the_places_of_lost_ranks():
    first, lost, third, *joined = play(replaced, 3, True, more=2)
    assert lost is None
    assert sorted(outcome.result for outcome in joined) == [
        (rank, [0, 1, 2, 3], 6, 4) for rank in (1, 3)
    ]
    assert (first.result[0], third.result[0]) == (0, 2)


@ends(lambda ranks: ranks)
def not_joined(store, world):
    found = []
    with pytest.raises(weft.PeerTimeout, match="for 1 to join, of which 0 did"):
        world.grow(1, timeout=0.3)
    found.append(numbers(world))  # it is still open
    with pytest.raises(weft.MismatchError, match="expects 1 joiners"):
        world.grow(1 + (world.rank == 1), timeout=5)
    found.append(numbers(world))
    with pytest.raises(ValueError, match="joiners must be a positive integer; got 0"):
        world.grow(0)
    return found


def test_a_world_that_nobody_joins_stays_open():
    for outcome in play(not_joined, 2):
        assert outcome.error is None, outcome.trace
        assert outcome.result == [1, 1]


@ends(lambda ranks: ranks - 1)
def old_state(store, world):
    before = resources()
    made = init_by_store(dist.PrefixStore("second", store), world.rank, world.ranks, LIMIT)
    weft.world.registry.make_default(made)
    symmetric = made.empty(1 << 20)
    symmetric.fill_(float(made.rank))
    layer = weft.nn.RowParallelLinear(6, 8, bias=False)
    packed = weft.pack(torch.eye(8))
    weft.matmul_all_reduce(torch.ones(4, 8), packed)
    layer(torch.ones(4, layer.weight.shape[1]))
    handle = weft.all_reduce_async(torch.ones(1 << 16)) if made.rank != 1 else None
    if made.rank == 1:
        store.wait(["begun 0", "begun 2"])
        die()
    store.set(f"begun {made.rank}", "")
    with pytest.raises(weft.PeerLost, match="rank 1"):
        handle.wait()
    new = made.shrink()
    # what belongs to the old world says so; data and packed weights serve on
    with pytest.raises(weft.WeftError, match=r"shrink\(\) has returned the one that follows it"):
        layer(torch.ones(4, layer.weight.shape[1]))
    with pytest.raises(weft.WeftError, match=r"shrink\(\) has returned the one that follows it"):
        made.shrink()
    with pytest.raises(weft.WeftError):
        handle.wait()
    with pytest.raises(weft.WeftError, match=r"shrink\(\) has returned the one that follows it"):
        weft.put(symmetric, torch.ones(1 << 20), 1 - new.rank)
    with pytest.raises(ValueError, match="not a symmetric tensor of this world"):
        new.peer(symmetric, 1 - new.rank)
    assert not new.is_symmetric(symmetric)
    assert symmetric[0] == made.rank
    with pytest.raises(ValueError, match="symmetric in another world"):
        weft.all_reduce(symmetric[:4])
    total = weft.all_reduce(symmetric[:4].clone())  # the default world is the new one
    assert total[0] == 2
    assert weft.matmul_all_reduce(torch.ones(4, 8), packed)[0, 0] == 2
    assert weft.nn.RowParallelLinear(6, 8, bias=False)(torch.ones(4, 3)).shape == (4, 8)
    new.close()
    made.close()
    weft.world.registry.default = None
    del symmetric, layer, packed, handle, total, new, made
    return leaked(before)


def test_what_becomes_of_the_old_world():
    named, abstract = named_memory(), sockets()
    outcomes = play(old_state, 3)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result == []
    assert none_left(abstract)
    assert named_memory() == named


@ends(lambda ranks: ranks - 1)
def leaves_in_order(store, world):
    weft.barrier(world=world)
    if world.rank == 2:
        world.close()
        with pytest.raises(weft.WeftError, match="close\\(\\) was called"):
            world.shrink()
        store.add("over", 1)
        os._exit(0)
    world = world.shrink()
    return [*world.global_ranks], numbers(world)


def test_a_rank_that_closes_its_world_is_left_out_at_once():
    outcomes = play(leaves_in_order, 3)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        assert outcome.result == ([0, 1], 1)


@ends(lambda ranks: ranks)
def while_others_complete_a_call(store, world):
    signals = world.signals(1)
    if world.rank == 0:
        weft.wait(signals, 0, "==", 1)
    elif world.rank == 2:
        while not world.mesh.left(1):
            time.sleep(0.001)
        weft.notify(signals, 0, peer=0)
    world = world.shrink()
    return [*world.global_ranks], numbers(world)


def test_shrink_lets_calls_complete_that_do_not_need_the_rank():
    for outcome in play(while_others_complete_a_call, 3):
        assert outcome.error is None, outcome.trace
        assert outcome.result == ([0, 1, 2], 3)


@ends(lambda ranks: ranks)
def with_a_call_that_others_do_not_make(store, world):
    work = weft.all_reduce_async(torch.ones(4), world=world) if world.rank == 0 else None
    world = world.shrink()
    if work is not None:
        with pytest.raises(weft.PeerLost):
            work.wait()
    return [*world.global_ranks], numbers(world)


def test_shrink_ends_an_asynchronous_call_that_others_do_not_make():
    for outcome in play(with_a_call_that_others_do_not_make, 3):
        assert outcome.error is None, outcome.trace
        assert outcome.result == ([0, 1, 2], 3)


@ends(lambda ranks: 3)
def by_handles(store, world):
    """Processes 1 to 4 have no world; the last dies before the second."""
    number = int(os.environ["RANK"]) - 1
    endpoint = Endpoint()
    store.set(f"handle {number}", handle_of(endpoint))
    handles = [store.get(f"handle {each}").decode() for each in (2, 0, 3, 1)]
    with pytest.raises(ValueError, match="must include"):
        reconfigure("none", handles[:1] if number != 2 else handles[1:2], endpoint, LIMIT)
    if number == 3:
        die()
    with pytest.raises((weft.PeerLost, weft.PeerTimeout)):
        reconfigure("first", handles, endpoint, LIMIT)
    made = reconfigure("second", [handles[at] for at in (0, 1, 3)], endpoint, LIMIT)
    found = number, made.rank, numbers(made)
    # threads, files and memory of a world that is over end with the last reference to it
    gc.disable()
    before, made = weakref.ref(made), made.shrink()
    assert before() is None
    numbers(made)
    made.close()
    return found


def test_a_world_of_given_processes():
    outcomes = play(by_handles, 0, more=4)
    assert outcomes[3] is None
    for outcome, rank in zip(outcomes[:3], (1, 2, 0), strict=True):
        assert outcome.error is None, outcome.trace
        assert outcome.result[1:] == (rank, 3)


def test_worlds_that_cannot_shrink_or_be_joined():
    with weft.local_world(2) as local, pytest.raises(weft.WeftError, match="a local world cannot"):
        local.run(lambda: weft.init().shrink())
    with pytest.raises(ValueError, match=r"what world\.invitation\(\) returned; got 'nonsense'"):
        weft.join("nonsense")


def test_a_small_text_is_not_expanded_without_a_bound():
    pack = zlib.compressobj(9)
    parts = [pack.compress(b"[" * (1 << 20)) for _ in range(200)]
    text = base64.urlsafe_b64encode(b"".join([*parts, pack.flush()])).decode()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="invitation must be what") as caught:
            weft.join(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "expands to more than 8 MiB" in str(caught.value.__cause__)
    assert most < 64 << 20


@contextlib.contextmanager
def launched():
    """The default world of ranks of which rank 0 serves the store."""
    with weft.init(timeout=LIMIT) as made:
        yield made


def by_launcher(world):
    if world.rank == 0:
        CALLS["collective"](world)
        die()
    until_lost(world, CALLS["collective"])
    new = world.shrink()
    found = numbers(new), weft.all_reduce(torch.ones(1)).item()
    new.close()
    return found


def test_the_rank_that_serves_the_rendezvous_is_lost():
    outcomes = start(by_launcher, 3, context=launched)
    assert outcomes[0] is None
    for outcome in outcomes[1:]:
        assert outcome.error is None, outcome.trace
        assert outcome.result == (3, 2)


def wrong_numbers(world):
    """Connections of strangers do not disturb an agreement."""
    import socket

    endpoint = world.membership.endpoint
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(endpoint.here.address.at)
        stranger.send(b"x" * 100)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(endpoint.here.address.at)
        weft.barrier()
        new = world.shrink()
        silent.close()
    with new:
        return numbers(new)


def test_strangers_at_a_door_are_not_heard():
    assert [outcome.result for outcome in start(wrong_numbers, 2, context=launched)] == [1, 1]
