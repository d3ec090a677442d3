"""Objects with threads in a forked child: the child inherits the objects without the threads.

A destructor would wait for the threads for ever. So the object is kept until the process ends.
"""

from __future__ import annotations

import ctypes
import os
import weakref


def keep(thing: object) -> None:
    """Never destroy an object in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_in_children(thing: object) -> None:
    """Never destroy an object in processes forked from this one during its life."""
    found = weakref.ref(thing)

    def inherited() -> None:
        if (here := found()) is not None:
            keep(here)

    os.register_at_fork(after_in_child=inherited)
