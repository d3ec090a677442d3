"""The benchmarks of matmul + reduce-scatter and matmul + all-reduce: their views and baselines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from weft.bench.baselines import GLOO, gloo_matmul_all_reduce, gloo_matmul_reduce_scatter
from weft.bench.fused import Settings, View, balanced_gbps
from weft.bench.harness import Stopwatch
from weft.bench.verification import Check, Sums
from weft.engines import engine, matmul
from weft.engines.weights import pack
from weft.ops import matmul_all_reduce as reducing
from weft.ops import matmul_reduce_scatter as scattering
from weft.ops.choice import Choice, Signature, best
from weft.ops.partial_sums import product_dtype
from weft.plan import Plan
from weft.schedules import matmul_all_reduce as reduce_schedule
from weft.schedules import matmul_reduce_scatter as scatter_schedule
from weft.schedules.common import apart, offsets, split, without_products
from weft.world import World


class _ProductSum:
    """The tensors of one rank and the views on them, as `weft.bench.fused.Subject` describes.

    As in a model that runs many times, the weight is packed; the baseline has a plain one. ``communicate`` is the operator's own
    plan without its products, on products that lie in symmetric memory.
    """

    baseline: Callable[[Tensor, Tensor, Tensor], Callable[[], None]]

    def __init__(self, settings: Settings, world: World, stopwatch: Stopwatch) -> None:
        dtype, self.out_dtype = getattr(torch, settings.dtype), getattr(torch, settings.out_dtype)
        m, k, n = settings.m, settings.k, settings.n
        self.world, self.rows = world, split(m, world.ranks)
        self.start, self.kept = self.place()
        product = product_dtype(dtype, self.out_dtype)
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
        self.choice = self.choose(settings.algorithm, settings.chunk_rows)
        if settings.link and settings.link.gbps is None:
            self.renew(0)
            seconds, alone = stopwatch.alone(compute), without_products(self.plan())
            gbps = balanced_gbps(alone, n * product.itemsize, seconds, settings.link.latency_us)
            world.emulate_link(gbps, settings.link.latency_us)
        if settings.algorithm == "auto" and m:
            self.choice = best(world, *self.question(settings.chunk_rows), self.choice, None)
        alone = without_products(self.plan())
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

    def choose(self, algorithm: str, chunk_rows: int | None) -> Choice:
        """How the operator would usually carry out the call."""
        raise NotImplementedError

    def question(self, chunk_rows: int | None) -> tuple[Signature, Callable[[], Choice]]:
        """What is to be decided for ``auto``."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """The plan of the choice."""
        raise NotImplementedError

    def operator(self, algorithm: str, chunk_rows: int | None) -> Callable[[], object]:
        """The call to measure."""
        raise NotImplementedError

    def renew(self, run: int) -> None:
        """Fill the inputs with those of this run."""
        self.a.copy_(self.problem.rows(run))
        self.products.copy_(self.problem.products(run))

    def _add(self, plan: Plan) -> None:
        dtypes = {"inbox": self.products.dtype, "running": self.problem.accumulator, "summed": self.out_dtype}
        tensors = {"partial": self.products, "out": self.out}
        engine(self.world).program(("communicate", id(plan)), plan, tensors, dtypes).run(tensors, {})

    def _sum(self, call: Callable[[], object]) -> View:
        return View(call, (self.out,), self._check(self.problem.check_product_sum))

    def _check(self, check: Callable[[Tensor, int, int], Check]) -> Callable[[int], Check]:
        return lambda run: check(self.out, run, self.start)


class MatmulReduceScatter(_ProductSum):
    """Matmul + reduce-scatter; M rows of the product are shared out over the ranks."""

    baseline = staticmethod(gloo_matmul_reduce_scatter)

    def place(self) -> tuple[int, int]:
        return offsets(self.rows)[self.world.rank], self.rows[self.world.rank]

    def choose(self, algorithm: str, chunk_rows: int | None) -> Choice:
        return scattering.choose(self.rows, self.world, algorithm, chunk_rows, packed=True)

    def question(self, chunk_rows: int | None) -> tuple[Signature, Callable[[], Choice]]:
        return scattering.question(tuple(self.rows), self.a, self.weight, self.out_dtype, self.world, chunk_rows)

    def plan(self) -> Plan:
        return scatter_schedule.matmul_reduce_scatter(
            self.rows,
            self.choice.algorithm,
            chunk_rows=self.choice.chunk_rows,
            order=self.choice.way.order,
            remote_reads=self.world.remote_reads,
            hosts=self.world.topology,
        )

    def operator(self, algorithm: str, chunk_rows: int | None) -> Callable[[], object]:
        return partial(
            scattering.matmul_reduce_scatter,
            self.a,
            self.weight,
            out=self.out,
            out_dtype=self.out_dtype,
            shard_rows=self.rows,
            algorithm=algorithm,
            chunk_rows=chunk_rows,
            world=self.world,
        )


class MatmulAllReduce(_ProductSum):
    """Matmul + all-reduce; every rank gets all M rows."""

    baseline = staticmethod(gloo_matmul_all_reduce)

    def place(self) -> tuple[int, int]:
        return 0, sum(self.rows)

    def choose(self, algorithm: str, chunk_rows: int | None) -> Choice:
        return reducing.choose(sum(self.rows), self.world, algorithm, chunk_rows, packed=True)

    def question(self, chunk_rows: int | None) -> tuple[Signature, Callable[[], Choice]]:
        return reducing.question(tuple(self.rows), self.a, self.weight, self.out_dtype, self.world, chunk_rows)

    def plan(self) -> Plan:
        return reduce_schedule.matmul_all_reduce(
            self.rows,
            self.choice.algorithm,
            chunk_rows=self.choice.chunk_rows,
            remote_reads=self.world.remote_reads,
            hosts=self.world.topology,
        )

    def operator(self, algorithm: str, chunk_rows: int | None) -> Callable[[], object]:
        return partial(
            reducing.matmul_all_reduce,
            self.a,
            self.weight,
            out=self.out,
            out_dtype=self.out_dtype,
            algorithm=algorithm,
            chunk_rows=chunk_rows,
            world=self.world,
        )


BASELINES = (GLOO,)
"""What there is to compare with, by name."""
