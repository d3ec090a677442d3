"""A warning for a collective whose result the program drops: a likely mistake, since torch's
collectives work in place, and weft's return a new tensor. It is detected in the caller's bytecode,
whose next instruction discards the result. Only first calls, which select and plan, check it, so
repeated calls take no longer.
"""

from __future__ import annotations

import sys
import warnings
from dis import opmap
from types import FrameType

_DISCARDS, _CACHE = opmap["POP_TOP"], opmap.get("CACHE", -1)


def warn_if_dropped() -> None:
    """Warn, once for each line, if the program drops the result of the public function of weft that
    it is in; nothing if it was not called by a program's Python code.
    """
    look = getattr(sys, "_getframe", None)
    frame: FrameType | None = look() if look else None
    name = ""
    while frame is not None and (module := str(frame.f_globals.get("__name__"))):
        if module.partition(".")[0] != "weft":
            break
        name = frame.f_code.co_name if module.startswith("weft.ops.") else ""
        frame = frame.f_back
    if frame is None or not name or not _discards(frame):
        return
    out = "x" if name == "all_reduce" else "y"
    warnings.warn_explicit(
        f"the result of weft.{name} is dropped here: it is a new tensor, and the argument stays as "
        f"it is; take the result, or pass out=, as in weft.{name}(x, out={out})",
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        str(frame.f_globals.get("__name__")),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _discards(frame: FrameType) -> bool:
    """Whether a frame discards the result of the call that it is in."""
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and code[at] == _CACHE:
        at += 2
    return 0 < at < len(code) and code[at] == _DISCARDS
