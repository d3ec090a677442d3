"""The benchmarks of matmul + reduce-scatter and matmul + all-reduce: their tensors."""

from __future__ import annotations

from functools import partial

import torch

from weft.bench.baselines import gloo_matmul_all_reduce, gloo_matmul_reduce_scatter
from weft.bench.fused import Subject
from weft.bench.verification import Sums
from weft.schedules.common import apart


class MatmulSum(Subject):
    """Products whose sum is shared out over the ranks, or goes to all; what communicates alone are others, in symmetric memory."""

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
        self.check_moved = partial(self.problem.check_sum, self.out, start=start)
        self.shares = {"shard_rows": self.rows} if scatters else {}
        gloo = gloo_matmul_reduce_scatter if scatters else gloo_matmul_all_reduce
        self.baseline = partial(gloo, self.a, self.problem.weight, self.out)

    def renew(self, run: int) -> None:
        self.a.copy_(self.problem.rows(run))
        self.moved["partial"].copy_(self.problem.products(run))
