"""Checks of vLLM's layers on weft between hosts, run on each rank in the environment of `make vllm`:
a decoder's layers, in one dtype or quantised, equal those of one process for any number of rows.
"""

import os
import sys
from collections import Counter

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.plugins import load_general_plugins

import weft.vllm
from weft.vllm import layers
from weft.vllm.communicator import Communicator
from weft.vllm.row_shard import RowShard
from weft_tools.bench.vllm.models import W8A8

HIDDEN, HEADS, SIZE, INNER = 64, 4, 16, 128


class Block(torch.nn.Module):
    """Attention's and the perceptron's layers of a Llama, whose attention passes values on; of all
    ranks, or `alone`.
    """

    def __init__(self, quantised, alone):
        super().__init__()
        config = CompressedTensorsConfig.from_config(W8A8) if quantised else None
        named = {"quant_config": config, "params_dtype": torch.bfloat16, "disable_tp": alone}
        three = [HIDDEN] * 3
        self.qkv = (
            MergedColumnParallelLinear(HIDDEN, three, False, prefix="qkv", **named)
            if alone
            else QKVParallelLinear(HIDDEN, SIZE, HEADS, HEADS, False, prefix="qkv", **named)
        )
        self.o = RowParallelLinear(HIDDEN, HIDDEN, bias=False, prefix="o", **named)
        self.up = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], False, prefix="up", **named)
        self.down = RowParallelLinear(INNER, HIDDEN, bias=False, prefix="down", **named)
        norms = [RMSNorm(HIDDEN, dtype=torch.bfloat16) for _ in range(3)]
        self.first, self.second, self.last = norms
        self.shards = {self.qkv: (0, 1, 2) if alone else "qkv", self.up: (0, 1)}

    def load(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for layer in self.qkv, self.o, self.up, self.down:
            for shard in self.shards.get(layer, [None]):
                for name, weight in self.weights(layer, generator).items():
                    parameter = getattr(layer, name)
                    parameter.weight_loader(parameter, weight, *([] if shard is None else [shard]))
            layer.quant_method.process_weights_after_loading(layer)

    def weights(self, layer, generator):
        """Random whole weights of a layer, of one shard."""
        rows = {self.qkv: HIDDEN, self.o: HIDDEN, self.up: INNER, self.down: HIDDEN}[layer]
        columns = layer.input_size
        if layer.weight.dtype == torch.int8:
            weight = torch.randint(-127, 128, (rows, columns), generator=generator)
            scales = (torch.rand(rows, 1, generator=generator) + 0.5) / 600
            return {"weight": weight.to(torch.int8), "weight_scale": scales}
        return {"weight": (torch.randn(rows, columns, generator=generator) / 8).bfloat16()}

    def forward(self, x):
        residual = x
        x = self.first(x)
        values = self.qkv(x)[0].chunk(3, -1)[2]
        x, residual = self.second(self.o(values)[0], residual)
        gate, up = self.up(x)[0].chunk(2, -1)
        x, residual = self.last(self.down(F.silu(gate) * up)[0], residual)
        return x, residual


def counted(counts):
    """Count the operators of weft that layers call, and the rows that are gathered whole."""
    run, gathered = Communicator.run, Communicator.gathered

    def counting_run(self, operator, *args, **options):
        counts[operator.__name__] += 1
        return run(self, operator, *args, **options)

    def counting_gathered(self, tensor, dim, sizes):
        counts["gathered"] += 1
        return gathered(self, tensor, dim, sizes)

    Communicator.run, Communicator.gathered = counting_run, counting_gathered


def check(block, whole, rows, counts, sharded):
    counts.clear()
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    found = block(x.clone())
    assert all(isinstance(tensor, RowShard) is sharded for tensor in found)
    expected = {"matmul_reduce_scatter": 2, "all_gather_matmul": 1} if sharded else {}
    assert counts == expected, counts
    for tensor, of_one in zip(found, whole(x.clone()), strict=True):
        assert tensor.shape == of_one.shape
        bound = 0.04 * of_one.abs().max()
        assert (tensor - of_one).abs().max() < bound, (rows, (tensor - of_one).abs().max(), bound)


def check_other_operators(block, counts):
    """Operators that weft does not know get all rows, gathered once."""
    found, _ = block(
        torch.randn(280, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    )
    counts.clear()
    rows = found[torch.tensor([3, 279])]
    assert type(rows) is torch.Tensor
    assert torch.equal(rows[0], (found * 1)[3])
    assert counts == {"gathered": 1, "all_gather": 1}, counts
    found.add_(1)  # as any later operator sees
    assert torch.equal((found + 0)[3], rows[0] + 1)


def main():
    load_general_plugins()
    weft.vllm.register()  # vLLM may load a plug-in more than once
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(
            int(os.environ["WORLD_SIZE"]),
            int(os.environ["RANK"]),
            "env://",
            int(os.environ["LOCAL_RANK"]),
            "weft",
        )
        initialize_model_parallel(int(os.environ["WORLD_SIZE"]), backend="weft")
        counts = Counter()
        counted(counts)
        for quantised in False, True:
            block, alone = Block(quantised, alone=False), Block(quantised, alone=True)
            block.load(3)
            alone.load(3)
            for rows in 1, 7, 256, 301:
                check(block, alone, rows, counts, sharded=rows >= layers.ROWS_SHARDED)
            told = layers.explain(block)
            assert ("all_gather_matmul of int8 rows" in told) is quantised, told
            assert told.count("matmul_reduce_scatter") == 2
        check_other_operators(block, counts)
    rank = torch.distributed.get_rank()
    destroy_model_parallel()
    destroy_distributed_environment()
    if rank == 0:
        print("all checks passed")


if __name__ == "__main__":
    sys.exit(main())
