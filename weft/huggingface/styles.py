"""transformers' styles with weft's layers in them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from weft.huggingface import embedding, experts
from weft.nn import expert_parallel
from weft.nn.layers import ColumnParallelLinear, RowParallelLinear, ShardedLinear, note
from weft.nn.layout import TensorLayout
from weft.nn.styles import convert, obstacle


class Style:
    """A style of transformers, which shards and loads parameters; in the place of the forward that
    it installs is weft's layer, if there is one.
    """

    def __init__(self, style: Any) -> None:
        self.style = style

    def __getattr__(self, name: str) -> Any:
        return getattr(self.style, name)

    def install_forward(
        self, module: nn.Module, mesh: DeviceMesh | None = None, **options: Any
    ) -> nn.Module:
        """Called once for each module, after its parameters are sharded, before they are loaded."""
        kind = type(self.style).__name__
        if mesh is None:
            return experts.install_forward(self.style, module, **options)
        if mesh.size() != dist.get_world_size():
            reason = (
                f"{mesh.size()} of {dist.get_world_size()} ranks share it, and weft's layers only "
                "know models that are sharded in no other way"
            )
        elif kind == "EmbeddingParallel" and self.style.shard_dim == 0:
            if not (reason := embedding.obstacle(module, mesh) or ""):
                return embedding.convert(module, mesh)
        elif kind == "MoeExpertsParallel":
            if not (reason := expert_parallel.obstacle(module, mesh) or ""):
                return expert_parallel.convert(module, mesh)
        elif found := _layer(self.style, mesh):
            layer, layout = found
            if not (reason := obstacle(module, mesh, layer, layout) or ""):
                convert(module, mesh, layer, layout)
                module.__class__ = _QUANTIZABLE[layer]
                module._style = self.style, mesh  # type: ignore[assignment]
                return module
        else:
            reason = f"weft has no layer for {kind}"
        installed: nn.Module = self.style.install_forward(module, mesh, **options)
        return note(installed, f"transformers: {reason}")


def _layer(style: Any, mesh: DeviceMesh) -> tuple[type[ShardedLinear], TensorLayout] | None:
    """The layer of weft that computes what a style of transformers does, and its layout."""
    match type(style).__name__:
        case "ColwiseParallel":
            kind: type[ShardedLinear] = ColumnParallelLinear
        case "RowwiseParallel":
            kind = RowParallelLinear
        case "PackedColwiseParallel" if style.use_local_output:
            return ColumnParallelLinear, TensorLayout(Replicate(), Shard(-1), mesh)
        case _:
            return None
    return kind, TensorLayout(
        style.input_layouts, style.output_layouts, mesh, style.use_local_output
    )


class _Quantizable(nn.Linear):
    """A layer that goes back to transformers when that puts a quantized weight into it: it then
    sets `_hf_quantized_needs_local_tp`.
    """

    _style: tuple[Any, DeviceMesh]

    @property
    def _hf_quantized_needs_local_tp(self) -> bool:
        return False

    @_hf_quantized_needs_local_tp.setter
    def _hf_quantized_needs_local_tp(self, needed: bool) -> None:
        style, mesh = self._style
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self._hf_quantized_needs_local_tp = needed
        note(style.install_forward(self, mesh), "transformers: the weight is quantized")


class _Column(_Quantizable, ColumnParallelLinear):
    pass


class _Row(_Quantizable, RowParallelLinear):
    pass


_QUANTIZABLE: dict[type[ShardedLinear], type[ShardedLinear]] = {
    ColumnParallelLinear: _Column,
    RowParallelLinear: _Row,
}
