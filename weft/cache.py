"""What is measured once per machine is remembered in the user's cache directory.

The directory is ``WEFT_CACHE``, by default ``weft`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Machines may share it, as they do
with a home directory: what is true of one processor only is stored under a name that is `of_this_machine`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROFILE = "machine"
"""The name, on each machine, of the profile that ``weft calibrate`` leaves."""


def directory() -> Path:
    """Where weft remembers things."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("WEFT_CACHE") or f"{home}/weft")


def of_this_machine(name: str, and_also: str = "") -> str:
    """`name`, and a digest of this machine's processor and of what else it depends on."""
    return f"{name}-{hashlib.sha256(f'{processor()} {and_also}'.encode()).hexdigest()[:16]}"


@functools.cache
def processor() -> str:
    """Model, family and model number of this machine's processor."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    lines = dict(line.split("\t", 1) for line in first.splitlines() if "\t" in line)
    return ":".join(lines.get(key, "").strip(" \t:") for key in ("model name", "cpu family", "model"))


def stored(name: str) -> Any:
    """The JSON value stored under `name`, None if there is none."""
    try:
        return json.loads(_path(name).read_text())
    except (OSError, ValueError):
        return None


def store(name: str, value: Any) -> None:
    """Store a JSON value under `name` in place of what was there. Raises `OSError` without a writable directory."""
    os.replace(_written(value), _path(name))


def once(name: str, measure: Callable[[], Any]) -> Any:
    """The JSON value stored under `name`, measured if there is none yet.

    Of several processes that measure at the same time the first to finish wins, and all return its value, so ranks agree.
    Without a writable directory each process keeps what it measured.
    """
    if (found := stored(name)) is not None:
        return found
    value = measure()
    with contextlib.suppress(OSError):
        written = _written(value)
        try:
            os.link(written, _path(name))  # unlike a rename, a link does not replace what another process stored
        finally:
            os.unlink(written)
    return stored(name) or value


def _path(name: str) -> Path:
    return directory() / f"{name}.json"


def _written(value: Any) -> str:
    """A new file in the directory, with a JSON value in it."""
    directory().mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory(), suffix=".tmp", delete=False) as file:
        json.dump(value, file, indent=1)
    return file.name
