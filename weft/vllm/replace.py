"""Methods of vLLM that the plug-in replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace(owner: type, name: str, wrapper: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a method by what `wrapper` makes of it, once: vLLM may load plug-ins again."""
    method = getattr(owner, name)
    if not hasattr(method, "__wrapped__"):
        setattr(owner, name, functools.wraps(method)(wrapper(method)))
