"""The memory that a host has for worlds, and its /dev/shm, which other libraries need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weft.world import memory

if TYPE_CHECKING:
    from weft.doctor.cores import RankReport

_LEAST = 64 << 20  # bytes for each rank, below which they are reported
_CONTAINERS = 64 << 20  # bytes of /dev/shm, at most, that a container has by default
_SMALL = 1 << 30  # bytes of /dev/shm, below which other libraries may lack some

MORE_SHARED_MEMORY = (
    "docker run --ipc host or --shm-size 8g; in Kubernetes an emptyDir of medium Memory, mounted "
    "on /dev/shm; enroot (pyxis) and Apptainer have the host's"
)
"""How a container is given more of /dev/shm."""


MORE_MEMORY = (
    "give more (docker run --memory, resources.limits.memory in Kubernetes, sbatch --mem), or "
    "start fewer ranks"
)
"""What a lack of memory asks for."""


class Memory(NamedTuple):
    """Bytes that processes of a host can still allocate, the limit of their container or job if
    that is what leaves no more, and the size of /dev/shm.
    """

    available: int
    limit: int
    shared: int


def here() -> Memory:
    """The memory of this host or container."""
    try:
        found = os.statvfs("/dev/shm")
        shared = found.f_blocks * found.f_frsize
    except OSError:  # there is none
        shared = 0
    return Memory(*memory.available(), shared)


def sentence(on: Sequence[RankReport]) -> str:
    """The memory of a host, as a sentence."""
    found = _scarcest(on)
    return (
        f"{on[0].name} has {_size(found.available)} of memory for worlds{_under(found)}. "
        f"Its /dev/shm, where weft has nothing, has {_size(found.shared)}."
    )


def problems(on: Sequence[RankReport]) -> Iterator[str]:
    """A description of a lack of memory on a host."""
    found = _scarcest(on)
    if found.available < _LEAST * len(on):
        yield (
            f"{on[0].name} has {_size(found.available)} of memory for {len(on)} rank(s)"
            f"{_under(found)}; a world takes about 2 MiB a rank, and as much as its largest call: "
            f"{MORE_MEMORY}"
        )


def notes(on: Sequence[RankReport]) -> Iterator[str]:
    """A description of a /dev/shm that is small for libraries beside weft."""
    shared = min(report.memory.shared for report in on)
    if shared < _SMALL:
        why = ", the default of containers" if 0 < shared <= _CONTAINERS else ""
        yield (
            f"/dev/shm of {on[0].name} has {_size(shared)}{why}. weft needs none of it, but the "
            "workers of torch's DataLoader die of a bus error when it is full, and Ray and vLLM "
            f"need it too. To have more: {MORE_SHARED_MEMORY}"
        )


def _scarcest(on: Sequence[RankReport]) -> Memory:
    """The least memory of a host's ranks, which may be in several containers."""
    return min(report.memory for report in on)


def _under(found: Memory) -> str:
    if not found.limit:
        return ""
    return f" under the limit of {_size(found.limit)} of its container or job"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 10 << 30 else f"{count >> 20:,} MiB"
