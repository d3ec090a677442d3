"""Threads, open files and mappings of symmetric memory: a closed world must leave none behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import weft


def resources() -> dict[str, list[str]]:
    """This process's threads, open files and mappings of symmetric memory."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weft" in line
    ]
    return {
        "threads": os.listdir("/proc/self/task"),
        "files": [f for f in files if "/proc/" not in f],
        "mappings": maps,
    }


def leaked(before: dict[str, list[str]], excused: bool = False) -> list[str]:
    """The resources that this process has in addition to `before`, after threads have had time to
    end.

    Threads and files are `excused` where a compiler keeps its own.
    """
    deadline = time.monotonic() + 10
    while True:
        gc.collect()  # also frees objects that an ended thread referred to
        now = resources()
        found = [f"{kind}: {one}" for kind in now for one in set(now[kind]) - set(before[kind])]
        if excused:
            found = [one for one in found if one.startswith("mappings")]
        if not found or time.monotonic() > deadline:
            return [*found, *_reasons()] if found else []
        time.sleep(0.01)


def _reasons() -> list[str]:
    """The stacks of other threads, and the referrers of worlds that are still alive."""
    own = threading.get_ident()
    stacks = [
        "".join(traceback.format_stack(at))
        for one, at in sys._current_frames().items()
        if one != own
    ]
    worlds = [one for one in gc.get_objects() if issubclass(type(one), weft.World)]
    holders = [
        f"{one!r} is held by "
        f"{', '.join(sorted(type(holder).__name__ for holder in gc.get_referrers(one)))}"
        for one in worlds
    ]
    return stacks + holders
