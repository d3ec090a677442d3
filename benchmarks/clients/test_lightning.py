"""Lightning's Trainer and Fabric train on two CPU processes as one process does: whatever group
their strategies make.
"""

from __future__ import annotations

import lightning as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, ROWS = 8, 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * STEPS * ROWS, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, _):  # type: ignore[no-untyped-def]
        x, y = batch
        loss = (self.model(x) - y).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self):  # type: ignore[no-untyped-def]
        # of its own, since the Trainer's would shuffle
        sampler = DistributedSampler(data(), shuffle=False)
        return DataLoader(data(), batch_size=ROWS, sampler=sampler)

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        return torch.optim.SGD(self.parameters(), lr=0.1)


def alone() -> torch.Tensor:
    """The weights after the same steps in one process, whose batches are those of both ranks."""
    module = Module()
    optimizer = module.configure_optimizers()
    x, y = data().tensors
    for step in range(STEPS):
        rows = slice(2 * ROWS * step, 2 * ROWS * (step + 1))
        optimizer.zero_grad()
        (module.model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.model.parameters()).detach()


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn", "ddp_notebook"])
def test_trainer(strategy, tmp_path):  # type: ignore[no-untyped-def]
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    trained = nn.utils.parameters_to_vector(module.model.parameters()).detach()
    torch.testing.assert_close(trained, alone(), rtol=1e-4, atol=1e-5)
    assert trainer.callback_metrics["loss"].isfinite()


def steps(fabric: Fabric) -> list[float]:
    module = Module()
    model, optimizer = fabric.setup(module.model, module.configure_optimizers())
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=ROWS))
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward((model(x) - y).square().mean())
        optimizer.step()
    gathered = fabric.all_gather(torch.tensor([float(fabric.global_rank)]))
    assert gathered.flatten().tolist() == [0.0, 1.0]
    told = fabric.broadcast({"from": fabric.global_rank})
    assert told == {"from": 0}
    fabric.barrier()
    assert dist.get_backend() == "gloo"
    found = nn.utils.parameters_to_vector(model.parameters()).detach()
    return [float(each) for each in found]


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_fabric(strategy):  # type: ignore[no-untyped-def]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    trained = torch.tensor(fabric.launch(steps))
    torch.testing.assert_close(trained, alone(), rtol=1e-4, atol=1e-5)
