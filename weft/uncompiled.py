"""Functions and methods at which torch.compile breaks its graph."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

# as `torch.compiler.disable`, which would import the compiler, and cost a microsecond in each call
_dynamo = torch._C._dynamo.eval_frame
_SKIP = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)


def uncompiled_methods(kind: Kind) -> Kind:
    """Class decorator: torch.compile does not trace these methods."""
    for member in [*vars(kind).values()]:
        if isinstance(member, FunctionType):
            uncompiled(member)
    return kind


def uncompiled(function: Function, reason: str = "") -> Function:
    """The function, which the compiler neither inlines nor compiles, nor what it calls; it gives
    the `reason` where a graph may not break.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    _dynamo.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def untraced(function: Function) -> Function:
    """A call of weft's that is no operator of torch, and so no part of a graph."""
    return uncompiled(
        function,
        f"weft.{function.__qualname__} is not traced: call it outside of compiled code, or take "
        "torch's functional collectives on a group of weft's",
    )
