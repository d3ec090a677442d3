"""The environment variables of weft that have few values. A wrong one is rejected where weft is
first used, not where it is imported: torch imports it too, to look for its backend.
"""

from __future__ import annotations

import os

VALUES = {
    "WEFT_BIND": ("0", "1"),
    "WEFT_INSTRUCTIONS": ("baseline", "avx2", "avx512", "avx512_bf16"),
    "WEFT_LOG": ("debug", "info", "warning", "error"),
    "WEFT_READ_PEERS": ("0", "1"),
    "WEFT_REPLACES_GLOO": ("0", "1"),
    "WEFT_STORES": ("adaptive", "cached", "streaming"),
    "WEFT_TRANSPORT": ("tcp", "ucx"),
}


def value(name: str) -> str:
    """The value of a variable, "" if it is not set. Raises `ValueError` for a wrong one."""
    found = os.environ.get(name, "")
    if found and found not in VALUES[name]:
        *others, last = VALUES[name]
        raise ValueError(f"{name} is {', '.join(others)} or {last}; got {found!r}")
    return found


def check() -> None:
    """Raise `ValueError` if a variable has a wrong value."""
    for name in VALUES:
        value(name)
