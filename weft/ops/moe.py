"""A layer of experts in one call. Where every rank has the same tokens each computes its own
experts, and results are summed over the ranks; tokens that one rank has visit the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.experts import Experts
from weft.ops import autograd, dims, visits
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
from weft.ops.options import Options
from weft.ops.own_tokens import Layer
from weft.ops.refusals import tell
from weft.world import World, current


def moe(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    experts: Experts,
    *,
    experts_of_ranks: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The layer of a mixture of experts, collectively: each token's weighted sum of the results of
    the experts that it chose.

    **Tokens that every rank has.** Each rank passes the same tokens, choices and scores, and its
    own `experts`: any number, also none, with numbers of their own (`Experts.first`). A choice of
    an expert that no rank has counts as none. Ranks may also have parts of the same experts, of
    which each has some of the numbers between the products, as in tensor parallelism. The sum over
    the ranks is that of `matmul_all_reduce`, in its algorithms: while some tokens are summed,
    others are multiplied. All ranks get the same bits.

    **Tokens that each rank has of its own**, with `experts_of_ranks`. By `push` and `sequential`,
    those of `all_to_all_matmul_all_to_all`, a row of a token travels to every rank that has experts
    which it chose, once, however many these are, and what they contribute returns. By `shared` and
    `gathered`, those of `all_gather_matmul_reduce_scatter`, it travels to every *host* that has
    such experts, once: all ranks of the host read it there, and one sum of what they contribute
    returns. On one host that is an all-gather and a reduce-scatter of uneven rows. Rows travel
    there and back while others are multiplied (`push`, `shared`). Contributions are summed within
    each host in the order of the ranks, and then over the hosts in theirs, each sum in float32 or
    float64 and rounded to the dtype of x: a token has the same bits in every run, and by all
    algorithms as far as those of products do not depend on the number of rows. There is no
    capacity, and no token is left out. Any division of the experts is right, and ranks may have
    different numbers of tokens, also none.

    ``auto`` measures which algorithm is fastest, as for products: of all four if tokens are each on
    one rank. For few rows it takes those of `all_to_all_matmul_all_to_all` without measuring.

    Gradients of tokens that every rank has follow the convention of `matmul_all_reduce`: all ranks
    compute the same loss from the result, and gradients of x and of scores are summed over the
    ranks, and so are, on every rank, those of the layer in one process. Of tokens that each rank
    has of its own they are those of the sum of all ranks' losses. Gradients of an expert's weights
    are complete on its rank. A call is recorded on all ranks or on none. There are no second
    derivatives.

    Args:
        x: (T, K), the tokens, as in `expert_sums`.
        chosen: (T, top), as in `expert_sums`; top is the same on all ranks.
        scores: (T, top), as in `expert_sums`.
        experts: this rank's, from `pack_experts`.
        experts_of_ranks: the number of experts of each rank, if each has tokens of its own; experts
            are then numbered rank by rank. None if every rank has the same tokens.
        algorithm: as in `matmul_all_reduce`; of tokens that each rank has of its own ``push``,
            ``sequential``, ``shared``, ``gathered`` or ``auto``.
        chunk_rows: as there.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take, also of the backward pass; by default the world's.

    Returns:
        (T, K) of x's dtype.

    Errors are those of `expert_sums` and of these operators; `ValueError` if `experts_of_ranks`
    does not give this rank its `experts`.

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
    try:
        world = current(world)
        sizes = experts_of_ranks
        check_routing(x, chosen, scores, experts)
        if not torch.compiler.is_compiling():
            Options(algorithm=algorithm, chunk_rows=chunk_rows, timeout=timeout).check_types()
            experts.check_unchanged()
            sizes = None if sizes is None else visits.check_sizes(sizes, experts, world)
        if recorded(x, scores, experts):
            result: Tensor = torch.ops.weft.moe(
                x,
                chosen,
                scores,
                experts.gate_up,
                experts.down,
                experts.first,
                experts.activation,
                sizes,
                algorithm,
                chunk_rows,
                timeout,
                world.name,
            )
            return result
        return _sums(x, chosen, scores, experts, sizes, algorithm, chunk_rows, world, timeout)
    except Exception as error:
        tell(error, world)
        raise


def _sums(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    experts: Experts,
    sizes: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
    world: World,
    timeout: float | None,
) -> Tensor:
    """The layer of checked operands, without gradients; collective."""
    if sizes is not None:
        layer = Layer(x, chosen, scores, experts, sizes, algorithm, chunk_rows, world, timeout)
        return layer.sums()
    weight = experts.routed(chosen.shape[1])
    rows = weight.rows(dims.adjacent(x), dims.adjacent(chosen), factors(scores, x.dtype))
    return matmul_all_reduce(
        rows, weight, algorithm=algorithm, chunk_rows=chunk_rows, world=world, timeout=timeout
    )


def _run(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int,
    activation: str,
    sizes: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
    timeout: float | None,
    world: Sequence[int],
) -> Tensor:
    own = autograd.recorded_world(world)
    with torch.no_grad(), own.report_refusal:
        experts = Experts(gate_up.detach(), down.detach(), first=first, activation=activation)
        if sizes is not None:
            visits.check_sizes(sizes, experts, own)
        return _sums(
            x.detach(),
            chosen,
            scores.detach(),
            experts,
            sizes,
            algorithm,
            chunk_rows,
            own,
            timeout,
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
    sizes: Sequence[int] | None,
    algorithm: str,
    chunk_rows: int | None,
    timeout: float | None,
    of_tokens: bool,
    world: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and scores, of tokens that every rank has summed over the ranks if they
    are wanted; and those of this rank's weights.
    """
    own = autograd.recorded_world(world)
    if sizes is not None:
        experts = Experts(gate_up.detach(), down.detach(), first=first, activation=activation)
        layer = Layer(x, chosen, scores, experts, sizes, algorithm, chunk_rows, own, timeout)
        with own.report_refusal:
            return layer.gradients(grad)
    for_x, for_scores, *for_weights = gradients(
        grad, x, chosen, scores, gate_up, down, first, activation
    )
    if of_tokens:
        sums = torch.cat((for_x.view(-1), for_scores.view(-1)))
        all_reduce(sums, out=sums, world=own, timeout=timeout)
        for_x, for_scores = (
            part.view(like.shape).clone()  # one operator's results share no memory
            for part, like in zip(
                sums.split((for_x.numel(), for_scores.numel())), (x, scores), strict=True
            )
        )
    for_gate_up, for_down = for_weights
    return for_x, for_scores, for_gate_up, for_down


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, sizes, algorithm, chunk_rows, timeout, ctx.world = inputs
    ctx.exchange = sizes, algorithm, chunk_rows, timeout
    save(ctx, tuple(operands), output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, chosen, scores, gate_up, down = ctx.saved_tensors
    of_tokens = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
    for_x, for_scores, for_gate_up, for_down = torch.ops.weft.moe_gradients(
        grad,
        x,
        chosen,
        scores,
        gate_up,
        down,
        *ctx.options,
        *ctx.exchange,
        of_tokens,
        ctx.world,
    )
    of_options = [None] * 7
    return for_x.to(x.dtype), None, for_scores.to(scores.dtype), for_gate_up, for_down, *of_options


_OPERANDS = (
    OPERANDS + ", SymInt[]? experts_of_ranks, str algorithm, SymInt? chunk_rows, float? timeout, "
)
_made = torch.library.custom_op(
    "weft::moe",
    _run,
    mutates_args=(),
    schema=f"({_OPERANDS}SymInt[] world) -> Tensor",
)
_made.register_fake(lambda x, *_: x.new_empty(x.shape))
_made.register_autograd(_backward, setup_context=_save)
torch.library.custom_op(
    "weft::moe_gradients",
    _gradients,
    mutates_args=(),
    schema=(
        f"(Tensor grad, {_OPERANDS}bool of_tokens, SymInt[] world) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    ),
).register_fake(fake_gradients)
