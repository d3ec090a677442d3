"""The gradients of a layer of experts: of tokens and scores, in the dtype of sums, and of the
weights of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.experts.layer import Layer
from weft.experts.methods import ACTIVATIONS
from weft.experts.routing import by_expert

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradients of x, scores, gate_up and down."""


def gradients(layer: Layer, grad: Tensor) -> Gradients:
    """The gradients of what this rank's experts contribute to the sums."""
    x, chosen, scores, experts = layer
    found = (
        x.new_zeros(x.shape, dtype=layer.wide),
        scores.new_zeros(scores.shape, dtype=layer.wide),
        torch.zeros_like(experts.gate_up),
        torch.zeros_like(experts.down),
    )
    add_gradients(grad, Layer(x, chosen, scores.to(layer.wide), experts), found)
    return found


def add_gradients(grad: Tensor, layer: Layer, into: Gradients) -> None:
    """Add the gradients of a layer whose scores are in the dtype of sums."""
    x, chosen, scores, experts = layer
    for_x, for_scores, for_gate_up, for_down = into
    top, wide = max(chosen.shape[1], 1), scores.dtype
    for number, tokens, at in by_expert(experts, chosen):
        gate_up, down = experts.gate_up[number], experts.down[number]
        choice = at % top
        rows, dy = x[tokens], grad[tokens]
        gate, up = (rows @ gate_up.t()).chunk(2, 1)
        active = ACTIVATIONS[experts.activation](gate)
        between = active * up
        for_scores[tokens, choice] += (dy.to(wide) * (between @ down.t()).to(wide)).sum(1)
        dy = (dy.to(wide) * scores[tokens, choice].unsqueeze(1)).to(x.dtype)
        for_down[number] += dy.t() @ between
        d_between = dy @ down
        d_gate = _BACKWARD[experts.activation](d_between * up, gate)
        both = torch.cat((d_gate, d_between * active), 1)
        for_gate_up[number] += both.t() @ rows
        for_x.index_add_(0, tokens, (both @ gate_up).to(wide))


_aten = torch.ops.aten
_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda grad, gate: _aten.gelu_backward(grad, gate, approximate="tanh"),
    "relu": lambda grad, gate: _aten.threshold_backward(grad, gate, 0),
}
"""The gradients of the activations, from the gradient of the result and the input."""
