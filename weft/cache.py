"""What is measured once per machine is remembered in the user's cache directory.

The directory is ``WEFT_CACHE``, by default ``weft`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Machines
may share it, as they do with a home directory, and versions of weft: what is true of one of each
only is stored under a name that is `of_this_machine`. What was stored and is not as expected, since
somebody has changed it, counts as not there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.version import __version__

PROFILE = "machine"
"""The name, on each machine, of the profile that ``weft calibrate`` leaves."""


_WRITING = 1.0  # seconds that another process may take to write what it has begun to store

Fits = Callable[[Any], object]
"""Whether a stored value is as expected: true if it is, else false or an error of whoever finds
something else in it.
"""


def directory() -> Path | None:
    """Where weft remembers things; None if it does not, for want of a home directory."""
    if given := os.environ.get("WEFT_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return None


def of_this_machine(name: str, and_also: str = "") -> str:
    """`name`, and a digest of this machine's processor, weft's version and what else it depends on."""
    return f"{name}-{hashlib.sha256(f'{processor()} weft {__version__} {and_also}'.encode()).hexdigest()[:16]}"


@functools.cache
def processor() -> str:
    """Model, family and model number of this machine's processor."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    lines = dict(line.split("\t", 1) for line in first.splitlines() if "\t" in line)
    return ":".join(
        lines.get(key, "").strip(" \t:") for key in ("model name", "cpu family", "model")
    )


def stored(name: str, fits: Fits) -> Any:
    """The JSON value stored under `name`, None if there is none that `fits`."""
    try:
        value = json.loads(_path(name).read_text())
        return value if fits(value) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def store(name: str, value: Any) -> None:
    """Store a JSON value under `name` in place of what was there. Raises `OSError` without a
    writable directory.
    """
    os.replace(_written(value), _path(name))


def check() -> None:
    """Raise `OSError` without a writable directory."""
    os.unlink(_written(None))


def once(name: str, measure: Callable[[], Any], fits: Fits) -> Any:
    """The JSON value stored under `name`, measured if there is none yet that `fits`.

    Of several processes that measure at the same time the first to finish wins, and all return its
    value, so ranks agree. Without a writable directory each process keeps what it measured.
    """
    was_there = directory() is not None and _path(name).exists()
    if (found := stored(name, fits)) is not None:
        return found
    if was_there:
        with contextlib.suppress(OSError):
            _path(name).unlink()  # it does not fit
    value = measure()
    with contextlib.suppress(OSError):
        written = _written(value)
        try:
            _publish(written, _path(name))
        finally:
            os.unlink(written)
        begun = time.monotonic()
        while (found := stored(name, fits)) is None and time.monotonic() < begun + _WRITING:
            time.sleep(0.01)
    return value if found is None else found


def _publish(written: str, path: Path) -> None:
    """Let the file be found at `path` unless another one is."""
    try:
        os.link(
            written, path
        )  # unlike a rename, a link does not replace what another process stored
    except FileExistsError:
        pass
    except OSError:  # there are no links on this file system
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            file.write(Path(written).read_text())


def _path(name: str) -> Path:
    return _directory() / f"{name}.json"


def _directory() -> Path:
    if (found := directory()) is None:
        raise FileNotFoundError(
            "there is no home directory to remember anything in: set WEFT_CACHE to a directory"
        )
    return found


def _written(value: Any) -> str:
    """A new file in the directory, with a JSON value in it."""
    _directory().mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=_directory(), suffix=".tmp", delete=False) as file:
        json.dump(value, file, indent=1)
    return file.name
