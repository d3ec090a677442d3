"""What is measured once per machine is remembered in the user's cache directory.

The directory is ``WEFT_CACHE``, by default ``weft`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def directory() -> Path:
    """Where weft remembers things."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("WEFT_CACHE") or Path(home) / "weft")


def stored(name: str) -> Any:
    """The JSON value stored under `name`, None if there is none."""
    try:
        return json.loads((directory() / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def store(name: str, value: Any) -> None:
    """Store a JSON value under `name` in place of what was there. Raises `OSError` without a writable directory."""
    directory().mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory(), suffix=".tmp", delete=False) as file:
        json.dump(value, file, indent=1)
    os.replace(file.name, directory() / f"{name}.json")


def once(name: str, measure: Callable[[], Any]) -> Any:
    """The JSON value stored under `name`, measured if there is none yet.

    Of several processes that measure at the same time the first to finish wins, and all return its value, so ranks agree.
    Without a writable directory each process keeps what it measured.
    """
    path = directory() / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        value = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(value, file, indent=1)
        try:
            os.link(file.name, path)  # unlike a rename, a link does not replace what another process stored
        finally:
            os.unlink(file.name)
    except OSError:
        pass
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return value
