"""A tensor-parallel transformer by torch's own styles under torch.compile, with and without weft's
operators in the graph.

    python examples/async_tp.py --ranks 2

The sequence is sharded between layers. Each row of the table is the same program: on gloo eager and
compiled, on weft compiled, and compiled after `weft.enable_async_tp()`. Runs are interleaved, times
are medians, and results are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weft

TOLERANCE = 1e-4  # relative to the largest number of a result; sums are rounded in another order


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.attention_norm, self.up_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.relu(self.up(self.up_norm(x))))


def program(
    group: dist.ProcessGroup, name: str, dim: int, layers: int, heads: int
) -> Callable[[Tensor], Tensor]:
    """A function from this rank's part of a sequence to its part of the result, without any use of
    weft.
    """
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
    model = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
    column, row = (
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    )
    plan = {f"*.{name}": column for name in ("q", "k", "v", "up")} | {
        f"*.{name}": row for name in ("o", "down")
    }
    parallelize_module(
        model,
        mesh,
        plan | {"*.attention_norm": SequenceParallel(), "*.up_norm": SequenceParallel()},
    )

    def call(x: Tensor) -> Tensor:
        y = model(DTensor.from_local(x, mesh, [Shard(1)]))
        return y.to_local()

    return call


def measure(
    dim: int, layers: int, heads: int, batch: int, length: int, runs: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Run on each rank: milliseconds of each variant, and the operators of weft in the last one's
    graph.
    """
    dist.init_process_group("gloo")
    variants = {}
    for name, backend in (
        ("gloo", "gloo"),
        ("gloo, compiled", "gloo"),
        ("weft, compiled", "weft"),
        ("weft, overlapped", "weft"),
    ):
        call = program(dist.new_group(backend=backend), name, dim, layers, heads)
        variants[name] = call if name == "gloo" else torch.compile(call, fullgraph=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch, length // dist.get_world_size(), dim, generator=generator)
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.no_grad():
        for run in range(runs + 1):
            results = {}
            for name, call in variants.items():
                # takes effect when the program is compiled, in the first run
                weft.enable_async_tp(enable=name == "weft, overlapped")
                dist.barrier()
                start = time.perf_counter()
                results[name] = call(x)
                dist.barrier()
                times[name].append(1e3 * (time.perf_counter() - start))
            expected = results["gloo"]
            for name, result in results.items():
                if not (result - expected).abs().max() <= TOLERANCE * expected.abs().max():
                    raise AssertionError(f"{name}, run {run}: the result is not that of gloo")
    dist.destroy_process_group()
    return {name: median(taken[1:]) for name, taken in times.items()}, dict(counters["weft"])


def main(
    ranks: Annotated[int, typer.Option("--ranks", "-n")] = 2,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    layers: int = 2,
    heads: Annotated[int, typer.Option(help="A multiple of the ranks.")] = 8,
    batch: int = 1,
    length: Annotated[
        int, typer.Option(help="Tokens of a sequence; a multiple of the ranks.")
    ] = 512,
    runs: int = 11,
) -> None:
    """Run a tensor-parallel transformer eagerly, compiled, and compiled with weft's operators, and
    compare results and times.
    """
    if dim % heads or heads % ranks or length % ranks:
        raise typer.BadParameter("heads divide dim, ranks divide heads and length")
    times, operators = weft.launch(measure, ranks, dim, layers, heads, batch, length, runs)[0]
    table = Table(
        title=f"{layers} layers of width {dim}, {batch} x {length} tokens, {ranks} ranks; "
        f"median of {runs} runs"
    )
    for column in ("", "ms", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, taken in times.items():
        table.add_row(name, f"{taken:.1f}", f"{times['gloo'] / taken:.2f}x")
    Console().print(table)
    Console().print(
        "results agree;",
        ", ".join(f"{number} {name}" for name, number in operators.items()),
        "in the last program",
    )


if __name__ == "__main__":
    typer.run(main)
