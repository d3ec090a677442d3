"""The limits of the pipelines of `examples/torch_distributed.py` on two ranks, beside their steps
by gloo and by weft.

``python benchmarks/pipeline.py [STEPS [DIM [LENGTH]]]``, by default 40 of width 256 and 8 tokens:
milliseconds, medians of steps that alternate, and the median of the ratios of a step by gloo to the
one by weft. In *free* steps messages cost nothing, and no stage waits for another. The limit adds
to them what no backend can avoid, with one stage a rank (1F1B) or two (interleaved): the second
rank begins after the first forward pass of the first, which ends after the last backward pass of
the second.
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
from torch_distributed import VOCABULARY, interleaved_pipeline, pipeline, transformer

KINDS = {"gloo": "gloo", "weft": "weft", "free": "gloo"}  # the backends of their groups
SCHEDULES = {"1F1B": (pipeline, 1), "interleaved": (interleaved_pipeline, 2)}  # stages a rank
LAYERS, HEADS, BATCH = 4, 4, 4
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


def measure(schedule: str, steps: int, dim: int, length: int) -> dict[str, float]:
    """Milliseconds on this rank: steps of each kind until all ranks have ended, and of a free step
    this rank's own time and its passes, each kind together. And the ratio of gloo to weft.
    """
    dist.init_process_group("gloo")
    times: Times = {name: [] for name in (*KINDS, "own", *PASSES)}
    made, _ = SCHEDULES[schedule]
    trained = {
        kind: made(transformer(dim, LAYERS, HEADS), dist.new_group(backend=backend))
        for kind, backend in KINDS.items()
    }
    passes = {name: getattr(PipelineStage, method) for name, method in PASSES.items()}

    def step(kind: str, tokens: torch.Tensor) -> None:
        dist.barrier()
        timed(lambda: (timed(trained[kind], own, tokens), dist.barrier()), times[kind])

    for number in range(steps + 1):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (BATCH, length), generator=generator)
        for kind in KINDS:
            own: list[float] = []
            if kind != "free" or number == 0:
                step(kind, tokens)
                continue
            taken: Times = {name: [] for name in PASSES}
            with without_messages():
                for name, call in passes.items():
                    setattr(PipelineStage, PASSES[name], timing(call, taken[name]))
                step(kind, tokens)
                for name, call in passes.items():
                    setattr(PipelineStage, PASSES[name], call)
            times["own"] += own
            for name, each in taken.items():
                times[name].append(sum(each))
    dist.destroy_process_group()
    # without the first step, which warms up
    found = {name: taken[1:] if name in KINDS else taken for name, taken in times.items()}
    ratio = median(gloo / ours for gloo, ours in zip(found["gloo"], found["weft"], strict=True))
    return {name: 1e3 * median(taken) for name, taken in found.items()} | {"ratio": ratio}


def timing(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The method whose calls are timed."""
    return lambda self, *args, **options: timed(partial(call, self), times, *args, **options)


def limit(stages: int, first: dict[str, float], second: dict[str, float]) -> float:
    """The least milliseconds of a step of two ranks of so many stages with these times."""
    both = [rank["forward"] + rank["backward"] for rank in (first, second)]
    besides = first["own"] - both[0]
    return besides + both[0] / (PIECES * stages) + both[1]


def main(steps: int = 40, dim: int = 256, length: int = 8) -> None:
    for schedule, (_, stages) in SCHEDULES.items():
        first, second = weft.launch(measure, 2, schedule, steps, dim, length, threads=1)
        print(f"{schedule}, {dim} wide, {length} tokens")
        for kind in KINDS:
            ratio = f"  {first['ratio']:.2f}x" if kind == "weft" else ""
            print(f"  {kind:6s} {first[kind]:6.1f} ms{ratio}")
        least = limit(stages, first, second)
        gain = first["gloo"] / least
        print(f"  limit  {least:6.1f} ms  {gain:.2f}x: without the time of messages")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
