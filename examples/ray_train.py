"""A small model trained by Ray Train on CPU workers, on gloo and on weft: losses are compared.

    pip install "ray[train]"
    python examples/ray_train.py --ranks 2

The backend is one word of `TorchConfig`. The function that trains does not name it: Ray makes the
process group before it calls the function on each worker.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

try:
    import ray
    from ray import train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
except ModuleNotFoundError as error:
    raise SystemExit(f'{error}: pip install "ray[train]"') from None

TOLERANCE = 1e-4  # relative; sums over more than two ranks are rounded in another order
BACKENDS = ("gloo", "weft")


def fit(sizes: dict[str, int]) -> tuple[str, list[float]]:
    """Train on this worker; the backend, and the loss of every step, averaged over all workers."""
    torch.manual_seed(0)
    dim, classes = sizes["dim"], 10
    model = prepare_model(
        nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, classes))
    )  # in DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + train.get_context().get_world_rank())  # each worker has its own samples
    x = torch.randn(sizes["batch"], dim)
    labels = x[:, :classes].argmax(1)

    losses = []
    for _ in range(sizes["steps"]):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return dist.get_backend(), losses


def trained(backend: str, ranks: int, sizes: dict[str, int], folder: str) -> list[float]:
    """The losses of all steps on a backend."""
    found = TorchTrainer(
        fit,
        train_loop_config=sizes,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=ranks),  # with a core each
        run_config=RunConfig(name=backend, storage_path=folder),
    ).fit()
    ran_on, losses = found.return_value  # of the first worker
    assert ran_on == backend, ran_on
    return losses


def main(
    ranks: Annotated[int, typer.Option(help="Workers of Ray.")] = 2,
    dim: Annotated[int, typer.Option(help="Features of a sample.", min=10)] = 64,
    batch: Annotated[int, typer.Option(help="Samples of each rank.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 10,
) -> None:
    sizes = {"dim": dim, "batch": batch, "steps": steps}
    # a cluster of this machine: without an address Ray would join one that runs here
    ray.init("local", num_cpus=ranks, logging_level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        losses = {backend: trained(backend, ranks, sizes, folder) for backend in BACKENDS}
    ray.shutdown()

    table = Table("step", *BACKENDS)
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        table.add_row(str(step), *(f"{value:.6f}" for value in values))
    Console().print(table)
    theirs, ours = map(torch.tensor, losses.values())
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=0)
    assert ours[-1] < ours[0]
    print(f"{ranks} workers of Ray: losses agree in every step")


if __name__ == "__main__":
    typer.run(main)
