"""The control groups of a process, of version 1 or 2 of the kernel's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def folders(groups: str, root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of a process's control groups with a controller, and of those that they are in;
    each with whether it is of version 1.

    `groups` is the text of ``/proc/self/cgroup``, and `root` ``/sys/fs/cgroup``.
    """
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            group = top / path.lstrip("/")
            for each in (group, *group.parents):
                if each.is_relative_to(top):
                    yield each, bool(controllers)
