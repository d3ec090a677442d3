"""The benchmarks of matmul + reduce-scatter and matmul + all-reduce: their views and baselines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.bench.baselines import GLOO, gloo_matmul_all_reduce, gloo_matmul_reduce_scatter
from weft.bench.fused import Settings, View, balanced_gbps
from weft.bench.harness import Stopwatch
from weft.bench.verification import Check, Sums
from weft.engines import engine, matmul
from weft.engines.weights import pack
from weft.ops import fused
from weft.ops.auto import decide
from weft.ops.call import Given, Options
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.plan import Plan
from weft.schedules.common import apart, offsets, split
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Place, Workload
from weft.world import World


class _ProductSum:
    """The tensors of one rank and the views on them, as `weft.bench.fused.Subject` describes.

    As in a model that runs many times, the weight is packed; the baseline has a plain one. ``communicate`` is the operator's own
    plan without its products, on products that lie in symmetric memory.
    """

    name: str
    function: Callable[..., object]
    baseline: Callable[[Tensor, Tensor, Tensor], Callable[[], None]]

    def __init__(self, settings: Settings, world: World, stopwatch: Stopwatch) -> None:
        dtype, self.out_dtype = getattr(torch, settings.dtype), getattr(torch, settings.out_dtype)
        m, k, n = settings.m, settings.k, settings.n
        self.world, self.rows = world, split(m, world.ranks)
        self.start, self.kept = self.place()
        held = OPERATORS[self.name].buffers(Workload(self.name, tuple(self.rows), k, n, settings.dtype, settings.out_dtype))
        self.dtypes = {name: getattr(torch, rows.dtype) for name, rows in held.items()}
        product = self.dtypes["partial"]
        host_partial = world.multi_host and not apart(world.hosts)
        self.problem = Sums(m, k, n, dtype, self.out_dtype, product, seed=settings.seed, rank=world.rank, host_partial=host_partial)
        self.a = torch.empty(m, k, dtype=dtype)
        self.products = world.empty(m, n, dtype=product)
        self.whole = torch.empty(m, n, dtype=self.out_dtype)
        self.out = torch.empty(self.kept, n, dtype=self.out_dtype)
        self.weight = pack(self.problem.weight)
        if settings.link:
            world.emulate_link(settings.link.gbps or 1.0, settings.link.latency_us)
        compute = partial(matmul.multiply, self.a, self.weight, self.whole)
        self.views = {"compute": View(compute, (self.whole,), partial(self.problem.check_product, self.whole))}
        given = Given(self.a, [self.weight], [None], [self.out])
        asked = Options(out_dtype=self.out_dtype, algorithm=settings.algorithm, chunk_rows=settings.chunk_rows)
        self.call = fused.check(self.name, world, given, asked._replace(**self.shares()))
        self.choice = self.call.usual(settings.algorithm)
        if settings.link and settings.link.gbps is None:
            self.renew(0)
            gbps = balanced_gbps(self.plan(), n * product.itemsize, stopwatch.alone(compute), settings.link.latency_us)
            world.emulate_link(gbps, settings.link.latency_us)
        if settings.algorithm == "auto" and m:
            self.choice = decide(self.call)
        alone = self.plan()
        self.views |= {
            "communicate": View(partial(self._add, alone), (self.out,), self._check(self.problem.check_sum)),
            "sequential": self._sum(self.operator("sequential", None)),
            "pipelined": self._sum(self.operator(settings.algorithm, settings.chunk_rows)),
        }
        for name in settings.baselines:
            self.views[name] = self._sum(self.baseline(self.a, self.problem.weight, self.out))
        self.ablation: dict[str, str] = {}
        self.notes: tuple[str, ...] = (
            "communicate is the operator without its products, which lie in symmetric memory.",
            "K is of each rank. The weight is packed; baselines have a plain weight.",
        )

    def place(self) -> tuple[int, int]:
        """The first row of the sum that this rank keeps, and how many."""
        raise NotImplementedError

    def shares(self) -> dict[str, Any]:
        """What the operator takes of how rows are shared out."""
        return {}

    def plan(self) -> Plan:
        """The communication of the choice."""
        place = Place(self.world.topology, self.world.remote_reads)
        return self.call.operator.communicate(self.call.workload, self.choice.variant, place)

    def operator(self, algorithm: str, chunk_rows: int | None) -> Callable[[], object]:
        """The call to measure."""
        options = {"out": self.out, "out_dtype": self.out_dtype, "algorithm": algorithm, "chunk_rows": chunk_rows}
        return partial(self.function, self.a, self.weight, world=self.world, **options, **self.shares())

    def renew(self, run: int) -> None:
        """Fill the inputs with those of this run."""
        self.a.copy_(self.problem.rows(run))
        self.products.copy_(self.problem.products(run))

    def _add(self, plan: Plan) -> None:
        tensors = {"partial": self.products, "out": self.out}
        engine(self.world).program(plan, tensors, plan.pieces, self.dtypes).run(tensors, plan.pieces, {})

    def _sum(self, call: Callable[[], object]) -> View:
        return View(call, (self.out,), self._check(self.problem.check_product_sum))

    def _check(self, check: Callable[[Tensor, int, int], Check]) -> Callable[[int], Check]:
        return lambda run: check(self.out, run, self.start)


class MatmulReduceScatter(_ProductSum):
    """Matmul + reduce-scatter; M rows of the product are shared out over the ranks."""

    name, function = "matmul_reduce_scatter", staticmethod(matmul_reduce_scatter)
    baseline = staticmethod(gloo_matmul_reduce_scatter)

    def place(self) -> tuple[int, int]:
        return offsets(self.rows)[self.world.rank], self.rows[self.world.rank]

    def shares(self) -> dict[str, Any]:
        return {"shard_rows": self.rows}


class MatmulAllReduce(_ProductSum):
    """Matmul + all-reduce; every rank gets all M rows."""

    name, function = "matmul_all_reduce", staticmethod(matmul_all_reduce)
    baseline = staticmethod(gloo_matmul_all_reduce)

    def place(self) -> tuple[int, int]:
        return 0, sum(self.rows)


BASELINES = (GLOO,)
"""What there is to compare with, by name."""
