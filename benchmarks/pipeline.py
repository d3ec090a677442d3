"""The limit of a pipeline of two ranks, that of `examples/torch_distributed.py`, beside its steps
by gloo and by weft.

``python benchmarks/pipeline.py [STEPS]``, by default 40: milliseconds, medians of steps that
alternate. In *free* steps messages cost nothing, and no stage waits for the other. The limit adds
to them what the schedule, 1F1B, lets no backend avoid: the second stage begins after the first
forward pass of the first, which ends after the last backward pass of the second.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

import weft

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from torch_distributed import VOCABULARY, pipeline, transformer

KINDS = {"gloo": "gloo", "weft": "weft", "free": "gloo"}  # the backends of their groups
DIM, LAYERS, HEADS, BATCH, LENGTH = 256, 4, 4, 4, 8
PIECES = 4  # of a batch
PASSES = {"forward": "forward_one_chunk", "backward": "backward_one_chunk"}

Times = dict[str, list[float]]


@contextmanager
def without_messages() -> Iterator[None]:
    """A stage computes with what it has received before."""
    exchange: Any = schedules._batch_p2p
    schedules._batch_p2p = lambda *_, **__: []
    try:
        yield
    finally:
        schedules._batch_p2p = exchange


def timed(call: Callable[..., Any], times: list[float], *args: Any, **options: Any) -> Any:
    """The result of a call, whose seconds are added to `times`."""
    start = time.perf_counter()
    try:
        return call(*args, **options)
    finally:
        times.append(time.perf_counter() - start)


def measure(steps: int) -> dict[str, float]:
    """Milliseconds on this rank: steps of each kind until all ranks have ended, and of a free step
    this rank's own time and its passes.
    """
    dist.init_process_group("gloo")
    times: Times = {name: [] for name in (*KINDS, "own", *PASSES)}
    stages = {
        kind: pipeline(transformer(DIM, LAYERS, HEADS), dist.new_group(backend=backend))
        for kind, backend in KINDS.items()
    }
    passes = {name: getattr(PipelineStage, method) for name, method in PASSES.items()}

    def step(kind: str, tokens: torch.Tensor) -> None:
        dist.barrier()
        timed(lambda: (timed(stages[kind], own, tokens), dist.barrier()), times[kind])

    for number in range(steps + 1):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        for kind in KINDS:
            own: list[float] = []
            if kind != "free" or number == 0:
                step(kind, tokens)
                continue
            with without_messages():
                for name, call in passes.items():
                    setattr(PipelineStage, PASSES[name], timing(call, times[name]))
                step(kind, tokens)
                for name, call in passes.items():
                    setattr(PipelineStage, PASSES[name], call)
            times["own"] += own
    dist.destroy_process_group()
    # without the first step, which warms up
    found = {name: taken[1:] if name in KINDS else taken for name, taken in times.items()}
    return {name: 1e3 * median(taken) for name, taken in found.items()}


def timing(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The method whose calls are timed."""
    return lambda self, *args, **options: timed(partial(call, self), times, *args, **options)


def limit(first: dict[str, float], second: dict[str, float]) -> float:
    """The least milliseconds of a step of two stages with these times."""
    both = [stage["forward"] + stage["backward"] for stage in (first, second)]
    besides = first["own"] - PIECES * both[0]
    return besides + both[0] + PIECES * both[1]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    first, second = weft.launch(measure, 2, steps, threads=1)
    for kind in KINDS:
        print(f"{kind:6s} {first[kind]:6.1f} ms")
    least = limit(first, second)
    gain = first["gloo"] / least
    print(f"limit  {least:6.1f} ms: without the time of messages, {gain:.2f} times as fast as gloo")
