"""A checked call of a fused operator: its operands, options and workload, and the rules for its
variant.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from weft._native import Binding
from weft.checks import name
from weft.engines.host import HostProgram
from weft.engines.program import Program
from weft.kernels.matmul import MATMUL, with_kernel
from weft.kernels.weights import Weight, rows_multiple
from weft.ops import arguments, dims
from weft.ops.call import Call, Key, Selection
from weft.ops.options import Options, kernel_of
from weft.plan import Kernel, Plan
from weft.plan.companions import companion
from weft.plan.compression import compressed
from weft.schedules.device_options import DEFAULT, DeviceOptions, honours
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import (
    FEW_ROWS,
    ORDERS,
    PIECES,
    Operator,
    Request,
    Variant,
    Workload,
    size_class,
)
from weft.world import World

LEAST_ROWS = {True: 64, False: 128}
"""By whether b is packed: the rows of a product below which each row costs clearly more, since the
product reads, or packs, the whole weight.
"""

_MEASURED_FROM = 1.7e-4
"""Seconds on the link, below which more pieces cost more than their overlap can gain: up to three
times the time of the call.
"""
_WORTH_HIDING = 3 * _MEASURED_FROM
"""Seconds on an emulated link that are worth hiding: for less, the signals of pieces cost more.
Three times `_MEASURED_FROM`, so that calls of which it is doubtful are measured.
"""
_HOST_PIECES = 8
"""Transfers per shard between hosts: each transfer and each small product takes more of a core
there than the last piece takes after the others. Measured on two hosts: sums over 1 Gbit/s gain
1.5x over the sequence in place of 1.35x with 16.
"""
_PIECES = (1, 2, 4, 8, 16, 32)
"""The numbers of pieces that are tried over a link, and where streams move rows."""
_LEAST_PIECE = FEW_ROWS
"""The number of rows below which a piece is not tried: one product reads the weight once."""
SAME_BITS = 16
"""The number of rows from which on torch's products use no kernels for few rows."""
_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes whose products have the same bits for any number of rows from `SAME_BITS` on."""


class FusedCall(Call):
    """A checked call of a fused operator, and the operator's rules.

    `weights` and `biases` are the operands of its plan's products, in order. `weight_names` are the
    names of the weights in the plan; empty if in plan order. `request_fields` are the fields of its
    `Request` that no other operator has.
    """

    weights: Sequence[Weight] = ()
    biases: Sequence[Tensor | None] = ()
    weight_names: Sequence[str] = ()
    request_fields: Mapping[str, object] = MappingProxyType({})

    options: Any

    def __init__(self, world: World, options: Options, workload: Workload) -> None:
        super().__init__(world, None)
        compress: str | None = getattr(options, "compress", None)
        arguments.check_compress(compress, workload.dtype)
        workload = workload._replace(compress=compress or "")
        self.options, self.workload, self.rows = options, workload, workload.rows
        self.algorithm, self.row_limit = options.algorithm, options.chunk_rows
        self.order: str | None = getattr(options, "order", None)
        self.operator: Operator = OPERATORS[workload.operator]
        self.planner: Callable[[Request], Plan] = self.operator.plan

    def carry(self, companions: Sequence[Tensor]) -> None:
        """Let the rows of ``a`` have these companions, of which each row is one of a tensor with
        the same dimensions but the last: those that the kernel of its weights takes.
        """
        names = self.kernel.companions
        dim = getattr(self.options, "dim", 0)
        for each, tensor in zip(names, companions, strict=True):
            matrix = self.tensors[companion("a", each)] = dims.to_front(tensor, dim)
            if (gathered := self.tensors.get("gathered")) is not None:
                arrived = matrix.new_empty(len(gathered), matrix.shape[1])
                self.tensors[companion("gathered", each)] = arrived

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
        return _HOST_PIECES if self.world.hosts.several else PIECES

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
        """Whether its variant may be measured."""
        return self.algorithm == "auto"

    @property
    def similar(self) -> Workload | None:
        world, rows = self.world, max(self.workload.rows)
        streams_as_asked = world.stream_ordered and (
            self.row_limit is not None or world.device_options != DEFAULT
        )
        fixed = torch.are_deterministic_algorithms_enabled()
        if not self.tunable or not rows or streams_as_asked or fixed:
            return None
        rows = size_class(rows) if self.row_limit is None else rows
        return self.shared._replace(rows=(rows,) * world.ranks)

    @property
    def own_class(self) -> Workload:
        return self.workload

    @property
    def work(self) -> int:
        return sum(self.workload.rows) * max(1, self.workload.n)

    @property
    def description(self) -> str:
        """The call as errors show it, with the rows that ranks exchange: all know their numbers."""
        rows, operator = self.workload.rows, self.workload.operator
        of = self.operator.exchanges
        matrix = self.tensors[of]
        same = len({*rows}) == 1 or len(matrix) == sum(rows)
        shape = tuple(matrix.shape) if same else f"{[*rows]} rows x {self.columns}"
        return f"{operator}({of}={shape} {name(matrix.dtype)})"

    def check_algorithm(self, algorithm: str) -> None:
        """Raise `ValueError` for an algorithm that is not possible here."""
        operator, world = self.operator, self.world
        arguments.check_algorithm(algorithm, operator, world)
        arguments.check_chunk_rows(self.row_limit)
        arguments.check_order(self.order, self.algorithm, operator)
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
        """Whether an algorithm can honour device options, by default the world's, as
        `weft.schedules.device_options.honours`.
        """
        options = options or self.world.device_options
        if self.world.ranks == 1 or not options.need_a_plan:
            return True
        return _honours(self.planner, self.request(Variant(algorithm, device=options)), options)

    def request(self, variant: Variant) -> Request:
        """The request for the plan of a variant."""
        world = self.world
        where = {"hosts": world.hosts.if_several, "remote_reads": world.remote_reads}
        return self.operator.request(self.workload, variant, **where, **self.request_fields)

    def possible(self, algorithm: str) -> bool:
        """Whether `check_algorithm` accepts an algorithm."""
        try:
            self.check_algorithm(algorithm)
        except ValueError:
            return False
        return True

    def rule(self) -> Selection:
        """The variant of the caller's algorithm, or the operator's own for ``auto``; `ValueError`
        if it is not possible here.
        """
        algorithm = self.algorithm
        self.check_algorithm(algorithm)
        reason = "as asked for"
        if algorithm == "auto":
            algorithm, reason = self.default()
        return Selection(self.variant(algorithm), reason)

    def variant(self, algorithm: str) -> Variant:
        """An algorithm with the number of pieces that `chunk_rows` asks for, or the operator's, in
        the `order` that is asked for.
        """
        most = max(self.row_limit or self.chunk_rows(algorithm), self.rows_multiple)
        pieces = self.operator.pieces(self.workload.rows, algorithm, most)
        order = self.order or ORDERS[0]
        return Variant(algorithm, pieces, order, self.world.device_options)

    def default(self) -> tuple[str, str]:
        """The algorithm of the rule, and the reason."""
        if self.world.ranks == 1 or not any(self.workload.rows):
            return self.operator.baseline, "there is nothing to exchange"
        if self.world.device_options.need_a_plan:
            names = *self.operator.auto_candidates_over_links, *self.operator.algorithms
            moving = next(filter(self.honours, names), names[0])
            self.check_algorithm(moving)
            return moving, f"the world's options ask for {self.world.device_options}"
        if max(self.workload.rows) <= (
            FEW_ROWS if self.world.hosts.several else LEAST_ROWS[self.workload.packed]
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

    def plan(self, variant: Variant) -> Plan:
        return _planned(
            self.planner,
            self.request(variant),
            self.kernel,
            self.rows_multiple,
            self.workload.compress,
        )

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        # they depend on the operator and dtypes, not on sizes
        return _dtypes(self.workload._replace(rows=(), k=1, n=1, packed=True))

    def engine_options(self, variant: Variant) -> DeviceOptions:
        return variant.device

    def candidates(self, first: Variant) -> list[Variant]:
        operator, workload, world = self.operator, self.workload, self.world
        if (
            self.passing < _MEASURED_FROM
            or max(workload.rows) <= FEW_ROWS
            or workload.dtype not in _DTYPES
        ):
            return [first]
        linked, streams = not world.remote_reads, world.stream_ordered
        names = () if linked else operator.auto_candidates
        if linked or streams:
            names = *operator.auto_candidates_over_links, *names
        variants = [first, *map(self.variant, filter(self.possible, names))]
        if (linked or streams) and self.row_limit is None:
            most = max(workload.rows) // _LEAST_PIECE
            cut = [each for each in variants if each.algorithm not in operator.uncut]
            variants += [each._replace(pieces=n) for each in cut for n in _PIECES if n <= most]
        return variants

    def comparable(self, variants: Sequence[Variant]) -> bool:
        """Whether none of them multiplies so few rows that torch uses other kernels."""
        least = min(filter(None, self.workload.rows), default=0)
        return all(least >= SAME_BITS * variant.pieces for variant in variants)

    def bind(self, program: Program) -> Binding:
        found: Binding = program.bind(self.tensors, self.rows)
        return found

    def execute(self, program: Program) -> None:
        names = self.weight_names or program.weights
        weights = dict(zip(names, self.weights, strict=False))
        biases = {
            name: bias for name, bias in zip(names, self.biases, strict=False) if bias is not None
        }
        program.run(self.tensors, self.rows, weights, biases, self.timeout)

    def repeatable(self, key: Key) -> bool:
        """Whether it uses its caller's weights and biases themselves, and no copies."""
        _, _, _, out, weights, biases = key
        return (
            self.engine.caches_calls
            and (out is None or len(self.results) == 1)  # else a result has no address
            and self.engine.shared_memory  # else products are to be preceded by sends
            and len(self.tensors) == 1 + len(self.results) + len(self.kernel.companions)
            and _same(self.weights, weights)
            and (not self.biases or _same(self.biases, biases))
        )

    def computes(self, program: Program, binding: Binding, key: Key) -> tuple[Any, Any]:
        assert isinstance(program, HostProgram), "no other engine caches calls"
        _, _, rows, _, weights, biases = key
        first, *companions = rows if isinstance(rows, tuple) else (rows,)
        operands = [first, *self.results, *companions]
        computes = program.computes_of(
            binding,
            self.tensors,
            {name: number for number, name in enumerate(self.tensors)},
            {name: number for number, name in enumerate(program.weights)},
            reshaped=frozenset(
                name
                for name, operand in zip(self.tensors, operands, strict=True)
                if operand is not None and operand.dim() != 2
            ),
            biased=bool(self.biases),
        )
        # of the operands, or of a copy: then the call is not cached
        matrices = [*self.tensors.values()]
        return lambda at: computes.run(at, matrices, weights, biases), computes.prepare

    @abstractmethod
    def overlapped(self) -> tuple[str, str]:
        """The algorithm and the reason for enough rows to move some while others are multiplied."""

    @abstractmethod
    def chunk_rows(self, algorithm: str) -> int:
        """Rows of a piece, by default."""

    def cut(self, variant: Variant) -> str:
        """A variant and the size of its transfers, in words."""
        rows = self.operator.chunk_rows(self.workload.rows, variant)
        compress = self.workload.compress if self.world.hosts.several else ""
        between = f", as {compress} between hosts" if compress else ""
        return f"{variant}, at most {rows} rows per transfer{between}"


@lru_cache(1024)
def _planned(
    planner: Callable[[Request], Plan],
    request: Request,
    kernel: Kernel,
    rows_multiple: int,
    compress: str,
) -> Plan:
    plan = replace(planner(request), rows_multiple=rows_multiple)
    if compress and request.hosts:
        plan = compressed(plan, request.hosts, compress)
    return plan if kernel is MATMUL else with_kernel(plan, kernel)


@lru_cache(256)
def _dtypes(workload: Workload) -> Mapping[str, torch.dtype]:
    """The dtypes of the buffers of a workload's plans."""
    buffers = OPERATORS[workload.operator].buffers(workload)
    return {name: getattr(torch, rows.dtype) for name, rows in buffers.items()}


def _same(ours: Sequence[object], operands: Sequence[object] | None) -> bool:
    """Whether these are the caller's own objects."""
    return [*map(id, ours)] == [*map(id, operands or ())]


@lru_cache
def _honours(planner: Callable[[Request], Plan], request: Request, options: DeviceOptions) -> bool:
    """`Call.honours` for the plans of these requests."""
    return honours(planner(request), options)
