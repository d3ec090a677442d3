"""Whether ranks read each other's ordinary tensors through the kernel, where they lie: one copy, where staging makes two.

That pays where tensors lie in huge pages, of which the kernel has few to look up. Linux gives them to all large tensors where
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``always``; where it says ``madvise``, torch asks for them if
``THP_MEM_ALLOC_ENABLE=1`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from weft import _native
from weft.engines.engine import Engine
from weft.schedules.all_gather import eager

LEAST_BYTES = 2 << 20
"""What is smaller does not lie in a huge page."""

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages() -> bool:
    """Whether large tensors of this process lie in huge pages, as far as the kernel has some."""
    try:
        policy = _ENABLED.read_text()
    except OSError:
        return False
    return "[always]" in policy or ("[madvise]" in policy and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1")


def refusal(pids: Sequence[int], probes: Sequence[int]) -> str:
    """Why this process may not read the memory of others, each of which has its number at the address of its probe; or nothing."""
    for pid, probe in zip(pids, probes, strict=True):
        try:
            if _native.read_number(pid, probe) != pid:
                return f"process {pid} is another one here than where it runs"
        except OSError as error:
            return f"process {pid} cannot be read: {error.strerror}"
    return ""


def trouble(engine: Engine) -> str:
    """Why this rank stages tensors instead of reading them in peers' memory; nothing if it reads them. Collective."""
    probe = torch.tensor([os.getpid()])
    told = _everyones(engine, [probe.data_ptr(), huge_pages()])
    small = [rank for rank, (_, huge) in enumerate(told) if not huge]
    why = f"tensors of rank {small[0]} lie in small pages" if small else refusal(engine.world.pids, [place for place, _ in told])
    _everyones(engine, [0])  # until all have read it the probe must live
    return why


def agreed(engine: Engine) -> bool:
    """Whether all ranks of a world read tensors in peers' memory. Collective."""
    return not any(staged for (staged,) in _everyones(engine, [bool(trouble(engine))]))


def _everyones(engine: Engine, own: Sequence[int]) -> list[list[int]]:
    """What every rank has."""
    ranks = engine.world.ranks
    gathered = torch.empty(ranks, len(own), dtype=torch.int64)
    engine.execute(
        eager(engine.world.levels), {"a": torch.tensor([own], dtype=torch.int64), "gathered": gathered}, rows=[1] * ranks
    )
    found: list[list[int]] = gathered.tolist()
    return found
