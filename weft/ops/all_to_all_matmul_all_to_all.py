"""All-to-all + matmul + all-to-all as an operator: rows are dispatched to the weights of other
ranks, and their products return.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.kernels.function import FunctionWeight
from weft.kernels.products import multiply
from weft.kernels.weights import Weight, WeightKernel
from weft.ops import autograd, expert_calls, prologue
from weft.ops.arguments import as_key
from weft.ops.expert_calls import ExpertCall
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator, Gradient, Gradients, Recorded
from weft.ops.options import Operands
from weft.ops.records import AllToAllMatmulAllToAll
from weft.schedules import all_to_all_matmul_all_to_all as schedule
from weft.schedules.workload import Workload
from weft.world import World


def all_to_all_matmul_all_to_all(
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    input_split_sizes: Sequence[int] | None = None,
    experts_of_ranks: Sequence[int] | None = None,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Multiply each row of `a` by the weight of the rank to which it is given, where that weight
    is, and bring the product back, collectively: dispatch, experts and combine in one call.

    The result is that of `all_to_all_matmul` followed by the reverse `all_to_all`. Rows travel and
    products return while others are multiplied, and no rank waits between them. A weight may be any
    function of rows (`weft.weight`), such as a whole expert. Ranks exchange the sizes of the parts
    in the call itself, so they may change with each call; no row is dropped. Each row of the result
    is written by one rank, so it has the same bits in every run.

    Gradients flow to a, b and bias, by the same operator: rows of the result's gradient are
    dispatched to the weights, and return as a's gradient. If weights or biases require gradients,
    on all ranks or on none, the rows of a are dispatched once more with them: so only a is kept,
    and there are no second derivatives.

    Arguments and errors are those of `all_to_all_matmul`, except:

    Args:
        b: (K, N), or a list of this rank's experts, with equal N on all ranks.
        out: contiguous (rows, N) for the rows of a, not overlapping an input.
        algorithm: ``push`` (rows and products are put in pieces, while others are multiplied),
            ``sequential`` (all rows, the products, all products) or ``auto``.

    Returns:
        (rows, N) of `out_dtype`: for each row of a its product, in the same place.

    Examples:
        >>> def multiplied_by_the_ranks_in_turn():
        ...     rank = weft.init().rank
        ...     return weft.all_to_all_matmul_all_to_all(
        ...         torch.ones(3, 1), (1.0 + rank) * torch.eye(1), input_split_sizes=[1, 2]
        ...     )
        >>> with weft.local_world(2) as local:
        ...     [y.flatten().tolist() for y in local.run(multiplied_by_the_ranks_in_turn)]
        [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]
    """
    sizes, experts = as_key(input_split_sizes), as_key(experts_of_ranks)
    options = out_dtype, algorithm, chunk_rows, sizes, experts
    made, _ = prologue.call(OPERATOR, a, b, bias, out, options, world, timeout)
    return made[0]


def check(world: World, operands: Operands, options: AllToAllMatmulAllToAll) -> FusedCall:
    """A checked call: errors are raised here, before any row is sent."""
    checked = expert_calls.checked(world, operands, options, schedule.OPERATOR)
    return _RoundTripCall(world, options, schedule.OPERATOR.name, checked)


class _RoundTripCall(ExpertCall):
    @property
    def shared(self) -> Workload:
        return self.workload._replace(packed=True)

    def overlapped(self) -> tuple[str, str]:
        return "push", "rows and products are put to other ranks while others are multiplied"


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank, which has `kept` rows, by definition: parts of its rows, as equal as
    possible, each times the weight of a rank.
    """
    return [
        torch.cat([part @ b for part, b in zip(a.tensor_split(len(inputs)), weights, strict=True)])
        for a in inputs
    ]


def _fake(call: Recorded) -> list[Tensor]:
    a, (b, *_), _, options, _, _ = call
    return [a.new_empty(a.shape[0], b.shape[1], dtype=options.out_dtype or a.dtype)]


def _save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    a, weights, biases, options, ctx.timeout, ctx.world = call
    ctx.back = AllToAllMatmulAllToAll(
        input_split_sizes=options.input_split_sizes, experts_of_ranks=options.experts_of_ranks
    )
    ctx.dtype, ctx.for_a = a.dtype, a.requires_grad
    ctx.for_weights = [b.requires_grad for b in weights]
    ctx.for_biases = [bias.requires_grad for bias in biases]
    rows = [a] if any((*ctx.for_weights, *ctx.for_biases)) else []
    ctx.save_for_backward(*rows, *weights)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """da: the rows of dy, dispatched to b^T, for db together with the rows of a."""
    dy = grads[0]
    assert dy is not None
    dy = dy.to(ctx.dtype)
    if not any((*ctx.for_weights, *ctx.for_biases)):
        (for_a,) = torch.ops.weft.all_to_all_matmul_all_to_all(
            dy, [b.t() for b in ctx.saved_tensors], [], *ctx.back, ctx.timeout, ctx.world
        )
        return for_a, [None] * len(ctx.for_weights), [None] * len(ctx.for_biases)
    a, *weights = ctx.saved_tensors
    back = ctx.back
    for_a, *found = torch.ops.weft.round_trip_gradients(
        dy, a, weights, back.input_split_sizes, back.experts_of_ranks, ctx.timeout, ctx.world
    )
    wanted = *ctx.for_weights, *ctx.for_biases
    found = [each if of else None for each, of in zip(found, wanted, strict=False)]
    number = len(weights)
    return for_a if ctx.for_a else None, found[:number], found[number:]


def _gradients(
    dy: Tensor,
    a: Tensor,
    weights: Sequence[Tensor],
    input_split_sizes: Sequence[int] | None,
    experts_of_ranks: Sequence[int] | None,
    timeout: float | None,
    world: Sequence[int],
) -> list[Tensor]:
    """The gradients of a, of this rank's weights, and of their biases; collective. Rows are
    dispatched again, with the gradients of their products.
    """
    transposed = [_TransposedWeight(b.detach()) for b in weights]
    (for_a,), _ = prologue.call(
        OPERATOR,
        a.detach(),
        transposed,
        None,
        None,
        (None, "auto", None, as_key(input_split_sizes), as_key(experts_of_ranks)),
        autograd.recorded_world(world),
        timeout,
        companions=(dy.detach(),),
    )
    for_weights = [each.for_b.t().to(a.dtype) for each in transposed]
    return [for_a, *for_weights, *[each.for_bias.to(a.dtype) for each in transposed]]


class _ProductGradients(WeightKernel):
    """The gradients of rows, from those of their products; the weight's gradient is accumulated as
    a side effect.
    """

    name = "product_gradients"
    companions = ("grads",)


class _TransposedWeight(FunctionWeight):
    """The transpose of a weight (K, N) as the weight of rows whose companions are the gradients dy
    of their products: a row (K) is that of ``dy @ b.T``, and both add to the gradients of b, which
    is transposed, and of a bias. Sums are at least of float32; pieces of rows come in the order of
    the plan, so they have the same bits in every run.
    """

    kernel = _ProductGradients()

    def __init__(self, b: Tensor) -> None:
        self.b, (k, n) = b, b.shape
        wide = torch.float64 if b.dtype == torch.float64 else torch.float32
        self.for_b, self.for_bias = b.new_zeros(n, k, dtype=wide), b.new_zeros(n, dtype=wide)
        super().__init__(self._add, (k, k), b.dtype, 1)

    def _add(self, x: Tensor, dy: Tensor, out: Tensor) -> None:
        multiply(dy, self.b.t(), out)
        made = torch.empty_like(self.for_b)
        multiply(dy.t(), x, made)
        self.for_b += made
        self.for_bias += dy.sum(0, dtype=self.for_bias.dtype)


def _fake_gradients(dy: Tensor, a: Tensor, weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    for_weights = [b.new_empty(b.shape[1], b.shape[0]).t() for b in weights]
    return [a.new_empty(a.shape), *for_weights, *(b.new_empty(b.shape[1]) for b in weights)]


torch.library.custom_op(
    "weft::round_trip_gradients",
    _gradients,
    mutates_args=(),
    schema=(
        "(Tensor dy, Tensor a, Tensor[] weights, SymInt[]? input_split_sizes, "
        "SymInt[]? experts_of_ranks, float? timeout, SymInt[] world) -> Tensor[]"
    ),
).register_fake(_fake_gradients)

OPERATOR = FusedOperator(
    schedule.OPERATOR,
    AllToAllMatmulAllToAll,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(_save, _backward),
    exchange=partial(expert_calls.exchange, schedule.OPERATOR),
)
