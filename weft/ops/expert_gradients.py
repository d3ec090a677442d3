"""The gradients of the operators that exchange rows with the weights of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from weft.ops import autograd
from weft.ops.operator import Recorded


def result_rows(call: Recorded) -> int:
    """The rows of the result of a recorded call."""
    expected = call.options.output_split_sizes
    return call.a.shape[0] if expected is None else sum(expected)


def save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    """Keep what the backward formulas need: the weights, and the rows that they have multiplied."""
    a, weights, biases, options, timeout, world = call
    ctx.back = {
        "input_split_sizes": options.output_split_sizes,
        "output_split_sizes": options.input_split_sizes,
        "experts_of_ranks": options.experts_of_ranks,
    }
    ctx.of_call = timeout, world
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
