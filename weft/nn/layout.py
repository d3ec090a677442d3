"""Placements of activations and parameters on ranks, and a rank's part of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from weft.checks import waited
from weft.world import World


class TensorLayout(NamedTuple):
    """The placements of a layer's inputs and outputs. On a mesh inputs may be DTensors, and outputs
    are DTensors unless `local`.
    """

    input: Placement
    output: Placement
    mesh: DeviceMesh | None = None
    local: bool = True

    def __deepcopy__(self, memo: object) -> TensorLayout:
        return self  # the mesh belongs to the ranks

    def on_mesh(self) -> DeviceMesh:
        assert self.mesh is not None, "layers without a mesh take and return plain tensors"
        return self.mesh


def normal(placement: Placement, dims: int) -> Placement:
    """The placement for tensors of `dims` dimensions, without a negative dimension."""
    return (
        Shard(placement.dim + dims)
        if isinstance(placement, Shard) and placement.dim < 0
        else placement
    )


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placement: Placement, size: int | None = None
) -> DTensor:
    """A DTensor of local parts; `size` is the full tensor's along a sharded dimension, None if
    parts are equal.
    """
    if size is None or not isinstance(placement, Shard):
        return DTensor.from_local(local, mesh, [placement], run_check=False)
    shape = torch.Size([*local.shape[: placement.dim], size, *local.shape[placement.dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return waited(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def summed(parameter: Tensor | None) -> Tensor | None:
    """A replicated parameter that each rank applies to its own rows, so that its gradient is the
    sum over ranks.
    """
    return (
        parameter.to_local(grad_placements=[Partial()])
        if isinstance(parameter, DTensor)
        else parameter
    )


def chunk_sizes(size: int, ranks: int) -> list[int]:
    """The sizes of the parts by `torch.chunk` and DTensor: the first parts are full, the last ones
    may be empty.
    """
    full = -(-size // ranks)
    return [min(full, max(0, size - rank * full)) for rank in range(ranks)]


def part(parameter: Tensor, dim: int, world: World) -> nn.Parameter:
    """A parameter with this rank's part of `parameter` along `dim`."""
    part = torch.split(parameter.detach(), chunk_sizes(parameter.shape[dim], world.ranks), dim)[
        world.rank
    ]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format))
