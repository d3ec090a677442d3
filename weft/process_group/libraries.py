"""The compiled libraries of `backend.cpp`. The name of a file says what it was compiled for, and
ends with a digest of its contents: one that was cut off would kill the process that loads it.

weft's wheels are made where torch is not installed, so this does not import it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).with_name("backends")
"""The libraries that a wheel of weft brings, one for each torch that it was made for."""

_CLASSES = (
    "ATen/core/ivalue_inl.h",
    "c10/core/StorageImpl.h",
    "c10/core/TensorImpl.h",
    "c10/util/intrusive_ptr.h",
    "pybind11/detail/internals.h",
    "torch/csrc/distributed/c10d/Backend.hpp",
    "torch/csrc/distributed/c10d/Types.hpp",
    "torch/csrc/distributed/c10d/Window.hpp",  # from 2.14 on
    "torch/csrc/distributed/c10d/Work.hpp",
)
"""The headers of the classes whose form in memory a library relies on."""


def name(version: str, headers: Path, python: str) -> str:
    """The name of a library for a torch of this version, with these headers, and a Python, which is
    given by its SOABI: releases of one minor version have the same, but builds of others than
    torch's makers may differ from them.
    """
    found = (headers / each for each in _CLASSES)
    contents = b"".join(file.read_bytes() for file in found if file.exists())
    digest = hashlib.sha256(contents).hexdigest()[:16]
    return f"backend-{minor(version)}-{digest}-{python}"


def minor(version: str) -> str:
    """The minor version of a torch, as 2.14."""
    return ".".join(version.split(".")[:2])


def versions(python: str) -> list[str]:
    """The minor versions of torch that the wheel has libraries for, for this Python."""
    names = (file.name.split("-", 2) for file in FOLDER.glob("backend-*.so"))
    found = {number for _, number, rest in names if f"-{python}-" in rest}
    return sorted(found, key=lambda number: [*map(int, number.split("."))])


def keep(library: Path, folder: Path, name: str) -> Path:
    """Move a library that is whole into a folder, where it gets its name."""
    return library.rename(folder / f"{name}-{_digest(library)}.so")


def whole(folder: Path, name: str) -> Iterator[Path]:
    """The libraries of this name that are as they were compiled."""
    for file in sorted(folder.glob(f"{glob.escape(name)}-*.so")):
        with contextlib.suppress(OSError):
            if file.name == f"{name}-{_digest(file)}.so":
                yield file


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]
