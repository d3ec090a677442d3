"""Norms on tensors that are sharded along a dimension that is not normalised, which need no
communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.checks import check_tensor, waited
from weft.nn.layout import TensorLayout, as_dtensor, normal, summed


class ShardedNorm(nn.Module):
    """A norm over the last dimension of tensors that are sharded along another."""

    layout: TensorLayout
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor) and not torch.compiler.is_compiling():
            x = waited(x)
            check_tensor(x, "input")
            if x.device.type != self.layout.on_mesh().device_type or not x.is_floating_point():
                raise ValueError(
                    f"input must be of a floating dtype, on the mesh's device; got {x.dtype} on "
                    f"{x.device}"
                )
        placement = normal(self.layout.input, x.dim())
        size = None
        if isinstance(placement, Shard) and placement.dim >= x.dim() - len(self.normalized_shape):
            raise ValueError(
                f"dimension {placement.dim} of an input of shape {tuple(x.shape)} is normalised, "
                "so it cannot be sharded"
            )
        if isinstance(x, DTensor):
            size = x.shape[placement.dim] if isinstance(placement, Shard) else None
            x = (
                x if x.placements[0] == placement else x.redistribute(placements=[placement])
            ).to_local()
        y = self._norm(x)
        return y if self.layout.local else as_dtensor(y, self.layout.on_mesh(), placement, size)

    def _norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _RMSNorm(ShardedNorm, nn.RMSNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, summed(self.weight), self.eps)


class _LayerNorm(ShardedNorm, nn.LayerNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, self.normalized_shape, summed(self.weight), summed(self.bias), self.eps
        )


NORMS: dict[type[nn.Module], type[nn.Module]] = {nn.RMSNorm: _RMSNorm, nn.LayerNorm: _LayerNorm}
