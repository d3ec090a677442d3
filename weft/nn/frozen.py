"""Weights of layers that their owner has promised not to change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.kernels.packed import PackedWeight, pack


class FrozenWeight:
    """A layer's parameter (N, K) that is promised not to change, and `packed`, the weight (K, N)
    laid out for products.
    """

    packed: PackedWeight

    @torch.no_grad()
    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        # of a DTensor ``to_local()`` may make a new view in each call
        self._part = parameter._local_tensor if isinstance(parameter, DTensor) else None
        self._version = _version(parameter)
        self.packed = pack((parameter if self._part is None else self._part).t())
        self.packed.watched = True  # by `changed`

    def changed(self, parameter: Tensor) -> bool:
        """Whether `parameter`, which the layer has now, is another one, or was changed as
        `PackedWeight.changed` detects it.
        """
        if parameter is not self._parameter or self.packed.changed():
            return True
        if self._part is None:
            return False
        assert isinstance(parameter, DTensor)
        # writes to a DTensor do not raise the version of its part
        return parameter._local_tensor is not self._part or _version(parameter) != self._version


def _version(tensor: Tensor) -> int:
    """The number of writes that torch has counted; it counts none to inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
