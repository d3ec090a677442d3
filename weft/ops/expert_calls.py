"""The common part of the operators that exchange rows with the weights of other ranks, such as
experts: split sizes, which ranks tell each other in the call, and the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.checks import name as dtype_name
from weft.kernels.weights import Weight
from weft.ops import arguments, autograd, dims, driver, split_sizes
from weft.ops.call import Key
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator, Recorded
from weft.ops.options import Operands, Options, kernel_of, workload
from weft.ops.split_sizes import Exchanged
from weft.schedules.exchanges import Way, names
from weft.world import World, current


class Checked(NamedTuple):
    """The checked operands of a call, the number of weights of each rank, the parts of rows,
    whether all are equal, and the result.
    """

    operands: Operands
    experts: tuple[int, ...]
    given: Exchanged
    even: bool
    result: Tensor


def call(
    operator: FusedOperator,
    check: Callable[[World, Operands, Options, Exchanged | None], FusedCall],
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
    return_split_sizes: bool,
    experts_of_ranks: Sequence[int] | None,
    bias: Tensor | Sequence[Tensor | None] | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    algorithm: str,
    chunk_rows: int | None,
    world: World | None,
    timeout: float | None,
    back: bool = False,
    returns: bool = False,
) -> Any:
    """The result of a call of the public function, with the sizes of the parts that have arrived if
    they are asked for. `back`: the rows are those of a rank's experts, and products travel;
    `returns`: products return to the places of their rows, so that no shape depends on what
    arrives.
    """
    several = isinstance(b, (list, tuple))  # no union: the compiler of torch 2.9 does not know them
    weights: list[Weight] = [*b] if several else [b]  # type: ignore[list-item, misc]
    biases = arguments.listed(bias, weights, several, "bias")
    sent = None if input_split_sizes is None else arguments.as_key(input_split_sizes)
    expected = None if output_split_sizes is None else arguments.as_key(output_split_sizes)
    experts = None if experts_of_ranks is None else arguments.as_key(experts_of_ranks)
    even = sent is None and expected is None
    key: Key | None = None
    result = None
    if even:
        key = check, (out_dtype, algorithm, chunk_rows, None, experts), a, out, weights, biases
        result = driver.repeat(key, world, timeout)
    world = current(world)
    given: Exchanged | None = None
    recorded = result is None and arguments.recorded([a, *weights, *biases, out])
    if result is None and not even and not (recorded and (returns or expected is not None)):
        if torch.compiler.is_compiling():
            raise ValueError(
                "the shapes of a compiled graph cannot depend on what arrives: give "
                "output_split_sizes"
            )
        way = _way(weights, experts, back, world)
        given = exchange(operator.name, way, a, sent, expected, world, timeout)
        expected = given.received
        if given.again and not recorded:
            choices = out_dtype, algorithm, chunk_rows, given.counts, experts
            key = check, choices, a, out, weights, biases
            result = driver.repeat(key, world, timeout)
    if result is None:
        keep = operator.schedule.exchanges == "a" and any(
            getattr(weight, "requires_grad", False) for weight in weights
        )
        keep = keep and not returns
        options = Options(
            out_dtype=out_dtype,
            keep=recorded and keep,
            algorithm=algorithm,
            chunk_rows=chunk_rows,
            timeout=timeout,
            input_split_sizes=sent,
            output_split_sizes=expected,
            experts_of_ranks=experts,
        )
        if recorded:
            custom = getattr(torch.ops.weft, operator.name).default
            result = autograd.call(custom, a, weights, biases, out, options, world)[0]
        else:
            with torch.no_grad():
                operands = Operands(a, weights, biases, [out])
                result = driver.run(check(world, operands, options, given), key)[0]
    if not return_split_sizes:
        return result
    if expected is None:
        gives, takes = _way(weights, experts, back, world).parts(world.rank)
        expected = (a.shape[0] // gives,) * takes
    return result, [*expected]


def _way(weights: Sequence[Weight], experts: Sequence[int] | None, back: bool, world: World) -> Way:
    """The way between ranks that have these numbers of `experts`, of which this one has `weights`;
    by default each rank has as many.
    """
    if not weights:
        raise ValueError(
            "b is an empty list: give at least one weight, or, on a rank without experts, one (K, "
            "N) such as torch.empty(K, N), which is not multiplied, and experts_of_ranks"
        )
    if experts is None:
        return Way((len(weights),) * world.ranks, back)
    numbers = arguments.check_experts_of_ranks(experts, world)
    if len(weights) != max(1, numbers[world.rank]) or not any(numbers):
        raise ValueError(
            f"experts_of_ranks {[*numbers]} gives rank {world.rank} {numbers[world.rank]} weights, "
            f"but b has {len(weights)}; some rank must have one, and a rank that has none passes "
            "one for its shape"
        )
    return Way(numbers, back)


def exchange(
    operator: str,
    way: Way,
    a: Tensor,
    sent: Sequence[int] | None,
    expected: Sequence[int] | None,
    world: World,
    timeout: float | None,
) -> Exchanged:
    """The sizes that ranks tell each other in a call; collective."""
    check_timeout(timeout)
    arguments.check_matrix(a, world)
    ins, outs = split_sizes.check(a.shape[0], sent, expected, way.parts(world.rank))
    return split_sizes.exchange(world, operator, way, ins, outs, "rows", timeout)


def checked(
    world: World,
    operands: Operands,
    options: Options,
    given: Exchanged | None,
    operator: str,
    back: bool = False,
    returns: bool = False,
) -> Checked:
    """A checked call, whose result has the rows that arrive, or if products return those of `a`;
    collective if sizes are not `given`, but are options.
    """
    a, weights, biases, (out, *_) = operands
    arguments.check_matrix(a, world)
    if a.dim() != 2:
        raise ValueError(f"a must be a matrix (rows, K); got shape {tuple(a.shape)}")
    way = _way(weights, options.experts_of_ranks, back, world)
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
    check_timeout(options.timeout)
    dtype = arguments.check_out_dtype(a.dtype, options.out_dtype)
    rows, sent, expected = a.shape[0], options.input_split_sizes, options.output_split_sizes
    even = sent is None and expected is None
    if even:
        parts, takes = way.parts(world.rank)
        if not parts or rows % parts:
            raise ValueError(
                f"{rows} rows do not divide evenly over {parts} weights of {world.ranks} ranks: "
                "give input_split_sizes"
            )
        part = rows // parts
        counts = tuple([(part,) * way.parts(rank)[0] for rank in range(world.ranks)])
        given = Exchanged(counts, (part,) * takes, True)
    elif given is None:
        given = exchange(operator, way, a, sent, expected, world, options.timeout)
    made = rows if returns else sum(given.received)
    shape, inputs = (made, *columns), [a, *weights, *biases]
    result = arguments.result(out, shape, dtype, inputs, world)
    return Checked(operands, way.experts, given, even and len({*way.experts}) == 1, result)


class ExpertCall(FusedCall):
    """A checked call: the rows of a rank are given in parts to all ranks' weights."""

    def __init__(
        self,
        world: World,
        options: Options,
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


def result_rows(call: Recorded) -> int:
    """The rows of the result of a recorded call."""
    expected = call.options.output_split_sizes
    return call.a.shape[0] if expected is None else sum(expected)


def save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    """Keep what the backward formulas need: the weights, and the rows that they have multiplied."""
    a, weights, biases, options, world = call
    sent, received = options.input_split_sizes, options.output_split_sizes
    ctx.back = Options(
        input_split_sizes=received,
        output_split_sizes=sent,
        experts_of_ranks=options.experts_of_ranks,
        timeout=options.timeout,
    )
    ctx.world = world
    ctx.for_a, ctx.for_weights = a.requires_grad, [b.requires_grad for b in weights]
    ctx.for_biases = [bias.requires_grad for bias in biases]
    ctx.weights = len(weights)
    rows = []
    if any(ctx.for_weights):
        rows = [results[1] if len(results) > 1 else a]
    ctx.save_for_backward(*weights, *rows)


def by_expert(rows: Tensor, experts: int, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    """Rows in the order of a rank's experts, as those of each."""
    if not sizes:  # equal parts, or none
        return rows.tensor_split(experts)
    ends = [0, *accumulate(sizes)][:: len(sizes) // experts]
    return [rows[start:stop] for start, stop in pairwise(ends)]


def weight_gradients(
    ctx: Any, rows: Tensor | None, gradient: Tensor, sizes: Sequence[int] | None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the weights and biases that have multiplied `rows`, of the `gradient` of
    their products; both in the order of the experts.
    """
    experts = ctx.weights
    dys = by_expert(gradient, experts, sizes)
    xs = [None] * experts if rows is None else by_expert(rows, experts, sizes)
    for_weights = [
        autograd.weight_gradient(x, dy) if wanted and x is not None else None
        for wanted, x, dy in zip(ctx.for_weights, xs, dys, strict=True)
    ]
    for_biases = [
        dy.sum(0) if wanted else None for wanted, dy in zip(ctx.for_biases, dys, strict=False)
    ]
    return for_weights, for_biases
