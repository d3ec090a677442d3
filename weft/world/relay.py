"""What a rank has with ranks on other hosts: process groups of its own, and what goes over them beside the rows.

To the rest of weft a peer on another host has a Unix socket as any peer has: its other end is held here, and what is written to it
is carried to the peer's relay, which writes it to a socket there. So notes, bad news, farewells and deaths have one way on one host
and on many.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft import _native
from weft.errors import PeerTimeout, WeftError
from weft.world.rendezvous import Meeting

CONTROL = 0  # the tag of frames; rows have the others
_NOTHING = 0x7FFFFFFF  # a tag under which nothing is ever sent
_FRAME = 512  # bytes
_PAYLOAD = _FRAME - 3
_LONGEST = 16385  # of a message on the Unix sockets
_ACKNOWLEDGED = b"k"  # tells a peer that it may hang up
_HEADER = struct.Struct("<cQQ")
_NOTICED = 0.5  # seconds within which all threads have seen that a connection is closed
_LINGER = 0.5  # seconds in which peers acknowledge a farewell or bad news
FOREVER = timedelta(days=30)  # no limit here: the operator's own timeout closes the connection, which ends the wait
_POSTED = 64  # frames that may be on their way to a peer


class Relay:
    """The connections of this rank to `peers`, the ranks on other hosts of those that meet by `meeting`; made collectively.

    `timeout` is the seconds that making the connections may take.
    """

    def __init__(self, meeting: Meeting, peers: Sequence[int], timeout: float) -> None:
        rank = meeting.rank
        # One for each direction. On one connection for both, gloo's thread finds what has come while another thread writes, and,
        # unable to take it, asks again and again until that one is done: on a shared core as long as a time slice.
        try:
            with _patient_threads():
                self.groups = [meeting.connected(way, timeout) for way in ("down", "up")]
        except WeftError:
            raise
        except RuntimeError as error:  # which rank it was that did not come, torch does not say
            raise PeerTimeout(f"rank {rank} cannot reach all of the ranks {[*peers]} on other hosts: {error}") from error
        self.rank, self.peers = rank, list(peers)
        self.ends: dict[int, socket.socket] = {}
        self.locks = {peer: threading.Lock() for peer in peers}  # a message's frames go together
        self.over = {peer: threading.Event() for peer in peers}  # the peer has all that it will get from here
        self.posted: deque[object] = deque(maxlen=_POSTED * max(1, len(peers)))  # frames, kept until they are surely sent
        self.workers: dict[Hashable, _Worker] = {}
        self.called = dict.fromkeys(peers, 0)  # the last call that a peer has announced
        self.threads: list[threading.Thread] = []
        self.closing = threading.Lock()
        self.closed = False

    def sockets(self) -> dict[int, int]:
        """A socket for each peer, for the world's mesh to own."""
        near = {}
        for peer in self.peers:
            one, self.ends[peer] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            near[peer] = one.detach()
        return near

    def start(self, native: _native.Executor, fail: Callable[[BaseException], object]) -> None:
        """Begin to carry messages, and to tell the native core what peers say they call; `fail` closes the world."""
        self.fail = fail
        self.native = native  # which lives until the world is closed, at the latest when the interpreter ends
        for peer in self.peers:
            self._run(self._listen, peer)
            self._run(self._speak, peer)

    def announce(self, call: int, digest: int, text: str) -> None:
        """Tell all peers what this rank calls, so that one that calls something else can show both."""
        header = _HEADER.pack(b"h", call, digest) + text.encode()[: _PAYLOAD - _HEADER.size]
        with contextlib.suppress(RuntimeError):  # a closed connection is noticed by who listens
            for peer in self.peers:
                self._post(peer, header)

    def send(self, rows: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send contiguous rows; those of one tag arrive in order."""
        return self.groups[self.rank < peer].send([rows], peer, tag)

    def receive(self, rows: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive what `peer` sends under this tag, in as many bytes."""
        return self.groups[peer < self.rank].recv([rows], peer, tag)

    @contextlib.contextmanager
    def hung_up(self, peer: int) -> Iterator[None]:
        """Take no notice of an error of a connection that `peer`, or this rank, has ended; any other closes the world."""
        try:
            yield
        except Exception as error:
            ended = isinstance(error, RuntimeError) and (self.closed or self.over[peer].wait(_NOTICED))
            if not (ended or self.closed):
                self.fail(error)

    def work(self, key: Hashable, call: int, job: Callable[[], None]) -> None:
        """Do `job` of a call on the thread of this key, after its earlier ones. Keys of jobs that receive are (the sender, …)."""
        worker = self.workers.get(key)
        if worker is None:
            worker = self.workers[key] = _Worker()
            self._run(worker.run)
        worker.add(call, job)
        if self.closed:
            worker.add(0, None)

    def close(self) -> None:
        """Hang up, once peers have acknowledged the farewell or the bad news that the world has sent, or it has waited long."""
        with self.closing:
            if self.closed:
                return
            self.closed = True
        deadline = time.monotonic() + _LINGER
        for over in self.over.values():
            over.wait(max(0.0, deadline - time.monotonic()))
        for group, peer in itertools.product(self.groups, self.peers):  # a receive that times out closes its group's connections
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NOTHING).wait(timedelta(milliseconds=1))
        for end in self.ends.values():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for worker in [*self.workers.values()]:
            worker.add(0, None)
        for thread in [*self.threads]:
            if thread is not threading.current_thread():
                thread.join(_LINGER)
        for end in self.ends.values():
            end.close()

    def _run(self, target: Callable[..., None], *args: object) -> None:
        self.threads.append(threading.Thread(target=target, args=args, daemon=True))
        with _patient_threads():
            self.threads[-1].start()

    def _post(self, peer: int, message: bytes) -> None:
        """Send a message in frames, which are under way when this returns.

        Nobody waits until they are sent: when the peer hangs up gloo ends what waits to be received, but not what waits to be sent.
        """
        with self.locks[peer]:
            for start in range(0, len(message), _PAYLOAD):
                part = message[start : start + _PAYLOAD]
                frame = torch.zeros(_FRAME, dtype=torch.uint8)
                head = struct.pack("<H?", len(part), start + _PAYLOAD < len(message))
                frame[: 3 + len(part)] = torch.frombuffer(bytearray(head + part), dtype=torch.uint8)
                self.posted.append((self.send(frame, peer, CONTROL), frame))

    def _speak(self, peer: int) -> None:
        """Carry what the world writes for `peer`."""
        with contextlib.suppress(RuntimeError, OSError):
            while message := self.ends[peer].recv(_LONGEST):  # without the files that come with notes, which stay on this host
                self._post(peer, message)
            if not (self.closed or self.over[peer].is_set()):  # not the peer: the world is gone, without a word
                for over in self.over.values():
                    over.set()
                self.close()

    def _listen(self, peer: int) -> None:
        """Carry what comes from `peer`, until it hangs up or its host is lost."""
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        message = farewell = b""
        with contextlib.suppress(RuntimeError, OSError):
            while True:
                self.receive(frame, peer, CONTROL).wait(FOREVER)
                got = frame.numpy().tobytes()
                length, more = struct.unpack_from("<H?", got)
                message += got[3 : 3 + length]
                if not more:
                    farewell = self._handle(peer, message)
                    message = b""
        self.over[peer].set()
        with contextlib.suppress(OSError):
            if farewell:  # told only now: a peer hangs up when every rank of this host has what it sent, to whomever it counts
                self.ends[peer].send(farewell)
            self.ends[peer].shutdown(socket.SHUT_RDWR)

    def _handle(self, peer: int, message: bytes) -> bytes:
        """Take a message; returns it if it is a farewell."""
        kind = message[:1]
        if kind == b"h":
            _, call, digest = _HEADER.unpack_from(message)
            self.called[peer] = call
            self.native.note_call(peer, call, digest, message[_HEADER.size :].decode(errors="replace"))
        elif kind == _ACKNOWLEDGED:
            self.over[peer].set()
        elif kind == b"f":
            deadline = time.monotonic() + _LINGER
            for key, worker in [*self.workers.items()]:
                if isinstance(key, tuple) and key[0] == peer:
                    worker.finish(self.called[peer], deadline)
            self._post(peer, _ACKNOWLEDGED)
            return message
        else:
            self.ends[peer].send(message)
            if kind == b"a":
                self._post(peer, _ACKNOWLEDGED)
        return b""


class _Worker:
    """The jobs of one thread, in the order of their calls."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[int, Callable[[], None] | None]] = deque()  # the first may be under way
        self.changed = threading.Condition()

    def add(self, call: int, job: Callable[[], None] | None) -> None:
        """Queue a job of a call; None ends the thread."""
        with self.changed:
            self.jobs.append((call, job))
            self.changed.notify_all()

    def run(self) -> None:
        while True:
            with self.changed:
                while not self.jobs:
                    self.changed.wait()
                _, job = self.jobs[0]
            if job is None:
                return
            job()
            with self.changed:
                self.jobs.popleft()
                self.changed.notify_all()

    def finish(self, call: int, deadline: float) -> None:
        """Wait until the jobs of all calls up to `call` are done, or for the deadline."""
        with self.changed:
            while self.jobs and self.jobs[0][0] <= call and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)


@contextlib.contextmanager
def _patient_threads() -> Iterator[None]:
    """Threads that are started meanwhile, gloo's too, do not interrupt others that compute: where all cores are busy they wait for
    their turn, some milliseconds, and then take all that has come. Packet by packet they slowed a product by half as much again.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:  # whoever chose another policy knows better
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # which threads inherit
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
