"""A rank that dies, leaves or lacks a resource during the creation of a world or its workspace is
named by the errors of all.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import resource
import socket
import time
from unittest import mock

import pytest
import torch
from support.ranks import another_world, die, start, store_of_all

import weft
import weft._native as _native
from weft.world import init_by_store


@contextlib.contextmanager
def at(step, then, calls=1):
    """Call `then` in place of a function's call number `calls` on this rank."""
    kept, seen = pkgutil.resolve_name(step), []

    def replacement(*arguments, **named):
        seen.append(step)
        return then() if len(seen) == calls else kept(*arguments, **named)

    with mock.patch(step, replacement):
        yield


def lacks():
    raise OSError(12, "Cannot allocate memory")


def grows(world, how, step, calls):
    """Rank 1 ends at a step of growing the workspace."""
    weft.all_gather_matmul(torch.ones(2, 4), torch.eye(4), algorithm="push")
    rows = torch.ones(50_000, 4)
    if world.rank != 1:
        weft.all_gather_matmul(rows, torch.eye(4), algorithm="push")
        return
    end = {"dies": die, "leaves": lambda: (world.close(), os._exit(0)), "lacks": lacks}[how]
    with at(step, end, calls):
        weft.all_gather_matmul(rows, torch.eye(4), algorithm="push")


@pytest.mark.parametrize(
    ("how", "step", "calls", "words"),
    [
        ("dies", "weft.world.notes.Notes.send", 2, "died while rank"),
        ("leaves", "weft.world.notes.Notes.send", 2, "closed its world while rank"),
        ("dies", "weft.world.notes.Notes.receive", 1, "died while rank"),
        ("leaves", "weft._native.attach_mapping", 1, "closed its world while rank"),
        ("lacks", "weft._native.attach_mapping", 2, "failed with SymmetricMemoryError: empty("),
    ],
)
def test_a_peer_that_is_lost_while_the_workspace_grows(how, step, calls, words):
    outcomes = start(grows, 3, how, step, calls)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, weft.PeerLost), outcome
        assert str(outcome.error).startswith("rank 1 (pid "), outcome.error
        assert words in str(outcome.error)
    if how == "lacks":
        assert isinstance(outcomes[1].error, weft.SymmetricMemoryError), outcomes[1].trace
        assert "rank 1 cannot map the part of rank 2: [Errno 12]" in str(outcomes[1].error)


def sends_to_the_dead(world):
    weft.barrier()
    if world.rank == 1:
        die()
    while not world.mesh.failure()[0]:
        time.sleep(0.001)
    world.empty(3)


def test_a_control_message_to_a_dead_peer_raises_the_loss():
    first, _ = start(sends_to_the_dead, 2)
    assert isinstance(first.error, weft.PeerLost), first.trace
    assert "died while rank 0 waited for empty((3,), float32) (call 2)" in str(first.error)


@pytest.mark.parametrize(
    ("last", "left", "kind"), [(b"f", True, ""), (b"aKeyError\n1\ngone", False, "KeyError")]
)
def test_the_last_message_of_a_peer_with_unread_messages_counts(last, left, kind):
    """The kernel resets such a connection, and reports that before the data that was sent."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mesh = _native.Mesh([-1, own.detach()])
    mesh.send(1, "unread", None)
    theirs.send(last)
    theirs.close()
    while not (mesh.left(1) or mesh.failure()[0]):
        time.sleep(0.001)
    assert (mesh.left(1), mesh.failure()[0]) == (left, kind)


def joins(world, how, step):
    """Rank 1 ends at a step of making a second world."""
    ends = {"dies": die, "lacks": lacks}[how]
    with (
        at(step, ends) if world.rank == 1 else contextlib.nullcontext(),
        another_world(world),
    ):
        weft.barrier()


@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("dies", "weft.world.connect.connect"),
        ("dies", "weft.bootstrap.connector.Outbound.advance"),
        ("dies", "weft.bootstrap.connector.Connector._identify"),
        ("dies", "weft.world.connect.Connections"),
        ("dies", "weft._native.create_mapping"),
        ("dies", "weft.world.notes.Notes.send"),
        ("dies", "weft._native.attach_mapping"),
        ("lacks", "weft.bootstrap.connector.Outbound.advance"),
        ("lacks", "weft._native.create_mapping"),
        ("lacks", "weft._native.attach_mapping"),
    ],
)
def test_a_peer_that_is_lost_while_a_world_is_made(how, step):
    outcomes = start(joins, 3, how, step)
    assert (how == "dies") == (outcomes[1] is None), outcomes[1]
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, weft.PeerLost), outcome
        assert re.match(r"rank [012] ", str(outcome.error)), outcome.error
    if how == "lacks" and "mapping" in step:
        assert isinstance(outcomes[1].error, weft.SymmetricMemoryError), outcomes[1].trace


def absent(world, how):
    """Rank 1 makes no world, or dies before it has told its address."""
    store, waited = store_of_all(), store_of_all()
    if world.rank != 1:
        try:
            init_by_store(store, world.rank, world.ranks, 2.0)
        finally:
            waited.set(f"{world.rank}", "")
            if world.rank == 0:  # it has the store
                waited.wait(["2"])
    elif how == "late":
        waited.wait(["0", "2"])
    else:
        with at("weft.bootstrap.rendezvous.StoreRendezvous.exchange", die):
            init_by_store(store, world.rank, world.ranks, 2.0)


@pytest.mark.parametrize("how", ["late", "dies"])
def test_a_rank_that_tells_no_address_is_named_in_time(how):
    outcomes = start(absent, 3, how)
    assert (outcomes[1] is None) == (how == "dies")
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, weft.PeerTimeout), outcome
        assert "waited 2 s for the address of rank 1 " in str(outcome.error)


def few_files(world, spare):
    """A rank that can open no, or only one, more file."""
    weft.barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if world.rank == 1:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, limits[1]))
    weft.barrier()  # no file of a peer arrives before the barrier
    try:
        world.empty(1000)
    except weft.SymmetricMemoryError as error:
        if spare:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        weft.barrier()
        return str(error)
    weft.barrier()
    return None


def test_a_rank_that_has_too_many_files_open():
    for outcome in start(few_files, 2, 0):
        assert outcome.error is None, outcome.trace
        assert "rank 1: [Errno 24] Too many open files" in outcome.result
    first, second = start(few_files, 2, 1)
    # its peer's file arrives before its own is made, which is one too many then, or after
    emfile = r"\[Errno 24\] (memfd_create: )?Too many open files"
    assert isinstance(second.error, weft.SymmetricMemoryError), second.trace
    assert re.search(rf"rank 1(:| cannot map the part of rank 0:) {emfile}", str(second.error)), (
        second.error
    )
    assert isinstance(first.error, weft.PeerLost | weft.SymmetricMemoryError), first.trace
    assert re.search(emfile, str(first.error)), first.error


def verbose(world):
    weft.barrier()
    if world.rank:
        raise KeyError("€" * 20000 + "\udc80")
    weft.barrier()


def test_errors_may_have_any_text():
    first, _ = start(verbose, 2)
    assert isinstance(first.error, weft.PeerLost), first.trace
    assert "failed with KeyError: '€€€" in str(first.error)
