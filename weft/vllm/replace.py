"""Methods of vLLM that the plug-in replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_replaced = set[tuple[type, str]]()


def replace(owner: type, name: str, wrapper: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a method by what `wrapper` makes of it, once: vLLM may load plug-ins again."""
    if (owner, name) not in _replaced:
        _replaced.add((owner, name))
        method = getattr(owner, name)
        setattr(owner, name, functools.wraps(method)(wrapper(method)))
