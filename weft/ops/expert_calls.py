"""The calls of operators that exchange rows with the weights of other ranks, such as experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from weft.checks import name as dtype_name
from weft.kernels.weights import Weight
from weft.ops import arguments, dims, split_sizes
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator
from weft.ops.options import Operands, kernel_of, workload
from weft.ops.records import Exchanged
from weft.schedules.exchanges import Direction, names
from weft.schedules.workload import Operator
from weft.world import World, current


def _direction(
    operator: Operator, weights: Sequence[Weight], experts: Sequence[int] | None, world: World
) -> Direction:
    """The direction between ranks with these numbers of `experts`, of which this one has `weights`;
    by default each rank has as many.
    """
    back = operator.exchanges == "out"
    if not weights:
        raise ValueError(
            "b is an empty list: give at least one weight, or, on a rank without experts, one (K, "
            "N) such as torch.empty(K, N), which is not multiplied, and experts_of_ranks"
        )
    if experts is None:
        return Direction((len(weights),) * world.ranks, back)
    numbers = arguments.check_experts_of_ranks(experts, world)
    if len(weights) != max(1, numbers[world.rank]) or not any(numbers):
        raise ValueError(
            f"experts_of_ranks {[*numbers]} gives rank {world.rank} {numbers[world.rank]} weights, "
            f"but b has {len(weights)}; some rank must have one, and a rank that has none passes "
            "one for its shape"
        )
    return Direction(numbers, back)


def exchange(
    operator: Operator, world: World, operands: Operands, options: Any, timeout: float | None
) -> Any:
    """The options with the sizes of all ranks, if they are uneven; collective."""
    a, weights, _, _ = operands
    sent, expected = options.input_split_sizes, getattr(options, "output_split_sizes", None)
    if isinstance(sent, Exchanged) or (sent is None and expected is None):
        return options
    arguments.check_matrix(a, world)
    direction = _direction(operator, weights, options.experts_of_ranks, world)
    ins, outs = split_sizes.check(a.shape[0], sent, expected, direction.parts(world.rank))
    every = split_sizes.exchange(world, operator.name, direction, ins, outs, "rows", timeout)
    if expected is not None:
        options = options._replace(output_split_sizes=None)
    return options._replace(input_split_sizes=every)


def arrived(
    operator: FusedOperator,
    a: Tensor,
    b: Weight | Sequence[Weight],
    options: Any,
    world: World | None,
) -> list[int]:
    """The sizes of the parts that have arrived in a call; `options` are those that it has returned,
    or the caller's values.
    """
    record: Any = operator.options(*options)
    if isinstance(record.input_split_sizes, Exchanged):
        return [*record.input_split_sizes.received]
    if record.output_split_sizes is not None:
        return [*record.output_split_sizes]
    own = current(world)
    weights: list[Weight] = [*b] if isinstance(b, (list, tuple)) else [b]  # type: ignore[list-item]
    direction = _direction(operator.schedule, weights, record.experts_of_ranks, own)
    gives, takes = direction.parts(own.rank)
    return [a.shape[0] // gives] * takes


class Checked(NamedTuple):
    """The checked operands of a call, the number of weights of each rank, the parts of rows,
    whether all are equal, and the result.
    """

    operands: Operands
    experts: tuple[int, ...]
    given: Exchanged
    even: bool
    result: Tensor


def checked(world: World, operands: Operands, options: Any, operator: Operator) -> Checked:
    """A checked call, whose result has the rows that arrive, or if products return those of `a`."""
    a, weights, biases, (out, *_) = operands
    arguments.check_matrix(a, world)
    if a.dim() != 2:
        raise ValueError(f"a must be a matrix (rows, K); got shape {tuple(a.shape)}")
    direction = _direction(operator, weights, options.experts_of_ranks, world)
    for b, bias in zip(weights, biases, strict=True):
        arguments.check_weight(a, b, world)
        arguments.check_bias(bias, b.shape[1], world)
    if len(columns := {b.shape[1] for b in weights}) > 1:
        raise ValueError(
            f"the weights of one call have equal columns; these have {sorted(columns)}"
        )
    if len(kernels := {kernel_of(b).name for b in weights}) > 1:
        raise ValueError(
            f"the weights of one call have one kernel; these have {' and '.join(sorted(kernels))}"
        )
    dtype = arguments.check_out_dtype(a.dtype, options.out_dtype)
    rows, given = a.shape[0], options.input_split_sizes
    even = given is None
    if even:
        given = _equal_parts(rows, direction, world)
    returns = "output_split_sizes" not in options._fields
    made = rows if returns else sum(given.received)
    shape, inputs = (made, *columns), [a, *weights, *biases]
    result = arguments.result(out, shape, dtype, inputs, world)
    even = even and len({*direction.experts}) == 1
    return Checked(operands, direction.experts, given, even, result)


def _equal_parts(rows: int, direction: Direction, world: World) -> Exchanged:
    """The parts of as many rows of each rank, without an exchange."""
    parts, takes = direction.parts(world.rank)
    if not parts or rows % parts:
        raise ValueError(
            f"{rows} rows do not divide evenly over {parts} weights of {world.ranks} ranks: "
            "give input_split_sizes"
        )
    part = rows // parts
    counts = tuple([(part,) * direction.parts(rank)[0] for rank in range(world.ranks)])
    return Exchanged(counts, (part,) * takes, True)


class ExpertCall(FusedCall):
    """A checked call: the rows of a rank are given in parts to all ranks' weights."""

    def __init__(
        self,
        world: World,
        options: Any,
        operator: str,
        checked: Checked,
    ) -> None:
        operands, experts, self.given, self.even, result = checked
        a, weights, biases, _ = operands
        counts = self.given.counts
        largest = tuple([max(row, default=0) for row in counts])
        one = operands._replace(weights=weights[:1])
        super().__init__(world, options, workload(operator, largest, one, result.dtype))
        self.rows = counts[0] if self.even else [*chain(*counts)]
        self.weights = weights
        made_in = "out" if self.operator.exchanges == "a" else "partial"
        self.weight_names = names(made_in, len(weights))
        self.biases = () if all(bias is None for bias in biases) else biases
        self.tensors, self.results = {"a": dims.to_front(a, 0), "out": result}, [result]
        self.request_fields = {"experts": experts, "uneven": not self.even}

    def keep(self) -> None:
        """Let the rows that arrive be a result, too."""
        a = self.tensors["a"]
        gathered = a.new_empty(sum(self.given.received), a.shape[1])
        self.tensors["gathered"] = gathered
        self.results.append(gathered)
        self.request_fields = {**self.request_fields, "gathered": True}

    @property
    def description(self) -> str:
        counts, dtype = self.given.counts, dtype_name(self.tensors["a"].dtype)
        rows = f"{sum(counts[0])} rows" if self.even else f"{[*map(sum, counts)]} rows"
        return f"{self.workload.operator}({rows} x {self.columns} {dtype})"

    @property
    def work(self) -> int:
        return sum(map(sum, self.given.counts)) * max(1, self.workload.n)

    def chunk_rows(self, algorithm: str) -> int:
        return self.piece(max(self.workload.rows), self.pieces)
