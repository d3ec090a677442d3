"""Places in the user's program, looked up when an error is made."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

_LIBRARIES = {"weft", "torch", "typing_extensions", *sys.stdlib_module_names}


def here() -> str:
    """The file and line at which the user's program is in this thread's call, such as
    ``train.py:12``; for a thread of a library, at which the main thread is. "" if there is none.
    """
    main = threading.main_thread().ident
    return of_frame(sys._getframe()) or of_frame(sys._current_frames().get(main or 0))


def of_frame(frame: FrameType | None) -> str:
    """The innermost place of the user's program on a stack, "" if there is none."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            return f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _relative(file: str) -> str:
    """A file by its path from the working directory, if it is below that."""
    try:
        found = os.path.relpath(file)
    except (OSError, ValueError):  # there is no working directory any more
        return file
    return file if found.startswith(os.pardir) else found
