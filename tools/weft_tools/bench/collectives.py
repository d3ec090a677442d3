"""Records of the collectives for benchmarks, and the data with which they are verified.

Data are random integers, so small that sums over all ranks are exact in every dtype: every element
of every result must equal the expected one, on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft
from weft.plan.launch import Launch
from weft.world import World
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.bench.verification import RUNS

Reduction = Callable[[Sequence[Tensor]], Tensor]


class Collective(NamedTuple):
    """A collective.

    Attributes:
        places: (False,) if it is measured out of place, (True,) in place, (False, True) both.
        expected: a rank's result from the inputs of all ranks, or from the rank's parts of them if
            inputs are `cut`.
        outputs: the number of elements of a rank's result, from that of its input and the ranks.
        bus_factor: bus bandwidth divided by algorithm bandwidth, from the number of ranks.
        cut: whether inputs have one part for each rank.
        reduces: whether it takes a reduction.
        from_rank: whether it sends the rows of one rank, its second argument.
    """

    places: tuple[bool, ...]
    expected: Callable[[Sequence[Tensor], Reduction], Tensor]
    outputs: Callable[[int, int], int]
    bus_factor: Callable[[int], float]
    cut: bool = False
    reduces: bool = False
    from_rank: bool = False


def _gathered(sources: Sequence[Tensor], _: Reduction) -> Tensor:
    return torch.cat([*sources])


def _reduced(sources: Sequence[Tensor], reduction: Reduction) -> Tensor:
    return reduction(sources)


def _same(count: int, ranks: int) -> int:
    return count


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES = {
    "all_gather": Collective((False, True), _gathered, lambda count, ranks: count * ranks, _others),
    "reduce_scatter": Collective(
        (False, True),
        _reduced,
        lambda count, ranks: count // ranks,
        _others,
        cut=True,
        reduces=True,
    ),
    "all_reduce": Collective(
        (False, True), _reduced, _same, lambda ranks: 2 * _others(ranks), reduces=True
    ),
    "broadcast": Collective(
        (True,), lambda sources, _: sources[0], _same, lambda ranks: 1.0, from_rank=True
    ),
    "all_to_all": Collective((False,), _gathered, _same, _others, cut=True),
}

_DIGITS = {
    "float16": 11,
    "bfloat16": 8,
    "float32": 24,
    "float64": 53,
    "int8": 7,
    "int32": 31,
    "int64": 63,
}
"""Bits of the integers that a dtype represents exactly."""


class Data:
    """The inputs of all ranks, and the expected result on this one.

    The inputs of run 0, 1, … are a window onto a longer stream that moves by one element, so that
    new elements are compared in every run.
    """

    def __init__(self, world: World, settings: SweepSettings, count: int) -> None:
        self.rank, self.collective, self.op = (
            world.rank,
            COLLECTIVES[settings.operation],
            settings.op,
        )
        self.dtype = getattr(torch, settings.dtype)
        limit = limit_of(settings.dtype, world.ranks)
        self.streams = [
            torch.randint(
                -limit,
                limit + 1,
                (count + RUNS,),
                generator=torch.Generator().manual_seed(settings.seed * world.ranks + rank),
                device="cpu",
            ).to(world.device, self.dtype)
            for rank in range(world.ranks)
        ]

    def own(self, run: int, count: int) -> Tensor:
        """This rank's input of `count` elements in this run."""
        return self.streams[self.rank][run : run + count]

    def expected(self, run: int, count: int) -> Tensor:
        """This rank's result from inputs of `count` elements in this run."""
        sources = [stream[run : run + count] for stream in self.streams]
        if self.collective.cut:
            sources = [source.chunk(len(sources))[self.rank] for source in sources]
        return self.collective.expected(sources, self._reduce)

    def _reduce(self, sources: Sequence[Tensor]) -> Tensor:
        combine = {"max": torch.maximum, "min": torch.minimum}.get(self.op, torch.add)
        reduced = functools.reduce(combine, sources)
        if self.op == "avg":
            reduced = reduced.to(torch.promote_types(self.dtype, torch.float32)) / len(sources)
        return reduced.to(self.dtype)


def weft_collective(
    settings: SweepSettings, a: Tensor, out: Tensor, world: World, launch: Launch | None = None
) -> Callable[[], object]:
    """The call of weft on these tensors, by a kernel if there is a `launch`; one rank's rows are
    those of rank 0.
    """
    call, collective = getattr(weft, settings.operation), COLLECTIVES[settings.operation]
    if collective.from_rank:
        return functools.partial(call, out, 0, world=world)
    options: dict[str, Any] = {"op": settings.op} if collective.reduces else {}
    if launch is not None:
        options |= {"algorithm": "kernel", "launch": launch}
    elif settings.algorithm != "auto":
        options["algorithm"] = settings.algorithm
    return functools.partial(call, a, out=out, world=world, **options)


def bandwidths(
    operation: str, size_bytes: int, ranks: int, microseconds: float
) -> tuple[float, float]:
    """``(algbw, busbw)`` in GB/s of 1e9 bytes, as defined by nccl-tests (``doc/PERFORMANCE.md``
    there): bytes of the larger of input and result by seconds, and that times the `bus_factor`.

    `size_bytes` is the size of each rank's input.
    """
    collective = COLLECTIVES[operation]
    size = max(size_bytes, collective.outputs(size_bytes, ranks))
    algbw = size / (microseconds * 1e-6) / 1e9
    return algbw, algbw * collective.bus_factor(ranks)


def limit_of(dtype: str, ranks: int) -> int:
    """The largest integer that can be added `ranks` times exactly in `dtype`."""
    return int(2 ** _DIGITS[dtype] - 1) // ranks


def count_of(size: int, settings: SweepSettings, ranks: int) -> int:
    """The number of elements of each rank's input for a size in bytes, rounded up to a multiple of
    the number of ranks if inputs are cut.
    """
    parts = ranks if COLLECTIVES[settings.operation].cut else 1
    step: int = getattr(torch, settings.dtype).itemsize * parts
    return -(-size // step) * parts
