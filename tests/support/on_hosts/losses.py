"""Ranks and hosts that differ, leave, die or are cut off: the errors of the others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

import pytest
import torch

import weft
from support.process_resources import leaked, resources
from weft.bootstrap import endpoint
from weft.world import network, registry

LIMIT = 2.0  # seconds that a wait may take where something goes wrong


def error_of(call):
    """The error that a repeated call finally raises, as (class, text, seconds of the last call)."""
    try:
        while True:
            started = time.monotonic()
            call()
    except weft.WeftError as error:
        return type(error).__name__, str(error), time.monotonic() - started


@contextlib.contextmanager
def long_linger():
    """Let leaving ranks wait long for an answer: a missing answer makes the test time out."""
    default, network._LINGER = network._LINGER, 300.0
    yield
    network._LINGER = default


def mismatch():
    """Ranks with different calls are shown both calls; no rows of another call are received."""
    with long_linger(), weft.init(timeout=20) as world:
        a, b = torch.ones(64, 8), torch.ones(8, 8)
        weft.all_gather_matmul(a, b)
        odd = world.rank == world.ranks - 1
        name, text, _ = error_of(
            lambda: weft.all_reduce(a) if odd else weft.all_gather_matmul(a, b)
        )
        assert name == "MismatchError", text
        assert "all_gather_matmul(" in text, text
        assert "all_reduce(" in text, text


def transports_differ():
    """A rank is told to use UCX, and the other one is not: an error before anything is sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_TRANSPORT", "ucx" if os.environ["RANK"] == "0" else "tcp")
        return error_of(lambda: weft.init(timeout=20))[:2]


def gives_up():
    """A rank that fails before the end of the rendezvous is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            patch.setattr(
                endpoint,
                "listen_to_hosts",
                lambda rank: (_ for _ in ()).throw(weft.WeftError("no address")),
            )
        return error_of(lambda: weft.init(timeout=300))[:2]


def cut_off(folder):
    """A host's interface goes down in mid-operator: every rank gives up within its limit, and
    reports it. Of two halves of the ranks only that of rank 0 continues.
    """
    with weft.init(timeout=20) as world:
        a, b = torch.ones(256, 64), torch.ones(64, 8)
        weft.all_gather_matmul(a, b)
        (folder / f"running{world.rank}").touch()
        found = error_of(lambda: weft.all_gather_matmul(a, b, timeout=LIMIT))
        try:
            with world.shrink(timeout=LIMIT) as left:
                went_on = [*left.global_ranks], weft.all_reduce(torch.ones(1)).item()
        except weft.PeerTimeout as error:
            went_on = str(error)
    (folder / f"gave_up{os.environ['RANK']}").touch()
    while not (folder / "reconnected").exists():
        time.sleep(0.01)
    return *found, went_on


def behind_a_firewall(folder):
    """A firewall between the hosts begins in the midst of a job, and may end while ranks shrink: the
    error, and the global ranks that continue with this one, or the error by which it does not.
    """
    with weft.init(timeout=20) as world:
        weft.barrier()
        (folder / f"running{world.rank}").touch()
        found = error_of(lambda: weft.all_reduce(torch.ones(4), timeout=LIMIT))[0]
        (folder / f"lost{world.rank}").touch()
        heals = (folder / "heals").exists()
        try:
            with world.shrink(timeout=60 if heals else LIMIT) as left:
                return found, [*left.global_ranks], weft.all_reduce(torch.ones(1)).item()
        except weft.PeerTimeout as error:
            return found, type(error).__name__, str(error)


def full_socket(folder):
    """A host is cut off, and the next message fills the socket of its sender, but is not cut in
    two: with a buffer of UCX_TCP_SNDBUF=2k.
    """
    row = torch.ones(512)
    with weft.init(timeout=20) as world:
        for _ in range(20):  # all that precedes the row itself is sent
            weft.all_gather(row)
        (folder / f"running{world.rank}").touch()
        while not (folder / "cut").exists():
            time.sleep(0.01)
        began = time.monotonic()
        name, text, _ = error_of(lambda: weft.all_gather(row, timeout=LIMIT))
    return name, text, time.monotonic() - began


def leaves():
    """A rank that leaves its world is named by the ranks that still need it, and only that rank is
    lost.
    """
    with weft.init(timeout=20) as world:
        weft.barrier()
        leaver = world.ranks - 1
        if world.rank == leaver:
            return
        while not world.mesh.left(leaver):
            time.sleep(0.001)
        name, text, _ = error_of(weft.barrier)
        assert name == "PeerLost", text
        assert text.startswith(f"rank {leaver} (pid "), text
        assert "closed its world" in text, text


def halfway(folder):
    """The last rank is gone while long rows are under way in both directions: no thread or file is
    left on the other rank.
    """
    a, found = torch.ones(16 << 20), []  # more than the buffers of sockets hold
    weft.init(timeout=20).close()  # from now on the store is served
    registry.default = None
    for how in ("left", "raised", "died"):
        before = resources()
        with contextlib.suppress(KeyError), weft.init(timeout=20) as world:
            weft.barrier()
            if world.rank < world.ranks - 1:
                found.append(error_of(lambda: weft.all_gather(a))[:2])
            else:
                weft.all_gather_async(a, timeout=1)
                while not world.executor.peer_call(0, world.executor.calls):
                    time.sleep(0.001)
                if how == "died":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raised":
                    raise KeyError("halfway")
        registry.default = world = None
        if os.environ["RANK"] == "0":
            found.append(leaked(before))
            (folder / how).touch()
        while not (folder / how).exists():  # else rank 1 would connect to the store again
            time.sleep(0.001)
    return found


def has_a_child(world):
    """A forked child ends as programs end, while and after its parent makes calls."""
    child = os.fork()
    if not child:
        ctypes.pythonapi.Py_Exit(0)
    for size in (1, 1 << 18):
        assert torch.equal(weft.all_reduce(torch.ones(size)), torch.full((size,), 2.0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert weft.all_reduce(torch.ones(1)).item() == 2


def killed(folder):
    """A rank dies in mid-operator; all others notice it at once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the agent of the dead rank's host
    with weft.init(timeout=20) as world:
        a, b = torch.ones(256, 64), torch.ones(64, 8)
        weft.all_gather_matmul(a, b)
        if world.rank == world.ranks - 1:
            # the others are in the next call
            while not all(
                world.executor.peer_call(rank, world.executor.calls + 1)
                for rank in range(world.rank)
            ):
                time.sleep(0.001)
            (folder / "death").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        name, text, _ = error_of(lambda: weft.all_gather_matmul(a, b))
        return name, text, time.time()
