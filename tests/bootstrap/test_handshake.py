"""Both ends of a connection prove that they have its key, before anything else is sent or read; strangers
are told nothing, and take nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest

import weft
from weft.bootstrap import connector
from weft.bootstrap.connector import Outbound
from weft.bootstrap.handshake import Accepted, Caller, NotProved, Peer
from weft.bootstrap.listener import UNPROVED, Address, Listener, Unproved
from weft.membership import requests
from weft.membership.view import Ended, is_dead

KEY, OTHER = b"k" * 16, b"o" * 16
TCP = "127.0.0.1"
KINDS = pytest.mark.parametrize("host", ["", TCP], ids=["unix", "tcp"])
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@contextlib.contextmanager
def pair(host):
    """Two connected sockets that do not block, of the caller and of the listener."""
    with contextlib.closing(listener := Listener(host)):
        caller = socket.socket(listener.address.family, listener.socket.type)
        caller.connect(listener.address.at)
        accepted, _ = listener.socket.accept()
        with caller, accepted:
            caller.setblocking(False)
            accepted.setblocking(False)
            yield caller, accepted


def until(step):
    """Repeat a step, whose message may be under way, until its result is true."""
    while not step():
        pass


def arrived(connection, size=1000):
    """What arrives next."""
    select.select([connection], [], [])
    return connection.recv(size)


def connected(listener):
    """A stranger's connection to a listener."""
    stranger = socket.socket(listener.address.family, listener.socket.type)
    stranger.connect(listener.address.at)
    return stranger


@KINDS
def test_both_ends_prove_themselves(host):
    with pair(host) as (near, far):
        caller, accepted = Caller(near, KEY, b"rank"), Accepted(far, 4)
        assert not caller.advance()
        until(accepted.named)
        assert not accepted.advance(KEY)
        until(caller.advance)
        near.send(b"what follows")
        until(lambda: accepted.advance(KEY))
        assert accepted.about == b"rank"
        assert arrived(far) == b"what follows"  # nothing of it was read before


@KINDS
@pytest.mark.parametrize("wrong", ["caller", "listener"])
def test_an_end_without_the_key_learns_nothing(host, wrong):
    with pair(host) as (near, far):
        if wrong == "caller":
            Caller(near, OTHER)
            accepted = Accepted(far)
            with pytest.raises(NotProved, match="another key"):
                until(lambda: accepted.advance(KEY))
            with pytest.raises(BlockingIOError):
                near.recv(1)
            return
        caller = Caller(near, KEY, b"rank")
        said = arrived(far)
        assert len(said) == 24
        assert KEY not in said
        far.send(said[-16:] + bytes(32))
        with pytest.raises(NotProved, match="does not have the key"):
            until(caller.advance)
        with pytest.raises(BlockingIOError):  # not even who calls
            far.recv(1)


def overheard():
    """The bytes of a whole proof: those of the caller, and those of the listener."""
    with pair(TCP) as (near, middle), pair(TCP) as (relay, far):
        caller, accepted = Caller(near, KEY, b"rank"), Accepted(far, 4)
        heard = [[], []]

        def carry(at, source, target):
            data = arrived(source)
            heard[at].append(data)
            target.send(data)

        carry(0, middle, relay)
        until(accepted.named)
        accepted.advance(KEY)
        carry(1, relay, middle)
        until(caller.advance)
        carry(0, middle, relay)
        until(lambda: accepted.advance(KEY))
        return heard


def test_a_proof_that_was_overheard_proves_nothing_again():
    said, answered = overheard()
    with pair(TCP) as (near, far):
        accepted = Accepted(far, 4)
        near.send(said[0])
        until(accepted.named)
        assert not accepted.advance(KEY)
        near.send(said[1])
        with pytest.raises(NotProved, match="does not have the key"):
            until(lambda: accepted.advance(KEY))
    with pair(TCP) as (near, far):
        caller = Caller(near, KEY, b"rank")
        far.send(answered[0])
        with pytest.raises(NotProved, match="does not have the key"):
            until(caller.advance)


def test_the_ends_cannot_be_answered_with_their_own_words():
    with pair(TCP) as (near, far), pair(TCP) as (mirror, mirrored):
        caller = Caller(near, KEY)
        first = arrived(far)
        # the listener of another connection with this key answers the caller's challenge, not ours
        other = Accepted(mirrored)
        mirror.send(first[:8] + bytes(16))
        until(other.named)
        other.advance(KEY)
        far.send(arrived(mirror))
        with pytest.raises(NotProved, match="does not have the key"):
            until(caller.advance)


def test_a_slow_end_may_send_byte_by_byte():
    with pair(TCP) as (near, far), pair(TCP) as (relay, end):
        caller, accepted = Caller(near, KEY, b"rank"), Accepted(end, 4)
        while not (caller.proved and accepted.proved):
            with contextlib.suppress(BlockingIOError):
                relay.send(far.recv(1))
            accepted.advance(KEY)
            with contextlib.suppress(BlockingIOError):
                far.send(relay.recv(1))
            caller.advance()


@KINDS
def test_strangers_are_bounded_in_number_and_time(host):
    with contextlib.closing(Listener(host)) as listener, contextlib.ExitStack() as stack:
        unproved = Unproved(listener, lambda: KEY, 4)
        # a rank that has named the key stays, whoever comes
        rank = stack.enter_context(connected(listener))
        rank.setblocking(False)
        caller = Caller(rank, KEY, b"rank")
        until(lambda: not unproved.proved() and select.select([rank], [], [], 0)[0])
        strangers = [stack.enter_context(connected(listener)) for _ in range(3 * UNPROVED)]
        assert unproved.proved() == []
        assert len(unproved.polled()) == 1 + UNPROVED
        until(lambda: sum(map(closed, strangers)) == 2 * UNPROVED + 1)
        until(caller.advance)
        proved = []
        until(lambda: proved.extend(unproved.proved()) or proved)
        assert proved[0].about == b"rank"
        proved[0].connection.close()
        with mock.patch("weft.bootstrap.listener.PROVING", 0.0):
            late = stack.enter_context(connected(listener))
            unproved.proved()
        until(lambda: not unproved.proved() and closed(late))
        unproved.drop()


def closed(connection):
    """Whether the other end has closed a connection, from which nothing is to be read."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@KINDS
def test_strangers_who_send_without_end_are_not_read(host):
    with contextlib.closing(Listener(host)) as listener, connected(listener) as stranger:
        unproved = Unproved(listener, lambda: KEY, 4)
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger.send(bytes(1000))
        until(lambda: not unproved.proved() and closed(stranger))
        assert len(unproved.polled()) == 1


def test_strangers_do_not_take_the_last_files():
    with contextlib.closing(Listener()) as listener, contextlib.ExitStack() as stack:
        unproved = Unproved(listener, lambda: KEY, 0)
        stack.enter_context(connected(listener))
        unproved.proved()
        real = listener.socket

        class Exhausted:
            fileno = real.fileno

            def accept(self):
                raise OSError(errno.EMFILE, "Too many open files")

        listener.socket = Exhausted()
        assert unproved.proved() == []  # the stranger has left in its place
        assert len(unproved.polled()) == 1
        with pytest.raises(OSError, match="Too many open files"):
            unproved.proved()
        listener.socket = real


@contextlib.contextmanager
def listened_by(user, kind=socket.SOCK_SEQPACKET):
    """The name of a Unix socket at which a process of another user listens, and what it was sent once
    somebody has hung up.
    """
    name = f"\0weft-test-{os.getpid()}-{user}"
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(user)
            with socket.socket(socket.AF_UNIX, kind) as squatter:
                squatter.bind(name)
                squatter.listen()
                os.write(write, b"!")
                connection, _ = squatter.accept()
                heard = b""
                with contextlib.suppress(ConnectionError):
                    while more := connection.recv(1000):
                        heard += more
                os.write(write, len(heard).to_bytes(4, "little"))
        finally:
            os._exit(0)
    try:
        assert os.read(read, 1) == b"!"
        yield name, lambda: int.from_bytes(os.read(read, 4), "little")
    finally:
        os.close(read)
        os.close(write)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@AS_ROOT
def test_another_user_who_has_taken_a_name_is_told_nothing():
    with listened_by(54321) as (name, heard):
        outbound = Outbound(0, 1, 7, Address(name, 0, KEY))
        with pytest.raises(
            weft.WeftError, match="rank 1 runs as another user than rank 0: 54321 and 0"
        ):
            outbound.advance()
        outbound.opening.close()
        assert heard() == 0
    with listened_by(54322) as (name, heard):
        call = requests.Client(Address(name, 0, KEY))
        assert not call.advance()
        assert call.refused  # the name was free
        call.close()
        assert heard() == 0


@AS_ROOT
def test_the_user_who_has_opened_a_door_may_be_another_one_since():
    with listened_by(54323) as (name, heard):
        call = requests.Client(Address(name, 0, KEY), 54323)
        call.advance()
        assert not call.refused
        call.close()
        assert heard() == 24


@AS_ROOT
def test_another_user_is_not_let_in_with_the_key_either():
    with contextlib.closing(Listener()) as listener:
        requesters = requests.Requesters([listener])
        child = os.fork()
        if not child:
            try:
                os.setuid(54321)
                with connected(listener) as connection:
                    caller = Caller(connection, requests.key(listener.address))
                    while not caller.advance():
                        pass
                    connection.recv(1)
            finally:
                os._exit(0)
        with contextlib.closing(requesters):
            ended = 0
            while not ended:
                assert requesters.requested() == []
                assert requesters.all == []
                ended, _ = os.waitpid(child, os.WNOHANG)


def test_the_end_of_a_process_is_known_although_its_child_has_its_socket():
    read, write = os.pipe()
    name = f"\0weft-test-{os.getpid()}-child"
    process = os.fork()
    if not process:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.bind(name)
        own.listen()
        if child := os.fork():
            os.write(write, child.to_bytes(4, "little"))
        while True:
            signal.pause()
    child = int.from_bytes(os.read(read, 4), "little")
    try:
        with contextlib.closing(requests.Client(Address(name, 0, KEY))) as call:
            call.advance()
            call.answers()
            assert not call.refused
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            call.answers()
            assert call.refused
        with contextlib.closing(requests.Client(Address(name, 0, KEY))) as call:  # after the end
            call.advance()
            call.answers()
            assert call.refused
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_nothing_is_known_of_a_process_by_tcp():
    with pair(TCP) as (near, _):
        peer = Peer(near)
        assert not peer.ended
        assert peer.polled() == []
        peer.close()


def test_a_refusal_from_another_host_says_nothing_of_the_rank():
    here, there = (
        SimpleNamespace(info=SimpleNamespace(host=host)) for host in ("host 0", "host 1")
    )
    for host in TCP, "":
        with contextlib.closing(Listener(host)) as listener:
            address = listener.address
        with contextlib.closing(requests.Client(address)) as call:
            while not call.ended:
                call.advance()
            assert call.refused
    assert is_dead(Ended(refused=True), here, here)
    assert not is_dead(Ended(refused=True), there, here)
    assert not is_dead(Ended(refused=False), here, here)


@KINDS
def test_more_hang_ups_than_a_peer_may_have(host):
    """A listener that closes what it accepts, as one of another world does, is a peer that is lost."""
    with contextlib.closing(Listener(host)) as listener, ThreadPoolExecutor(1) as pool:

        def hang_up():
            listener.socket.setblocking(True)
            for _ in range(connector._HANG_UPS):
                listener.socket.accept()[0].close()

        hanging = pool.submit(hang_up)
        outbound = Outbound(0, 1, 7, Address(listener.address.host, listener.address.port, KEY))
        with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid 7\) died or gave up"):
            while True:
                outbound.advance()
        hanging.result()
        outbound.opening.close()
