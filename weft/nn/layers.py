"""Linear layers of which every rank holds a part."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from weft.kernels.weights import DTYPES, PackedWeight, Weight, pack
from weft.nn.layout import Layout, as_dtensor, chunk_sizes, local, normal, part
from weft.nn.products import all_columns, column_product
from weft.ops import arguments
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.world import World, current

_LAST = Shard(-1)


class ShardedLinear(nn.Linear):
    """A linear layer of which every rank holds a part; `in_features` and `out_features` are those
    of the whole.

    The parameters are plain tensors, or DTensors where a style made the layer of an `nn.Linear`.
    """

    world: World
    layout: Layout
    _natural: Placement  # what inputs that are not taken as they lie become
    _parts: ClassVar[
        Mapping[str, int]
    ]  # the parameters of which a rank holds a part, and along which dimension
    _packed: tuple[tuple[object, ...], PackedWeight] | None  # of a weight in this state
    _taken: dict[
        int, Placement
    ]  # that of plain inputs of so many dimensions which are taken as they lie

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
        for name, dim in self._parts.items():
            if (whole := getattr(self, name)) is not None:
                setattr(self, name, part(whole, dim, world))
        self._spread(
            world, self._sharded_along(Replicate() if sequence_dim is None else Shard(sequence_dim))
        )

    def _sharded_along(self, sequence: Placement) -> Layout:
        """How inputs and outputs lie, given how the sequence does."""
        raise NotImplementedError

    def _spread(self, world: World, layout: Layout) -> None:
        self.world, self.layout, self._packed, self._taken = world, layout, None, {}
        note(self, self._describe())

    def _describe(self) -> str:
        """What this layer runs, in words, for `explain`."""
        raise NotImplementedError

    def _takes(self, placement: Placement, dims: int) -> bool:
        """Whether this layer takes an input of `dims` dimensions with this placement without
        redistributing it.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}; {self._describe()}"

    def train(self, mode: bool = True) -> ShardedLinear:
        self._packed = None
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLinear:
        memo |= {
            id(shared): shared for shared in (self.world, self.layout.mesh)
        }  # these belong to the ranks, not to the layer
        memo[id(self)] = twin = self.__class__.__new__(self.__class__)
        twin.__dict__ = copy.deepcopy({**self.__dict__, "_packed": None}, memo)
        return twin

    def _operands(self, x: Tensor) -> tuple[Tensor, Weight, Tensor | None]:
        """x, the weight (K, N) and the bias in the dtype of the product; the weight is packed where
        it is not trained.
        """
        given, added = self._parameters["weight"], self._parameters["bias"]
        assert given is not None
        weight, bias = local(given), None if added is None else local(added)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            return x.to(dtype), weight.to(dtype).t(), None if bias is None else bias.to(dtype)
        if (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or weight.is_inference()
        ):
            self._packed = None
            return x, weight.t(), bias
        # A DTensor counts its own versions; those of the tensor inside, which is what is packed,
        # only when that is written to.
        state = id(given), given._version, weight.data_ptr(), weight.dtype
        if self._packed is None or self._packed[0] != state or self._packed[1].changed():
            self._packed = state, pack(weight.t())
            self._packed[1].watched = True
        return x, self._packed[1], bias

    def _enter(self, x: Tensor) -> tuple[Tensor, Placement]:
        """The local part of x and its placement, redistributed by torch if this layer does not take
        x with the one it has.
        """
        plain = not (torch.compiler.is_compiling() or isinstance(x, DTensor))
        if plain:
            weight = self._parameters["weight"]
            assert weight is not None
            # the operator checks the rest
            if type(x) is Tensor and x.is_cpu and x.dtype is weight.dtype:
                taken = self._taken.get(x.dim())
                if taken is not None:
                    return x, taken
            dtypes = DTYPES if torch.is_autocast_enabled("cpu") else (weight.dtype,)
            arguments.check_input(x, "input", self.world, dtypes)
        if not (dims := x.dim()):
            raise ValueError(
                "input must have features in its last dimension; got a tensor with no dimension"
            )
        placement = normal(x.placements[0] if isinstance(x, DTensor) else self.layout.input, dims)
        if self._takes(placement, dims):
            if plain:
                self._taken[dims] = placement
            return local(x), placement
        whole = x if isinstance(x, DTensor) else as_dtensor(x, self.layout.on_mesh(), placement)
        placement = normal(self._natural, dims)
        return local(whole.redistribute(placements=[placement])), placement

    def _leave(self, y: Tensor, placement: Placement, size: int | None = None) -> Tensor:
        """Redistribute the result `y` from `placement` to the layout's; `size` is the whole's along
        it where parts are uneven.
        """
        if self.layout.local and placement is self.layout.output:
            return y
        placement, target = normal(placement, y.dim()), normal(self.layout.output, y.dim())
        if self.layout.local and placement == target:
            return y
        spread = as_dtensor(y, self.layout.on_mesh(), placement, size)
        if placement != target:
            spread = spread.redistribute(placements=[target])
        return spread.to_local() if self.layout.local else spread


class ColumnParallelLinear(ShardedLinear):
    """A linear layer whose outputs are sharded: this rank holds rows of the weight, and computes
    those features.

    Without `sequence_dim` every rank has the whole input, and in backward its gradients are summed
    over the ranks. With it, every rank has a part of the sequence, which is gathered along that
    dimension while it is multiplied.

    Args:
        in_features, out_features: of the whole layer. This rank's part of the outputs is that of
        `torch.chunk`. bias: whether a bias is added, sharded like the outputs. sequence_dim: the
        dimension along which inputs are sharded, if they are. world: by default the world made by
        ``weft.init()``.

    The whole layer is drawn as `nn.Linear` draws it and this rank's part kept, so ranks must be
    seeded alike. Input: (…, in_features); output: (…, this rank's features), the whole sequence.
    """

    gather: Gather
    _natural = Replicate()
    _parts: ClassVar = {"weight": 0, "bias": 0}

    def _spread(self, world: World, layout: Layout) -> None:
        self.gather = Gather([self])
        super()._spread(world, layout)

    def _sharded_along(self, sequence: Placement) -> Layout:
        return Layout(sequence, _LAST)

    def forward(self, given: Tensor) -> Tensor:
        x, placement = self._enter(given)
        if isinstance(placement, Shard):
            sizes = (
                chunk_sizes(given.shape[placement.dim], self.world.ranks)
                if given.shape != x.shape
                else None
            )
            y = self.gather.product(self, given, x, placement.dim, sizes)
        elif x.shape[-1] != self.in_features:
            raise ValueError(
                f"input must have {self.in_features} features in its last dimension; got shape "
                f"{tuple(x.shape)}"
            )
        else:
            y = column_product(*self._operands(x), self.world)
        if self.layout.output.is_replicate() and not torch.compiler.is_compiling():
            return self._leave(all_columns(y, self.out_features, self.world), self.layout.output)
        return self._leave(y, _LAST, self.out_features)

    def _takes(self, placement: Placement, dims: int) -> bool:
        return placement.is_replicate() or isinstance(placement, Shard)

    def _describe(self) -> str:
        rows, output = self.layout.input, self.layout.output
        what = (
            f"all_gather_matmul over dimension {rows.dim}"
            if isinstance(rows, Shard)
            else "product without communication"
        )
        if isinstance(rows, Shard) and len(self.gather.layers) > 1:
            what += f", one gather for {len(self.gather.layers)} layers"
        if output.is_replicate():
            return f"weft: {what}, then all_gather"
        return f"weft: {what}" + (
            "" if output == Shard(-1) else f", then torch: output to {output}"
        )


class Gather:
    """The gather of a sharded input for the column-parallel layers that take it.

    The first of them that is called multiplies for all of them; the others, called with the same
    tensor, find their results there.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = layers
        self.forget()
        for layer in layers:
            layer.gather = self

    def forget(self) -> None:
        """Drop results that were made for layers that have not asked for theirs."""
        self.made_of: tuple[Tensor, bool] | None = (
            None  # the input, and whether gradients were recorded
        )
        self.made: dict[int, Tensor] = {}  # by id of the layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Gather:
        memo[id(self)] = twin = Gather([])
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def product(
        self,
        layer: ColumnParallelLinear,
        given: Tensor,
        x: Tensor,
        dim: int,
        sizes: Sequence[int] | None,
    ) -> Tensor:
        """The product of `layer` with all ranks' `x`, which is the local part of `given`, the
        tensor the layer was called with.
        """
        recorded = torch.is_grad_enabled()
        if (
            self.made_of is None
            or self.made_of[0] is not given
            or self.made_of[1] != recorded
            or id(layer) not in self.made
        ):
            if len(self.layers) == 1:
                x, weight, bias = layer._operands(x)
                return all_gather_matmul(
                    x, weight, dim=dim, bias=bias, shard_rows=sizes, world=layer.world
                )  # type: ignore[return-value]
            xs, weights, biases = zip(*(each._operands(x) for each in self.layers), strict=True)
            results = all_gather_matmul(
                xs[0], weights, dim=dim, bias=biases, shard_rows=sizes, world=layer.world
            )
            assert isinstance(results, list)
            self.made_of, self.made = (
                (given, recorded),
                {id(each): y for each, y in zip(self.layers, results, strict=True)},
            )
        y = self.made.pop(id(layer))
        if not self.made:
            self.forget()
        return y


class RowParallelLinear(ShardedLinear):
    """A linear layer whose inputs are sharded: this rank holds columns of the weight, and products
    are summed over the ranks.

    Without `sequence_dim` every rank gets the whole sum; with it, its part of the sequence.

    Args:
        in_features, out_features: of the whole layer. This rank's part of the inputs is that of
        `torch.chunk`. bias: whether a bias is added, once; every rank holds all of it.
        sequence_dim: the dimension along which outputs are sharded, if they are; parts are those of
        `torch.chunk`. world: by default the world made by ``weft.init()``.

    The whole layer is drawn as `nn.Linear` draws it and this rank's part kept, so ranks must be
    seeded alike. Input: (…, this rank's features); output: (…, out_features).
    """

    _natural = Shard(-1)
    _parts: ClassVar = {"weight": 1}

    def _sharded_along(self, sequence: Placement) -> Layout:
        return Layout(Shard(-1), sequence)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self._enter(x)
        x, weight, bias = self._operands(x)
        output = self.layout.output
        if not isinstance(output, Shard):
            return self._leave(matmul_all_reduce(x, weight, bias=bias, world=self.world), output)
        target = Shard(output.dim % x.dim())
        size = (*x.shape[:-1], self.out_features)[target.dim]
        sizes = chunk_sizes(size, self.world.ranks) if size % self.world.ranks else None
        y = matmul_reduce_scatter(
            x, weight, dim=target.dim, bias=bias, shard_rows=sizes, world=self.world
        )
        return self._leave(y, target, size)

    def _takes(self, placement: Placement, dims: int) -> bool:
        return isinstance(placement, Shard) and placement.dim == dims - 1

    def _describe(self) -> str:
        rows = self.layout.output
        what = (
            f"matmul_reduce_scatter over dimension {rows.dim}"
            if isinstance(rows, Shard)
            else "matmul_all_reduce"
        )
        return (
            ""
            if self.layout.input == Shard(-1)
            else f"torch: input from {self.layout.input}, then "
        ) + f"weft: {what}"


def explain(module: nn.Module) -> str:
    """What the styles and layers of this module made of `module`: one line per layer with what it
    runs, or why torch runs it.
    """
    notes = {
        name or type(part).__name__: note
        for name, part in module.named_modules()
        if (note := getattr(part, "_weft", None))
    }
    width = max(map(len, notes), default=0)
    return "\n".join(f"{name:<{width}}  {note}" for name, note in notes.items())


def note(module: nn.Module, text: str) -> nn.Module:
    """Leave for `explain` what runs a module."""
    module.__dict__["_weft"] = text
    return module
