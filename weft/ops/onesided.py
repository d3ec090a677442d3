"""One-sided calls: data and signals to or from a peer that does not take part.

The order that they guarantee, with an example for each pattern, is in docs/memory-model.md. In
short:

- A `put` or `get` is complete when it returns; a `put_async` or `get_async` once its `Transfer`
  is done.
- A notify publishes: a thread that sees it (`wait`, `test`, or a read of the counter) sees all that
  the notifying thread had put before.
- Nothing else is ordered. In particular a put does not notify the peer, and a notify does not wait
  for asynchronous transfers.

A peer on another host takes no part either: its process answers a put or get, which is complete
when it returns. One without an answer in the world's time limit raises `PeerTimeout`, and closes
the world. A notify, alone or after a put, may still be in flight when it returns; other ranks are
notified only of what has arrived.

One-sided calls are thread-safe and run concurrently. All of them raise `WeftError` if the world is
closed and `PeerLost` if a peer has died or failed, which closes the world; bad arguments are
`ValueError` or `TypeError`, raised before anything is moved.

On a GPU all calls but `test` return at once: they take the tensors of a GPU and are put on the
caller's current stream, in whose order they are complete, publish and wait; asynchronous transfers
are put on a separate stream, after the work on the current one. A wait that timed out, and a peer
that failed meanwhile, are raised by the next call (one-sided or collective), and close the world,
since later work of the stream has run without the data. `algorithm` selects how a GPU copies:
``copy-engine`` (of contiguous tensors, by torch's copy), ``kernel`` (of rows with any strides, on
`comm_sms` SMs, 16 by default), or ``auto``: the copy engine, and torch's own kernel for tensors
that are not contiguous. On a CPU the caller's thread copies, so both are rejected there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

import weft._native as _native
from weft.checks import check_rank, check_tensor, integer, name
from weft.errors import PeerTimeout, WeftError
from weft.ops import between_hosts
from weft.ops.between_hosts import RemoteChange
from weft.ops.signalling import notification, on_streams, seconds_of
from weft.uncompiled import untraced
from weft.world import World, by_number, check_world, memory
from weft.world.signals import Signals

if TYPE_CHECKING:
    from weft.gpu.lanes import Completion

ALGORITHMS = ("auto", "copy-engine", "kernel")


class _Copy(NamedTuple):
    """A description of a copy, formatted only for errors."""

    put: bool
    peer: int
    size: int  # bytes

    def __str__(self) -> str:
        name, direction = ("put", "to") if self.put else ("get", "from")
        return f"{name} of {self.size:,} bytes {direction} rank {self.peer}"


Copy = _native.StridedCopy | _native.RemoteCopy | Callable[[], object]
"""A checked copy: a native one, one to or from another host, or one to be put on a stream."""


class Transfer:
    """An asynchronous put or get; made by `put_async` and `get_async`.

    Transfers run on a background thread of the world, one after the other in the order of the
    calls, so a later one to the same peer sees the data of an earlier one, and ends after it.
    Dropping a transfer does not end it, and its tensors live until it is done. `World.close`
    completes outstanding transfers.

    Examples:
        >>> def rotate():
        ...     world = weft.init()
        ...     part, own = world.empty(2), torch.full((2,), float(world.rank))
        ...     weft.put_async(part, own, (world.rank + 1) % world.ranks).wait()
        ...     weft.barrier()
        ...     return part.tolist()
        >>> with weft.local_world(2) as local:
        ...     local.run(rotate)
        [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, world: World, number: int, copy: object) -> None:
        self._world, self._number, self._copy = world, number, copy

    def done(self) -> bool:
        """Whether the transfer is done, so that its source and destination may be used."""
        return self._world.transfers.done(self._number)

    def wait(self, timeout: float | None = None) -> None:
        """Return once the transfer is complete: a put's data is at the peer, a get's is here, and
        its source may be used again.

        `timeout` is in seconds, the world's by default. Raises `PeerTimeout` after that, without
        effect on transfer and world, so the caller may wait again; and `PeerLost` if a peer had
        failed before the transfer started, so that nothing was moved.
        """
        self._world.failure.check_process()
        seconds = seconds_of(timeout, self._world)
        if not self._world.transfers.wait(self._number, seconds):
            raise PeerTimeout(
                f"rank {self._world.rank} waited {seconds:g} s for its {self._copy}; it is not done"
            )
        if self._world.transfers.refused(self._number):
            raise self._world.failure.reported(f"for its {self._copy}")

    def __repr__(self) -> str:
        return f"Transfer({self._copy}, {'done' if self.done() else 'under way'})"


class QueuedTransfer(Transfer):
    """A transfer of a world on several hosts: the network's thread for transfers makes it."""

    def __init__(self, world: World, made: Future[None], copy: object) -> None:
        self._world, self._made, self._copy = world, made, copy

    def done(self) -> bool:
        return self._made.done()

    def wait(self, timeout: float | None = None) -> None:
        self._world.failure.check_process()
        seconds = seconds_of(timeout, self._world)
        try:
            self._made.result(seconds)
        except TimeoutError:
            raise PeerTimeout(
                f"rank {self._world.rank} waited {seconds:g} s for its {self._copy}; it is not done"
            ) from None
        except WeftError:
            self._world.failure.unreported = False
            raise


class StreamTransfer(Transfer):
    """A transfer on a stream: its `wait` makes the caller's current stream wait, and returns at
    once.
    """

    def __init__(self, world: World, completion: Completion, copy: object) -> None:
        self._world, self._completion, self._copy = world, completion, copy

    def done(self) -> bool:
        return self._completion.done()

    def wait(self, timeout: float | None = None) -> None:
        self._world.failure.check_process()
        seconds = seconds_of(timeout, self._world)
        if not self._completion.join(seconds):
            raise PeerTimeout(
                f"rank {self._world.rank} waited {seconds:g} s for its {self._copy}; it is not done"
            )


@untraced
def put(
    dst: Tensor,
    src: Tensor,
    peer: int,
    *,
    algorithm: str = "auto",
    comm_sms: int | None = None,
    world: World | None = None,
) -> None:
    """Copy `src` to `peer`'s counterpart of `dst`; when it returns `src` may be used again and the
    data is in the peer's memory.

    `dst` is this rank's part of a symmetric tensor or any view of it; the same view of the peer's
    part is written, this rank's is not touched. `src` is any tensor of that dtype and shape on that
    device. Both may have any strides, dimension and alignment, and no elements; `dst` must not hold
    an element twice, as an expanded tensor does, nor may its dimensions interleave. Both are plain:
    `torch.Tensor` or `torch.nn.Parameter` itself, strided, no conjugate or negative view. `peer`
    may be this rank itself. If `src` and the target overlap, all is read before anything is
    written. Autograd does not record it.

    The peer is not notified: use `notify` or `put_notify`. The world is the tensor's own; `world`,
    if given, is checked against it. `algorithm` (``auto``, ``copy-engine``, ``kernel``) and
    `comm_sms`, the SMs of a kernel, are for GPUs.

    Raises `ValueError` (not symmetric, of another world, invalid peer, shapes or devices differ,
    not plain, an algorithm that cannot copy this), `TypeError` (dtypes differ, a subclass),
    `PeerLost`.

    Examples:
        >>> def rank_0_writes_to_rank_1():
        ...     world = weft.init()
        ...     part = world.empty(2).zero_()
        ...     weft.barrier()  # all parts are zero
        ...     if world.rank == 0:
        ...         weft.put(part, torch.tensor([1.0, 2.0]), peer=1)
        ...     weft.barrier()  # the put is visible
        ...     return part.tolist()
        >>> with weft.local_world(2) as local:
        ...     local.run(rank_0_writes_to_rank_1)
        [[0.0, 0.0], [1.0, 2.0]]
    """
    _copy(dst, src, peer, world, True, algorithm, comm_sms)


@untraced
def get(
    dst: Tensor,
    src: Tensor,
    peer: int,
    *,
    algorithm: str = "auto",
    comm_sms: int | None = None,
    world: World | None = None,
) -> None:
    """Copy `peer`'s counterpart of `src` to `dst`; when it returns the data is in `dst`.

    `src` is this rank's part of a symmetric tensor or any view of it, `dst` any tensor of that
    dtype, shape and device; all else, and errors, are as in `put`. The data is defined only if the
    peer has notified this rank that it is written, and does not write it meanwhile.

    Examples:
        >>> def read_the_peer():
        ...     world = weft.init()
        ...     part, out = world.empty(2).fill_(world.rank), torch.empty(2)
        ...     weft.barrier()  # all parts are written
        ...     weft.get(out, part, peer=1 - world.rank)
        ...     weft.barrier()  # nobody reads any more
        ...     return out.tolist()
        >>> with weft.local_world(2) as local:
        ...     local.run(read_the_peer)
        [[1.0, 1.0], [0.0, 0.0]]
    """
    _copy(src, dst, peer, world, False, algorithm, comm_sms)


@untraced
def put_async(
    dst: Tensor,
    src: Tensor,
    peer: int,
    *,
    algorithm: str = "auto",
    comm_sms: int | None = None,
    world: World | None = None,
) -> Transfer:
    """Begin a `put`, with its arguments and errors, and return at once; `src` must not change until
    the `Transfer` is done.

    A world on a CPU has at most 1024 outstanding transfers; with more, this call blocks until one
    ends. On a GPU the transfer follows the work that is on the current stream now, and its `wait`
    orders it before later work of the stream that is current then.

    Examples:
        >>> def exchange():
        ...     world = weft.init()
        ...     part = world.empty(2)
        ...     transfer = weft.put_async(part, torch.full((2,), float(world.rank)), 1 - world.rank)
        ...     transfer.wait()  # the source may change, and a notify would publish the rows
        ...     weft.barrier()
        ...     return part.tolist()
        >>> with weft.local_world(2) as local:
        ...     local.run(exchange)
        [[1.0, 1.0], [0.0, 0.0]]
    """
    return _begin(dst, src, peer, world, True, algorithm, comm_sms)


@untraced
def get_async(
    dst: Tensor,
    src: Tensor,
    peer: int,
    *,
    algorithm: str = "auto",
    comm_sms: int | None = None,
    world: World | None = None,
) -> Transfer:
    """Begin a `get` as `put_async` begins a put; `dst` is undefined until the returned `Transfer`
    is done.

    Examples:
        >>> def read_the_peer():
        ...     world = weft.init()
        ...     part, out = world.empty(2).fill_(world.rank), torch.empty(2)
        ...     weft.barrier()  # all parts are written
        ...     weft.get_async(out, part, peer=1 - world.rank).wait()
        ...     weft.barrier()  # nobody reads any more
        ...     return out.tolist()
        >>> with weft.local_world(2) as local:
        ...     local.run(read_the_peer)
        [[1.0, 1.0], [0.0, 0.0]]
    """
    return _begin(src, dst, peer, world, False, algorithm, comm_sms)


@untraced
def put_notify(
    dst: Tensor,
    src: Tensor,
    signals: Signals,
    index: int | slice,
    peer: int,
    op: str = "add",
    value: int = 1,
    *,
    algorithm: str = "auto",
    comm_sms: int | None = None,
) -> None:
    """`put`, then `notify` the same peer: a thread that sees the counter sees the data. Arguments
    are checked before anything is moved. When it returns `src` may be used again; to a peer on
    another host data and counter may still be in flight.

    Examples:
        >>> def send_right():
        ...     world = weft.init()
        ...     part, arrived = world.empty(2), world.signals(1)
        ...     own = torch.full((2,), float(world.rank))
        ...     weft.put_notify(part, own, arrived, 0, peer=1 - world.rank)
        ...     weft.wait(arrived, 0, ">=", 1)  # the peer's rows are here
        ...     return part.tolist()
        >>> with weft.local_world(2) as local:
        ...     local.run(send_right)
        [[1.0, 1.0], [0.0, 0.0]]
    """
    if (
        algorithm == "auto"
        and comm_sms is None
        and between_hosts.put_notify_at_once(dst, src, signals, index, peer, op, value)
    ):
        return
    raising = notification(signals, index, peer, op, value)
    own, copy = _prepared(dst, src, peer, signals.world, True, algorithm, comm_sms)
    description = _Copy(True, peer, src.nbytes)
    if isinstance(copy, _native.RemoteCopy) and isinstance(raising, RemoteChange):
        between_hosts.put(own, raising.peer, copy, (dst, src), description, raising)
        return
    _make((dst, src), own, copy, description)
    if not raising():
        raise own.failure.reported(f"to notify rank {peer}")


def _copy(
    remote: Tensor,
    local: Tensor,
    peer: int,
    world: World | None,
    put: bool,
    algorithm: str,
    comm_sms: int | None,
) -> None:
    if (
        world is None
        and algorithm == "auto"
        and comm_sms is None
        and type(peer) is int
        and _native.copy_at_once(put, remote, local, peer)
    ):
        return
    own, copy = _prepared(remote, local, peer, world, put, algorithm, comm_sms)
    _make((remote, local), own, copy, _Copy(put, peer, local.nbytes))


def _make(tensors: object, world: World, copy: Copy, description: _Copy) -> None:
    if isinstance(copy, _native.RemoteCopy):
        make = between_hosts.put if description.put else between_hosts.get
        make(world, description.peer, copy, tensors, description)
    elif not isinstance(copy, _native.StridedCopy):
        on_streams(world).run(copy)
    elif not world.transfers.copy(copy):
        raise world.failure.reported(f"to make a {description}")


def _make_later(tensors: object, world: World, copy: Copy, description: _Copy) -> None:
    """Make a copy in the background."""
    _native.set_team_size(world.comm_threads)
    try:
        _make(tensors, world, copy, description)
    except WeftError:
        world.failure.unreported = world.failure.closed is not None
        raise


def _begin(
    remote: Tensor,
    local: Tensor,
    peer: int,
    world: World | None,
    put: bool,
    algorithm: str,
    comm_sms: int | None,
) -> Transfer:
    own, copy = _prepared(remote, local, peer, world, put, algorithm, comm_sms)
    description = _Copy(put, peer, local.nbytes)
    if own.network is not None:  # one queue, also for the peers of this host
        tensors = remote, local
        made = own.network.copies.submit(lambda: _make_later(tensors, own, copy, description))
        return QueuedTransfer(own, made, description)
    if isinstance(copy, _native.StridedCopy):
        return Transfer(own, own.transfers.submit((remote, local), copy), description)
    assert not isinstance(copy, _native.RemoteCopy)  # a world on several hosts has a network
    return StreamTransfer(own, on_streams(own).start(copy, local), description)


def _prepared(
    remote: Tensor,
    local: Tensor,
    peer: int,
    world: World | None,
    put: bool,
    algorithm: str,
    comm_sms: int | None,
) -> tuple[World, Copy]:
    """The world of `remote`, and the copy between `peer`'s counterpart of it and `local`, after all
    checks of arguments.
    """
    rank = peer if type(peer) is int else integer(peer, "peer must be the number of a rank")
    found = _native.one_sided(put, remote, local, rank)  # None for the tensors of a GPU, too
    own = None if found is None else by_number(found[0])
    if found is None or own is None or (world is not None and world is not own):
        own = _checked(remote, local, rank, world, put)
        found = _native.one_sided(put, remote, local, rank, checked=True)
    if own.failure.closed is not None:
        own.failure.check()
    if algorithm != "auto" or comm_sms is not None:
        _check_algorithm(algorithm, comm_sms, own)
    if not (own.stream_ordered and own.hosts.here(rank)):
        assert found is not None
        return own, found[1]
    streams, theirs = on_streams(own), own.peer(remote, rank)
    streams.check()
    dst, src = (theirs, local) if put else (local, theirs)
    return own, streams.copy(dst, src, algorithm, comm_sms)


def _check_algorithm(algorithm: str, comm_sms: int | None, world: World) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"a copy has no algorithm {algorithm!r}; choose one of {', '.join(ALGORITHMS)}"
        )
    if algorithm != "auto" and not world.stream_ordered:
        raise ValueError(
            f"algorithm={algorithm!r} is how a GPU copies; on a CPU the caller's thread does: "
            "leave it out"
        )
    if comm_sms is None:
        return
    if algorithm != "kernel":
        raise ValueError(
            'comm_sms is the number of SMs that a kernel copies on: use it with algorithm="kernel" '
            "on a GPU"
        )
    if integer(comm_sms, "comm_sms is a number of SMs") < 1:
        raise ValueError(f"comm_sms must be at least 1; got {comm_sms}")


def _checked(remote: Tensor, local: Tensor, peer: int, world: World | None, put: bool) -> World:
    """The world of `remote`. Raises the error for arguments of which there is no copy between
    `peer`'s counterpart of `remote` and `local`.
    """
    there, here = ("dst", "src") if put else ("src", "dst")
    if world is not None:
        check_world(world)
    for tensor, argument in ((remote, there), (local, here)):
        check_tensor(tensor, argument)
        if not (tensor.is_cpu or tensor.is_cuda):
            raise ValueError(
                f"{argument} is on {tensor.device}; one-sided calls take tensors of a CPU or a "
                "GPU: pass one"
            )
    if (segment := memory.find(remote)) is None:
        call = "put" if put else "get"
        swapped = memory.find(local) is not None
        raise ValueError(
            f"{there} is not in symmetric memory, so peers have no counterpart of it; make it with "
            "world.empty(...)"
            + (f"; {here} is symmetric: the order is {call}(dst, src, peer)" if swapped else "")
        )
    if remote.device != local.device:
        raise ValueError(
            f"{there} is on {remote.device} and {here} on {local.device}; they must be "
            "on one device"
        )
    if remote.dtype != local.dtype:
        cure = f"pass src.to({remote.dtype})" if put else f"pass a dst of {remote.dtype}"
        raise TypeError(
            f"{there} is {name(remote.dtype)} and {here} {name(local.dtype)}; they must have one "
            f"dtype: {cure}"
        )
    if remote.is_cpu and memory.layouts((remote,)) is None:
        raise TypeError(
            f"{there} is {name(remote.dtype)}, which weft cannot move: pass "
            f"{there}.view(torch.uint8), and {here} likewise"
        )
    if remote.shape != local.shape:
        raise ValueError(
            f"{there} has shape {tuple(remote.shape)} and {here} {tuple(local.shape)}; they must "
            "be equal"
        )
    if (own := by_number(segment.world)) is not None:
        own.failure.check()
        check_rank(peer, "peer", own.ranks)
    if own is None or (world is not None and world is not own):
        raise ValueError(
            f"{there} is symmetric in another world; use one made by this world's empty(...)"
        )
    if _may_repeat(remote if put else local):
        raise ValueError(
            "dst holds elements more than once, or its dimensions interleave; write to a tensor "
            "that is not expanded"
        )
    return own


def _may_repeat(tensor: Tensor) -> bool:
    """Whether a tensor might hold an element more than once: a stride does not exceed the span of
    the dimensions inside it.
    """
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += (size - 1) * stride
    return False
