"""The signals of one-sided calls: counters of a rank that any rank may raise and the owner waits
for.

What they order, and the errors of all one-sided calls, are in `weft.ops.onesided`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import weft._native as _native
from weft.checks import check_rank, check_timeout, integer
from weft.engines import engine
from weft.errors import PeerTimeout
from weft.ops import between_hosts
from weft.ops.between_hosts import RemoteChange
from weft.uncompiled import untraced
from weft.world import World
from weft.world.signals import LARGEST, Signals

if TYPE_CHECKING:
    from weft.gpu.onesided import OneSided
    from weft.gpu.signals import DeviceSignals

_COMPARISONS = {
    "==": _native.Compare.equal,
    "!=": _native.Compare.not_equal,
    ">": _native.Compare.greater,
    ">=": _native.Compare.greater_equal,
    "<": _native.Compare.less,
    "<=": _native.Compare.less_equal,
}
_FOREVER = 1e9  # seconds; nanoseconds in 64 bits must not overflow


@untraced
def notify(
    signals: Signals, index: int | slice, peer: int, op: str = "add", value: int = 1
) -> None:
    """Raise counter `index` of `peer`, or each of a slice, after everything this thread has put or
    written is visible there.

    `op` is ``"add"``, an atomic addition, or ``"set"``, for a counter with one writer. `value` is
    from 0 to 2**64 - 1. Counters must not overflow: sums of 2**64 wrap to zero. `peer` may be this
    rank; the counter of one on another host may be raised only after the call has returned.
    Asynchronous transfers are published only if they were done before. Raises `ValueError` for an
    invalid peer, counter, op or value.

    Examples:
        >>> def raise_the_peers_counter():
        ...     world = weft.init()
        ...     signals = world.signals(1)
        ...     weft.notify(signals, 0, peer=1 - world.rank, value=5)
        ...     weft.wait(signals, 0, ">=", 5)
        ...     return signals[0]
        >>> with weft.local_world(2) as local:
        ...     local.run(raise_the_peers_counter)
        [5, 5]
    """
    if not notification(signals, index, peer, op, value)():
        raise signals.world.failure.reported(f"to notify rank {peer}")


@untraced
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

    On a GPU the current stream waits, for up to twice `timeout`, and these errors are raised by the
    next call. A wait that was captured in a CUDA graph waits for the same `value` in each replay.

    Examples:
        >>> def wait_for_all():
        ...     world = weft.init()
        ...     came = world.signals(1)
        ...     for peer in range(world.ranks):
        ...         weft.notify(came, 0, peer)
        ...     weft.wait(came, 0, "==", world.ranks)
        ...     return came[0]
        >>> with weft.local_world(3) as local:
        ...     local.run(wait_for_all)
        [3, 3, 3]
    """
    try:
        world = signals.world
    except AttributeError:
        raise no_signals(signals) from None
    world.failure.check()
    selection, compare, number = signals.select(index), _comparison(cmp), _value(value)
    seconds = seconds_of(timeout, world)
    if signals.on_streams:
        streams = on_streams(world)
        streams.check()
        streams.wait(cast("DeviceSignals", signals), selection, cmp, number, seconds)
        return
    status, at, actual = signals.array.wait(*selection, compare, number, seconds)
    if status == _native.WaitStatus.none:
        return
    doing = f"for {signals.name}[{at}] {cmp} {number}: it is {actual}"
    if status == _native.WaitStatus.failed:
        raise world.failure.reported(doing)
    if status == _native.WaitStatus.left:
        raise world.failure.lost(
            (world.rank + 1) % world.ranks, "closed its world, as all peers did,", doing
        )
    raise PeerTimeout(f"rank {world.rank} waited {seconds:g} s {doing}")


@untraced
def test(signals: Signals, index: int | slice, cmp: str, value: int) -> bool:
    """Whether `wait` with these arguments would return at once; if so, with the same guarantee for
    memory.

    Raises `PeerLost` if not and a peer has died or failed, so that a polling loop ends. On a GPU it
    first waits for the current stream.

    Examples:
        >>> def poll():
        ...     world = weft.init()
        ...     signals = world.signals(1)
        ...     before = weft.test(signals, 0, ">=", 1)
        ...     weft.notify(signals, 0, peer=world.rank)
        ...     return before, weft.test(signals, 0, ">=", 1)
        >>> with weft.local_world(2) as local:
        ...     local.run(poll)
        [(False, True), (False, True)]
    """
    try:
        world = signals.world
    except AttributeError:
        raise no_signals(signals) from None
    world.failure.check()
    selection, compare, number = signals.select(index), _comparison(cmp), _value(value)
    if signals.on_streams:
        satisfied = on_streams(world).test(cast("DeviceSignals", signals), selection, cmp, number)
    else:
        satisfied = signals.array.test(*selection, compare, number)
    if not satisfied and world.mesh.failure()[0]:
        raise world.failure.reported(f"for {signals.name}[{index}] {cmp} {number}")
    return satisfied


def on_streams(world: World) -> OneSided:
    """The one-sided calls of a world whose work is on streams."""
    return cast("OneSided", engine(world).one_sided)


def notification(
    signals: Signals, index: int | slice, peer: int, op: str, value: int
) -> Callable[[], bool]:
    """A notify with checked arguments, to be called."""
    try:
        world = signals.world
    except AttributeError:
        raise no_signals(signals) from None
    world.failure.check()
    if op not in ("add", "set"):
        raise ValueError(f"a notify can add or set; got op={op!r}")
    if signals.on_streams:
        checked = signals.select(index), check_rank(peer, "peer", world.ranks), op, _value(value)
        on_streams(world).check()
        return partial(on_streams(world).notify, cast("DeviceSignals", signals), *checked)
    rank = check_rank(peer, "peer", world.ranks)
    selection, number = signals.select(index), _value(value)
    if not world.hosts.here(rank):
        return RemoteChange(signals, op, rank, selection, number)
    raising = partial(
        signals.array.add if op == "add" else signals.array.set, rank, *selection, number
    )
    return raising if world.network is None else partial(_after_others, world, rank, raising)


def _after_others(world: World, rank: int, raising: Callable[[], bool]) -> bool:
    """Raise counters of a rank of this host, once all notifies to other hosts have arrived."""
    between_hosts.flush(world, f"to notify rank {rank}")
    return raising()


def no_signals(signals: object) -> TypeError:
    """The error for an argument that is no signals."""
    return TypeError(f"signals must be those of world.signals(...); got {type(signals).__name__}")


def _comparison(cmp: str) -> _native.Compare:
    if cmp not in _COMPARISONS:
        raise ValueError(f"there is no comparison {cmp!r}; choose one of {' '.join(_COMPARISONS)}")
    return _COMPARISONS[cmp]


def _value(value: int) -> int:
    number = integer(value, "a counter holds an integer")
    if not 0 <= number <= LARGEST:
        raise ValueError(f"a counter holds 0 to 2**64 - 1; got {number}")
    return number


def seconds_of(timeout: float | None, world: World) -> float:
    """A time limit in seconds, the world's by default."""
    check_timeout(timeout)
    return min(world.timeout if timeout is None else timeout, _FOREVER)
