"""A patch of Triton's interpreter for several threads: lanes, and ranks of one process, run kernels
concurrently.

The interpreter keeps the index of a program in its grid in one variable, and unpatches the language
whenever a kernel ends. With this patch each thread has its own index, and the language is patched
once for all kernels: patching reads the names of a kernel's module, which fails while another
thread's first kernel of that module adds the interpreter's names to them. Kernels are parsed in one
thread at a time: Python 3.11 takes the depth of one thread's parser for that of another, and raises
`SystemError`. It also corrects products of bfloat16, whose bits the interpreter multiplies as
integers.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from weft.gpu.kernels.symmetric import peer_pointer

_own = threading.local()


def _of_thread(name: str) -> property:
    """A thread-local attribute."""
    return property(lambda _: getattr(_own, name), lambda _, value: setattr(_own, name, value))


class _PerThread(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """The interpreter's state."""

    grid_idx = _of_thread("grid_idx")
    grid_dim = _of_thread("grid_dim")

    def create_dot(self, a: Any, b: Any, *others: Any) -> Any:
        return super().create_dot(_widened(a), _widened(b), *others)


def _widened(factor: Any) -> Any:
    """A factor in float32 if it is in bfloat16."""
    if factor.dtype.scalar != tl.bfloat16:
        return factor
    return interpreter.TensorHandle(
        (factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32
    )


@cache
def serve_threads() -> None:
    """Let kernels run on several threads from now on."""
    interpreter.interpreter_builder.__class__ = _PerThread
    rewrite, turn = interpreter.FunctionRewriter.rewrite_ast, threading.Lock()

    def in_turn(self: Any) -> Any:
        with turn:
            return rewrite(self)

    interpreter.FunctionRewriter.rewrite_ast = in_turn
    # kernels import the language, and the language's own functions its core
    for function in (peer_pointer, tl.cdiv):
        scope = interpreter._patch_lang(function.fn)
    interpreter._patch_lang = lambda _: type(scope)()  # changes nothing, so restores nothing
