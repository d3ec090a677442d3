"""The experts of a rank, packed once for many products."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import weft._native as _native
from weft.experts import fastest, methods
from weft.experts.weights import Experts
from weft.kernels.packed import SAMPLED


class PackedExperts(Experts):
    """Experts laid out for products; made by `pack_experts`.

    Examples:
        >>> weft.pack_experts(torch.randn(2, 4, 6), torch.randn(2, 6, 2)).changed()
        False
    """

    packed = True

    def __init__(
        self, gate_up: Tensor, down: Tensor, *, first: int = 0, activation: str = "silu"
    ) -> None:
        super().__init__(gate_up, down, first=first, activation=activation)
        if any(tensor.device.type != "cpu" for tensor in (gate_up, down)):
            raise ValueError(f"weights to pack must be on the CPU; got {gate_up.device}")
        self._watches = [_watch(tensor) for tensor in (gate_up, down)]
        self._forms: dict[str, Any] = {}

    def changed(self) -> bool:
        """Whether a weight was written to, or its memory replaced, since it was packed."""
        return any(watch.changed() for watch in self._watches)

    def check_unchanged(self) -> None:
        if self.changed():
            raise ValueError(
                "the weights of the experts were changed after they were packed; pack them again "
                "with weft.pack_experts(gate_up, down)"
            )

    def form(self, method: str) -> Any:
        """The weights as a method takes them; made at the first use."""
        if method not in self._forms:
            with torch.no_grad():
                self._forms[method] = methods.METHODS[method].packed(self)
        return self._forms[method]

    @functools.cached_property
    def method(self) -> str:
        """The name of the method that computes them, chosen at the first call for torch's number of
        threads.
        """
        return fastest.fastest(self)

    def sums(self, x: Tensor, chosen: Tensor, scores: Tensor, out: Tensor) -> None:
        run = methods.METHODS[self.method].run
        run(self.form(self.method), self, x, chosen, scores, out)


def pack_experts(
    gate_up: Tensor, down: Tensor, *, first: int = 0, activation: str = "silu"
) -> PackedExperts:
    """Lay out the weights of experts for use in many calls.

    Arguments and errors are those of `Experts`; operators take the result in its place. It keeps
    both tensors, and a copy of them in the layout of the fastest product: weft's own, which
    computes gate, up, activation and down of all experts in one call, unless one expert after
    another by `pack` was faster on this machine by a quarter.

    Packing is the promise of `weft.pack`: the weights do not change as long as the result is used.
    A call that is recorded, or compiled, multiplies by `gate_up` and `down` themselves, which get
    the gradients.

    Examples:
        >>> experts = weft.pack_experts(torch.ones(2, 2, 3), torch.ones(2, 3, 1), activation="relu")
        >>> x, chosen, scores = torch.ones(1, 3), torch.tensor([[1]]), torch.ones(1, 1)
        >>> weft.expert_sums(x, chosen, scores, experts)
        tensor([[9., 9., 9.]])
    """
    return PackedExperts(gate_up, down, first=first, activation=activation)


@torch.no_grad()
def _watch(tensor: Tensor) -> _native.Watch:
    # elements of a matrix are sampled
    matrix = tensor.flatten(0, 1) if tensor.is_contiguous() else tensor
    return _native.Watch(matrix, not matrix.is_inference(), SAMPLED)
