"""Linear layers that are sharded over ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from weft.checks import check_module, check_untransformed, in_modes, waited
from weft.kernels.weights import DTYPES, Weight
from weft.nn.frozen import FrozenWeight
from weft.nn.layout import TensorLayout, as_dtensor, chunk_sizes, local, normal, part
from weft.nn.products import all_columns, column_product
from weft.ops import arguments
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.world import World, current

_LAST = Shard(-1)


class ShardedLinear(nn.Linear):
    """A linear layer that is sharded over ranks; `in_features` and `out_features` count the
    features of all ranks.

    The parameters are plain tensors, or DTensors if a style converted an `nn.Linear`. A product is
    by the weight as it is at the time of the call, unless it was frozen (`weft.nn.freeze`).
    """

    world: World
    layout: TensorLayout
    _fallback: Placement
    """The placement to which inputs of unsupported placements are redistributed."""
    _made_by: ClassVar[str]
    """The style that makes such a layer of an `nn.Linear`."""
    _sharded: ClassVar[Mapping[str, int]]
    """The dimension along which each sharded parameter is sharded."""
    frozen: FrozenWeight | None
    """The weight, if its owner has promised that it does not change (`weft.nn.freeze`)."""
    _accepted: dict[int, Placement]
    """The placement of plain inputs that need no redistribution, by their number of dimensions."""

    @property
    def _title(self) -> str:
        """The class and its style, for errors."""
        return f"{type(self).__name__} (style {self._made_by})"

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
        for name, dim in self._sharded.items():
            if (full := getattr(self, name)) is not None:
                setattr(self, name, part(full, dim, world))
        self._connect(
            world, self._layout(Replicate() if sequence_dim is None else Shard(sequence_dim))
        )

    def __new__(cls, *arguments: Any, **keywords: Any) -> ShardedLinear:
        if any(isinstance(each, nn.Module) for each in arguments):
            raise TypeError(
                f"{cls.__name__} takes in_features and out_features; got a layer: shard it by "
                f"torch's parallelize_module with the style weft.nn.{cls._made_by}"
            )
        return super().__new__(cls)

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # for inspect.signature

    def _layout(self, sequence: Placement) -> TensorLayout:
        """The layout of inputs and outputs whose sequence has this placement."""
        raise NotImplementedError

    def _connect(self, world: World, layout: TensorLayout) -> None:
        """Set the world and the layout of this rank's parameters."""
        self.world = world
        self.layout = layout
        self.frozen = None
        self._accepted = {}
        note(self, self._describe())

    def _describe(self) -> str:
        """The operators that this layer runs, for `explain`."""
        raise NotImplementedError

    def _accepts(self, placement: Placement, dims: int) -> bool:
        """Whether this layer takes inputs of `dims` dimensions with this placement without
        redistribution.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}; {self._describe()}"

    def train(self, mode: bool = True) -> ShardedLinear:
        if mode:
            self.frozen = None
        return super().train(mode)

    def _stand_in(self, name: str) -> Tensor | None:
        """The tensor in the place of the parameter of this name: a buffer, another attribute, or
        the result of a parametrization, which torch computes whenever it is read.
        """
        tensor: Tensor | None = getattr(self, name)
        if isinstance(tensor, DTensor):
            dim = self._sharded.get(name)
            placement = Replicate() if dim is None else Shard(dim)
            if tensor.placements != (placement,):
                tensor = tensor.redistribute(placements=[placement])
        return tensor

    def _operands(self, x: Tensor) -> tuple[Tensor, Weight, Tensor | None]:
        """x, the weight (K, N) and the bias in the dtype of the product; the weight is packed if it
        is frozen.
        """
        parameters = self._parameters
        own = parameters["weight"] if "weight" in parameters else self._stand_in("weight")
        own_bias = parameters["bias"] if "bias" in parameters else self._stand_in("bias")
        assert own is not None
        bias = None if own_bias is None else local(own_bias)
        frozen = self.frozen
        if frozen is not None and not (
            torch.is_autocast_enabled("cpu")
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
        ):
            if frozen.changed(own):
                raise self._rejected(
                    f"{self._title}: the weight was changed after weft.nn.freeze(model); call it "
                    "again after every change"
                )
            return x, frozen.packed, bias
        weight = local(own)
        if "weight" not in parameters and not torch.compiler.is_compiling():
            arguments.check_input(x, "input", self.world, _dtypes_of_inputs(weight))
        if autocasts(weight):
            dtype = torch.get_autocast_dtype("cpu")
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return x, weight.t(), bias

    def _input(self, x: Tensor) -> tuple[Tensor, Placement]:
        """The local part of x and its placement, after a redistribution by torch if this layer does
        not accept the placement of x.
        """
        plain = not (torch.compiler.is_compiling() or isinstance(x, DTensor))
        if plain:
            # that of a weight in the place of the parameter is checked where the weight is read
            weight = self._parameters.get("weight")
            # the operator checks the rest
            if (
                type(x) is Tensor
                and x.is_cpu
                and weight is not None
                and x.dtype is weight.dtype
                and not in_modes()
            ):
                accepted = self._accepted.get(x.dim())
                if accepted is not None:
                    return x, accepted
            dtypes = DTYPES if weight is None else _dtypes_of_inputs(weight)
            with self.world.failure.report_rejection:
                x = waited(x)
                arguments.check_input(x, "input", self.world, dtypes, traced=True)
                check_untransformed(x, "input")
        if not (dims := x.dim()):
            raise self._rejected(
                "input must have features in its last dimension; got a tensor with no dimension"
            )
        placement = normal(x.placements[0] if isinstance(x, DTensor) else self.layout.input, dims)
        if self._accepts(placement, dims):
            if plain:
                self._accepted[dims] = placement
            return local(x), placement
        full = x if isinstance(x, DTensor) else as_dtensor(x, self.layout.on_mesh(), placement)
        placement = normal(self._fallback, dims)
        return local(full.redistribute(placements=[placement])), placement

    def _rejected(self, why: str) -> ValueError:
        """The error for a call that this rank rejects; peers are notified of it."""
        error = ValueError(why)
        if not torch.compiler.is_compiling():
            self.world.failure.reject(error)
        return error

    def _output(self, y: Tensor, placement: Placement, size: int | None = None) -> Tensor:
        """The result `y` redistributed from `placement` to the output layout; `size` is the full
        tensor's along a sharded dimension with uneven parts.
        """
        if self.layout.local and placement is self.layout.output:
            return y
        placement = normal(placement, y.dim())
        target = normal(self.layout.output, y.dim())
        if self.layout.local and placement == target:
            return y
        distributed = as_dtensor(y, self.layout.on_mesh(), placement, size)
        if placement != target:
            distributed = distributed.redistribute(placements=[target])
        return distributed.to_local() if self.layout.local else distributed


def autocasts(tensor: Tensor) -> bool:
    """Whether torch's autocast casts this factor of a product: of any dtype but float64."""
    return torch.is_autocast_enabled("cpu") and tensor.dtype is not torch.float64


def _dtypes_of_inputs(weight: Tensor) -> Sequence[torch.dtype]:
    """The dtypes of inputs that are multiplied by `weight`."""
    if autocasts(weight):
        return [dtype for dtype in DTYPES if dtype is not torch.float64]
    return (weight.dtype,)


class ColumnParallelLinear(ShardedLinear):
    """A linear layer whose outputs are sharded: this rank keeps part of the weight's rows, and
    computes the output features of these rows.

    Without `sequence_dim` every rank passes the full input, and in backward its gradients are
    summed over the ranks. With `sequence_dim` every rank passes a part of the sequence, which is
    gathered along that dimension while it is multiplied.

    Args:
        in_features: the features of all ranks' inputs.
        out_features: the features of all ranks' outputs. A rank's part of them has the size
            that `torch.chunk` gives it.
        bias: whether a bias is added; it is sharded like the outputs.
        sequence_dim: the dimension along which inputs are sharded, None if they are not.
        world: by default the world made by ``weft.init()``.

    Every rank initializes all parameters as `nn.Linear` does and keeps its own part, so all ranks
    must use the same seed. Input: (…, in_features); output: (…, this rank's features), for the full
    sequence.

    Without a style the state dict has this rank's part as a plain tensor, which
    `torch.distributed.checkpoint` takes for equal on all ranks: it keeps one rank's. Save a file
    for each rank, or use `ColwiseParallel`.
    """

    gather: SharedGather
    _fallback = Replicate()
    _made_by = "ColwiseParallel"
    _sharded: ClassVar = {"weight": 0, "bias": 0}

    def _connect(self, world: World, layout: TensorLayout) -> None:
        self.gather = SharedGather([self])
        super()._connect(world, layout)

    def _layout(self, sequence: Placement) -> TensorLayout:
        return TensorLayout(sequence, _LAST)

    def forward(self, input: Tensor) -> Tensor:
        x, placement = self._input(input)
        if isinstance(placement, Shard):
            self._check_sharded(input, x, placement.dim)
            # all ranks must decide alike, and one of them may have the whole of a DTensor
            sizes = (
                chunk_sizes(input.shape[placement.dim], self.world.ranks)
                if isinstance(input, DTensor)
                else None
            )
            y = self.gather.product(self, input, x, placement.dim, sizes)
        elif x.shape[-1] != self.in_features:
            raise self._rejected(
                f"{self._title}: input must have {self.in_features} features in its last "
                f"dimension; got shape {tuple(x.shape)}: the input is that of all ranks, as of a "
                "row-parallel layer"
            )
        else:
            y = column_product(*self._operands(x), self.world)
        if self.layout.output.is_replicate() and not torch.compiler.is_compiling():
            return self._output(all_columns(y, self.out_features, self.world), self.layout.output)
        return self._output(y, _LAST, self.out_features)

    def _check_sharded(self, input: Tensor, x: Tensor, dim: int) -> None:
        """Raise `ValueError` unless an input sharded along `dim`, of which this rank has the part
        `x`, has this layer's features.
        """
        given = x.shape[-1]
        if dim == x.dim() - 1:
            given = input.shape[-1] if isinstance(input, DTensor) else given * self.world.ranks
        if given == self.in_features or not 0 <= dim < x.dim():
            return
        why = (
            f"{self._title}: input must have {self.in_features} features in its last dimension; "
            "got "
        )
        if dim < x.dim() - 1:
            raise self._rejected(f"{why}shape {tuple(x.shape)}")
        raise self._rejected(
            f"{why}{given}, since input_layouts=Shard({dim}) makes the last dimension of shape "
            f"{tuple(x.shape)} a part of the features: for inputs (tokens, features) use Shard(0)"
        )

    def _accepts(self, placement: Placement, dims: int) -> bool:
        return placement.is_replicate() or isinstance(placement, Shard)

    def _describe(self) -> str:
        rows, output = self.layout.input, self.layout.output
        operators = (
            f"all_gather_matmul over dimension {rows.dim}"
            if isinstance(rows, Shard)
            else "product without communication"
        )
        if isinstance(rows, Shard) and len(self.gather.layers) > 1:
            operators += f", one gather for {len(self.gather.layers)} layers"
        if output.is_replicate():
            return f"weft: {operators}, then all_gather"
        return f"weft: {operators}" + (
            "" if output == Shard(-1) else f", then torch: output to {output}"
        )


class SharedGather:
    """The gather of a sharded input for all column-parallel layers that take the input.

    The layer that is called first computes the products of all layers; the other layers, called
    with the same tensor, return the results computed before.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = layers
        self.forget()
        for layer in layers:
            layer.gather = self

    def forget(self) -> None:
        """Drop the results of layers that were not called."""
        self.source: tuple[Tensor, bool] | None = None  # input; whether gradients were recorded
        self.results: dict[int, Tensor] = {}  # by id of the layer

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedGather:
        memo[id(self)] = twin = SharedGather([])
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def product(
        self,
        layer: ColumnParallelLinear,
        input: Tensor,
        x: Tensor,
        dim: int,
        sizes: Sequence[int] | None,
    ) -> Tensor:
        """The product of `layer` with all ranks' `x`, the local part of the layer's `input`."""
        recorded = torch.is_grad_enabled()
        if (
            self.source is None
            or self.source[0] is not input
            or self.source[1] != recorded
            or id(layer) not in self.results
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
            self.source = input, recorded
            self.results = {id(each): y for each, y in zip(self.layers, results, strict=True)}
        y = self.results.pop(id(layer))
        if not self.results:
            self.forget()
        return y


class RowParallelLinear(ShardedLinear):
    """A linear layer whose inputs are sharded: this rank keeps part of the weight's columns, and
    products are summed over the ranks.

    Without `sequence_dim` every rank gets the full sum; with it, a part of the sum's sequence.

    Args:
        in_features: the features of all ranks' inputs. A rank's part of them has the size that
            `torch.chunk` gives it.
        out_features: the features of all ranks' outputs.
        bias: whether a bias is added, once; it is replicated on all ranks.
        sequence_dim: the dimension along which outputs are sharded, into the parts of
            `torch.chunk`; None if they are not.
        world: by default the world made by ``weft.init()``.

    Every rank initializes all parameters as `nn.Linear` does and keeps its own part, so all ranks
    must use the same seed. Input: (…, this rank's features); output: (…, out_features).

    Without a style the state dict has this rank's part as a plain tensor, which
    `torch.distributed.checkpoint` takes for equal on all ranks: it keeps one rank's. Save a file
    for each rank, or use `RowwiseParallel`.
    """

    _fallback = Shard(-1)
    _made_by = "RowwiseParallel"
    _sharded: ClassVar = {"weight": 1}

    def _layout(self, sequence: Placement) -> TensorLayout:
        return TensorLayout(Shard(-1), sequence)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self._input(x)
        x, weight, bias = self._operands(x)
        if x.shape[-1] != weight.shape[0]:
            raise self._rejected(
                f"{self._title}: input must have this rank's part of the features in its last "
                f"dimension, {weight.shape[0]} of {self.in_features}; got shape {tuple(x.shape)}: "
                "is the layer before it column-parallel?"
            )
        output = self.layout.output
        if not isinstance(output, Shard):
            return self._output(matmul_all_reduce(x, weight, bias=bias, world=self.world), output)
        target = Shard(output.dim % x.dim())
        size = (*x.shape[:-1], self.out_features)[target.dim]
        sizes = chunk_sizes(size, self.world.ranks) if size % self.world.ranks else None
        y = matmul_reduce_scatter(
            x, weight, dim=target.dim, bias=bias, shard_rows=sizes, world=self.world
        )
        return self._output(y, target, size)

    def _accepts(self, placement: Placement, dims: int) -> bool:
        return isinstance(placement, Shard) and placement.dim == dims - 1

    def _describe(self) -> str:
        rows = self.layout.output
        operator = (
            f"matmul_reduce_scatter over dimension {rows.dim}"
            if isinstance(rows, Shard)
            else "matmul_all_reduce"
        )
        return (
            ""
            if self.layout.input == Shard(-1)
            else f"torch: input from {self.layout.input}, then "
        ) + f"weft: {operator}"


def explain(module: nn.Module) -> str:
    """One line for each layer of `module` that a style of `weft.nn` was applied to or that is a
    layer of `weft.nn`: the operators that it runs, or the reason why torch runs it, and whether
    its weight is frozen. A sentence if there is none. Cutting a layer that is several in one gives
    wrong results without an error, so one that has such a name is pointed out.

    Raises `TypeError` if `module` is no module.
    """
    check_module(module, "module")
    notes = {
        name or type(part).__name__: note
        + ("; frozen" if getattr(part, "frozen", None) else "")
        + _of_several(name, part)
        for name, part in module.named_modules()
        if (note := getattr(part, "_weft", None))
    }
    if not notes:
        return without_layer(module)
    width = max(map(len, notes))
    return "\n".join(f"{name:<{width}}  {note}" for name, note in notes.items())


_SEVERAL = re.compile(r"(qkv|c_attn|query_key_value|gate_up)(_proj)?$", re.IGNORECASE)
"""The usual names of layers whose columns are those of several."""


def _of_several(name: str, module: nn.Module) -> str:
    """A warning if each rank may have the columns of other layers."""
    # subclasses are for transformers, whose plans cut each layer of such a weight
    if type(module) is not ColumnParallelLinear or module.layout.output.is_replicate():
        return ""
    if not _SEVERAL.search(name):
        return ""
    return "; CHECK: if these are several layers in one, make a layer of each, or results are wrong"


def without_layer(module: nn.Module) -> str:
    """The sentence about a module that no style was applied to."""
    return f"{type(module).__name__} has no layer of weft.nn; apply a style first"


def note(module: nn.Module, text: str) -> nn.Module:
    """Attach the text that `explain` shows for a module."""
    module.__dict__["_weft"] = text
    return module
