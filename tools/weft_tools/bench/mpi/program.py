"""One rank of an MPI baseline. Run by another environment's Python under its ``mpiexec``; needs
numpy and mpi4py alone.

It sleeps in a read from a socket between commands, so it takes no time from other measurements.
Commands are a name and arguments: ``case`` makes the tensors of an operation, ``verify`` runs it
once on new data and answers the number of wrong elements on this rank, ``time`` answers the seconds
of batches of calls on this rank.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from mpi4py import MPI

Array = np.ndarray[Any, np.dtype[Any]]

WORLD = MPI.COMM_WORLD
OPS = {"sum": (MPI.SUM, np.add), "max": (MPI.MAX, np.maximum), "min": (MPI.MIN, np.minimum)}
RUNS = 32


class Collective:
    """An operation on `count` elements of each rank, with the same data, poison and check as
    `weft_tools.bench.collectives`.
    """

    def __init__(
        self, operation: str, count: int, dtype: str, limit: int, op: str, seed: int
    ) -> None:
        self.operation = operation
        self.count = count
        self.op = op
        self.dtype = np.dtype(dtype)
        self.poison = np.nan if self.dtype.kind == "f" else np.iinfo(self.dtype).min
        self.streams = [
            np.random.default_rng([seed, rank])
            .integers(-limit, limit + 1, count + RUNS)
            .astype(self.dtype)
            for rank in range(WORLD.size)
        ]
        self.tensors = {in_place: self._tensors(in_place) for in_place in (False, True)}

    def call(self, in_place: bool) -> Callable[[], object]:
        """The MPI call on this case's tensors."""
        a, out = self.tensors[in_place]
        sent = MPI.IN_PLACE if in_place else a
        match self.operation:
            case "all_gather":
                return functools.partial(WORLD.Allgather, sent, out)
            case "reduce_scatter":
                return functools.partial(
                    WORLD.Reduce_scatter_block, sent, a if in_place else out, op=OPS[self.op][0]
                )
            case "all_reduce":
                return functools.partial(WORLD.Allreduce, sent, out, op=OPS[self.op][0])
            case "broadcast":
                return functools.partial(WORLD.Bcast, out, 0)
            case "round_trip":
                return functools.partial(_round_trip, a, out)
            case _:
                return functools.partial(WORLD.Alltoall, sent, out)

    def verify(self, in_place: bool, run: int) -> int:
        """Run once on the data of `run` into a poisoned output; the number of wrong elements."""
        a, out = self.tensors[in_place]
        out.fill(self.poison)
        a[:] = self.streams[WORLD.rank][run : run + self.count]
        self.call(in_place)()
        if in_place and self.operation == "reduce_scatter":
            out = a[: len(out)]  # MPI puts the result in place here
        return int((out != self._expected(run)).sum())

    def time(self, in_place: bool, calls: int, batches: int) -> list[float]:
        """Seconds of `calls` calls on this rank, from a barrier on, for each of `batches` batches,
        after one call that is not timed.
        """
        call = self.call(in_place)
        seconds = []
        call()
        for _ in range(batches):
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in itertools.repeat(None, calls):
                call()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _tensors(self, in_place: bool) -> tuple[Array, Array]:
        """The input and the output; in place the smaller is a part of the larger."""
        sizes = {"all_gather": self.count * WORLD.size, "reduce_scatter": self.count // WORLD.size}
        a = np.zeros(self.count, self.dtype)
        out = np.zeros(sizes.get(self.operation, self.count), self.dtype)
        if in_place and len(out) > len(a):
            a = _own(out)
        elif in_place:
            out = a if len(out) == len(a) else _own(a)
        return a, out

    def _expected(self, run: int) -> Array:
        sources = [stream[run : run + self.count] for stream in self.streams]
        if self.operation == "broadcast":
            return sources[0]
        # each rank gets a part of every input
        if self.operation in (
            "reduce_scatter",
            "all_to_all",
        ):
            sources = [_own(source) for source in sources]
        if self.operation in ("all_gather", "all_to_all"):
            return np.concatenate(sources)
        return functools.reduce(OPS[self.op][1], sources)


def _round_trip(a: Array, out: Array) -> None:
    """A message to rank 1, which sends it back."""
    if WORLD.rank:
        WORLD.Recv(a, 0)
        WORLD.Send(a, 0)
    else:
        WORLD.Send(a, 1)
        WORLD.Recv(out, 1)


def _own(whole: Array) -> Array:
    """This rank's part."""
    part: Array = np.split(whole, WORLD.size)[WORLD.rank]
    return part


def main() -> None:
    """Serve the commands that arrive over a socket, until it closes.

    The script's arguments are the socket's path and, as JSON, the cores of every rank.
    """
    gc.disable()
    os.sched_setaffinity(0, json.loads(sys.argv[2])[WORLD.rank])
    requests = Client(sys.argv[1])
    requests.send(" ".join(MPI.Get_library_version().partition("\n")[0].partition(",")[0].split()))
    case: Collective | None = None
    with suppress(EOFError):
        while True:
            name, arguments = requests.recv()
            if name == "case":
                case = None  # frees the memory of the last case first
                case = Collective(*arguments)
            requests.send(None if name == "case" else getattr(case, name)(*arguments))


main()
