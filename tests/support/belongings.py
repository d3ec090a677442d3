"""What a process has that a closed world must not leave behind: threads, open files and mappings of symmetric memory."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path


def belongings() -> dict[str, list[str]]:
    """This process's threads, open files and mappings of symmetric memory."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weft" in line]
    return {"threads": os.listdir("/proc/self/task"), "files": [f for f in files if "/proc/" not in f], "mappings": maps}


def kept(before: dict[str, list[str]], excused: bool = False) -> list[str]:
    """What is there and was not before, once threads have had a moment to end.

    Threads and files are `excused` where a compiler's own stay.
    """
    deadline = time.monotonic() + 10
    while True:
        gc.collect()  # what a thread held on to as it ended, too
        now = belongings()
        found = [f"{kind}: {one}" for kind in now for one in set(now[kind]) - set(before[kind])]
        if excused:
            found = [one for one in found if one.startswith("mappings")]
        if not found or time.monotonic() > deadline:
            own = threading.get_ident()
            return found + [
                "".join(traceback.format_stack(at)) for one, at in sys._current_frames().items() if found and one != own
            ]
        time.sleep(0.01)
