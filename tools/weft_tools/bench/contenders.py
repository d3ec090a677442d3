"""The contenders of a benchmark of a collective: weft, and the systems that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.measure.timing import Stopwatch
from weft.world import World
from weft_tools.bench.between_ranks import sum_over_ranks
from weft_tools.bench.collectives import Data
from weft_tools.bench.harness import poison
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.bench.verification import Check

WEFT, PLAIN = "weft", "weft (plain)"
"""weft on symmetric memory, and on ordinary tensors."""


class Bench(Protocol):
    """The measurement of one operation on this rank: what all its contenders share."""

    settings: SweepSettings
    world: World
    stopwatch: Stopwatch
    data: Data

    def tensors(self, name: str, in_place: bool, count: int) -> tuple[Tensor, Tensor]:
        """The input of `count` elements and the output, which weft or others have."""


class Contender(Protocol):
    """An implementation of a collective, in place or out of place."""

    implementation: str
    in_place: bool
    about: Mapping[str, Any]
    """Further entries of its rows: the launch of a kernel, the channels of NCCL."""

    def verify(self, run: int) -> Check:
        """The check of one call on the data of `run` into poisoned outputs, with the wrong elements
        of all ranks; collective.
        """

    def time(self, calls: int, batches: int = 1) -> list[float]:
        """The seconds of each of `batches` batches of `calls` calls, after an untimed call;
        collective.
        """


class Baseline(Protocol):
    """Another system that has the collective."""

    version: str | None
    """The version for the result; None if it has no entry there, or is unknown on this rank."""

    def prepare(self, bench: Bench, count: int) -> None:
        """Prepare inputs of `count` elements; collective."""

    def contender(self, bench: Bench, in_place: bool, count: int) -> Contender | None:
        """The implementation for inputs of `count` elements; None if the system has none, in or out
        of place.
        """


class Local:
    """An implementation in this process: its tensors, and a call on them."""

    def __init__(
        self,
        name: str,
        in_place: bool,
        call: Callable[[], object],
        tensors: tuple[Tensor, Tensor],
        bench: Bench,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.implementation, self.in_place, self.call, self.bench = name, in_place, call, bench
        self.a, self.out = tensors
        self.about = about

    def verify(self, run: int) -> Check:
        poison(self.out)
        self.a.copy_(self.bench.data.own(run, len(self.a)))
        made = self.call()
        out = made if isinstance(made, Tensor) else self.out
        wrong = int((out != self.bench.data.expected(run, len(self.a))).sum())
        return total(wrong)

    def time(self, calls: int, batches: int = 1) -> list[float]:
        """This rank's seconds, from a barrier before each batch on."""
        self.call()
        return [self.bench.stopwatch.time(self.call, calls) for _ in range(batches)]


def total(wrong: int) -> Check:
    """The check of all ranks with `wrong` elements on this one; collective."""
    own = torch.tensor([wrong], device="cpu")
    return Check(int(sum_over_ranks(own)))
