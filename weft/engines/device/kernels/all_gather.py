"""All-gather on a GPU: every rank puts its shard to all ranks, in one kernel on a fixed number of
SMs.

Each program iterates over tiles of the shard: one vector load, then one vector store for each rank.
The tables of addresses are read once, before the loop. Destinations are rotated by rank, so that at
any time each rank is the destination of one other: the traffic is a permutation, not a fan-in.

The kernel exists in Triton and in Gluon, where the layout of a tile over threads is explicit: every
load and every store of a warp covers a contiguous range of memory in the widest possible accesses.
Triton infers the same layout; the explicit layout makes that a property of the source, and lets
threads per warp and warps be selected to suit the tile. Gluon has no interpreter: tests only
compile this version, and it runs on GPUs only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.engines.device.kernels import symmetric
from weft.engines.device.kernels.symmetric import (
    MAX_POLLS,
    last_to_arrive,
    notify,
    peer_pointer,
    wait,
)
from weft.world import World
from weft.world.device_memory import drain

VECTOR = 16
"""Bytes of the widest access of a thread; the size of a shard is a multiple of it."""


class LaunchOptions(NamedTuple):
    """Launch parameters of the kernel.

    `sms`: programs, each on an SM of its own. `tile`: bytes that a program loads at once, and
    stores to every rank before it loads more. `warps`: warps per program. `threads_per_warp`: 32 on
    NVIDIA's GPUs, 64 on AMD's of the CDNA family.
    """

    sms: int = 16
    tile: int = 16384
    warps: int = 8
    threads_per_warp: int = 32

    def check(self, world: World, device: torch.device) -> None:
        """Raise `ValueError` for parameters that the kernel does not support."""
        threads = self.warps * self.threads_per_warp
        if self.sms < 1:
            raise ValueError(f"sms must be at least 1; got {self.sms}")
        if (
            self.threads_per_warp not in (32, 64)
            or self.warps not in (1, 2, 4, 8, 16, 32)
            or threads > 1024
        ):
            raise ValueError(
                "a program has 1, 2, 4, 8, 16 or 32 warps of 32 or 64 threads, and at most 1024 "
                f"threads; got {self.warps} warps of {self.threads_per_warp}"
            )
        if self.tile & (self.tile - 1) or self.tile < threads * VECTOR:
            raise ValueError(
                f"a tile is a power of two of at least {threads * VECTOR} bytes, {VECTOR} for each "
                f"of {threads} threads; got {self.tile}"
            )
        # A waiting program occupies an SM: all programs must fit at once, or those that it waits
        # for might never start.
        ranks = world.ranks_per_device
        if device.type == "cuda" and self.sms > (most := symmetric.max_programs(ranks, device)):
            raise ValueError(
                f"{self.sms} waiting programs on each of {ranks} ranks that share a GPU could "
                "block "
                f"the programs that they wait for: use at most {most}"
            )


DEFAULT = LaunchOptions()


def layout(threads_per_warp: int, warps: int) -> gl.BlockedLayout:
    """The layout of a tile over threads: each holds `TILE / (4 * threads)` vectors of 16 contiguous
    bytes.
    """
    return gl.BlockedLayout([VECTOR // 4], [threads_per_warp], [warps], [0])


class AllGather:
    """All-gathers into one symmetric tensor by this kernel; created, and called, collectively.

    `gathered` holds the shards of all ranks in rank order. A call is put on the current stream and
    returns at once; when the stream has executed it, `gathered` is complete on this rank. Calls may
    be captured in a CUDA graph: the number of calls is counted on the device. `max_polls` bounds
    every wait; `check` raises `PeerTimeout` if one timed out. Peers write to `gathered` as soon as
    this rank makes its next call, so its readers must be on the same stream, or have ended.
    """

    def __init__(
        self,
        world: World,
        gathered: Tensor,
        launch: LaunchOptions = DEFAULT,
        max_polls: int = MAX_POLLS,
        gluon: bool = False,
    ) -> None:
        launch.check(world, gathered.device)
        size = gathered.numel() * gathered.itemsize // world.ranks
        if (
            not gathered.is_contiguous()
            or gathered.numel() % world.ranks
            or size % VECTOR
            or gathered.data_ptr() % VECTOR
        ):
            raise ValueError(
                f"gathered must be contiguous, begin at a multiple of {VECTOR} bytes and hold a "
                f"multiple of {VECTOR} bytes for each of {world.ranks} ranks; got shape "
                f"{tuple(gathered.shape)} of {gathered.dtype}"
            )
        self.world, self.gathered, self.launch, self.size = world, gathered, launch, size
        device = gathered.device
        self.calls = torch.zeros(1, dtype=torch.int64, device=device)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self.timeout_record = symmetric.timeout_record(device)
        self.options: dict[str, Any] = {
            "RANKS": world.ranks,
            "TILE": launch.tile // 4,
            "num_warps": launch.warps,
        }
        self.kernel: Any = all_gather_kernel
        if gluon:
            self.kernel = all_gather_gluon_kernel
            self.options["LAYOUT"] = layout(launch.threads_per_warp, launch.warps)
        words, table = gathered.view(torch.uint8).view(-1).view(torch.int32), self.calls
        state = self.calls, self.tickets, self.timeout_record
        # Loaded before ranks create the counters together: no kernel may wait for a rank that has
        # not loaded it.
        with symmetric.LOADING:
            self.kernel[(1,)](
                words,
                words,
                table,
                table,
                table,
                *state,
                0,
                world.rank,
                max_polls,
                **self.options,
            )
            drain(device)
        self.counters = symmetric.zeroed(world, 2 * world.ranks)
        tables = (
            symmetric.bases(world, gathered),
            self.counters,
            symmetric.bases(world, self.counters),
        )
        self.arguments = words, *tables, *state
        self.rest = size // VECTOR, world.rank, max_polls

    def __call__(self, shard: Tensor) -> None:
        """Gather `shard`, contiguous and of the size of a rank's part of `gathered`; it may be this
        rank's part itself.
        """
        if (
            not shard.is_contiguous()
            or shard.numel() * shard.itemsize != self.size
            or shard.data_ptr() % VECTOR
        ):
            raise ValueError(
                f"a shard is contiguous, begins at a multiple of {VECTOR} bytes and has "
                f"{self.size} bytes; got shape {tuple(shard.shape)} of {shard.dtype}"
            )
        if self.world.ranks == 1 or not self.size:
            self.gathered.view(-1).copy_(shard.view(-1).view(self.gathered.dtype))
            return
        self.kernel[(self.launch.sms,)](
            shard.view(-1).view(torch.int32), *self.arguments, *self.rest, **self.options
        )
        self.calls.add_(1)

    def check(self) -> None:
        """Raise `PeerTimeout` if a wait timed out in a call that the device has finished."""
        symmetric.check(self.timeout_record, f"an all_gather of rank {self.world.rank}")


def _all_gather(
    shard,  # int32*: this rank's rows as words
    gathered,  # int32*: symmetric; rank r's shard begins at word r * words
    gathered_bases,
    counters,  # int64*: symmetric; 0 to RANKS - 1 "open", then "arrived", by source
    counter_bases,
    calls,  # int64*: the number of earlier calls
    tickets,
    timeout_record,
    vectors,  # the size of the shard in 16 bytes; 0 does nothing
    rank,
    max_polls,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr = None,  # of a tile over threads; in Gluon only
):
    if vectors == 0:
        return
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls) + 1
    words = vectors.to(tl.int64) * 4
    if program == 0:
        # this rank has made the call: peers may write to its `gathered`
        for step in tl.static_range(1, RANKS):
            notify(counters + rank * 8, counter_bases, rank, (rank + step) % RANKS)
    mine = gathered + rank.to(tl.int64) * words
    targets = ()
    for step in tl.static_range(RANKS):
        targets = targets + (peer_pointer(mine, gathered_bases, rank, (rank + step) % RANKS),)
    for step in tl.static_range(1, RANKS):  # until all peers have made it
        wait(counters, (rank + step) % RANKS, call, timeout_record, max_polls)
    within = tl.arange(0, TILE) if LAYOUT is None else gl.arange(0, TILE, layout=LAYOUT)
    start = program * TILE + words * 0
    while start < words:
        offsets = start + within
        inside = offsets < words
        tile = tl.load(shard + offsets, mask=inside)
        for step in tl.static_range(RANKS):
            tl.store(targets[step] + offsets, tile, mask=inside)
        start += programs * TILE
    # After all programs' stores: this rank's shard has arrived on peers. Then wait for theirs.
    if last_to_arrive(tickets, programs):
        for step in tl.static_range(1, RANKS):
            notify(counters + (RANKS + rank) * 8, counter_bases, rank, (rank + step) % RANKS)
        for step in tl.static_range(1, RANKS):
            wait(counters, RANKS + (rank + step) % RANKS, call, timeout_record, max_polls)


_NOT_SPECIALIZED = ["vectors", "rank", "max_polls"]
all_gather_kernel = triton.jit(_all_gather, do_not_specialize=_NOT_SPECIALIZED)
all_gather_gluon_kernel = gluon.jit(_all_gather, do_not_specialize=_NOT_SPECIALIZED)
