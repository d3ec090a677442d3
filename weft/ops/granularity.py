"""Sizes at which collectives change their plan: the rows that move at a time, and the bytes up to
which rows are sent eagerly.
"""

from __future__ import annotations

from torch import Tensor

from weft.schedules.staging import SHARED_SLOTS
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import PIECES
from weft.world import World
from weft.world.peer_memory import LEAST_BYTES

SENT_BYTES = 64 << 10
"""The fewest bytes of a piece that is put to peers: with fewer, its message takes longer."""
REACHED_BYTES = 2 << 10
"""The most bytes that few ranks send eagerly though peers could read them in place: to copy more
costs more than a signal.
"""
EXCHANGED_BYTES = 16 << 10
"""The fewest bytes of a piece that two ranks exchange: with fewer, its signals take longer."""
STEPS = 64
"""The most pieces: a plan is a list of all of them."""


def slot_rows(matrix: Tensor, most: int, readers: int, world: World, piece: int = 0) -> int:
    """The rows, of at most `most`, that go to each of n readers at a time where they are staged.

    `piece` are the bytes of a piece for ranks with one thread, where it is smaller than a slot.
    """
    row, limits = _row_bytes(matrix), world.thresholds
    at_once, slot = (
        (piece, piece)
        if piece and world.threads == 1
        else (limits.staged_bytes, limits.slot_bytes * world.threads)
    )
    staged = most if most * row <= at_once else slot // (row * max(1, readers))
    return max(1, staged, -(-most // STEPS))


def exchanged_rows(matrix: Tensor, most: int, world: World) -> int:
    """The rows that any two ranks give each other at a time: so few that each slot that they share
    is written by both.
    """
    if world.oversubscribed:
        return slot_rows(matrix, most, world.ranks - 1, world)
    row, peers = _row_bytes(matrix), max(1, world.ranks - 1)
    largest = world.thresholds.staged_bytes * world.threads // peers
    in_slots = max(-(-most // (2 * SHARED_SLOTS)), EXCHANGED_BYTES // row)
    return max(1, min(in_slots, largest // row), -(-most // STEPS))


def sent_rows(matrix: Tensor, most: int) -> int:
    """The rows, of at most `most`, that are put to peers at a time: enough for a message."""
    return max(1, -(-most // PIECES), SENT_BYTES // _row_bytes(matrix))


def _row_bytes(matrix: Tensor) -> int:
    return max(1, matrix.shape[1] * matrix.itemsize)


def moved_eagerly(world: World, size: int, reachable: bool) -> bool:
    """Whether `size` bytes of each rank are sent eagerly; `reachable`: peers can access tensors.

    Where they cannot, up to the size of an eager buffer: staged, the rows would be copied as often,
    with one more signal.
    """
    if not reachable:
        return _eager(world, size, EAGER_BUFFER_BYTES)
    return _eager(
        world, size, world.thresholds.eager_bytes if costly_signals(world) else REACHED_BYTES
    )


def reduced_eagerly(world: World, size: int, reachable: bool) -> bool:
    """The same for bytes that are reduced: two ranks that cannot reach them would copy them as
    often if they were staged.
    """
    most = (
        EAGER_BUFFER_BYTES if world.ranks == 2 and not reachable else world.thresholds.eager_bytes
    )
    return _eager(world, size, most)


def _eager(world: World, size: int, most: int) -> bool:
    """Whether `size` bytes of a rank, of at most `most`, go to eager buffers, which ranks of one
    host have.
    """
    return size <= most and world.topology is None and not world.stream_ordered


def costly_signals(world: World) -> bool:
    """Whether signals take most of a small collective's time: ranks are many, or share cores."""
    return world.oversubscribed or len(world.levels) > 1


def read_in_place(world: World, size: int) -> bool:
    """Whether peers read `size` bytes of an ordinary tensor through the kernel, without staging."""
    return world.reads_memory and size >= LEAST_BYTES and not world.stream_ordered
