"""Groups of torch.distributed on weft: their creation, the order of their calls, and failures."""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.process_resources import leaked, resources
from support.ranks import die, free_port, group, on_ranks, start
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.process_group.worlds import operations_of

SOON = 5.0  # seconds; survivors take milliseconds, and the machine may be busy


def makes(world):
    rank = dist.get_rank()
    backend = world._get_backend(torch.device("cpu"))
    assert (dist.get_backend(), backend.name(), dist.get_rank(), dist.get_world_size()) == (
        "weft",
        "weft",
        rank,
        3,
    )
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [2, 0])]
    for pair, members in zip(pairs, ([0, 1], [1, 2], [2, 0]), strict=True):
        if rank in members:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=pair)
            assert x.item() == sum(members)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group("all"))
    assert x.tolist() == [3.0, 3.0]
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(x, group=gloo)
    assert x.tolist() == [9.0, 9.0]
    for pair, members in zip(pairs, ([0, 1], [1, 2], [2, 0]), strict=True):
        if rank in members:
            dist.destroy_process_group(pair)
    short = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(
            weft.PeerTimeout,
            match=r"waited 0\.2 s for a message from rank 1 .*timed out after a timeout of 0\.2 s",
        ):
            dist.recv(x, 1, group=short)
        with pytest.raises(
            weft.PeerTimeout,
            match=r"rank [12] \(pid \d+\) has not made the call, nor have others: [12]; py-spy"
            r".* \(timed out after a timeout of 0\.2 s\)",
        ):
            dist.barrier(short)
    dist.barrier()


def test_groups_overlap_and_have_timeouts_of_their_own():
    on_ranks(makes, 3, context=group)


def used_again(world):
    """A group that was left refuses all calls with this reason; its unanswered calls fail."""
    rank = dist.get_rank()
    for leave in (dist.ProcessGroup.shutdown, dist.ProcessGroup.abort):
        made = dist.new_group()
        unanswered = made.recv([torch.zeros(1)], 1 - rank, 0)
        leave(made)
        with pytest.raises(
            weft.WeftError,
            match=r"left the group before the message was complete|the group was aborted"
            r"|closed its world",  # the peer may be first
        ):
            unanswered.wait()
        opts = dist.AllreduceOptions()
        for opts.asyncOp in (False, True):
            with pytest.raises(
                weft.WeftError, match=r"closed: .*; make a new one with init_process_group"
            ):
                made.allreduce([torch.zeros(1)], opts)
        for call in (made.send, made.recv):
            with pytest.raises(
                weft.WeftError, match=r"closed: .*; make a new one with init_process_group"
            ):
                call([torch.zeros(1)], 1 - rank, 0)
        dist.destroy_process_group(made)
        with pytest.raises(ValueError, match="not initialized"):
            dist.all_reduce(torch.zeros(1), group=made)


def test_a_group_that_was_left_refuses_calls():
    on_ranks(used_again, 2, context=group)


def other_backends(world):
    assert world._get_backend(torch.device("cpu")).name() == "weft"
    assert world._get_backend(torch.device("cuda")).name() == "gloo"
    assert {device.type for device in world._device_types} == {"cpu", "cuda"}
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    made = dist.new_group(backend="weft")
    dist.all_reduce(x, group=made)
    assert x.tolist() == [4.0, 4.0]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
        made._get_backend(torch.device("cuda"))


def test_other_devices_have_other_backends():
    on_ranks(other_backends, 2, context=functools.partial(group, "cpu:weft,cuda:gloo"))


def aborted(nothing):
    """torch aborts a group, of which it asks for the backend of GPUs first."""
    dist.init_process_group("weft", timeout=timedelta(seconds=20))
    pair = dist.new_group()
    for device in ("cuda", "meta"):
        with pytest.raises(RuntimeError, match=f"No backend type associated .* {device}"):
            pair._get_backend(torch.device(device))
    dist.barrier(pair)
    dist.distributed_c10d._abort_process_group(pair)
    with pytest.raises(weft.WeftError, match=r"the group was aborted|closed its world"):
        pair.barrier()
    dist.barrier()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()


def test_groups_are_aborted():
    on_ranks(aborted, 2, context=contextlib.nullcontext)


def threads_of_gloo():
    return [
        path for path in glob.glob("/proc/self/task/*/comm") if "pt_gloo" in Path(path).read_text()
    ]


def waits_for_gloos_threads(nothing):
    """Threads of gloo that drop tensors need Python; a thread that outlives the interpreter crashes
    the process.
    """
    dist.init_process_group("weft")
    worlds = [weft.init(dist.new_group(backend="gloo")), weft.init()]
    assert threads_of_gloo()
    dist.destroy_process_group()
    assert not threads_of_gloo()
    for world in worlds:
        world.close()


@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch gives gloo's threads no names")
def drops(_):
    """Rank 1 drops a group with an outstanding call; rank 0 waits for the next."""
    x, pair = torch.ones(4), dist.new_group()
    dist.all_reduce(x, group=pair, async_op=True)
    (dist.recv if dist.get_rank() else dist.send)(torch.ones(1), 1 - dist.get_rank(), group=pair)
    if dist.get_rank() == 0:
        dist.all_reduce(x, group=pair)
    forget, alive = distributed_c10d._world, operations_of(pair).queue.thread
    for known in (
        forget.pg_map,
        forget.pg_names,
        forget.pg_group_ranks,
        forget.pg_backend_config,
        forget.pg_to_tag,
    ):
        known.pop(pair)
    for groups in forget.tags_to_pg.values():
        groups[:] = [each for each in groups if each is not pair]
    distributed_c10d._unregister_process_group(pair.group_name)
    del pair, groups
    gc.collect()
    alive.join(SOON)
    return alive.is_alive()


def test_the_peers_of_a_rank_that_drops_its_group_are_told():
    waits, drops_it = start(drops, 2, context=functools.partial(group, timeout=4 * SOON))
    assert isinstance(waits.error, weft.PeerLost), waits.trace
    assert re.search(r"rank 1 .*closed its world while rank 0 waited", str(waits.error))
    assert drops_it.result is False, drops_it.trace


def loses_a_peer(asynchronous, _):
    """What rank 0 keeps of a group whose call failed, after `destroy_process_group`."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    # for both groups: a rank that is early with its second one would find the store of the first
    store = dist.TCPStore("localhost", port, 2, rank == 0)

    def init(name):
        named = dist.PrefixStore(name, store)
        dist.init_process_group("weft", store=named, rank=rank, world_size=2)

    init("first")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    gc.collect()
    before = resources()
    init("second")
    if dist.get_rank():
        die()
    with contextlib.suppress(weft.PeerLost):
        works = [dist.all_reduce(torch.ones(4), async_op=asynchronous) for _ in range(3)]
        for work in works:
            work.wait()
    assert (
        operations_of(distributed_c10d._get_default_group()).error_type() == ErrorType.REMOTE_ERROR
    )
    dist.destroy_process_group()
    works = work = None  # which keep their group
    return leaked(before)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_nothing_of_a_failed_group_is_left(asynchronous):
    first, _ = start(
        functools.partial(loses_a_peer, asynchronous), 2, context=contextlib.nullcontext
    )
    assert first.result == [], first.trace


def test_no_thread_of_gloo_outlives_the_groups():
    on_ranks(waits_for_gloos_threads, 2, context=contextlib.nullcontext)


def on_gloo(world):
    made = dist.new_group(backend="weft")
    x = torch.ones(2)
    dist.all_reduce(x, group=made)
    assert x.tolist() == [2.0, 2.0]
    with weft.init(made) as within:  # weft's own functions, on ranks connected by a group of weft's
        assert weft.all_reduce(torch.ones(1), world=within).item() == 2


def test_a_group_in_addition_to_gloo():
    on_ranks(on_gloo, 2, context=functools.partial(group, "gloo"))


def ordered(world):
    """Calls run in the order in which they are issued, from any thread, on every rank."""
    works = []
    for call in range(50):
        x = torch.full((call + 1,), float(call))
        works.append((x, dist.all_reduce(x, async_op=True)))
        if call % 7 == 0:
            y = torch.full((3,), 2.0)
            dist.all_reduce(y)  # runs after all calls issued before
            assert y.tolist() == [4.0] * 3
            assert all(work.is_completed() for _, work in works)
    results = [
        work.get_future().then(lambda future: future.value()[0].sum().item()) for _, work in works
    ]
    assert [future.wait() for future in results] == [2.0 * call * (call + 1) for call in range(50)]
    assert all(work.wait() and work.is_success() for _, work in works)

    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    work.wait(timedelta(seconds=20))
    thread.join()
    assert x.tolist() == [2.0] * 4

    def again(future):  # as hooks of DDP do that compress gradients in several steps
        y = future.value()[0].clone()
        dist.all_reduce(y)
        return (
            dist.all_reduce(y, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
            .wait()
        )

    for _ in range(3):
        assert dist.all_reduce(torch.ones(2), async_op=True).get_future().then(
            again
        ).wait().tolist() == [8.0, 8.0]

    a = torch.ones(3, requires_grad=True)  # a backward pass calls from threads of its own
    b = torch.distributed.nn.functional.all_reduce(a * 2)
    b.sum().backward()
    assert a.grad.tolist() == [4.0] * 3


def test_calls_run_in_the_order_of_their_issue():
    on_ranks(ordered, 2, context=group)


def outstanding(world):
    """Any number of calls of any sizes may be outstanding: each has its own rows."""
    rank, ranks, made = dist.get_rank(), dist.get_world_size(), []
    for call in range(300):
        size = (1, 50, 3000, 40_000)[call % 4]
        if call % 3:
            x, outs = (
                torch.full((size,), call + rank / 4),
                [torch.zeros(size) for _ in range(ranks)],
            )
            work, expected = (
                dist.all_gather(outs, x, async_op=True),
                [call + peer / 4 for peer in range(ranks)],
            )
        else:
            x, expected = (
                torch.full((size,), call + rank / 4),
                [ranks * call + ranks * (ranks - 1) / 8],
            )
            work, outs = dist.all_reduce(x, async_op=True), [x]
        made.append((work, outs, expected))
    for work, outs, expected in made if rank else reversed(made):
        work.wait()
        assert [out.unique().tolist() for out in outs] == [[value] for value in expected]


def test_hundreds_of_calls_are_outstanding():
    on_ranks(outstanding, 2, context=group)


def without_waits(world):
    """Calls and messages complete soon without any wait, also where the threads are asleep."""
    peer = 1 - dist.get_rank()
    for _ in range(3):
        x, y = torch.ones(2), torch.zeros(100_000)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)]
        works += [dist.irecv(y, peer), dist.isend(torch.ones(100_000), peer)]
        deadline = time.monotonic() + 20
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (x.tolist(), y.sum().item()) == ([4.0, 4.0], 100_000.0)


def test_calls_complete_without_a_wait():
    on_ranks(without_waits, 2, context=group)


def killed(world, how):
    rank = dist.get_rank()
    x = torch.ones(1000)
    dist.all_reduce(x)
    if rank == 1:
        time.sleep(0.2)
        die()
    start_time = time.monotonic()
    with pytest.raises(
        weft.PeerLost,
        match=r"rank 1 \(pid \d+\) died while rank \d waited .* \(Connection closed by peer\)",
    ) as caught:
        if how == "sync":
            dist.all_reduce(x)
        elif how == "wait":
            dist.all_reduce(x, async_op=True).wait()
        elif how == "timed wait":
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=30))
        elif how == "recv":
            dist.recv(x, 1)
        else:
            works = [dist.irecv(x, (rank + 1) % 3), dist.isend(x, (rank - 1) % 3)]
            for work in works:
                work.wait()
            dist.recv(x, 1)
    assert isinstance(caught.value, dist.DistError)
    assert time.monotonic() - start_time < SOON
    with pytest.raises(dist.DistBackendError, match="died"):
        dist.barrier()
    return True


@pytest.mark.parametrize("how", ["sync", "wait", "timed wait", "recv", "irecv"])
def test_a_killed_rank_is_named_on_every_rank(how):
    first, second, third = start(killed, 3, how, context=group)
    assert second is None
    for outcome in (first, third):
        assert outcome is not None
        assert outcome.error is None, outcome.trace


def killed_in_a_pair(world):
    pair = dist.new_group([0, 2])
    dist.barrier()  # otherwise rank 0 may lose it during the creation of the group
    if dist.get_rank() == 2:
        die()
    if dist.get_rank() == 0:
        with pytest.raises(
            weft.PeerLost, match=r"rank 1 \(pid \d+\), rank 2 of the job, died while rank 0 waited"
        ):
            dist.all_reduce(torch.ones(3), group=pair)
    return True


def test_a_killed_rank_of_a_smaller_group_is_named_by_its_global_rank():
    outcomes = start(killed_in_a_pair, 3, context=group)
    assert [outcome and outcome.error for outcome in outcomes] == [None, None, None], outcomes
    assert outcomes[2] is None


def futures_fail(world):
    if dist.get_rank() == 1:
        die()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) died"):
        future.wait()
    return True


def test_a_future_raises_the_loss_of_a_rank():
    survivor, _ = start(futures_fail, 2, context=group)
    assert survivor is not None
    assert survivor.error is None, survivor.trace


@pytest.mark.parametrize("first", ["torch", pytest.param("weft", marks=pytest.mark.slow)])
def test_importing_torch_and_weft_registers_the_backend(first):
    second = {"torch": "weft", "weft": "torch"}[first]
    code = f"import {first}, {second}; import torch.distributed as dist; assert dist.Backend.WEFT == 'weft'; dist.init_process_group('weft'); dist.barrier()"
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


BROKEN = """
import sys

class Broken:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise ImportError("a broken library")

sys.meta_path.insert(0, Broken())
import torch, torch.distributed as dist
for backend in ("weft", "gloo"):
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        print(backend)
        dist.destroy_process_group()
    except ImportError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("missing", "replaces", "said"),
    [
        ("weft.errors", "", ["the backend weft cannot be loaded: a broken library", "gloo"]),
        ("weft._native", "", ["a broken library", "gloo"]),
        ("weft.process_group.in_place_of_gloo", "1", ["weft", "gloo"]),
    ],
)
def test_torch_can_be_imported_where_weft_cannot(missing, replaces, said):
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN, missing],
        env={**os.environ, "WEFT_REPLACES_GLOO": replaces},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.splitlines() == said, ended.stderr
    words = "weft cannot serve torch's process groups (ImportError: a broken library)"
    assert (words in ended.stderr) == bool(replaces)


def in_a_handler(world, call):
    """Make a call in a signal handler that interrupts a call on the group."""

    own = operations_of(world)
    for progress in (own.queue, own.messages):
        progress.deferred.close()  # its thread: only the waiting one is to run calls

    def handler(*_):
        if own.queue.current_call() or own.messages.current_call():
            call()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.05)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def left_in_a_handler(world, waits, exits):
    if dist.get_rank() == 0:

        def leave():
            dist.destroy_process_group()
            if exits:
                sys.exit(3)

        in_a_handler(world, leave)
        expected, words = (
            (SystemExit, "3")
            if exits
            else (dist.DistBackendError, "rank 0 left the group in a signal handler")
        )
        with pytest.raises(expected, match=words):
            if waits == "sync":
                dist.all_reduce(torch.ones(3))
            elif waits == "async":
                dist.all_reduce(torch.ones(3), async_op=True)
                dist.all_reduce(torch.ones(3), async_op=True).wait()
            else:
                dist.recv(torch.ones(3), 1)
        assert not dist.is_initialized()
        # for the destruction at the end
        dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
    else:
        with pytest.raises(
            weft.PeerLost,
            match=r"rank 0 left the group in a signal handler while it was in (all_reduce|send)",
        ):
            dist.recv(torch.ones(3), 0)
    return True


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("waits", ["sync", "async", "recv"])
def test_a_signal_handler_leaves_the_group(waits, exits):
    on_ranks(left_in_a_handler, 2, waits, exits, context=group)


def called_in_a_handler(world):
    """A call that would wait for the interrupted one is refused before anything is sent."""
    store, x = world.get_group_store(), torch.ones(3)
    for number, call in enumerate([lambda: dist.all_reduce(x), lambda: dist.recv(x, 1)]):
        if dist.get_rank() == 0:

            def caught(call=call, number=number):
                with pytest.raises(
                    weft.WeftError,
                    match=r"called from a signal handler while rank 0 was in (all_reduce|send)",
                ):
                    call()
                store.set(f"caught {number}", "")

            in_a_handler(world, caught)
            call()
        else:
            store.wait([f"caught {number}"])
            dist.send(x, 0) if number else dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
    # without a handler of the exception the interrupted call would fail with it
    if dist.get_rank() == 0:
        in_a_handler(world, lambda: dist.all_reduce(x, async_op=True).wait())
    with pytest.raises(
        weft.WeftError, match="called from a signal handler while rank 0 was in barrier"
    ):
        dist.recv(x, 0) if dist.get_rank() else dist.barrier()


def test_a_signal_handler_calls_on_the_group():
    on_ranks(called_in_a_handler, 2, context=group)


def interrupted(world, kind):
    """The exception of a signal handler is raised by the interrupted call, also while that executes
    an earlier one.
    """
    if dist.get_rank() == 0:

        def stop():
            raise kind

        in_a_handler(world, stop)
        operations_of(world).queue.run_pending = lambda: (
            None
        )  # leaves the calls to the group's progress thread
        first, second = (dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2))
        with pytest.raises(kind):
            second.wait()
        assert isinstance(first.exception(), kind)
        with pytest.raises(dist.DistBackendError, match=f"closed: {kind.__name__}"):
            second.wait()
    else:
        how = r"was ended by sys\.exit" if kind is SystemExit else f"failed with {kind.__name__}"
        with pytest.raises(weft.PeerLost, match=f"rank 0 .* {how}"):
            dist.recv(torch.ones(3), 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_the_exception_of_an_interrupt_is_raised_unchanged(kind):
    on_ranks(interrupted, 2, kind, context=group)


def interrupted_within_a_limit(world, kind):
    """While the group's progress thread runs the call."""
    if dist.get_rank() == 0:

        def handler(*_):
            raise kind

        work = dist.all_reduce(torch.ones(3), async_op=True)
        while operations_of(world).queue.issued:
            time.sleep(0.001)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(kind):
            work.wait(timedelta(seconds=60))
        with pytest.raises(dist.DistBackendError, match=f"closed: {kind.__name__}"):
            dist.all_reduce(torch.ones(3))
    else:
        with pytest.raises(weft.PeerLost, match=f"rank 0 .* failed with {kind.__name__}"):
            dist.recv(torch.ones(3), 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_the_exception_of_an_interrupt_within_a_time_limit_closes_the_group(kind):
    on_ranks(interrupted_within_a_limit, 2, kind, context=group)


def left_within_a_limit(world, exits):
    """A handler leaves the group while the progress thread runs the call."""

    def leave(*_):
        dist.destroy_process_group()
        if exits:
            sys.exit(3)

    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        while operations_of(world).queue.issued:
            time.sleep(0.001)
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        expected, words = (SystemExit, "3") if exits else (weft.WeftError, "rank 0 left the group")
        with pytest.raises(expected, match=words):
            work.wait(timedelta(seconds=60))
        assert time.monotonic() - began < SOON
        # for the destruction at the end
        dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
    else:
        with pytest.raises(weft.PeerLost, match="in a signal handler while it was in all_reduce"):
            dist.recv(torch.ones(3), 0)


@pytest.mark.parametrize("exits", [False, True])
def test_a_signal_handler_leaves_the_group_within_a_time_limit(exits):
    on_ranks(left_within_a_limit, 2, exits, context=group)


def suspended(world):
    """A scheduler stops all ranks for longer than a limit, and lets them continue."""
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        if not (stopper := os.fork()):
            time.sleep(0.2)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            os._exit(0)
        dist.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=1.2))
        dist.monitored_barrier(timeout=timedelta(seconds=1.2))
        os.waitpid(stopper, 0)
    else:
        time.sleep(0.6)  # of which nothing is left when it continues: rank 0 waits for all of it
        dist.all_reduce(torch.ones(3))
        dist.monitored_barrier()


def test_time_in_which_a_job_is_suspended_counts_in_no_limit_of_a_work():
    on_ranks(suspended, 2, context=group)


def interrupted_start(world, monkeypatch):
    """Ctrl-C may come while `new_group` starts a group's progress threads."""
    if dist.get_rank() == 0:
        start_thread = threading.Thread.start

        def start_interrupted(thread):
            start_thread(thread)
            raise KeyboardInterrupt

        before = {*threading.enumerate()}
        monkeypatch.setattr(threading.Thread, "start", start_interrupted)
        with pytest.raises(KeyboardInterrupt):
            dist.new_group(backend="weft")
        assert {*threading.enumerate()} == before
        world.get_group_store().wait(["told"])  # which this rank serves
    else:
        with pytest.raises(weft.PeerLost, match="cannot be made: rank 0: KeyboardInterrupt"):
            dist.new_group(backend="weft")
        world.get_group_store().set("told", "")


def test_an_interrupted_start_of_a_group_leaves_no_threads():
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_ranks(interrupted_start, 2, monkeypatch, context=group)


def interrupted_message(world):
    """An interrupted message may be partly received: the group is closed, as by an interrupted
    collective.
    """
    if dist.get_rank() == 0:

        def stop():
            raise KeyboardInterrupt

        in_a_handler(world, stop)
        with pytest.raises(KeyboardInterrupt):
            dist.recv(torch.ones(3), 1)
        with pytest.raises(dist.DistBackendError, match="closed: KeyboardInterrupt"):
            dist.recv(torch.ones(3), 1)
    else:
        with pytest.raises(weft.PeerLost, match=r"rank 0 .* failed with KeyboardInterrupt"):
            dist.recv(torch.ones(3), 0)


def test_an_interrupted_message_closes_the_group():
    on_ranks(interrupted_message, 2, context=group)


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("dist.all_reduce(x, async_op=True)", marks=pytest.mark.slow),
        "dist.all_reduce(x, async_op=True).get_future().then(print)",
    ],
)
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_exits_with_outstanding_calls(last, times):
    code = f"import torch, torch.distributed as dist; dist.init_process_group('weft'); x = torch.ones(1000); {last}"
    for _ in range(times):
        assert ended(code) == [0, 0]


def ended(code):
    """The endings of two ranks that run this code."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**environment, "RANK": str(rank)})
        for rank in range(2)
    ]
    return [process.wait(60) for process in processes]
