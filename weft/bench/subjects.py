"""The tensors of each fused operator's benchmark, and the steps from the cascade to all-gather +
matmul.
"""

from __future__ import annotations

from functools import partial

import torch

from weft.bench.ablation import STEPS
from weft.bench.baselines import (
    gloo_all_gather_matmul,
    gloo_matmul_all_reduce,
    gloo_matmul_reduce_scatter,
)
from weft.bench.fused import Subject
from weft.bench.settings import FusedSettings
from weft.bench.verification import Problem, Sums
from weft.engines import engine
from weft.measure.timing import Stopwatch
from weft.plan import Plan
from weft.schedules.common import apart
from weft.world import World


class AllGatherMatmul(Subject):
    """The gather of shards that lie in symmetric memory, and the product of all rows."""

    def __init__(self, settings: FusedSettings, world: World, stopwatch: Stopwatch) -> None:
        super().__init__(settings, world, stopwatch)
        still = self.choice.variant.algorithm == "direct"
        self.notes = (
            *(
                ["communicate is a pull, since direct moves no rows by themselves."]
                if still
                else []
            ),
            "Shards lie in symmetric memory and the weight is packed; baselines have a plain "
            "weight.",
        )
        if settings.ablate:
            self.ablation = {"cascade": "sequential", **{name: name for name in STEPS}}
            plan = self._plan_in_symmetric_memory()
            steps = {name: partial(self._execute, rewrite(plan)) for name, rewrite in STEPS.items()}
            self.views |= {name: self.view(step) for name, step in steps.items()}

    def prepare(self) -> None:
        world, (m, k, n) = self.world, self.settings.shape
        self.problem = Problem(
            m, k, n, self.dtype, self.out_dtype, seed=self.settings.seed, rank=world.rank
        )
        self.a = world.empty(max(self.rows), k, dtype=self.dtype)[: self.rows[world.rank]]
        self.moved = {"a": self.a, "gathered": world.empty(m, k, dtype=self.dtype)}
        self.x = torch.empty(m, k, dtype=self.dtype)
        self.product = self.out = torch.empty(m, n, dtype=self.out_dtype)
        self.check = self.check_baseline = partial(self.problem.check_product, self.out)
        self.check_moved = partial(self.problem.check_rows, self.moved["gathered"])
        self.shares = {"shard_rows": self.rows}
        self.baseline = partial(
            gloo_all_gather_matmul, self.a, self.problem.weight, self.out, self.rows
        )

    def renew(self, run: int) -> None:
        start = sum(self.rows[: self.world.rank])
        self.x.copy_(self.problem.rows(run))
        self.a.copy_(self.x[start : start + len(self.a)])

    def _plan_in_symmetric_memory(self) -> Plan:
        """The operator's plan, by the algorithm whose rows move where the choice moves none."""
        variant = self.call.rule(self.plan().algorithm).variant
        request = self.call.operator.request(self.call.workload, variant, hosts=self.world.topology)
        return self.call.operator.plan(request._replace(symmetric=True))

    def _execute(self, plan: Plan) -> None:
        tensors = {"a": self.a, "out": self.out}
        engine(self.world).execute(plan, tensors, {"out": self.weight}, rows=self.rows)


class MatmulSum(Subject):
    """Products whose sum is shared out over the ranks, or goes to all; what communicates alone are
    others, in symmetric memory.
    """

    problem: Sums
    notes = (
        "communicate is the operator without its products, which lie in symmetric memory.",
        "K is of each rank. The weight is packed; baselines have a plain weight.",
    )

    def prepare(self) -> None:
        world, (m, k, n), product = self.world, self.settings.shape, self.dtypes["partial"]
        scatters = self.settings.operator == "matmul_reduce_scatter"
        start = sum(self.rows[: world.rank]) if scatters else 0
        host_partial = world.multi_host and not apart(world.hosts)
        dtypes, seed = (self.dtype, self.out_dtype, product), self.settings.seed
        self.problem = Sums(m, k, n, *dtypes, seed=seed, rank=world.rank, host_partial=host_partial)
        self.a = self.x = torch.empty(m, k, dtype=self.dtype)
        self.product = torch.empty(m, n, dtype=self.out_dtype)
        self.out = torch.empty(self.rows[world.rank] if scatters else m, n, dtype=self.out_dtype)
        self.moved = {"partial": world.empty(m, n, dtype=product), "out": self.out}
        self.check = partial(self.problem.check_product_sum, self.out, start=start)
        self.check_baseline = partial(self.problem.check_baseline, self.out, start=start)
        self.check_moved = partial(self.problem.check_sum, self.out, start=start)
        self.shares = {"shard_rows": self.rows} if scatters else {}
        gloo = gloo_matmul_reduce_scatter if scatters else gloo_matmul_all_reduce
        self.baseline = partial(gloo, self.a, self.problem.weight, self.out)

    def renew(self, run: int) -> None:
        self.a.copy_(self.problem.rows(run))
        self.moved["partial"].copy_(self.problem.products(run))
