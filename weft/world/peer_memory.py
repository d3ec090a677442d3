"""Whether ranks read each other's ordinary tensors through the kernel, where they lie: one copy, where staging makes two.

That pays where tensors lie in huge pages, of which the kernel has few to look up. Linux gives them to all large tensors where
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``always``; where it says ``madvise``, torch asks for them if
``THP_MEM_ALLOC_ENABLE=1`` is set. ``WEFT_READ_PEERS=0`` has tensors staged everywhere. Ranks find it out when they make a world.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from weft import _native

LEAST_BYTES = 2 << 20
"""What is smaller does not lie in a huge page."""

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NUMBER = torch.zeros(1, dtype=torch.int64)  # for peers to read: this process's


def huge_pages() -> bool:
    """Whether large tensors of this process lie in huge pages, as far as the kernel has some."""
    if os.environ.get("WEFT_READ_PEERS") == "0":
        return False
    try:
        policy = _ENABLED.read_text()
    except OSError:
        return False
    return "[always]" in policy or ("[madvise]" in policy and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1")


def probe() -> int:
    """Where peers find this process's number in its memory; 0 if reading its tensors there would not pay."""
    _NUMBER[0] = os.getpid()
    return _NUMBER.data_ptr() if huge_pages() else 0


def refusal(pids: Sequence[int], probes: Sequence[int]) -> str:
    """Why this process stages its tensors instead of reading those of others, or nothing."""
    if 0 in probes:
        return f"tensors of rank {probes.index(0)} lie in small pages"
    for pid, probe in zip(pids, probes, strict=True):
        try:
            if _native.read_number(pid, probe) != pid:
                return f"process {pid} is another one here than where it runs"
        except OSError as error:
            return f"process {pid} cannot be read: {error.strerror}"
    return ""
