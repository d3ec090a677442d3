"""A checked call of any operator: the part of a call that differs between operators on its path
from arguments to results (`weft.ops.driver`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft._native import Binding, CallsLeft
from weft.engines import engine
from weft.engines.program import Program
from weft.kernels.weights import Weight
from weft.plan import Plan
from weft.schedules.workload import Variant, Workload
from weft.world import World

_log = logging.getLogger("weft")

Key = tuple[
    Callable[..., "Call"],
    tuple[object, ...],
    "Tensor | tuple[Tensor, ...] | None",
    "Tensor | None",
    "Sequence[Weight] | None",
    "Sequence[Tensor | None] | None",
]
"""The key of a call in the call cache: its operator's `check`, its options, and its operands as the
caller gave them: a (a tuple, if its rows have companions, which follow it), out, weights, biases.
"""


_SAME_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({})


class Selection(NamedTuple):
    """The variant of a call, and the reason for it.

    `measured` are the least milliseconds of the variants that were tried. `trial` is a measurement
    to which the time of the call is to be reported (`weft.ops.autotune.Trial`). `left` has the
    calls until the class is measured again, of which cached calls take one each, too; None if it is
    not; `period` is the number of them at the beginning.
    """

    variant: Variant
    reason: str
    measured: tuple[tuple[Variant, float], ...] = ()
    trial: Any = None
    left: CallsLeft | None = None
    period: int = 0


class Choice(ABC):
    """A choice among variants that all ranks make together, for a class of calls
    (`weft.ops.autotune`).

    `row_limit` is the caller's limit of the rows of a transfer.
    """

    row_limit: int | None = None
    exact = False
    """Whether all variants give the same bits, so that its class is measured again from time to
    time, and also where torch is to use deterministic algorithms.
    """

    def __init__(self, world: World, timeout: float | None) -> None:
        self.world, self.timeout = world, timeout
        self.engine = engine(world)

    @property
    @abstractmethod
    def description(self) -> str:
        """The call as errors of all ranks show it."""

    @property
    @abstractmethod
    def similar(self) -> Workload | None:
        """The workload of the class of calls that share a selection with this one, as far as all
        ranks know it; None if the rule alone selects its variant.
        """

    @property
    @abstractmethod
    def own_class(self) -> Workload:
        """The workload by whose class this rank stores the fastest variant."""

    @property
    @abstractmethod
    def work(self) -> int:
        """A number that the time of a call of its class is about proportional to."""

    @abstractmethod
    def rule(self) -> Selection:
        """The variant by the operator's rule, or by the caller's options."""

    @abstractmethod
    def candidates(self, first: Variant) -> list[Variant]:
        """The variants to measure for its class, beginning with the rule's, `first`; a single one
        if there is nothing to measure.
        """

    @abstractmethod
    def possible(self, algorithm: str) -> bool:
        """Whether it can be made by an algorithm here."""

    def comparable(self, variants: Sequence[Variant]) -> bool:
        """Whether these variants give it the same bits."""
        return True

    @abstractmethod
    def cut(self, variant: Variant) -> str:
        """A variant and the size of its transfers, in words."""

    def describe(self, variant: Variant) -> str:
        """More words about a variant, for `explain`."""
        return ""

    def log(self, selection: Selection) -> None:
        """Log the selection for calls of this class at level INFO, on rank 0, as for all ranks."""
        if self.world.rank == 0 and _log.isEnabledFor(logging.INFO):
            _log.info(
                "%s and calls of its class: %s: %s",
                self.description,
                self.cut(selection.variant),
                selection.reason,
            )


class Call(Choice):
    """A call that was checked on this rank.

    `tensors` are the matrices of the plan's buffers: ``a``, then those that `results` are made of,
    in order; `rows` are the rows of the plan's shards.
    """

    tensors: dict[str, Tensor]
    results: list[Tensor]
    rows: Sequence[int]

    @abstractmethod
    def plan(self, variant: Variant) -> Plan:
        """The plan of a variant, the same object for equal calls."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes of workspaces that differ from the buffers they exchange rows with."""
        return _SAME_DTYPES

    def engine_options(self, variant: Variant) -> Any:
        """The options of the engine for a variant; None for the world's."""
        return None

    @abstractmethod
    def execute(self, program: Program) -> None:
        """Execute a program of its plan once."""

    @abstractmethod
    def repeatable(self, key: Key) -> bool:
        """Whether later calls of its key can be executed without a check."""

    @abstractmethod
    def bind(self, program: Program) -> Binding:
        """The binding of a program to its tensors."""

    def computes(self, program: Program, binding: Binding, key: Key) -> tuple[Any, Any]:
        """The function that executes the computation at an instruction of a program, None if it has
        none, and the one that prepares it for calls of this key.
        """
        return None, program.prepare

    def finish(self) -> Any:
        """The results, once the plan was executed."""
        return self.results
