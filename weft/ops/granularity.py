"""Sizes at which collectives change their plan: the number of rows of a piece, and the number of
bytes up to which rows are sent eagerly.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.bootstrap.peer_memory import LEAST_BYTES
from weft.ops.collective import Plans, class_bytes
from weft.plan import Plan
from weft.schedules.staging import SHARED_SLOTS
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import PIECES
from weft.world import World

SENT_BYTES = 64 << 10
"""The minimum size of a piece that is put to peers: the overhead of a message takes longer than to
send fewer bytes. Measured on two hosts: an all-reduce of 4 KiB takes a sixth of the time of 16
messages a share.
"""
REACHABLE_BYTES = 2 << 10
"""The maximum size that few ranks send eagerly though peers could read the rows in place: to copy
more takes longer than a signal.
"""
EXCHANGED_BYTES = 16 << 10
"""The minimum size of a piece that two ranks exchange: its signals take longer than to copy fewer
bytes. Measured on a 2-core Zen 4: with slots that both share, 16 to 512 KiB take half the time.
"""
MEASURED_BYTES = 4 << 10
"""Bytes of a rank up to which nothing is measured: two system calls take longer than the copies.
Measured on a Xeon with AMX: 4 KiB take 1.5 us eagerly, and 2.1 read through the kernel.
"""
SHORT_BYTES = 512 << 10
"""The number of bytes above which shorter slots are measured, too. Measured on a Xeon with AMX: 16
MiB take 2.9 ms through slots for a sixteenth of the rows, and 3.4 through longer ones.
"""
AT_ONCE_BYTES = 16 << 10
"""The number of bytes above which slots are measured beside eager buffers, which send all at once.
Measured on a 2-core Zen 4: a broadcast of 32 KiB takes 3.6 us through slots, 4.0 eagerly.
"""
MAX_PIECES = 64
"""The maximum number of pieces: the size of a plan is proportional to it."""

Planned = Callable[[], Plan]


def slot_rows(matrix: Tensor, most: int, readers: int, world: World, piece: int = 0) -> int:
    """The number of rows, of `most` in all, that are staged at a time for each of `readers` ranks.

    `piece` is the size of a piece in bytes for ranks with one thread, if smaller than a slot.
    """
    row, limits = _row_bytes(matrix), world.thresholds
    uncut, slot = (
        (piece, piece)
        if piece and world.placement.threads == 1
        else (limits.staged_bytes, limits.slot_bytes * world.placement.threads)
    )
    staged = most if most * row <= uncut else slot // (row * max(1, readers))
    return max(1, staged, -(-most // MAX_PIECES))


def exchanged_rows(matrix: Tensor, most: int, world: World) -> int:
    """The number of rows, of `most` in all, that any two ranks exchange at a time: few enough that
    both ranks write to each slot that they share.
    """
    if world.placement.oversubscribed:
        return slot_rows(matrix, most, world.ranks - 1, world)
    row, peers = _row_bytes(matrix), max(1, world.ranks - 1)
    largest = world.thresholds.staged_bytes * world.placement.threads // peers
    in_slots = max(-(-most // (2 * SHARED_SLOTS)), EXCHANGED_BYTES // row)
    return max(1, min(in_slots, largest // row), -(-most // MAX_PIECES))


def sent_rows(matrix: Tensor, most: int) -> int:
    """The number of rows, of `most` in all, that one message puts to a peer."""
    return max(1, -(-most // PIECES), SENT_BYTES // _row_bytes(matrix))


def _row_bytes(matrix: Tensor) -> int:
    return max(1, matrix.shape[1] * matrix.itemsize)


def moved_eagerly(world: World, size: int, reachable: bool) -> bool:
    """Whether `size` bytes of each rank are sent eagerly; `reachable`: peers can access the
    tensors.

    If peers cannot access them, the limit is the size of an eager buffer: staging would make the
    same copies, with one more signal.
    """
    if not reachable:
        return _eager(world, size, EAGER_BUFFER_BYTES)
    return _eager(
        world, size, world.thresholds.eager_bytes if costly_signals(world) else REACHABLE_BYTES
    )


def reduced_eagerly(world: World, size: int, reachable: bool) -> bool:
    """`moved_eagerly` for rows that are reduced. For two ranks without access to the tensors,
    staging would make the same copies.
    """
    most = (
        EAGER_BUFFER_BYTES if world.ranks == 2 and not reachable else world.thresholds.eager_bytes
    )
    return _eager(world, size, most)


def _eager(world: World, size: int, most: int) -> bool:
    """Whether `size` bytes, if at most `most`, are sent to eager buffers; only ranks of one host
    have these.
    """
    return size <= most and not world.hosts.several and not world.stream_ordered


def costly_signals(world: World) -> bool:
    """Whether signals take most of a small collective's time: with many or oversubscribed ranks."""
    return world.placement.oversubscribed or len(world.placement.levels) > 1


def measurable(world: World, size: int) -> bool:
    """Whether the paths of ordinary tensors of `size` bytes are measured: ranks share a host, and
    more bytes than two system calls are worth.
    """
    return (
        world.ranks > 1
        and size > MEASURED_BYTES
        and not world.hosts.several
        and not world.stream_ordered
    )


def plans(
    world: World, size: int, eager: Planned, slots: Planned, short: Planned | None, read: Planned
) -> Plans:
    """The plans that move `size` bytes of each rank's ordinary tensor, the usual one first.

    All sizes of a class have plans of the same names, since one of these is chosen for all: rows
    copied to ``eager`` buffers; staged through ``slots`` as large as the caches permit, or through
    ``short slots`` for a sixteenth of the rows; or ``read`` in place through the kernel, which has
    the fewest copies.
    """
    largest = class_bytes(size)
    found = {"slots": slots}
    if largest <= EAGER_BUFFER_BYTES:
        found = {"eager": eager} | (found if largest > AT_ONCE_BYTES else {})
    elif short and largest > SHORT_BYTES:
        found["short slots"] = short
    if world.reads_memory:
        reads = {"read": read}
        usual = world.placement.huge_pages and largest > LEAST_BYTES
        found = reads | found if usual else found | reads
    return found
