"""All-gather + matmul as an operator: ``concatenation of all ranks' a @ b``, computed while the
rows arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.products import multiply
from weft.kernels.weights import Weight
from weft.ops import arguments, autograd, dims, prologue
from weft.ops.call import Selection
from weft.ops.fused import FusedCall
from weft.ops.operator import Exchange, FusedOperator, Gradient, Gradients, Pattern, Recorded
from weft.ops.options import Operands, kernel_of, workload
from weft.ops.records import AllGatherMatmul, MatmulReduceScatter
from weft.plan import Plan
from weft.schedules import all_gather_matmul as schedule
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import outputs
from weft.schedules.device_options import DeviceOptions
from weft.schedules.workload import Request, Variant, Workload
from weft.world import World

Optionals = Sequence[Tensor | None]


def all_gather_matmul(
    a: Tensor,
    b: Weight | Sequence[Weight],
    *,
    dim: int = 0,
    bias: Tensor | Optionals | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | Optionals | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    order: str | None = None,
    compress: str | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """Gather `a` from all ranks along a dimension and multiply by this rank's `b`, collectively.

    The result is that of `torch.distributed.all_gather_into_tensor` followed by `torch.matmul`
    (plus `bias`); it does not depend on the order in which rows arrive.

    Gradients flow to a, b and bias: that of a is the sum over ranks of their gradients times their
    b^T, computed by `matmul_reduce_scatter`; for the gradients of b the gathered a is kept from
    forward to backward. A call that is recorded, or compiled, multiplies by the original tensor of
    a packed weight.

    Args:
        a: this rank's shard; (rows, …, K), of at least two dimensions; float16, bfloat16, float32
            or float64; any strides. If it is symmetric (`World.empty`), the same tensor on all
            ranks, peers may read it in place; otherwise it is staged.
        b: (K, N) of a's dtype, any strides, or packed once by `weft.pack`. N may differ between
            ranks. A list of weights shares one gather and gives a list of results.
        dim: the dimension of a that is gathered. For the last one, a split of K, b has the rows of
            all ranks' columns; a is then gathered first and multiplied in one product, without
            overlap.
        bias: (N,), added to every row; a list where b is one.
        scale_a: for float8 inputs (float8_e4m3fn or float8_e5m2, both a and b): the scale of a in
            float32, one for all of it or one for each row, (…, 1). Products are as by
            ``torch._scaled_mm``, in float32; there is no gradient.
        scale_b: the scale of b, one for all of it or one for each column, (1, N); a list where b is
            one.
        out: contiguous, of the shape of the result, not overlapping an input; a list where b is
            one.
        out_dtype: a's dtype (default) or float32; for float8 bfloat16 (default), float16 or
            float32.
        return_gathered: also return the gathered a, a new tensor.
        shard_rows: the size of the gathered dimension of a on every rank, if they differ; zero is
            allowed.
        algorithm: ``direct`` (peers' rows are read in place), ``pull``, ``push``, ``ring``,
            ``sequential`` (gather, then one product) or ``auto``; `explain` names the selection of
            auto.
        chunk_rows: the most rows (of a as a matrix of K columns) per transfer of pull, push and
            ring; other algorithms ignore it.
        order: of a push, which needs ``algorithm="push"``: ``peer`` (default), all rows to one peer
            after the other, or ``interleaved``, the first piece to every peer, then the second ….
        compress: ``int8``: rows travel between hosts as blocks of 8-bit numbers with a common power
            of two (MXINT8), in 33/64 of the bytes of bfloat16. Each number of a that comes from
            another host differs by at most 1/128 of the largest of the 32 in its block. Ranks of
            one host exchange rows as they are. For float16, bfloat16 and float32.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take; by default the world's.

    Returns:
        a's shape with the gathered dimension of all ranks together and N in place of K, of
        `out_dtype`; a list of these for a list of weights; with `return_gathered` a pair.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent.
        MismatchError, PeerLost, PeerTimeout: the ranks do not make the same call, or one is lost or
            late; the world is closed.

    Examples:
        >>> def rows_of_all_ranks_times_b():
        ...     a = torch.full((1, 2), float(weft.init().rank))
        ...     return weft.all_gather_matmul(a, torch.eye(2))
        >>> with weft.local_world(2) as local:
        ...     local.run(rows_of_all_ranks_times_b)[0]
        tensor([[0., 0.],
                [1., 1.]])
    """
    shards = None if shard_rows is None else arguments.as_key(shard_rows)
    options = dim, out_dtype, return_gathered, shards, algorithm, chunk_rows, order, compress
    made, _ = prologue.call(OPERATOR, a, b, bias, out, options, world, timeout, (scale_a, scale_b))
    several = isinstance(b, (list, tuple))
    results = made[: len(b)] if several else made[0]  # type: ignore[arg-type]
    return (results, made[-1]) if return_gathered else results


def check(world: World, operands: Operands, options: AllGatherMatmul) -> FusedCall:
    """A checked call, which computes the results, and the gathered a if `options.keep`."""
    a, weights, biases, outs = operands
    arguments.check_matrix(a, world)
    dim = dims.normal(options.dim, a.dim())
    split = dim == a.dim() - 1
    shards = arguments.check_shard_rows(a.shape[dim], options.shard_rows, world)
    if not weights:
        raise ValueError("b is an empty list: give at least one weight")
    if split and (beside := kernel_of(weights[0]).companions):
        raise ValueError(
            f"rows that have {' and '.join(beside)} beside them, as those of float8, cannot be "
            "gathered along K, their last dimension: choose another dim"
        )
    for b, bias in zip(weights, biases, strict=True):
        arguments.check_weight(a, b, world, sum(shards) if split else None)
        arguments.check_bias(bias, b.shape[1], world)
    if len(kernels := {kernel_of(b).name for b in weights}) > 1:
        raise ValueError(
            f"the weights of one call have one kernel; these have {' and '.join(sorted(kernels))}"
        )
    out_dtype = arguments.check_out_dtype(a.dtype, options.out_dtype)
    shape = dims.resized(a.shape, dim, sum(shards))
    results: list[Tensor] = []
    for out, b in zip(outs, weights, strict=True):
        results.append(
            arguments.result(
                out, (*shape[:-1], b.shape[1]), out_dtype, [a, *weights, *biases, *results], world
            )
        )
    options = options._replace(dim=dim)
    return (_ColumnsCall if split else _RowsCall)(world, options, operands, shards, results)


class _GatherCall(FusedCall):
    """The common part of gathers of rows and of columns."""

    @property
    def shared(self) -> Workload:
        workload = self.workload
        return workload._replace(n=0, out_dtype=workload.dtype, packed=True, symmetric=True)

    def chunk_rows(self, algorithm: str) -> int:
        return self.piece(max(self.workload.rows), self.pieces)

    def describe(self, variant: Variant) -> str:
        reading = variant.algorithm in ("direct", "pull")
        if self.workload.symmetric:
            return f"; a is symmetric{' and read in place' if reading else ''}"
        return f"; a is {'staged' if reading else 'sent from its own memory'}"


class _RowsCall(_GatherCall):
    """Any dimension but the last is gathered: rows are multiplied as they arrive."""

    def __init__(
        self,
        world: World,
        options: AllGatherMatmul,
        operands: Operands,
        shards: Sequence[int],
        results: list[Tensor],
    ) -> None:
        a, weights, biases, _ = operands
        dim, inner = options.dim, dims.inner(a.shape, options.dim)
        matrix, rows = dims.to_front(a, dim), tuple(shard * inner for shard in shards)
        symmetric = world.is_symmetric(matrix)
        super().__init__(
            world,
            options,
            workload("all_gather_matmul", rows, operands, results[0].dtype, symmetric),
        )
        self.weights, self.biases = weights, biases
        self.request_fields = {"gathered": options.keep, "weights": len(weights)}
        names, self.results = [*outputs(len(weights))], [*results]
        if options.keep:
            names.append("gathered")
            self.results.append(a.new_empty(dims.resized(a.shape, dim, sum(shards))))
        self.fronts = [dims.front(output, dim) for output in self.results]
        written = {
            name: front.view(sum(rows), front.shape[-1])
            for name, front in zip(names, self.fronts, strict=True)
        }
        self.tensors = {"a": matrix, **written}

    def overlapped(self) -> tuple[str, str]:
        world = self.world
        if world.emulated_link:
            return (
                "push",
                "the emulated link is slower than memory, so rows are moved while others are "
                "multiplied",
            )
        if world.hosts.several:
            return (
                "push",
                "rows are sent to each other host once, and are multiplied as they arrive",
            )
        if world.stream_ordered:
            return "push", "a stream moves rows while others are multiplied"
        return "direct", "peers' rows can be read in place at the speed of own memory"

    def finish(self) -> list[Tensor]:
        for front, output in zip(self.fronts, self.results, strict=True):
            dims.back(front, self.options.dim, output)
        return self.results


_GATHERED_BY = {"direct": "pull", "sequential": "push"}
"""The algorithms of the gather where all columns are multiplied in one product."""


class _ColumnsCall(_GatherCall):
    """The last dimension is gathered, a split of K: a is gathered first, as rows of its transpose,
    then multiplied in one product.
    """

    tunable = False

    def __init__(
        self,
        world: World,
        options: AllGatherMatmul,
        operands: Operands,
        shards: Sequence[int],
        results: list[Tensor],
    ) -> None:
        super().__init__(
            world,
            options,
            workload(
                "all_gather_matmul", tuple(shards), operands, results[0].dtype, symmetric=False
            ),
        )
        self.planner, self.operands, self.results = _gather_columns, operands, results
        own = operands.a.flatten(0, -2).t().contiguous()
        self.tensors = {"a": own, "gathered": own.new_empty(sum(shards), own.shape[1])}

    def rule(self) -> Selection:
        algorithm = self.algorithm
        self.check_algorithm(algorithm)
        reading, why = self.overlapped()
        algorithm = reading if algorithm == "auto" else algorithm
        return Selection(self.variant(_GATHERED_BY.get(algorithm, algorithm)), why)

    def honours(self, algorithm: str, options: DeviceOptions | None = None) -> bool:
        return super().honours(_GATHERED_BY.get(algorithm, algorithm), options)

    def overlapped(self) -> tuple[str, str]:
        why = (
            "the last dimension is gathered, a split of K: no product can begin before all columns "
            "have arrived"
        )
        push = self.world.hosts.several or not self.honours("pull")
        return "push" if push else "pull", why

    def finish(self) -> list[Tensor]:
        a, weights, biases, _ = self.operands
        columns = self.tensors["gathered"].t().contiguous()
        for result, b, bias in zip(self.results, weights, biases, strict=True):
            multiply(columns, b, result.view(len(columns), b.shape[1]), bias)
        gathered = [columns.view(*a.shape[:-1], columns.shape[1])] if self.options.keep else []
        return [*self.results, *gathered]


def _gather_columns(request: Request) -> Plan:
    return all_gather(
        request.ranks,
        request.pieces,
        request.algorithm,
        order=request.order,
        links=request.links,
        hosts=request.hosts,
    )


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank: all rows, times its weight."""
    gathered = torch.cat([*inputs])
    return [gathered @ b for b in weights]


def _fake(call: Recorded) -> list[Tensor]:
    a, weights, _, options, _, (_, _, ranks) = call
    dim = dims.normal(options.dim, a.dim())
    shards = options.shard_rows
    shape = dims.resized(a.shape, dim, a.shape[dim] * ranks if shards is None else sum(shards))
    dtype = options.out_dtype or a.dtype
    results = [a.new_empty(*shape[:-1], b.shape[1], dtype=dtype) for b in weights]
    return [*results, a.new_empty(shape)] if options.keep else results


def _save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    a, weights, biases, options, timeout, world = call
    dim = dims.normal(options.dim, a.dim())
    parts = options.shard_rows or [a.shape[dim]] * world[2]
    backward = MatmulReduceScatter(dim=dim, shard_rows=parts, compress=options.compress)
    ctx.arguments = *backward, timeout, world
    ctx.for_a, ctx.for_weights = a.requires_grad, [b.requires_grad for b in weights]
    ctx.for_biases = [bias.requires_grad for bias in biases]
    ctx.dtype, ctx.weights, ctx.shape = a.dtype, len(weights), results[0].shape
    ctx.set_materialize_grads(False)  # zeros for the gathered a would be multiplied
    if any(ctx.for_weights) and not options.keep:
        raise ValueError("the gradient of a weight needs the gathered a: pass keep=True")
    ctx.save_for_backward(*weights, *(results[-1:] if any(ctx.for_weights) else []))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """da = reduce_scatter(dy @ b^T), db = gathered^T @ dy; the gradients of several weights are
    summed by one product.
    """
    saved = ctx.saved_tensors  # once, as a checkpoint unpacks each tensor once
    weights, gathered = saved[: ctx.weights], saved[ctx.weights :]
    dys = [None if grad is None else grad.to(ctx.dtype) for grad in grads]
    for_a = None
    if ctx.for_a:
        pairs = [(dy, b.t()) for dy, b in zip(dys, weights, strict=False) if dy is not None]
        if len(dys) > ctx.weights and dys[-1] is not None:  # the gradient of the gathered a itself
            pairs.append(
                (dys[-1], torch.eye(dys[-1].shape[-1], dtype=ctx.dtype, device=dys[-1].device))
            )
        if not pairs:  # peers make the call all the same
            pairs.append((weights[0].new_zeros(ctx.shape), weights[0].t()))
        dy, b = (
            (torch.cat([pair[0] for pair in pairs], -1), torch.cat([pair[1] for pair in pairs]))
            if len(pairs) > 1
            else pairs[0]
        )
        (for_a,) = torch.ops.weft.matmul_reduce_scatter(dy, [b], [], *ctx.arguments)
    for_weights = [
        autograd.weight_gradient(autograd.rows(gathered[0]), autograd.rows(dy))
        if wanted and dy is not None
        else None
        for wanted, dy in zip(ctx.for_weights, dys, strict=False)
    ]
    for_biases = [
        autograd.rows(dy).sum(0) if wanted and dy is not None else None
        for wanted, dy in zip(ctx.for_biases, dys, strict=False)
    ]
    return for_a, for_weights, for_biases


OPERATOR = FusedOperator(
    schedule.OPERATOR,
    AllGatherMatmul,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(_save, _backward),
    pattern=Pattern(
        "all_gather_into_tensor",
        "after",
        lambda rows, ranks, group: Exchange(rows, group, ranks),
        any_dim=True,
        keeps=True,
    ),
)
