"""The profile of this machine, measured: what `weft calibrate` stores and
`weft.predict.machine.load("this")` reads.

All ranks measure at the same time, since that is how they will work. Cores are faster at one time
than at another, above all those of virtual machines, so everything is timed in several passes with
some seconds between them. Of these the lower quartile counts, since others' work only ever makes a
run slower; `spread` says by how many percent the median run took longer.
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
from weft.kernels.products import multiply
from weft.kernels.weights import Weight, pack
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
from weft.predict.interpolation import Grid
from weft.predict.machine import ITEMSIZE, Link, Machine, Product
from weft.schedules.lanes import enter, leave, notify_all, wait_all
from weft.schedules.peers import after, before, members
from weft.world import World

_ROWS = (1, 2, 4, 7, 8, 16, 32, 63, 64, 128, 256, 512)
"""Rows at which products are timed: also those around which `weft.kernels.products` changes the way
it multiplies.
"""
_WIDTHS = (256, 448, 800, 1408, 2048)
"""K and N of their weights."""
_COLUMNS = 1024  # of float32
_ROW = 4 * _COLUMNS  # bytes
_COPIED = (1, 4, 16, 64, 256, 1024, 4096)
"""Rows that are copied and added."""
_PASSES = 7
_ROUNDS = 64
_TURNS = 4  # in a pass: how long one takes is a matter of chance
_GBPS, _ASLEEP_US = 1000.0, 50.0  # of an emulated link
_WARM = 3  # calls before one that is short
_SENT = (1, 4, 16, 64, 256, 1024)
"""Rows that are sent between hosts in one message."""
_MESSAGES = 8  # one after the other
_PRODUCT = 256  # rows of the products beside them

Lane = tuple[Instruction, ...]
Lanes = dict[str, Lane]
Tensors = Mapping[str, torch.Tensor]
Weights = Mapping[str, Weight] | None


class _Timings:
    """Seconds on all ranks of a world, by what was timed."""

    def __init__(self, world: World) -> None:
        self.world, self.stopwatch = world, Stopwatch(world)
        self.times = defaultdict[str, list[float]](list)

    def time(self, what: str, call: Callable[[], object], before: int = 1) -> None:
        """Time a call that all ranks make at once, and made `before`: it finds its operands in the
        caches as far as they fit.
        """
        self.stopwatch.time(call, before)  # a rank that had to wait for the others is slow at first
        self.times[what].append(self.stopwatch.time(call))

    def run(
        self,
        what: str,
        lanes: Callable[[int], Lanes],
        tensors: Tensors,
        weights: Weights = None,
        before: int = _WARM,
    ) -> None:
        """Time a plan with these lanes of each rank."""
        plan = self.plan(lanes, tensors)
        self.time(what, lambda: engine(self.world).execute(plan, tensors, weights), before)

    def spans(
        self, plan: Plan, tensors: Tensors, weights: Weights = None
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """When each instruction of this rank began and ended, by lane and index."""
        self.stopwatch.time(lambda: None)
        with record(self.world) as recording:
            engine(self.world).execute(plan, tensors, weights)
        return {(lane, i): (start, stop) for lane, i, start, stop in recording.executions[0][2]}

    def plan(self, lanes: Callable[[int], Lanes], tensors: Tensors) -> Plan:
        """A plan with these lanes of each rank."""
        of_all = (len(tensors["a"]),) * self.world.ranks
        buffers = {"a": Buffer("input", of_all), "out": Buffer("output", of_all)}
        buffers |= {name: Buffer("workspace", of_all) for name in ("partial", "inbox")}
        return Plan("calibrate", "made up", buffers, tuple(map(lanes, range(self.world.ranks))))

    def summarize(self) -> tuple[dict[str, float], dict[str, float]]:
        """The lower quartile of each, and its spread in percent; a run takes as long as on the
        slowest rank. Collective.
        """
        taken = iter(
            largest(self.world, [second for seconds in self.times.values() for second in seconds])
        )
        runs = {what: sorted(next(taken) for _ in seconds) for what, seconds in self.times.items()}
        quartiles = {what: seconds[len(seconds) // 4] for what, seconds in runs.items()}
        spread = {
            what: 100 * (statistics.median(runs[what]) / least - 1)
            for what, least in quartiles.items()
        }
        return quartiles | (
            {"turn": statistics.fmean(runs["turn"])} if "turn" in runs else {}
        ), spread


def measure(threads: int) -> dict[str, Any]:
    """The profile of the machine as seen from this rank's world, alike on all ranks; collective.
    Takes about a minute.
    """
    kinds = {
        f"{name} packed" if packed else name: (name, packed)
        for name in ITEMSIZE
        for packed in (False, True)
    }
    with session(threads) as world:
        bench = _Timings(world)
        for _ in range(_PASSES):
            for kind, (name, packed) in kinds.items():
                _products(bench, kind, getattr(torch, name), packed)
            _copies(bench)
            _calls(bench)
            _lanes(bench)
        found, spread = bench.summarize()
        slower = slowdown(found["products"], found["copies"], found["products and copies"])
        signal = _round(found, "signals")
        link, memory, reduce = (
            _rate({rows * reads * _ROW: found[f"{what} {rows}"] for rows in _COPIED})
            for what, reads in (("link", 1), ("memory", 1), ("reduce", 2))
        )
        machine = Machine(
            "this",
            {kind: _product(found, kind, ITEMSIZE[name]) for kind, (name, _) in kinds.items()},
            (Link(link[0], factors=link[1]),),
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
            source=f"measured by weft calibrate: {world.ranks} ranks of {threads} threads, processor {cache.processor()}, "
            f"torch {torch.__version__}",
        )
        return asdict(machine) | {
            "spread": {name: round(percent, 1) for name, percent in spread.items()}
        }


def measure_network(threads: int) -> Link:
    """What joins the hosts of this rank's world, alike on all ranks; collective. Takes some
    seconds.

    One rank of each host sends to that of the next while it is sent as much. What that takes of a
    core is what a product beside it takes longer.
    """
    with session(threads) as world:
        bench = _Timings(world)
        if not world.multi_host:
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
    return Link(gbs, 1e6 * signal, shared=True, factors=factors, core_gbs=2 * gbs / busy)


def _send(bench: _Timings, what: str, rows: int, products: int) -> None:
    """Time messages of so many rows from one rank of each host to that of the next, beside so many
    products.
    """
    world = bench.world
    leaders = [members(host, world.hosts)[0] for host in range(len(set(world.hosts)))]

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
        what,
        lanes,
        _ones(max(rows, _PRODUCT), 512),
        {"out": pack(torch.ones(_COLUMNS, 512))},
        before=1,
    )


def _ones(rows: int, columns: int = _COLUMNS) -> dict[str, torch.Tensor]:
    return {"a": torch.ones(rows, _COLUMNS), "out": torch.ones(rows, columns)}


def _products(bench: _Timings, kind: str, dtype: torch.dtype, packed: bool) -> None:
    """Time products of one kind once at every size."""
    for width in _WIDTHS:
        b = torch.randn(width, width).to(dtype)
        weight = pack(b) if packed else b
        for rows in _ROWS:
            x, out = torch.randn(rows, width).to(dtype), torch.empty(rows, width, dtype=dtype)
            bench.time(
                f"{kind} {rows}x{width}x{width}",
                partial(multiply, x, weight, out),
                _WARM if rows < 16 else 1,
            )


def _product(found: dict[str, float], kind: str, itemsize: int) -> Product:
    """The product of a kind, fitted to all sizes with equal relative errors, and by what each
    differs from that.
    """
    timed = {
        (m, width): found[f"{kind} {m}x{width}x{width}"]
        for m, width in itertools.product(_ROWS, _WIDTHS)
    }
    fixed, weight, operation = least_squares(
        [
            [1 / took, width**2 * itemsize / took, 2 * m * width**2 / took]
            for (m, width), took in timed.items()
        ]
    )
    roughly = Product(1e-12 / operation, 1e-9 / max(weight, 1e-15), 1e6 * fixed)
    factors = [
        took / roughly.seconds(m, width, width, itemsize) for (m, width), took in timed.items()
    ]
    return replace(
        roughly, factors=Grid((_ROWS, tuple(width * width for width in _WIDTHS)), tuple(factors))
    )


def least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The factors, none negative, with which the columns of `rows` come closest to adding up to 1;
    the last is not zero.
    """
    matrix = np.asarray(rows)
    best, least = np.zeros(matrix.shape[1]), math.inf
    for others in itertools.product((False, True), repeat=matrix.shape[1] - 1):
        used, factors = np.array((*others, True)), np.zeros(matrix.shape[1])
        factors[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
        error = float(np.sum((matrix @ factors - 1) ** 2))
        if min(factors[used]) > 0 and error < least:
            best, least = factors, error
    found: list[float] = best.tolist()
    return found


def _copies(bench: _Timings) -> None:
    """Time local copies, copies to a peer, and sums that read a peer's rows, of several sizes."""
    ranks, own = bench.world.ranks, bench.world.rank
    for rows in _COPIED:

        def lanes(r: int, rows: int = rows) -> Lanes:
            peer, a, near = (r + 1) % ranks, Region(r, "a", 0, rows), Region(r, "partial", 0, rows)
            copies = Copy(a, near), *_signals(r, ranks, 1), Copy(a, Region(peer, "inbox", 0, rows))
            added = Reduce((near, near._replace(rank=peer)), a._replace(buffer="out"))
            return {"compute": (*enter(r, ranks), *copies, added, *leave(r, ranks))}

        plan = bench.plan(lanes, tensors := _ones(rows))
        bench.spans(plan, tensors)  # once to warm up
        spans = bench.spans(plan, tensors)
        work = [
            spans["compute", i]
            for i, instruction in enumerate(plan.lanes[own]["compute"])
            if writes(instruction)
        ]
        for what, (start, stop) in zip(("memory", "link", "reduce"), work, strict=True):
            bench.times[f"{what} {rows}"].append(1e-9 * max(stop - start, 1))


def _rate(took: Mapping[int, float]) -> tuple[float, Grid]:
    """Of seconds by bytes: GB/s of the largest size, and by what times of others differ from that."""
    rate = max(took) / took[max(took)]
    return rate / 1e9, Grid(([*took],), [seconds * rate / size for size, seconds in took.items()])


def _time_signals(bench: _Timings) -> None:
    """Time one round of signals between all ranks, and many."""
    for rounds in (1, _ROUNDS):
        ranks = bench.world.ranks
        rank_lanes = [{"compute": _signals(r, ranks, rounds)} for r in range(ranks)]
        bench.run(f"{rounds} signals", rank_lanes.__getitem__, _ones(1))


def _round(found: Mapping[str, float], what: str) -> float:
    """Seconds of one round."""
    return (found[f"{_ROUNDS} {what}"] - found[f"1 {what}"]) / (_ROUNDS - 1)


def _calls(bench: _Timings) -> None:
    """Time what is the same for every size: signals, a call, its lanes, waking up."""
    world, ranks, one = bench.world, bench.world.ranks, _ones(1)
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

    few, out, weight = torch.ones(1, 64), torch.empty(1, 64), {"out": torch.ones(64, 64)}
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
    """Time products and copies alone and beside each other, and how long a comm lane waits for its
    turn beside products.
    """
    ranks, rows = bench.world.ranks, 256
    tensors, weight = _ones(rows, 512), {"out": pack(torch.ones(_COLUMNS, 512))}

    def lanes(r: int, what: str) -> Lanes:
        own, made = Region(r, "a", 0, rows), Signal("made", r)
        product, copy = (
            matmul_of(own, own._replace(buffer="out")),
            Copy(own, Region((r + 1) % ranks, "inbox", 0, rows)),
        )
        compute: Lane = (product,) * 3 if "products" in what else ()
        comm: Lane = (copy,) * 16 if "copies" in what else ()
        if what == "turn":
            compute, comm = (product, Notify(r, made), *[product] * 3), (Wait(made, 1), copy)
        return {"compute": (*compute, *leave(r, ranks)), "comm": (*enter(r, ranks), *comm)}

    for what in ("products", "copies", "products and copies"):
        bench.run(what, partial(lanes, what=what), tensors, weight, before=1)
    plan = bench.plan(partial(lanes, what="turn"), tensors)
    for _ in range(_TURNS):
        spans = bench.spans(plan, tensors, weight)
        bench.times["turn"].append(1e-9 * max(spans["comm", ranks][0] - spans["compute", 0][1], 1))


def slowdown(products: float, copies: float, both: float) -> float:
    """By what two things slow each other down that take this long alone, and `both` seconds beside
    each other.

    While the copies last, `slowdown` times as long as alone, as much is multiplied as alone in that
    time. Two that share a core take twice as long; more than four times is taken to be a
    disturbance.
    """
    return min(4.0, max(1.0, 1 + (both - products) / copies))
