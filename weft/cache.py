"""Measurements of this machine, stored in the user's cache directory.

The directory is ``WEFT_CACHE``, by default ``weft`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Machines
and versions of weft may share it: a value for one of them is stored under a name made by
`of_this_machine`. A stored value of an unexpected form counts as missing, and so does one that
another user may have written. In place of a directory that others can write to, one of this user's
in the folder of temporary files serves.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft import trust
from weft.outside import read_text
from weft.version import __version__

PROFILE = "machine"
"""The name of the profile that ``weft calibrate`` stores, per machine."""

_NAMES = (
    ("CPU implementer", "CPU variant", "CPU part"),
    ("model name", "cpu family", "model"),
)
"""The lines of /proc/cpuinfo that identify a processor, on Arm and on x86."""

_log = logging.getLogger("weft")
_WRITING = 1.0  # seconds that another process may take to write a file

Fits = Callable[[Any], object]
"""A test whether a stored value has the expected form: false or an error if it has not."""


def directory() -> Path | None:
    """The cache directory, which only this user, or root, can write to; None without a home
    directory, where nothing is stored.
    """
    if folder := os.environ.get("WEFT_CACHE"):
        return _safe(Path(folder))
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return None
    return _safe(home / "weft")


@functools.cache
def _safe(folder: Path) -> Path | None:
    """The folder, or one in its place if others can write to it, with a warning."""
    if not (why := trust.rejection(folder)):
        return folder
    own = Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
    found = None if trust.rejection(own) else own
    _log.warning(
        "%s is no safe cache directory (%s): %s; set WEFT_CACHE to a folder of yours",
        folder,
        why,
        f"{found} is used" if found else "nothing is stored",
    )
    return found


def of_this_machine(name: str, and_also: str = "") -> str:
    """`name` with a digest of this machine's processor, weft's version and `and_also`."""
    key = f"{processor()} weft {__version__} {and_also}"
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@functools.cache
def processor() -> str:
    """An identifier of this machine's processor."""
    try:
        return _named(Path("/proc/cpuinfo").read_text())
    except OSError:
        return platform.processor()


def _named(cpuinfo: str) -> str:
    """Model, family and model number of the first processor; on Arm, where the kernel has none of
    them, implementer, variant and part.
    """
    first, _, _ = cpuinfo.partition("\n\n")
    lines = dict(line.split("\t", 1) for line in first.splitlines() if "\t" in line)
    for keys in _NAMES:
        if not lines.keys().isdisjoint(keys):
            return ":".join(lines.get(key, "").strip(" \t:") for key in keys)
    return platform.machine()


def stored(name: str, fits: Fits) -> Any:
    """The JSON value stored under `name`, None if there is none that `fits`."""
    try:
        path = _path(name)
        trust.check_file(path)
        value = json.loads(read_text(path))
        return value if fits(value) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def store(name: str, value: Any) -> None:
    """Store a JSON value under `name`, replacing an earlier one. Raises `OSError` without a
    writable directory.
    """
    written = _written(value)
    try:
        os.replace(written, _path(name))
    except BaseException:
        os.unlink(written)
        raise


def remove(name: str) -> None:
    """Remove the value stored under `name`, if there is one."""
    if (path := file(name)) is not None:
        path.unlink(missing_ok=True)


def file(name: str) -> Path | None:
    """The file of the value stored under `name`; None without a home directory."""
    return None if directory() is None else _path(name)


def check() -> None:
    """Raise `OSError` without a writable directory."""
    os.unlink(_written(None))


def once(name: str, measure: Callable[[], Any], fits: Fits) -> Any:
    """The JSON value stored under `name`, measured and stored first if there is none that `fits`.

    Of several processes that measure at the same time the first to finish wins, and all return its
    value, so ranks agree. Without a writable directory each process returns its own measurement.
    """
    was_there = directory() is not None and _path(name).exists()
    if (found := stored(name, fits)) is not None:
        return found
    if was_there:
        with contextlib.suppress(OSError):
            _path(name).unlink()  # a value of another form
    value = measure()
    with contextlib.suppress(OSError):
        written = _written(value)
        try:
            _publish(written, _path(name))
        finally:
            os.unlink(written)
        start = time.monotonic()
        while (found := stored(name, fits)) is None and time.monotonic() < start + _WRITING:
            time.sleep(0.01)
    return value if found is None else found


def _publish(written: str, path: Path) -> None:
    """Make a file visible at `path`, unless another process was first."""
    try:
        os.link(written, path)  # a rename would replace the file of another process
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            file.write(Path(written).read_text())


def _path(name: str) -> Path:
    return _directory() / f"{name}.json"


def _directory() -> Path:
    if (found := directory()) is None:
        raise FileNotFoundError(
            "there is no home directory to store measurements in: set WEFT_CACHE to a directory"
        )
    return found


def _written(value: Any) -> str:
    """The name of a new file in the directory that contains a JSON value."""
    trust.make(_directory())
    with tempfile.NamedTemporaryFile("w", dir=_directory(), suffix=".tmp", delete=False) as file:
        try:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:  # the disk is full
            os.unlink(file.name)
            raise
    return file.name
