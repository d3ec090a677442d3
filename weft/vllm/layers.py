"""vLLM's row-parallel layers on weft: between hosts, the sums of all ranks' products are hidden
behind the products.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers import linear

from weft.kernels.function import FunctionWeight, weight
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.vllm import operators
from weft.vllm.communicator import Communicator

ROWS_MULTIPLE = 32  # of the tiles of vLLM's kernels

_KERNELS = "vllm.model_executor.kernels.linear"
_ROW_WISE = ("CPU", "Zentorch", "Dynamic4bit", "Unquantized")
"""Beginnings of names of kernels that quantise no activations, or each row by itself."""

_layers: WeakValueDictionary[str, RowParallelLinear] = WeakValueDictionary()


class RowParallelLinear(linear.RowParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name, whose product and sum over ranks are one operator of weft.

    The product is what vLLM runs for the loaded weight, of any quantisation whose rows do not
    depend on each other.

    Attributes: `reason`, why vLLM computes the layer, or ""; `weft_name`, unique in the process.
    """

    _weight: FunctionWeight | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reason = reason(self)
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
        else:
            output = self.summed_product(input_)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def summed_product(self, x: Tensor) -> Tensor:
        """The products of x (…, K) with this rank's part of the weight, summed over ranks."""
        if self._weight is None:
            shape = self.input_size_per_partition, self.output_size_per_partition
            self._weight = weight(self._product, shape, x.dtype, rows_multiple=ROWS_MULTIPLE)
        return _communicator().run(matmul_all_reduce, x, self._weight)

    def _product(self, rows: Tensor, out: Tensor) -> None:
        bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
        out.copy_(self.quant_method.apply(self, rows, bias))


_summed_product = operators.define(
    "vllm_summed_product(Tensor x, str layer, SymInt columns) -> Tensor",
    lambda x, layer, columns: _layers[layer].summed_product(x),
    lambda x, layer, columns: x.new_empty([*x.shape[:-1], columns]),
)


def _communicator() -> Communicator:
    communicator = get_tp_group().device_communicator
    assert isinstance(communicator, Communicator)
    return communicator


def reason(layer: RowParallelLinear) -> str:
    """Why vLLM computes a layer, or ""."""
    if layer.tp_size == 1 or not layer.reduce_results:
        return "its results are not added up"
    if not _communicator().world.multi_host:
        return "in the memory of one host a sum takes too little time to be hidden"
    kernel = kernel_of(layer)
    if not kernel.startswith(_ROW_WISE):
        return f"rows of {kernel} may depend on each other"
    return ""


def kernel_of(layer: nn.Module) -> str:
    """The name of the class of vLLM that multiplies by a layer's weight."""
    quantised = getattr(layer, "scheme", None), layer.quant_method
    for owner in quantised:
        for value in vars(owner).values() if owner is not None else ():
            if type(value).__module__.startswith(_KERNELS):
                return type(value).__name__
    return type(layer.quant_method).__name__


def explain(model: nn.Module) -> str:
    """A line for each parallel layer of a vLLM model: its product, and how its results are added
    up, or why weft does not overlap that; for ``LLM.apply_model``.
    """
    lines = []
    for name, layer in model.named_modules():
        if isinstance(layer, RowParallelLinear):
            how = "matmul_all_reduce"
            if layer.reason:
                summed = "all_reduce after the product: " if layer.reduce_results else ""
                how = summed + layer.reason
            lines.append(f"{name}: {kernel_of(layer)}; {how}")
        elif isinstance(layer, linear.ColumnParallelLinear):
            joined = "joined by all_gather" if layer.gather_output else "no communication"
            lines.append(f"{name}: {kernel_of(layer)}; {joined}")
    return "\n".join(lines)


def register() -> None:
    """Let vLLM make these layers in place of its own."""
    PluggableLayer.register_oot(RowParallelLinear, name="RowParallelLinear")
