"""Matmul + all-to-all as an operator: products of this rank's weights, which return to the ranks
that gave the rows while others are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.kernels.weights import Weight
from weft.ops import expert_calls, expert_gradients, prologue
from weft.ops.arguments import as_key
from weft.ops.expert_calls import ExpertCall
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator, Gradient, Gradients, Recorded
from weft.ops.options import Operands
from weft.ops.records import AllToAllMatmul, MatmulAllToAll
from weft.schedules import matmul_all_to_all as schedule
from weft.schedules.workload import Workload
from weft.world import World


def matmul_all_to_all(
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    return_split_sizes: bool = False,
    experts_of_ranks: Sequence[int] | None = None,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Any:
    """Multiply the parts of `a` by this rank's `b`, and send the products of each part to a rank,
    collectively: the last product of experts, with the return of tokens to their ranks.

    The result is that of `torch.matmul` (plus `bias`) followed by `all_to_all`. Products for other
    ranks are made first, and put there piece by piece while others are made. Each row of the result
    is written once, by one rank, so the result has the same bits in every run. Ranks exchange the
    sizes of the parts in the call itself, as in `all_to_all_matmul`, of which this is the reverse:
    with input and output split sizes swapped.

    Gradients flow to a, b and bias; those of a and b share one `all_to_all_matmul` of the result's
    gradient.

    Arguments and errors are those of `all_to_all_matmul`, except:

    Args:
        a: (rows, K): the rows whose products go to rank 0, then those for rank 1, …; of a list of
            weights those of this rank's first expert, in this order, then those of the second, ….
        input_split_sizes: the rows of each part of a, in this order; none on a rank without
            experts, which gives an empty list.
        output_split_sizes: the rows that this rank expects, in the order of the result.

    Returns:
        (rows, N) of `out_dtype`: the products of rank 0 for this rank, those of rank 1, …; of a
        list of weights those of expert 0 of all, of expert 1, …. With `return_split_sizes` a pair.

    Examples:
        >>> def rows_for_each_rank_doubled():
        ...     a = torch.arange(3.0).view(3, 1) + 10 * weft.init().rank
        ...     return weft.matmul_all_to_all(a, 2 * torch.eye(1), input_split_sizes=[1, 2])
        >>> with weft.local_world(2) as local:
        ...     [y.flatten().tolist() for y in local.run(rows_for_each_rank_doubled)]
        [[0.0, 20.0], [2.0, 4.0, 22.0, 24.0]]
    """
    options = (
        out_dtype,
        algorithm,
        chunk_rows,
        as_key(input_split_sizes),
        as_key(output_split_sizes),
        as_key(experts_of_ranks),
    )
    made, record = prologue.call(OPERATOR, a, b, bias, out, options, world, timeout)
    if not return_split_sizes:
        return made[0]
    return made[0], expert_calls.arrived(OPERATOR, a, b, record or options, world)


def check(world: World, operands: Operands, options: MatmulAllToAll) -> FusedCall:
    """A checked call: errors are raised here, before any row is sent."""
    checked = expert_calls.checked(world, operands, options, schedule.OPERATOR)
    return _ReturnCall(world, options, schedule.OPERATOR.name, checked)


class _ReturnCall(ExpertCall):
    @property
    def shared(self) -> Workload:
        return self.workload._replace(k=0, packed=True)  # K may differ between ranks

    def overlapped(self) -> tuple[str, str]:
        return "push", "products are put to other ranks while others are computed"


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank, which has `kept` rows, by definition: equal parts of all ranks'
    products.
    """
    parts = [rows // len(inputs) for rows in kept]
    products = [(a @ b).split(parts) for a, b in zip(inputs, weights, strict=True)]
    return [torch.cat(received) for received in zip(*products, strict=True)]


def _fake(call: Recorded) -> list[Tensor]:
    a, (b, *_), _, options, _, _ = call
    rows = expert_gradients.result_rows(call)
    return [a.new_empty(rows, b.shape[1], dtype=options.out_dtype or a.dtype)]


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """With g = the rows of dy for this rank, da = g @ b^T and db = a^T @ g share one exchange."""
    *weights, a = ctx.saved_tensors if any(ctx.for_weights) else (*ctx.saved_tensors, None)
    dy = grads[0]
    assert dy is not None
    back = AllToAllMatmul(**ctx.back, keep=True)
    for_a, g = torch.ops.weft.all_to_all_matmul(
        dy.to(weights[0].dtype), [b.t() for b in weights], [], *back, *ctx.of_call
    )
    gradients = expert_gradients.weight_gradients(ctx, a, g, ctx.back["output_split_sizes"])
    return for_a if ctx.for_a else None, *gradients


OPERATOR = FusedOperator(
    schedule.OPERATOR,
    MatmulAllToAll,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(expert_gradients.save, _backward),
    exchange=partial(expert_calls.exchange, schedule.OPERATOR),
)
