"""Whether ranks read each other's ordinary tensors through the kernel, where they lie: one copy,
where staging makes two.

That pays where tensors lie in huge pages, of which the kernel has few to look up. Linux gives them
to all large tensors where ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``always``; where it
says ``madvise``, torch asks for them if ``THP_MEM_ALLOC_ENABLE=1`` is set. ``WEFT_READ_PEERS=0``
has tensors staged everywhere. Ranks find it out when they make a world.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import weft._native as _native

LEAST_BYTES = 2 << 20
"""What is smaller does not lie in a huge page."""

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NUMBER = (
    ctypes.c_uint64()
)  # for peers to read: at random, so that no other process of any container has the same


def _draw() -> None:
    _NUMBER.value = secrets.randbits(63)


_draw()
os.register_at_fork(after_in_child=_draw)


def huge_pages() -> bool:
    """Whether large tensors of this process lie in huge pages, as far as the kernel has some."""
    if os.environ.get("WEFT_READ_PEERS") == "0":
        return False
    try:
        policy = _ENABLED.read_text()
    except OSError:
        return False
    return "[always]" in policy or (
        "[madvise]" in policy and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    )


class Probe(NamedTuple):
    """A process's number, and where peers find it in its memory; 0 if reading its tensors there
    would not pay.
    """

    number: int = 0
    address: int = 0


def probe() -> Probe:
    """This process's."""
    return Probe(_NUMBER.value, ctypes.addressof(_NUMBER) if huge_pages() else 0)


def refusal(pids: Sequence[int], probes: Sequence[Probe]) -> str:
    """Why this process stages its tensors instead of reading those of others, or nothing."""
    for rank, probe in enumerate(probes):
        if not probe.address:
            return f"tensors of rank {rank} lie in small pages"
    for pid, (number, address) in zip(pids, probes, strict=True):
        try:
            if _native.read_number(pid, address) != number:
                return f"process {pid} is another one here than where it runs"
        except OSError as error:
            return f"process {pid} cannot be read: {error.strerror}"
    return ""
