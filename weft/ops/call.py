"""A checked call of a fused operator: its operands, options and workload."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import name
from weft.kernels.matmul import MATMUL
from weft.kernels.weights import Weight, packed, rows_multiple
from weft.ops import arguments
from weft.plan import Kernel, Plan
from weft.schedules.device_options import DeviceOptions, honours
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import (
    FEW_ROWS,
    ORDERS,
    PIECES,
    Operator,
    Request,
    Variant,
    Workload,
)
from weft.world import World

LEAST_ROWS = {True: 64, False: 128}
"""By whether b is packed: the rows of a product below which each row costs clearly more, since the
product reads, or packs, the whole weight.
"""

_WORTH_HIDING = 5e-4
"""Seconds on an emulated link that are worth hiding: for less, the signals of pieces cost more."""
_HOST_PIECES = 8
"""Transfers per shard between hosts: each transfer and each small product takes more of a core
there than the last piece takes after the others.
"""


class Options(NamedTuple):
    """The options of a call, as in the operators' docstrings.

    `keep`: the gathered a is a result too. `own_bias`: each rank adds a bias of its own to its
    product, so all are summed. `extra`: integers that only one operator takes, such as a rank.
    `order`: one of `ORDERS`, for an algorithm that can send in any of them; None is the first.
    """

    dim: int = 0
    op: str = "sum"
    out_dtype: torch.dtype | None = None
    keep: bool = False
    shard_rows: Sequence[int] | None = None
    algorithm: str = "auto"
    chunk_rows: int | None = None
    timeout: float | None = None
    own_bias: bool = False
    extra: Sequence[int] | None = None
    order: str | None = None


class Operands(NamedTuple):
    """The tensors of a call: this rank's rows, the weights, and for each weight its bias and its
    output, or None.
    """

    a: Tensor
    weights: Sequence[Weight]
    biases: Sequence[Tensor | None]
    outs: Sequence[Tensor | None]


class Selection(NamedTuple):
    """The variant of a call, and the reason for it.

    `measured` are the least milliseconds of the variants that were tried. `trial` is a measurement
    to which the time of the call is to be reported (`weft.ops.autotune.Trial`). `record` is the
    time that an earlier process has stored for the variant, in nanoseconds per element of the
    product; 0 if none has.
    """

    variant: Variant
    reason: str
    measured: tuple[tuple[Variant, float], ...] = ()
    trial: Any = None
    record: float = 0.0


_log = logging.getLogger("weft")


class Call(ABC):
    """A call that was checked on this rank, and the rules of its operator.

    `tensors` are the matrices of the plan's buffers: ``a``, then those that `results` are made of,
    in order. `weights` and `biases` are the operands of its products in order. `request_fields` are
    the fields of its `Request` that no other operator has.
    """

    tensors: Mapping[str, Tensor]
    results: list[Tensor]
    weights: Sequence[Weight] = ()
    biases: Sequence[Tensor | None] = ()
    request_fields: Mapping[str, object] = MappingProxyType({})

    def __init__(self, world: World, options: Options, workload: Workload) -> None:
        self.world, self.options, self.workload = world, options, workload
        self.operator: Operator = OPERATORS[workload.operator]
        self.planner: Callable[[Request], Plan] = self.operator.plan

    @property
    def kernel(self) -> Kernel:
        """The kernel of its products, which all its weights have."""
        return next(map(kernel_of, self.weights), MATMUL)

    @property
    def rows_multiple(self) -> int:
        """The number of rows of which its products prefer multiples."""
        return rows_multiple(self.weights)

    @property
    def columns(self) -> int:
        """Columns of the rows that ranks exchange."""
        return self.workload.k if self.operator.exchanges == "a" else self.workload.n

    @property
    def pieces(self) -> int:
        """Transfers per shard."""
        return _HOST_PIECES if self.world.multi_host else PIECES

    @property
    def passing(self) -> float:
        """Seconds that an emulated link takes for the rows of a rank; infinite without a link."""
        if not (link := self.world.emulated_link):
            return math.inf
        sent = (
            (self.world.ranks - 1)
            * max(self.workload.rows)
            * self.columns
            * self.tensors["a"].itemsize
        )
        return sent * 8e-9 / link[0]

    def piece(self, rows: int, pieces: int) -> int:
        """The most rows of one of about `pieces` pieces of `rows`, each worth a product."""
        return max(-(-rows // pieces), min(rows, LEAST_ROWS[self.workload.packed]))

    @property
    @abstractmethod
    def shared(self) -> Workload:
        """The workload as far as all ranks know it."""

    @property
    def tunable(self) -> bool:
        """Whether its variant is left to `weft.ops.autotune`."""
        return self.options.algorithm == "auto"

    @property
    def description(self) -> str:
        """The call as errors show it, with the rows that ranks exchange: all know their numbers."""
        rows, operator = self.workload.rows, self.workload.operator
        of = self.operator.exchanges
        matrix = self.tensors[of]
        same = len({*rows}) == 1 or len(matrix) == sum(rows)
        shape = tuple(matrix.shape) if same else f"{[*rows]} rows x {self.columns}"
        return f"{operator}({of}={shape} {name(matrix.dtype)})"

    def log(self, selection: Selection) -> None:
        """Log the selection for calls of this class at level INFO, on rank 0, as for all ranks."""
        if self.world.rank == 0 and _log.isEnabledFor(logging.INFO):
            _log.info(
                "%s and calls of its class: %s: %s",
                self.description,
                self.cut(selection.variant),
                selection.reason,
            )

    def check_algorithm(self, algorithm: str) -> None:
        """Raise `ValueError` for an algorithm that is not possible here."""
        operator, world = self.operator, self.world
        arguments.check_algorithm(algorithm, operator, world)
        arguments.check_chunk_rows(self.options.chunk_rows)
        arguments.check_order(self.options.order, self.options.algorithm, operator)
        if algorithm in operator.moves_nothing and world.emulated_link:
            others = ", ".join(
                name for name in operator.algorithms if name not in operator.moves_nothing
            )
            raise ValueError(
                f"{algorithm} moves no rows, so an emulated link cannot slow it: choose {others}"
            )
        if algorithm != "auto" and not self.honours(algorithm):
            others = ", ".join(filter(self.honours, operator.algorithms))
            raise ValueError(
                f"{algorithm} of {operator.name} cannot honour the world's options "
                f"({world.device_options}): "
                + (f"choose {others}" if others else "no algorithm of it can")
            )

    def honours(self, algorithm: str, options: DeviceOptions | None = None) -> bool:
        """Whether an algorithm can honour device options, by default the world's: it has a lane for
        each link, and copies rows between ranks if a kernel is to do so.
        """
        options = options or self.world.device_options
        if self.world.ranks == 1 or (options.links == 1 and not options.comm_sms):
            return True
        return _honours(self.planner, self.request(Variant(algorithm, device=options)), options)

    def request(self, variant: Variant) -> Request:
        """The request for the plan of a variant."""
        world = self.world
        where = {"hosts": world.topology, "remote_reads": world.remote_reads}
        return self.operator.request(self.workload, variant, **where, **self.request_fields)

    def possible(self, algorithm: str) -> bool:
        """Whether `check_algorithm` accepts an algorithm."""
        try:
            self.check_algorithm(algorithm)
        except ValueError:
            return False
        return True

    def rule(self, algorithm: str) -> Selection:
        """The variant of an algorithm, or the operator's own for ``auto``; `ValueError` if it is
        not possible here.
        """
        self.check_algorithm(algorithm)
        reason = "as asked for"
        if algorithm == "auto":
            algorithm, reason = self.default()
        return Selection(self.variant(algorithm), reason)

    def variant(self, algorithm: str) -> Variant:
        """An algorithm with the number of pieces that `chunk_rows` asks for, or the operator's, in
        the `order` that is asked for.
        """
        most = max(self.options.chunk_rows or self.chunk_rows(algorithm), self.rows_multiple)
        pieces = self.operator.pieces(self.workload.rows, algorithm, most)
        order = self.options.order or ORDERS[0]
        return Variant(algorithm, pieces, order, self.world.device_options)

    def default(self) -> tuple[str, str]:
        """The algorithm of the rule, and the reason."""
        if self.world.ranks == 1 or not any(self.workload.rows):
            return self.operator.baseline, "there is nothing to exchange"
        if not self.honours(self.operator.baseline) or not self.honours(self.overlapped()[0]):
            names = *self.operator.auto_candidates_over_links, *self.operator.algorithms
            moving = next(filter(self.honours, names), names[0])
            self.check_algorithm(moving)
            return moving, f"the world's options ask for {self.world.device_options}"
        if max(self.workload.rows) <= (
            FEW_ROWS if self.world.multi_host else LEAST_ROWS[self.workload.packed]
        ):
            return (
                self.operator.baseline,
                "few rows per rank: one product that reads b once beats several",
            )
        if self.passing < _WORTH_HIDING:
            return (
                self.operator.baseline,
                "rows pass the emulated link in less time than moving them piece by piece would "
                "cost",
            )
        return self.overlapped()

    @abstractmethod
    def overlapped(self) -> tuple[str, str]:
        """The algorithm and the reason for enough rows to move some while others are multiplied."""

    @abstractmethod
    def chunk_rows(self, algorithm: str) -> int:
        """Rows of a piece, by default."""

    def finish(self) -> list[Tensor]:
        """The results, once the plan was executed."""
        return self.results

    def describe(self, variant: Variant) -> str:
        """More words about a variant, for `explain`."""
        return ""

    def cut(self, variant: Variant) -> str:
        """A variant and the size of its transfers, in words."""
        rows = self.operator.chunk_rows(self.workload.rows, variant)
        return f"{variant}, at most {rows} rows per transfer"


@lru_cache
def _honours(planner: Callable[[Request], Plan], request: Request, options: DeviceOptions) -> bool:
    """`Call.honours` for the plans of these requests."""
    return honours(planner(request), options)


def kernel_of(weight: Weight) -> Kernel:
    """The kernel of products by a weight."""
    return MATMUL if isinstance(weight, Tensor) else weight.kernel or MATMUL


def workload(
    operator: str,
    rows: tuple[int, ...],
    operands: Operands,
    out_dtype: torch.dtype,
    symmetric: bool = True,
) -> Workload:
    """The workload of a call; several weights count as one of all their columns."""
    a, weights, _, _ = operands
    columns, dtypes = sum([b.shape[1] for b in weights]), (name(a.dtype), name(out_dtype))
    return Workload(operator, rows, a.shape[-1], columns, *dtypes, packed(weights), symmetric)
