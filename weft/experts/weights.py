"""The experts of a rank, unpacked: calls use their weights as they are at that time."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from weft.checks import check_tensor, name
from weft.experts import methods
from weft.experts.methods import ACTIVATIONS, Shape
from weft.experts.routed import RoutedExperts
from weft.kernels.weights import DTYPES


class Experts:
    """The weights of consecutive experts of a mixture, numbered from `first`, as they are at the
    time of a call.

    An expert computes ``(activation(x @ gate.T) * (x @ up.T)) @ down.T``.

    Args:
        gate_up: (experts, 2 I, K), the rows of the gate before those of up: the parameter
            ``gate_up_proj`` of Mixtral and Qwen-MoE in transformers. Of float16, bfloat16, float32
            or float64, of any strides. There may be no expert: (0, 2 I, K).
        down: (experts, K, I) of the same dtype: ``down_proj``.
        first: the number of the first expert. Other choices belong to other ranks.
        activation: ``silu``, ``gelu``, ``gelu_tanh`` (its approximation by tanh) or ``relu``.

    Raises `ValueError` or `TypeError` for anything else.

    Examples:
        >>> weft.Experts(torch.randn(4, 16, 6), torch.randn(4, 6, 8), first=4)
        Experts(4 of 6 x 8 from number 4, float32)
    """

    packed = False

    def __init__(
        self, gate_up: Tensor, down: Tensor, *, first: int = 0, activation: str = "silu"
    ) -> None:
        if not torch.compiler.is_compiling():
            check_tensor(gate_up, "gate_up", traced=True)
            check_tensor(down, "down", traced=True)
        if gate_up.dim() != 3 or down.dim() != 3:
            raise ValueError(
                "gate_up must be (experts, 2 I, K) and down (experts, K, I); got "
                f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
            )
        (count, both, width), (count_down, out, inner) = gate_up.shape, down.shape
        if (count_down, out, 2 * inner) != (count, width, both):
            raise ValueError(
                f"gate_up {tuple(gate_up.shape)} needs down {(count, width, both // 2)}, (experts, "
                f"K, I); got {tuple(down.shape)}"
            )
        if gate_up.dtype not in DTYPES or gate_up.dtype != down.dtype:
            raise TypeError(
                f"gate_up and down must have one dtype of {', '.join(map(name, DTYPES))}; got "
                f"{name(gate_up.dtype)} and {name(down.dtype)}"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"there is no activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        self.gate_up, self.down, self.first, self.activation = gate_up, down, first, activation
        self.dtype = gate_up.dtype
        self.shape = Shape(count, width, inner)

    @cached_property
    def routed(self) -> RoutedExperts:
        """These experts as a weight of rows that have their routing as companions."""
        return RoutedExperts(self)

    @property
    def requires_grad(self) -> bool:
        return self.gate_up.requires_grad or self.down.requires_grad

    def check_unchanged(self) -> None:
        """Raise `ValueError` if these weights can no longer be used."""

    def sums(self, x: Tensor, chosen: Tensor, scores: Tensor, out: Tensor) -> None:
        """Write each token's sum over its choices to `out` (tokens, K), of the dtype of `x`, or in
        float32: for the choices of these experts, their results times their scores.

        `x` is (tokens, K), `chosen` and `scores` (tokens, top), scores in float32, or float64.
        """

        def weights(number: int) -> tuple[Tensor, Tensor]:
            return self.gate_up[number].t(), self.down[number].t()

        methods.each(weights, self, x, chosen, scores, out)

    def __repr__(self) -> str:
        count, width, inner = self.shape
        return (
            f"{type(self).__name__}({count} of {width} x {inner} from number {self.first}, "
            f"{name(self.dtype)})"
        )
