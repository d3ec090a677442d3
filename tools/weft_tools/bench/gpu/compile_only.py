"""Kernels compiled for a GPU that need not be there, as they are launched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from weft.gpu import backend


class _Driver:
    """A driver of an sm_90 for compilation alone."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def compile_only() -> Iterator[None]:
    """Meanwhile launches of ranks that are threads on a CPU compile their kernels for an sm_90, one
    at a time, and do nothing else: the results of operators are undefined. Worlds multiply by
    kernels without the interpreter.
    """
    run, one = JITFunction.run, threading.Lock()

    def compiled(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        with one:
            return run(self, *args, warmup=True, **options)

    with (
        patch.object(JITFunction, "run", compiled),
        patch.object(triton.runtime.driver, "_active", _Driver()),
        patch.object(backend, "check_products", lambda *_: None),
    ):
        yield
