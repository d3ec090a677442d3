"""torch's tensor-parallel styles with weft's operators in them: same arguments, parameters and
results.

Layers that weft cannot run behave as under torch's style; `explain` names them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard, distribute_module
from torch.distributed.tensor.parallel import style as torch_styles

from weft.checks import name
from weft.kernels.weights import DTYPES
from weft.nn.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedLinear,
    SharedGather,
    note,
)
from weft.nn.layout import TensorLayout
from weft.nn.norms import NORMS, ShardedNorm
from weft.process_group import worlds


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's `ColwiseParallel`; weft runs an `nn.Linear` whose input is replicated or sharded."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _shard(self, super()._apply, module, device_mesh, ColumnParallelLinear)


class SharedColwiseParallel(torch_styles.ParallelStyle):
    """`ColwiseParallel` for several layers of one module that take the same sharded input, which is
    gathered once for all of them.

        projections = weft.nn.SharedColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))
        parallelize_module(block, mesh, {"attention": projections})

    The layer that is called first computes the products of all layers while the input is gathered,
    and the backward of all layers is one operator too. Call all layers, in any order, with the same
    tensor object, and write neither to it nor to their weights in between; the result of a layer
    that is not called stays in memory until the next input. Parameters and results are the same as
    under `ColwiseParallel`.

    Args:
        names: the names of the layers within the module that the style is applied to.
        input_layouts: the placement of the input; to share a gather it must be sharded. By default
            replicated.
        output_layouts: the placement of the results, by default sharded along the last dimension.
        use_local_output: whether results are plain tensors, this rank's parts, instead of DTensors.
    """

    def __init__(
        self,
        *names: str,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.names = names
        self.style = ColwiseParallel(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = [self.style._apply(module.get_submodule(name), device_mesh) for name in self.names]
        sharing = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
        SharedGather(sharing)
        for layer in sharing:
            note(layer, layer._describe())
        return module


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's `RowwiseParallel`; weft runs an `nn.Linear` whose output is replicated or sharded."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _shard(self, super()._apply, module, device_mesh, RowParallelLinear)


class SequenceParallel(torch_styles.SequenceParallel):
    """torch's `SequenceParallel`, on plain tensors for `nn.RMSNorm` and `nn.LayerNorm`, which need
    no communication.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in NORMS:
            return note(
                super()._apply(module, device_mesh),
                f"torch: {type(module).__name__} is neither nn.RMSNorm nor nn.LayerNorm",
            )
        distribute_module(module, device_mesh, self._replicate_module_fn)
        module.__class__ = NORMS[type(module)]
        assert isinstance(module, ShardedNorm)
        module.layout = TensorLayout(
            self.sequence_sharding[0], self.sequence_sharding[0], device_mesh, self.use_local_output
        )
        return note(module, "weft: on plain tensors")


def obstacle(
    module: nn.Module, mesh: DeviceMesh, kind: type[ShardedLinear], layout: TensorLayout
) -> str | None:
    """The reason why `module` cannot be made a layer of this kind with this layout, or None."""
    placement = layout.input if kind is ColumnParallelLinear else layout.output
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is not a plain nn.Linear"
    if mesh.device_type != "cpu" or module.weight.dtype not in DTYPES:
        return f"{name(module.weight.dtype)} on {mesh.device_type} is not supported"
    if not (placement.is_replicate() or isinstance(placement, Shard)):
        return f"weft has no operator for {placement}"
    return None


def convert(
    module: nn.Module, mesh: DeviceMesh, kind: type[ShardedLinear], layout: TensorLayout
) -> nn.Module:
    """Make an `nn.Linear` whose parameters are sharded a layer of weft; hooks, name and state dict
    remain. Collective, as `worlds.make`.
    """
    module.__class__ = kind
    assert isinstance(module, kind)
    module._connect(worlds.make(mesh.get_group()), layout)
    return module


def _shard(
    style: ColwiseParallel | RowwiseParallel,
    by_torch: Callable[[nn.Module, DeviceMesh], nn.Module],
    module: nn.Module,
    mesh: DeviceMesh,
    kind: type[ShardedLinear],
) -> nn.Module:
    """Shard a linear layer's parameters and convert it to a layer of weft, or apply torch's
    style.
    """
    placements = style.input_layouts[0], style.output_layouts[0]
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(
                "input_layouts and output_layouts must be placements of torch.distributed.tensor, "
                f"such as Shard(1) or Replicate(); got {placement!r}"
            )
    layout = TensorLayout(*placements, mesh, style.use_local_output)
    if reason := obstacle(module, mesh, kind, layout):
        return note(by_torch(module, mesh), f"torch: {reason}")
    distribute_module(module, mesh, style._partition_linear_fn)
    return convert(module, mesh, kind, layout)
