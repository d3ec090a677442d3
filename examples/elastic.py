"""Training with data parallelism that loses a rank to SIGKILL, and continues with the others.

    python examples/elastic.py --ranks 3

The model is torch's DistributedDataParallel on weft's backend. After the loss the others agree on
who is left (`world.shrink`), return to the last state that all of them have, and wrap the same
model, in the same processes, for a group of those ranks. Then the script starts as many ranks anew
from that state, and compares the losses of all further steps: they are equal to the bit.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import weft

BATCH, LENGTH, CLASSES = 24, 32, 10  # samples of a step on all ranks


class Training:
    """A model, its optimizer and the step that comes next."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(LENGTH, 64), nn.GELU(), nn.Linear(64, CLASSES))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.step = 0

    def state(self) -> dict[str, Any]:
        parts = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(parts) | {"step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def make_step(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """One step of data parallelism; its loss on this rank's samples."""
        torch.manual_seed(1000 + self.step)
        samples = torch.randn(BATCH, LENGTH).chunk(ranks)[rank]
        labels = samples[:, :CLASSES].argmax(1)
        loss = cross_entropy(model(samples), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()


def wrapped(net: nn.Module, world: weft.World) -> DistributedDataParallel:
    """The model on a process group of the world's ranks, which only they make."""
    group = dist.new_group([*world.global_ranks], backend="weft", use_local_synchronization=True)
    return DistributedDataParallel(net, process_group=group)


def train(steps: int, victim: int, at: int, folder: Path, start: Path | None) -> None:
    """The part of a rank. Rank `victim` kills itself in step `at`."""
    dist.init_process_group("gloo")  # torch makes groups of some ranks beside one of all
    world = weft.init()
    training = Training()
    if start is not None:
        training.load(torch.load(start))
    model = wrapped(training.net, world)
    losses: dict[int, float] = {}
    # ranks are at most a step apart, as each step needs all of them
    states = [training.state()] * 2
    while training.step < steps:
        if training.step == at and world.global_ranks[world.rank] == victim and start is None:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss = training.make_step(model, world.rank, world.ranks)
            total = weft.all_reduce(loss, op="avg")
            losses[training.step - 1] = total.item()
            states = [states[1], training.state()]
        except RuntimeError as error:  # torch reports the errors of its threads as this
            lost = time.perf_counter()
            world = world.shrink()
            first = int(weft.all_reduce(torch.tensor(states[1]["step"]), op="min"))
            states = [state for state in states if state["step"] == first][:1] * 2
            training.load(states[0])
            model = wrapped(training.net, world)
            if world.rank == 0:
                reason = str(error).strip().splitlines()[0][:90]
                print(f"lost a rank before step {first} ended: {reason}")
                print(
                    f"ranks {[*world.global_ranks]} continue from step {first} after "
                    f"{1e3 * (time.perf_counter() - lost):.0f} ms"
                )
                torch.save(states[0], folder / "state.pt")
    if world.rank == 0:
        torch.save(losses, folder / f"losses{'-anew' if start else ''}.pt")
    world.close()
    dist.destroy_process_group()


def launch(ranks: int, *arguments: object) -> None:
    """Start ranks of which each may end without the others."""
    command = ["weft", "run", "--elastic", "-n", str(ranks), __file__, *map(str, arguments)]
    subprocess.run([sys.executable, "-m", *command], check=True)


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks at the start.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 12,
    victim: Annotated[int, typer.Option(help="The rank that is killed.")] = 1,
    at: Annotated[int, typer.Option(help="The step in which it is killed.")] = 5,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    start: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train, lose a rank, continue, and compare with a run of the others alone."""
    if folder is not None:  # a rank
        train(steps, victim, at, folder, start)
        return
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        options = ["--steps", steps, "--victim", victim, "--at", at, "--folder", place]
        launch(ranks, *options)
        launch(ranks - 1, *options, "--start", place / "state.pt")
        losses, anew = torch.load(place / "losses.pt"), torch.load(place / "losses-anew.pt")
    for step, loss in losses.items():
        again = f"{anew[step]:.6f}" if step in anew else ""
        print(f"step {step:2}  loss {loss:.6f}  {again}")
    if {step: losses[step] for step in anew} != anew:
        raise SystemExit("the losses differ from those of ranks that were started anew")
    print(f"the losses of {len(anew)} steps equal those of {ranks - 1} ranks started anew")


if __name__ == "__main__":
    typer.run(main)
