"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import weft
from weft.errors import WeftError
from weft.world import World


def machine(world: World) -> dict[str, Any]:
    """The processor, the cores that the ranks may use together, the compute threads of each, and the memory in GiB."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(frozenset[int]().union(*world.cores)),
        "threads_per_rank": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
    }


def need_one_host(world: World, why: str) -> None:
    """Raise `WeftError` where ranks are on several hosts: `why` says what cannot be done there, and what would do."""
    if world.multi_host:
        raise WeftError(f"ranks are on {len(set(world.hosts))} hosts: {why}")


def versions() -> dict[str, str]:
    """Of what takes part in a measurement."""
    return {"weft": weft.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _field(path: str, name: str) -> str:
    with open(path) as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith(name)), "")
