"""A layer of experts whose tokens are each on one rank, from which their rows visit the experts,
and its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.experts.gradients import Gradients, add_gradients
from weft.experts.layer import Layer
from weft.experts.options import LayerOptions
from weft.experts.routed import RoutedExperts
from weft.experts.ways import Rows, visit
from weft.kernels.function import weight
from weft.world import World


def rows_of(layer: Layer) -> Rows:
    """The rows of a layer's tokens, which the experts of other ranks multiply."""
    x, chosen, scores, experts = layer.ready()
    routed = experts.routed(chosen.shape[1])
    return Rows(lambda tokens: routed.rows(x, chosen, scores, tokens), routed, x.dtype)


def sums(layer: Layer, options: LayerOptions, world: World) -> Tensor:
    """The layer of checked operands, without gradients; collective."""
    return visit(layer.chosen, rows_of(layer), options, world)


def gradients(layer: Layer, grad: Tensor, options: LayerOptions, world: World) -> Gradients:
    """The gradients of a layer; collective. Rows visit the experts again, with the gradients of
    their results.
    """
    x, chosen, scores, experts = layer.ready()
    routed = RoutedExperts(experts, chosen.shape[1])
    width, at = x.shape[1], routed.shape[0]
    for_gate_up, for_down = torch.zeros_like(experts.gate_up), torch.zeros_like(experts.down)

    def rows(tokens: Tensor) -> Tensor:
        # as wide as lets routings be aligned
        of_results = x.new_zeros(len(tokens), routed.routing_at)
        of_results[:, :width] = grad[tokens[:, 0]]
        return torch.cat((routed.rows(x, chosen, scores, tokens), of_results), 1)

    def product(rows: Tensor, out: Tensor) -> None:
        visitors = Layer(*routed.split(rows[:, :at]), experts)
        for_x, for_scores = out.zero_().split((width, visitors.chosen.shape[1]), 1)
        into = for_x, for_scores, for_gate_up, for_down
        add_gradients(rows[:, at : at + width], visitors, into)

    shape = at + routed.routing_at, width + chosen.shape[1]
    found = visit(chosen, Rows(rows, weight(product, shape, x.dtype), layer.wide), options, world)
    # one operator's results share no memory
    for_x, for_scores = (
        part.clone(memory_format=torch.contiguous_format)
        for part in found.split((width, chosen.shape[1]), 1)
    )
    return for_x, for_scores, for_gate_up, for_down
