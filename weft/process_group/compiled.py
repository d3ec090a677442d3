"""`backend.cpp` as a library for the torch that is installed: the one that weft's wheel brings, or
else compiled, once for each torch and user.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weft import cache, trust
from weft.errors import WeftError
from weft.process_group import libraries

LIMIT = 600.0
"""Seconds that compiling, or waiting for a process that compiles, may take: it takes half a
minute."""

_log = logging.getLogger("weft")
_SOURCE = Path(__file__).with_name("backend.cpp")
_HEADER = _SOURCE.with_name("message_calls.h")
_MODULE = "weft_backend"


@functools.cache
def backend() -> Any:
    """The module of the backend. Raises `WeftError` if weft brings none for the torch that is
    installed, and it cannot be compiled.
    """
    python = sysconfig.get_config_var("SOABI")
    name = libraries.name(torch.__version__, _headers(), python)
    for library in libraries.whole(libraries.FOLDER, name):
        try:
            return _imported(library)
        except (ImportError, TypeError) as error:
            _log.warning("%s does not serve torch %s: %s", library, torch.__version__, error)
    try:
        return _imported(_compiled())
    except (OSError, ImportError, TypeError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        known = libraries.versions(python)
        brought = f"those for torch {', '.join(known)}" if known else "none"
        raise WeftError(
            f"weft has no backend for torch {torch.__version__} with this Python (it brings "
            f"{brought}), and compiling one failed: {words.strip()[-2000:]}. Install a compiler "
            "for C++20, such as g++, or set CXX to one, or install a wheel of weft that brings one "
            "for this torch"
        ) from error


def _imported(library: Path) -> Any:
    """The module in a library, once its classes are verified to match this torch."""
    name = f"{library}.{_MODULE}"  # pybind11 keeps one module of a name
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    unconnected = module.make(None, None, 1, 2, 1.0)
    if (unconnected.name(), unconnected.rank(), unconnected.size()) != ("weft", 1, 2):
        raise ImportError("its classes are others than torch's")
    return module


def _headers() -> Path:
    return Path(torch.__file__).parent / "include"


def _compiled() -> Path:
    """The compiled library. One process compiles it, and others wait for that."""
    folder = cache.directory()
    if folder is None:
        raise FileNotFoundError("there is no folder to store it in: set WEFT_CACHE")
    folder /= "torch"
    parts = torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")
    sources = _SOURCE.read_bytes() + _HEADER.read_bytes()
    digest = hashlib.sha256(sources + repr(parts).encode()).hexdigest()[:16]
    name = f"backend-{torch.__version__}-{digest}"
    trust.make(folder)
    if (library := _stored(folder, name)) is None:
        with _alone(folder / "lock"):
            library = _stored(folder, name) or _compile(folder, name)
    return library


def _stored(folder: Path, name: str) -> Path | None:
    """The library of this name in the cache, if no other user can have written it."""
    for file in libraries.whole(folder, name):
        with contextlib.suppress(OSError):
            trust.check_file(file)
            return file
    return None


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """A critical section between processes; a process that ends leaves it."""
    deadline = time.monotonic() + LIMIT
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has locked {file} for {LIMIT:g} s, to compile it"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _compile(folder: Path, name: str) -> Path:
    """The library, compiled now: it gets its name, which ends with its digest, once it is whole."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    _log.warning(
        "compiling weft's backend for torch %s: half a minute, once for each torch and user",
        torch.__version__,
    )
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as unnamed:
        made = Path(unnamed.name)
    command = [
        *compiler.split(),
        *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
        *("-isystem", sysconfig.get_paths()["include"], "-isystem", str(_headers())),
        *("-isystem", f"{_headers()}/torch/csrc/api/include"),
        *(str(_SOURCE), "-o", str(made)),
        # found by their names, since torch has loaded them
        *(f"-L{_headers().with_name('lib')}", "-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT)
        made.chmod(0o755)  # whatever the umask
        with open(made, "rb") as written:
            os.fsync(written.fileno())
        library = libraries.keep(made, folder, name)
    finally:
        made.unlink(missing_ok=True)
    for other in folder.glob(f"{glob.escape(name)}-*.so"):
        if other != library:  # it is not whole
            with contextlib.suppress(OSError):
                other.unlink()
    _log.info("compiled weft's backend in %.0f s: %s", time.monotonic() - start, library)
    return library
