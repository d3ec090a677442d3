"""A small transformer trained by five of torch's forms of parallelism, on gloo and on weft.

    python examples/torch_distributed.py --ranks 2

Data parallel (DDP), fully sharded (FSDP2), tensor parallel (DTensor) and in a pipeline of one stage
a rank (1F1B) or of two (interleaved 1F1B): the code is the same for both backends, except for the
process group. Losses are compared step by step, steps alternate, and times are medians over steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import weft

TOLERANCE = 1e-4  # relative; sums over more than two ranks are rounded in another order
BACKENDS = ("gloo", "weft")
VOCABULARY = 512


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.attention_norm, self.up_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
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
        return x + self.down(F.gelu(self.up(self.up_norm(x))))


def transformer(dim: int, layers: int, heads: int) -> nn.Sequential:
    """Tokens to logits; the same model on every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, dim),
        *(Block(dim, heads) for _ in range(layers)),
        nn.Linear(dim, VOCABULARY),
    )


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss of predicting each token from earlier tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


Step = Callable[[Tensor], float]
"""One step of training on a batch of tokens, equal on all ranks; returns this rank's loss."""


def data_parallel(model: nn.Sequential, group: dist.ProcessGroup) -> Step:
    return trained(DistributedDataParallel(model, process_group=group), group)


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """A mesh named after the backend: DTensor treats meshes with the same ranks and names as one,
    and uses the group of the first.
    """
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))


def fully_sharded(model: nn.Sequential, group: dist.ProcessGroup) -> Step:
    mesh = mesh_of(group)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return trained(fully_shard(model, mesh=mesh), group)


def tensor_parallel(model: nn.Sequential, group: dist.ProcessGroup) -> Step:
    plan = {f"*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {f"*.{name}": RowwiseParallel() for name in ("o", "down")}
    plan[str(len(model) - 1)] = ColwiseParallel(output_layouts=Replicate())
    return trained(parallelize_module(model, mesh_of(group), plan), None)


def trained(model: nn.Module, shared_by: dist.ProcessGroup | None) -> Step:
    """A step of plain training; ranks that share the work each take a part of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(tokens: Tensor) -> float:
        mine = tokens if shared_by is None else tokens.chunk(shared_by.size())[shared_by.rank()]
        loss = loss_of(model(mine), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def stages_of(
    model: nn.Sequential, group: dist.ProcessGroup, each: int
) -> tuple[list[PipelineStage], nn.ModuleList]:
    """This rank's stages, so many of each rank, and their layers; a stage is followed by one of the
    next rank.
    """
    number = each * group.size()
    bounds = [round(len(model) * stage / number) for stage in range(number + 1)]
    own = {
        stage: model[bounds[stage] : bounds[stage + 1]]
        for stage in range(group.rank(), number, group.size())
    }
    stages = [
        PipelineStage(layers, stage, number, torch.device("cpu"), group=group)
        for stage, layers in own.items()
    ]
    return stages, nn.ModuleList(own.values())


def pipeline(model: nn.Sequential, group: dist.ProcessGroup) -> Step:
    (stage,), own = stages_of(model, group, 1)
    return staged(Schedule1F1B(stage, 2 * group.size(), loss_fn=loss_of), own, group)


def interleaved_pipeline(model: nn.Sequential, group: dist.ProcessGroup) -> Step:
    stages, own = stages_of(model, group, 2)
    return staged(ScheduleInterleaved1F1B(stages, 2 * group.size(), loss_fn=loss_of), own, group)


def staged(
    schedule: Schedule1F1B | ScheduleInterleaved1F1B, own: nn.Module, group: dist.ProcessGroup
) -> Step:
    """A step of training by a schedule of the stages of which this rank has its own layers."""
    rank, ranks = group.rank(), group.size()
    optimizer = torch.optim.SGD(own.parameters(), 0.05)

    def step(tokens: Tensor) -> float:
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": tokens, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*([tokens] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    return step


VARIANTS: dict[str, Callable[[nn.Sequential, dist.ProcessGroup], Step]] = {
    "DDP": data_parallel,
    "FSDP2": fully_sharded,
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    "interleaved pipeline": interleaved_pipeline,
}


def measure(
    dim: int, layers: int, heads: int, batch: int, length: int, steps: int
) -> dict[str, dict[str, float]]:
    """Run on each rank: train every variant on both backends; milliseconds of a step by variant
    and backend.
    """
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    found = {}
    for variant, made in VARIANTS.items():
        training = {
            backend: made(transformer(dim, layers, heads), group)
            for backend, group in groups.items()
        }
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for number in range(steps + 1):
            tokens = torch.randint(
                VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(number)
            )
            losses = {}
            for backend, step in training.items():
                dist.barrier()
                start = time.perf_counter()
                losses[backend] = step(tokens)
                dist.barrier()
                times[backend].append(1e3 * (time.perf_counter() - start))
            gloo, ours = losses["gloo"], losses["weft"]
            if not abs(gloo - ours) <= TOLERANCE * abs(gloo):
                raise AssertionError(
                    f"{variant}, step {number}: the loss is {gloo} on gloo and {ours} on weft"
                )
        # without the first step, which warms up
        found[variant] = {backend: median(taken[1:]) for backend, taken in times.items()}
    dist.destroy_process_group()
    return found


def main(
    ranks: Annotated[int, typer.Option("--ranks", "-n")] = 2,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: int = 4,
    heads: Annotated[int, typer.Option(help="A multiple of the ranks.")] = 4,
    batch: Annotated[
        int, typer.Option(help="Sequences at a time; a multiple of twice the ranks.")
    ] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 32,
    steps: int = 11,
) -> None:
    """Train a small transformer in each variant on gloo and weft, comparing losses and times."""
    if dim % heads or heads % ranks or batch % (2 * ranks) or layers + 2 < 2 * ranks:
        raise typer.BadParameter(
            "heads divide dim, ranks divide heads, twice the ranks divide batch; layers are at "
            "least twice the ranks, less two"
        )
    found = weft.launch(measure, ranks, dim, layers, heads, batch, length, steps)[0]
    table = Table(
        title=f"{layers} layers of width {dim}, {batch} x {length} tokens, {ranks} ranks; "
        f"median of {steps} steps"
    )
    for column in ("", "gloo ms", "weft ms", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for variant, times in found.items():
        table.add_row(
            variant,
            *(f"{times[backend]:.1f}" for backend in BACKENDS),
            f"{times['gloo'] / times['weft']:.2f}x",
        )
    Console().print(table)
    Console().print(f"losses agree in every step, to {TOLERANCE:g}")


if __name__ == "__main__":
    typer.run(main)
