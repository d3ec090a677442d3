"""Messages from rank to rank: send and receive, with tags and from any source.

`native/hosts/messages.hpp` moves and matches them, in shared memory and between hosts; here are
their errors, and the thread that moves messages for which no thread waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import weft._native as _native
from weft.errors import PeerTimeout, WeftError
from weft.process_group.collectives import as_bytes
from weft.process_group.work_queue import Progress, Work, callbacks_lock, without_frames
from weft.uncompiled import uncompiled_methods
from weft.world import World, memory

_RINGS_BYTES = 2 << 20  # of all rings of a rank, about: a bound of memory
_LEAST_RING, _LARGEST_RING = 16 << 10, 1 << 20  # bytes
_LINE = 64  # bytes
_TAGS = 1 << 31  # as of torch


@uncompiled_methods
class Message(Work):
    """A message that is sent or received; `data` is what it moves."""

    def __init__(
        self, message: _native.Message, messages: Messages, data: Tensor | None = None
    ) -> None:
        super().__init__(messages)
        self.message = message
        self.messages = messages
        self.data = data

    def is_completed(self) -> bool:
        return self.message.done

    def exception(self) -> BaseException | None:
        return self.messages.error_of(self.message)

    def source_rank(self) -> int:
        return self.message.source

    def add_callback(self, call: Callable[[], object]) -> bool:
        self.messages.check()
        with callbacks_lock:
            if not self.messages.native.watch(self.message):
                return False
            self.messages.watched.append((self.message, self))
            self.callbacks.append(call)
        return True


@uncompiled_methods
class Messages(Progress):
    """The messages of a rank of `world`; made collectively."""

    def __init__(self, world: World) -> None:
        super().__init__("weft messages", world)
        size = _RINGS_BYTES // world.ranks // _LINE * _LINE
        ring = max(_LEAST_RING, min(_LARGEST_RING, size))
        size = _native.Messages.segment_bytes(world.ranks, ring)
        segment = memory.find(world.empty(size, dtype=torch.uint8))
        assert isinstance(segment, _native.Segment)
        self.native = _native.Messages(
            world.mesh,
            segment,
            ring,
            world.pids if world.reads_memory else [0] * world.ranks,
            world.spins,
            None if world.network is None else world.network.native,
            self.deferred,
        )
        self.watched: list[tuple[_native.Message, Message]] = []

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Message:
        """Begin to send `tensor`, which must not change until the work is done."""
        return self._begun(self.native.send, as_bytes(tensor), peer, tag)

    def receive(self, tensor: Tensor, source: int | None, tag: int = 0) -> Message:
        """Begin to receive a message of at most the bytes of `tensor`, a contiguous one, from a
        peer or from any (None).
        """
        if not tensor.is_contiguous():
            raise ValueError(
                f"the tensor to receive into must be contiguous; got strides {tensor.stride()}"
            )
        return self._begun(self.native.receive, as_bytes(tensor), source, tag)

    def _begun(
        self, begin: Callable[..., _native.Message | None], data: Tensor, peer: int | None, tag: int
    ) -> Message:
        """A message of these bytes to or from a peer that `begin` begins."""
        world = self.world
        if peer is not None and (not 0 <= peer < world.ranks or peer == world.rank):
            raise ValueError(
                f"the peer of rank {world.rank} must be another rank of this group of "
                f"{world.ranks}; got rank {peer}"
            )
        if not 0 <= tag < _TAGS:
            raise ValueError(f"the tag of a message must be from 0 to 2**31 - 1; got {tag}")
        self.check()
        world.failure.check()
        message = begin(data.data_ptr(), data.numel(), peer, tag)
        if message is None:
            raise (
                self._left() if self.native.closed else world.failure.reported("to begin a message")
            )
        return Message(message, self, data)

    def work(self, message: _native.Message) -> Message:
        """A message that native code has begun."""
        return Message(message, self)

    def advance(self, work: Work, seconds: float | None) -> None:
        """Wait for a message, for `seconds`, or for the group's time limit, which ends it (None).
        Raises its error.
        """
        assert isinstance(work, Message)
        message = work.message
        self.check()
        limit = self.world.timeout if seconds is None else seconds
        try:
            status = self.native.wait(message, limit)
        except BaseException as error:
            self.interrupted(error)
            raise
        self.settle(message, status.value, seconds)

    def interrupted(self, error: BaseException) -> None:
        """End all messages: a signal handler has raised, perhaps in the middle of one."""
        self.end_all(self.world.failure.fail(error))

    def settle(self, message: _native.Message, number: int, seconds: float | None) -> None:
        """Raise the error of a message whose wait has ended with this status."""
        status = _native.WaitStatus(number)
        if not message.done:
            self.check()
            if status == _native.WaitStatus.timeout:
                self._time_out(message, seconds)
            else:
                self._end(status, message)
        if (error := self.error_of(message)) is not None:
            raise error

    def run_pending(self) -> None:
        status = self.native.advance(self.world.timeout)
        ends = _native.WaitStatus.none, _native.WaitStatus.timeout, _native.WaitStatus.refused
        if status not in ends and (message := self.native.outstanding()) is not None:
            self._end(status, message)
        self._call_back()

    def current_call(self) -> str:
        return "send or recv" if self.native.inside else ""

    def close(self) -> None:
        """End the threads; outstanding messages fail."""
        self.native.close()
        super().close()
        if not self.current_call():  # else the interrupted wait ends them
            self.end_all(self._left())

    def _left(self) -> WeftError:
        return WeftError(f"rank {self.world.rank} left the group before the message was complete")

    def error_of(self, message: _native.Message) -> BaseException | None:
        """A new instance of the error of a message, if it has failed."""
        if not message.failed:
            return None
        if message.size > message.bytes:
            return ValueError(
                f"rank {message.source} sent {message.size} bytes, but the tensor to receive into "
                f"has {message.bytes}"
            )
        return without_frames(message.error)

    def end_all(self, error: BaseException) -> None:
        """End all outstanding messages with an error."""
        self.native.fail_all(without_frames(error))
        self._call_back()

    def _call_back(self) -> None:
        """Call what waits for the ends of messages."""
        for message in self.native.ended():
            for one in [one for one in self.watched if one[0] is message]:
                self.watched.remove(one)
                one[1].end(self.error_of(message))

    def _end(self, status: _native.WaitStatus, message: _native.Message) -> None:
        """End all messages for the reason that has ended the wait for this one."""
        world, waited = self.world, f"for {self._described(message)}"
        if status == _native.WaitStatus.failed:
            error = world.failure.reported(waited)
        elif status == _native.WaitStatus.left:
            peer = message.peer
            if peer is None or not world.mesh.left(peer):
                peer = min(each for each in world.placement.others if world.mesh.left(each))
            error = world.failure.lost(peer, "closed its world", waited)
        elif status == _native.WaitStatus.unreadable:
            why = self.native.trouble
            error = world.failure.fail(
                WeftError(f"messages cannot be moved ({why}) while waiting {waited}")
            )
        else:
            error = self._left()
        self.end_all(error)

    def _time_out(self, message: _native.Message, seconds: float | None) -> None:
        """Raise `PeerTimeout`. The group's time limit ends the message; if that was moved in part,
        the world.
        """
        if seconds is not None:
            raise PeerTimeout(f"the operation is not done, and timed out after {seconds:g} s")
        limit = self.world.timeout
        error = PeerTimeout(
            f"rank {self.world.rank} waited {limit:g} s for {self._described(message)}; check "
            "that the peer makes the call with this tag, or give the group a longer timeout"
            f"{self.world.failure.also_timed_out(limit)}"
        )
        if not self.native.fail(message, error) and not message.done:
            self.end_all(self.world.failure.fail(error))

    def _described(self, message: _native.Message) -> str:
        """A phrase for the event that a message waits for."""
        if message.sending:
            return f"rank {message.peer} to take a message (tag {message.tag})"
        source = "any rank" if message.peer is None else f"rank {message.peer}"
        return f"a message from {source} (tag {message.tag})"
