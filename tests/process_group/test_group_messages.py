"""Send and receive of torch.distributed on weft: tags, any source, batches, both directions at
once, and missing partners.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks

import weft
from weft.process_group.worlds import operations_of

LONG = 1 << 20  # numbers: more than all slots of a mailbox hold


def data(call, count=LONG):
    return torch.randn(count, generator=torch.Generator().manual_seed(call))


def any_order(world):
    """Messages are found by their tags, in any order; messages of equal tags arrive in the order of
    sending.
    """
    sizes = {0: LONG, 1: 3, 2: 0, 3: LONG // 2}
    if dist.get_rank() == 0:
        works = [dist.isend(data(tag, size), 1, tag=tag) for tag, size in sizes.items()]
        works += [dist.isend(data(10 + number, 5), 1, tag=9) for number in range(20)]
        for work in works:
            work.wait()
    else:
        for tag in (3, 2, 0, 1):
            place = torch.full((sizes[tag],), 7.0)
            assert dist.recv(place, 0, tag=tag) == 0
            assert torch.equal(place, data(tag, sizes[tag]))
        for number in range(20):
            place = torch.full((5,), 7.0)
            dist.recv(place, 0, tag=9)
            assert torch.equal(place, data(10 + number, 5))


@pytest.mark.data
def test_messages_are_found_by_their_tags():
    on_ranks(any_order, 2, context=group)


def both_directions(world):
    """Long messages in both directions, in a batch and from two threads, during other calls."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    place = torch.zeros(LONG)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, data(rank), after), dist.P2POp(dist.irecv, place, before)]
    )
    x = torch.ones(3)
    dist.all_reduce(x)  # no thread waits for the messages, and they move
    for work in works:
        work.wait()
    assert torch.equal(place, data(before))
    assert works[1].get_future().wait()[0] is place

    got = torch.zeros(LONG)
    thread = threading.Thread(target=lambda: dist.recv(got, before, tag=5))
    thread.start()
    dist.send(data(100 + rank), after, tag=5)
    thread.join()
    assert torch.equal(got, data(100 + before))

    if rank == 0:  # from any source
        found = {}
        for _ in range(ranks - 1):
            place = torch.zeros(4)
            found[dist.recv(place, tag=6)] = place
        assert {peer: place.tolist() for peer, place in found.items()} == {
            peer: [float(peer)] * 4 for peer in range(1, ranks)
        }
    else:
        dist.send(torch.full((4,), float(rank)), 0, tag=6)
    inner = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        message = torch.full((2,), float(rank))
        if rank:
            dist.send(message, 0, group=inner)
        else:
            assert dist.recv(message, None, group=inner) == ranks - 1
            assert message.tolist() == [ranks - 1.0] * 2


@pytest.mark.data
def test_long_messages_in_both_directions():
    on_ranks(both_directions, 3, context=group)


def partly_received(world):
    """A message that was partly received during the wait for another one is received completely,
    although no receive of it is posted yet.
    """
    rank, large = dist.get_rank(), torch.full((1 << 22,), 3.0)
    if rank == 0:
        place = torch.zeros(1)
        assert dist.recv(place, tag=1) == 2
        dist.barrier()
        dist.recv(large.zero_(), 1, tag=9)
        assert large.eq(3).all()
    elif rank == 1:
        work = dist.isend(large, 0, tag=9)
        dist.send(torch.ones(1), 2)  # a part of the large message is in the mailbox by now
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        dist.barrier()
    else:
        dist.recv(torch.zeros(1), 1)
        dist.send(torch.ones(1), 0, tag=1)
        dist.barrier()


@contextlib.contextmanager
def group_of_unreadable_ranks():
    """A group whose long messages pass the rings, as where the kernel forbids to read peers."""
    os.environ["WEFT_READ_PEERS"] = "0"
    with group() as made:
        yield made


def test_partly_received_messages_are_completed():
    on_ranks(partly_received, 3, context=group_of_unreadable_ranks)


def unanswered(world):
    place = torch.zeros(3)
    if dist.get_rank() == 0:
        work = dist.irecv(place, 1)
        with pytest.raises(weft.PeerTimeout, match=r"not done, and timed out after 0.05 s"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        dist.barrier()
        work.wait()
        assert place.tolist() == [1.0] * 3
        with pytest.raises(
            ValueError, match="sent 20 bytes, but the tensor to receive into has 12"
        ):
            dist.recv(place, 1, tag=2)
        with pytest.raises(ValueError, match="must be contiguous"):
            dist.irecv(torch.zeros(3, 3).t()[1:], 1)
    else:
        dist.barrier()
        dist.send(torch.ones(3), 0)
        dist.send(torch.ones(5), 0, tag=2)
    dist.barrier()  # the group stays usable


def test_failed_messages_leave_the_group_usable():
    on_ranks(unanswered, 2, context=group)


def fair(world):
    """A receive from any source alternates between the peers, whether their messages are in
    mailboxes or already copied out.
    """
    if dist.get_rank() == 0:
        dist.barrier()  # all messages are sent
        first = [dist.recv(torch.zeros(1)) for _ in range(4)]
        works = [dist.irecv(torch.zeros(1)) for _ in range(4)]
        second = [work.source_rank() for work in works if work.wait()]
        assert [sorted(first[:2]), sorted(first[2:]), sorted(second[:2]), sorted(second[2:])] == [
            [1, 2]
        ] * 4
    else:
        for work in [dist.isend(torch.ones(1), 0) for _ in range(4)]:
            work.wait()
        dist.barrier()


def test_any_source_is_fair():
    on_ranks(fair, 3, context=group)


def late(world):
    """The error of a message that times out, as sender or receiver, names the message."""
    if dist.get_rank() == 0:
        group = dist.new_group(timeout=timedelta(seconds=0.2))
        for source, words in ((1, "rank 1"), (None, "any rank")):
            with pytest.raises(
                weft.PeerTimeout,
                match=rf"rank 0 waited 0.2 s for a message from {words} \(tag 3\); .*longer",
            ):
                dist.recv(torch.zeros(3), source, tag=3, group=group)
        with pytest.raises(
            weft.PeerTimeout, match=r"rank 0 waited 0.2 s for rank 1 to take a message \(tag 2\)"
        ):
            dist.send(torch.zeros(LONG), 1, tag=2, group=group)
    else:
        dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier()


def test_a_late_message_is_named():
    on_ranks(late, 2, context=group)


@contextlib.contextmanager
def world_of_group():
    with group() as made:
        yield operations_of(made).world


def leaves_after_it_sent(world, fails):
    """A message that was sent by a rank before it left arrives, also if the world has failed since;
    missing sends and receives of that rank end the waits of its peers.
    """
    if world.rank == 1:
        dist.send(torch.full((3,), 7.0), 2)
    elif world.rank == 2:
        while not (world.mesh.left(1) and bool(world.mesh.failure()[0]) == fails):
            time.sleep(0.001)
        dist.recv(x := torch.zeros(3), 1)
        assert x.tolist() == [7.0] * 3
        with pytest.raises(
            weft.PeerLost,
            match=r"rank 1 .* closed its world while rank 2 waited for a message from rank 1 \(tag 0\)",
        ):
            dist.recv(x, 1)
    elif fails:
        with pytest.raises(weft.PeerLost, match=r"rank (1|2) "):
            dist.send(torch.zeros(1 << 22), 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_peer_that_leaves_is_not_waited_for(fails):
    on_ranks(leaves_after_it_sent, 3, fails, context=world_of_group)


def leaves_during_progress(world):
    """The loss of a peer ends a receive that the progress thread moves, whether a thread waits for
    it or all peers have left, and names the message.
    """
    if world.rank == 0:
        work = dist.irecv(torch.zeros(3), 1, tag=3)
        while not world.mesh.left(1):
            time.sleep(0.001)
        start = time.monotonic()
        while world.ranks == 2 and not work.is_completed():
            assert time.monotonic() < start + 10
        with pytest.raises(
            weft.PeerLost,
            match=r"rank 1 .* closed its world while rank 0 waited for a message from rank 1 \(tag 3\)",
        ):
            work.wait()
        assert time.monotonic() < start + 10
    elif world.rank == 2:
        while not world.mesh.failure()[0]:
            time.sleep(0.001)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_peer_that_leaves_ends_the_progress_of_its_messages(ranks):
    on_ranks(leaves_during_progress, ranks, context=world_of_group)
