"""Calls during which native code runs Python code, in which a signal arrives once it is armed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import profiler
from torch.overrides import TorchFunctionMode

import weft
from weft import _native
from weft.checks import LOOK, PLAIN
from weft.kernels.packed import PackedWeight


class Moment:
    """When the signal comes: at the next call of `pass_by`, once it is armed."""

    def __init__(self) -> None:
        self.armed = self.came = False

    def pass_by(self) -> None:
        if self.armed:
            self.armed, self.came = False, True
            signal.raise_signal(signal.SIGUSR1)


Place = Callable[[Moment], Callable[[], Any]]
"""A call for all ranks to make again and again, with this moment in Python code that native code
calls.
"""


def hashed(moment: Moment) -> Callable[[], Any]:
    class Op(str):
        def __hash__(self) -> int:
            moment.pass_by()
            return super().__hash__()

    def call() -> Any:
        weft.all_reduce(torch.ones(3), op="max")  # compared with the next, which is then hashed
        return weft.all_reduce(torch.ones(3), op=Op("sum"))

    return call


def compared(moment: Moment) -> Callable[[], Any]:
    class Op(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            moment.pass_by()
            return str.__eq__(self, other)

    return lambda: weft.all_reduce(torch.ones(3), op=Op("sum"))


def attribute_of_a_world(moment: Moment) -> Callable[[], Any]:
    class NoWorld:
        def __getattr__(self, name: str) -> object:
            moment.pass_by()
            raise AttributeError(name)

    world: Any = NoWorld()
    return lambda: weft.all_reduce(torch.ones(3), world=world if moment.armed else None)


def attribute_of_a_tensor(moment: Moment) -> Callable[[], Any]:
    """Of a tensor that is read by its attributes, as of torch 2.9, in a mode that sees these."""

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__self__", None) is torch.Tensor.is_cpu:
                moment.pass_by()
            return function(*args, **(kwargs or {}))

    def call() -> Any:
        _native.set_tensor_access(PLAIN, None)
        try:
            with Mode():
                return weft.all_reduce(torch.ones(3))
        finally:
            _native.set_tensor_access(PLAIN, LOOK)

    return call


def attribute_of_a_weight(moment: Moment) -> Callable[[], Any]:
    class Weight(PackedWeight):
        def __getattribute__(self, name: str) -> Any:
            if name == "layout":
                moment.pass_by()
            return super().__getattribute__(name)

    weight, a = Weight(torch.ones(3, 4)), torch.ones(2, 3)
    return lambda: weft.all_gather_matmul(a, weight)


def check_of_a_weight(moment: Moment) -> Callable[[], Any]:
    class Weight(PackedWeight):
        def check_unchanged(self) -> None:
            moment.pass_by()

    weight, a = Weight(torch.ones(3, 4)), torch.ones(2, 3)
    return lambda: weft.all_gather_matmul(a, weight)


def product(moment: Moment) -> Callable[[], Any]:
    def multiply(rows: torch.Tensor, out: torch.Tensor) -> None:
        moment.pass_by()
        torch.mm(rows, torch.ones(3, 4), out=out)

    weight, a = weft.weight(multiply, (3, 4), torch.float32), torch.ones(2, 3)
    return lambda: weft.all_gather_matmul(a, weight, algorithm="direct")


def end_of_a_range(moment: Moment) -> Callable[[], Any]:
    """As a profiler ends the range of a call that has failed."""

    class Range:
        def __init__(self, name: str) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *raised: object) -> None:
            moment.pass_by()

    def multiply(rows: torch.Tensor, out: torch.Tensor) -> None:
        if moment.armed:
            raise ValueError("a product that fails")
        out.zero_()

    weight, a = weft.weight(multiply, (3, 4), torch.float32), torch.ones(2, 3)

    def call() -> Any:
        with (
            patch.object(profiler, "record_function", Range),
            patch.object(profiler, "_is_profiler_enabled", moment.armed),
        ):
            return weft.all_gather_matmul(a, weight, algorithm="direct")

    return call


PLACES: dict[str, Place] = {
    each.__name__: each
    for each in (
        hashed,
        compared,
        attribute_of_a_world,
        attribute_of_a_tensor,
        attribute_of_a_weight,
        check_of_a_weight,
        product,
        end_of_a_range,
    )
}
