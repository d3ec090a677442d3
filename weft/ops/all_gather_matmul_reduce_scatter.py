"""All-gather + matmul + reduce-scatter as an operator: all ranks of a host multiply the gathered
rows, and the summed products return.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from weft.checks import name as dtype_name
from weft.kernels.weights import Weight
from weft.ops import arguments, dims, prologue, split_sizes
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator, Gradient, Gradients, Recorded
from weft.ops.options import Operands, workload
from weft.ops.records import AllGatherMatmulReduceScatter, Exchanged
from weft.schedules import all_gather_matmul_reduce_scatter as schedule
from weft.schedules.exchanges import Counts, ToAll
from weft.schedules.workload import Workload
from weft.world import World


def all_gather_matmul_reduce_scatter(
    a: Tensor,
    b: Weight,
    *,
    input_split_sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Multiply each row of `a` by the weights of all ranks of a host, and add the products up,
    collectively: on one host an all-gather of rows, their products by each rank's weight, and the
    reduce-scatter of these in one call. Ranks may have different numbers of rows.

    Of several hosts each rank gives each some of its rows. They cross to that host once, into
    memory that its ranks share, and each row returns once, as the sum over the ranks of that host.
    A row that all hosts are to multiply is given to each, and the caller adds up what returns.

    Products are added in the order of the ranks, in float32 or float64, and rounded once: the same
    bits in every run. A weight may be any function of rows (`weft.weight`), such as a rank's part
    of a feed-forward network, or its experts, which give zeros for tokens of other experts.

    A gradient flows to a, by the same operator. A weight that requires one is rejected:
    `all_gather_matmul` with `matmul_reduce_scatter` have gradients of weights.

    Args:
        a: (rows, K), of any float dtype; the rows for host 0, then those for host 1, …
        b: (K, N); equal N on all ranks.
        input_split_sizes: the number of rows for each host, which other ranks need not know. By
            default all ranks have as many rows, and give each host as many.
        out: contiguous (rows, N) for the rows of a, not overlapping an input.
        out_dtype: of the products and the result; by default that of a.
        algorithm: ``shared`` (rows are multiplied in the memory that a host's ranks share, as they
            arrive, and sums return while others are multiplied), ``gathered`` (each rank copies all
            rows of its host, one product, the sums) or ``auto``.
        chunk_rows: the most rows of a transfer; by default chosen by size.
        world: by default the world made by ``weft.init()``.
        timeout: seconds; by default the world's.

    Returns:
        (rows, N) of `out_dtype`: for each row of a the sum of its products, in the same place.

    Raises `ValueError` or `TypeError` for other arguments before anything is sent, and the errors
    of every collective call.

    Examples:
        >>> def multiplied_by_all_ranks():
        ...     rank = weft.init().rank
        ...     rows = torch.full((1 + rank, 1), 1.0 + rank)
        ...     return weft.all_gather_matmul_reduce_scatter(
        ...         rows, (10.0 ** rank) * torch.eye(1), input_split_sizes=[1 + rank]
        ...     )
        >>> with weft.local_world(2) as local:
        ...     [y.flatten().tolist() for y in local.run(multiplied_by_all_ranks)]
        [[11.0], [22.0, 22.0]]
    """
    sent = None if input_split_sizes is None else arguments.as_key(input_split_sizes)
    options = out_dtype, algorithm, chunk_rows, sent
    made, _ = prologue.call(OPERATOR, a, b, None, out, options, world, timeout)
    return made[0]


def exchange(
    world: World,
    operands: Operands,
    options: AllGatherMatmulReduceScatter,
    timeout: float | None,
) -> AllGatherMatmulReduceScatter:
    """The options with the rows that each rank gives to each host; collective."""
    a, sent = operands.a, options.input_split_sizes
    if sent is None or isinstance(sent, Exchanged):
        return options
    arguments.check_matrix(a, world)
    hosts = world.hosts.number
    numbers, _ = split_sizes.check(a.shape[0], sent, None, (hosts, hosts))
    name, direction = schedule.OPERATOR.name, ToAll(hosts)
    every = split_sizes.exchange(world, name, direction, numbers, None, timeout=timeout)
    return options._replace(input_split_sizes=every)


def check(world: World, operands: Operands, options: AllGatherMatmulReduceScatter) -> FusedCall:
    """A checked call: errors are raised here, before any row is sent."""
    a, (b,), (bias,), (out, *_) = operands
    arguments.check_matrix(a, world)
    if a.dim() != 2:
        raise ValueError(f"a must be a matrix (rows, K); got shape {tuple(a.shape)}")
    if bias is not None:
        raise ValueError("a sum of the products of several ranks has no bias: add it to the result")
    arguments.check_weight(a, b, world)
    dtype = arguments.check_out_dtype(a.dtype, options.out_dtype)
    rows, hosts, sizes = a.shape[0], world.hosts.number, options.input_split_sizes
    if isinstance(sizes, Exchanged):
        counts: Counts = sizes.counts
    elif rows % hosts:
        raise ValueError(
            f"{rows} rows do not divide evenly over {hosts} hosts: give input_split_sizes"
        )
    else:
        counts = ((rows // hosts,) * hosts,) * world.ranks
    result = arguments.result(out, (rows, b.shape[1]), dtype, [a, b], world)
    return HostRowsCall(world, options, operands, counts, result)


class HostRowsCall(FusedCall):
    """A checked call: the rows of a rank are given in parts to hosts."""

    def __init__(
        self,
        world: World,
        options: AllGatherMatmulReduceScatter,
        operands: Operands,
        counts: Counts,
        result: Tensor,
    ) -> None:
        a, (b,), _, _ = operands
        self.counts = counts
        largest = tuple(map(max, counts))
        name = schedule.OPERATOR.name
        super().__init__(world, options, workload(name, largest, operands, result.dtype))
        even = options.input_split_sizes is None
        self.rows = largest if even else [*chain(*counts)]
        self.weights, self.weight_names = (b,), (schedule.WEIGHT,)
        self.tensors, self.results = {"a": dims.to_front(a, 0), "out": result}, [result]
        self.request_fields = {"uneven": not even}

    @property
    def shared(self) -> Workload:
        return self.workload._replace(packed=True)

    @property
    def description(self) -> str:
        rows, dtype = [*map(sum, self.counts)], dtype_name(self.tensors["a"].dtype)
        return f"{self.workload.operator}({rows} rows x {self.columns} {dtype})"

    @property
    def work(self) -> int:
        return sum(map(sum, self.counts)) * max(1, self.workload.n)

    def overlapped(self) -> tuple[str, str]:
        if self.world.emulated_link:
            return "gathered", "rows pass an emulated link, so ranks copy them before products"
        return "shared", "ranks of a host multiply rows in the memory that they share"

    def chunk_rows(self, algorithm: str) -> int:
        return self.piece(max(self.workload.rows), self.pieces)


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank, which has `kept` rows, by definition, on one host."""
    return [torch.stack([a @ b for b in weights]).sum(0) for a in inputs]


def _fake(call: Recorded) -> list[Tensor]:
    a, (b,), _, options, _, _ = call
    return [a.new_empty(a.shape[0], b.shape[1], dtype=options.out_dtype or a.dtype)]


def _save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    a, (b,), biases, options, timeout, world = call
    if b.requires_grad:
        raise ValueError(
            "there is no gradient of a weight by which all_gather_matmul_reduce_scatter "
            "multiplies: use all_gather_matmul and matmul_reduce_scatter, or weft.moe, or pass "
            "b.detach()"
        )
    back = AllGatherMatmulReduceScatter(input_split_sizes=options.input_split_sizes)
    ctx.arguments = *back, timeout, world
    ctx.biases, ctx.dtype = len(biases), a.dtype
    ctx.save_for_backward(b)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """da = the sums of dy @ b^T over the ranks of the host."""
    dy = grads[0]
    assert dy is not None
    (b,) = ctx.saved_tensors
    (for_a,) = torch.ops.weft.all_gather_matmul_reduce_scatter(
        dy.to(ctx.dtype), [b.t()], [], *ctx.arguments
    )
    return for_a, [None], [None] * ctx.biases


OPERATOR = FusedOperator(
    schedule.OPERATOR,
    AllGatherMatmulReduceScatter,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(_save, _backward),
    exchange=exchange,
)
