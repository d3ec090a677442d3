"""What a forked child does with its parent's objects that have threads: it has the objects, and not
the threads.

To destroy one would wait for its threads for ever. So it is kept to the end of the process, when
its memory goes at once.
"""

from __future__ import annotations

import ctypes
import os
import weakref


def keep(thing: object) -> None:
    """Never destroy this in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_in_children(thing: object) -> None:
    """Never destroy this in a process that is forked from this one while it is there."""
    found = weakref.ref(thing)

    def inherited() -> None:
        if (here := found()) is not None:
            keep(here)

    os.register_at_fork(after_in_child=inherited)
