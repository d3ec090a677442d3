"""The operands of a layer of experts on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import check_tensor, in_modes, name
from weft.experts.weights import Experts
from weft.ops import arguments
from weft.ops.dims import adjacent


class Layer(NamedTuple):
    """Tokens (T, K), the indices and the scores of the experts that the router chose for each, both
    (T, top), and this rank's experts.
    """

    x: Tensor
    chosen: Tensor
    scores: Tensor
    experts: Experts

    @classmethod
    def of(cls, values: Sequence[Any]) -> Layer:
        """The inverse of `values`, without gradients."""
        x, chosen, scores, gate_up, down, first, activation = values
        experts = Experts(gate_up.detach(), down.detach(), first=first, activation=activation)
        return cls(x.detach(), chosen, scores.detach(), experts)

    @property
    def values(self) -> tuple[Any, ...]:
        """The operands as the arguments of torch's operators, by the schema `OPERANDS`."""
        own = self.experts
        of_experts = own.gate_up, own.down, own.first, own.activation
        return self.x, self.chosen, self.scores, *of_experts

    @property
    def recorded(self) -> bool:
        """Whether torch records a call, for gradients or by the compiler."""
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or in_modes()):
            return False
        own = self.experts
        return arguments.recorded((self.x, self.scores, own.gate_up, own.down))

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which products and a token's results are accumulated."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    def ready(self) -> Layer:
        """The layer as kernels take it: rows with adjacent elements, and scores in the dtype of
        sums.
        """
        x, chosen, scores, experts = self
        return Layer(adjacent(x), adjacent(chosen), adjacent(scores.to(self.wide)), experts)

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` unless the operands fit."""
        x, chosen, scores, experts = self
        if not isinstance(experts, Experts):
            raise TypeError(
                "experts must be weft.Experts or weft.pack_experts(…); got "
                f"{type(experts).__name__}"
            )
        if not torch.compiler.is_compiling():
            for tensor, argument in ((x, "x"), (chosen, "chosen"), (scores, "scores")):
                if _ordinary(tensor):
                    continue
                check_tensor(tensor, argument, traced=True)
                if tensor.device.type != "cpu":
                    raise ValueError(f"{argument} must be on the CPU; got {tensor.device}")
        width = experts.shape.width
        if x.dim() != 2 or x.shape[1] != width:
            raise ValueError(
                f"x must be tokens (T, {width}) for {experts}; got {tuple(x.shape)}: flatten other "
                "dimensions"
            )
        if x.dtype != experts.dtype:
            raise TypeError(
                f"x is {name(x.dtype)} and the experts {name(experts.dtype)}; they must have one "
                f"dtype: pass x.to({experts.dtype})"
            )
        if chosen.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"chosen must be numbers of experts, int64 or int32; got {name(chosen.dtype)}"
            )
        if not scores.is_floating_point():
            raise TypeError(f"scores must be of a floating dtype; got {name(scores.dtype)}")
        if chosen.dim() != 2 or chosen.shape != scores.shape or chosen.shape[0] != x.shape[0]:
            raise ValueError(
                f"chosen and scores must be ({x.shape[0]}, top) for {x.shape[0]} tokens; got "
                f"{tuple(chosen.shape)} and {tuple(scores.shape)}"
            )


OPERANDS = (
    "Tensor x, Tensor chosen, Tensor scores, Tensor gate_up, Tensor down, int first, str activation"
)
"""A layer in the schema of one of torch's operators."""


def _ordinary(tensor: Tensor) -> bool:
    """A fast check that most tensors pass; all checks would take as long as a decoding step."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor.is_nested or in_modes())
    )
