"""Rows put to all ranks by one kernel on a fixed number of SMs: the copies of an all-gather, with
the notifies and waits before and after them.

Each program iterates over tiles of the shard: one load, then one store for each rank. A tile is all
that a program has in flight, by default 32 KiB: a thread loads eight vectors before it stores the
first. The tables of addresses are read once, before the loop. Destinations are rotated by rank, so
that at any time each rank is the destination of one other: the traffic is a permutation, not a
fan-in.

**Layouts.** Rows may have any size, and any distance on both sides. If a shard is one contiguous
block on both, an element of a tile has one offset. Otherwise the kernel divides by the size of a
row. Accesses are of 16 bytes where all addresses and distances are multiples of 16, else as wide as
these permit; this is chosen before the launch, for the whole shard (`Access`).

The kernel exists in Triton and in Gluon, where the layout of a tile over threads is explicit: every
load and every store of a warp covers a contiguous range of memory in the widest possible accesses.
Triton infers the same layout; the explicit layout makes that a property of the source. Gluon has no
interpreter: tests only compile this version, and it runs on GPUs only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.gpu.kernels import symmetric
from weft.gpu.kernels.symmetric import (
    CounterTables,
    last_to_arrive,
    notify,
    peer_pointer,
    wait,
)
from weft.plan.launch import Launch

VECTOR = 16
"""Bytes of the widest access of a thread."""

_MOST_VECTORS = 16
"""The most of them that a thread holds: a tile is kept in registers, here 64 of the 255 that a
thread has.
"""

_MOST_BYTES = 1 << 16
"""The largest tile: a quarter of the registers of an SM, so that none is spilled with 32 warps."""

_LONG = 1 << 30
"""The number of words in a shard from which on offsets have 64 bits."""


def check(launch: Launch, ranks: int, device: torch.device) -> None:
    """Raise `ValueError` for a launch that the kernel does not support for each of `ranks` ranks
    that share `device`.
    """
    sms, tile, warps, compiled_by_gluon = launch
    for name, value in launch._asdict().items():
        if not isinstance(value, int):
            raise ValueError(f"{name} must be an integer; got {value!r}")
    if sms < 1:
        raise ValueError(f"comm_sms must be at least 1; got {sms}")
    lanes = symmetric.warp_size(device)
    threads = warps * lanes
    if warps not in (1, 2, 4, 8, 16, 32) or threads > 1024:
        raise ValueError(
            "warps must be 1, 2, 4, 8, 16 or 32, with at most 1024 threads; got "
            f"{warps} of {lanes} threads"
        )
    least, most = threads * VECTOR, min(threads * VECTOR * _MOST_VECTORS, _MOST_BYTES)
    if tile & (tile - 1) or not least <= tile <= most:
        raise ValueError(
            f"tile_bytes must be a power of two from {least} to {most}, {VECTOR} to "
            f"{VECTOR * _MOST_VECTORS} for each of {threads} threads and {_MOST_BYTES} in all; "
            f"got {tile}"
        )
    if compiled_by_gluon and symmetric.INTERPRETED:
        raise ValueError("Gluon has no interpreter: use gluon=False under TRITON_INTERPRET=1")
    # A waiting program occupies an SM: all programs must fit at once, or those that it waits for
    # might never start.
    if device.type == "cuda" and sms > (at_once := symmetric.max_programs(ranks, device)):
        raise ValueError(
            f"comm_sms={sms}: {sms} waiting programs on each of {ranks} ranks that share a GPU "
            f"could block the programs that they wait for: use at most {at_once}"
        )


class Access(NamedTuple):
    """The accesses of a launch: `width` bytes each, by `rows` or to one contiguous block."""

    width: int
    rows: bool

    @property
    def word(self) -> Any:
        """The type of pointers; 16 bytes are four words, which the compiler joins."""
        types = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, VECTOR: tl.int32}
        return types[self.width]

    @property
    def words(self) -> int:
        """Words of an access."""
        return 4 if self.width == VECTOR else 1


class Distances(NamedTuple):
    """Rows in memory: their number, the bytes of each, from one to the next in the shard and in
    the gathered rows, and from the beginning of the symmetric segment to the first.
    """

    rows: int
    row: int
    shard: int
    gathered: int
    place: int

    @property
    def size(self) -> int:
        return self.rows * self.row

    def one_block(self, stride: int) -> bool:
        """Whether rows at this distance are contiguous."""
        return self.rows == 1 or stride == self.row

    def accesses(self, itemsize: int) -> list[Access]:
        """All accesses that a shard of elements of `itemsize` bytes may need, whatever its address
        and its distance of rows are; the best ones first.
        """
        width = math.gcd(VECTOR, self.row, self.gathered, self.place)
        found = [Access(width, True), Access(itemsize, True)]
        if self.one_block(self.gathered):
            found.insert(0, Access(math.gcd(VECTOR, self.size, self.place), False))
        return [*dict.fromkeys(found)]

    def fits(self, access: Access, address: int) -> bool:
        """Whether a shard at this address can be read by an access."""
        if not access.rows:
            return self.one_block(self.shard) and address % access.width == 0
        return math.gcd(address, self.shard) % access.width == 0


class SignalTables(NamedTuple):
    """The indices of the counters that rank 0 raises, in a table of all ranks' counters: `opened`
    by a rank before it waits for `count` notifies of `awaited`, and `arrived` after its stores.
    Without `opened` it is -1.
    """

    opened: int
    awaited: int
    count: int
    arrived: int


class GatherKernel:
    """Launches that put a rank's shard to all ranks of a world.

    `itemsize` is that of the shard's elements. The launch is as `check` accepts it.
    """

    def __init__(
        self,
        distances: Distances,
        itemsize: int,
        signals: SignalTables,
        launch: Launch,
        rank: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        self.distances = distances
        self.signals = signals
        self.launch = launch
        self.rank = rank
        self.ranks = ranks
        self.lanes = symmetric.warp_size(device)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self.accesses = distances.accesses(itemsize)

    def __call__(
        self,
        shard: Tensor,
        segment: Tensor,
        bases: Tensor,
        counter_tables: CounterTables,
        limit: int,
        idle: bool = False,
    ) -> None:
        """Put the kernel on the current stream.

        `segment` is this rank's part of the symmetric memory that has the gathered rows, `bases`
        the table of all ranks' parts. An `idle` launch loads the kernel for every address that a
        shard may have, and does nothing.
        """
        address = shard.data_ptr()
        fitting = (access for access in self.accesses if self.distances.fits(access, address))
        for access in self.accesses if idle else [next(fitting)]:
            self._put(access, shard, segment, bases, counter_tables, limit, idle)

    def _put(
        self,
        access: Access,
        shard: Tensor,
        segment: Tensor,
        bases: Tensor,
        counter_tables: CounterTables,
        limit: int,
        idle: bool,
    ) -> None:
        sms, tile, warps, compiled_by_gluon = self.launch
        counters, counter_bases, base, timeout_record = counter_tables
        _, row, source, target, place = self.distances
        units = (each // access.width for each in (self.distances.size, place, row, source, target))
        kernel: Any = KERNELS[compiled_by_gluon, access.width == VECTOR]
        layout = {"LAYOUT": tile_layout(access, self.lanes, warps)} if compiled_by_gluon else {}
        kernel[(1 if idle else sms,)](
            triton.reinterpret(shard, access.word),
            triton.reinterpret(segment, access.word),
            bases,
            counters,
            counter_bases,
            base,
            self.tickets,
            timeout_record,
            *units,
            *self.signals,
            int(idle),
            self.rank,
            limit,
            RANKS=self.ranks,
            TILE=tile // VECTOR * access.words,
            WORDS=access.words,
            ROWS=access.rows,
            LONG=self.distances.size // access.width * access.words > _LONG,
            num_warps=warps,
            **layout,
        )


def tile_layout(access: Access, lanes: int, warps: int) -> gl.BlockedLayout:
    """The layout of a tile over threads, each of which holds one or more accesses; `lanes` are the
    threads of a warp.
    """
    return gl.BlockedLayout([access.words], [lanes], [warps], [0])


def _put_to_all(
    shard,  # this rank's rows, as words
    segment,  # symmetric, as words
    bases,  # int64 (ranks,), of the segment
    counters,  # int64*, symmetric
    counter_bases,
    base,  # int64*: the values of the counters at the begin of this execution
    tickets,
    timeout_record,
    size,  # of the shard, in accesses of WORDS words, as the next four
    place,  # of the shard in the segment
    row,  # the size of a row
    shard_stride,  # from a row to the next
    gathered_stride,
    opened,  # counters, as in `SignalTables`
    awaited,
    count,
    arrived,
    idle,
    rank,
    limit: tl.int64,  # of a wait, in nanoseconds
    RANKS: tl.constexpr,
    TILE: tl.constexpr,  # words
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    LAYOUT: tl.constexpr = None,  # of a tile over threads; in Gluon only
):
    if idle:
        return
    program, programs = tl.program_id(0), tl.num_programs(0)
    words = (size.to(tl.int64) if LONG else size) * WORDS
    if (program == 0) & (opened >= 0):  # peers may write to this rank's rows
        for step in tl.static_range(1, RANKS):
            to = (rank + RANKS - step) % RANKS
            notify(counters + (opened + rank) * 8, counter_bases, rank, to)
    mine = segment + place.to(tl.int64) * WORDS
    targets = ()
    for step in tl.static_range(RANKS):
        to = (rank + RANKS - step) % RANKS
        targets = targets + (peer_pointer(mine, bases, rank, to),)
    for step in tl.static_range(1, RANKS):  # until this rank may write to theirs
        index = awaited + (rank + step) % RANKS
        wait(counters, index, tl.load(base + index) + count, timeout_record, limit)
    within = tl.arange(0, TILE) if LAYOUT is None else gl.arange(0, TILE, layout=LAYOUT)
    start = program * TILE + words * 0
    while start < words:
        offsets = start + within
        inside = offsets < words
        if ROWS:
            line = (offsets // (row * WORDS)).to(tl.int64) * WORDS
            source = line * (shard_stride - row) + offsets
            target = line * (gathered_stride - row) + offsets
        else:
            source, target = offsets, offsets
        tile = tl.load(shard + source, mask=inside)
        for step in tl.static_range(RANKS):
            tl.store(targets[step] + target, tile, mask=inside)
        start += programs * TILE
    # After all programs' stores: this rank's shard has arrived on peers. Then wait for theirs.
    if last_to_arrive(tickets, programs):
        for step in tl.static_range(1, RANKS):
            to = (rank + RANKS - step) % RANKS
            notify(counters + (arrived + rank) * 8, counter_bases, rank, to)
        for step in tl.static_range(1, RANKS):
            index = arrived + (rank + step) % RANKS
            wait(counters, index, tl.load(base + index) + 1, timeout_record, limit)


_NUMBERS = [
    "size",
    "place",
    "row",
    "shard_stride",
    "gathered_stride",
    "opened",
    "awaited",
    "count",
    "arrived",
    "idle",
    "rank",
    "limit",
]
_ANY_ALIGNMENT = [*_NUMBERS, "shard", "segment"]

KERNELS = {
    (False, False): triton.jit(_put_to_all, do_not_specialize=_ANY_ALIGNMENT),
    (False, True): triton.jit(_put_to_all, do_not_specialize=_NUMBERS),
    (True, False): gluon.jit(_put_to_all, do_not_specialize=_ANY_ALIGNMENT),
    (True, True): gluon.jit(_put_to_all, do_not_specialize=_NUMBERS),
}
"""The kernel by (whether Gluon compiles it, whether accesses are of 16 bytes). Only these depend on
the alignment of a shard, which they need; ranks, and calls, may differ in it otherwise.
"""
