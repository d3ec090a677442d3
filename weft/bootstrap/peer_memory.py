"""Reading a peer's ordinary tensors directly through the kernel: one copy, where staging makes two.

The kernel looks up each page, so whether that is faster depends on the processor, the size, and the
size of pages: collectives measure it (`weft.ops.autotune`). It always pays for tensors in huge
pages, which are few. Linux gives these to all large tensors if
``/sys/kernel/mm/transparent_hugepage/enabled`` is ``always``; if it is ``madvise``, torch requests
them with ``THP_MEM_ALLOC_ENABLE=1``. ``WEFT_READ_PEERS=0`` has all tensors staged. Ranks test
whether they can read each other when they make a world.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import weft._native as _native
from weft import variables

LEAST_BYTES = 2 << 20
"""Size of the smallest tensors that are in huge pages, that of a page."""

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NUMBER = ctypes.c_uint64()  # for peers to read: random, so different in every process


def _draw() -> None:
    _NUMBER.value = secrets.randbits(63)


_draw()
os.register_at_fork(after_in_child=_draw)


def huge_pages() -> bool:
    """Whether large tensors of this process are in huge pages, as far as the kernel has some."""
    try:
        policy = _ENABLED.read_text()
    except OSError:
        return False
    return "[always]" in policy or (
        "[madvise]" in policy and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    )


class Probe(NamedTuple):
    """A random number of a process, its address for peers to read, or 0 if they are not to read its
    memory, and whether its large tensors are in huge pages.
    """

    number: int = 0
    address: int = 0
    huge_pages: bool = False


def probe() -> Probe:
    """The probe of this process."""
    read = variables.value("WEFT_READ_PEERS") != "0"
    return Probe(_NUMBER.value, ctypes.addressof(_NUMBER) if read else 0, huge_pages())


def rejection(pids: Sequence[int], probes: Sequence[Probe]) -> str:
    """The reason why this process stages tensors instead of reading its peers' memory, or ""."""
    for rank, probe in enumerate(probes):
        if not probe.address:
            return f"rank {rank} has WEFT_READ_PEERS=0"
    for pid, (number, address, _) in zip(pids, probes, strict=True):
        try:
            if _native.read_number(pid, address) != number:
                return f"process {pid} is in another process namespace"
        except OSError as error:
            return f"process {pid} cannot be read: {error.strerror}"
    return ""
