"""The driver of a GPU: the variables that it reads when it starts, and streams of weft's own.

torch's streams are a pool of 32 that all parts of a program share: after 32 others a lane would get
the stream of another lane, or of the caller, and wait for itself. Streams made here belong to one
lane. They are never destroyed, since torch's allocator may still record events on them, but used
again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from functools import cache
from typing import Any

import torch

from weft.errors import WeftError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"
_NON_BLOCKING = 1  # a stream that does not wait for the default stream
_log = logging.getLogger("weft")
_unused: dict[tuple[int, bool], list[torch.cuda.ExternalStream]] = {}
_lock = threading.Lock()


def set_variables(shared: bool) -> None:
    """Set the variables that the driver reads at its start, unless they are set: as many hardware
    queues as there are, and, if ranks that are threads share a GPU, modules loaded at the start.
    """
    os.environ.setdefault(QUEUES, "32")
    if shared:
        os.environ.setdefault(LOADING, "EAGER")


def check_loading() -> None:
    """Warn if the driver loads modules when they are first used."""
    if loading_mode() == "LAZY":
        _log.warning(
            "ranks that are threads share a GPU, and the CUDA driver loads each kernel at its "
            "first launch, which may wait for kernels that wait for this rank: set %s=EAGER before "
            "anything uses CUDA, torch.cuda.is_available() too",
            LOADING,
        )


def loading_mode() -> str:
    """When CUDA's driver loads modules: ``EAGER``, at the start, ``LAZY``, when they are used, or
    ``unknown``.
    """
    mode = ctypes.c_int(0)
    try:
        code = library().cuModuleGetLoadingMode(ctypes.byref(mode))
    except (OSError, AttributeError):  # AMD's driver, or an old one
        return "unknown"
    return {1: "EAGER", 2: "LAZY"}.get(mode.value, "unknown") if code == 0 else "unknown"


def take_stream(device: torch.device, urgent: bool) -> torch.cuda.ExternalStream:
    """A stream that nothing else uses. The small kernels of an `urgent` one, of the highest
    priority, do not wait until the last wave of a product on another stream has begun.
    """
    with _lock:
        if unused := _unused.get((device.index, urgent)):
            return unused.pop()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # the device's context, if it has none yet
        return torch.cuda.ExternalStream(_new_stream(urgent), device)


def give_back(stream: torch.cuda.ExternalStream, urgent: bool) -> None:
    """Let a stream, on which nothing runs any more, be taken again."""
    with _lock:
        _unused.setdefault((stream.device.index, urgent), []).append(stream)


def _new_stream(urgent: bool) -> int:
    """The address of a new stream of the current device."""
    hip = torch.version.hip is not None
    driver = library()
    least, greatest, made = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    limits: Any = (
        driver.hipDeviceGetStreamPriorityRange if hip else driver.cuCtxGetStreamPriorityRange
    )
    make: Any = driver.hipStreamCreateWithPriority if hip else driver.cuStreamCreateWithPriority
    code = limits(ctypes.byref(least), ctypes.byref(greatest))
    priority = greatest if urgent else least
    code = code or make(ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING), priority)
    if code:
        raise WeftError(f"the GPU's driver made no stream: its error {code}")
    assert made.value is not None
    return made.value


@cache
def library() -> ctypes.CDLL:
    """The driver of NVIDIA's GPUs, or of AMD's. Raises `OSError` without one."""
    return ctypes.CDLL("libcuda.so.1" if torch.version.hip is None else "libamdhip64.so")
