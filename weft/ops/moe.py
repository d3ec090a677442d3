"""A layer of experts whose tokens are on every rank: each rank computes those for its own experts,
and results are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.experts import Experts, RoutedExperts
from weft.ops import autograd
from weft.ops.all_reduce import all_reduce
from weft.ops.expert_sums import (
    OPERANDS,
    check_routing,
    factors,
    fake_gradients,
    gradients,
    recorded,
    save,
)
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.world import World, current


def moe(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    experts: Experts,
    *,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The layer of a mixture of experts on tokens that every rank has, collectively: each token's
    weighted sum of the results of the experts that it chose, on every rank, with equal bits.

    Each rank passes the same tokens, choices and scores, and its own `experts`: any number, also
    none, with numbers of their own (`Experts.first`). A choice of an expert that no rank has
    counts as none. Ranks may also have parts of the same experts, of which each has some of the
    numbers between the products, as in tensor parallelism.

    The sum over the ranks is that of `matmul_all_reduce`, in its algorithms: while some tokens are
    summed, others are multiplied. ``auto`` measures which is fastest, as for products.

    Gradients follow the convention of `matmul_all_reduce`: all ranks compute the same loss from the
    result. Those of x and of scores are summed over the ranks, and so are, on every rank, those of
    the layer in one process; those of an expert's weights need no communication. A call is recorded
    on all ranks or on none. There are no second derivatives.

    Args:
        x: (T, K), the tokens, as in `expert_sums`; the same on all ranks.
        chosen: (T, top), as in `expert_sums`; the same on all ranks.
        scores: (T, top), as in `expert_sums`; the same on all ranks.
        experts: this rank's, from `pack_experts`.
        algorithm: as in `matmul_all_reduce`.
        chunk_rows: as in `matmul_all_reduce`.
        world: by default the world made by ``weft.init()``.
        timeout: seconds; a recorded call has no timeout but the world's.

    Returns:
        (T, K) of x's dtype.

    Errors are those of `expert_sums` and `matmul_all_reduce`.

    Examples:
        >>> def layer():
        ...     rank = weft.init().rank
        ...     gate_up, down = torch.full((1, 2, 3), rank + 1.0), torch.ones(1, 3, 1)
        ...     own = weft.pack_experts(gate_up, down, first=rank, activation="relu")
        ...     chosen, scores = torch.tensor([[0, 1], [1, 1]]), torch.ones(2, 2)
        ...     return weft.moe(torch.ones(2, 3), chosen, scores, own)
        >>> with weft.local_world(2) as local:
        ...     local.run(layer)[0]
        tensor([[45., 45., 45.],
                [72., 72., 72.]])
    """
    world = current(world)
    if torch.compiler.is_compiling():
        check_routing(x, chosen, scores, experts)
    else:
        with world.tell_refusal:
            check_routing(x, chosen, scores, experts)
            experts.check_unchanged()
    if recorded(x, scores, experts):
        result: Tensor = torch.ops.weft.moe(
            x,
            chosen,
            scores,
            experts.gate_up,
            experts.down,
            experts.first,
            experts.activation,
            algorithm,
            chunk_rows,
            world.name,
        )
        return result
    weight = experts.routed(chosen.shape[1])
    rows = weight.rows(x, chosen, factors(scores, x.dtype))
    return matmul_all_reduce(
        rows, weight, algorithm=algorithm, chunk_rows=chunk_rows, world=world, timeout=timeout
    )


_OPERANDS = OPERANDS + ", {}SymInt[] world"


def _run(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int,
    activation: str,
    algorithm: str,
    chunk_rows: int | None,
    world: Sequence[int],
) -> Tensor:
    with torch.no_grad():
        experts = Experts(gate_up.detach(), down.detach(), first=first, activation=activation)
        weight = RoutedExperts(experts, chosen.shape[1])
        rows = weight.rows(x.detach(), chosen, factors(scores.detach(), x.dtype))
        return matmul_all_reduce(
            rows,
            weight,
            algorithm=algorithm,
            chunk_rows=chunk_rows,
            world=autograd.recorded_world(world),
        )


def _gradients(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int,
    activation: str,
    of_tokens: bool,
    world: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and scores summed over the ranks, if they are wanted, and those of this
    rank's weights.
    """
    for_x, for_scores, *for_weights = gradients(
        grad, x, chosen, scores, gate_up, down, first, activation
    )
    if of_tokens:
        sums = torch.cat((for_x.view(-1), for_scores.view(-1)))
        all_reduce(sums, out=sums, world=autograd.recorded_world(world))
        for_x, for_scores = (
            part.view(like.shape).clone()  # one operator's results share no memory
            for part, like in zip(
                sums.split((for_x.numel(), for_scores.numel())), (x, scores), strict=True
            )
        )
    for_gate_up, for_down = for_weights
    return for_x, for_scores, for_gate_up, for_down


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, _, _, ctx.world = inputs
    save(ctx, tuple(operands), output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, chosen, scores, gate_up, down = ctx.saved_tensors
    of_tokens = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
    for_x, for_scores, for_gate_up, for_down = torch.ops.weft.moe_gradients(
        grad, x, chosen, scores, gate_up, down, *ctx.options, of_tokens, ctx.world
    )
    of_options = [None] * 5
    return for_x.to(x.dtype), None, for_scores.to(scores.dtype), for_gate_up, for_down, *of_options


_made = torch.library.custom_op(
    "weft::moe",
    _run,
    mutates_args=(),
    schema=f"({_OPERANDS.format('str algorithm, SymInt? chunk_rows, ')}) -> Tensor",
)
_made.register_fake(lambda x, *_: x.new_empty(x.shape))
_made.register_autograd(_backward, setup_context=_save)
torch.library.custom_op(
    "weft::moe_gradients",
    _gradients,
    mutates_args=(),
    schema=(
        f"(Tensor grad, {_OPERANDS.format('bool of_tokens, ')}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
).register_fake(fake_gradients)
