"""vLLM's row-parallel layers on weft's fused matmul + all-reduce."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers import linear

from weft.kernels.function import FunctionWeight, weight
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.vllm import operators
from weft.vllm.communicator import Communicator

_layers: WeakValueDictionary[str, RowParallelLinear] = WeakValueDictionary()


class RowParallelLinear(linear.RowParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name: the sums of all ranks' products begin while they are computed.

    The product is whatever vLLM runs for the loaded weight, of any quantisation whose rows do not
    depend on each other; for others see `reason`.
    """

    _weight: FunctionWeight | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = f"{self.prefix}/{len(_layers)}"
        _layers[self.name] = self

    def forward(self, input_: Tensor) -> Any:
        if self.reason():
            return super().forward(input_)
        if not self.input_is_parallel:
            parts = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)
            input_ = parts[self.tp_rank].contiguous()
        if torch.compiler.is_compiling():
            output = _row_linear(input_, self.name)
        else:
            output = self.summed_product(input_)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def reason(self) -> str:
        """Why the layer is not overlapped, or ""."""
        if self.tp_size == 1 or not self.reduce_results:
            return "it adds nothing up"
        return ""

    def summed_product(self, x: Tensor) -> Tensor:
        """The products of x (…, K) with this rank's part of the weight, summed over ranks."""
        communicator = get_tp_group().device_communicator
        assert isinstance(communicator, Communicator)
        if self._weight is None:
            shape = self.input_size_per_partition, self.output_size_per_partition
            self._weight = weight(self._product, shape, x.dtype, rows_multiple=32)
        return communicator.run(matmul_all_reduce, x, self._weight)

    def _product(self, rows: Tensor, out: Tensor) -> None:
        bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
        out.copy_(self.quant_method.apply(self, rows, bias))


_row_linear = operators.define(
    "vllm_row_linear(Tensor x, str layer) -> Tensor",
    lambda x, layer: _layers[layer].summed_product(x),
    lambda x, layer: x.new_empty([*x.shape[:-1], _layers[layer].output_size_per_partition]),
)


def register() -> None:
    """Let vLLM make these layers in place of its own."""
    PluggableLayer.register_oot(RowParallelLinear, name="RowParallelLinear")
