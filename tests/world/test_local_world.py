"""Ranks that are threads of this process."""

import functools
import gc
import sys
import threading

import pytest
import torch
from support.on_hosts import results

import weft
from weft.engines.recording import record
from weft.gpu import memory as device_memory
from weft.world import memory, placement


def shard(rank, *shape, call=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * call + rank))


def every_operator():
    world = weft.init()
    rank, ranks = world.rank, world.ranks
    shards, b = [shard(r, 6, 5) for r in range(ranks)], shard(99, 5, 4)
    whole = torch.cat(shards)
    products = [s @ b for s in shards]
    for algorithm in ("direct", "pull", "push", "ring", "sequential"):
        out = torch.full((6 * ranks, 4), float("nan"))
        y = weft.all_gather_matmul(shards[rank], b, algorithm=algorithm, out=out)
        torch.testing.assert_close(y, whole @ b)
    torch.testing.assert_close(weft.matmul_all_reduce(shards[rank], b), sum(products))
    part = 6 // ranks
    torch.testing.assert_close(
        weft.matmul_reduce_scatter(shards[rank], b), sum(products)[part * rank : part * (rank + 1)]
    )
    assert torch.equal(weft.all_gather_async(shards[rank]).wait(), whole)
    symmetric = world.empty(6, 5).copy_(shards[rank])
    weft.barrier()
    weft.get(out := torch.empty(6, 5), symmetric, (rank + 1) % ranks)
    assert torch.equal(out, shards[(rank + 1) % ranks])
    leaf = shards[rank].clone().requires_grad_()
    weft.all_gather_matmul(leaf, b).square().sum().backward()
    torch.testing.assert_close(leaf.grad, ranks * 2 * (shards[rank] @ b) @ b.t())
    return rank, threading.get_ident()


@pytest.mark.parametrize(("ranks", "streams"), [(1, False), (2, False), (3, False), (2, True)])
def test_every_operator(ranks, streams):
    threads = threading.active_count()
    with weft.local_world(ranks, streams=streams) as local:
        first = local.run(every_operator)
        assert [rank for rank, _ in first] == list(range(ranks))
        assert local.run(every_operator) == first, "the same threads"
    with pytest.raises(weft.WeftError, match=r"no default world|this world is closed"):
        weft.barrier()
    # lanes end at garbage collection
    assert threading.active_count() <= threads + 2 * ranks * streams


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (1, 0, 0, 1)], ids=str)
def test_ranks_that_behave_as_on_several_hosts(hosts):
    """The checks of ranks in network namespaces, among threads."""
    threads = threading.active_count()
    with weft.local_world(len(hosts), hosts=hosts) as local:
        first = [hosts.index(host) for host in hosts]
        assert [
            world.hosts.index(world.hosts[rank]) for rank, world in enumerate(local.worlds)
        ] == (first)
        local.run(lambda: results.operators(weft.init()))
        local.run(lambda: results.refusals(weft.init()))
        assert local.run(one_sided_ring) == [(rank - 1) % len(hosts) for rank in range(len(hosts))]
        with pytest.raises(KeyError, match="gone"):
            local.run(raises_on_rank_0)
        assert local.run(one_sided_ring)[0] == len(hosts) - 1, "in a new world"
    assert threading.active_count() <= threads + 2 * len(hosts)


def one_sided_ring():
    world = weft.init()
    inbox, arrived = world.empty(1), world.signals(1)
    peer = (world.rank + 1) % world.ranks
    weft.put_notify(inbox, torch.tensor([float(world.rank)]), arrived, 0, peer)
    weft.wait(arrived, 0, ">=", 1)
    return int(inbox)


def raises_on_rank_0():
    if weft.init().rank == 0:
        raise KeyError("gone")
    weft.barrier()


def test_calls_back_to_back():
    def calls():
        world = weft.init()
        for call in range(100):
            # exact with every kernel
            shards = [shard(r, 3, 2, call=call).round() for r in range(world.ranks)]
            b = torch.full((2, 2), float(call))
            y = weft.all_gather_matmul(
                shards[world.rank], b, algorithm=("pull", "push", "ring", "direct")[call % 4]
            )
            assert torch.equal(y, torch.cat(shards) @ b)

    with weft.local_world(3) as local:
        local.run(calls)


def test_an_error_on_one_rank_ends_all():
    def fails():
        if weft.init().rank == 1:
            raise KeyError("mine")
        weft.barrier()

    local = weft.local_world(3)
    with pytest.raises(KeyError, match="mine"):
        local.run(fails)
    for _ in range(2):
        local.close()
    with pytest.raises(
        weft.WeftError,
        match=r"this local world is closed; make a new one with weft\.local_world\(\.\.\.\)",
    ):
        local.run(weft.barrier)


def test_the_next_cell_after_an_error_has_a_new_world():
    """As in a notebook, where cells fail; memory of the old world is refused by name."""

    def fails():
        part = weft.init().empty(2)
        if weft.init().rank:
            raise ZeroDivisionError
        weft.barrier()
        return part

    kept = []
    with weft.local_world(2) as local:
        kept += local.run(lambda: weft.init().empty(2))
        threads = local.run(threading.get_ident)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                local.run(fails)
        assert local.run(lambda: weft.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
        assert local.run(threading.get_ident) == threads
        with pytest.raises(ValueError, match="symmetric in another world"):
            local.run(lambda: weft.all_reduce(kept[weft.init().rank]))


def test_a_rank_of_a_local_world_cannot_call_run():
    with (
        weft.local_world(2) as local,
        pytest.raises(weft.WeftError, match="would wait for itself"),
    ):
        local.run(lambda: local.run(lambda: 1))


def test_a_function_that_takes_other_arguments_is_refused_before_it_runs():
    @functools.wraps(lambda configuration: None)  # as decorators that bring arguments
    def wrapped():
        return 1

    with weft.local_world(2) as local:
        for start in (local.run, lambda fn, *args: weft.launch(fn, 2, *args)):
            with pytest.raises(TypeError, match=r"with 0 argument.* 'rank'; .* weft.init\(\).rank"):
                start(lambda rank: rank)
        with pytest.raises(TypeError, match=r"with 2 argument.* too many positional"):
            local.run(lambda x: x, 1, 2)
        assert local.run(wrapped) == [1, 1], "in the same world"
        assert local.run(max, 1, 2) == [2, 2], "a function without a signature"


def test_a_call_outside_of_run_is_told_of_it(monkeypatch):
    monkeypatch.setattr("weft.world.registry.default", None)  # of an earlier test
    with (
        weft.local_world(2),
        pytest.raises(weft.WeftError, match=r"no default world outside local\.run"),
    ):
        weft.barrier()


def test_the_message_of_a_closed_world_names_the_next_run():
    with weft.local_world(2) as local:
        with pytest.raises(ZeroDivisionError):
            local.run(lambda: 1 // 0)
        with pytest.raises(weft.WeftError, match=r"make a new one with the next local\.run"):
            weft.barrier(world=local.worlds[0])


def test_a_rank_that_has_returned_is_named():
    with (
        weft.local_world(2, timeout=0.5) as local,
        pytest.raises(weft.PeerTimeout, match=r"it has returned from local\.run") as raised,
    ):
        local.run(lambda: weft.init().rank or weft.barrier())
    assert "py-spy" not in str(raised.value)


def test_a_rank_that_sys_exit_ends_is_named():
    def leaves():
        if weft.init().rank:
            sys.exit(0)
        with pytest.raises(weft.PeerLost, match=r"was ended by sys\.exit\(0\), while rank 0"):
            weft.barrier()

    with weft.local_world(2) as local, pytest.raises(SystemExit):
        local.run(leaves)


def test_a_handle_that_outlives_its_world():
    def outlives():
        world, x = weft.init(), torch.ones(1_000_000)
        weft.all_reduce_async(x).wait()
        if world.rank == 0:
            handle = weft.all_reduce_async(x)
            world.close()
            handle.wait()

    with (
        weft.local_world(2) as local,
        pytest.raises(weft.WeftError, match="wait for asynchronous calls before the world is"),
    ):
        local.run(outlives)


def test_ranks_that_call_different_things():
    with (
        weft.local_world(2) as local,
        pytest.raises(
            weft.MismatchError,
            match=r"operators differ\n  rank 0: all_reduce\(\(3,\) float32, op=sum\), at .*\n  rank 1: barrier\(\), at ",
        ),
    ):
        local.run(lambda: weft.barrier() if weft.init().rank else weft.all_reduce(torch.ones(3)))


def test_concurrent_worlds_and_nested_defaults():
    def sums(value):
        return weft.all_reduce(torch.full((2,), float(value))).tolist()

    with weft.local_world(2) as one, weft.local_world(3) as other:
        assert one.run(sums, 1) == [[2.0, 2.0]] * 2
        assert other.run(sums, 1) == [[3.0, 3.0]] * 3
        assert one.run(sums, 5) == [[10.0, 10.0]] * 2


@pytest.fixture
def one_rank_per_core(monkeypatch):
    """Ranks synchronize as if each had a core."""
    monkeypatch.setattr(placement, "oversubscribed", lambda places: False)


@pytest.mark.usefixtures("one_rank_per_core")
def test_ranks_synchronize_by_levels():
    came = [0] * 16

    def synchronize():
        world = weft.init()
        for call in range(1, 200):
            came[world.rank] = call
            weft.barrier()
            assert min(came) >= call
        return len(world.placement.levels)

    with weft.local_world(16) as local:
        assert local.run(synchronize) == [2] * 16


@pytest.mark.parametrize("several", [False, True])
def test_few_rows_by_levels(several, monkeypatch):
    """Small collectives of many ranks, one after the other: sums in rank order, with exact bits."""
    monkeypatch.setattr(placement, "oversubscribed", lambda places: not several)
    ranks, uneven = 12, [rank % 2 for rank in range(12)]

    def gather(call):
        world = weft.init()
        assert (len(world.placement.levels) > 1) == several
        rows = [shard(r, 3, 5, call=call) for r in range(ranks)]
        own = rows[world.rank]
        assert torch.equal(weft.all_gather(own), torch.cat(rows))
        out = world.empty(3, 5).fill_(float("nan"))
        assert torch.equal(weft.all_reduce(own, out=out), functools.reduce(torch.add, rows))
        later = (
            weft.all_reduce_async(own.bfloat16()),
            weft.all_gather_async(own[: world.rank % 2], shard_rows=uneven),
        )
        summed = functools.reduce(torch.add, [r.repeat(ranks, 1) for r in rows])
        assert torch.equal(
            weft.reduce_scatter(own.repeat(ranks, 1)), summed[3 * world.rank : 3 * world.rank + 3]
        )
        received = weft.broadcast(own.clone(), source := call % ranks)
        assert torch.equal(received, rows[source])
        assert torch.equal(
            later[0].wait(),
            functools.reduce(torch.add, [r.bfloat16().float() for r in rows]).bfloat16(),
        )
        assert torch.equal(
            later[1].wait(), torch.cat([r[:n] for r, n in zip(rows, uneven, strict=True)])
        )

    with weft.local_world(ranks) as local:
        for call in range(10):
            local.run(gather, call)


@pytest.mark.usefixtures("one_rank_per_core")
def test_a_late_rank_is_named_by_ranks_that_do_not_wait_for_it():
    errors = []

    def synchronize():
        world = weft.init()
        if world.rank == 7:
            assert late.wait(60)
            return
        try:
            weft.all_reduce(torch.zeros(2))
        except weft.PeerTimeout as error:
            errors.append(str(error))
            raise
        finally:
            late.set()

    late = threading.Event()
    with (
        weft.local_world(12, timeout=0.5) as local,
        pytest.raises(weft.PeerTimeout, match="rank 7"),
    ):
        local.run(synchronize)
    assert errors
    assert all(
        ": rank 7 (pid " in error and ") has not made the call; " in error for error in errors
    ), errors


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        weft.local_world(0)
    with pytest.raises(ValueError, match="positive number of seconds"):
        weft.local_world(2, timeout=0)
    with pytest.raises(ValueError, match=r"a number for each of the 3 ranks; got \[0, 1\]"):
        weft.local_world(3, hosts=[0, 1])
    with pytest.raises(ValueError, match="streams share one host: leave out hosts"):
        weft.local_world(2, hosts=[0, 1], streams=True)
    with pytest.raises(weft.WeftError, match="weft supports the devices cpu and cuda"):
        weft.local_world(2, "meta")
    if not torch.cuda.is_available():
        with pytest.raises(weft.WeftError, match="no GPU"):
            weft.local_world(2, "cuda")
        with pytest.raises(weft.WeftError, match="no GPU"):
            weft.init(device="cuda")


def test_memory_that_ranks_of_a_process_share():
    """The memory of local ranks on one GPU, here on a CPU."""

    def shares():
        world = weft.init()
        rank, ranks = world.rank, world.ranks
        tensor = device_memory.allocate(world, [4, 3], torch.float16)
        assert torch.equal(tensor, torch.zeros(4, 3, dtype=torch.float16))
        assert world.is_symmetric(tensor)
        assert world.is_symmetric(tensor[1:])
        weft.barrier()
        world.peer(tensor[1:], (rank + 1) % ranks)[0] = rank
        weft.barrier()
        assert tensor[1].tolist() == [(rank - 1) % ranks] * 3
        assert [
            memory.find(tensor).base(r) == world.peer(tensor, r).data_ptr() for r in range(ranks)
        ] == [True] * ranks
        y = weft.all_gather_matmul(tensor, torch.eye(3, dtype=torch.float16), algorithm="direct")
        assert torch.equal(y, torch.cat([world.peer(tensor, r) for r in range(ranks)]))
        weft.barrier()
        return tensor

    with weft.local_world(2, streams=True) as local:
        tensor, _ = local.run(shares)
    gc.collect()
    assert memory.find(tensor) is None, "the segment ends with its world"
    with pytest.raises(weft.MismatchError, match="empty"), weft.local_world(2) as local:
        local.run(lambda: device_memory.allocate(weft.init(), [1 + weft.init().rank], torch.int8))


@pytest.mark.parametrize("streams", [False, True])
def test_every_instruction_is_recorded(streams):
    def recorded():
        with record(weft.init()) as recording:
            weft.all_gather_matmul(
                torch.ones(6, 3), torch.ones(3, 2), algorithm="push", chunk_rows=2
            )
            weft.all_gather_async(torch.ones(2)).wait()
        return recording.executions

    with weft.local_world(2, streams=streams) as local:
        for rank, executions in enumerate(local.run(recorded)):
            assert [plan.operator for plan, _, _ in executions] == [
                "all_gather_matmul",
                "all_gather",
            ]
            for plan, _, spans in executions:
                every = {
                    (lane, index)
                    for lane, instructions in plan.lanes[rank].items()
                    for index in range(len(instructions))
                }
                assert {(lane, index) for lane, index, _, _ in spans} == every
                assert all(0 < start <= stop for _, _, start, stop in spans)
