"""Symmetric memory: tensors in memory that every rank of the host has mapped.

An allocation is an anonymous memory file per rank, passed over the Unix sockets of the world. It
has no name, so a dead process leaves nothing behind, and it lives until the last tensor in it, on
any rank, is freed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

import weft._native as _native
from weft.checks import name as dtype_name
from weft.errors import SymmetricMemoryError
from weft.host import control_groups
from weft.host.topology import read_text

if TYPE_CHECKING:
    from weft.world.world import World


class DeviceSegment:
    """A symmetric allocation on a device: all ranks' parts of `size` bytes, as tensors.

    `world` is the number of its world in this process, `number` that of the call that made it. On
    the host, native code has its own `Segment`, with every part mapped.
    """

    def __init__(self, parts: Sequence[torch.Tensor], world: int, number: int) -> None:
        self.parts = parts
        self.world = world
        self.number = number
        self.size = parts[0].numel()

    def base(self, rank: int) -> int:
        """The address of a rank's part."""
        return self.parts[rank].data_ptr()

    def bases(self, offset: int) -> list[int]:
        """The address of byte `offset` of each rank's part."""
        return [part.data_ptr() + offset for part in self.parts]

    def bytes(self, rank: int) -> torch.Tensor:
        """A rank's part."""
        return self.parts[rank]


Segment = _native.Segment | DeviceSegment
Matrix = tuple[int, int, int, int]
"""Rows and columns of a matrix, the bytes from one row to the next, and its address."""

segments: WeakValueDictionary[int, Segment] = WeakValueDictionary()
"""All segments of this process, by the address of its own part."""

on_devices: WeakValueDictionary[int, DeviceSegment] = WeakValueDictionary()
"""Those that native code does not know."""

_END_OF_CALL = "\x1e"  # the separator of records, which no description of a call contains

layouts = _native.layouts
"""Layouts of plain CPU tensors (dtypes, shapes, strides); None if any is not one."""


def find(tensor: torch.Tensor) -> Segment | None:
    """The segment of a tensor in symmetric memory of any world, also of a view made by another
    library; None for other tensors.
    """
    if tensor.is_cpu and not on_devices and (address := tensor.data_ptr()):
        return _native.segment_containing(address)
    if not (tensor.is_cpu or tensor.is_cuda):
        return None
    found = segments.get(tensor.untyped_storage().data_ptr())  # also of one without elements
    return (
        _native.segment_containing(tensor.data_ptr()) if found is None and tensor.is_cpu else found
    )


def offset(tensor: torch.Tensor, segment: Segment, rank: int) -> int:
    """The offset in bytes of a tensor in the rank's part of its segment."""
    return (
        tensor.untyped_storage().data_ptr()
        + int(tensor.storage_offset()) * tensor.itemsize
        - segment.base(rank)
    )


def allocate(
    world: World, shape: Sequence[int], dtype: torch.dtype, call: str | None = None
) -> torch.Tensor:
    """A tensor in a new segment, see `World.empty`; `call` is the name of the call in errors."""
    size = math.prod(shape) * dtype.itemsize
    call = call or f"empty({tuple(shape)}, {dtype_name(dtype)})"
    compiled = _native.Compiled(call, 0, [], world.ranks)
    world.executor.begin(compiled, world.timeout)
    parts: list[Any] = [None] * world.ranks  # None for ranks on other hosts
    failures = dict[int, str]()
    file = None
    try:
        _check_available(size, sum(map(world.hosts.here, range(world.ranks))))
        parts[world.rank], file = _native.create_mapping(size)
    except OSError as error:
        failures[world.rank] = str(error)
    for peer, text, theirs in exchange(world, compiled, call, failures.get(world.rank, ""), file):
        if text:
            failures[peer] = text
        elif world.rank not in failures and world.hosts.here(peer):
            parts[peer] = world.notes.attach(peer, theirs, size, call)
    if failures:
        raise SymmetricMemoryError(
            f"{call}: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
        )
    segment = _native.Segment(parts, world.rank, world.number, world.executor.calls)
    segments[segment.base(world.rank)] = segment
    if world.network is not None:
        world.network.hold(segment, parts[world.rank])
        # a rank that has returned may at once put to this rank
        for _ in exchange(world, compiled, call, ""):
            pass
    return segment.bytes(world.rank).view(dtype).view(tuple(shape))


def exchange(
    world: World, compiled: _native.Compiled, call: str, note: str, file: _native.File | None = None
) -> Iterator[tuple[int, str, _native.File | None]]:
    """Send every peer a note and a file, if there is one, and yield ``(peer, note, file)`` of each;
    all ranks make this `call`. Of a call with a second line only that is compared between ranks,
    and the first one is for errors.
    """
    shown, _, compared = call.partition("\n")
    world.notes.send_to_all(f"{call}{_END_OF_CALL}{note}", file, f"in {shown}")
    for peer in world.placement.others:
        refused = world.executor.refused_call(compiled, peer)

        def look(peer: int = peer, refused: _native.RefusedCall = refused) -> None:
            if refused.stands:
                raise world.failure.rejected(call, peer)
            if world.executor.mismatch(compiled, peer):
                theirs = world.executor.peer_call(peer, compiled.call)
                raise world.failure.mismatch(compiled.call, call, peer, theirs)

        number = f"(call {compiled.call})"
        note, theirs = world.notes.receive(
            peer,
            f"for {shown} {number}",
            f"for rank {peer} in {shown} {number}",
            world.timeout,
            look,
        )
        their_call, text = note.split(_END_OF_CALL, 1)
        if their_call.partition("\n")[2] != compared or not (compared or their_call == call):
            raise world.failure.mismatch(compiled.call, call, peer, their_call)
        yield peer, text, theirs
    world.executor.end(compiled)


def numbers(segment: Segment, rank: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A rank's part of a segment from byte `offset` on, as elements of a dtype."""
    return segment.bytes(rank)[
        offset : offset + (segment.size - offset) // dtype.itemsize * dtype.itemsize
    ].view(dtype)


def matrix(elements: torch.Tensor, where: Matrix) -> torch.Tensor:
    """A matrix within the elements of a part of a segment."""
    rows, columns, stride, address = where
    return elements.as_strided(
        (rows, columns),
        (stride // elements.itemsize, 1),
        (address - elements.data_ptr()) // elements.itemsize,
    )


def _check_available(size: int, ranks: int) -> None:
    """Raise `OSError` unless there is memory for all `ranks` of this host: later the kernel would
    kill a process for it.
    """
    free, limit = available()
    if size * ranks > free:
        each = f" by each of {ranks} ranks of this host" if ranks > 1 else ""
        under = f" under the limit of {limit:,} of their container or job" if limit else ""
        raise OSError(f"{size:,} bytes requested{each}, {free:,} available{under}")


def available() -> tuple[int, int]:
    """The bytes that processes of this host can still allocate, and the limit of the control group
    that leaves no more; 0 where that is the host's memory.
    """
    groups = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
    free, limit = min(_available(Path("/proc/meminfo"), *groups))
    return max(free, 0), limit


def _available(meminfo: Path, groups: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """The available bytes and the limit of this host, and of each control group of this process, of
    either version.
    """
    host = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    yield host, 0
    for limit, used, statistics in _limits(read_text(groups), folder):
        if (most := read_text(limit)).isdigit():
            free = int(most) - int(read_text(used, "0"))
            if free < host:
                free += _cached(read_text(statistics))
            yield free, int(most)


def _cached(statistics: str) -> int:
    """The bytes of a control group that hold contents of files: they count as used, but the kernel
    takes them back before it lacks memory.
    """
    found = dict(line.split(maxsplit=1) for line in statistics.splitlines())
    return sum(
        int(found.get(f"total_{name}", found.get(name, 0)))  # of all groups within, in version 1
        for name in ("inactive_file", "active_file")
    )


@functools.lru_cache(maxsize=4)  # each new segment asks, and paths are slow to make
def _limits(groups: str, folder: Path) -> list[tuple[Path, Path, Path]]:
    """The files with the limit, the use and the statistics of the memory of these control
    groups.
    """
    files = []
    for group, first_version in control_groups.folders(groups, folder, "memory"):
        limit, used = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if first_version
            else ("memory.max", "memory.current")
        )
        files.append((group / limit, group / used, group / "memory.stat"))
    return files
