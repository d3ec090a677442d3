"""DeepSpeed's ZeRO trains on two CPU processes as one process does, and its own functions of
communication give what torch's give.
"""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"

STEPS, ROWS = 6, 4
RATE = 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of both ranks."""
    x = torch.randn(2 * ROWS, 8, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).tanh()


def alone() -> list[float]:
    """The loss of each step in one process."""
    net, losses = model(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(STEPS):
        x, y = batch(step)
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(fn, *args):  # type: ignore[no-untyped-def]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (fn, port, args), nprocs=2)


def _rank(rank, fn, port, args):  # type: ignore[no-untyped-def]
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    import deepspeed

    deepspeed.init_distributed("gloo")
    fn(rank, *args)
    torch.distributed.destroy_process_group()


def train(rank: int, stage: int, expected: list[float]) -> None:
    import deepspeed

    net = model()
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        optimizer=torch.optim.SGD(net.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    losses = []
    for step in range(STEPS):
        x, y = (rows.chunk(2)[rank] for rows in batch(step))
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / 2)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(stage):  # type: ignore[no-untyped-def]
    run(train, stage, alone())


def communicate(rank: int) -> None:
    from deepspeed import comm

    x = torch.full((5,), float(rank + 1))
    comm.all_reduce(x)
    assert x.tolist() == [3.0] * 5
    out = torch.empty(4)
    comm.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
    part = torch.empty(2)
    comm.reduce_scatter_tensor(part, torch.arange(4.0))
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2.0]
    there = torch.empty(2)
    comm.all_to_all_single(there, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert there.tolist() == [float(rank), 10.0 + rank]
    comm.broadcast(x.mul_(rank), src=1)
    assert x.tolist() == [3.0] * 5
    comm.barrier()


def test_communication():  # type: ignore[no-untyped-def]
    run(communicate)
