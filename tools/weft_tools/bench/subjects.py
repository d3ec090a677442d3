"""The subjects of benchmarks: the tensors of each fused operator, and the steps from the cascade to
all-gather + matmul.

An operator without its own subject is compared with its definition, and has no baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engines import engine
from weft.measure.timing import Stopwatch
from weft.ops.operator import find
from weft.plan import Plan
from weft.plan.binding import bind
from weft.schedules.lanes import products_alone
from weft.schedules.peers import one_rank_per_host
from weft.schedules.workload import Variant, Workload
from weft.world import World
from weft_tools.bench.ablation import STEPS
from weft_tools.bench.alone import of_all_ranks
from weft_tools.bench.baselines import products
from weft_tools.bench.budget import Budget
from weft_tools.bench.fused import WITHOUT_GATHERED, Subject
from weft_tools.bench.settings.fused import FusedSettings
from weft_tools.bench.verification import Check, Definition, Problem, Sums
from weft_tools.bench.views import View

Whole = tuple[Callable[[], object], Tensor, Callable[[int], Check]]
"""A call for the work of all ranks, its result, and the check of that."""


class GatheredRows(Subject):
    """The gather of shards in symmetric memory, and the product of all rows."""

    def __init__(
        self, settings: FusedSettings, world: World, stopwatch: Stopwatch, budget: Budget
    ) -> None:
        super().__init__(settings, world, stopwatch, budget)
        in_place = self.choice.variant.algorithm in self.call.operator.moves_nothing
        self.notes = (
            *(
                [
                    f"communicate is a {self.plan().algorithm}, since "
                    f"{self.choice.variant.algorithm} reads the rows of peers in place."
                ]
                if in_place
                else []
            ),
            "Shards are in symmetric memory.",
        )
        if settings.return_gathered:
            call = super().operator(self.algorithm, settings.chunk_rows, settings.order)
            self.views[WITHOUT_GATHERED] = super().view(call)
        if settings.ablate:
            self.ablation = {
                "cascade": self.call.operator.baseline,
                **{name: name for name in STEPS},
            }
            plan = self._plan_in_symmetric_memory()
            steps = {name: partial(self._execute, rewrite(plan)) for name, rewrite in STEPS.items()}
            self.views |= {name: self.view(step) for name, step in steps.items()}

    def operator(
        self, algorithm: str, chunk_rows: int | None, order: str | None = None, **more: Any
    ) -> Callable[[], object]:
        """The call of the operator; `gathered` keeps the gathered a, if it is returned."""
        keep = self.settings.return_gathered
        call = super().operator(algorithm, chunk_rows, order, return_gathered=keep, **more)

        def kept() -> None:
            _, self.gathered = call()  # type: ignore[misc]

        return kept if keep else call

    def view(self, call: Callable[[], object]) -> View:
        view = super().view(call)
        return view._replace(check=self._check_both) if self.settings.return_gathered else view

    def tensors(self) -> dict[str, Tensor]:
        found = super().tensors()
        return found | {"gathered": self.gathered} if self.settings.return_gathered else found

    def _check_both(self, run: int) -> Check:
        """The check of the product and of the gathered a."""
        return self.check(run).plus(self.problem.check_rows(self.gathered, run).wrong)

    def prepare(self) -> None:
        world, (m, k, n) = self.world, self.settings.shape
        dtypes, seed = (self.dtype, self.out_dtype), self.settings.seed
        where: dict[str, Any] = {"rank": world.rank, "device": world.device}
        if self.settings.bias:
            where["bias_seed"] = seed + 500 + world.rank
        self.problem = Problem(m, k, n, *dtypes, seed=seed, **where)
        self.a = world.empty(max(self.rows), k, dtype=self.dtype)[: self.rows[world.rank]]
        self.moved = {"a": self.a, "gathered": world.empty(m, k, dtype=self.dtype)}
        self.x = self.empty(m, k, dtype=self.dtype)
        self.product, self.out = self.empty(m, n, dtype=self.out_dtype), self.result([m], n)
        self.check = partial(self.problem.check_product, self.out)
        self.check_baseline = self.problem.check_product_of_baseline
        self.check_moved = partial(self.problem.check_rows, self.moved["gathered"])
        self.shares = {"shard_rows": self.rows}
        self.one_process = self._multiply_by_all_weights

    def renew(self, run: int) -> None:
        start = sum(self.rows[: self.world.rank])
        self.x.copy_(self.problem.rows(run))
        self.a.copy_(self.x[start : start + len(self.a)])

    def _multiply_by_all_weights(self) -> Whole:
        rank, (m, _, n) = self.world.rank, self.settings.shape
        weights = of_all_ranks(self.problem.weight, 1)
        own = self.problem.bias
        bias = None if own is None else of_all_ranks(own, 0)
        out = self.empty(m, n * self.world.ranks, dtype=self.out_dtype)

        def check(run: int) -> Check:
            """Each rank checks the columns of its weight."""
            dist.broadcast(out, 0)
            return self.problem.check_product_of_baseline(out[:, n * rank : n * (rank + 1)], run)

        return products([(self.x, out)], weights, bias), out, check

    def _plan_in_symmetric_memory(self) -> Plan:
        """The operator's plan, by the algorithm of its communication."""
        variant = self.call.variant(self.plan().algorithm)
        request = self.call.operator.request(
            self.call.workload, variant, hosts=self.world.hosts.if_several
        )
        keep = self.settings.return_gathered
        return self.call.operator.plan(request._replace(symmetric=True, gathered=keep))

    def _execute(self, plan: Plan) -> None:
        tensors = {"a": self.a, "out": self.out}
        if self.settings.return_gathered:  # a new tensor, as the operator returns
            self.gathered = tensors["gathered"] = torch.empty_like(self.x)
        bias = self.problem.bias
        biases = None if bias is None else {"out": bias}
        program = engine(self.world).program(plan, tensors, self.rows)
        program.run(tensors, self.rows, {"out": self.weight}, biases)


class SummedProducts(Subject):
    """Products and their sum over all ranks; communication alone sums other rows, in symmetric
    memory.
    """

    scatters = False
    problem: Sums
    notes = (
        "communicate is the sum alone, of rows in symmetric memory.",
        "K is that of each rank.",
    )

    def prepare(self) -> None:
        world, (m, k, n), product = self.world, self.settings.shape, self.dtypes["partial"]
        start = sum(self.rows[: world.rank]) if self.scatters else 0
        host_partial = world.hosts.several and not one_rank_per_host(world.hosts)
        dtypes, seed = (self.dtype, self.out_dtype, product), self.settings.seed
        where: dict[str, Any] = {"rank": world.rank, "device": world.device}
        if self.settings.bias:
            where["bias_seed"] = seed + 500
        self.problem = Sums(m, k, n, *dtypes, seed=seed, host_partial=host_partial, **where)
        self.a = self.x = self.empty(m, k, dtype=self.dtype)
        self.product = self.empty(m, n, dtype=self.out_dtype)
        self.out = self.result(self.rows if self.scatters else [m], n)
        self.moved = {"partial": world.empty(m, n, dtype=product), "out": self.out}
        self.check = partial(self.problem.check_product_sum, self.out, start=start)
        self.check_baseline = partial(self.problem.check_baseline, start=start)
        self.check_moved = partial(self.problem.check_sum, self.out, start=start)
        self.shares = {"shard_rows": self.rows} if self.scatters else {}
        self.one_process = self._multiply_all_rows
        self.inputs = [
            (self.a, self.problem.all_rows),
            (self.moved["partial"], self.problem.all_products),
        ]

    def renew(self, run: int) -> None:
        for tensor, stream in self.inputs:
            tensor.copy_(stream[run : run + len(tensor)])

    def _multiply_all_rows(self) -> Whole:
        rows, weight = of_all_ranks(self.problem.all_rows, 1), of_all_ranks(self.problem.weight, 0)
        x = rows[: self.settings.shape.m].clone()
        self.inputs.append((x, rows))
        out = self.empty(len(x), weight.shape[1], dtype=self.out_dtype)
        check = partial(self.problem.check_whole, out)
        call = products([(x, out)], weight, self.problem.bias)
        return call, out, check if self.world.rank == 0 else _unchecked


class ScatteredProducts(SummedProducts):
    """Products and their sum, scattered over the ranks."""

    scatters = True


class Defined(Subject):
    """Any operator: its results are compared with its definition.

    The definition has no results of the communication alone, so that is timed without a check.
    """

    problem: Definition
    compared = biased = False
    notes = (
        "communicate is the operator without its products, and is not verified.",
        "K is that of each rank.",
    )

    def prepare(self) -> None:
        world, (_, k, n), record = self.world, self.settings.shape, find(self.settings.operator)
        operator, rank = record.schedule, world.rank
        workload = Workload(
            operator.name,
            tuple(self.rows),
            k,
            n,
            self.settings.dtype,
            self.settings.result_dtype,
        )
        request = operator.request(
            workload, Variant(operator.baseline), hosts=world.hosts.if_several
        )
        plan = operator.plan(request)
        input_rows = bind(plan, self.rows).buffers["a"].rows
        products = bind(products_alone(plan, operator.exchanges), self.rows)
        product_rows = products.buffers["x"].rows[rank]
        result_rows = [operator.result_rows(self.rows, rank) for rank in range(world.ranks)]
        self.problem = Definition(
            record.reference,
            input_rows,
            product_rows,
            result_rows,
            (k, n),
            self.dtype,
            self.out_dtype,
            seed=self.settings.seed,
            rank=rank,
            device=world.device,
        )
        self.a = world.empty(max(input_rows), k, dtype=self.dtype)[: input_rows[rank]]
        self.x = self.empty(product_rows, k, dtype=self.dtype)
        self.product = self.empty(product_rows, n, dtype=self.out_dtype)
        self.out = self.result(result_rows, n)
        communication = bind(operator.communicate(request), self.rows)
        formats = operator.buffers(workload)
        self.moved = {
            name: world.empty(max(buffer.rows), formats[name].columns, dtype=self.dtypes[name])[
                : buffer.rows[rank]
            ].zero_()
            for role in ("input", "output")
            for name, buffer in communication.buffers.items()
            if buffer.role == role
        }
        self.check_baseline = self.problem.check_result
        self.check = partial(self.check_baseline, self.out)
        self.check_moved = _unchecked
        self.shares = {"shard_rows": self.rows}

    def renew(self, run: int) -> None:
        self.a.copy_(self.problem.given(self.world.rank, run))
        self.x.copy_(self.problem.rows(run))


class Exchanged(Defined):
    """Rows, or products, that ranks exchange in equal parts."""

    def prepare(self) -> None:
        super().prepare()
        even = len({*self.rows}) == 1
        self.shares = {} if even else {"input_split_sizes": self.rows}


class GatheredAndScattered(Defined):
    """Rows of each rank, of any number, that the ranks of one host multiply."""

    def prepare(self) -> None:
        if self.world.hosts.several:
            raise ValueError(
                f"{self.settings.operator} gives rows to one of several hosts, so it is measured "
                "on one: weft bench moe measures it on several"
            )
        super().prepare()
        even = len({*self.rows}) == 1
        self.shares = {} if even else {"input_split_sizes": [self.rows[self.world.rank]]}


def _unchecked(run: int) -> Check:
    return Check(0)


_SUBJECTS: dict[str, type[Subject]] = {
    "all_gather_matmul": GatheredRows,
    "matmul_reduce_scatter": ScatteredProducts,
    "matmul_all_reduce": SummedProducts,
    "all_to_all_matmul": Exchanged,
    "matmul_all_to_all": Exchanged,
    "all_to_all_matmul_all_to_all": Exchanged,
    "all_gather_matmul_reduce_scatter": GatheredAndScattered,
}


def subject(operator: str) -> type[Subject]:
    """The subject of a fused operator; any other is compared with its definition."""
    return _SUBJECTS.get(operator, Defined)
