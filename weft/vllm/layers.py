"""vLLM's parallel layers on weft: between hosts, communication is hidden behind the products.

Of many rows, as in a prompt, each rank adds up and keeps its own (`RowShard`) from a row-parallel
layer to the column-parallel layer that multiplies all of them as they arrive; of few rows, all
ranks get the sums. Graphs, whose layers cannot choose by the number of rows, do the latter.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers import linear

from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.plan.binding import split
from weft.vllm import operators
from weft.vllm.communicator import Communicator
from weft.vllm.products import Rows, is_row_wise, kernel_name, sent_rows
from weft.vllm.row_shard import RowShard, shard_among

ROWS_SHARDED = 64  # from which on each rank keeps its own rows

_layers: WeakValueDictionary[str, RowParallelLinear] = WeakValueDictionary()


class RowParallelLinear(linear.RowParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name, whose product and sum over ranks are one operator of weft.

    The product is what vLLM runs for the loaded weight, of any quantisation whose rows do not
    depend on each other.

    Attributes: `reason`, why vLLM computes the layer, or ""; `weft_name`, unique in the process.
    """

    _rows: Rows | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        summed = self.tp_size > 1 and self.reduce_results
        self.reason = _reason(self) if summed else "its results are not added up"
        self.weft_name = f"{self.prefix} {len(_layers)}"
        _layers[self.weft_name] = self

    def forward(self, input_: Tensor) -> Any:
        if self.reason:
            return super().forward(input_)
        if not self.input_is_parallel:
            parts = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)
            input_ = parts[self.tp_rank].contiguous()
        if torch.compiler.is_compiling():
            output = _summed_product(input_, self.weft_name, self.output_size_per_partition)
        elif input_.dim() == 2 and len(input_) >= ROWS_SHARDED:
            output = self.sharded_product(input_)
        else:
            output = self.summed_product(input_)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def summed_product(self, x: Tensor) -> Tensor:
        """The products of x (…, K) with this rank's part of the weight, summed over ranks."""
        return _communicator().run(matmul_all_reduce, x, self._product(x).weight)

    def sharded_product(self, x: Tensor) -> RowShard:
        """`summed_product` of x (rows, K), of which each rank has its own rows."""
        communicator = _communicator()
        sizes = split(len(x), communicator.world_size)
        weight = self._product(x).weight
        own = communicator.run(matmul_reduce_scatter, x, weight, shard_rows=sizes)
        return RowShard(own, sizes, communicator)

    def _product(self, x: Tensor) -> Rows:
        if self._rows is None:
            bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
            self._rows = Rows(self, self.input_size_per_partition, x.dtype, bias)
        return self._rows


_summed_product = operators.define(
    "vllm_summed_product(Tensor x, str layer, SymInt columns) -> Tensor",
    lambda x, layer, columns: _layers[layer].summed_product(x),
    lambda x, layer, columns: x.new_empty([*x.shape[:-1], columns]),
)


class _ColumnParallel(linear.ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel layer of vLLM that multiplies rows of all ranks as they arrive.

    Attributes: `reason`, why it gathers rows before the product, or "".
    """

    _rows: Rows | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reason = _reason(self) if self.tp_size > 1 else "it has no ranks"

    def forward(self, input_: Tensor) -> Any:
        shard = shard_among(input_)
        if shard is None or self.reason or self.gather_output:
            return super().forward(input_)
        if self._rows is None:
            bias = None if self.skip_bias_add else self.bias
            self._rows = sent_rows(self, self.input_size_per_partition, input_.dtype, bias)
        rows, run = self._rows, shard.communicator.run
        output = run(all_gather_matmul, rows.sent(shard.own), rows.weight, shard_rows=shard.sizes)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class ColumnParallelLinear(_ColumnParallel):
    """vLLM's layer of this name on weft."""


class MergedColumnParallelLinear(_ColumnParallel, linear.MergedColumnParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name on weft."""


class QKVParallelLinear(_ColumnParallel, linear.QKVParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name on weft."""


def _communicator() -> Communicator:
    communicator = get_tp_group().device_communicator
    assert isinstance(communicator, Communicator)
    return communicator


def _reason(layer: nn.Module) -> str:
    """Why vLLM computes a layer of several ranks, or ""."""
    if not _communicator().world.multi_host:
        return "in the memory of one host communication takes too little time to be hidden"
    if not is_row_wise(layer):
        return f"rows of {kernel_name(layer)} may depend on each other"
    return ""


def explain(model: nn.Module) -> str:
    """A line for each parallel layer of a vLLM model: its product, and how it communicates, or why
    weft does not overlap that; for ``LLM.apply_model``.
    """
    lines = []
    for name, layer in model.named_modules():
        if isinstance(layer, RowParallelLinear):
            how = (
                f"all_reduce after the product: {layer.reason}"
                if layer.reason and layer.reduce_results and layer.tp_size > 1
                else layer.reason
                or f"matmul_all_reduce; from {ROWS_SHARDED} rows on matmul_reduce_scatter"
            )
            lines.append(f"{name}: {kernel_name(layer)}; {how}")
        elif isinstance(layer, _ColumnParallel):
            sent = sent_rows(layer, layer.input_size_per_partition, layer.params_dtype, None).words
            how = (
                f"no communication: {layer.reason}"
                if layer.reason
                else f"from {ROWS_SHARDED} rows on all_gather_matmul of {sent}"
            )
            lines.append(f"{name}: {kernel_name(layer)}; {how}")
    return "\n".join(lines)


def register() -> None:
    """Let vLLM make these layers in place of its own."""
    for layer in (
        RowParallelLinear,
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
    ):
        PluggableLayer.register_oot(layer, name=layer.__name__)
