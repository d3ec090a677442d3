"""`backend.cpp`, compiled against the torch that is installed: once for each torch and user."""

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
from types import ModuleType
from typing import Any

import torch

from weft import cache, trust

LIMIT = 600.0
"""Seconds that compiling, or waiting for a process that compiles, may take: it takes half a
minute."""

_log = logging.getLogger("weft")
_SOURCE = Path(__file__).with_name("backend.cpp")
_HEADER = _SOURCE.with_name("message_calls.h")
_MODULE = "weft_backend"


@functools.cache
def backend() -> Any:
    """The module of the backend, compiled first if that has not been done; None, with a warning,
    if it cannot be.
    """
    try:
        return _imported(_compiled())
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "weft's backend could not be compiled for torch %s (%s): torch's tracers and tools do "
            "not see weft's calls, and other backends cannot be combined with it",
            torch.__version__,
            words.strip()[-2000:],
        )
        return None


def _imported(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(library))
    spec = importlib.util.spec_from_file_location(_MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


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
    if (library := _whole(folder, name)) is None:
        with _alone(folder / "lock"):
            library = _whole(folder, name) or _compile(folder, name)
    return library


def _whole(folder: Path, name: str) -> Path | None:
    """The library of this name, if there is one as it was compiled: one that was cut off would kill
    the process that loads it.
    """
    for file in sorted(folder.glob(f"{glob.escape(name)}-*.so")):
        with contextlib.suppress(OSError):
            trust.check_file(file)
            if file.name == f"{name}-{_digest(file)}.so":
                return file
    return None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """A part of the program that one process at a time runs; a process that ends leaves it."""
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
        raise FileNotFoundError("there is no C++ compiler: install g++, or set CXX")
    _log.warning(
        "compiling weft's backend for torch %s: half a minute, once for each torch and user",
        torch.__version__,
    )
    start = time.monotonic()
    home = Path(torch.__file__).parent
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as unnamed:
        made = Path(unnamed.name)
    command = [
        *compiler.split(),
        *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
        *("-isystem", sysconfig.get_paths()["include"], "-isystem", f"{home}/include"),
        *("-isystem", f"{home}/include/torch/csrc/api/include"),
        *(str(_SOURCE), "-o", str(made)),
        # found by their names, since torch has loaded them
        *(f"-L{home}/lib", "-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT)
        made.chmod(0o755)  # whatever the umask
        with open(made, "rb") as written:
            os.fsync(written.fileno())
        library = folder / f"{name}-{_digest(made)}.so"
        made.rename(library)
    finally:
        made.unlink(missing_ok=True)
    for other in folder.glob(f"{glob.escape(name)}-*.so"):
        if other != library:  # it is not whole
            with contextlib.suppress(OSError):
                other.unlink()
    _log.info("compiled weft's backend in %.0f s: %s", time.monotonic() - start, library)
    return library
