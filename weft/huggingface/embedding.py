"""An embedding whose vocabulary is sharded over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from weft.checks import name
from weft.kernels.weights import DTYPES
from weft.nn.layers import note
from weft.nn.layout import TensorLayout, as_dtensor, chunk_sizes, local
from weft.ops import conjugates
from weft.process_group import worlds
from weft.world import World


class ShardedEmbedding(nn.Embedding):
    """Each rank looks up the tokens of its rows of the weight, a DTensor, and the results are
    summed over ranks.
    """

    world: World
    layout: TensorLayout
    first: int
    """The first token of this rank's rows."""

    def forward(self, input: Tensor) -> Tensor:
        weight = local(self.weight)
        rows = input - self.first
        padding = self.padding_idx
        others = (rows < 0) | (rows >= len(weight))
        if padding is not None:
            padding = padding - self.first if 0 <= padding - self.first < len(weight) else None
        found = F.embedding(rows.masked_fill(others, 0), weight, padding)
        found = found.masked_fill(others.unsqueeze(-1), 0)
        if torch.compiler.is_compiling():
            summed = as_dtensor(found, self.layout.on_mesh(), Partial())
            return summed.redistribute(placements=[Replicate()]).to_local()
        return conjugates.reduce_from_ranks(found, self.world.name)


def obstacle(module: nn.Module, mesh: DeviceMesh) -> str | None:
    """The reason why `module` cannot become a `ShardedEmbedding`, or None."""
    if type(module) is not nn.Embedding:
        return f"{type(module).__name__} is not a plain nn.Embedding"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "max_norm, scale_grad_by_freq and sparse gradients are not supported"
    if mesh.device_type != "cpu" or module.weight.dtype not in DTYPES:
        return f"{name(module.weight.dtype)} on {mesh.device_type} is not supported"
    if not all(chunk_sizes(module.num_embeddings, mesh.size())):
        return "a rank has no row"
    return None


def convert(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make an `nn.Embedding` with sharded rows a `ShardedEmbedding`. Collective, as
    `worlds.make`.
    """
    module.__class__ = ShardedEmbedding
    assert isinstance(module, ShardedEmbedding)
    module.world = worlds.make(mesh.get_group())
    module.layout = TensorLayout(Replicate(), Replicate(), mesh)
    module.first = sum(chunk_sizes(module.num_embeddings, mesh.size())[: module.world.rank])
    return note(module, "weft: all_reduce")
