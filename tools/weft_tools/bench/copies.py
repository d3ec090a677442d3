"""One-sided copies as a benchmark measures them: the buffers of a rank, the contenders on a CPU,
and the verification and the race of contenders of any device.

Rank 0 copies to and from the last rank, which sleeps meanwhile; the implementations alternate in
one process. Each round begins with a copy that is not timed, then times single copies until they
are complete (latency, and the cycles of the whole transfer), then a window of copies back to back
(bandwidth, and the cycles of the calling thread). An asynchronous copy costs its caller only the
submission. A staged get fetches one tile after the other into a small buffer, which stays in the
core's cache, and copies it on from there, as a processor does that reaches memory only through a
its own buffer; it is one native call.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import weft._native as _native
from weft.cli.values import parse_sizes
from weft.measure.timing import largest, per_call, race
from weft.ops.barrier import barrier
from weft.ops.onesided import Transfer, get, get_async, put, put_async
from weft.world import World
from weft_tools.bench import sweep
from weft_tools.bench.harness import batches, verified, worst
from weft_tools.bench.settings.copies import CopySettings
from weft_tools.bench.ticks import HostTicks
from weft_tools.bench.verification import RUNS, Check

MEMCPY, COPY_ = "memcpy", "torch.copy_"
WEFT, ASYNC, STAGED = "weft", "weft (async)", "weft (staged)"


Call = Callable[..., object]
"""A copy of its second argument to its first; a put or get takes the peer as the third."""


class Copier(NamedTuple):
    """An implementation of a copy from `source`, on rank `giver`, to `target`, on rank `owner`;
    `comm_sms` are the SMs on which a kernel makes it.
    """

    operation: str
    implementation: str
    call: Callable[[], object]
    source: Tensor
    target: Tensor
    giver: int
    owner: int
    comm_sms: int | None = None


class Samples(NamedTuple):
    """Seconds and cycles of single copies until they are complete; seconds, and the caller's
    cycles, per copy in windows.
    """

    singles: list[float]
    transfers: list[float]
    windows: list[float]
    callers: list[float]


class Ticks(Protocol):
    """The counter of cycles by which copies are measured."""

    def counter(self) -> dict[str, Any]:
        """The counter's `name` and its frequency, `mhz`."""

    def spent(self, work: Callable[[], object]) -> int:
        """The ticks that `work` costs its caller."""


class Copies:
    """The buffers of one rank, shared by all sizes: random elements, a source and a target."""

    def __init__(self, settings: CopySettings, world: World) -> None:
        self.settings = settings
        self.world = world
        self.peer = world.ranks - 1
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.count = max(parse_sizes(settings.sizes)) // self.dtype.itemsize
        # all bits are random: floats are NaN and infinity, too
        size = (self.count + RUNS) * self.dtype.itemsize
        generator = torch.Generator()
        generator.manual_seed(settings.seed)
        bits = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        self.stream = bits.view(self.dtype).to(world.device)
        # allocates the pages before anything is timed
        self.shared = world.empty(self.count, dtype=self.dtype).zero_()
        self.source, self.target = self.zeros(self.count), self.zeros(self.count)
        self.ticks: Ticks = HostTicks()

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.world.device)

    def contenders(self, size: int) -> list[Copier]:
        """All implementations, for copies of `size` bytes."""
        raise NotImplementedError

    def part(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first `size` bytes of the symmetric tensor, of the source and of the target."""
        count = size // self.dtype.itemsize
        return self.shared[:count], self.source[:count], self.target[:count]

    def put(
        self, name: str, call: Callable[..., object], size: int, sms: int | None = None
    ) -> Copier:
        shared, source, _ = self.part(size)
        made = partial(call, shared, source, self.peer)
        return Copier("put", name, made, source, shared, 0, self.peer, sms)

    def get(
        self, name: str, call: Callable[..., object], size: int, sms: int | None = None
    ) -> Copier:
        shared, _, target = self.part(size)
        made = partial(call, target, shared, self.peer)
        return Copier("get", name, made, shared, target, self.peer, 0, sms)

    def local(self, name: str, call: Call, size: int) -> Copier:
        _, source, target = self.part(size)
        return Copier("local", name, partial(call, target, source), source, target, 0, 0)

    def verify(self, contender: Copier, run: int) -> Check:
        """Copy the elements of `run` to a target that holds their complement; the number of wrong
        elements, bit by bit, on the target's owner. Collective.
        """
        expected = self.stream[run : run + len(contender.source)]
        rank = self.world.rank
        if rank == contender.giver:
            contender.source.copy_(expected)
        if rank == contender.owner:
            _bits(contender.target).copy_(~_bits(expected))
        barrier(self.world)
        if rank == 0:
            complete(contender.call())
        barrier(self.world)
        wrong = 0
        if rank == contender.owner:
            wrong = int((_bits(contender.target) != _bits(expected)).sum())
        return worst(self.world, Check(wrong))

    def rows(self, size: int, advance: Callable[[], None]) -> list[dict[str, Any]]:
        """Verify, measure and verify again all implementations at one size; complete on rank 0."""
        contenders = self.contenders(size)
        samples, checks = verified(contenders, self.verify, lambda: self._race(contenders, advance))
        return (
            [_row(size, *found) for found in zip(contenders, samples, checks, strict=True)]
            if samples
            else []
        )

    def _race(self, contenders: Sequence[Copier], advance: Callable[[], None]) -> list[Samples]:
        """Run all implementations alternately, while the other ranks wait."""
        found = list[Samples]()
        rounds = self.settings.iterations
        if self.world.rank == 0:
            sizes = [batches(max(self.round(each, 1).windows), per_round=2) for each in contenders]
            calls = [
                partial(self.round, one, min(100, copies))
                for one, (copies, _) in zip(contenders, sizes, strict=True)
            ]
            samples = race(
                calls,
                [min(rounds, most) for _, most in sizes],
                self.settings.warmup,
                rounds,
                advance,
            )
            found = [
                Samples(*(list(chain.from_iterable(lists)) for lists in zip(*own, strict=True)))
                for own in samples
            ]
        largest(self.world, [0.0])  # on the host: nothing waits on a device meanwhile
        return found

    def round(self, contender: Copier, copies: int) -> Samples:
        """One round: a copy that is not timed, `copies` single ones, and as many (at least two)
        back to back.
        """
        call = contender.call
        window = max(2, copies)
        cycles = _native.cycles
        singles, transfers = list[float](), list[float]()
        complete(call())
        for _ in range(copies):
            start, ticks = perf_counter(), cycles()
            complete(call())
            ticks = cycles() - ticks
            singles.append(perf_counter() - start)
            transfers.append(ticks)
        last = None
        start = perf_counter()
        ticks = cycles()
        for _ in range(window):
            last = call()
        ticks = cycles() - ticks
        complete(last)
        return Samples(singles, transfers, [(perf_counter() - start) / window], [ticks / window])


class HostCopies(Copies):
    """Copies by the cores of a CPU."""

    def __init__(self, settings: CopySettings, world: World) -> None:
        super().__init__(settings, world)
        self.tile = self.zeros(settings.tile_size // self.dtype.itemsize)

    def contenders(self, size: int) -> list[Copier]:
        hosts = self.world.hosts
        # rows of another host come in messages: there is no memory from which to get a tile
        near = hosts[self.peer] == hosts[0]
        staged = [self.get(STAGED, get, size)._replace(call=self._staged(size))] if near else []
        return [
            self.put(WEFT, put, size),
            self.put(ASYNC, put_async, size),
            self.get(WEFT, get, size),
            self.get(ASYNC, get_async, size),
            *staged,
            self.local(MEMCPY, lambda *_: None, size)._replace(call=self._memmove(size)),
            self.local(COPY_, Tensor.copy_, size),
        ]

    def _memmove(self, size: int) -> Callable[[], object]:
        _, source, target = self.part(size)
        return partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)

    def _staged(self, size: int) -> Callable[[], object]:
        """A staged get, of all tiles in one call."""
        shared, _, target = self.part(size)
        return lambda: _native.copy_at_once(False, shared, target, self.peer, self.tile)


def complete(handle: object) -> None:
    """Wait for a copy, if the result of its call is the handle of an asynchronous one."""
    if isinstance(handle, Transfer):
        handle.wait()


def _bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as integers of their size, which compare bit by bit."""
    return tensor.view(_INTEGERS[tensor.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _row(size: int, contender: Copier, samples: Samples, check: Check) -> dict[str, Any]:
    speed = size / statistics.median(samples.windows) / 1e9
    return sweep.row(
        {
            "size_bytes": size,
            "operation": contender.operation,
            "implementation": contender.implementation,
            "comm_sms": contender.comm_sms,
        },
        per_call(samples.singles),
        speed,
        speed,
        transfer_cycles=statistics.median(samples.transfers) or None,
        cycles=statistics.median(samples.callers) or None,
        wrong=check.wrong,
        copies=len(samples.singles),
        windows=len(samples.windows),
    )
