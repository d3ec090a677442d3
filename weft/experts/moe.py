"""A layer of experts in one call. Tokens that every rank has are computed by each rank's experts
and the results all-reduced; tokens that one rank has are dispatched to their experts and combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.experts import dispatch, dispatched_tokens
from weft.experts.gradients import Gradients, gradients
from weft.experts.layer import Layer
from weft.experts.options import LayerOptions
from weft.experts.recorded import LayerOperator
from weft.experts.weights import Experts
from weft.ops import matmul_all_reduce, prologue
from weft.ops.all_reduce import all_reduce
from weft.ops.autograd import recorded_world
from weft.ops.options import check_types, schema
from weft.ops.rejections import report
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
    own `experts`: any number, also none, numbered from `Experts.first`. A choice of an expert that
    no rank has counts as none. Ranks may also have parts of the same experts, of which each has
    some of the numbers between the products, as in tensor parallelism. The sum over the ranks is
    that of `matmul_all_reduce`, in its algorithms: while some tokens are summed, others are
    multiplied. All ranks get the same bits.

    **Each rank has its own tokens**, with `experts_of_ranks`. By `push` and `sequential`, those of
    `all_to_all_matmul_all_to_all`, a token is dispatched to every rank that has experts which it
    chose, once, however many these are, and what they contribute is combined. By `shared` and
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

    Gradients of tokens that every rank has follow the convention of `matmul_all_reduce`: every rank
    computes the same loss, and gradients of x and scores are all-reduced and equal the
    single-process ones. Of other tokens they are those of the sum of all ranks' losses. Gradients
    of an expert's weights are complete on its rank. A call is recorded on all ranks or on none.
    There are no second derivatives.

    Args:
        x: (T, K), the tokens, as in `expert_sums`.
        chosen: (T, top), as in `expert_sums`; top is the same on all ranks.
        scores: (T, top), as in `expert_sums`.
        experts: this rank's, from `pack_experts`.
        experts_of_ranks: the number of experts of each rank, if the ranks have different tokens;
            experts are then numbered rank by rank. None if every rank has the same tokens.
        algorithm: as in `matmul_all_reduce`; with experts_of_ranks ``push``, ``sequential``,
            ``shared``, ``gathered`` or ``auto``.
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
        layer, sizes = Layer(x, chosen, scores, experts), experts_of_ranks
        layer.check()
        compiling = torch.compiler.is_compiling()
        if not compiling:
            experts.check_unchanged()
            sizes = None if sizes is None else dispatch.check_sizes(sizes, experts, world)
        options = LayerOptions(sizes, algorithm, chunk_rows, timeout)
        if not compiling:
            check_types(options)
        if layer.recorded:
            return OPERATOR(layer, *options, world.name)
        return _sums(layer, options, world)
    except Exception as error:
        report(error, world)
        raise


def _sums(layer: Layer, options: LayerOptions, world: World) -> Tensor:
    """The layer of checked operands, without gradients; collective."""
    if options.experts_of_ranks is not None:
        return dispatched_tokens.sums(layer, options, world)
    x, *routing, experts = layer.ready()
    asked = "sum", None, options.algorithm, options.chunk_rows, False
    (result,), _ = prologue.call(
        matmul_all_reduce.OPERATOR,
        x,
        experts.routed,
        None,
        None,
        asked,
        world,
        options.timeout,
        companions=tuple(routing),
    )
    return result


def _gradients(
    layer: Layer, grad: Tensor, of_tokens: bool, options: LayerOptions, world: World
) -> Gradients:
    """The gradients of x and scores, all-reduced if every rank has the same tokens and they are
    needed, and of this rank's weights.
    """
    if options.experts_of_ranks is not None:
        return dispatched_tokens.gradients(layer, grad, options, world)
    for_x, for_scores, for_gate_up, for_down = gradients(layer, grad)
    if of_tokens:
        sums = torch.cat((for_x.view(-1), for_scores.view(-1)))
        all_reduce(sums, out=sums, world=world, timeout=options.timeout)
        for_x, for_scores = (
            part.view(like.shape).clone()  # one operator's results share no memory
            for part, like in zip(
                sums.split((for_x.numel(), for_scores.numel())), (for_x, for_scores), strict=True
            )
        )
    return for_x, for_scores, for_gate_up, for_down


def _recorded_sums(layer: Layer, *others: Any) -> Tensor:
    *values, name = others
    options, world = LayerOptions(*values), recorded_world(name)
    with world.failure.report_rejection:
        if options.experts_of_ranks is not None:
            dispatch.check_sizes(options.experts_of_ranks, layer.experts, world)
        return _sums(layer, options, world)


def _recorded_gradients(layer: Layer, grad: Tensor, of_tokens: bool, *others: Any) -> Gradients:
    *values, name = others
    world = recorded_world(name)
    with world.failure.report_rejection:
        return _gradients(layer, grad, of_tokens, LayerOptions(*values), world)


OPERATOR = LayerOperator(
    "moe", _recorded_sums, _recorded_gradients, (schema(LayerOptions), "SymInt[] world")
)
