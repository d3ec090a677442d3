"""`backend.cpp`, compiled against the torch that is installed: once for each torch and user."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft import cache

LIMIT = 600.0
"""Seconds that compiling, or waiting for a process that compiles, may take: it takes half a
minute."""

_log = logging.getLogger("weft")
_SOURCE = Path(__file__).with_name("backend.cpp")
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
        raise FileNotFoundError("there is no home directory to store it in: set WEFT_CACHE")
    parts = torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(parts).encode()).hexdigest()[:16]
    library = folder / "torch" / f"backend-{torch.__version__}-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _alone(library.parent):
            if not library.exists():
                _compile(library)
    return library


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A part of the program that one process at a time runs; a process that ends leaves it."""
    deadline = time.monotonic() + LIMIT
    lock = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has locked {folder} for {LIMIT:g} s, to compile it"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: install g++, or set CXX")
    _log.warning(
        "compiling weft's backend for torch %s: half a minute, once for each torch and user",
        torch.__version__,
    )
    start = time.monotonic()
    home = Path(torch.__file__).parent
    made = library.with_suffix(f".{os.getpid()}.tmp")
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
        made.rename(library)
    finally:
        made.unlink(missing_ok=True)
    _log.info("compiled weft's backend in %.0f s: %s", time.monotonic() - start, library)
