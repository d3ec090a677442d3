"""A decoder's layers of vLLM between hosts: an all-reduce after each product, by gloo or weft, or
communication hidden behind products. In the environment of `make vllm`, a rank on each host:

    torchrun --nnodes 2 … benchmarks/vllm_layers.py 64,128,512
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    get_tp_group,
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

from weft.vllm import layers
from weft_tools.bench.vllm.models import W8A8

HIDDEN, HEADS, INNER = 1024, 16, 2816
WARM, CALLS = 16, 10  # the first calls measure weft's variants


class Layers(torch.nn.Module):
    """The linear layers and norms of a Llama's decoder layer, with random weights."""

    def __init__(self, quantised):
        super().__init__()
        config = CompressedTensorsConfig.from_config(W8A8) if quantised else None
        named = {"quant_config": config, "params_dtype": torch.bfloat16}
        self.qkv = QKVParallelLinear(HIDDEN, HIDDEN // HEADS, HEADS, bias=False, **named)
        self.o = RowParallelLinear(HIDDEN, HIDDEN, bias=False, **named)
        self.up = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False, **named)
        self.down = RowParallelLinear(INNER, HIDDEN, bias=False, **named)
        self.first, self.second = (RMSNorm(HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        self.summed = self.o, self.down
        for layer in self.qkv, self.up, *self.summed:
            for parameter in layer.parameters():
                if parameter.dtype == torch.int8:
                    parameter.data.random_(-127, 128)
                else:
                    parameter.data.normal_(0, 0.05).abs_()
            layer.quant_method.process_weights_after_loading(layer)

    def forward(self, x):
        values = self.qkv(x)[0].chunk(3, -1)[2]
        x, residual = self.first(self.o(values)[0], x)
        gate, up = self.up(x)[0].chunk(2, -1)
        x, _ = self.second(self.down(F.silu(gate) * up)[0], residual)
        return x + 0  # all rows


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    load_general_plugins()
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(ranks, rank, "env://", int(os.environ["LOCAL_RANK"]), "weft")
        initialize_model_parallel(ranks, backend="weft")
        layers.ROWS_SHARDED = 1
        for quantised in False, True:
            compare(Layers(quantised), "int8" if quantised else "bfloat16")


def compare(block, name):
    communicator = get_tp_group().device_communicator
    on_weft = type(communicator).all_reduce

    def on_gloo(self, x):
        dist.all_reduce(x, group=self.cpu_group)
        return x

    for rows in map(int, sys.argv[1].split(",")):
        times = {"gloo": [], "weft": [], "weft, hidden": []}
        x = torch.randn(rows, HIDDEN).bfloat16()
        for call in range(WARM + CALLS):
            for variant, seconds in times.items():
                for layer in block.summed:
                    layer.reason = "" if variant == "weft, hidden" else "compared"
                type(communicator).all_reduce = on_gloo if variant == "gloo" else on_weft
                dist.barrier(group=communicator.cpu_group)
                start = time.perf_counter()
                block(x.clone())
                if call >= WARM:
                    seconds.append(time.perf_counter() - start)
        if communicator.rank == 0:
            medians = {variant: 1e3 * statistics.median(t) for variant, t in times.items()}
            print(f"{name}, {rows} rows:", ", ".join(f"{v} {m:.2f} ms" for v, m in medians.items()))


if __name__ == "__main__":
    main()
