"""The profile of this machine, measured: what `weft calibrate` stores and `weft.machine.load("this")` reads.

All ranks measure at the same time, since that is how they will work. Of each figure the least of several runs counts, the one that
was disturbed least; `spread` says by how many percent the median was above it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft import cache, matmul
from weft.engines import engine
from weft.machine import ITEMSIZE, Link, Machine, Product
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.plan import Buffer, Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Signal, Wait, writes
from weft.schedules.barrier import barrier
from weft.schedules.common import after, before, enter, leave
from weft.trace import record
from weft.world import World, init

_PRODUCTS = [(1, 256, 256), (1, 1024, 1024), (8, 512, 1024), (32, 1024, 512), (64, 1024, 1024), (256, 512, 512), (512, 1024, 768)]
"""Rows, K and N at which products are timed: few rows tell what reading the weight takes, many the rate."""
_RUNS = 7
_ROUNDS = 64
_COLUMNS = 1024  # of float32, so rows of 4 KiB
_SMALL, _LARGE = 32, 1024  # rows that are copied and added


class _Bench:
    """Times on all ranks of a world, and their spread."""

    def __init__(self, world: World) -> None:
        self.world, self.spread = world, dict[str, float]()
        self.barrier = barrier(world.ranks)

    def time(self, what: str, call: Callable[[], object]) -> float:
        """The seconds of a call that all ranks make at once: the least of some runs, each as long as on the slowest rank."""
        call()
        times = []
        for _ in range(_RUNS):
            engine(self.world).execute(self.barrier, {})
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        slowest = torch.tensor(times, dtype=torch.float64)
        if self.world.ranks > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.spread[what] = 100 * (statistics.median(slowest.tolist()) / slowest.min().item() - 1)
        return slowest.min().item()


def measure(threads: int) -> dict[str, Any]:
    """The profile of the machine as seen from this rank's world, alike on all ranks; collective. Takes some seconds."""
    torch.set_num_threads(threads)
    with init(timeout=120) as world, torch.no_grad():
        bench = _Bench(world)
        products = {}
        for name, itemsize in ITEMSIZE.items():
            for packed in (False, True):
                key = f"{name} packed" if packed else name
                products[key] = _product(bench, key, getattr(torch, name), packed, itemsize)
        signal = _signal(bench)
        local, remote, added = (_slope(bench, name) for name in ("memory_gbs", "links", "reduce_gbs"))
        compute_slowdown, communicate_slowdown = _interference(bench)
        machine = Machine(
            "this",
            products,
            (Link(remote),),
            memory_gbs=local,
            reduce_gbs=added,
            notify_us=1e6 * signal,
            compute_slowdown=compute_slowdown,
            communicate_slowdown=communicate_slowdown,
            in_place=True,
            source=_where(world, threads),
        )
        machine = replace(machine, launch_us=1e6 * max(0.0, _call(bench) - machine.product(2, 64, 64, "float32", True) - signal))
        return asdict(machine) | {"spread": {name: round(percent, 1) for name, percent in bench.spread.items()}}


def store(profile: dict[str, Any]) -> None:
    """Remember a profile as that of this machine."""
    cache.store("machine", profile)


def _product(bench: _Bench, name: str, dtype: torch.dtype, packed: bool, itemsize: int) -> Product:
    """The product of a dtype, fitted to times at several sizes with equal relative errors."""
    rows = []
    for m, k, n in _PRODUCTS:
        b = torch.randn(k, n).to(dtype)
        weight, x, out = matmul.pack(b) if packed else b, torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
        took = bench.time(f"{name} {m}x{k}x{n}", lambda x=x, weight=weight, out=out: matmul.multiply(x, weight, out))  # type: ignore[misc]
        rows.append([1 / took, k * n * itemsize / took, 2 * m * k * n / took])
    fixed, weight_seconds, flop_seconds = least_squares(rows)
    return Product(1e-12 / flop_seconds, 1e-9 / max(weight_seconds, 1e-15), 1e6 * fixed)


def least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The factors, none negative, with which the columns of `rows` come closest to adding up to 1; the last is not zero."""
    matrix = np.asarray(rows)
    best, least = [0.0] * matrix.shape[1], math.inf
    for used in itertools.product((False, True), repeat=matrix.shape[1] - 1):
        columns = [i for i, use in enumerate((*used, True)) if use]
        factors = np.linalg.lstsq(matrix[:, columns], np.ones(len(matrix)), rcond=None)[0]
        error = float(np.sum((matrix[:, columns] @ factors - 1) ** 2))
        if min(factors) > 0 and error < least:
            best, least = [0.0] * matrix.shape[1], error
            for column, factor in zip(columns, factors, strict=True):
                best[column] = float(factor)
    return best


def _signal(bench: _Bench) -> float:
    """Seconds from a notify until the peer's wait is over, from the difference between many rounds of a barrier and one."""
    world, times = bench.world, []
    for rounds in (1, _ROUNDS):
        lanes = []
        for r in range(world.ranks):
            lane: list[Instruction] = []
            for count in range(1, rounds + 1):
                lane += [Notify(peer, Signal("barrier", r)) for peer in before(r, world.ranks)]
                lane += [Wait(Signal("barrier", peer), count) for peer in after(r, world.ranks)]
            lanes.append({"compute": tuple(lane)})
        plan = Plan("calibrate", "barriers", {}, tuple(lanes))
        times.append(bench.time(f"notify_us {rounds} rounds", lambda plan=plan: engine(world).execute(plan, {})))  # type: ignore[misc]
    return max(0.0, times[1] - times[0]) / (_ROUNDS - 1)


def _slope(bench: _Bench, what: str) -> float:
    """GB/s of local copies, copies to a peer, or sums, from the difference between many rows and few."""
    world = bench.world
    tensors = {"a": torch.ones(_LARGE, _COLUMNS), "out": torch.ones(_LARGE, _COLUMNS)}
    times = []
    for rows in (_SMALL, _LARGE):
        lanes = []
        for r in range(world.ranks):
            own, place = Region(r, "a", 0, rows), Region(r, "inbox", 0, rows)
            work: Instruction = Copy(own, place)
            if what == "links":
                work = Copy(own, place._replace(rank=(r + 1) % world.ranks))
            elif what == "reduce_gbs":
                work = Reduce((own, place._replace(rank=(r + 1) % world.ranks)), own._replace(buffer="out"))
            lanes.append({"compute": (*enter(r, world.ranks), work, *leave(r, world.ranks))})
        plan = _plan(lanes)
        times.append(bench.time(f"{what} {rows} rows", lambda plan=plan: engine(world).execute(plan, tensors)))  # type: ignore[misc]
    size = (_LARGE - _SMALL) * _COLUMNS * 4 * (2 if what == "reduce_gbs" else 1)
    return size / max(times[1] - times[0], 1e-9) / 1e9


def _interference(bench: _Bench) -> tuple[float, float]:
    """How many times slower a product is beside copies to a peer, and these beside the product."""
    world, rows = bench.world, 256
    tensors = {"a": torch.ones(_LARGE, _COLUMNS), "out": torch.ones(_LARGE, 512)}
    weight = {"out": matmul.pack(torch.ones(_COLUMNS, 512))}
    found: list[list[float]] = []
    for multiplies, copies in ((True, False), (False, True), (True, True)):
        lanes: list[dict[str, tuple[Instruction, ...]]] = []
        for r in range(world.ranks):
            own = Region(r, "a", 0, rows)
            there = own._replace(rank=(r + 1) % world.ranks, buffer="inbox")
            product = (Matmul(own, own._replace(buffer="out")),) if multiplies else ()
            moved: tuple[Instruction, ...] = (*enter(r, world.ranks), *[Copy(own, there)] * 16) if copies else ()
            lanes.append({"compute": (*product, *leave(r, world.ranks)), "comm": moved})
        plan, spans = _plan(lanes), []
        for _ in range(_RUNS):
            engine(world).execute(bench.barrier, {})
            with record(world) as recording:
                engine(world).execute(plan, tensors, weight)
            of_plan = recording.executions[0][1]
            spans.append([*_extent(of_plan, "compute", plan, world.rank), *_extent(of_plan, "comm", plan, world.rank)])
        spans.sort(key=lambda extents: extents[1] - extents[0] + extents[3] - extents[2])
        found.append(spans[len(spans) // 2])  # the least would be one in which they hardly met
    product_alone, copies_alone, both = found
    slowdowns = torch.tensor(slowed(product_alone[1] - product_alone[0], copies_alone[3] - copies_alone[2], *both))
    if world.ranks > 1:
        dist.all_reduce(slowdowns, dist.ReduceOp.MAX)
    return slowdowns[0].item(), slowdowns[1].item()


def slowed(one: float, other: float, start: float, stop: float, begun: float, over: float) -> list[float]:
    """By what two things are slowed that take `one` and `other` alone and run from `start` to `stop` and `begun` to `over`.

    All in nanoseconds. While both ran, each did what it did not do alone before or after. Two that share a core take twice as
    long; more than four times is taken to be a disturbance.
    """
    together = max(0.0, min(stop, over) - max(start, begun))
    alone = (stop - start - together, over - begun - together)
    return [max(1.0, together / max(together / 4, work - rest, 1.0)) for work, rest in zip((one, other), alone, strict=True)]


def _extent(spans: list[tuple[str, int, int, int]], lane: str, plan: Plan, rank: int) -> tuple[float, float]:
    """When a lane's products or copies began and ended."""
    found = [(start, stop) for name, i, start, stop in spans if name == lane and writes(plan.lanes[rank][lane][i])]
    return min((start for start, _ in found), default=0), max((stop for _, stop in found), default=0)


def _call(bench: _Bench) -> float:
    """Seconds of a call of an operator that has hardly anything to do."""
    a, weight, out = torch.ones(1, 64), matmul.pack(torch.ones(64, 64)), torch.empty(bench.world.ranks, 64)
    return bench.time("launch_us", lambda: all_gather_matmul(a, weight, out=out, algorithm="sequential", world=bench.world))


def _plan(lanes: Sequence[dict[str, tuple[Instruction, ...]]]) -> Plan:
    rows = (_LARGE,) * len(lanes)
    buffers = {"a": Buffer("input", rows), "inbox": Buffer("workspace", rows), "out": Buffer("output", rows)}
    return Plan("calibrate", "copies", buffers, tuple(lanes))


def _where(world: World, threads: int) -> str:
    processor = matmul.processor()
    return f"measured by weft calibrate: {world.ranks} ranks of {threads} threads, processor {processor}, torch {torch.__version__}"
