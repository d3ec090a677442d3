"""Checks of arguments that need no world: plain tensors and time limits."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
_REMEDIES = {
    "DTensor": "to_local()",
    "AsyncCollectiveTensor": "wait()",
    "NestedTensor": "to_padded_tensor(0.0)",
}
"""The calls that convert torch's own subclasses to plain tensors."""


@cache
def name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_tensor(tensor: object, argument: str) -> None:
    """Raise `TypeError` or `ValueError` unless `tensor` is plain: its memory holds its elements.

    Subclasses other than `torch.nn.Parameter` are refused, even with plain memory, since they may
    redefine their elements. Sparse and nested tensors are refused too, and conjugate and negative
    views, which are computed only when they are read.
    """
    if type(tensor) not in PLAIN or not isinstance(tensor, Tensor):
        raise TypeError(_of_another_type(tensor, argument))
    if tensor.is_nested:
        raise ValueError(
            f"{argument} is a nested tensor: pass {argument}.to_padded_tensor(0.0), or each "
            "part separately"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{argument} has the layout {tensor.layout}: pass {argument}.to_dense()")
    if tensor.is_neg() or tensor.is_conj():
        view = "negative" if tensor.is_neg() else "conjugate"
        raise ValueError(
            f"{argument} is a {view} view: pass {argument}.resolve_conj().resolve_neg()"
        )


def _of_another_type(value: object, argument: str) -> str:
    kind = type(value).__name__
    if not isinstance(value, Tensor):
        hint = (
            f": pass torch.as_tensor({argument})"
            if isinstance(value, list | tuple) or hasattr(value, "__array__")
            else ""
        )
        return f"{argument} must be a tensor; got {kind}{hint}"
    if kind in _REMEDIES:
        remedy = f"{argument}.{_REMEDIES[kind]}"
    elif type(
        value
    ).__torch_dispatch__ is Tensor.__torch_dispatch__ and not torch.nn.parameter.is_lazy(value):
        remedy = f"{argument}.as_subclass(torch.Tensor)"
    else:
        remedy = "a plain tensor of its elements"
    return f"{argument} must be a plain torch.Tensor; got the subclass {kind}: pass {remedy}"


def switched_on(variable: str) -> bool:
    """Whether an environment variable is not 0. Raises `ValueError` unless it is 0, 1 or unset."""
    value = os.environ.get(variable) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is 0 or 1; got {value!r}")
    return value == "1"


LONGEST = 1e6
"""Seconds of the longest time limit: clocks must not overflow."""


def limited(timeout: float) -> float:
    """A time limit of at most `LONGEST`. Raises `ValueError` unless `timeout` is a positive number
    of seconds.
    """
    check_timeout(timeout)
    return min(float(timeout), LONGEST)


def check_timeout(timeout: float | None) -> None:
    """Raise `ValueError` unless `timeout` is None or a positive number of seconds."""
    try:
        if timeout is None or timeout > 0:
            return
    except TypeError:  # no number
        pass
    raise ValueError(f"timeout must be a positive number of seconds; got {timeout!r}")
