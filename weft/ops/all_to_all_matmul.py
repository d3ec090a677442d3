"""All-to-all + matmul as an operator: rows of all ranks for this rank's weights, multiplied while
they arrive.
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
from weft.schedules import all_to_all_matmul as schedule
from weft.schedules.workload import Workload
from weft.world import World


def all_to_all_matmul(
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
    """Send parts of `a` to all ranks, and multiply the rows that arrive here by this rank's `b`,
    collectively: the dispatch of tokens to experts, with the first product of these.

    The result is that of `all_to_all` followed by `torch.matmul` (plus `bias`). Own rows are
    multiplied first, then those of each rank as they arrive. Ranks exchange the sizes of the parts
    in the call itself, so they may change with each call; no row is dropped.

    Gradients flow to a, b and bias: that of a is `matmul_all_to_all` of the result's gradient; for
    the gradients of b the rows that arrived are kept.

    Args:
        a: (rows, K), this rank's rows: those for rank 0, then those for rank 1, …; float16,
            bfloat16, float32 or float64; any strides.
        b: (K, N) of a's dtype, any strides, or packed once by `weft.pack`; or a list, with equal N:
            the weights of this rank's *experts*. The experts of all ranks are numbered rank by
            rank, and a has the rows for expert 0, for expert 1, …. Weights require gradients on all
            ranks or on none.
        input_split_sizes: the rows of each part of a: a number for each rank, of a list of weights
            one for each expert of all ranks; zero is allowed. All ranks give them, or none: then
            the parts are equal.
        output_split_sizes: the rows that this rank expects: by rank, for a list of weights by this
            rank's experts, and in each by rank. A difference is a `ValueError` on all ranks.
            Without them the result has what arrives; `torch.compile` needs them.
        return_split_sizes: return the sizes of what has arrived, too, in the order of
            output_split_sizes.
        experts_of_ranks: the number of experts of each rank, zero allowed; the same numbers on all
            ranks. By default each rank has as many as this one. A rank without experts has a b of
            one weight, such as ``torch.empty(K, N)``, which gives N and the kind of weights (plain,
            packed, …), and is never multiplied; its gradient is zero.
        bias: (N,), added to every row; a list where b is one.
        out: contiguous (rows, N) of the rows that arrive, not overlapping an input.
        out_dtype: a's dtype (default) or float32.
        algorithm: ``push`` (rows are put in pieces, while others are multiplied), ``by_expert``
            (all rows of an expert are multiplied at once, while those for the next arrive),
            ``sequential`` (all rows, then the products) or ``auto``; `explain` names the selection
            of auto.
        chunk_rows: the most rows that a push sends together.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take; by default the world's.

    Returns:
        (rows, N) of `out_dtype`: the products of the rows of rank 0, of rank 1, …; of a list of
        weights by this rank's experts, and in each by rank. With `return_split_sizes` a pair.

    Raises:
        ValueError, TypeError: bad arguments, before any row is sent.
        MismatchError, PeerLost, PeerTimeout: the ranks do not make the same call, as with other
            experts_of_ranks, or one is lost or late; the world is closed.

    Examples:
        >>> def rows_for_this_rank_doubled():
        ...     a = torch.arange(3.0).view(3, 1) + 10 * weft.init().rank
        ...     return weft.all_to_all_matmul(a, 2 * torch.eye(1), input_split_sizes=[1, 2])
        >>> with weft.local_world(2) as local:
        ...     [y.flatten().tolist() for y in local.run(rows_for_this_rank_doubled)]
        [[0.0, 20.0], [2.0, 4.0, 22.0, 24.0]]
    """
    options = (
        out_dtype,
        algorithm,
        chunk_rows,
        as_key(input_split_sizes),
        as_key(output_split_sizes),
        as_key(experts_of_ranks),
        False,
    )
    made, record = prologue.call(OPERATOR, a, b, bias, out, options, world, timeout)
    if not return_split_sizes:
        return made[0]
    return made[0], expert_calls.arrived(OPERATOR, a, b, record or options, world)


def check(world: World, operands: Operands, options: AllToAllMatmul) -> FusedCall:
    """A checked call, which computes the result, and the rows that arrived if `options.keep`."""
    checked = expert_calls.checked(world, operands, options, schedule.OPERATOR)
    call = _DispatchCall(world, options, schedule.OPERATOR.name, checked)
    if options.keep:
        call.keep()
    return call


class _DispatchCall(ExpertCall):
    @property
    def shared(self) -> Workload:
        workload = self.workload
        return workload._replace(n=0, out_dtype=workload.dtype, packed=True)

    def overlapped(self) -> tuple[str, str]:
        return "push", "rows are put to other ranks while own ones are multiplied"


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank, which has `kept` rows, by definition: equal parts of all ranks' rows
    for it, times its weight.
    """
    parts = [rows // len(inputs) for rows in kept]
    received = zip(*(a.split(parts) for a in inputs), strict=True)
    return [torch.cat(rows) @ b for rows, b in zip(received, weights, strict=True)]


def _fake(call: Recorded) -> list[Tensor]:
    a, (b, *_), _, options, _, _ = call
    rows = expert_gradients.result_rows(call)
    result = a.new_empty(rows, b.shape[1], dtype=options.out_dtype or a.dtype)
    return [result, a.new_empty(rows, a.shape[1])] if options.keep else [result]


def _save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    if any(b.requires_grad for b in call.weights) and not call.options.keep:
        raise ValueError("the gradient of a weight needs the rows that arrive: pass keep=True")
    expert_gradients.save(ctx, call, results)
    ctx.shape = results[0].shape
    ctx.set_materialize_grads(False)  # zeros for the rows that arrived would be multiplied


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """da = dy @ b^T, returned to the rows' ranks, and db = the rows that arrived^T @ dy."""
    *weights, rows = ctx.saved_tensors if any(ctx.for_weights) else (*ctx.saved_tensors, None)
    dy, arrived = (*grads, None)[:2]
    dy = weights[0].new_zeros(ctx.shape) if dy is None else dy.to(weights[0].dtype)
    for_a = None
    if ctx.for_a:
        back, factors = dy, [b.t() for b in weights]
        if arrived is not None:  # it has a gradient in second derivatives
            one = torch.eye(arrived.shape[1], dtype=dy.dtype, device=dy.device)
            back, factors = torch.cat([dy, arrived], 1), [torch.cat([b, one]) for b in factors]
        (for_a,) = torch.ops.weft.matmul_all_to_all(
            back, factors, [], *MatmulAllToAll(**ctx.back), *ctx.of_call
        )
    sizes = ctx.back["input_split_sizes"]
    return for_a, *expert_gradients.weight_gradients(ctx, rows, dy, sizes)


OPERATOR = FusedOperator(
    schedule.OPERATOR,
    AllToAllMatmul,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(_save, _backward),
    exchange=partial(expert_calls.exchange, schedule.OPERATOR),
)
