"""vLLM's parallel layers on weft: over a slow link between hosts, products hide communication.

Of many rows, as in a prompt, each rank adds up and keeps its own (`RowShard`) from a row-parallel
layer to the column-parallel layer that multiplies all of them as they arrive. Elsewhere layers are
vLLM's, with an all-reduce after the product: in the memory of one host, over a fast link, and of
few rows, it takes less time than products in pieces cost; and a graph cannot choose by the number
of rows.
"""

from __future__ import annotations

import time
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.layers import linear

from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.plan.binding import split
from weft.vllm.communicator import Communicator
from weft.vllm.products import RowProduct, is_row_wise, kernel_name, sent_rows
from weft.vllm.row_shard import RowShard, shard_among

ROWS_SHARDED = 256
"""Rows from which on each rank keeps its own.

Measured on two hosts of 2 cores, 1 Gbit/s: 512 rows take 0.89 of the time of an all-reduce after
the product, 128 rows 1.05 (`benchmarks/vllm_layers.py 64,128,512`).
"""
SLOW_MS = 4
"""Milliseconds of an all-reduce of 1 MiB, from which on a link is slow.

Measured on two hosts of 2 cores: 512 rows take 1.08 times as long at 10 Gbit/s, where it takes
less, and 0.89 times at 1 Gbit/s, where it takes more.
"""
_PROBES = 5  # all-reduces whose median counts: up to two may be disturbed


class RowParallelLinear(linear.RowParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name, whose product and sum over ranks are one operator of weft where
    that pays.

    The product is what vLLM runs for the loaded weight, of any quantisation whose rows do not
    depend on each other.

    Attributes: `reason`, why the sum follows the product, or "".
    """

    _rows: RowProduct | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        summed = self.tp_size > 1 and self.reduce_results
        self.reason = _reason(self) if summed else "its results are not added up"

    def forward(self, input_: Tensor) -> Any:
        if (
            self.reason
            or torch.compiler.is_compiling()
            or input_.dim() != 2
            or len(input_) < ROWS_SHARDED
        ):
            return super().forward(input_)
        if not self.input_is_parallel:
            parts = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)
            input_ = parts[self.tp_rank].contiguous()
        return _returned(self, self._own_sums(input_))

    def _own_sums(self, x: Tensor) -> RowShard:
        """The products of x (rows, K) with this rank's part of the weight, summed over ranks, of
        which each rank has its own rows.
        """
        if self._rows is None:
            bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
            self._rows = RowProduct(self, self.input_size_per_partition, x.dtype, bias)
        communicator = _communicator()
        sizes = split(len(x), communicator.world_size)
        weight = self._rows.weight
        own = communicator.run(matmul_reduce_scatter, x, weight, shard_rows=sizes)
        return RowShard(own, sizes, communicator)


class _ColumnParallel(linear.ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel layer of vLLM that multiplies rows of all ranks as they arrive.

    Attributes: `reason`, why it gathers rows before the product, or "".
    """

    _rows: RowProduct | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reason = _reason(self) if self.tp_size > 1 else "there is one rank"

    def forward(self, input_: Tensor) -> Any:
        shard = shard_among(input_)
        if shard is None or self.reason or self.gather_output:
            return super().forward(input_)
        if self._rows is None:
            bias = None if self.skip_bias_add else self.bias
            columns, dtype = self.input_size_per_partition, input_.dtype
            self._rows = sent_rows(self, columns, dtype)(self, columns, dtype, bias)
        rows = self._rows
        run = shard.communicator.run
        output = run(all_gather_matmul, rows.sent(shard.own), rows.weight, shard_rows=shard.sizes)
        return _returned(self, output)


class ColumnParallelLinear(_ColumnParallel):
    """vLLM's layer of this name on weft."""


class MergedColumnParallelLinear(_ColumnParallel, linear.MergedColumnParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name on weft."""


class QKVParallelLinear(_ColumnParallel, linear.QKVParallelLinear):  # type: ignore[misc]
    """vLLM's layer of this name on weft."""


def _returned(layer: Any, output: Tensor) -> Any:
    """What vLLM's layers return: the result, and the bias that it lacks where that is asked for."""
    if not layer.return_bias:
        return output
    return output, layer.bias if layer.skip_bias_add else None


def _communicator() -> Communicator:
    communicator = get_tp_group().device_communicator
    assert isinstance(communicator, Communicator)
    return communicator


def _reason(layer: nn.Module) -> str:
    """Why a layer of several ranks communicates after its product, or ""."""
    communicator = _communicator()
    if not communicator.world.hosts.several:
        return "in the memory of one host a sum takes too little time to be hidden"
    if (milliseconds := _link_ms(communicator)) < SLOW_MS:
        return f"1 MiB is added up in {milliseconds:.1f} ms, too little to be hidden"
    if not is_row_wise(layer):
        return f"rows of {kernel_name(layer)} may depend on each other"
    return ""


@cache
def _link_ms(communicator: Communicator) -> float:
    """The median milliseconds of an all-reduce of 1 MiB, of the slowest rank; collective."""
    tensor = torch.zeros(1 << 18, device="cpu")
    times = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        communicator.all_reduce(tensor)
        times.append(1e3 * (time.perf_counter() - start))
    return communicator.all_gather(torch.tensor([median(times)], device="cpu"), 0).max().item()


def explain(model: nn.Module) -> str:
    """A line for each parallel layer of a vLLM model: its product, and how it communicates, or why
    weft does not overlap that; for ``LLM.apply_model``.
    """
    lines = []
    for name, layer in model.named_modules():
        if isinstance(layer, RowParallelLinear):
            after = "all_reduce after the product" if layer.reduce_results else "no communication"
            overlapped = "matmul_reduce_scatter"
        elif isinstance(layer, _ColumnParallel):
            rows = sent_rows(layer, layer.input_size_per_partition, layer.params_dtype)
            after = "no communication"
            overlapped = f"all_gather_matmul of {rows.words}"
        else:
            continue
        how = (
            f"{after}: {layer.reason}" if layer.reason else f"{overlapped} from {ROWS_SHARDED} rows"
        )
        lines.append(f"{name}: {kernel_name(layer)}; {how}")
    return "\n".join(lines)


LAYERS = RowParallelLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
"""The layers that vLLM makes instead of its own layers of these names."""
