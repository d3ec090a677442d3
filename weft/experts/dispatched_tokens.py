"""A layer of experts for ranks with different tokens, by dispatch and combine, and its
gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

import weft._native as _native
from weft.experts.gradients import Gradients, add_gradients
from weft.experts.layer import Layer
from weft.experts.options import LayerOptions
from weft.experts.routed import ExpertSums
from weft.experts.strategies import Rows, dispatch_and_combine
from weft.kernels.function import FunctionWeight
from weft.kernels.weights import WeightKernel
from weft.ops.dims import adjacent
from weft.world import World


class ExpertGradients(WeightKernel):
    """The gradients of rows and their scores; the gradients of the experts' weights are accumulated
    as a side effect.
    """

    name = "expert_gradients"
    companions = (*ExpertSums.companions, "grads")


class _GradientWeight(FunctionWeight):
    """A weight whose product with rows, their routing and the gradients of their results is the
    gradient of the rows (K) and of their scores (top), side by side.
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
    """The rows of a layer's tokens, to dispatch."""
    x, chosen, scores, experts = layer.ready()
    return Rows(lambda tokens: _taken(tokens, x, chosen, scores), experts.routed, x.dtype)


def sums(layer: Layer, options: LayerOptions, world: World) -> Tensor:
    """The layer of checked operands, without gradients; collective."""
    return dispatch_and_combine(layer.chosen, rows_of(layer), options, world)


def gradients(layer: Layer, grad: Tensor, options: LayerOptions, world: World) -> Gradients:
    """The gradients of a layer; collective. Rows are dispatched again, with the gradients of their
    results.
    """
    layer, grad = layer.ready(), adjacent(grad)
    x, chosen, scores, _ = layer
    weight = _GradientWeight(layer)
    rows = Rows(lambda tokens: _taken(tokens, x, chosen, scores, grad), weight, layer.wide)
    found = dispatch_and_combine(chosen, rows, options, world)
    # one operator's results share no memory
    for_x, for_scores = (
        part.clone(memory_format=torch.contiguous_format) for part in found.split(weight.parts, 1)
    )
    return for_x, for_scores, weight.for_gate_up, weight.for_down


def _taken(tokens: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
    """The rows of these tokens (rows, 1) of each matrix."""
    rows = tokens.shape[0]
    made = tuple([each.new_empty(rows, each.shape[1]) for each in matrices])
    _native.take_rows(tokens, [*matrices], [*made])
    return made
