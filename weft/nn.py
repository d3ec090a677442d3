"""Linear layers sharded over ranks, and drop-in forms of torch's tensor-parallel styles.

    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh, {"mlp.up": weft.nn.ColwiseParallel(), "mlp.down": weft.nn.RowwiseParallel()})
    print(weft.nn.explain(model))  # what each of these layers runs

The styles take the arguments of torch's, leave the same DTensor parameters and state dict, and compute the same. Where weft has an
operator for the layouts, it replaces torch's product and collective; elsewhere torch's own style is applied, and `explain` says so.

Weights are packed (`weft.pack`) at the first call in eval mode without gradients, and unpacked when they are trained or changed; a
packed weight takes as much memory as the weight itself.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import style as torch_styles

from weft.matmul import DTYPES, PackedWeight, Weight, multiply, pack
from weft.ops import arguments
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.collectives import all_gather
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.world import World, current, init

__all__ = ["ColumnParallelLinear", "ColwiseParallel", "RowParallelLinear", "RowwiseParallel", "SequenceParallel", "explain"]


class _Layout(NamedTuple):
    """How activations lie when they come and when they go. On a mesh they may be DTensors, and go as one unless `local`."""

    input: Placement
    output: Placement
    mesh: DeviceMesh | None = None
    local: bool = True

    def on_mesh(self) -> DeviceMesh:
        assert self.mesh is not None, "layers without a mesh take and give plain tensors"
        return self.mesh


class _ShardedLinear(nn.Linear):
    """A linear layer of which every rank holds a part; `in_features` and `out_features` are those of the whole.

    The parameters are plain tensors, or DTensors where a style made the layer of an `nn.Linear`.
    """

    world: World
    layout: _Layout
    _natural: Placement  # what inputs that are not taken as they lie become
    _packed: tuple[tuple[object, ...], PackedWeight] | None  # of a weight in this state

    def _spread(self, world: World, layout: _Layout) -> None:
        self.world, self.layout, self._packed = world, layout, None
        _note(self, self._describe())

    def _describe(self) -> str:
        """What runs, in words."""
        raise NotImplementedError

    def _takes(self, placement: Placement, dims: int) -> bool:
        """Whether an input of `dims` dimensions that lies as `placement` is taken as it is."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}; {self._describe()}"

    def train(self, mode: bool = True) -> _ShardedLinear:
        self._packed = None
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardedLinear:
        memo |= {id(shared): shared for shared in (self.world, self.layout.mesh)}  # these belong to the ranks, not to the layer
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__ = copy.deepcopy({**self.__dict__, "_packed": None}, memo)
        return twin

    def _operands(self, x: Tensor) -> tuple[Tensor, Weight, Tensor | None]:
        """x, the weight (K, N) and the bias in the dtype of the product; the weight is packed where it is not trained."""
        weight, bias = _local(self.weight), None if self.bias is None else _local(self.bias)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            return x.to(dtype), weight.to(dtype).t(), None if bias is None else bias.to(dtype)
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.is_inference():
            self._packed = None
            return x, weight.t(), bias
        # A DTensor counts its own versions; those of the tensor inside change only when that is written to directly.
        state = id(self.weight), self.weight._version, weight._version, weight.data_ptr(), weight.dtype
        if self._packed is None or self._packed[0] != state:
            self._packed = state, pack(weight.t())
        return x, self._packed[1], bias

    def _enter(self, x: Tensor) -> tuple[Tensor, Placement]:
        """The local part of x and how it lies, redistributed by torch if this layer cannot take it as it lies."""
        placement = _normal(x.placements[0] if isinstance(x, DTensor) else self.layout.input, x.dim())
        if not self._takes(placement, x.dim()):
            spread = x if isinstance(x, DTensor) else _dtensor(x, self.layout.on_mesh(), placement)
            placement = _normal(self._natural, x.dim())
            x = spread.redistribute(placements=[placement])
        return _local(x), placement

    def _leave(self, y: Tensor, placement: Placement, size: int | None = None) -> Tensor:
        """`y`, which lies as `placement` (of `size`, if sharded unevenly), as the layout wants it."""
        target = _normal(self.layout.output, y.dim())
        if self.layout.local and placement == target:
            return y
        spread = _dtensor(y, self.layout.on_mesh(), placement, size)
        if placement != target:
            spread = spread.redistribute(placements=[target])
        return spread.to_local() if self.layout.local else spread


class ColumnParallelLinear(_ShardedLinear):
    """A linear layer whose outputs are sharded: this rank holds rows of the weight, and computes those features.

    Without `sequence_dim` every rank has the whole input, and in backward its gradients are summed over the ranks. With it, every
    rank has a part of the sequence, which is gathered along that dimension while it is multiplied.

    Args:
        in_features, out_features: of the whole layer. This rank's part of the outputs is that of `torch.chunk`.
        bias: whether a bias is added, sharded like the outputs.
        sequence_dim: the dimension along which inputs are sharded, if they are.
        world: by default the world made by ``weft.init()``.

    The whole layer is drawn as `nn.Linear` draws it and this rank's part kept, so ranks must be seeded alike.
    Input: (…, in_features); output: (…, this rank's features), the whole sequence.
    """

    _natural = Replicate()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_dim: int | None = None,
        world: World | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        world = current(world)
        self.weight = _part(self.weight, 0, world)
        if bias:
            self.bias = _part(self.bias, 0, world)
        self._spread(world, _Layout(Replicate() if sequence_dim is None else Shard(sequence_dim), Shard(-1)))

    def forward(self, x: Tensor) -> Tensor:
        given = x.shape
        x, placement = self._enter(x)
        x, weight, bias = self._operands(x)
        if isinstance(placement, Shard):
            sizes = _sizes(given[placement.dim], self.world.ranks) if given != x.shape else None
            y = all_gather_matmul(x, weight, dim=placement.dim, bias=bias, shard_rows=sizes, world=self.world)
            assert isinstance(y, Tensor)
        else:
            y = _column_product(x, weight, bias, self.world)
        if self.layout.output.is_replicate() and not torch.compiler.is_compiling():
            return self._leave(_all_columns(y, self.out_features, self.world), Replicate())
        return self._leave(y, Shard(y.dim() - 1), self.out_features)

    def _takes(self, placement: Placement, dims: int) -> bool:
        return placement.is_replicate() or isinstance(placement, Shard)

    def _describe(self) -> str:
        rows, output = self.layout.input, self.layout.output
        what = f"all_gather_matmul over dimension {rows.dim}" if isinstance(rows, Shard) else "product without communication"
        if output.is_replicate():
            return f"weft: {what}, then all_gather"
        return f"weft: {what}" + ("" if output == Shard(-1) else f", then torch: output to {output}")


class RowParallelLinear(_ShardedLinear):
    """A linear layer whose inputs are sharded: this rank holds columns of the weight, and products are summed over the ranks.

    Without `sequence_dim` every rank gets the whole sum; with it, its part of the sequence.

    Args:
        in_features, out_features: of the whole layer. This rank's part of the inputs is that of `torch.chunk`.
        bias: whether a bias is added, once; every rank holds all of it.
        sequence_dim: the dimension along which outputs are sharded, if they are; parts are those of `torch.chunk`.
        world: by default the world made by ``weft.init()``.

    The whole layer is drawn as `nn.Linear` draws it and this rank's part kept, so ranks must be seeded alike.
    Input: (…, this rank's features); output: (…, out_features).
    """

    _natural = Shard(-1)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_dim: int | None = None,
        world: World | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        world = current(world)
        self.weight = _part(self.weight, 1, world)
        self._spread(world, _Layout(Shard(-1), Replicate() if sequence_dim is None else Shard(sequence_dim)))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self._enter(x)
        x, weight, bias = self._operands(x)
        target = _normal(self.layout.output, x.dim())
        if not isinstance(target, Shard):
            return self._leave(matmul_all_reduce(x, weight, bias=bias, world=self.world), Replicate())
        size = (*x.shape[:-1], self.out_features)[target.dim]
        sizes = _sizes(size, self.world.ranks) if size % self.world.ranks else None
        y = matmul_reduce_scatter(x, weight, dim=target.dim, bias=bias, shard_rows=sizes, world=self.world)
        return self._leave(y, target, size)

    def _takes(self, placement: Placement, dims: int) -> bool:
        return placement == Shard(dims - 1)

    def _describe(self) -> str:
        rows = self.layout.output
        what = f"matmul_reduce_scatter over dimension {rows.dim}" if isinstance(rows, Shard) else "matmul_all_reduce"
        return ("" if self.layout.input == Shard(-1) else f"torch: input from {self.layout.input}, then ") + f"weft: {what}"


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's `ColwiseParallel`; weft runs an `nn.Linear` whose input is replicated or sharded.

    Same arguments, parameters and results. Layers that weft does not run behave as under torch's style; `explain` tells which.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = _Layout(self.input_layouts[0], self.output_layouts[0], device_mesh, self.use_local_output)
        if reason := _obstacle(module, device_mesh, layout.input):
            return _note(super()._apply(module, device_mesh), f"torch: {reason}")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _become(module, ColumnParallelLinear, layout)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's `RowwiseParallel`; weft runs an `nn.Linear` whose output is replicated or sharded.

    Same arguments, parameters and results. Layers that weft does not run behave as under torch's style; `explain` tells which.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = _Layout(self.input_layouts[0], self.output_layouts[0], device_mesh, self.use_local_output)
        if reason := _obstacle(module, device_mesh, layout.output):
            return _note(super()._apply(module, device_mesh), f"torch: {reason}")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _become(module, RowParallelLinear, layout)


class SequenceParallel(torch_styles.SequenceParallel):
    """torch's `SequenceParallel`, on plain tensors for `nn.RMSNorm` and `nn.LayerNorm`, which need no communication.

    Same arguments, parameters and results. Other modules behave as under torch's style; `explain` tells which.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in _NORMS:
            return _note(super()._apply(module, device_mesh), f"torch: {type(module).__name__} is not a norm that weft knows")
        distribute_module(module, device_mesh, self._replicate_module_fn)
        module.__class__ = _NORMS[type(module)]
        assert isinstance(module, _ShardedNorm)
        module.layout = _Layout(self.sequence_sharding[0], self.sequence_sharding[0], device_mesh, self.use_local_output)
        return _note(module, "weft: on plain tensors")


class _ShardedNorm(nn.Module):
    """A norm over the last dimension of tensors that are sharded along another."""

    layout: _Layout
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        placement, size = _normal(self.layout.input, x.dim()), None
        if isinstance(placement, Shard) and placement.dim >= x.dim() - len(self.normalized_shape):
            raise ValueError(
                f"dimension {placement.dim} of an input of shape {tuple(x.shape)} is normalised, so it cannot be sharded"
            )
        if isinstance(x, DTensor):
            size = x.shape[placement.dim] if isinstance(placement, Shard) else None
            x = (x if x.placements[0] == placement else x.redistribute(placements=[placement])).to_local()
        y = self._norm(x)
        return y if self.layout.local else _dtensor(y, self.layout.on_mesh(), placement, size)

    def _norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _RMSNorm(_ShardedNorm, nn.RMSNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, _summed(self.weight), self.eps)


class _LayerNorm(_ShardedNorm, nn.LayerNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, _summed(self.weight), _summed(self.bias), self.eps)


_NORMS: dict[type[nn.Module], type[nn.Module]] = {nn.RMSNorm: _RMSNorm, nn.LayerNorm: _LayerNorm}


def explain(module: nn.Module) -> str:
    """What the styles and layers of this module made of `module`: one line per layer with what it runs, or why torch runs it."""
    notes = {name or type(part).__name__: note for name, part in module.named_modules() if (note := getattr(part, "_weft", None))}
    width = max(map(len, notes), default=0)
    return "\n".join(f"{name:<{width}}  {note}" for name, note in notes.items())


class _ColumnProduct(torch.autograd.Function):
    """``x @ weight + bias`` with a weight that differs between ranks and an x that does not: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, world: World) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.world = world
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            matmul_all_reduce(grad, weight.t(), world=ctx.world) if for_x else None,
            _product(rows.t(), x.flatten(0, -2)).t() if for_weight else None,
            rows.sum(0) if for_bias else None,
            None,
        )


def _column_product(x: Tensor, weight: Weight, bias: Tensor | None, world: World) -> Tensor:
    if isinstance(weight, PackedWeight) or not torch.is_grad_enabled():
        return _product(x, weight, bias)
    y: Tensor = _ColumnProduct.apply(x, weight, bias, world)  # type: ignore[no-untyped-call]
    return y


def _product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """This rank's ``x @ weight + bias``."""
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.weft.product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias
    y = x.new_empty(*x.shape[:-1], weight.shape[1])
    multiply(arguments.as_rows(x), weight, y.view(-1, weight.shape[1]), bias)
    return y


class _AllColumns(torch.autograd.Function):
    """All ranks' parts of the last dimension; every rank is taken to use the whole alike, and keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: list[int], world: World) -> Tensor:
        ctx.start, ctx.size = sum(sizes[: world.rank]), sizes[world.rank]
        return all_gather(y, dim=-1, shard_rows=sizes, world=world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.narrow(-1, ctx.start, ctx.size), None, None


def _all_columns(y: Tensor, columns: int, world: World) -> Tensor:
    whole: Tensor = _AllColumns.apply(y, _sizes(columns, world.ranks), world)  # type: ignore[no-untyped-call]
    return whole


_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def _world_of(mesh: DeviceMesh) -> World:
    """The world of a mesh's process group, made at its first use; collective."""
    group = mesh.get_group()
    if group not in _worlds or _worlds[group].closed:
        _worlds[group] = init(group)
    return _worlds[group]


def _obstacle(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> str | None:
    """Why weft cannot run a layer whose rows come or go as `placement`, or None."""
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is not a plain nn.Linear"
    if mesh.device_type != "cpu" or module.weight.dtype not in DTYPES:
        return f"{arguments.name(module.weight.dtype)} on {mesh.device_type} is not supported"
    if not (placement.is_replicate() or isinstance(placement, Shard)):
        return f"weft has no operator for {placement}"
    return None


def _become(linear: nn.Module, kind: type[_ShardedLinear], layout: _Layout) -> nn.Module:
    """Make a linear layer, whose parameters are sharded by now, a layer of weft; hooks, name and state dict remain."""
    linear.__class__ = kind
    assert isinstance(linear, kind)
    linear._spread(_world_of(layout.on_mesh()), layout)
    return linear


def _note(module: nn.Module, text: str) -> nn.Module:
    """Leave for `explain` what runs a module."""
    module.__dict__["_weft"] = text
    return module


def _normal(placement: Placement, dims: int) -> Placement:
    """The placement with a dimension that is not negative."""
    return Shard(placement.dim + dims) if isinstance(placement, Shard) and placement.dim < 0 else placement


def _dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, size: int | None = None) -> DTensor:
    """A DTensor of local parts; `size` is that of the whole along a sharded dimension, if not that of equal parts."""
    if size is None or not isinstance(placement, Shard):
        return DTensor.from_local(local, mesh, [placement], run_check=False)
    shape = torch.Size([*local.shape[: placement.dim], size, *local.shape[placement.dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _summed(parameter: Tensor | None) -> Tensor | None:
    """A parameter that all ranks hold and each applies to rows of its own, so that its gradient is the sum over ranks."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


def _sizes(size: int, ranks: int) -> list[int]:
    """The sizes of `torch.chunk`, which are those of DTensor: the first parts are full, the last ones may be empty."""
    full = -(-size // ranks)
    return [min(full, max(0, size - rank * full)) for rank in range(ranks)]


def _part(parameter: Tensor, dim: int, world: World) -> nn.Parameter:
    """This rank's part of a parameter."""
    part = torch.split(parameter.detach(), _sizes(parameter.shape[dim], world.ranks), dim)[world.rank]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format))
