"""Measurement of this machine's profile, which `weft calibrate` stores and
`weft_tools.predict.machine.load("this")` reads.

All ranks measure at the same time, as they work later. The speed of cores varies over time, above
all in virtual machines, so everything is timed in several passes, some seconds apart. The result is
the lower quartile, since other load only ever makes a run slower; `spread` is the percentage by
which the median run took longer.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import weft.cache as cache
from weft.engines import engine
from weft.engines.recording import record
from weft.errors import WeftError
from weft.kernels.matmul import matmul as matmul_of
from weft.kernels.packed import pack
from weft.kernels.products import multiply
from weft.kernels.weights import Weight
from weft.measure.progress import progress
from weft.measure.timing import Stopwatch, largest, session
from weft.plan import (
    Buffer,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Wait,
    writes,
)
from weft.schedules.lanes import enter, leave, notify_all, wait_all
from weft.schedules.peers import after, before, members
from weft.world import World
from weft_tools.predict.interpolation import RateGrid
from weft_tools.predict.machine import LinkRate, Machine, ProductRate
from weft_tools.predict.rates import ITEMSIZE

_ROWS = (1, 2, 4, 7, 8, 16, 32, 63, 64, 128, 256, 512)
"""Numbers of rows of timed products, among them the limits at which `weft.kernels.products` changes
to another kernel.
"""
_WIDTHS = (256, 448, 800, 1408, 2048)
"""K and N of the weights of timed products."""
_COLUMNS = 1024  # of float32
_ROW = 4 * _COLUMNS  # bytes
_COPIED = (1, 4, 16, 64, 256, 1024, 4096)
"""Numbers of rows of timed copies and sums."""
_PASSES = 7
_ROUNDS = 64
_DELAYS = 4  # scheduling delays measured in a pass; they vary randomly
_GBPS = 1000.0  # of an emulated link
_ASLEEP_US = 50.0  # its latency
_WARM = 3  # untimed calls before a short one
_SENT = (1, 4, 16, 64, 256, 1024)
"""Numbers of rows of timed messages between hosts."""
_MESSAGES = 8  # messages in a timed run, one after the other
_PRODUCT = 256  # rows of the products that run at the same time

Lane = tuple[Instruction, ...]
Lanes = dict[str, Lane]
Tensors = Mapping[str, torch.Tensor]
Weights = Mapping[str, Weight] | None


class _Timings:
    """Seconds on all ranks of a world, by the name of the measurement."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopwatch = Stopwatch(world)
        self.times = defaultdict[str, list[float]](list)

    def time(self, name: str, call: Callable[[], object], warmup: int = 1) -> None:
        """Time a call that all ranks make at once, after `warmup` untimed calls: its operands are
        then in the caches, as far as they fit.
        """
        self.stopwatch.time(call, warmup)  # also since a rank is slow after waiting for others
        self.times[name].append(self.stopwatch.time(call))

    def run(
        self,
        name: str,
        lanes: Callable[[int], Lanes],
        tensors: Tensors,
        weights: Weights = None,
        warmup: int = _WARM,
    ) -> None:
        """Time a plan with these lanes of each rank."""
        plan = self.plan(lanes, tensors)
        self.time(name, lambda: self.execute(plan, tensors, weights), warmup)

    def spans(
        self, plan: Plan, tensors: Tensors, weights: Weights = None
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """The start and end of each instruction of this rank, by lane and index."""
        self.stopwatch.time(lambda: None)
        with record(self.world) as recording:
            self.execute(plan, tensors, weights)
        return {(lane, i): (start, stop) for lane, i, start, stop in recording.executions[0][2]}

    def execute(self, plan: Plan, tensors: Tensors, weights: Weights) -> None:
        """Execute a plan that is timed only: it promises no result that could be proved."""
        rows = plan.pieces
        engine(self.world).program(plan, tensors, rows).run(tensors, rows, weights or {})

    def plan(self, lanes: Callable[[int], Lanes], tensors: Tensors) -> Plan:
        """A plan with these lanes of each rank."""
        of_all = (len(tensors["a"]),) * self.world.ranks
        buffers = {"a": Buffer("input", of_all), "out": Buffer("output", of_all)}
        buffers |= {name: Buffer("workspace", of_all) for name in ("partial", "inbox")}
        return Plan("calibrate", "made up", buffers, tuple(map(lanes, range(self.world.ranks))))

    def summarize(self) -> tuple[dict[str, float], dict[str, float]]:
        """The lower quartile of each measurement, and its spread in percent, of the times of the
        slowest rank; collective.
        """
        slowest = iter(
            largest(self.world, [second for seconds in self.times.values() for second in seconds])
        )
        runs = {
            name: sorted(next(slowest) for _ in seconds) for name, seconds in self.times.items()
        }
        quartiles = {name: seconds[len(seconds) // 4] for name, seconds in runs.items()}
        spread = {
            name: 100 * (statistics.median(runs[name]) / quartile - 1)
            for name, quartile in quartiles.items()
        }
        return quartiles | (
            {"turn": statistics.fmean(runs["turn"])} if "turn" in runs else {}
        ), spread


def measure(threads: int) -> dict[str, Any]:
    """The profile of the machine, measured by the ranks of this rank's world and equal on all;
    collective. Takes about a minute.
    """
    kinds = {
        f"{name} packed" if packed else name: (name, packed)
        for name in ITEMSIZE
        for packed in (False, True)
    }
    with session(threads) as world:
        bench = _Timings(world)
        parts: list[Callable[[_Timings], None]] = [
            partial(_products, kind=kind, dtype=getattr(torch, name), packed=packed)
            for kind, (name, packed) in kinds.items()
        ]
        parts += [_copies, _calls, _lanes]
        steps = _PASSES * len(parts)
        with progress("calibrating", steps, shown=world.rank == 0) as advance:
            for part in parts * _PASSES:
                part(bench)
                advance()
        found, spread = bench.summarize()
        slower = slowdown(found["products"], found["copies"], found["products and copies"])
        signal = _round(found, "signals")
        link, memory, reduce = (
            _rate({rows * reads * _ROW: found[f"{kind} {rows}"] for rows in _COPIED})
            for kind, reads in (("link", 1), ("memory", 1), ("reduce", 2))
        )
        machine = Machine(
            "this",
            {kind: _product(found, kind, ITEMSIZE[name]) for kind, (name, _) in kinds.items()},
            (LinkRate(link[0], factors=link[1]),),
            memory_gbs=memory[0],
            memory_factors=memory[1],
            reduce_gbs=reduce[0],
            reduce_factors=reduce[1],
            notify_us=1e6 * max(0.0, signal),
            launch_us=1e6 * max(0.0, found["call"] - found["product of a call"] - signal),
            lane_us=1e6 * max(0.0, found["two lanes"] - found["one lane"]),
            wake_us=max(0.0, 1e6 * (found["a slow copy"] - found["a fast copy"]) - _ASLEEP_US),
            turn_us=1e6 * found["turn"],
            compute_slowdown=slower,
            communicate_slowdown=slower,
            in_place=True,
            thresholds=world.thresholds,
            source=f"measured by weft calibrate: {world.ranks} ranks of {threads} threads, "
            f"processor {cache.processor()}, torch {torch.__version__}",
        )
        return asdict(machine) | {
            "spread": {name: round(percent, 1) for name, percent in spread.items()}
        }


def measure_network(threads: int) -> LinkRate:
    """The link between the hosts of this rank's world, equal on all ranks; collective. Takes some
    seconds.

    One rank of each host sends to a rank of the next host and receives from the previous one. The
    part of a core that this takes is computed from the time by which it prolongs a concurrent
    product.
    """
    with session(threads) as world:
        bench = _Timings(world)
        if not world.hosts.several:
            raise WeftError("all ranks are on one host: there is no link to others to measure")
        for _ in range(_PASSES):
            _time_signals(bench)
            for rows in _SENT:
                _send(bench, f"sent {rows}", rows, 0)
            _send(bench, "a product", 0, 1)
        found, _ = bench.summarize()
        signal = _round(found, "signals")
        rows = _SENT[-2]
        products = math.ceil(1.5 * found[f"sent {rows}"] / found["a product"])
        for _ in range(_PASSES):
            _send(bench, "products", 0, products)
            _send(bench, "both", rows, products)
        found, _ = bench.summarize()
    gbs, factors = _rate(
        {_ROW * n: max(found[f"sent {n}"] - signal, 1e-9) / _MESSAGES for n in _SENT}
    )
    busy = min(1.0, max(0.01, (found["both"] - found["products"]) / found[f"sent {rows}"]))
    return LinkRate(gbs, 1e6 * signal, shared=True, factors=factors, core_gbs=2 * gbs / busy)


def _send(bench: _Timings, name: str, rows: int, products: int) -> None:
    """Time messages of `rows` rows from one rank of each host to one of the next, concurrently with
    a number of products.
    """
    world = bench.world
    leaders = [members(host, world.hosts)[0] for host in range(world.hosts.number)]

    def lanes(r: int) -> Lanes:
        compute: list[Instruction] = [*enter(r, world.ranks)]
        comm: list[Instruction] = [*enter(r, world.ranks)]
        if r in leaders:
            to, source = (leaders[(leaders.index(r) + step) % len(leaders)] for step in (1, -1))
            own = Region(r, "a", 0, _PRODUCT)
            compute += [matmul_of(own, own._replace(buffer="out"))] * products
            if rows:
                comm += [Copy(Region(r, "a", 0, rows), Region(to, "inbox", 0, rows))] * _MESSAGES
                comm.append(Notify(to, Signal("arrived", r)))
                compute.append(Wait(Signal("arrived", source), 1))
        return {"compute": (*compute, *leave(r, world.ranks)), "comm": tuple(comm)}

    bench.run(
        name,
        lanes,
        _ones(max(rows, _PRODUCT), 512),
        {"out": pack(torch.ones(_COLUMNS, 512, device="cpu"))},
        warmup=1,
    )


def _ones(rows: int, columns: int = _COLUMNS) -> dict[str, torch.Tensor]:
    return {
        "a": torch.ones(rows, _COLUMNS, device="cpu"),
        "out": torch.ones(rows, columns, device="cpu"),
    }


def _products(bench: _Timings, kind: str, dtype: torch.dtype, packed: bool) -> None:
    """Time one product of each size, with weights of one kind."""
    for width in _WIDTHS:
        b = torch.randn(width, width, device="cpu").to(dtype)
        weight = pack(b) if packed else b
        for rows in _ROWS:
            x = torch.randn(rows, width, device="cpu").to(dtype)
            out = torch.empty(rows, width, dtype=dtype, device="cpu")
            bench.time(
                f"{kind} {rows}x{width}x{width}",
                partial(multiply, x, weight, out),
                _WARM if rows < 16 else 1,
            )


def _product(found: dict[str, float], kind: str, itemsize: int) -> ProductRate:
    """The model of products of one kind: a fit of all sizes by relative errors, and for each size
    the factor by which its time differs from the fit.
    """
    timed = {
        (m, width): found[f"{kind} {m}x{width}x{width}"]
        for m, width in itertools.product(_ROWS, _WIDTHS)
    }
    fixed, weight, operation = least_squares(
        [
            [1 / seconds, width**2 * itemsize / seconds, 2 * m * width**2 / seconds]
            for (m, width), seconds in timed.items()
        ]
    )
    fit = ProductRate(1e-12 / operation, 1e-9 / max(weight, 1e-15), 1e6 * fixed)
    factors = [
        seconds / fit.seconds(m, width, width, itemsize) for (m, width), seconds in timed.items()
    ]
    return replace(
        fit, factors=RateGrid((_ROWS, tuple(width * width for width in _WIDTHS)), tuple(factors))
    )


def least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The least-squares solution x of ``rows @ x = 1`` without negative elements, with a positive
    last one.
    """
    matrix = np.asarray(rows)
    best = np.zeros(matrix.shape[1])
    least = math.inf
    for optional in itertools.product((False, True), repeat=matrix.shape[1] - 1):
        used = np.array((*optional, True))
        factors = np.zeros(matrix.shape[1])
        factors[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
        error = float(np.sum((matrix @ factors - 1) ** 2))
        if min(factors[used]) > 0 and error < least:
            best, least = factors, error
    solution: list[float] = best.tolist()
    return solution


def _copies(bench: _Timings) -> None:
    """Time local copies, copies to a peer, and sums that read a peer's rows, of several sizes."""
    ranks, own = bench.world.ranks, bench.world.rank
    for rows in _COPIED:

        def lanes(r: int, rows: int = rows) -> Lanes:
            peer = (r + 1) % ranks
            a = Region(r, "a", 0, rows)
            own = Region(r, "partial", 0, rows)
            copies = Copy(a, own), *_signals(r, ranks, 1), Copy(a, Region(peer, "inbox", 0, rows))
            sums = Reduce((own, own._replace(rank=peer)), a._replace(buffer="out"))
            return {"compute": (*enter(r, ranks), *copies, sums, *leave(r, ranks))}

        plan = bench.plan(lanes, tensors := _ones(rows))
        bench.spans(plan, tensors)  # to warm up
        spans = bench.spans(plan, tensors)
        work = [
            spans["compute", i]
            for i, instruction in enumerate(plan.lanes[own]["compute"])
            if writes(instruction)
        ]
        for kind, (start, stop) in zip(("memory", "link", "reduce"), work, strict=True):
            bench.times[f"{kind} {rows}"].append(1e-9 * max(stop - start, 1))


def _rate(times: Mapping[int, float]) -> tuple[float, RateGrid]:
    """The GB/s of the largest size, and for each size the factor by which its time differs from
    that rate; `times` are seconds by bytes.
    """
    rate = max(times) / times[max(times)]
    return rate / 1e9, RateGrid(
        ([*times],), [seconds * rate / size for size, seconds in times.items()]
    )


def _time_signals(bench: _Timings) -> None:
    """Time one barrier of signals between all ranks, and `_ROUNDS` of them."""
    for rounds in (1, _ROUNDS):
        ranks = bench.world.ranks
        rank_lanes = [{"compute": _signals(r, ranks, rounds)} for r in range(ranks)]
        bench.run(f"{rounds} signals", rank_lanes.__getitem__, _ones(1))


def _round(found: Mapping[str, float], name: str) -> float:
    """Seconds of one round."""
    return (found[f"{_ROUNDS} {name}"] - found[f"1 {name}"]) / (_ROUNDS - 1)


def _calls(bench: _Timings) -> None:
    """Time the costs that do not depend on sizes: signals, a call, its lanes, waking up."""
    world = bench.world
    ranks = bench.world.ranks
    one = _ones(1)
    _time_signals(bench)
    bench.run("one lane", lambda r: {"compute": _signals(r, ranks, 1)}, one)
    bench.run("two lanes", lambda r: {"compute": (), "comm": _signals(r, ranks, 1)}, one)

    def copied(r: int) -> Lanes:
        copy = Copy(Region(r, "a", 0, 1), Region((r + 1) % ranks, "inbox", 0, 1))
        return {"compute": (*enter(r, ranks), copy, *leave(r, ranks))}

    world.emulate_link(_GBPS, _ASLEEP_US)
    bench.run("a slow copy", copied, one)
    world.emulate_link(0)
    bench.run("a fast copy", copied, one)

    def multiplied(r: int) -> Lanes:
        return {
            "compute": (
                matmul_of(Region(r, "a", 0, 1), Region(r, "out", 0, 1)),
                *_signals(r, ranks, 1),
            )
        }

    few = torch.ones(1, 64, device="cpu")
    out = torch.empty(1, 64, device="cpu")
    weight = {"out": torch.ones(64, 64, device="cpu")}
    bench.run("call", multiplied, {"a": few, "out": out}, weight)
    bench.time("product of a call", partial(multiply, few, weight["out"], out), _WARM)


def _signals(rank: int, ranks: int, rounds: int) -> tuple[Instruction, ...]:
    """Rounds of a barrier."""
    lane: list[Instruction] = []
    for count in range(1, rounds + 1):
        lane += [
            *notify_all(rank, "barrier", before(rank, ranks)),
            *wait_all("barrier", after(rank, ranks), count),
        ]
    return tuple(lane)


def _lanes(bench: _Timings) -> None:
    """Time products and copies, alone and concurrently, and the delay until the scheduler runs a
    comm lane on a core that multiplies.
    """
    ranks = bench.world.ranks
    rows = 256
    tensors = _ones(rows, 512)
    weight = {"out": pack(torch.ones(_COLUMNS, 512, device="cpu"))}

    def lanes(r: int, name: str) -> Lanes:
        own = Region(r, "a", 0, rows)
        made = Signal("made", r)
        product = matmul_of(own, own._replace(buffer="out"))
        copy = Copy(own, Region((r + 1) % ranks, "inbox", 0, rows))
        compute: Lane = (product,) * 3 if "products" in name else ()
        comm: Lane = (copy,) * 16 if "copies" in name else ()
        if name == "turn":
            compute = (product, Notify(r, made), *[product] * 3)
            comm = (Wait(made, 1), copy)
        return {"compute": (*compute, *leave(r, ranks)), "comm": (*enter(r, ranks), *comm)}

    for name in ("products", "copies", "products and copies"):
        bench.run(name, partial(lanes, name=name), tensors, weight, warmup=1)
    plan = bench.plan(partial(lanes, name="turn"), tensors)
    for _ in range(_DELAYS):
        spans = bench.spans(plan, tensors, weight)
        bench.times["turn"].append(1e-9 * max(spans["comm", ranks][0] - spans["compute", 0][1], 1))


def slowdown(products: float, copies: float, both: float) -> float:
    """The factor by which products and copies slow each other down, from their seconds alone and
    `both` concurrently.

    The copies take `slowdown` times as long as alone; the products done meanwhile would alone take
    as long as the copies alone. The factor is 2 on a shared core; more than 4 counts as a
    disturbance.
    """
    return min(4.0, max(1.0, 1 + (both - products) / copies))
