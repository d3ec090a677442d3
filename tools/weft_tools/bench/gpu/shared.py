"""Fused operators of ranks that are threads and share one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.measure.timing import summarize
from weft.ops.all_gather import all_gather
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.barrier import barrier
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.reduce_scatter import reduce_scatter
from weft.world import World, init
from weft.world.local import local_world
from weft_tools.bench.gpu import Measured, Shape, Timer, measured, slowest
from weft_tools.bench.torch_products import sums_in_float32
from weft_tools.bench.verification import RUNS, Check, Problem, compare, error_bound
from weft_tools.bench.views import View, Views, one_by_one, product_on
from weft_tools.events import milliseconds

GATHERS, SCATTERS = ("pull", "direct", "push"), ("push", "direct", "put")


class Fused(Views):
    """One rank's views: an all-gather + matmul of M x K rows in all by K x N / ranks columns, and a
    matmul + reduce-scatter of M rows by K / ranks x N, by several algorithms.

    With `parts` also the product alone, and communication and product one after the other.
    """

    def __init__(self, world: World, shape: Shape, dtype: torch.dtype, parts: bool) -> None:
        m, k, n = shape
        self.world = world
        self.own = m // world.ranks
        draw: dict[str, Any] = {"rank": world.rank, "device": world.device}
        self.gather = Problem(m, k, n // world.ranks, dtype, dtype, seed=0, **draw)
        self.term = Problem(m, k // world.ranks, n, dtype, dtype, seed=1000 * world.rank, **draw)
        for problem in (self.gather, self.term):
            del problem.magnitude  # one GPU holds the matrices of all ranks
        self.sum, self.bound = self._own_sum(k, n, dtype)
        empty = partial(torch.empty, dtype=dtype, device=world.device)
        a = empty(self.own, k)
        self.gathered = empty(m, k)
        out = empty(m, n // world.ranks)
        x = empty(m, k // world.ranks)
        product = empty(m, n)
        total = empty(self.own, n)
        b = self.gather.weight
        weight = self.term.weight
        self.a = a
        self.x = x
        right = partial(self.gather.check_product, out)
        summed = partial(self._check_sum, total)
        one = partial(all_gather_matmul, a, b, out=out, world=world)
        other = partial(matmul_reduce_scatter, x, weight, out=total, world=world)
        self.views = {
            f"gather {name}": View(partial(one, algorithm=name), (out,), right) for name in GATHERS
        } | {
            f"scatter {name}": View(partial(other, algorithm=name), (total,), summed)
            for name in SCATTERS
        }
        if parts:
            mm = product_on(world.device)
            multiplied = partial(mm, self.gathered, b, out)
            added = partial(mm, x, weight, product)
            gather = partial(all_gather, a, out=self.gathered, world=world)
            scatter = partial(reduce_scatter, product, out=total, world=world)
            self.views |= {
                "product of the gather": View(multiplied, (out,), right),
                "gather, then product": View(
                    partial(one_by_one, gather, multiplied), (self.gathered, out), right
                ),
                "product of the scatter": View(
                    added, (product,), partial(self.term.check_product, product)
                ),
                "product, then scatter": View(
                    partial(one_by_one, added, scatter), (product, total), summed
                ),
            }

    def renew(self, run: int) -> None:
        rank = self.world.rank
        rows = self.gather.rows(run)
        self.gathered.copy_(rows)
        self.a.copy_(rows[rank * self.own : (rank + 1) * self.own])
        self.x.copy_(self.term.rows(run))

    def _own_sum(self, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The exact sum of all ranks' terms in this rank's rows of every run, and its bound."""
        rank, ranks, draw = self.world.rank, self.world.ranks, self.gather.random
        columns, own = k // ranks, slice(rank * self.own, (rank + 1) * self.own + RUNS)
        shape = self.own + RUNS, n
        exact, size = torch.zeros(2, *shape, dtype=torch.float64, device=self.world.device)
        for term in range(ranks):
            a = draw(self.gather.m + RUNS, columns, dtype, 1000 * term)[own].double()
            b = draw(columns, n, dtype, 1000 * term + 1 + term).double()
            exact += a @ b
            size += a.abs() @ b.abs()
        bound = error_bound(size, exact, k, dtype, dtype)
        return exact, bound + torch.finfo(dtype).eps * size  # each term may be rounded first

    def _check_sum(self, total: Tensor, run: int) -> Check:
        rows = slice(run, run + self.own)
        return compare(total, self.sum[rows], self.bound[rows])


def fused(
    ranks: int,
    products: str,
    shape: Shape,
    dtype: torch.dtype,
    device: str = "cuda",
    times: Timer = milliseconds,
) -> dict[str, Any]:
    """The views of `Fused` in a local world, milliseconds of the slowest rank: medians."""

    def measure() -> dict[str, Measured]:
        world = init()
        subject = Fused(world, shape, dtype, parts=products == "torch")
        return measured(subject, 2, 8, partial(barrier, world), times)

    streams = device == "cpu"
    with (
        sums_in_float32(),
        local_world(ranks, device, products=products, streams=streams) as local,
    ):
        found, checks = slowest(local.run(measure))
    return {
        "ranks": ranks,
        "products": products,
        "shape": dict(zip("mkn", shape, strict=True)),
        "times_ms": {name: 1e-3 * summarize(own).median for name, own in found.items()},
        "wrong": {name: check.wrong for name, check in checks.items()},
    }
