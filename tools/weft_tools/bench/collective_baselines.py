"""The baselines of collectives: torch's libraries and its symmetric memory, MPI in processes of its
own, and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from weft import trust
from weft.measure.timing import largest
from weft.world import World
from weft_tools.bench import deepspeed, nccl
from weft_tools.bench.baselines import collective, group_of, symmetric_gather
from weft_tools.bench.collectives import COLLECTIVES, limit_of
from weft_tools.bench.contenders import PLAIN, WEFT, Baseline, Bench, Contender, Local, total
from weft_tools.bench.mpi import MPIS, MpiRanks, environment
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.bench.systems import LIBRARIES
from weft_tools.bench.verification import Check


def rejection(name: str, settings: SweepSettings) -> str | None:
    """The reason why this baseline cannot be measured with these settings here, or None."""
    if settings.op == "avg":
        return f"{name} has no averages: use --baseline none"
    if name == "torch" and settings.operation != "all_gather":
        return "torch's symmetric memory is compared in all-gather: use nccl"
    if name in (*LIBRARIES, "torch"):
        return None
    if name == deepspeed.NAME:
        sums = settings.operation == "all_reduce" and settings.op == "sum"
        if not sums or settings.dtype not in deepspeed.DTYPES:
            only = f"{name} only sums, by an all-reduce, and of {', '.join(deepspeed.DTYPES)}"
            return f"{only}: use --baseline gloo"
        return deepspeed.missing()
    reduces = COLLECTIVES[settings.operation].reduces
    if name in MPIS and reduces and settings.dtype in ("float16", "bfloat16"):
        dtype = f"{name} does not reduce {settings.dtype} tensors"
        return f"{dtype}: use --baseline gloo, or another --dtype"
    if not (environment(name) / "bin" / "mpiexec").exists():
        place = f"there is no {environment(name)} here"
        return f"{place}: run `make baselines` and start in its directory"
    if why := trust.rejection(environment(name)):
        return f"{name} is not started, since {why}"
    return None


@contextmanager
def opened(name: str, world: World) -> Iterator[Baseline]:
    """The baseline of this name, connected to all ranks of `world`; collective."""
    if name in LIBRARIES:
        yield Library(name)
    elif name == "torch":
        yield Symmetric()
    elif name == deepspeed.NAME:
        deepspeed.connect()
        yield DeepSpeed()
    elif world.rank == 0:
        with closing(MpiRanks(name, world.cores)) as ranks:
            yield Mpi(name, ranks)
    else:
        yield Mpi(name, None)


class Library:
    """A baseline of torch.distributed, ``gloo`` or ``nccl``, in the same processes and on the plain
    tensors.
    """

    version: str | None = None

    def __init__(self, name: str) -> None:
        self.name, self.group = name, group_of(name)

    def prepare(self, bench: Bench, count: int) -> None:
        """Do nothing, since the library uses the tensors of the benchmark."""

    def contender(self, bench: Bench, in_place: bool, count: int) -> Contender:
        tensors = bench.tensors(PLAIN, in_place, count)
        operation, op = bench.settings.operation, bench.settings.op
        call = collective(operation, *tensors, op, self.group)
        if self.name != "nccl":
            return Local(self.name, in_place, call, tensors, bench)
        about = {"channels": nccl.channels()}
        return Local(nccl.named(self.name), in_place, call, tensors, bench, about)


class Symmetric:
    """The baseline ``torch``: its all-gather of symmetric memory by copy engines, which returns a
    new tensor.
    """

    version: str | None = None

    def prepare(self, bench: Bench, count: int) -> None:
        """Do nothing, since it uses the tensors of the benchmark."""

    def contender(self, bench: Bench, in_place: bool, count: int) -> Contender | None:
        if in_place:
            return None
        tensors = bench.tensors(WEFT, in_place, count)
        return Local("torch", in_place, symmetric_gather(tensors[0], bench.world), tensors, bench)


class DeepSpeed:
    """DeepSpeed's operator, in the same processes; it only works in place."""

    version: str | None = None

    def prepare(self, bench: Bench, count: int) -> None:
        """Nothing to do: the operator uses the tensors of the benchmark."""

    def contender(self, bench: Bench, in_place: bool, count: int) -> Contender | None:
        if not in_place:
            return None
        tensors = bench.tensors(PLAIN, True, count)
        return Local(deepspeed.NAME, True, deepspeed.all_reduce(tensors[1]), tensors, bench)


class Mpi:
    """An MPI: its ranks, known to rank 0 of weft alone."""

    def __init__(self, name: str, ranks: MpiRanks | None) -> None:
        self.name = name
        self.ranks = ranks
        self.version = ranks.version if ranks else None

    def prepare(self, bench: Bench, count: int) -> None:
        if self.ranks:
            settings = bench.settings
            limit = limit_of(settings.dtype, bench.world.ranks)
            numbers = count, _numpy_dtype(settings), limit, settings.op, settings.seed
            self.ranks.ask("case", settings.operation, *numbers)

    def contender(self, bench: Bench, in_place: bool, count: int) -> Contender:
        return MpiCalls(self.name, in_place, self.ranks, bench.world)


class MpiCalls:
    """Calls of an MPI, which rank 0 requests while the other ranks sleep in a collective of
    gloo.
    """

    about: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, name: str, in_place: bool, ranks: MpiRanks | None, world: World) -> None:
        self.implementation = name
        self.in_place = in_place
        self.ranks = ranks
        self.world = world

    def verify(self, run: int) -> Check:
        wrong = sum(self.ranks.ask("verify", self.in_place, run)) if self.ranks else 0
        return total(wrong)

    def time(self, calls: int, batches: int = 1) -> list[float]:
        """Seconds of MPI's slowest rank for each batch."""
        dist.barrier()
        every = self.ranks.ask("time", self.in_place, calls, batches) if self.ranks else []
        slowest = [max(own) for own in zip(*every, strict=True)]
        return largest(self.world, slowest or [0.0] * batches)


def _numpy_dtype(settings: SweepSettings) -> str:
    """The dtype for MPI's ranks: without sums, integers of the same width suffice."""
    itemsize: int = getattr(torch, settings.dtype).itemsize
    return settings.dtype if itemsize > 2 or settings.dtype == "int8" else f"int{8 * itemsize}"
