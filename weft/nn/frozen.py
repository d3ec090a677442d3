"""Weights of layers that their owner has promised not to change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.experts.packed import PackedExperts, pack_experts
from weft.kernels.packed import PackedWeight, pack


class FrozenParameter:
    """A layer's parameter that is promised not to change, and `part`, what this rank has of it."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        # of a DTensor ``to_local()`` may make a new view in each call
        self._part = parameter._local_tensor if isinstance(parameter, DTensor) else None
        self._version = _version(parameter)

    @property
    def part(self) -> Tensor:
        return self._parameter if self._part is None else self._part

    def changed(self, parameter: Tensor) -> bool:
        """Whether `parameter`, which the layer has now, is another one, or torch has counted a
        write to the DTensor that it is.
        """
        if parameter is not self._parameter:
            return True
        if self._part is None:
            return False
        assert isinstance(parameter, DTensor)
        # writes to a DTensor do not raise the version of its part
        return parameter._local_tensor is not self._part or _version(parameter) != self._version


class FrozenWeight:
    """A layer's parameter (N, K) that is promised not to change, and `packed`, the weight (K, N)
    laid out for products.
    """

    packed: PackedWeight

    @torch.no_grad()
    def __init__(self, parameter: Tensor) -> None:
        self._frozen = FrozenParameter(parameter)
        self.packed = pack(self._frozen.part.t())
        self.packed.watched = True  # by `changed`

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a layer is not frozen."""

    def changed(self, parameter: Tensor) -> bool:
        """Whether `parameter`, which the layer has now, is another one, or was changed as
        `PackedWeight.changed` detects it.
        """
        return self._frozen.changed(parameter) or self.packed.changed()


class FrozenExperts:
    """The parameters of experts that are promised not to change, and `packed`, laid out for
    products.
    """

    packed: PackedExperts

    @torch.no_grad()
    def __init__(self, gate_up: Tensor, down: Tensor, **options: Any) -> None:
        self._frozen = FrozenParameter(gate_up), FrozenParameter(down)
        self.packed = pack_experts(*(each.part for each in self._frozen), **options)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a layer is not frozen."""

    def changed(self, gate_up: Tensor, down: Tensor) -> bool:
        """Whether a parameter, which the layer has now, is another one, or was changed as
        `PackedExperts.changed` detects it.
        """
        of_gate_up, of_down = self._frozen
        return of_gate_up.changed(gate_up) or of_down.changed(down) or self.packed.changed()


def _version(tensor: Tensor) -> int:
    """The number of writes that torch has counted; it counts none to inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
