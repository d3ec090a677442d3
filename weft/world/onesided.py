"""One-sided calls: data and signals to or from a peer that does not take part.

The order that they guarantee, with an example for each pattern, is in docs/memory-model.md. In
short:

- A `put` or `get` is complete when it returns; a `put_async` or `get_async` once its `Transfer`
  is done.
- A notify publishes: a thread that sees it (`wait`, `test`, or a read of the counter) sees all that
  the notifying thread had put before.
- Nothing else is ordered. In particular a put does not notify the peer, and a notify does not wait
  for asynchronous transfers.

One-sided calls are thread-safe and run concurrently. All of them raise `WeftError` if the world is
closed and `PeerLost` if a peer has died or failed, which closes the world; bad arguments are
`ValueError` or `TypeError`, raised before anything is moved.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

import weft._native as _native
from weft.checks import check_tensor, check_timeout, name
from weft.errors import PeerTimeout
from weft.world import memory
from weft.world.peers import Peers
from weft.world.signals import LARGEST, Signals, integer
from weft.world.world import World, by_number

_COMPARISONS = {
    "==": _native.Compare.equal,
    "!=": _native.Compare.not_equal,
    ">": _native.Compare.greater,
    ">=": _native.Compare.greater_equal,
    "<": _native.Compare.less,
    "<=": _native.Compare.less_equal,
}
_FOREVER = 1e9  # seconds; nanoseconds in 64 bits must not overflow


class _Copy(NamedTuple):
    """A description of a copy, formatted only for errors."""

    put: bool
    peer: int
    size: int  # bytes

    def __str__(self) -> str:
        name, direction = ("put", "to") if self.put else ("get", "from")
        return f"{name} of {self.size:,} bytes {direction} rank {self.peer}"


class Transfer:
    """An asynchronous put or get; made by `put_async` and `get_async`.

    Transfers run on a background thread of the world, one after the other in the order of the
    calls, so a later one to the same peer sees the data of an earlier one, and ends after it.
    Dropping a transfer does not end it, and its tensors live until it is done. `World.close`
    completes outstanding transfers.
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
        self._world.check_process()
        seconds = _seconds(timeout, self._world)
        if not self._world.transfers.wait(self._number, seconds):
            raise PeerTimeout(
                f"rank {self._world.rank} waited {seconds:g} s for its {self._copy}; it is not done"
            )
        if self._world.transfers.refused(self._number):
            raise self._world.failure(f"for its {self._copy}")

    def __repr__(self) -> str:
        return f"Transfer({self._copy}, {'done' if self.done() else 'under way'})"


def put(dst: Tensor, src: Tensor, peer: int, *, world: World | None = None) -> None:
    """Copy `src` to `peer`'s counterpart of `dst`; when it returns `src` may be used again and the
    data is in the peer's memory.

    `dst` is this rank's part of a symmetric tensor or any view of it; the same view of the peer's
    part is written, this rank's is not touched. `src` is any CPU tensor of that dtype and shape.
    Both may have any strides, dimension and alignment, and no elements; `dst` must not hold an
    element twice, as an expanded tensor does, nor may its dimensions interleave. Both are plain:
    `torch.Tensor` or `torch.nn.Parameter` itself, strided, no conjugate or negative view. `peer`
    may be this rank itself. If `src` and the target overlap, all is read before anything is
    written. Autograd does not record it.

    The peer is not notified: use `notify` or `put_notify`. The world is the tensor's own; `world`,
    if given, is checked against it. Raises `ValueError` (not symmetric, of another world, invalid
    peer, shapes differ, not plain), `TypeError` (dtypes differ, a subclass), `PeerLost`.
    """
    _copy(dst, src, peer, world, True)


def get(dst: Tensor, src: Tensor, peer: int, *, world: World | None = None) -> None:
    """Copy `peer`'s counterpart of `src` to `dst`; when it returns the data is in `dst`.

    `src` is this rank's part of a symmetric tensor or any view of it, `dst` any CPU tensor of that
    dtype and shape; all else, and errors, are as in `put`. The data is defined only if the peer has
    notified this rank that it is written, and does not write it meanwhile.
    """
    _copy(src, dst, peer, world, False)


def put_async(dst: Tensor, src: Tensor, peer: int, *, world: World | None = None) -> Transfer:
    """Begin a `put`, with its arguments and errors, and return at once; `src` must not change until
    the `Transfer` is done.

    A world has at most 1024 outstanding transfers; with more, this call blocks until one ends.
    """
    return _begin(dst, src, peer, world, True)


def get_async(dst: Tensor, src: Tensor, peer: int, *, world: World | None = None) -> Transfer:
    """Begin a `get` as `put_async` begins a put; `dst` is undefined until the returned `Transfer`
    is done.
    """
    return _begin(src, dst, peer, world, False)


def put_notify(
    dst: Tensor,
    src: Tensor,
    signals: Signals,
    index: int | slice,
    peer: int,
    op: str = "add",
    value: int = 1,
) -> None:
    """`put`, then `notify` the same peer: a thread that sees the counter sees the data. Arguments
    are checked before anything is moved.
    """
    own, copy = _prepared(dst, src, peer, signals.world, True)
    raising = _notification(signals, index, peer, op, value)
    _make(own, copy, _Copy(True, peer, src.nbytes))
    if not raising():
        raise own.failure(f"to notify rank {peer}")


def notify(
    signals: Signals, index: int | slice, peer: int, op: str = "add", value: int = 1
) -> None:
    """Raise counter `index` of `peer`, or each of a slice, after everything this thread has put or
    written is visible there.

    `op` is ``"add"``, an atomic addition, or ``"set"``, for a counter with one writer. `value` is
    from 0 to 2**64 - 1. Counters must not overflow: sums of 2**64 wrap to zero. `peer` may be this
    rank. Asynchronous transfers are published only if they were done before. Raises `ValueError`
    for an invalid peer, counter, op or value.
    """
    if not _notification(signals, index, peer, op, value)():
        raise signals.world.failure(f"to notify rank {peer}")


def wait(
    signals: Signals, index: int | slice, cmp: str, value: int, timeout: float | None = None
) -> None:
    """Block until this rank's counter `index` satisfies ``counter <cmp> value``, or every counter
    of a slice does.

    `cmp` is one of ``== != > >= < <=``, `value` from 0 to 2**64 - 1. A slice is satisfied when one
    pass over its counters, one after the other, finds each satisfied; counters that only grow,
    compared with ``>=`` or ``>``, are then satisfied at the same time. On return all is visible
    that was put before the notifies that were seen. Prefer ``>=`` to ``==``, which a counter may
    skip.

    `timeout` is in seconds, the world's by default; after it `PeerTimeout` names the counter, the
    expected and the actual value. The world stays open, and the caller may wait again; the same
    holds for Ctrl-C. Raises `PeerLost` as soon as a peer dies or fails, or when all peers have
    closed the world; either closes it here.
    """
    world = signals.world
    world.check()
    selection, compare, number = signals.select(index), _comparison(cmp), _value(value)
    seconds = _seconds(timeout, world)
    status, at, actual = signals.array.wait(*selection, compare, number, seconds)
    if status == _native.WaitStatus.none:
        return
    doing = f"for {signals.name}[{at}] {cmp} {number}: it is {actual}"
    if status == _native.WaitStatus.failed:
        raise world.failure(doing)
    if status == _native.WaitStatus.left:
        raise world.lost(
            (world.rank + 1) % world.ranks, "closed its world, as all peers did,", doing
        )
    raise PeerTimeout(f"rank {world.rank} waited {seconds:g} s {doing}")


def test(signals: Signals, index: int | slice, cmp: str, value: int) -> bool:
    """Whether `wait` with these arguments would return at once; if so, with the same guarantee for
    memory.

    Raises `PeerLost` if not and a peer has died or failed, so that a polling loop ends.
    """
    signals.world.check()
    selection, compare, number = signals.select(index), _comparison(cmp), _value(value)
    satisfied: bool = signals.array.test(*selection, compare, number)
    if not satisfied and signals.array.failed:
        raise signals.world.failure(f"for {signals.name}[{index}] {cmp} {number}")
    return satisfied


def _copy(remote: Tensor, local: Tensor, peer: int, world: World | None, put: bool) -> None:
    if world is None and type(peer) is int and _native.copy_at_once(put, remote, local, peer):
        return
    own, copy = _prepared(remote, local, peer, world, put)
    _make(own, copy, _Copy(put, peer, local.nbytes))


def _make(world: World, copy: _native.StridedCopy, description: _Copy) -> None:
    if not world.transfers.copy(copy):
        raise world.failure(f"to make a {description}")


def _begin(remote: Tensor, local: Tensor, peer: int, world: World | None, put: bool) -> Transfer:
    own, copy = _prepared(remote, local, peer, world, put)
    return Transfer(
        own, own.transfers.submit((remote, local), copy), _Copy(put, peer, local.nbytes)
    )


def _prepared(
    remote: Tensor, local: Tensor, peer: int, world: Peers | None, put: bool
) -> tuple[World, _native.StridedCopy]:
    """The world of `remote`, and the copy between `peer`'s counterpart of it and `local`, after all
    checks of arguments.
    """
    rank = peer if type(peer) is int else integer(peer, "peer is the number of a rank")
    found = _native.one_sided(put, remote, local, rank)
    own = None if found is None else by_number(found[0])
    if found is None or own is None or (world is not None and world is not own):
        raise _refusal(remote, local, rank, put)
    if own.closed is not None:
        own.check()
    return own, found[1]


def _refusal(remote: Tensor, local: Tensor, peer: int, put: bool) -> Exception:
    """The error for invalid arguments of a copy between `peer`'s counterpart of `remote` and
    `local`.
    """
    there, here = ("dst", "src") if put else ("src", "dst")
    for tensor, argument in ((remote, there), (local, here)):
        check_tensor(tensor, argument)
        if not tensor.is_cpu:
            return ValueError(
                f"{argument} is on {tensor.device}; one-sided calls take CPU tensors: pass one"
            )
    if (segment := memory.find(remote)) is None:
        return ValueError(
            f"{there} is not in symmetric memory, so peers have no counterpart of it; make it with "
            "world.empty(...)"
        )
    if remote.dtype != local.dtype:
        return TypeError(
            f"{there} is {name(remote.dtype)} and {here} {name(local.dtype)}; they must have one "
            "dtype"
        )
    if memory.layouts((remote,)) is None:
        return TypeError(
            f"{there} is {name(remote.dtype)}, which weft cannot move: pass "
            f"{there}.view(torch.uint8), and {here} likewise"
        )
    if remote.shape != local.shape:
        return ValueError(
            f"{there} has shape {tuple(remote.shape)} and {here} {tuple(local.shape)}; they must "
            "be equal"
        )
    if (own := by_number(segment.world)) is not None:
        own.check()
        _rank(peer, own)
    return ValueError(
        f"{there} is symmetric in another world; use one made by this world's empty(...)"
    )


def _notification(
    signals: Signals, index: int | slice, peer: int, op: str, value: int
) -> partial[bool]:
    """A notify with checked arguments, to be called."""
    world = signals.world
    world.check()
    if op not in ("add", "set"):
        raise ValueError(f"a notify can add or set; got op={op!r}")
    raising = signals.array.add if op == "add" else signals.array.set
    return partial(raising, _rank(peer, world), *signals.select(index), _value(value))


def _rank(peer: int, world: Peers) -> int:
    rank = integer(peer, "peer is the number of a rank")
    if not 0 <= rank < world.ranks:
        raise ValueError(f"there is no rank {rank} in a world of {world.ranks}")
    if not world.same_host(rank):
        raise ValueError(
            f"rank {rank} is on another host; one-sided calls reach the ranks of this host: use a "
            "collective"
        )
    return rank


def _comparison(cmp: str) -> _native.Compare:
    if cmp not in _COMPARISONS:
        raise ValueError(f"there is no comparison {cmp!r}; choose one of {' '.join(_COMPARISONS)}")
    return _COMPARISONS[cmp]


def _value(value: int) -> int:
    number = integer(value, "a counter holds an integer")
    if not 0 <= number <= LARGEST:
        raise ValueError(f"a counter holds 0 to 2**64 - 1; got {number}")
    return number


def _seconds(timeout: float | None, world: Peers) -> float:
    check_timeout(timeout)
    return min(world.timeout if timeout is None else timeout, _FOREVER)
