"""A layer of experts whose tokens are each on one rank, from which their rows visit the experts,
and its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

import weft._native as _native
from weft.experts.gradients import Gradients, add_gradients
from weft.experts.layer import Layer
from weft.experts.options import LayerOptions
from weft.experts.routed import ExpertSums
from weft.experts.ways import Rows, visit
from weft.kernels.function import FunctionWeight
from weft.kernels.weights import WeightKernel
from weft.ops.dims import adjacent
from weft.world import World


class ExpertGradients(WeightKernel):
    """The gradients of rows and of their scores by a rank's experts; those of the experts' weights
    are added up on the way.
    """

    name = "expert_gradients"
    companions = (*ExpertSums.companions, "grads")


class _Visited(FunctionWeight):
    """A rank's experts as the weight of rows whose companions are their routing and the gradients
    of their results: a row (K + top) has those of the row and of its scores.
    """

    kernel = ExpertGradients()

    def __init__(self, layer: Layer) -> None:
        experts, (width, top) = layer.experts, (layer.x.shape[1], layer.chosen.shape[1])
        self.experts, self.parts = experts, (width, top)
        self.for_gate_up = torch.zeros_like(experts.gate_up)
        self.for_down = torch.zeros_like(experts.down)
        super().__init__(self._add, (width, width + top), layer.x.dtype, 1)

    def _add(self, x: Tensor, chosen: Tensor, scores: Tensor, grads: Tensor, out: Tensor) -> None:
        for_x, for_scores = out.zero_().split(self.parts, 1)
        into = for_x, for_scores, self.for_gate_up, self.for_down
        add_gradients(grads, Layer(x, chosen, scores, self.experts), into)


def rows_of(layer: Layer) -> Rows:
    """The rows of a layer's tokens, which the experts of other ranks multiply."""
    x, chosen, scores, experts = layer.ready()
    return Rows(lambda tokens: _taken(tokens, x, chosen, scores), experts.routed, x.dtype)


def sums(layer: Layer, options: LayerOptions, world: World) -> Tensor:
    """The layer of checked operands, without gradients; collective."""
    return visit(layer.chosen, rows_of(layer), options, world)


def gradients(layer: Layer, grad: Tensor, options: LayerOptions, world: World) -> Gradients:
    """The gradients of a layer; collective. Rows visit the experts again, with the gradients of
    their results.
    """
    layer, grad = layer.ready(), adjacent(grad)
    x, chosen, scores, _ = layer
    visited = _Visited(layer)
    rows = Rows(lambda tokens: _taken(tokens, x, chosen, scores, grad), visited, layer.wide)
    found = visit(chosen, rows, options, world)
    # one operator's results share no memory
    for_x, for_scores = (
        part.clone(memory_format=torch.contiguous_format) for part in found.split(visited.parts, 1)
    )
    return for_x, for_scores, visited.for_gate_up, visited.for_down


def _taken(tokens: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
    """The rows of these tokens (rows, 1) of each matrix."""
    rows = tokens.shape[0]
    made = tuple([each.new_empty(rows, each.shape[1]) for each in matrices])
    _native.take_rows(tokens, [*matrices], [*made])
    return made
