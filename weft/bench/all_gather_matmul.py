"""The benchmark of all-gather + matmul: its views, baselines and steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weft.bench.baselines import GLOO, gloo_all_gather_matmul
from weft.bench.fused import Settings, View, balanced_gbps
from weft.bench.harness import Stopwatch
from weft.bench.verification import Problem
from weft.engines import engine, matmul
from weft.engines.weights import pack
from weft.ops.all_gather_matmul import all_gather_matmul, check
from weft.ops.auto import decide
from weft.ops.call import Given, Options
from weft.plan import Plan
from weft.schedules import all_gather_matmul as schedule
from weft.schedules.common import offsets, split
from weft.schedules.workload import Place
from weft.world import World

_STEPS: dict[str, dict[str, Any]] = {
    "overlapped": {"own_first": False, "joined": False},
    "+ own rows first": {"own_first": True, "joined": False},
    "+ arrivals joined": {"own_first": True, "joined": True},
}


class AllGatherMatmul:
    """The tensors of one rank and the views on them, as `weft.bench.fused.Subject` describes.

    As in a model that runs many times, shards lie in symmetric memory and the weight is packed; the baseline has a plain one. The
    `ablation` leads from the unfused cascade to the operator, one improvement at a time.
    """

    def __init__(self, settings: Settings, world: World, stopwatch: Stopwatch) -> None:
        dtype, out_dtype = getattr(torch, settings.dtype), getattr(torch, settings.out_dtype)
        m, k, n = settings.m, settings.k, settings.n
        self.world, self.rows = world, split(m, world.ranks)
        self.problem = Problem(m, k, n, dtype, out_dtype, seed=settings.seed, rank=world.rank)
        self.a = world.empty(max(self.rows), k, dtype=dtype)[: self.rows[world.rank]]
        self.gathered = world.empty(m, k, dtype=dtype)
        self.whole = torch.empty(m, k, dtype=dtype)
        self.out = torch.empty(m, n, dtype=out_dtype)
        self.weight = pack(self.problem.weight)
        if settings.link:
            world.emulate_link(settings.link.gbps or 1.0, settings.link.latency_us)
        compute = partial(matmul.multiply, self.whole, self.weight, self.out)
        self.views = {"compute": self._product(compute)}
        asked = Options(out_dtype=out_dtype, shard_rows=self.rows, algorithm=settings.algorithm, chunk_rows=settings.chunk_rows)
        self.call = check(world, Given(self.a, [self.weight], [None], [self.out]), asked)
        self.choice = self.call.usual(settings.algorithm)
        if settings.link and settings.link.gbps is None:
            self.renew(0)
            size = k * dtype.itemsize
            gbps = balanced_gbps(self._gather(), size, stopwatch.alone(compute), settings.link.latency_us)
            world.emulate_link(gbps, settings.link.latency_us)
        if settings.algorithm == "auto" and m:
            self.choice = decide(self.call)
        gather = self._gather()
        self.views |= {
            "communicate": View(
                lambda: engine(world).execute(gather, {"a": self.a, "gathered": self.gathered}),
                (self.gathered,),
                partial(self.problem.check_rows, self.gathered),
            ),
            "sequential": self._product(self._operator("sequential", None)),
            "pipelined": self._product(self._operator(settings.algorithm, settings.chunk_rows)),
        }
        for name in settings.baselines:
            self.views[name] = self._product(BASELINES[name](self.a, self.problem.weight, self.out, self.rows))
        still = self.choice.algorithm == "direct"
        self.notes = (
            *(["communicate is a pull, since direct moves no rows by themselves."] if still else []),
            "Shards lie in symmetric memory and the weight is packed; baselines have a plain weight.",
        )
        self.ablation = {"cascade": "sequential"} if settings.ablate else {}
        for name in _STEPS if settings.ablate else ():
            self.ablation[name] = name
            self.views[name] = self._product(self._step(name, gather.algorithm))

    def renew(self, run: int) -> None:
        """Fill the inputs with those of this run."""
        start = offsets(self.rows)[self.world.rank]
        self.whole.copy_(self.problem.rows(run))
        self.a.copy_(self.whole[start : start + len(self.a)])

    def _gather(self) -> Plan:
        """The gather alone, in the way of the choice."""
        return self.call.operator.communicate(self.call.workload, self.choice.variant, Place(self.world.topology))

    def _product(self, call: Callable[[], object]) -> View:
        return View(call, (self.out,), partial(self.problem.check_product, self.out))

    def _operator(self, algorithm: str, chunk_rows: int | None) -> Callable[[], object]:
        return partial(
            all_gather_matmul,
            self.a,
            self.weight,
            out=self.out,
            out_dtype=self.out.dtype,
            shard_rows=self.rows,
            algorithm=algorithm,
            chunk_rows=chunk_rows,
            world=self.world,
        )

    def _step(self, name: str, algorithm: str) -> Callable[[], object]:
        chunk = self.call.usual(algorithm).chunk_rows
        plan = schedule.all_gather_matmul(
            self.rows, algorithm, chunk_rows=chunk, symmetric_a=True, hosts=self.world.topology, **_STEPS[name]
        )
        return lambda: engine(self.world).execute(plan, {"a": self.a, "out": self.out}, {"out": self.weight})


BASELINES = {GLOO: gloo_all_gather_matmul}
"""What there is to compare with, by name."""
