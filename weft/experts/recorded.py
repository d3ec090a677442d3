"""Layers of experts as custom operators of torch, for gradients and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.experts.gradients import Gradients
from weft.experts.layer import OPERANDS, Layer

_OPERANDS = len(OPERANDS.split(", "))


class LayerOperator(NamedTuple):
    """A layer that torch may record: ``sums(layer, *others)``, and its backward pass
    ``gradients(layer, grad, of_tokens, *others)``, in which `of_tokens` says whether the gradients
    of x or scores are needed. `others` are further arguments in the schema.
    """

    name: str
    sums: Callable[..., Tensor]
    gradients: Callable[..., Gradients]
    others: tuple[str, ...] = ()

    def __call__(self, layer: Layer, *others: Any) -> Tensor:
        """The result of a call that torch records."""
        result: Tensor = getattr(torch.ops.weft, self.name).default(*layer.values, *others)
        return result


def register(operator: LayerOperator) -> None:
    """Define ``torch.ops.weft.NAME``, and ``NAME_gradients``."""
    name, sums, gradients, others = operator
    schema = ", ".join((OPERANDS, *others))

    def run(*inputs: Any) -> Tensor:
        with torch.no_grad():
            return sums(Layer.of(inputs[:_OPERANDS]), *inputs[_OPERANDS:])

    def run_backward(grad: Tensor, of_tokens: bool, *inputs: Any) -> Gradients:
        layer = Layer.of(inputs[:_OPERANDS])
        return gradients(layer, grad, of_tokens, *inputs[_OPERANDS:])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, chosen, scores, gate_up, down, *ctx.rest = inputs
        ctx.save_for_backward(x, chosen, scores, gate_up, down)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once, as a checkpoint unpacks each tensor once
        x, _, scores, *_ = saved
        of_tokens = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        for_x, for_scores, *for_weights = of_backward(grad, of_tokens, *saved, *ctx.rest)
        none = [None] * len(ctx.rest)
        return for_x.to(x.dtype), None, for_scores.to(scores.dtype), *for_weights, *none

    made = torch.library.custom_op(
        f"weft::{name}", run, mutates_args=(), schema=f"({schema}) -> Tensor"
    )
    made.register_fake(lambda x, *_: x.new_empty(x.shape))
    made.register_autograd(backward, setup_context=save)
    of_backward = torch.library.custom_op(
        f"weft::{name}_gradients",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor grad, bool of_tokens, {schema}) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    of_backward.register_fake(_fake_gradients)


def _fake_gradients(grad: Tensor, of_tokens: bool, *inputs: Any) -> Gradients:
    x, _, scores, gate_up, down, *_ = inputs
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for_x, for_scores = (each.new_empty(each.shape, dtype=wide) for each in (x, scores))
    return for_x, for_scores, torch.empty_like(gate_up), torch.empty_like(down)
